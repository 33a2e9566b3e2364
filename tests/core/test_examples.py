"""The examples run, and show what they say they show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.functional import DEVICES
from cases.optim import Lion

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def char_lm() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "char_lm.py"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Lion", "Muon"])
def test_a_character_model_learns_as_torchs(char_lm: dict[str, Any], optimizer: str, device: str) -> None:
    text, g = char_lm["read_text"](), torch.Generator().manual_seed(0)
    start = char_lm["initial"](len(text.bytes), g)
    peer = SimpleNamespace(Lion=Lion) if optimizer == "Lion" else torch.optim
    trained = char_lm["models"](start, torch.device(device), optimizer, peer)
    losses = list(char_lm["train"](text, trained, 6, g))
    assert losses[-1][0] < losses[0][0] - 0.1
    assert all(not torch.equal(p.detach().cpu(), start[name]) for name, p in trained[0].parameters.items())
    short = text._replace(held_out=text.held_out[:300])
    losses.append([char_lm["bits_per_byte"](m.parameters, short, torch.device(device)) for m in trained])
    assert 2 < losses[-1][0] < 7
    farthest, limit = char_lm["differences"](losses)
    assert farthest <= limit < (2e-2 if optimizer == "Muon" else 2e-3)  # of bf16; the products may be in tf32


def test_a_rate_of_one_percent_more_is_told_from_rounding(char_lm: dict[str, Any]) -> None:
    text, g = char_lm["read_text"](), torch.Generator().manual_seed(0)
    trained = char_lm["models"](char_lm["initial"](len(text.bytes), g), torch.device("cpu"), "AdamW")
    trained[0].optimizers[0].param_groups[0]["lr"] *= 1.01
    farthest, limit = char_lm["differences"](list(char_lm["train"](text, trained, 3, g)))
    assert farthest > limit


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
