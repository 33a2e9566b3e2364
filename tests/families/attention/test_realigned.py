"""Attention on copies of what TMA cannot map: what is copied, the copies, and Hopper's kernels on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import H200, INTERPRETER, required
from cases.attention import fill_rows
from cases.gemm import plan_with
from cases.gluon import emulate

import triplan as tp
from triplan.backends.triton.attention import copies
from triplan.backends.triton.attention.copies import RowsCopy
from triplan.testing import PlacedArgs, args_for, check_plan

SIZES: dict[str, Any] = {"batch": 2, "queries": 300, "keys": 300, "heads": 4, "key_heads": 2, "element": "bf16"}
HEADS_FIRST = tp.Layout.strided(unit_axis=3, alignment=16, stride_multiple=8)
UNALIGNED = tp.Layout(alignment=2)
COLUMNS = tp.Layout.strided(unit_axis=2, alignment=16, stride_multiple=8)
NARROW = [("attention", "realigned"), ("attention_backward", "realigned"), ("attention_backward", "realigned_stored")]
KERNELS = [*NARROW, ("attention_backward", "realigned_wide")]
WGMMA = {"realigned": "wgmma", "realigned_stored": "wgmma_stored", "realigned_wide": "wgmma_wide"}


def build(op: str, **fields: Any) -> Any:
    return tp.descriptor_types()[op](**{**SIZES, "head_dim": 64, **fields})


@pytest.mark.parametrize(
    ("fields", "copied", "nbytes"),
    [
        ({"head_dim": 63}, "q k v dout out dq dk dv", 2 * 300 * 64 * 2 * (5 * 4 + 4 * 2 - 4)),
        ({"head_dim": 59, "value_dim": 64}, "q k dq dk", 2 * 300 * 64 * 2 * (2 * 4 + 2 * 2)),
        ({"layouts": {"q": UNALIGNED, "dk": COLUMNS, "v": HEADS_FIRST}}, "q dk", 2 * 300 * 64 * 2 * (4 + 2)),
        ({"layouts": {"k": tp.Layout.strided(unit_axis=3, alignment=16, zero_axes=(0,))}}, "k", 2 * 300 * 64 * 2 * 2),
        ({"layouts": {"lse": "strided"}}, "lse", 2 * 300 * 4 * 4),
    ],
    ids=["width", "width of keys", "layouts", "stride 0", "lse"],
)
def test_what_is_copied(fields: dict[str, Any], copied: str, nbytes: int) -> None:
    """What TMA cannot map as it lies, and no more: inputs in a launch before the others, outputs in one after them."""
    desc = build("attention_backward", **fields)
    names = {copy.operand.name for copy in copies.moved(desc)}
    assert names == set(copied.split())
    inner = copies.inner(desc)
    assert (inner.head_dim, inner.values) == (64, 64)
    for way, kernel in list(WGMMA.items())[:2]:
        plan, own = required(desc, way, H200), required(inner, kernel, H200)
        outputs = len(names & {"dq", "dk", "dv"})
        launched = [x.kernel.__name__ for x in plan.launches]
        others = [x.kernel.__name__ for x in own.launches]
        copied_in, copied_out = (["matrices_copy_kernel"] * (n > 0) for n in (len(names) - outputs, outputs))
        assert launched == [*copied_in, *others, *copied_out]
        assert plan.workspace_size() == nbytes + own.workspace_size()


def test_where_it_is_chosen() -> None:
    long = {"queries": 4096, "keys": 4096}
    for op in ("attention", "attention_backward"):
        assert tp.plan(build(op, head_dim=63, **long), target=H200).sku().kernel.startswith("realigned")
        assert tp.plan(build(op, **long), target=H200).sku().kernel.startswith("wgmma")
        none = tp.PlanPreference(max_workspace_bytes=1 << 20)
        assert tp.plan(build(op, head_dim=63, **long), preference=none, target=H200).sku().kernel == "tiles"
        assert tp.plan(build(op, head_dim=63, queries=2, keys=2), target=H200).sku().kernel == "tiles"
    many, few = (381, "realigned"), (3, "tiles")
    for heads, width, (n, kernel) in ((31, 17, many), (31, 255, many), (2, 255, few), (2, 127, few)):
        desc = build("attention", batch=7, queries=n, keys=n, heads=heads, key_heads=heads, head_dim=width)
        assert tp.plan(desc, target=H200).sku().kernel == kernel
    narrow = build("attention", batch=62, queries=256, keys=256, heads=64, key_heads=64, head_dim=21)
    assert tp.plan(narrow, target=H200).sku().kernel == "tiles"
    # Exponentials bound narrow heads, and elements that lie apart load slowly (bench anywhere, an H200).
    narrow = build("attention", batch=4, queries=8192, keys=8192, heads=29, key_heads=29, head_dim=32, causal=True)
    assert tp.plan(narrow, target=H200).sku().kernel == "wgmma"
    apart = dict.fromkeys(("q", "k", "v"), COLUMNS)
    short = {"batch": 2, "queries": 32, "keys": 32, "heads": 18, "key_heads": 18, "head_dim": 256, "causal": True}
    wide = build("attention_backward", **short, layouts=apart)
    assert tp.plan(wide, target=H200).sku().kernel == "realigned_wide"
    # Where a tile has few rows, it loads few elements, though they lie apart.
    few = {"batch": 125, "queries": 11, "keys": 11, "heads": 48, "key_heads": 48, "head_dim": 31, "causal": True}
    rows = build("attention_backward", **few, element="f16", layouts={"v": COLUMNS, "lse": "strided"})
    assert tp.plan(rows, target=H200).sku().kernel == "tiles"
    for op, kernel in KERNELS:
        with pytest.raises(tp.Unsupported, match="TMA can map every operand"):
            required(build(op, head_dim=192 if kernel == "realigned_wide" else 64), kernel, H200)
        widest = 256 if op == "attention" or kernel == "realigned_wide" else 128
        with pytest.raises(tp.Unsupported, match=f"up to {widest}"):
            required(build(op, head_dim=widest + 1), kernel, H200)
    for width, kernel in ((129, "realigned"), (192, "wgmma"), (256, "wgmma")):
        assert tp.plan(build("attention", head_dim=width, **long), target=H200).sku().kernel == kernel
        found = tp.plan(build("attention_backward", head_dim=width, **long), target=H200)
        assert found.sku().kernel == f"{kernel}_wide"
    empty = required(build("attention", head_dim=63, queries=0), "realigned", H200)
    assert empty.launches == ()


def test_bits_are_those_of_the_kernel_on_copies() -> None:
    for op, kernel in KERNELS:
        padded = 192 if kernel == "realigned_wide" else 64
        ids = [
            required(build(op, head_dim=width), name, H200).sku().numerics_id
            for width, name in ((padded - 1, kernel), (padded, WGMMA[kernel]))
        ]
        assert ids[0] == ids[1] is not None


@pytest.mark.interpret
@pytest.mark.parametrize("unit", [3, 2, 1, None])
@pytest.mark.parametrize("width", [5, 44, 130])
def test_copies_interpreted(width: int, unit: int | None) -> None:
    """Operands into the workspace, with zeros behind each row, and out of it, at any strides; lse without zeros."""
    layout = "strided" if unit is None else tp.Layout.strided(unit_axis=unit)
    layouts: dict[str, Any] = {"q": layout, "out": "strided", "lse": "strided"}
    desc = build("attention", head_dim=width, queries=37, layouts=layouts)
    q, out, lse = (desc.operand(name) for name in ("q", "out", "lse"))
    columns = -(-width // 8) * 8
    into, outof = RowsCopy(q, columns), RowsCopy(out, columns)
    of_lse = RowsCopy(lse, 37)
    (guarantee,) = (e.guarantee for e in tp.TABLE.rows(desc.op) if e.name == "realigned")
    launches = [copies.launch([into], [0]), copies.launch([outof, of_lse], [0, into.nbytes])]
    plan = plan_with(desc, "copies", launches, into.nbytes + of_lse.nbytes, guarantee, INTERPRETER)
    x = torch.randn(2, 37, 4, width).bfloat16()
    if unit is None:
        x = torch.stack((x, x), -1)[..., 0]
    elif unit < 3:
        x = x.movedim(unit, 3).contiguous().movedim(3, unit)
    y = torch.zeros(2, 4, 37, width + 3).bfloat16().transpose(1, 2)[..., :width]
    k, z = torch.zeros(2, 300, 2, width).bfloat16(), torch.zeros(2, 37, 4).transpose(1, 2)
    workspace = tp.Workspace.allocate(plan)
    workspace.tensor.fill_(255)
    sums = torch.randn(2, 4, 37)
    workspace.tensor[into.nbytes :].view(torch.float32).copy_(sums.flatten())
    plan.run(tp.AttentionArgs(q=x, k=k, v=k, out=y, lse=z), workspace)
    assert torch.equal(y, x)
    assert torch.equal(z, sums)
    rows = workspace.tensor[: into.nbytes].view(torch.bfloat16).view(into.shape)
    assert torch.equal(rows[..., :width], x)
    assert not rows[..., width:].any()


def emulated(plan: tp.Plan[Any, Any], x: dict[str, torch.Tensor]) -> None:
    """Run a plan on the CPU: copies by torch, Hopper's launches as Python."""
    workspace = torch.full((plan.workspace_size(),), 255, dtype=torch.uint8)
    desc: Any = plan.descriptor
    places, end = {}, 0
    for copy in copies.moved(desc):
        begin, end = end, end + copy.nbytes
        assert copy.nbytes % 16 == 0
        element = copy.operand.element.torch
        places[copy.operand.name] = workspace[begin:end].view(element).view(copy.shape)
        if not copy.operand.is_written:
            places[copy.operand.name].zero_()[..., : copy.operand.shape[-1]] = x[copy.operand.name]
    for launch in plan.launches:
        if launch.kernel.__name__ == "attention_rows_kernel":
            fill_rows(x, workspace[end:], launch.args["rounded"].value)
        elif launch.kernel.__name__ != "matrices_copy_kernel":
            emulate(launch, x, workspace)
    for copy in copies.moved(desc):
        if copy.operand.is_written:
            x[copy.operand.name].copy_(places[copy.operand.name][..., : copy.operand.shape[-1]])


