"""The demo: what it shows is computed, its parts agree with numpy, and it reports a broken guarantee."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from triplan.cli import demo
from triplan.cli.app import app


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part on this machine: the interpreter and the compiler have tests of their own."""
    monkeypatch.setattr(demo, "_interpreter", lambda console: True)
    monkeypatch.setattr(demo, "_compiled", lambda *args: None)


def shown(ok: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    assert demo.run(console) is ok
    return out.getvalue()


def test_demo_runs_and_every_guarantee_holds() -> None:
    out = shown(ok=True)
    assert "Every guarantee held: yes" in out
    assert "Every batch equal to torch's own indexing: yes" in out
    for part in ("index_select/", "gather/", "index_add/", "Plan cache:", "registers", "█"):
        assert part in out


@pytest.mark.usefixtures("brief")
def test_demo_reports_sums_that_leave_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo.class_sums

    def wrong(*args: object) -> torch.Tensor:
        out = honest(*args)  # type: ignore[arg-type]
        out[3, 21] += 1000.0
        return out

    monkeypatch.setattr(demo, "class_sums", wrong)
    assert "Every guarantee held: no" in shown(ok=False)


@pytest.mark.usefixtures("brief")
def test_demo_reports_bits_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = demo.class_sums, iter(range(10**6))

    def unsteady(*args: object) -> torch.Tensor:
        out = honest(*args)  # type: ignore[arg-type]
        if next(calls) % 2:
            out[3, 21] = torch.nextafter(out[3, 21], torch.tensor(np.inf, device=out.device))
        return out

    monkeypatch.setattr(demo, "class_sums", unsteady)
    out = shown(ok=False)
    assert "2 bit patterns" in out


def test_oracle_is_the_sum_by_class() -> None:
    digits = demo.Digits.load("cpu")
    sums, terms = digits.oracle()
    for c in range(demo.CLASSES):
        images = digits.images[digits.labels == c].double().numpy()
        np.testing.assert_allclose(sums[c], images.sum(0), atol=1e-9)
        np.testing.assert_allclose(terms[c], np.abs(images).sum(0), atol=1e-9)


def test_images_are_such_that_order_shows() -> None:
    """The demo would prove nothing on images whose sums are exact in any order."""
    images = demo.Digits.load("cpu").images.numpy()
    assert not np.array_equal(sum(images, np.zeros(64, np.float32)), sum(images[::-1], np.zeros(64, np.float32)))


@pytest.mark.interpret
def test_the_interpreted_part_runs_a_triton_kernel() -> None:
    """The demo calls this in a process of its own, as it does above."""
    result = demo.interpreted()
    assert result["backend"] == "triton"
    assert result["patterns"] == 1
    assert result["share"] <= 1


@pytest.mark.interpret
def test_demo_refuses_interpreter_mode_in_one_line() -> None:
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "TRITON_INTERPRET" in done.stderr
