"""Losses over classes: every kernel against the reference, which functional calls compare with torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CPU, H200, INTERPRETER, WHERE, compiles, pinned, repeats, required
from cases.losses import build, strided
from cases.rows import PLACES, SPECIAL as OF_ROWS, run
from proofs import target
from proofs.losses import ALL, OPTIONS
from samples import LOSSES, SetConstant
from torch.nn import functional

import triplan as tp
from triplan.backends.triton.common import rows_entries
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import looped, rows as scaled_rows, shared, split
from triplan.sku import interpreting
from triplan.testing import args_for, check_plan, check_refusals
from triplan.testing.values import Values

OPS = tuple(OPTIONS)
ENTRIES = [(op, entry.name) for op in OPS for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]
FORWARD = [r for r in ENTRIES if r[0] == "cross_entropy"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
#: What changes a kernel: reductions with tables and smoothing, gradients beside the logits and over them, policies.
CHOICES: tuple[dict[str, Any], ...] = (
    {"out_of_bounds": "error"},
    {"reduction": "none", "weight": True, "index_element": "i32"},
    {"reduction": "sum", "gradient": True, "label_smoothing": 0.25, "out_of_bounds": "clamp"},
    {**ALL, "out_of_bounds": "error", "index_element": "i32"},
    {"gradient": True, "in_place": True},
    {"gradient": True, "in_place": True, "weight": True, "reduction": "byte_mean"},
)


def check(plan: tp.Plan[Any, Any], seed: int = 0, kinds: tuple[Values, ...] = ("unit", "special")) -> int:
    return check_plan(plan, seed=seed, runs=repeats(plan), passes=kinds).compared


def ran(plan: tp.Plan[Any, Any], **given: torch.Tensor) -> SimpleNamespace:
    """The operands after a run, on the CPU."""
    placed = args_for(plan.descriptor, plan.target.device_type, given=given)
    run(plan, placed.args)
    return placed.host()


def problems(op: str, shapes: tuple[tuple[int, ...], ...], elements: tuple[str, ...]) -> Iterator[tp.Descriptor]:
    """Every axis, element, choice and layout."""
    for shape in shapes:
        for axis in range(len(shape)):
            for element in elements:
                for desc in dict.fromkeys(build(op, shape, axis, element, **choice) for choice in CHOICES):
                    yield desc
                    yield strided(desc)


# --- the reference ---


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    compared = 0
    every = problems(op, ((5, 33), (3, 4, 5), (2, 1)), ("f16", "bf16", "f32", "f64"))
    for desc in islice(every, 0, None, 5):  # in turns: each choice meets every element and layout
        compared += check(tp.plan(desc, target=CPU), seed=compared)
    assert compared > 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient": True, "reduction": "none"}, "reduction"),
        ({"in_place": True}, "in_place"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"reduction": "median"}, "reduction"),
        ({"input_shape": (3,)}, "rank 1"),
        ({"class_axis": 2}, "class_axis"),
    ],
)
def test_fields_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.InvalidProblem, match=message):
        tp.CrossEntropyDescriptor(**{"input_shape": (3, 4), "element": "f32", **change})


# --- the reference and each kernel: what a careless formula gets wrong ---

SPECIAL = {
    **OF_ROWS,
    "target -inf": [1.0, 0.0, -float("inf"), 2.0],
    "target +inf": [1.0, 0.0, float("inf"), -float("inf")],
    "huge": [3e38, 3e38, 2.9e38, 3e38],
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_infinities_and_nan_as_in_torch(where: str, kernel: str | None, name: str, smoothing: float) -> None:
    """Losses and gradients of a row with the values, one of ordinary ones, and one that is ignored."""
    desc = tp.CrossEntropyDescriptor(input_shape=(3, 4), element="f32", gradient=True, label_smoothing=smoothing)
    plan = required(desc, kernel, target(where))
    x = torch.tensor([SPECIAL[name], [0.0, 1.0, 2.0, 3.0], SPECIAL[name]])
    got = ran(plan, x=x, target=torch.tensor([2, 1, -100]))
    leaf = x[:2].to(plan.target.device_type).requires_grad_()
    wanted = functional.cross_entropy(leaf, torch.tensor([2, 1], device=leaf.device), label_smoothing=smoothing)
    (dx,) = torch.autograd.grad(wanted, leaf)
    torch.testing.assert_close(got.loss[0], wanted.detach().cpu(), equal_nan=True)
    torch.testing.assert_close(got.dx, torch.cat([dx.cpu(), torch.zeros(1, 4)]), equal_nan=True)
    assert (got.losses[2], got.lse[2]) == (0, -torch.inf)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_smoothed_losses_are_of_differences(where: str, kernel: str | None, weight: bool) -> None:
    """Of logits around 100,000, whose sum has lost what the loss is made of."""
    n = 20_000 if where == "gpu" and kernel != "rows" else 1000
    g = torch.Generator().manual_seed(0)
    x, w, at = torch.randn(3, n, generator=g) + 1e5, torch.rand(n, generator=g), torch.arange(3)
    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "none"}
    desc = tp.CrossEntropyDescriptor(input_shape=(3, n), element="f32", weight=weight, **options)
    got = ran(required(desc, kernel, target(where)), x=x, target=at, weight=w).losses.double()
    wanted = functional.cross_entropy(x.double(), at, w.double() if weight else None, **options)
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=0)
    top = x.max(1).values
    naive = (top + (x - top[:, None]).exp().sum(1).log()) - x.mean(1)
    assert float((naive - (x.double().logsumexp(1) - x.double().mean(1))).abs().max()) > 1e-3


@pytest.mark.parametrize("reduction", ["mean", "sum", "byte_mean"])
@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_nothing_but_ignored_rows(where: str, kernel: str | None, rows: int, reduction: str) -> None:
    """A mean of nothing is NaN, a sum 0; no gradient is other than 0."""
    desc = build("cross_entropy", (rows, 4), reduction=reduction, gradient=True)
    ones = {"target": torch.ones(rows, dtype=torch.int64), "bytes": torch.ones(4)}
    got = ran(required(desc, kernel, target(where)), **ones)
    assert not got.dx.any()
    assert got.loss.item() == 0 if reduction == "sum" else got.loss.isnan().item()


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_the_lowest_bad_target_is_named(where: str, kernel: str | None) -> None:
    """The ignored one before it is none."""
    desc = build("cross_entropy", (5, 4), ignore_index=77, out_of_bounds="error")
    plan = required(desc, kernel, target(where))
    placed = args_for(desc, plan.target.device_type, given={"target": torch.tensor([3, 77, 4, 0, -1])})
    run(plan, placed.args)
    with pytest.raises(IndexError, match=r"target\[2\] = 4 is out of bounds for extent 4"):
        plan.check(placed.args)


@pytest.mark.parametrize(("where", "kernel"), PLACES[1:])
def test_gradients_do_not_depend_on_the_batch(where: str, kernel: str) -> None:
    """Those of a sum: the same bits in any company. (The guarantee of the whole plan is that of its loss.)"""
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(9, 130, generator=g), torch.randint(0, 130, (9,), generator=g)
    found = []
    for rows in (slice(None), slice(4, 5), slice(3, 9)):
        desc = build("cross_entropy", tuple(x[rows].shape), reduction="sum", gradient=True)
        plan = required(desc, kernel, target(where))
        assert plan.precision_guarantee("dx").batch_invariant
        found.append(ran(plan, x=x[rows], target=t[rows]).dx)
    assert torch.equal(found[0][4:5], found[1])
    assert torch.equal(found[0][3:], found[2])


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("where", WHERE)
def test_elements_have_the_same_bits_beside_any_rows(where: str, op: str) -> None:
    """What reduces nothing: with other rows come other tiles and loads, but not other bits."""
    g = torch.Generator().manual_seed(0)
    known = {name: torch.randn(64, generator=g) for name in ("dloss", "lse")}
    known |= {"x": torch.randn(200, 64, generator=g), "target": torch.arange(64)}
    weight = torch.rand(200, generator=g)
    found, numerics = [], set()
    for rows in (64, 63, 62, 1):
        desc = build(op, (200, rows), 0, reduction="none", weight=True, label_smoothing=0.1)
        plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(batch_invariant=True))
        after = ran(plan, weight=weight, **{name: t[..., :rows] for name, t in known.items()})
        (out,) = (getattr(after, o.name) for o in desc.operands() if o.is_written)
        found.append(out[..., :1])
        numerics.add(plan.sku().numerics_id)
    assert len(numerics) == 1
    assert found[0].count_nonzero() > 0
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("shape", "element"), [((300, 65), "f32"), ((3, 8193), "bf16"), ((2, 64), "f16")])
@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_rows_that_begin_anywhere(where: str, shape: tuple[int, int], element: str) -> None:
    """All rows are filled as one, from the first multiple of 16 bytes before them: nothing else is written."""
    (rows, n), dtype, device = shape, tp.ElementKind(element).torch, target(where).device_type
    store = torch.full((rows * n + 40,), 7.0, dtype=dtype, device=device)
    dx = store[17 : 17 + rows * n].view(rows, n)
    label = torch.randint(0, n, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    label[0], label[-1] = 0, n - 1
    dloss = torch.arange(1.0, rows + 1, dtype=torch.float32, device=device)
    args = tp.NllLossBackwardArgs(dloss=dloss, target=label, dx=dx)
    plan = tp.plan(tp.NllLossBackwardDescriptor.from_args(args, reduction="none"), target=target(where))
    assert "flat" in plan.launches[-1].kernel.__name__
    run(plan, args)
    wanted = torch.zeros(rows, n, device=device).scatter_(1, label[:, None], -dloss[:, None])
    assert torch.equal(dx, wanted.to(dtype))
    assert (store[:17] == 7).all()
    assert (store[17 + rows * n :] == 7).all()


@pytest.mark.parametrize(("element", "factor"), [("f32", 2.0), ("bf16", 1.0), ("bf16", -0.5)])
@pytest.mark.parametrize("where", WHERE)
def test_padded_gradients_are_scaled(where: str, element: str, factor: float) -> None:
    """Of a vocabulary that is padded: what cross_entropy writes over its logits is scaled there, and nothing else."""
    store = torch.randn(5, 2, 48, generator=torch.Generator().manual_seed(0)).to(tp.ElementKind(element).torch)
    store = store.to(target(where).device_type)
    before, dx = store.clone(), store[..., :43]
    args = tp.ScaleGradientArgs(dloss=dx.new_full((1,), factor), dx=dx)
    plan = tp.plan(tp.ScaleGradientDescriptor.from_args(args, in_place=True), target=target(where))
    plan.run(args)
    assert plan.sku().kernel == "rows"
    assert torch.equal(dx, before[..., :43] * factor)
    assert torch.equal(store[..., 43:], before[..., 43:])


@pytest.mark.parametrize(("rows", "n", "in_place"), [(133, 255, True), (515, 65, False)])
@pytest.mark.parametrize("where", WHERE)
def test_large_gradients_with_gaps_are_scaled(
    where: str, rows: int, n: int, in_place: bool, constant: SetConstant
) -> None:
    """Every other element is one of the result; the others are left alone. Of two operands one lies transposed."""
    constant(scaled_rows, "SMALL", rows * n)
    constant(scaled_rows, "POINTS", ())
    store = torch.full((rows, 2 * n), 7.0, dtype=torch.bfloat16)
    unscaled = torch.randn(n, rows, generator=torch.Generator().manual_seed(0)).bfloat16().T
    dloss = torch.full((1,), -0.75, dtype=torch.bfloat16)
    wanted = (unscaled.float() * dloss.float()).bfloat16()
    if in_place:
        store[:, ::2] = unscaled
    store, unscaled, dloss = (t.to(target(where).device_type) for t in (store, unscaled, dloss))
    args = tp.ScaleGradientArgs(dloss=dloss, dx=store[:, ::2], unscaled=None if in_place else unscaled)
    plan = tp.plan(tp.ScaleGradientDescriptor.from_args(args, in_place=in_place), target=target(where))
    constants = plan.launches[0].constexprs  # of large gradients
    assert (constants["BLOCK"] == 512) if in_place else (constants["ROWS"] == 32)
    plan.run(args)
    assert torch.equal(store[:, ::2].cpu(), wanted)
    assert (store[:, 1::2] == 7).all()


@pytest.mark.parametrize("rows", [64, 35])
@pytest.mark.parametrize("where", WHERE)
def test_ignored_rows_of_transposed_logits_are_not_used(where: str, rows: int) -> None:
    """A vector has an element of each of several rows: ignored ones are read too. Some tiles have no other."""
    g = torch.Generator().manual_seed(0)
    x, label = torch.randn(130, rows, generator=g).T, torch.randint(0, 130, (rows,), generator=g)
    lse = x.logsumexp(1)
    ignored = (torch.arange(rows) % 3 == 1) | (torch.arange(rows) >= 32)
    x[ignored], lse[ignored], label[ignored] = float("nan"), float("inf"), -100
    device = target(where).device_type
    x, label, lse, dloss = (t.to(device) for t in (x, label, lse, torch.ones(rows)))
    args = tp.CrossEntropyBackwardArgs(
        dloss=dloss, x=x, target=label, lse=lse, dx=torch.full((rows, 130), 7.0, device=device)
    )
    desc = tp.CrossEntropyBackwardDescriptor.from_args(args, reduction="none", ignore_index=-100)
    run(tp.plan(desc, target=target(where)), args)
    wanted = torch.softmax(x, 1) - functional.one_hot(label.clamp(0), 130)
    torch.testing.assert_close(args.dx, torch.where(ignored.to(device)[:, None], 0.0, wanted))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[3], CHOICES[4]])
@pytest.mark.parametrize("adjacent", ["all", "first"])
@pytest.mark.parametrize("where", WHERE)
def test_adjacent_rows_are_split_together(
    where: str, adjacent: str, choice: dict[str, Any], merged: bool, constant: SetConstant
) -> None:
    """A program has a block of several rows; if their partial results are many, a launch of its own merges these."""
    if merged:
        constant(rows_entries, "MOST_MERGED", 32)
    desc = build("cross_entropy", (37, 1030), element="bf16", **choice)
    whole = [o.name for o in desc.operands() if o.shape == desc.input_shape]
    beside = dict.fromkeys(whole if adjacent == "all" else whole[:1], tp.Layout.strided(unit_axis=0))
    plan = required(desc.replace(layouts=beside), "split", target(where))
    launches = {launch.kernel.__name__: launch.constexprs for launch in plan.launches}
    assert launches["cross_entropy_partial_kernel"]["ROWS"] == 32
    assert ("cross_entropy_merge_kernel" in launches) == (merged and plan.descriptor.gradient)
    assert check(plan)


@pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
@pytest.mark.parametrize(("shape", "gradient"), [((64, 50_304), False), ((4, 1_000_000), True)])
def test_partial_results_of_one_row_are_loaded_once(shape: tuple[int, int], gradient: bool) -> None:
    """They are fewer than threads: each thread loaded all of them, and summed them in another order."""
    desc = build("cross_entropy", shape, element="f64", label_smoothing=0.1, gradient=gradient)
    beside = {} if gradient else {"x": tp.Layout.strided(unit_axis=0)}
    plan = required(desc.replace(layouts=beside), "split", tp.Target.preset("h200"))
    (found,) = (binary for binary in plan.compile() if binary.name == "cross_entropy_finish_kernel")
    assert found.spill_bytes == 0
    assert found.ptx.count("ld.global") < 30


# --- kernels in the interpreter ---


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_choice_axis_and_layout_interpreted(op: str, row: str) -> None:
    compared = 0
    for number, desc in enumerate(problems(op, ((3, 19), (2, 3, 5)), ("bf16",))):
        # In turns: each choice meets both layouts and both kinds of values, but not along every axis.
        if number % 4 in (0, 3):
            plan = pinned(desc, row, INTERPRETER)
            compared += 0 if plan is None else check(plan, compared, ("unit",) if number % 8 < 4 else ("special",))
    for element in ("f16", "f32", "f64"):
        compared += check(required(build(op, (3, 40), 1, element), row, INTERPRETER))
    assert compared > 200


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_empty_problems_interpreted(op: str, row: str, shape: tuple[int, int]) -> None:
    """Losses, gradients and statuses are filled, whatever there is to reduce."""
    for choice in CHOICES[:4]:
        check(required(build(op, shape, **choice), row, INTERPRETER), kinds=("unit",))


@pytest.mark.interpret
@pytest.mark.parametrize("choice", CHOICES[2:])
@pytest.mark.parametrize(("op", "row"), FORWARD)
def test_long_rows_and_many_rows_interpreted(op: str, row: str, choice: dict[str, Any], constant: SetConstant) -> None:
    """Several blocks a row, and sums over rows in several parts."""
    constant(shared, "CHUNK", 2)
    constant(split.CrossEntropySplit, "find_tile", lambda self: Tile(1, 16, 1))
    constant(looped.CrossEntropyLooped, "find_tile", lambda self: looped.Loop(1, 16, 1, vec=4))
    plan = required(build(op, (5, 43), **choice), row, INTERPRETER)
    assert split.CrossEntropySplit(plan.descriptor).parts == 3
    check(plan, kinds=("unit",))


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_refusals(op: str, row: str) -> None:
    assert check_refusals(required(build(op, (3, 9), weight=True), row, INTERPRETER)) > 10


# --- what is known when planning ---


@compiles
@pytest.mark.parametrize("op", OPS)
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    options = ALL if op == "cross_entropy" else {}
    plans = (tp.plan(build(op, (batch, 96), **options), target=H200) for batch in range(1, 1001))
    assert 1 <= len({launch.source() for plan in plans for launch in plan.launches}) <= 12


@compiles
@pytest.mark.parametrize(
    ("op", "rows", "options", "kernels"),
    [
        ("nll_loss", 1024, {}, "nll_loss"),
        ("nll_loss", 1025, {}, "nll_loss loss_sum"),
        ("nll_loss_backward", 512, {}, "nll_loss_backward"),
        ("cross_entropy", 512, {"gradient": True}, "cross_entropy_rows loss_sum"),
        ("cross_entropy_backward", 512, {}, "cross_entropy_backward"),
        ("cross_entropy_backward", 513, {}, "loss_count cross_entropy_backward"),
        ("cross_entropy_backward", 64, {"weight": True}, "loss_count cross_entropy_backward"),  # order would show
    ],
)
def test_few_rows_take_few_launches(op: str, rows: int, options: dict[str, Any], kernels: str) -> None:
    plan = tp.plan(build(op, (rows, 1000), **options), target=H200)
    assert [launch.kernel.__name__ for launch in plan.launches] == [f"{name}_kernel" for name in kernels.split()]
    assert plan.workspace_size() == (16 if "loss_count" in kernels else 0)


@compiles
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((4, 262144), "split"),
        ((65536, 256), "rows"),
        ((8192, 131072), "looped"),
        ((1, 262144, 8), "split"),  # rows that lie side by side
        ((8, 262144, 512), "looped"),
    ],
)
def test_few_long_rows_are_split_and_many_are_not(shape: tuple[int, ...], row: str, gradient: bool) -> None:
    assert tp.plan(build("cross_entropy", shape, gradient=gradient), target=H200).sku().kernel == row


@compiles
@pytest.mark.parametrize("n", [1024, 32000])
@pytest.mark.parametrize(("op", "turned"), [("cross_entropy_backward", "x"), ("scale_gradient", "unscaled")])
def test_operands_that_lie_in_two_ways_have_vectors(op: str, turned: str, n: int) -> None:
    """One lies transposed, the gradient does not: the one is loaded by vectors, and the other stored."""
    desc = build(op, (384, n))
    desc = desc.replace(layouts={turned: tp.Layout(kind="strided", alignment=16, unit_axis=0, stride_multiple=16)})
    ptx = tp.plan(desc, target=H200).compile()[-1].ptx
    assert re.search(r"ld\.global\S*\.v[24]\.b(32|64)", ptx)
    assert re.search(r"st\.global\S*\.v[24]\.b(32|64)", ptx)


@compiles
@pytest.mark.parametrize(("shape", "row"), [((7709, 50304), "looped"), ((7709, 128), "rows"), ((7709, 50304), "split")])
def test_gradients_of_transposed_logits_are_stored_by_vectors(shape: tuple[int, int], row: str) -> None:
    """Also of an odd number of rows."""
    desc = build("cross_entropy", shape, gradient=True)
    desc = desc.replace(layouts={"x": tp.Layout(kind="strided", alignment=16, unit_axis=0)})
    plan = pinned(desc, row, H200)
    assert plan is not None
    assert any(re.search(r"st\.global\S*\.v4\.b32", record.ptx) for record in plan.compile())


@compiles
def test_gradients_without_adjacent_elements_are_scaled_one_by_one() -> None:
    """Each program has whole blocks of elements, however short rows are."""
    desc = build("scale_gradient", (5000, 65)).replace(layouts={"dx": "strided"})
    (launch,) = tp.plan(desc, target=H200).launches
    assert launch.kernel.__name__ == "scale_gradient_points_kernel"
    assert launch.grid == -(-5000 * 65 // int(launch.constexprs["BLOCK"]))


@pytest.mark.parametrize(("n", "block"), [(10, 64), (64, 64), (65, 128), (128, 128), (129, 64), (1000, 64)])
def test_blocks_of_rows_that_lie_in_two_ways_suit_their_length(n: int, block: int) -> None:
    desc = build("scale_gradient", (1 << 22, n))
    desc = desc.replace(layouts={"unscaled": tp.Layout(kind="strided", alignment=16, unit_axis=0, stride_multiple=16)})
    (launch,) = tp.plan(desc, target=H200).launches
    assert launch.constexprs["BLOCK"] == block
    assert launch.constexprs["ROWS"] * block == 64 * 64


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_kernel_on_the_gpu(op: str, row: str, element: str) -> None:
    compared = 0
    shapes = ((7, 33), (300, 257), (2, 40, 3), (65, 4100), (3, 40_001), (5, 1), (1, 1), (0, 8), (8, 0), (20_000, 3))
    shapes += ((4, 30_000), (3, 9001))  # gradients of narrow elements are held in 16 bits
    for number, shape in enumerate(shapes):
        for axis in {1, len(shape) - 1}:
            # In turns: each choice costs a compilation of its own.
            for at, choice in enumerate(CHOICES[number % 2 :: 2]):
                desc = build(op, shape, axis, element, **choice)
                plan = pinned(strided(desc) if at == number // 2 % 3 else desc, row, tp.Target.current())
                kinds: tuple[Values, ...] = ("unit", "special") if number < 3 else ("unit",)
                compared += 0 if plan is None else check(plan, compared, kinds)
    assert compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["elements", "rows"])
def test_a_gradient_scaled_by_one_is_left_alone(row: str) -> None:
    """Not even its bits are moved: NaNs with payloads stay what they are, and so they do nowhere else."""
    bits = torch.randint(-(2**15), 2**15, (1000, 1001), dtype=torch.int16, device="cuda")
    desc = tp.ScaleGradientDescriptor(input_shape=(1000, 1001), element="bf16", in_place=True)
    for factor in (1.0, 2.0):
        dx = bits.clone().view(torch.bfloat16)
        args = tp.ScaleGradientArgs(dloss=torch.tensor([factor], dtype=torch.bfloat16, device="cuda"), dx=dx)
        tp.plan(desc, preference=tp.PlanPreference(kernel=row)).run(args)
        assert torch.equal(dx.view(torch.int16), bits) is (factor == 1)


@pytest.mark.gpu
def test_logits_past_two_to_the_31st() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.zeros(2**17 + 3, 2**14 + 8, dtype=torch.bfloat16, device="cuda")
    x[-1, 5] = 8.0
    target = torch.full((x.shape[0],), 5, device="cuda")
    rows = [torch.empty(x.shape[0], device="cuda") for _ in range(2)]
    args = tp.CrossEntropyArgs(x, target, *rows, torch.empty(1, dtype=x.dtype, device="cuda"), torch.empty_like(x))
    plan = tp.plan(tp.CrossEntropyDescriptor.from_args(args, reduction="sum", gradient=True))
    plan.run(args, tp.Workspace.allocate(plan))
    assert args.dx is not None
    last = x[-2:].double().requires_grad_()
    wanted = functional.cross_entropy(last, target[-2:], reduction="none")
    torch.testing.assert_close(args.losses[-2:].double(), wanted.detach())
    (dx,) = torch.autograd.grad(wanted.sum(), last)
    torch.testing.assert_close(args.dx[-2:].double(), dx, rtol=1e-2, atol=1e-6)


@compiles
@pytest.mark.parametrize(("gapped", "row"), [(False, "looped"), (True, "split")])
def test_gradients_with_gaps_of_many_long_rows_are_split(gapped: bool, row: str) -> None:
    """Programs that loop along such rows, several on a multiprocessor, write parts of sectors that lie far apart."""
    layouts = {"dx": tp.Layout.strided(alignment=16, stride_multiple=2)} if gapped else {}
    desc = build("cross_entropy", (977, 65536), gradient=True, element="f16", layouts=layouts)
    assert tp.plan(desc, target=H200).sku().kernel == row
