"""The rowwise family: the reference against torch, and every kernel against the reference."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from proofs import norms, softmax
from torch.nn import functional

import triplan as tp
from triplan.backends.triton.common.rows_kernels import row_pointers
from triplan.sku import interpreting
from triplan.testing import args_for, check_plan, check_refusals, oracle
from triplan.testing.values import Values

TERMS = {**softmax.TERMS, **norms.TERMS}
OPS = tuple(TERMS)
ENTRIES = [(op, entry.name) for op in OPS for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]
FORWARD = tuple(op for op in OPS if not op.endswith("_backward"))
INTERPRET, CPU = tp.Target.cpu(interpret=True), tp.Target.cpu()
TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
NO_WARNINGS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
NOT_INTERPRETING = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")


def build(op: str, shape: tuple[int, ...], axis: int = -1, element: str = "f32", **options: Any) -> tp.Descriptor:
    """A problem along ``axis`` where the op has one, else along the last."""
    cls = tp.descriptor_types()[op]
    if "softmax" in op:
        options["softmax_axis"] = axis % len(shape)
    return cls(input_shape=shape, element=element, **{k: v for k, v in options.items() if k in cls.model_fields})


def strided(desc: tp.Descriptor) -> tp.Descriptor:
    """The same with no promise about the strides of whole operands."""
    return desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.shape == desc.input_shape})  # type: ignore[attr-defined]


def given(desc: tp.Descriptor, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the adjoints are given is what the forward gave: probabilities, logarithms of them, statistics."""
    if not desc.op.endswith("_backward"):
        return {}
    g = torch.Generator().manual_seed(seed)
    found = {}
    for o in desc.operands():
        if o.name == "out":
            x = torch.randn(o.shape, generator=g)
            y = functional.softmax(x, desc.softmax_axis)  # type: ignore[attr-defined]
            found["out"] = (y.log() if desc.op.startswith("log_") else y).to(o.element.torch)
        elif o.name in ("rstd", "norm"):
            found[o.name] = (torch.rand(o.shape, generator=g) + 0.5).to(o.element.torch)
    return found


def passes(op: str) -> tuple[Values, ...]:
    if op in ("softmax", "log_softmax"):
        return ("unit", "wide", "special")
    return ("unit",)  # squares and products of the others' wide values leave the range of f32


def check(plan: tp.Plan[Any, Any], seed: int = 0) -> int:
    desc = plan.descriptor
    found = check_plan(
        plan, seed=seed, runs=2, passes=passes(desc.op), magnitude=TERMS[desc.op], given=given(desc, seed)
    )
    return found.compared


def pinned(desc: tp.Descriptor, row: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    try:
        return tp.plan(desc, target=target, preference=tp.PlanPreference(kernel=row))
    except tp.Unsupported:
        return None


PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": False, "bias": False},
    {"bias": False, "weight_offset": 1},
    {"residual": True},
)


def problems(op: str, shapes: tuple[tuple[int, ...], ...], elements: tuple[str, ...]) -> Iterator[tp.Descriptor]:
    """Every axis, element, layout and choice of parameters."""
    for shape in shapes:
        for axis in range(len(shape)) if "softmax" in op else (-1,):
            for element in elements:
                for options in PARAMETERS if op.split("_norm")[0] in ("rms", "layer") else ({},):
                    desc = build(op, shape, axis, element, **options)
                    yield desc
                    yield strided(desc)


# --- the reference ---


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_backend_keeps_its_guarantee(op: str) -> None:
    compared = 0
    for desc in problems(op, ((5, 33), (3, 4, 9), (2, 1), (1, 7)), ("f16", "bf16", "f32", "f64")):
        compared += check(tp.plan(desc, target=CPU), seed=compared)
    assert compared > 1000


def reference(desc: tp.Descriptor, **given: torch.Tensor) -> Any:
    return oracle(desc, args_for(desc, given=given).host())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_is_torchs(op: str, axis: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    out = getattr(torch, op)(x, axis)
    got = reference(build(op, (3, 4, 5), axis, "f64"), x=x.detach())["out"]
    torch.testing.assert_close(got, out.detach())
    dout = torch.randn_like(x)
    (dx,) = torch.autograd.grad(out, x, dout)
    got = reference(build(f"{op}_backward", (3, 4, 5), axis, "f64"), dout=dout, out=out.detach())["dx"]
    torch.testing.assert_close(got, dx)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_are_torchs(op: str, weight: bool) -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (5,), (5,)))
    centred = op == "layer_norm"
    used = [x, *([w] if weight else []), *([b] if weight and centred else [])]
    options: dict[str, Any] = {"eps": 1e-3, "weight": weight, "bias": weight}
    parameters = (w if weight else None, *((b if weight else None,) if centred else ()))
    out = getattr(functional, op)(x, (5,), *parameters, eps=1e-3)
    found = {"x": x.detach(), "weight": w.detach(), "bias": b.detach()}
    got = reference(build(op, (3, 4, 5), -1, "f64", **options), **found)
    torch.testing.assert_close(got["out"], out.detach())
    dout = torch.randn_like(x)
    wanted = torch.autograd.grad(out, used, dout)
    statistics = {name: got[name] for name in ("mean", "rstd") if name in got}
    back = reference(build(f"{op}_backward", (3, 4, 5), -1, "f64", **options), dout=dout, **found, **statistics)
    for name, grad in zip(("dx", "dweight", "dbias"), wanted, strict=False):
        torch.testing.assert_close(back[name], grad)


