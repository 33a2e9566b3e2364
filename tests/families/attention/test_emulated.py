"""Hopper's kernels of attention, whose logic is emulated without a GPU: rings, turns, masks, heads of groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import H200
from cases.attention import fill_rows, steep
from cases.gluon import emulate

import triplan as tp
from triplan.backends.triton.attention import wgmma, wgmma_backward, wgmma_wide


@dataclass(frozen=True)
class Case:
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    causal: bool

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.queries}-{self.keys}-{self.heads}_{self.key_heads}-{self.width}-{kind}"


CASES = [
    Case(queries, keys, heads, key_heads, width, causal)
    for queries, keys, heads, key_heads in ((300, 300, 4, 2), (130, 514, 2, 2), (193, 65, 3, 1), (700, 700, 1, 1))
    for width in (64, 128)
    for causal in (False, True)
]
WIDE = [replace(case, width=2 * case.width + 64 * (case.width == 64)) for case in CASES]
#: So few programs that each has several tiles.
FEW = tp.Target(arch=H200.arch, sm_count=3, shared_memory=H200.shared_memory)


def drawn(case: Case, batch: int = 2) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)

    def values(length: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, case.width - 8, generator=g).bfloat16()

    q, k, v = values(case.queries, case.heads), values(case.keys, case.key_heads), values(case.keys, case.key_heads)
    lse = torch.full((batch, case.heads, case.queries), torch.nan)
    return {"q": q, "k": k, "v": v, "out": torch.full_like(q, torch.nan), "lse": lse, "dout": torch.randn_like(q)}


def wanted(desc: Any, x: dict[str, Any], compute_in: torch.dtype = torch.float64) -> Any:
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    return compute(desc, {n: t.to(compute_in) if isinstance(t, torch.Tensor) else t for n, t in x.items()})


def agrees(found: torch.Tensor, w: torch.Tensor) -> bool:
    """A few units of bf16's roundoff, 2**-8, of the largest value; the same infinities."""
    finite = w.isfinite()
    off = (found.double() - w)[finite].abs()
    same = torch.equal(found[~finite].double(), w[~finite])
    return same and bool((off <= 2**-6 * (w[finite].abs().amax() + 1e-3)).all())


def forward_agrees(x: dict[str, Any], compute_in: torch.dtype = torch.float64, **options: Any) -> None:
    forward = {name: x[name] for name in ("q", "k", "v", "out", "lse", "scale") if name in x}
    desc = tp.AttentionDescriptor.from_args(tp.AttentionArgs(**forward), **options)
    assert wgmma.supports(desc, FEW)
    for launch in wgmma.wgmma.build(desc, FEW):
        emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    for name, w in wanted(desc, forward, compute_in).items():
        assert agrees(x[name], w), name


def backward_agrees(x: dict[str, Any], kernel: Any, **options: Any) -> None:
    x |= {f"d{name}": torch.full_like(x[name], torch.nan) for name in "qkv"}
    backward = tp.AttentionBackwardDescriptor.from_args(tp.AttentionBackwardArgs(**x), **options)
    assert kernel.supports(backward, FEW)
    workspace = torch.full((kernel.workspace(backward, FEW),), 255, dtype=torch.uint8)  # NaN
    launches = kernel.build(backward, FEW)
    if kernel is wgmma_wide.wgmma_wide:  # whose first launch is no kernel in Gluon
        rows, launches = launches[0], launches[1:]
        fill_rows(x, workspace, rows.args["rounded"].value)
    for launch in launches:
        emulate(launch, x, workspace)
    for name, w in wanted(backward, {n: t for n, t in x.items() if n not in ("dq", "dk", "dv")}).items():
        assert agrees(x[name], w), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case) -> None:
    x = drawn(case)
    forward_agrees(x, causal=case.causal)
    backward_agrees(x, wgmma_backward.wgmma_backward, causal=case.causal)


@pytest.mark.parametrize("case", WIDE, ids=str)
@pytest.mark.parametrize("scale", [None, -0.1])
def test_forward_of_wide_heads(case: Case, scale: float | None) -> None:
    """Blocks of 64 keys: the first warpgroup skips blocks that no row of its sees. Values are narrower than keys where
    the width is 192."""
    x = drawn(case)
    if case.width == 192:
        x["v"], x["out"] = x["v"][..., :72].contiguous(), x["out"][..., :72].contiguous()
    forward_agrees(x | ({} if scale is None else {"scale": scale}), causal=case.causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_steep_scores(width: int, causal: bool) -> None:
    """Of bases of exponentials that stay behind maxima (values of more than 64 columns), some change at a block and
    others do not; f16 has no numbers for exponentials whose base never changes."""
    x = drawn(Case(300, 700, 2, 2, width + 8, causal))
    x = {name: t if name == "lse" else t.half() for name, t in x.items()} | steep(300, 700, width, torch.float16)
    forward_agrees(x, causal=causal, align="start")


@pytest.mark.parametrize("width", [64, 128])
def test_scores_that_begin_with_infinities(width: int) -> None:
    """Scores that overflow: of some rows in all blocks but the last one that is visited, and of others in all."""
    x = drawn(Case(200, 300, 2, 2, width + 8, False))
    x["q"][..., :2] = x["k"][..., :2] = 0.0
    x["q"][:, 7::20, :, 0] = x["q"][:, 8::20, :, 1] = 2.0**100
    x["k"][:, 50:, :, 0] = x["k"][..., 1] = -(2.0**100)
    forward_agrees(x, torch.float32)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_backward_of_wide_heads(case: Case) -> None:
    """Of one batch's entry; values are narrower than keys where the width is 192."""
    x = drawn(case, batch=1)
    if case.width == 192:
        x |= {name: x[name][..., :72].contiguous() for name in ("v", "out", "dout")}
    forward_agrees(x, causal=case.causal)
    backward_agrees(x, wgmma_wide.wgmma_wide, causal=case.causal)


@pytest.mark.parametrize(("queries", "keys"), [(300, 428), (428, 300), (173, 45)])
def test_wide_heads_that_end_together(queries: int, keys: int) -> None:
    """Query 0 at a position other than 0: before all keys, so that some rows see none, or after some."""
    x = drawn(Case(queries, keys, 2, 1, 256, True))
    forward_agrees(x, causal=True, align="end")
    backward_agrees(x, wgmma_wide.wgmma_wide, causal=True, align="end")
