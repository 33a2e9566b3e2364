"""Hopper's kernels, whose logic is emulated without a GPU: every ring, layout and way to share the work."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import H200, required
from cases.gemm import COLUMN, CUT_WAYS, backward, tiles_in_order
from cases.gluon import emulate

import triplan as tp
from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.triton.gemm import separate, wgmma, wgmma_backward, wgmma_cut, wgmma_tiles
from triplan.backends.triton.gemm.arguments import GROUP_M
from triplan.backends.triton.gemm.cuts import Cut
from triplan.backends.triton.gemm.rings import MEETING_K, Ring, rings_of


def few(programs: int) -> tp.Target:
    """A target with so few programs that each has several tiles."""
    return tp.Target(arch=H200.arch, sm_count=programs, shared_memory=H200.shared_memory)


RINGS = [
    str(replace(r, group=GROUP_M))
    for r in rings_of(tp.GemmDescriptor(m=8, n=8, k=8, element="bf16"), H200, specialised=True)
]


def drawn(desc: tp.Descriptor, seed: int) -> dict[str, Any]:
    """Operands of small integers, whose sums are exact; outputs are NaN."""
    g = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for o in desc.operands():
        if o.is_tensor:
            shape = o.shape[::-1] if o.layout.unit_axis == 0 and len(o.shape) == 2 else o.shape
            t = torch.randint(-2, 3, shape, generator=g).to(o.element.torch)
            t = torch.full_like(t, float("nan")) if o.is_written else t
            found[o.name] = t if shape == o.shape else t.t()
    return found


def exact(desc: Any, x: dict[str, Any]) -> Any:
    """The results in f64, rounded once."""
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    doubles = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    return {name: t.to(x[name].dtype) for name, t in compute(desc, doubles).items()}


PRODUCTS = {
    "linear": tp.GemmDescriptor(m=328, n=264, k=328, element="bf16", epilogue="bias_relu", layouts={"b": COLUMN}),
    "column": tp.GemmDescriptor(m=328, n=264, k=72, element="bf16", out_element="f32", layouts={"a": COLUMN}),
    "batched": tp.BatchedGemmDescriptor(batch=3, m=136, n=136, k=136, element="bf16", reads_c0=True),
    "batched, no c0": tp.BatchedGemmDescriptor(batch=3, m=200, n=136, k=136, element="f16"),
}


@pytest.mark.parametrize("ring", RINGS)
def test_programs_meet(ring: str) -> None:
    """Of long products of several rounds, the programs of all full rounds meet: the counter ends where it should."""
    desc = tp.GemmDescriptor(m=264, n=520, k=MEETING_K + 8, element="bf16")
    rings = {str(replace(r, group=GROUP_M)): r for r in rings_of(desc, H200, specialised=True)}
    x: dict[str, Any] = {**drawn(desc, 1), "alpha": 1.0}
    (launch,) = wgmma.launches(desc, rings[ring], few(3))
    assert emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    assert torch.equal(x["c"], exact(desc, x)["c"])


@pytest.mark.parametrize("epilogue", ["identity", "relu"])
@pytest.mark.parametrize("c0", [COLUMN, None])
@pytest.mark.parametrize("b", [COLUMN, "packed"])
def test_a_column_major_product(b: Any, c0: Any, epilogue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed as the transposed one, whose C TMA writes, with no copies though n is odd."""
    monkeypatch.setattr(wgmma_tiles, "rank", lambda desc, target: math.inf)  # it is not emulated
    layouts = {"b": b, "c": COLUMN, **({"c0": c0} if c0 else {})}
    desc = tp.GemmDescriptor(
        m=264,
        n=328 if b == "packed" else 131,
        k=72,
        element="bf16",
        epilogue=epilogue,
        reads_c0=bool(c0),
        layouts=layouts,
    )
    plan = required(desc, "realigned", H200)
    (launch,) = plan.launches
    x: dict[str, Any] = {**drawn(desc, 3), "alpha": 1.0, "beta": 1.0}
    emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    assert torch.equal(x["c"], exact(desc, x)["c"])


