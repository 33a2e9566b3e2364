"""Losses over classes: the reference against torch, and every kernel against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases.losses import build, strided
from proofs.losses import ALL, OPTIONS, TERMS
from samples import SetConstant
from torch.nn import functional

import triplan as tp
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.losses import looped, shared, split
from triplan.sku import interpreting
from triplan.testing import args_for, check_plan, check_refusals, oracle
from triplan.testing.values import Values, draw, draw_indices

OPS = tuple(OPTIONS)
ENTRIES = [(op, entry.name) for op in OPS for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]
FORWARD = [r for r in ENTRIES if r[0] == "cross_entropy"]
INTERPRET, CPU = tp.Target.cpu(interpret=True), tp.Target.cpu()
TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
NO_WARNINGS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
NOT_INTERPRETING = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
#: What changes a kernel: reductions with tables and smoothing, gradients beside the logits and over them, policies.
CHOICES: tuple[dict[str, Any], ...] = (
    {"out_of_bounds": "error"},
    {"reduction": "none", "weight": True, "index_element": "i32"},
    {"reduction": "sum", "gradient": True, "label_smoothing": 0.25, "out_of_bounds": "clamp"},
    {**ALL, "out_of_bounds": "error", "index_element": "i32"},
    {"gradient": True, "in_place": True},
    {"gradient": True, "in_place": True, "weight": True, "reduction": "byte_mean"},
)


def given(desc: tp.Descriptor, kind: Values, seed: int) -> dict[str, torch.Tensor]:
    """Tables of positive numbers; for adjoints, logits and what they give."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for o in desc.operands():
        if o.name in ("weight", "bytes"):
            found[o.name] = (torch.rand(o.shape, generator=g) + 0.5).to(o.element.torch)
        elif o.name == "target" and o.index_extents[0] == 0:
            (found["target"],) = draw_indices(o, "hostile", False, g)
    if desc.op == "cross_entropy_backward":
        o = desc.operand("dloss")  # finite: what an infinite one gives hangs on which probabilities are not yet 0
        found["dloss"] = draw(o.shape, o.element, "unit", 1, g)
        x = desc.operand("x")
        found["x"] = draw(x.shape, x.element, kind, x.numel, g)
        lse = torch.logsumexp(found["x"].double(), desc.class_axis)  # type: ignore[attr-defined]
        found["lse"] = torch.where(lse == torch.inf, torch.nan, lse).to(x.element.compute.torch)
    return found


def check(plan: tp.Plan[Any, Any], seed: int = 0, kinds: tuple[Values, ...] = ("unit", "special")) -> int:
    desc, compared = plan.descriptor, 0
    for kind in kinds:
        known = given(desc, kind, seed)
        report = check_plan(plan, seed=seed, runs=2, passes=(kind,), magnitude=TERMS[desc.op], given=known)
        compared += report.compared
    return compared


