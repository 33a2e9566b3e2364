"""What a decoder does beside sampling: adjusted logits, log-probabilities of tokens, tokens of a draft."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import triplan.functional as F  # noqa: N812

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: The tests of a distribution are of fixed seeds, at which they hold. This is how often others would fail.
FALSE_ALARM = 1e-6


def packed(allowed: Tensor) -> Tensor:
    """Bit i % 32 of word i // 32 is allowed[:, i]."""
    rows, n = allowed.shape
    bits = torch.zeros(rows, -(-n // 32) * 32, dtype=torch.int64)
    bits[:, :n] = allowed
    words = (bits.view(rows, -1, 32) << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def adjusted(x: Tensor, given: dict[str, Any], allowed: Tensor | None) -> Tensor:
    """The definition, token by token, in Python's floats."""
    out = x.double().clone()
    for r in range(x.shape[0]):

        def of(name: str, default: float, r: int = r) -> float:
            value = given.get(name, default)
            return float(value[r]) if isinstance(value, Tensor) else value

        for i in range(x.shape[1]):
            bias = given.get("bias")
            value = float(x[r, i]) + (0 if bias is None else float(bias[i] if bias.dim() == 1 else bias[r, i]))
            count = int(given["counts"][r, i]) if "counts" in given else 0
            if count > 0 or ("prompt" in given and given["prompt"][r, i]):
                penalty = of("repetition_penalty", 1.0)
                value = value / penalty if value > 0 else value * penalty
            value -= of("frequency_penalty", 0.0) * count + of("presence_penalty", 0.0) * (count > 0)
            out[r, i] = value if allowed is None or allowed[r, i] else -math.inf
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [7, 64, 70])
@pytest.mark.parametrize(
    "names",
    [
        ("bias", "counts", "prompt", "repetition_penalty", "frequency_penalty", "presence_penalty", "words"),
        ("counts", "repetition_penalty", "allowed"),
        ("prompt", "repetition_penalty"),
        ("counts", "presence_penalty", "words"),
        ("words",),
        ("counts", "prompt"),
    ],
    ids="-".join,
)
def test_logits_are_adjusted_as_defined(names: tuple[str, ...], n: int, device: str) -> None:
    g = torch.Generator().manual_seed(n)
    rows = 3
    every = {
        "bias": torch.randn(n, generator=g),
        "counts": torch.randint(0, 3, (rows, n), generator=g),
        "prompt": torch.rand(rows, n, generator=g) < 0.3,
        "repetition_penalty": torch.tensor([1.3, 0.8, 1.0]),
        "frequency_penalty": 0.25,
        "presence_penalty": torch.tensor([0.5, 0.0, -0.5]),
    }
    x, mask = torch.randn(rows, n, generator=g), torch.rand(rows, n, generator=g) < 0.5
    given = {name: every[name] for name in names if name in every}
    allowed = {"words": packed(mask), "allowed": mask}.get(names[-1])
    on_device = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    for _ in range(3):  # also as a replay
        found = F.adjust_logits(x.to(device), **on_device, allowed=None if allowed is None else allowed.to(device))  # type: ignore[arg-type]
        torch.testing.assert_close(found.cpu().double(), adjusted(x, given, None if allowed is None else mask))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty needs counts"),
        ({"counts": torch.zeros(2, 5)}, "counts is torch.float32"),
        ({"prompt": torch.zeros(2, 4, dtype=torch.bool)}, "prompt is torch.bool"),
        ({"allowed": torch.zeros(2, 2, dtype=torch.int32)}, r"expected \(2, 1\) words"),
        ({"counts": torch.zeros(2, 5, dtype=torch.int64), "repetition_penalty": torch.ones(3)}, r"expected \(2,\)"),
    ],
    ids=["no-counts", "float-counts", "short-prompt", "words", "penalties"],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        F.adjust_logits(torch.zeros(2, 5), **given)


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_tokens(device: str) -> None:
    x = torch.randn(5, 90, device=device, requires_grad=True)
    tokens = torch.randint(0, 90, (5,), device=device)
    wanted = x.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    found = F.token_log_probs(x, tokens)
    torch.testing.assert_close(found, wanted.float())
    dout = torch.randn(5, device=device)
    ours, theirs = torch.autograd.grad(found, x, dout), torch.autograd.grad(wanted, x, dout.double())
    torch.testing.assert_close(ours, theirs)
    tokens[2] = -1  # none could be drawn
    assert F.token_log_probs(x, tokens)[2] == 0
    narrow = x.detach().bfloat16()
    wanted = narrow.double().log_softmax(1).gather(1, tokens.clamp(0)[:, None])[:, 0].where(tokens >= 0, 0)
    torch.testing.assert_close(F.token_log_probs(narrow, tokens), wanted.bfloat16(), rtol=2**-8, atol=0)


def test_log_probabilities_are_an_op_of_torchs() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 3, 1])
    torch.library.opcheck(torch.ops.triplan.token_log_probs.default, (x, tokens))
    torch.autograd.gradgradcheck(lambda t: F.token_log_probs(t, tokens), x)