def symmetric(desc: Any, seed: int) -> dict[str, Any]:
    """As ``drawn``, of a product that is symmetric."""
    x = drawn(desc, seed)
    return {**x, "b": x["a"].mT.contiguous(), "c0": x["c0"].tril() + x["c0"].tril(-1).mT}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("ring", RINGS)
def test_a_product(ring: str, name: str) -> None:
    desc = PRODUCTS[name]
    rings = {str(replace(r, group=GROUP_M)): r for r in rings_of(desc, H200, specialised=True)}
    if ring not in rings:
        pytest.skip("does not fit")
    x: dict[str, Any] = {**drawn(desc, 1), "alpha": 2.0, "beta": -1.0}
    (launch,) = wgmma.launches(desc, rings[ring], few(5))
    assert not emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    assert torch.equal(x["c"], exact(desc, x)["c"])


#: Programs: with full waves of tiles and without.
CUTS = [(name, programs) for name in PRODUCTS for programs in (5, 40)]


@pytest.mark.parametrize(("name", "programs"), CUTS)
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_product_whose_last_tiles_are_cut(columns: int, name: str, programs: int) -> None:
    """Whole tiles are written; the others are left, and their three parts, the last of which is shorter, add up."""
    desc = PRODUCTS[name].replace(k=680, epilogue="identity", reads_c0=False)
    target = few(programs)
    cuts = [c for c in wgmma_cut.cuts_of(desc, target) if c.tile.n == columns and c.parts == 2]
    if not cuts:
        pytest.skip("does not fit, or every wave is full")
    cut = replace(cuts[0], parts=3, depth=4)
    x: dict[str, Any] = {**drawn(desc, 1), "alpha": 1.0}
    workspace = torch.full((cut.nbytes + 64,), -1, dtype=torch.uint8)  # NaN
    launch, _ = wgmma_cut.launches(desc, cut, target)
    emulate(launch, x, workspace)
    assert workspace.view(torch.float32)[-16:].isnan().all()
    add_parts(desc, cut, x["c"], workspace)
    assert torch.equal(x["c"], exact(desc, x)["c"])


def add_parts(desc: Any, cut: Cut[Ring], c: torch.Tensor, workspace: torch.Tensor) -> None:
    """What the second launch does; until then, C's tiles that are cut are NaN."""
    partial = workspace[: cut.nbytes].view(torch.float32).view(cut.parts, cut.rest, cut.tile.m, cut.tile.n)
    places = tiles_in_order(desc, cut)[cut.whole :]
    for (product, row, column), total in zip(places, partial.sum(0), strict=True):
        own = c[product, row : row + cut.tile.m, column : column + cut.tile.n]
        assert own.isnan().all()
        own.copy_(total[: own.shape[0], : own.shape[1]])


@pytest.mark.parametrize("programs", [7, 40])
@pytest.mark.parametrize(
    ("out", "layouts"),
    [(None, {}), ("f32", {"b": COLUMN, "db": COLUMN}), (None, {"dc": COLUMN, "da": COLUMN})],
    ids=["rows", "linear_f32", "columns"],
)
def test_gradients_whose_last_tiles_are_cut(out: str | None, layouts: Any, programs: int) -> None:
    """Both products have parts, which take turns in the workspace; a column-major gradient is added in place."""
    desc = backward(584, 520, 328, "bf16", (1, 1, 0), layouts=layouts, out_element=out)
    target = few(programs)
    x: dict[str, Any] = {**drawn(desc, 2), "alpha": 1.0}
    workspace = torch.full((separate.workspace(desc, target, CUT_WAYS),), -1, dtype=torch.uint8)
    launches = separate.launches(desc, target, CUT_WAYS)
    assert len(launches) == 4
    for p, launch in zip(separate.products_of(desc, target, CUT_WAYS), launches[::2], strict=True):
        view, cut = p.views["c"], wgmma_cut.cheapest_cut(p.desc, target)
        emulate(launch, x, workspace)
        result = x[view.operand.name]
        add_parts(p.desc, cut, result.t() if view.transposed else result, workspace)
    for name, t in exact(desc, x).items():
        assert torch.equal(x[name], t), name