@pytest.mark.parametrize(
    ("width", "values", "causal"),
    [(47, 47, True), (59, 40, False), (100, 128, True), (140, 130, True)],
    ids=["64", "values", "128", "wide"],
)
def test_emulated(width: int, values: int, causal: bool) -> None:
    """Forward and backward on copies, with the scale of the heads as they are: not that of the padded ones."""
    g = torch.Generator().manual_seed(0)
    few = tp.Target(arch=H200.arch, sm_count=3, shared_memory=H200.shared_memory)

    def drawn(heads: int, n: int) -> torch.Tensor:
        return torch.randn(2, 140, heads, n, generator=g).bfloat16()

    x = {"q": drawn(2, width), "k": drawn(1, width), "v": drawn(1, values), "out": drawn(2, values)}
    x["lse"] = torch.full((2, 140, 2), torch.nan).transpose(1, 2)
    desc = tp.AttentionDescriptor.from_args(tp.AttentionArgs(**x), causal=causal)
    emulated(required(desc, "realigned", few), x)
    agree(desc, x)
    x["dout"] = torch.randn_like(x["out"])
    x |= {f"d{name}": torch.full_like(x[name], torch.nan) for name in "qkv"}
    backward = tp.AttentionBackwardDescriptor.from_args(tp.AttentionBackwardArgs(**x), causal=causal)
    emulated(required(backward, "realigned" if width <= 128 else "realigned_wide", few), x)
    agree(backward, x)