def chance_of(tokens: Tensor, p: Tensor) -> float:
    """How probable it is that tokens drawn from ``p`` fit it no better: a chi-square test."""
    counts, expected = torch.bincount(tokens.cpu(), minlength=len(p)).double(), p.double() * tokens.numel()
    assert not counts[p == 0].any()
    statistic = ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum()
    freedom = torch.tensor((int((p > 0).sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_tokens_of_a_draft_are_the_targets(certain: bool, device: str) -> None:
    """Each is distributed as the target's, given that those before were accepted, whatever the draft."""
    rows, length, n = 12_000 if device == "cpu" else 400_000, 2, 5
    g = torch.Generator().manual_seed(3)
    q = torch.randn(length, n, generator=g).softmax(-1)
    p = torch.randn(length + 1, n, generator=g).softmax(-1)
    p[0, 2] = 0
    p = p / p.sum(-1, keepdim=True)
    at = torch.arange(rows, device=device) * 8
    if certain:
        draft = torch.tensor([3, 1], device=device).repeat(rows, 1)
    else:
        given = [q[i].log().to(device).expand(rows, n).contiguous() for i in range(length)]
        draft = torch.stack([F.sample(x, seed=11, position=at + i) for i, x in enumerate(given)], 1)
    tokens, count = F.speculative_sample(
        draft,
        None if certain else q.to(device).expand(rows, length, n).contiguous(),
        p.to(device).expand(rows, length + 1, n).contiguous(),
        seed=5,
        position=at,
    )
    place = torch.arange(length + 1, device=device)
    assert torch.equal(tokens >= 0, place <= count[:, None])
    assert torch.equal(torch.where(place[:length] < count[:, None], tokens[:, :length], draft), draft)
    for i in range(length + 1):
        assert chance_of(tokens[count >= i, i], p[i]) > FALSE_ALARM
    accepted = [p[i, int(draft[0, i])] if certain else torch.minimum(p[i], q[i]).sum() for i in range(length)]
    for i in range(length):
        assert chance_of((count[count >= i] > i).long(), torch.stack([1 - accepted[i], accepted[i]])) > FALSE_ALARM


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_alone_gives_the_same_tokens(device: str) -> None:
    """A row's tokens depend on no other; a short draft ends with -1; an equal target accepts all."""
    g = torch.Generator().manual_seed(1)
    q, draft = torch.randn(6, 3, 40, generator=g).softmax(-1), torch.randint(0, 40, (6, 3), generator=g)
    p = torch.cat([q, torch.randn(6, 1, 40, generator=g).softmax(-1)], 1)
    q, p, draft = q.to(device), p.to(device), draft.to(device)
    seed, at = torch.arange(6, device=device), torch.arange(6, device=device) * 9
    tokens, count = F.speculative_sample(draft, q, p, seed=seed, position=at)
    assert torch.equal(tokens[:, :3], draft)
    assert count.tolist() == [3] * 6
    short = draft.clone()
    short[:, 1:] = -1
    tokens, count = F.speculative_sample(short, q, p.roll(1, 0), seed=seed, position=at)
    assert (count <= 1).all()
    assert torch.equal(tokens[:, 2:], torch.full_like(tokens[:, 2:], -1))
    one = slice(4, 5)
    alone = F.speculative_sample(short[one], q[one], p.roll(1, 0)[one], seed=seed[one], position=at[one])
    assert torch.equal(alone[0], tokens[one])
    assert torch.equal(alone[1], count[one])
    with pytest.raises(RuntimeError, match="draft_probs is"):
        F.speculative_sample(draft, q[:, :2], p, seed=0)