@pytest.mark.parametrize("m", [64, 136, 328, 648, 840])
@pytest.mark.parametrize("ring", RINGS)
def test_a_symmetric_product(ring: str, m: int) -> None:
    desc = tp.BatchedGemmDescriptor(batch=3, m=m, n=m, k=72, element="bf16", reads_c0=True, symmetric=True)
    rings = {str(replace(r, group=GROUP_M)): r for r in rings_of(desc, H200, specialised=True)}
    if ring not in rings:
        pytest.skip("does not fit")
    x: dict[str, Any] = {**symmetric(desc, 1), "alpha": 2.0, "beta": -1.0}
    (launch,) = wgmma.launches(desc, rings[ring], few(5))
    emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    assert torch.equal(x["c"], exact(desc, x)["c"])


def finish(launches: list[Launch], desc: Any, parts: int, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """What the launches after that of both products do: they add partial products, and sum columns or partial sums."""
    first = wgmma_backward.pair_of(desc).first
    partial = workspace.view(torch.float32)
    sums = [launch for launch in launches if launch.kernel.__name__ == "column_sums_kernel"]
    if parts > 1:
        whole = partial[: parts * first.desc.m * first.desc.n].view(parts, first.desc.m, first.desc.n).sum(0)
        view = first.views["c"]
        x[view.operand.name].copy_(whole.t() if view.transposed else whole)
    if sums and isinstance(of := sums[0].args["x"], Scratch):
        begin = of.offset // 4
        x["dbias"].copy_(partial[begin : begin + parts * desc.n].view(parts, desc.n).sum(0))
    elif sums:
        x["dbias"].copy_(x["dc"].double().sum(0))


#: (m, n, k), programs and parts of the larger k; some leave programs idle for strips of columns.
DEALS = [((840, 264, 136), 5, 1), ((840, 264, 136), 5, 3), ((264, 840, 136), 5, 1), ((264, 840, 136), 5, 3)]
DEALS += [((264, 264, 264), 7, 1)]


@pytest.mark.parametrize(("size", "programs", "parts"), DEALS, ids=str)
@pytest.mark.parametrize(
    ("out", "layouts"),
    [
        (None, {}),
        ("f32", {"b": COLUMN, "db": COLUMN}),
        (None, {"a": COLUMN, "b": COLUMN, "db": COLUMN}),
        (None, {"dc": COLUMN}),
    ],
    ids=["rows", "linear_f32", "columns", "dc_column"],
)
@pytest.mark.parametrize("ring", RINGS)
def test_both_gradients(
    ring: str,
    out: str | None,
    layouts: Any,
    size: tuple[int, int, int],
    programs: int,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desc = backward(*size, "bf16", (1, 1, 1), layouts=layouts, out_element=out)
    rings = {str(replace(r, group=GROUP_M)): r for r in wgmma_backward.rings_of(desc, H200)}
    if ring not in rings:
        pytest.skip("does not fit")
    monkeypatch.setattr(wgmma_backward, "parts_of", lambda *_: parts)
    x: dict[str, Any] = {**drawn(desc, 2), "alpha": 2.0}
    workspace = torch.zeros(wgmma_backward.workspace_with(desc, rings[ring], few(programs)), dtype=torch.uint8)
    monkeypatch.setattr(wgmma_backward.rings, "MEETING_K", 1)
    first, *others = wgmma_backward.launches(desc, rings[ring], few(programs))
    rounds = first.args["rounds"]
    assert isinstance(rounds, Int)
    assert emulate(first, x, workspace) == (rounds.value > 0)
    finish(others, desc, parts, x, workspace)
    for name, t in exact(desc, x).items():
        assert torch.equal(x[name], t), name