def agree(desc: Any, x: dict[str, torch.Tensor]) -> None:
    """A few units of bf16's roundoff of the largest value off the reference in float64."""
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    written = {o.name for o in desc.operands() if o.is_written}
    for name, wanted in compute(desc, {n: t.double() for n, t in x.items() if n not in written}).items():
        assert (x[name].double() - wanted).abs().amax() <= 2**-6 * wanted.abs().amax(), name


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)")
@pytest.mark.parametrize(
    ("op", "kernel", "width"),
    [
        *((op, kernel, width) for op, kernel in NARROW for width in (17, 33, 63, 64, 80, 127)),
        *((*way, width) for way in (KERNELS[0], KERNELS[-1]) for width in (129, 192, 250)),
    ],
)
def test_every_layout_on_the_gpu(op: str, kernel: str, width: int) -> None:
    """Within the tolerance, and with the bits that packed heads of padded width have."""
    few = tp.Target.current().replace(sm_count=3)
    zero = tp.Layout.strided(unit_axis=3, zero_axes=(0,))
    styles: list[Any] = ["strided", UNALIGNED, COLUMNS if width % 8 == 0 else tp.Layout.strided(unit_axis=2), zero]
    for number, (style, element) in enumerate(zip(styles, ("bf16", "f16", "bf16", "f16"), strict=True)):
        desc = build(op, head_dim=width, element=element, causal=number % 2 == 0, keys=300 + number % 2 * 77)
        layouts = {o.name: style for o in desc.operands() if len(o.shape) == 4 and not (o.is_written and style is zero)}
        layouts |= {"out": "strided"} if style is zero else {}  # what follows from other inputs does not repeat
        layouts |= {"lse": tp.Layout.strided(unit_axis=2)} if number > 1 else {}
        plan = required(desc.replace(layouts=layouts), kernel, few)
        check_plan(plan, runs=2, seed=number)
        placed = args_for(plan.descriptor, "cuda", number)
        if op == "attention":  # the backward's lse follows from the scale that was drawn
            placed.args = dataclasses.replace(placed.args, scale=width**-0.5)
        read = {o.name: vars(placed.host())[o.name] for o in desc.operands() if not o.is_written}
        wide = {
            name: torch.nn.functional.pad(t, (0, -width % 8)) if t.dim() == 4 else t
            for name, t in read.items()
            if isinstance(t, torch.Tensor)
        }
        padded = required(desc.replace(head_dim=width + -width % 8), WGMMA[kernel], few)
        packed = args_for(padded.descriptor, "cuda", given=wide)
        scale = width**-0.5 if read["scale"] is None else read["scale"]  # not that of the padded width
        packed.args = dataclasses.replace(packed.args, scale=scale)
        got, wanted = written(plan, placed), written(padded, packed)
        for name, t in got.items():
            assert torch.equal(t, wanted[name][..., : t.shape[-1]]), name


def written(plan: tp.Plan[Any, Any], placed: PlacedArgs) -> dict[str, torch.Tensor]:
    """What one run writes."""
    plan.run(placed.args, placed.workspace(plan))
    after = vars(placed.host())
    return {o.name: after[o.name] for o in plan.descriptor.operands() if o.is_written}