def pinned(desc: tp.Descriptor, row: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    try:
        return tp.plan(desc, target=target, preference=tp.PlanPreference(kernel=row))
    except tp.Unsupported:
        return None


def problems(
    op: str, shapes: tuple[tuple[int, ...], ...], elements: tuple[str, ...], most: int = 9
) -> Iterator[tp.Descriptor]:
    """Every axis, element, choice and layout."""
    for shape in shapes:
        for axis in range(len(shape)):
            for element in elements:
                found = []
                for choice in CHOICES[:most]:
                    fields = tp.descriptor_types()[op].model_fields
                    known = {k: v for k, v in choice.items() if k in fields}
                    if known not in found:
                        found.append(known)
                        desc = build(op, shape, axis, element, **known)
                        yield desc
                        yield strided(desc)


# --- the reference ---


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    compared = 0
    for desc in problems(op, ((5, 33), (3, 4, 5), (2, 1)), ("f16", "bf16", "f32", "f64")):
        compared += check(tp.plan(desc, target=CPU), seed=compared)
    assert compared > 500


def reference(desc: tp.Descriptor, **given: torch.Tensor) -> Any:
    return oracle(desc, args_for(desc, given=given).host())


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_and_gradients_are_torchs(reduction: str, weight: bool, smoothing: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=g, requires_grad=True)
    target = torch.randint(0, 5, (3, 4), generator=g)
    w = torch.rand(5, dtype=torch.float64, generator=g)
    options: dict[str, Any] = {"element": "f64", "reduction": reduction, "weight": weight}
    for op, smooth in (("cross_entropy", smoothing), ("nll_loss", 0.0)):
        if op == "cross_entropy":
            options["label_smoothing"] = smooth
        else:
            options.pop("label_smoothing")
        torchs = {"label_smoothing": smooth} if op == "cross_entropy" else {}
        wanted = getattr(functional, op)(
            x, target, w if weight else None, ignore_index=1, reduction=reduction, **torchs
        )
        known = {"x": x.detach(), "target": target, "weight": w}
        got = reference(build(op, (3, 5, 4), **options), **known)
        torch.testing.assert_close(got["losses" if reduction == "none" else "loss"].squeeze(), wanted.detach())
        dloss = torch.randn(wanted.shape, dtype=torch.float64, generator=g)
        (dx,) = torch.autograd.grad(wanted, x, dloss)
        known |= {"dloss": dloss if reduction == "none" else dloss.reshape(1)}
        known |= {"lse": torch.logsumexp(x.detach(), 1)}
        torch.testing.assert_close(reference(build(f"{op}_backward", (3, 5, 4), **options), **known)["dx"], dx)
        if op == "cross_entropy" and reduction != "none":
            found = reference(build(op, (3, 5, 4), gradient=True, **options), **known)["dx"]
            torch.testing.assert_close(found * dloss, dx)


@pytest.mark.parametrize("weight", [False, True])
def test_byte_mean_is_its_definition(weight: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, dtype=torch.float64, generator=g, requires_grad=True)
    target, counts = torch.randint(0, 5, (9,), generator=g), torch.tensor([3.0, 1, 0, 4, 2], dtype=torch.float64)
    w = torch.rand(5, dtype=torch.float64, generator=g)
    rows = functional.cross_entropy(x, target, w if weight else None, ignore_index=3, reduction="none")
    kept = target != 3
    wanted = (rows * counts[target])[kept].sum() / counts[target][kept].sum()
    desc = build("cross_entropy", (9, 5), 1, "f64", reduction="byte_mean", weight=weight, ignore_index=3, gradient=True)
    got = reference(desc, x=x.detach(), target=target, weight=w, bytes=counts)
    torch.testing.assert_close(got["loss"].squeeze(), wanted.detach())
    torch.testing.assert_close(got["dx"], torch.autograd.grad(wanted, x)[0])


SPECIAL = {
    "all -inf": [-float("inf")] * 4,
    "some -inf": [-float("inf"), 1.0, -float("inf"), 2.0],
    "target -inf": [1.0, 0.0, -float("inf"), 2.0],
    "+inf": [1.0, float("inf"), 0.0, -float("inf")],
    "target +inf": [1.0, 0.0, float("inf"), -float("inf")],
    "NaN": [1.0, float("nan"), 0.0, 3.0],
    "far": [1e4, 1e4 - 1, -1e4, 0.0],
    "huge": [3e38, 3e38, 2.9e38, 3e38],
}


def numerics_are_torchs(row: str | None, target: tp.Target, name: str, smoothing: float = 0.0) -> None:
    """Losses and gradients of a row with the values, one of ordinary ones, and one that is ignored."""
    device = target.device_type
    x = torch.tensor([SPECIAL[name], [0.0, 1.0, 2.0, 3.0], SPECIAL[name]], device=device, requires_grad=True)
    wanted = functional.cross_entropy(x[:2], torch.tensor([2, 1], device=device), label_smoothing=smoothing)
    (dx,) = torch.autograd.grad(wanted, x)
    desc = tp.CrossEntropyDescriptor(input_shape=(3, 4), element="f32", gradient=True, label_smoothing=smoothing)
    preference = None if row is None else tp.PlanPreference(kernel=row)
    plan = tp.plan(desc, target=target, preference=preference)
    rows = [torch.empty(3, device=device) for _ in range(2)]
    args = tp.CrossEntropyArgs(
        x=x.detach(),
        target=torch.tensor([2, 1, -100], device=device),
        losses=rows[0],
        lse=rows[1],
        loss=torch.empty(1, device=device),
        dx=torch.empty_like(x.detach()),
    )
    plan.run(args, tp.Workspace.allocate(plan, device))
    assert args.loss is not None
    assert args.dx is not None
    torch.testing.assert_close(args.loss[0], wanted.detach(), equal_nan=True)
    torch.testing.assert_close(args.dx, torch.cat([dx[:2], torch.zeros(1, 4, device=device)]), equal_nan=True)
    assert args.losses[2] == 0
    assert args.lse[2] == -torch.inf


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", SPECIAL)
def test_infinities_and_nan_as_in_torch(name: str, smoothing: float) -> None:
    numerics_are_torchs(None, CPU, name, smoothing)


def far_logits(row: str | None, target: tp.Target, n: int = 1000) -> None:
    """Smoothed losses of logits around 100,000: the sum of those has lost what the loss is made of."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, n, generator=g) + 1e5, torch.rand(n, generator=g)
    for weight in (False, True):
        options = {"reduction": "none", "label_smoothing": 0.1, "weight": weight}
        desc = tp.CrossEntropyDescriptor(input_shape=(3, n), element="f32", **options)
        plan = tp.plan(desc, target=target, preference=None if row is None else tp.PlanPreference(kernel=row))
        known = {"x": x, "target": torch.arange(3), "weight": w} if weight else {"x": x, "target": torch.arange(3)}
        placed = args_for(desc, target.device_type, given=known)
        plan.run(placed.args, tp.Workspace.allocate(plan, target.device_type))
        wanted = functional.cross_entropy(
            x.double(), known["target"], w.double() if weight else None, label_smoothing=0.1, reduction="none"
        )
        torch.testing.assert_close(placed.host().losses.double(), wanted, rtol=2e-6, atol=0)
    top = x.max(1).values
    naive = (top + (x - top[:, None]).exp().sum(1).log()) - x.mean(1)
    assert float((naive - (x.double().logsumexp(1) - x.double().mean(1))).abs().max()) > 1e-3


def test_smoothed_losses_are_of_differences() -> None:
    far_logits(None, CPU)


def all_ignored(row: str, target: tp.Target) -> None:
    """A mean of nothing is NaN, a sum 0; and so with no rows at all. No gradient is other than 0."""
    for rows in (3, 0):
        for reduction in ("mean", "sum", "byte_mean"):
            desc = build("cross_entropy", (rows, 4), reduction=reduction, gradient=True)
            known = {"target": torch.ones(rows, dtype=torch.int64), "bytes": torch.ones(4)}
            placed = args_for(desc, target.device_type, given=known)
            plan = pinned(desc, row, target)
            assert plan is not None
            plan.run(placed.args, tp.Workspace.allocate(plan, target.device_type))
            found = placed.host()
            assert found.dx.count_nonzero() == 0
            assert found.loss.item() == 0 if reduction == "sum" else found.loss.isnan().item()


def bad_targets(row: str, target: tp.Target) -> None:
    """The lowest bad row is recorded, and named; the ignored one before it is none."""
    desc = build("cross_entropy", (5, 4), ignore_index=77, out_of_bounds="error")
    placed = args_for(desc, target.device_type, given={"target": torch.tensor([3, 77, 4, 0, -1])})
    plan = pinned(desc, row, target)
    assert plan is not None
    plan.run(placed.args, tp.Workspace.allocate(plan, target.device_type))
    with pytest.raises(IndexError, match=r"target\[2\] = 4 is out of bounds for extent 4"):
        plan.check(placed.args)


def gradients_do_not_depend_on_the_batch(row: str, target: tp.Target) -> None:
    """Those of a sum: the same bits in any company. (The guarantee of the whole plan is that of its loss.)"""
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(9, 130, generator=g), torch.randint(0, 130, (9,), generator=g)
    found = []
    for rows in (slice(None), slice(4, 5), slice(3, 9)):
        desc = build("cross_entropy", tuple(x[rows].shape), reduction="sum", gradient=True)
        plan = pinned(desc, row, target)
        assert plan is not None
        assert plan.precision_guarantee("dx").batch_invariant
        placed = args_for(desc, target.device_type, given={"x": x[rows], "target": t[rows]})
        plan.run(placed.args, tp.Workspace.allocate(plan, target.device_type))
        found.append(placed.host().dx)
    assert torch.equal(found[0][4:5], found[1])
    assert torch.equal(found[0][3:], found[2])


def padded_gradients(target: tp.Target) -> None:
    """Of a vocabulary that is padded: what cross_entropy writes over its logits is scaled there, and nothing else."""
    for element, factor in ((torch.float32, 2.0), (torch.bfloat16, 1.0), (torch.bfloat16, -0.5)):
        store = torch.randn(5, 2, 48, generator=torch.Generator().manual_seed(0)).to(element).to(target.device_type)
        before, dx = store.clone(), store[..., :43]
        args = tp.ScaleGradientArgs(dloss=torch.full((1,), factor, dtype=element, device=dx.device), dx=dx)
        plan = tp.plan(tp.ScaleGradientDescriptor.from_args(args, in_place=True), target=target)
        plan.run(args)
        assert plan.sku().kernel == "rows"
        assert torch.equal(dx, before[..., :43] * factor)
        assert torch.equal(store[..., 43:], before[..., 43:])


ELEMENTWISE = ("cross_entropy_backward", "nll_loss", "nll_loss_backward")


def side_by_side(op: str, target: tp.Target) -> None:
    """Each element is by itself: with other rows come other tiles and loads, but not other bits."""
    g = torch.Generator().manual_seed(0)
    known = {name: torch.randn(64, generator=g) for name in ("dloss", "lse")}
    known |= {
        "x": torch.randn(200, 64, generator=g),
        "target": torch.arange(64),
        "weight": torch.rand(200, generator=g),
    }
    found, numerics = [], set()
    for rows in (64, 63, 62, 1):
        desc = build(op, (200, rows), 0, reduction="none", weight=True, label_smoothing=0.1)
        plan = tp.plan(desc, target=target, preference=tp.PlanPreference(batch_invariant=True))
        read = {o.name for o in desc.operands() if not o.is_written}
        part = {name: t if name == "weight" else t[..., :rows] for name, t in known.items() if name in read}
        placed = args_for(desc, target.device_type, given=part)
        plan.run(placed.args, tp.Workspace.allocate(plan, target.device_type))
        (out,) = (getattr(placed.host(), o.name) for o in desc.operands() if o.is_written)
        found.append(out[..., :1])
        numerics.add(plan.sku().numerics_id)
    assert len(numerics) == 1
    assert found[0].count_nonzero() > 0
    assert all(torch.equal(found[0], other) for other in found[1:])


# --- what is refused ---


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


# --- kernels in the interpreter ---


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_choice_axis_and_layout_interpreted(op: str, row: str) -> None:
    compared = 0
    for number, desc in enumerate(problems(op, ((3, 19), (2, 3, 5)), ("bf16",))):
        # In turns: each choice meets both layouts and both kinds of values, but not along every axis.
        if number % 4 in (0, 3):
            plan = pinned(desc, row, INTERPRET)
            compared += 0 if plan is None else check(plan, compared, ("unit",) if number % 8 < 4 else ("special",))
    for element in ("f16", "f32", "f64"):
        plan = pinned(build(op, (3, 40), 1, element), row, INTERPRET)
        assert plan is not None
        compared += check(plan)
    assert compared > 200


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_empty_problems_interpreted(op: str, row: str) -> None:
    """Losses, gradients and statuses are filled, whatever there is to add up."""
    for shape in ((0, 4), (4, 0), (0, 0), (1, 1)):
        for choice in CHOICES[:4]:
            fields = tp.descriptor_types()[op].model_fields
            plan = pinned(build(op, shape, **{k: v for k, v in choice.items() if k in fields}), row, INTERPRET)
            assert plan is not None
            check(plan, kinds=("unit",))


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), FORWARD)
def test_long_rows_and_many_rows_interpreted(op: str, row: str, constant: SetConstant) -> None:
    """Several blocks a row, and sums over rows in several parts."""
    constant(shared, "CHUNK", 2)
    constant(split.CrossEntropySplit, "find_tile", lambda self: Tile(1, 16, 1))
    constant(looped.CrossEntropyLooped, "find_tile", lambda self: looped.Loop(1, 16, 1, vec=4))
    for choice in CHOICES[2:]:
        plan = pinned(build(op, (5, 43), **choice), row, INTERPRET)
        assert plan is not None
        assert split.CrossEntropySplit(plan.descriptor).chunks()[0] == 3
        check(plan, kinds=("unit",))


@pytest.mark.interpret
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_what_adds_nothing_up_is_the_same_beside_any_rows_interpreted(op: str) -> None:
    side_by_side(op, INTERPRET)


@pytest.mark.interpret
def test_padded_gradients_are_scaled_interpreted() -> None:
    padded_gradients(INTERPRET)


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_refusals(op: str, row: str) -> None:
    plan = pinned(build(op, (3, 9), **({"weight": True} if op != "scale_gradient" else {})), row, INTERPRET)
    assert plan is not None
    assert check_refusals(plan) > 10


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), FORWARD)
def test_edges_interpreted(op: str, row: str) -> None:
    for name in SPECIAL:
        numerics_are_torchs(row, INTERPRET, name, 0.1 if name == "NaN" else 0.0)
    all_ignored(row, INTERPRET)
    bad_targets(row, INTERPRET)
    gradients_do_not_depend_on_the_batch(row, INTERPRET)
    numerics_are_torchs(row, INTERPRET, "huge", 0.1)
    far_logits(row, INTERPRET)


# --- compiled for each architecture ---


@NOT_INTERPRETING
@pytest.mark.parametrize("op", OPS)
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    sources = set()
    for batch in range(1, 1001):
        desc = build(op, (batch, 96), **(ALL if op == "cross_entropy" else {}))
        sources.update(launch.source() for launch in tp.plan(desc, target=TARGETS["sm90a"]).launches)
    assert 1 <= len(sources) <= 12


@NOT_INTERPRETING
def test_few_long_rows_are_split_and_many_are_not() -> None:
    h200 = TARGETS["sm90a"]
    for gradient in (False, True):
        for shape, row in (((4, 262144), "split"), ((65536, 256), "rows"), ((8192, 131072), "looped")):
            assert tp.plan(build("cross_entropy", shape, gradient=gradient), target=h200).sku().kernel == row
        for shape, row in (((1, 262144, 8), "split"), ((8, 262144, 512), "looped")):  # rows that lie side by side
            assert tp.plan(build("cross_entropy", shape, gradient=gradient), target=h200).sku().kernel == row


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_kernel_on_the_gpu(op: str, row: str, element: str) -> None:
    target, compared = tp.Target.current(), 0
    shapes = ((7, 33), (300, 257), (2, 40, 3), (65, 4100), (3, 40_001), (5, 1), (1, 1), (0, 8), (8, 0), (20_000, 3))
    shapes += ((4, 30_000), (3, 9001))  # gradients of narrow elements are held in 16 bits
    for number, shape in enumerate(shapes):
        for axis in {1, len(shape) - 1}:
            # In turns: each choice costs a compilation of its own.
            for at, choice in enumerate(CHOICES[number % 2 :: 2]):
                fields = tp.descriptor_types()[op].model_fields
                desc = build(op, shape, axis, element, **{k: v for k, v in choice.items() if k in fields})
                if at == number // 2 % 3:
                    desc = strided(desc)
                plan = pinned(desc, row, target)
                kinds: tuple[Values, ...] = ("unit", "special") if number < 3 else ("unit",)
                compared += 0 if plan is None else check(plan, compared, kinds)
    assert compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "row"), FORWARD)
def test_edges_on_the_gpu(op: str, row: str) -> None:
    target = tp.Target.current()
    for name in SPECIAL:
        for smoothing in (0.0, 0.1):
            numerics_are_torchs(row, target, name, smoothing)
    far_logits(row, target, 1000 if row == "rows" else 20_000)
    all_ignored(row, target)
    bad_targets(row, target)
    gradients_do_not_depend_on_the_batch(row, target)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_what_adds_nothing_up_is_the_same_beside_any_rows_on_the_gpu(op: str) -> None:
    side_by_side(op, tp.Target.current())


@pytest.mark.gpu
def test_padded_gradients_are_scaled_on_the_gpu() -> None:
    padded_gradients(tp.Target.current())


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