def lopsided_rows(target: tp.Target, row: str, n: int) -> None:
    """Rows that begin unlike the rest: by one element, by a fifth of them, and by a fifth far from zero."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, n, generator=g)
    x[0, 0] = 1e4
    x[1:, : n // 5] += 1000
    x[2] += 3000
    plan = tp.plan(build("layer_norm", (3, n)), target=target, preference=tp.PlanPreference(kernel=row))
    assert check_plan(plan, passes=("unit",), magnitude=TERMS["layer_norm"], given={"x": x}).compared >= 3 * n


def ends_of_the_range(target: tp.Target, row: str | None, n: int = 1000) -> None:
    """Mean squares just above the smallest normal number, without an eps; sums of squares near the largest."""
    info = torch.finfo(torch.float32)
    unit = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    unit -= unit.mean(1, keepdim=True)
    unit /= unit.square().mean(1, keepdim=True).sqrt()
    for op in ("rms_norm", "layer_norm", "l2_norm"):
        for square in (1.1 * info.smallest_normal, info.max / (4.1 * n)):
            desc = build(op, (3, n), weight=False, bias=False, eps=0.0)
            plan = tp.plan(desc, target=target, preference=None if row is None else tp.PlanPreference(kernel=row))
            given = {"x": unit * square**0.5}
            assert check_plan(plan, passes=("unit",), magnitude=TERMS[op], given=given).compared >= 3 * n


SPECIAL = {
    "all -inf": [-float("inf")] * 4,
    "some -inf": [-float("inf"), 1.0, -float("inf"), 2.0],
    "+inf": [1.0, float("inf"), 0.0, -float("inf")],
    "NaN": [1.0, float("nan"), 0.0, 3.0],
    "-inf and NaN": [-float("inf"), float("nan"), -float("inf"), -float("inf")],
    "far": [1e4, 1e4 - 1, -1e4, 0.0],
}


def numerics_are_torchs(op: str, row: str | None, target: tp.Target, name: str) -> None:
    x = torch.tensor([SPECIAL[name], [0.0, 1.0, 2.0, 3.0]], device=target.device_type)
    args: Any = tp.plan_type(op).args_type(x=x, out=torch.empty_like(x))
    preference = None if row is None else tp.PlanPreference(kernel=row)
    plan = tp.plan(build(op, (2, 4)), target=target, preference=preference)
    plan.run(args, tp.Workspace.allocate(plan, target.device_type))
    torch.testing.assert_close(args.out, getattr(torch, op)(x, 1), equal_nan=True)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_infinities_and_nan_as_in_torch(op: str, name: str) -> None:
    numerics_are_torchs(op, None, CPU, name)


def normalised(x: torch.Tensor, target: tp.Target, row: str | None) -> tp.LayerNormArgs:
    """layer_norm of ``x``, without weight and bias: what was run."""
    desc = tp.LayerNormDescriptor(input_shape=x.shape, element=x.dtype, weight=False, bias=False)
    mean, rstd = (torch.empty(len(x), device=x.device) for _ in range(2))
    args = tp.LayerNormArgs(x=x, out=torch.empty_like(x), mean=mean, rstd=rstd)
    plan = tp.plan(desc, target=target, preference=None if row is None else tp.PlanPreference(kernel=row))
    plan.run(args, tp.Workspace.allocate(plan, target.device_type))
    return args


def far_rows(target: tp.Target, row: str | None, n: int = 1000) -> None:
    """Values of spread 1 around 4,000: their mean square less the square of their mean is noise in f32."""
    x = (torch.randn(3, n, generator=torch.Generator().manual_seed(0)) + 4000).to(target.device_type)
    args, wanted = normalised(x, target, row), functional.layer_norm(x.double(), (n,))
    assert float((args.out.double() - wanted).abs().max()) < 2e-5
    naive = x.square().mean(1) - x.mean(1).square()
    assert float(((x - x.mean(1, keepdim=True)) * naive.clamp(min=1e-5).rsqrt()[:, None] - wanted).abs().max()) > 1e-2


def far_narrow_rows(target: tp.Target, row: str | None) -> None:
    """Values of 16 bits, a few of their steps apart, or all but one equal: the mean's error is to be far smaller."""
    g = torch.Generator().manual_seed(0)
    for element, middle, step in (("f16", 1500, 1.0), ("bf16", 200, 1.0)):
        for n in (1, 31, 256, 1000):
            x = middle + step * torch.randint(-3, 4, (5, n), generator=g)
            x[3:] = middle
            x[3, n // 2] += step
            x = x.to(tp.ElementKind(element).torch).to(target.device_type)
            args, wide = normalised(x, target, row), x.double()
            torch.testing.assert_close(args.mean.double(), wide.mean(1), rtol=1e-6, atol=0)
            spread = (wide.var(1, correction=0) + 1e-5).rsqrt()
            torch.testing.assert_close(args.rstd.double(), spread, rtol=1e-4, atol=0)
            wanted = (wide - wide.mean(1, keepdim=True)) * spread[:, None]
            final = torch.finfo(x.dtype).eps
            torch.testing.assert_close(args.out.double(), wanted, rtol=final, atol=1e-4)


def test_the_variance_is_of_centred_values() -> None:
    far_rows(CPU, None)
    far_narrow_rows(CPU, None)


def test_norms_hold_at_the_ends_of_their_range() -> None:
    ends_of_the_range(CPU, None)


# --- kernels in the interpreter ---


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_axis_element_and_layout_interpreted(op: str, row: str) -> None:
    compared = 0
    # A third of all problems, drawn by op and kernel: ops that share a kernel meet different ones.
    every = list(problems(op, ((5, 17), (2, 3, 9), (3, 1), (1, 5)), ("bf16", "f32")))
    for desc in random.Random(f"{op} {row}").sample(every, len(every) // 3):
        inner = getattr(desc, "softmax_axis", len(desc.input_shape) - 1) < len(desc.input_shape) - 1  # type: ignore[attr-defined]
        if row == "split" and inner and desc.element == "f32":  # type: ignore[attr-defined]
            continue  # a program a row takes the interpreter long: one element stands for both
        plan = pinned(desc, row, INTERPRET)
        compared += 0 if plan is None else check(plan, seed=compared)
    for element in ("f16", "f64"):
        plan = pinned(build(op, (3, 40), -1, element), row, INTERPRET)
        assert plan is not None
        compared += check(plan)
    assert compared > 150


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_empty_problems_interpreted(op: str, row: str) -> None:
    """Gradients of parameters are filled, whatever there is to add up."""
    for shape in ((0, 4), (4, 0), (0, 0), (1, 1)):
        plan = pinned(build(op, shape), row, INTERPRET)
        assert plan is not None
        check(plan)


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_refusals(op: str, row: str) -> None:
    plan = pinned(build(op, (3, 9)), row, INTERPRET)
    assert plan is not None
    assert check_refusals(plan) > 20


@pytest.mark.interpret
@NO_WARNINGS
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("op", "row"), [r for r in ENTRIES if r[0] in ("softmax", "log_softmax")])
def test_infinities_and_nan_interpreted(op: str, row: str, name: str) -> None:
    numerics_are_torchs(op, row, INTERPRET, name)


@triton.jit
def last_offset_kernel(out, outer, lane, sizes, strides):  # type: ignore[no-untyped-def]
    tl.store(out, row_pointers(0, strides, outer, sizes, lane))


@pytest.mark.interpret
def test_offsets_of_rows_take_more_than_31_bits() -> None:
    """Numbers of rows and strides of 32 bits, as most are: what they are multiplied to is not."""
    out = torch.zeros(1, dtype=torch.int64)
    last_offset_kernel[(1,)](out, 2**21, 2**20 + 1, (2**30,), ((2**11 + 3,), 2**13 + 5))
    assert int(out) == 2**21 * (2**11 + 3) + (2**20 + 1) * (2**13 + 5)


@pytest.mark.interpret
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_the_variance_is_of_centred_values_interpreted(row: str) -> None:
    far_rows(INTERPRET, row, 1000 if row == "rows" else 20_000)
    far_narrow_rows(INTERPRET, row)


@pytest.mark.interpret
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_norms_hold_at_the_ends_of_their_range_interpreted(row: str) -> None:
    ends_of_the_range(INTERPRET, row, 1000 if row == "rows" else 9000)


@pytest.mark.interpret
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_rows_that_begin_unlike_the_rest_interpreted(row: str) -> None:
    lopsided_rows(INTERPRET, row, 1000 if row == "rows" else 20_000)


# --- compiled for each architecture ---


@NOT_INTERPRETING
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_rows_with_gaps_between_them_are_read_by_vectors(op: str, row: str) -> None:
    desc = build(op, (64, 1024), element="bf16")
    gaps = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    whole = {o.name: gaps for o in desc.operands() if o.shape == desc.input_shape}  # type: ignore[attr-defined]
    widths = []
    for made in (desc, desc.replace(layouts=whole)):
        plan = pinned(made, row, TARGETS["sm90a"])
        assert plan is not None
        widths.append([re.findall(r"ld\.global\S*(\.v\d)\.b32|cp\.async\.c(g)", found.ptx) for found in plan.compile()])
    assert widths[0] == widths[1]
    assert any(widths[0])


@NOT_INTERPRETING
@pytest.mark.parametrize("op", OPS)
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    sources = set()
    for batch in range(1, 1001):
        sources.update(launch.source() for launch in tp.plan(build(op, (batch, 96)), target=TARGETS["sm90a"]).launches)
    assert 1 <= len(sources) <= 8


@NOT_INTERPRETING
@pytest.mark.parametrize("length", [1030, 1024, 77])
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_a_lone_row_is_read_as_one_among_many(op: str, row: str, length: int) -> None:
    """Wider loads would add in another order: what claims batch invariance is one binary for all batches."""
    # Of norms' adjoints, the launch that gives rows: weights' gradients depend on the batch.
    launched = slice(1 if op.endswith("norm_backward") else None)
    for change in (lambda d: d, strided):
        plans = [pinned(change(build(op, (n, length))), row, TARGETS["sm90a"]) for n in (1, 2, 64, 513)]
        found = [p for p in plans if p is not None]
        assert len(found) in (0, 4)
        assert len({tuple(launch.source() for launch in p.launches[launched]) for p in found}) <= 1


@pytest.mark.parametrize("op", OPS)
def test_few_long_rows_are_split_and_many_are_not(op: str) -> None:
    h200 = TARGETS["sm90a"]
    for shape, row in (((16, 262144), "split"), ((65536, 256), "rows"), ((8192, 8192), "rows")):
        assert tp.plan(build(op, shape, element="bf16"), target=h200).sku().kernel == row
    if "softmax" in op:  # rows that lie side by side
        for shape, row in (((262144, 8), "split"), ((16384, 4096), "looped"), ((128, 65536), "rows")):
            assert tp.plan(build(op, shape, 0, "bf16"), target=h200).sku().kernel == row


def test_long_rows_have_the_same_bits_in_few_and_many() -> None:
    h200 = TARGETS["sm90a"]
    strict = tp.PlanPreference(batch_invariant=True)
    few, many = (tp.plan(build("softmax", (n, 65536)), target=h200, preference=strict) for n in (2, 65536))
    assert few.sku().numerics_id == many.sku().numerics_id


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(("op", "row"), ENTRIES)
def test_every_kernel_on_the_gpu(op: str, row: str, element: str) -> None:
    target, compared = tp.Target.current(), 0
    shapes = ((7, 33), (300, 257), (2, 3, 40), (65, 4100), (9, 32_000), (3, 40_001), (5, 1), (1, 1), (0, 8), (8, 0))
    for shape in shapes:
        for axis in {0, len(shape) - 2, len(shape) - 1} if "softmax" in op else {-1}:
            for make in (lambda d: d, strided):
                plan = pinned(make(build(op, shape, axis, element)), row, target)
                compared += 0 if plan is None else check(plan, seed=compared)
    assert compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("op", "row"), [r for r in ENTRIES if r[0] in ("softmax", "log_softmax")])
