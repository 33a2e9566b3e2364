"""Every kernel of softmax and norms against the reference, and how their sources depend on sizes."""

from __future__ import annotations

import random
import re

import pytest
import torch
import triton
import triton.language as tl
from cases import WHERE, pinned
from cases.rows import KERNELS, OPS, build, check, problems, strided
from proofs import target
from samples import SetConstant

import triplan as tp
from triplan.backends.triton.common import rows_entries
from triplan.backends.triton.common.rows_kernels import row_pointers
from triplan.sku import interpreting
from triplan.testing import check_refusals

INTERPRET, CPU, H200 = tp.Target.cpu(interpret=True), tp.Target.cpu(), tp.Target.preset("h200")
NO_WARNINGS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
NOT_INTERPRETING = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    compared = 0
    for desc in problems(op, ((5, 33), (3, 4, 9), (2, 1), (1, 7)), ("f16", "bf16", "f32", "f64")):
        compared += check(tp.plan(desc, target=CPU), seed=compared)
    assert compared > 1000


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_every_axis_element_and_layout_interpreted(op: str, entry: str) -> None:
    compared = 0
    # A third of all problems, drawn by op and kernel: ops that share a kernel meet different ones.
    every = list(problems(op, ((5, 17), (2, 3, 9), (3, 1), (1, 5)), ("bf16", "f32")))
    for desc in random.Random(f"{op} {entry}").sample(every, len(every) // 3):
        inner = getattr(desc, "softmax_axis", len(desc.input_shape) - 1) < len(desc.input_shape) - 1  # type: ignore[attr-defined]
        if entry == "split" and inner and desc.element == "f32":  # type: ignore[attr-defined]
            continue  # a program a row takes the interpreter long: one element stands for both
        plan = pinned(desc, entry, INTERPRET)
        compared += 0 if plan is None else check(plan, seed=compared)
    for element in ("f16", "f64"):
        plan = pinned(build(op, (21, 40), -1, element), entry, INTERPRET)  # so many that partial sums are folded
        assert plan is not None
        compared += check(plan)
    assert compared > 150


@NO_WARNINGS
@pytest.mark.parametrize("adjacent", ["all", "first", "last"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", WHERE)
def test_blocks_of_adjacent_rows(where: str, op: str, adjacent: str) -> None:
    """Neighbouring rows are adjacent in some operands: a program of ``split`` has a block of several, which it turns
    where they are not adjacent in all."""
    desc = build(
        op, (37, 1030) if where == "interpret" else (2, 1030, 1300), -1, "f32" if adjacent == "all" else "bf16"
    )
    whole = [o.name for o in desc.operands() if o.shape == desc.input_shape]  # type: ignore[attr-defined]
    named = {"all": whole, "first": whole[:1], "last": whole[-1:]}[adjacent]
    beside = tp.Layout.strided(unit_axis=len(desc.input_shape) - 2)  # type: ignore[attr-defined]
    plan = tp.plan(desc.replace(layouts=dict.fromkeys(named, beside)), target=target(where), kernel="split")
    assert any(launch.constexprs.get("ROWS", 1) >= 16 for launch in plan.launches)
    assert check(plan)


@NO_WARNINGS
@pytest.mark.parametrize(("adjacent", "element"), [("all", "f16"), ("last", "f32")])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", WHERE)
def test_partial_results_of_many_blocks_are_merged_once(
    where: str, op: str, adjacent: str, element: str, constant: SetConstant
) -> None:
    """In a launch between the two: of blocks of several rows, and of blocks of one row that are written as others."""
    constant(rows_entries, "MOST_MERGED", 32)  # of 4096, rows would have tens of thousands of elements
    shape = (70, 1003) if adjacent == "all" else (70, 9001)
    desc = build(op, shape, element=element)
    whole = [o.name for o in desc.operands() if o.shape == shape]
    lies = tp.Layout.of(shape, (1, 70), 512, 2)
    plan = tp.plan(
        desc.replace(layouts=dict.fromkeys(whole if adjacent == "all" else whole[-1:], lies)),
        target=target(where),
        kernel="split",
    )
    assert "merge" in plan.launches[1].kernel.__name__
    assert check(plan)


@NO_WARNINGS
@pytest.mark.parametrize(("n", "element", "residual"), [(2049, "bf16", 0), (3500, "f16", 1), (2223, "f64", 0)])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "l2_norm"])
@pytest.mark.parametrize("where", WHERE)
def test_parts_without_elements_are_left_out(where: str, op: str, n: int, element: str, residual: int) -> None:
    options = {"residual": bool(residual)} if op != "l2_norm" else {}
    plan = pinned(build(op, (5, n), element=element, **options), "rows", target(where))
    assert plan is not None
    (launch,) = plan.launches
    assert launch.kernel.__name__ == "norm_parted_kernel"
    assert check(plan)


@NOT_INTERPRETING
@pytest.mark.parametrize(
    ("op", "n", "element", "residual"),
    [
        ("rms_norm", 1279, "f64", False),  # each thread loaded all elements of a part
        ("layer_norm", 14335, "bf16", True),  # two programs do not fit
    ],
)
def test_parts_of_rows_do_not_spill(op: str, n: int, element: str, residual: bool) -> None:
    plan = pinned(build(op, (5, n), element=element, residual=residual), "rows", H200)
    assert plan is not None
    (binary,) = plan.compile()
    assert binary.spill_bytes == 0


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_empty_problems_interpreted(op: str, entry: str) -> None:
    """Gradients of parameters are filled, whatever there is to sum."""
    for shape in ((0, 4), (4, 0), (0, 0), (1, 1)):
        plan = pinned(build(op, shape), entry, INTERPRET)
        assert plan is not None
        check(plan)


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_refusals(op: str, entry: str) -> None:
    plan = pinned(build(op, (3, 9)), entry, INTERPRET)
    assert plan is not None
    assert check_refusals(plan) > 20


@triton.jit
def last_offset_kernel(out, outer, lane, sizes, strides):  # type: ignore[no-untyped-def]
    tl.store(out, row_pointers(0, strides, outer, sizes, lane))


@pytest.mark.interpret
def test_offsets_of_rows_take_more_than_31_bits() -> None:
    """Numbers of rows and strides of 32 bits, as most are: what they are multiplied to is not."""
    out = torch.zeros(1, dtype=torch.int64)
    last_offset_kernel[(1,)](out, 2**21, 2**20 + 1, (2**30,), ((2**11 + 3,), 2**13 + 5))
    assert int(out) == 2**21 * (2**11 + 3) + (2**20 + 1) * (2**13 + 5)


@NOT_INTERPRETING
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_rows_with_gaps_between_them_are_read_by_vectors(op: str, entry: str) -> None:
    desc = build(op, (64, 1024), element="bf16")
    gaps = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    whole = {o.name: gaps for o in desc.operands() if o.shape == desc.input_shape}  # type: ignore[attr-defined]
    widths = []
    for made in (desc, desc.replace(layouts=whole)):
        plan = pinned(made, entry, H200)
        assert plan is not None
        widths.append([re.findall(r"ld\.global\S*(\.v\d)\.b32|cp\.async\.c(g)", found.ptx) for found in plan.compile()])
    assert widths[0] == widths[1]
    assert any(widths[0])


@NOT_INTERPRETING
@pytest.mark.parametrize("op", OPS)
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    sources = set()
    for batch in range(1, 1001):
        sources.update(launch.source() for launch in tp.plan(build(op, (batch, 96)), target=H200).launches)
    assert 1 <= len(sources) <= 8


@NOT_INTERPRETING
@pytest.mark.parametrize("length", [1030, 1024, 77])
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_a_lone_row_is_read_as_one_among_many(op: str, entry: str, length: int) -> None:
    """Wider loads would add in another order: what claims batch invariance is one binary for all batches."""
    # Of norms' backward, the launch that gives rows: weights' gradients depend on the batch.
    launched = slice(1 if op.endswith("norm_backward") else None)
    for change in (lambda d: d, strided):
        plans = [pinned(change(build(op, (n, length))), entry, H200) for n in (1, 2, 64, 513)]
        found = [p for p in plans if p is not None]
        assert len(found) in (0, 4)
        assert len({tuple(launch.source() for launch in p.launches[launched]) for p in found}) <= 1


@pytest.mark.parametrize("op", OPS)
def test_few_long_rows_are_split_and_many_are_not(op: str) -> None:
    for shape, entry in (((16, 262144), "split"), ((65536, 256), "rows"), ((8192, 8192), "rows")):
        assert tp.plan(build(op, shape, element="bf16"), target=H200).sku().kernel == entry
    if "softmax" in op:  # rows that lie side by side
        # On an H200 split was the faster one for 16384 x 4096, and backward for 4096 x 16384 too.
        many = "split" if op.endswith("_backward") else "looped"
        found = (((262144, 8), "split"), ((16384, 4096), "split"), ((4096, 16384), many), ((128, 65536), "rows"))
        for shape, entry in found:
            assert tp.plan(build(op, shape, 0, "bf16"), target=H200).sku().kernel == entry


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(("op", "entry"), KERNELS)
def test_every_kernel_on_the_gpu(op: str, entry: str, element: str) -> None:
    target, compared = tp.Target.current(), 0
    shapes = ((7, 33), (300, 257), (2, 3, 40), (65, 4100), (9, 32_000), (3, 40_001), (5, 1), (1, 1), (0, 8), (8, 0))
    for shape in shapes:
        for axis in {0, len(shape) - 2, len(shape) - 1} if "softmax" in op else {-1}:
            for make in (lambda d: d, strided):
                plan = pinned(make(build(op, shape, axis, element)), entry, target)
                compared += 0 if plan is None else check(plan, seed=compared)
    assert compared > 10_000
