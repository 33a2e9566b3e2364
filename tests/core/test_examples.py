"""The examples run, and show what they say they show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.functional import DEVICES

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def char_lm() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "char_lm.py"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_character_model_learns_as_torchs(char_lm: dict[str, Any], device: str) -> None:
    text, g = char_lm["read_text"](), torch.Generator().manual_seed(0)
    start = char_lm["initial"](len(text.bytes), g)
    ours, theirs = ({k: v.to(device, copy=True).requires_grad_() for k, v in start.items()} for _ in range(2))
    losses = list(char_lm["train"](text, ours, theirs, 12, g))
    limit = char_lm["allowed"](torch.device(device), 12)
    assert limit < 2e-3  # the products may be in tf32
    for mine, torchs in losses:
        assert mine == pytest.approx(torchs, rel=limit)
    assert losses[-1][0] < losses[0][0] - 0.5
    assert all(not torch.equal(p.detach().cpu(), start[name]) for name, p in ours.items())
    short = text._replace(held_out=text.held_out[:300])
    device_type = torch.device(device)
    mine, torchs = (char_lm["bits_per_byte"](p, short, device_type) for p in (ours, theirs))
    assert mine == pytest.approx(torchs, rel=limit)
    assert 2 < mine < 6


def test_the_text_is_whole(char_lm: dict[str, Any]) -> None:
    text = char_lm["read_text"]()
    assert len(text.training) > 100_000
    assert len(text.held_out) == 10_000
    assert text.bytes.min() == 1


def test_the_command_says_how_far_from_torch(char_lm: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert char_lm["main"](["--steps", "3", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert re.search(r"host time of a step: triplan \d+ us, torch \d+ us", out)
    assert "triplan 4." in out