def test_infinities_and_nan_on_the_gpu(op: str, row: str, name: str) -> None:
    numerics_are_torchs(op, row, tp.Target.current(), name)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_the_variance_is_of_centred_values_on_the_gpu(row: str) -> None:
    far_rows(tp.Target.current(), row, 1000 if row == "rows" else 20_000)
    far_narrow_rows(tp.Target.current(), row)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_norms_hold_at_the_ends_of_their_range_on_the_gpu(row: str) -> None:
    ends_of_the_range(tp.Target.current(), row, 1000 if row == "rows" else 20_000)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["rows", "looped", "split"])
def test_rows_that_begin_unlike_the_rest_on_the_gpu(row: str) -> None:
    lopsided_rows(tp.Target.current(), row, 10_000 if row == "rows" else 100_000)


@pytest.mark.gpu
def test_rows_past_two_to_the_31st() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.zeros(2**17 + 3, 2**14 + 8, dtype=torch.bfloat16, device="cuda")
    x[-1, 5] = 8.0
    out = torch.empty_like(x)
    plan = tp.plan(tp.SoftmaxDescriptor.from_args(tp.SoftmaxArgs(x, out), softmax_axis=1))
    plan.run(tp.SoftmaxArgs(x, out), tp.Workspace.allocate(plan))
    torch.testing.assert_close(out[-2:], torch.softmax(x[-2:], 1))
