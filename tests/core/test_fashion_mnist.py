"""The training on Fashion-MNIST, on images drawn here: it learns as torch does, gives its bits again, and reads IDX."""

from __future__ import annotations

import gzip
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch
from cases.functional import DEVICES
from rich.console import Console

import triplan as tp
from triplan.cli import fashion_mnist as fm, main

EXAMPLE = Path(__file__).parents[2] / "examples" / "fashion_mnist.py"


def write(path: Path, values: torch.Tensor) -> None:
    shape = b"".join(n.to_bytes(4, "big") for n in values.shape)
    data = bytes([0, 0, 8, values.dim()]) + shape + values.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bright square for each class, in noise; the test images are not compressed."""
    found, g = tmp_path_factory.mktemp("fashion"), torch.Generator().manual_seed(0)
    for part, n, suffix in (("train", 60, ".gz"), ("t10k", 20, "")):
        labels = torch.arange(n) % 10
        images = torch.randint(0, 90, (n, 28, 28), generator=g)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[label // 5 * 14 : label // 5 * 14 + 10, label % 5 * 5 : label % 5 * 5 + 5] += 160
        write(found / f"{part}-images-idx3-ubyte{suffix}", images.to(torch.uint8))
        write(found / f"{part}-labels-idx1-ubyte{suffix}", labels.to(torch.uint8))
    return found


def test_losses_are_torchs_where_nothing_is_dropped(folder: Path) -> None:
    images = fm.Images.load(folder, "train", torch.device("cpu"), 30)
    runs = [fm.Training.of(name, torch.device("cpu"), 6, 0, dropout=0.0) for name in ("triplan", "torch")]
    start = [{k: v.clone() for k, v in run.model.state_dict().items()} for run in runs]
    assert all(torch.equal(v, start[1][k]) for k, v in start[0].items())
    for run in runs:
        for order in fm.orders(30, 2, torch.device("cpu"), 0):
            run.epoch(images, order, 10, lambda: None)
    # Each step's loss depends on rounding errors of the steps before it; torch's own differ so between versions.
    torch.testing.assert_close(runs[0].losses, runs[1].losses, rtol=2e-3, atol=0)
    assert runs[0].losses[-1] < runs[0].losses[0] - 0.5
    confusion = runs[0].confusion(images, 13)
    predicted = torch.cat([runs[0].model(pixels).argmax(1) for pixels in images.pixels.split(13)])
    assert torch.equal(confusion, torch.bincount(images.labels * 10 + predicted, minlength=100).reshape(10, 10))
    assert fm.accuracy(confusion) == (predicted == images.labels).double().mean()


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_training_gives_the_same_bits(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[bool, str]:
        console = Console(file=io.StringIO(), width=160)
        # On a GPU three steps, then one captured, and its replay; on the CPU all steps are alike.
        epochs, images = (2, 60) if device == "cuda" else (1, 40)
        ok = fm.run(console, folder, device=device, epochs=epochs, batch=20, images=images, alone=True, twice=True)
        return ok, console.file.getvalue()  # type: ignore[attr-defined]

    ok, text = trained()
    assert ok
    assert "every loss and parameter equal" in text
    kept, seeds = fm.Training.of, iter((0, 1))
    monkeypatch.setattr(
        fm.Training, "of", lambda name, where, steps, _, **how: kept(name, where, steps, next(seeds), **how)
    )
    ok, text = trained()
    assert not ok
    assert "NOT equal" in text


def test_the_example_draws_what_it_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "new" / "run.png"
    sizes = ("--epochs", "1", "--batch", "20", "--images", "40", "--device", "cpu")
    monkeypatch.setattr(sys, "argv", ["", "--data", str(folder), *sizes, "--out", str(picture)])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "40 images to train on, 6 to test with" in out
    assert "ankle boot" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_data_says_where_it_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--train", "--data", str(tmp_path), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "apt install dataset-fashion-mnist" in said
    assert "--data" in said


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(tp.Unsupported, match=device):
        fm.run(Console(file=io.StringIO()), folder, device=device)


GOOD = bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])


@pytest.mark.parametrize(
    "data", [b"", GOOD[:3], GOOD[:6], GOOD[:-1], GOOD + b"1", b"\x01" + GOOD[1:], GOOD[:2] + b"\x0d" + GOOD[3:]]
)
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(GOOD)
    assert fm.read_idx(tmp_path, "it").tolist() == [7, 9]
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(tp.InvalidProblem, match="IDX"):
        fm.read_idx(tmp_path, "it")
    (tmp_path / "it.gz").write_bytes(gzip.compress(GOOD)[:-9])
    with pytest.raises(tp.InvalidProblem, match=r"it\.gz"):
        fm.read_idx(tmp_path, "it")
