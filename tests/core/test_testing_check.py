"""check_plan must be able to fail: kernels that are wrong in one thing, and what it says of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import triplan as tp
from triplan.extend import CheckRules
from triplan.testing import args_for, check_plan, check_refusals, magnitudes, mutations
from triplan.testing.oracle import judge

CPU = tp.Target.cpu()
Compute = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Make = Callable[[Compute], Compute]

GATHER = tp.GatherDescriptor(out_shape=(9, 5), gather_dim=0, src_dim_size=7, element="f32")
SCATTER = tp.ScatterDescriptor(src_shape=(9, 5), scatter_dim=0, out_dim_size=7, element="f32")
ADD = tp.IndexAddDescriptor(src_shape=(40, 3), add_dim=0, out_dim_size=5, element="f32")


@contextmanager
def kernel_instead(desc: tp.Descriptor, make: Make, **guarantee: Any) -> Iterator[tp.Plan[Any, Any]]:
    """A plan of a second CPU kernel, ``make(reference)``, beside the reference that it is compared with."""
    good = tp.TABLE.reference(desc.op)

    def claims(d: Any) -> Mapping[str, tp.PrecisionGuarantee]:
        return {n: g if n == "status" else g.replace(**guarantee) for n, g in good.guarantee(d).items()}

    assert good.compute is not None
    row = replace(good, name="suspect", compute=make(good.compute), guarantee=claims)
    tp.TABLE.register(row)
    try:
        yield tp.plan(desc, target=CPU, preference=tp.PlanPreference(kernel="suspect", deterministic=False))
    finally:
        tp.TABLE.unregister(desc.op, "suspect")


def on_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    """The right answer, spoiled by ``change`` (of the first output)."""

    def make(good: Compute) -> Compute:
        def compute(desc: Any, x: Mapping[str, Any]) -> Mapping[str, Any]:
            name, *_ = found = dict(good(desc, x))
            return {**found, name: change(found[name].clone())}

        return compute

    return make


def on_input(name: str, change: Callable[[Any, Any], Any]) -> Make:
    """The right answer to the wrong input."""
    return lambda good: lambda desc, x: good(desc, {**x, name: change(desc, x.get(name))})


def damaging(spoil: Callable[[Mapping[str, Any]], None]) -> Make:
    """The right answer, and damage done through the operands' memory."""

    def make(good: Compute) -> Compute:
        def compute(desc: Any, x: Mapping[str, Any]) -> Mapping[str, Any]:
            found = good(desc, x)
            spoil(x)
            return found

        return compute

    return make


def one_element(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(out: torch.Tensor) -> torch.Tensor:
        flat = out.view(-1)
        flat[-1] = change(flat[-1])
        return out

    return apply


def nowhere(desc: Any, index: torch.Tensor) -> torch.Tensor:
    bad = index.clone()
    bad[-1] = -1
    return bad


def wrapped(desc: Any, index: torch.Tensor) -> torch.Tensor:
    n = desc.src_dim_size
    return torch.where((index < 0) & (index >= -n), index + n, index)


def alternating(good: Compute) -> Compute:
    calls = iter(range(10**6))
    nudged = on_output(lambda out: torch.nextafter(out, torch.full_like(out, torch.inf)))(good)
    return lambda desc, x: (good if next(calls) % 2 else nudged)(desc, x)


def flipped(t: torch.Tensor, at: int) -> None:
    """The bits of the element of ``t``'s memory at ``at``."""
    t.as_strided((1,), (1,), at).view(torch.int32).bitwise_not_()


def after(t: torch.Tensor) -> int:
    return t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def into_input(x: Mapping[str, Any]) -> None:
    x["src"].view(torch.int32).view(-1)[3] ^= 1


def round_to_zero(t: torch.Tensor) -> torch.Tensor:
    """f32 to bf16 by dropping bits."""
    return (t.view(torch.int32) & -65536).view(torch.float32)


def half_sums(desc: Any, x: Mapping[str, Any]) -> Mapping[str, Any]:
    out, alpha = x["out"].to(torch.float16), 1 if x["alpha"] is None else x["alpha"]
    for j, i in enumerate(x["index"].tolist()):
        if 0 <= i < desc.out_dim_size:
            out[i] += (alpha * x["src"][j]).to(torch.float16)
    return {"out": out}


def in_float(good: Compute) -> Compute:
    def compute(desc: Any, x: Mapping[str, Any]) -> Mapping[str, Any]:
        floats = {n: v.to(torch.float32) if n in ("src", "out") else v for n, v in x.items()}
        return {"out": good(desc, floats)["out"].to(torch.int64).to(torch.int32)}

    return compute


def first_wins(good: Compute) -> Compute:
    # The same writes, met from the other end.
    return lambda d, x: good(d, {**x, "index": x["index"].flip(0), "src": x["src"].flip(0)})


def wrong_status(good: Compute) -> Compute:
    return lambda d, x: {**good(d, x), "status": good(d, x)["status"] + 1}


NAN_BITS = on_output(lambda out: torch.where(out.isnan(), torch.full_like(out, torch.nan), out))
LARGEST = torch.finfo(torch.float32).max
#: The problem, what is wrong with the kernel, and what is said of it.
WRONG: dict[str, tuple[tp.Descriptor, Make, str]] = {
    "one element is off by one bit": (
        GATHER,
        on_output(one_element(lambda v: (v.view(torch.int32) ^ 1).view(torch.float32))),
        r"out\[8, 4\]: got .*expected .* exactly",
    ),
    "the sign of zero is lost": (GATHER, on_output(lambda out: out + 0.0), r"bits 0x"),
    "NaN payloads are lost": (GATHER, NAN_BITS, r"expected nan \(bits"),
    "the last row is not gathered": (GATHER, on_input("index", nowhere), r"out\[8,"),
    "negative indices wrap unasked": (GATHER, on_input("index", wrapped), r"out\["),
    "bad indices are clamped": (GATHER, on_input("index", lambda d, i: i.clamp(0, d.src_dim_size - 1)), r"out\["),
    "zeros are written": (GATHER, on_output(torch.zeros_like), r"out\["),
    "an input is changed": (GATHER, damaging(into_input), r"src: .*an element"),
    "a byte after an input": (GATHER, damaging(lambda x: flipped(x["src"], after(x["src"]))), r"src: .*canary"),
    "a byte before an input": (
        GATHER,
        damaging(lambda x: flipped(x["src"], x["src"].storage_offset() - 1)),
        r"src: .*canary.* -4 bytes",
    ),
    "the status is wrong": (GATHER.replace(out_of_bounds="error"), wrong_status, r"status\[0\]"),
    "the first write stays, the last is guaranteed": (SCATTER, first_wins, r"out\["),
    "one contribution is dropped": (ADD, on_input("index", nowhere), r"out\["),
    "one contribution is counted twice": (ADD, on_input("src", lambda d, s: torch.cat([s[:-1], 2 * s[-1:]])), r"out\["),
    "alpha is forgotten": (ADD, on_input("alpha", lambda d, a: 1), r"out\["),
    "what was there is forgotten": (ADD, on_input("out", lambda d, o: torch.zeros_like(o)), r"out\["),
    "bad indices are added at the end": (ADD, on_input("index", lambda d, i: i.clamp(0, d.out_dim_size - 1)), r"out\["),
    "the result is off by 2 in 2**20": (ADD, on_output(lambda out: out * (1 + 2**-19)), r"out\["),
    "a small offset": (ADD, on_output(lambda out: out + 1e-3), r"out\["),
    "NaN becomes zero": (ADD, on_output(lambda out: out.nan_to_num(0.0, torch.inf, -torch.inf)), r"expected nan"),
    "infinities become finite": (ADD, on_output(lambda out: out.clamp(-LARGEST, LARGEST)), r"expected -?inf"),
    "infinities change sign": (ADD, on_output(lambda out: torch.where(out.isinf(), -out, out)), r"expected -?inf"),
    "finite sums become infinite": (
        ADD,
        on_output(one_element(lambda v: torch.full_like(v, torch.inf))),
        r"out\[4, 2\]: got inf",
    ),
    "sums are kept in f16": (ADD.replace(element="f16"), lambda good: half_sums, r"out\["),
    "bf16 results are truncated": (ADD.replace(element="bf16"), on_output(round_to_zero), r"out\["),
    "the last bit varies": (ADD, alternating, r"deterministic"),
    "integers are added in f32": (ADD.replace(element="i32"), in_float, r"out\["),
    "integers are off by one": (ADD.replace(element="i64"), on_output(one_element(lambda v: v + 1)), r"out\[4, 2\]"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_caught(wrong: str) -> None:
    desc, make, said = WRONG[wrong]
    with kernel_instead(desc, make) as plan, pytest.raises(AssertionError, match=said):
        check_plan(plan)


@pytest.mark.parametrize("desc", [GATHER, SCATTER, ADD, ADD.replace(element="f16"), ADD.replace(element="i32")])
def test_right_kernels_pass(desc: tp.Descriptor) -> None:
    with kernel_instead(desc, lambda good: good) as plan:
        report = check_plan(plan)
    assert report.runs >= 6
    assert report.compared > 0
    assert report.exact > 0
    assert report.repeated > 0


def test_the_gaps_of_a_strided_output_are_guarded() -> None:
    desc = SCATTER.replace(layouts={"out": tp.Layout.strided(unit_axis=1)})

    def spill(x: Mapping[str, Any]) -> None:
        out = x["out"]  # a CPU kernel sees the caller's memory here
        if out.stride(0) > 5:
            flipped(out, out.storage_offset() + 5)

    with kernel_instead(desc, damaging(spill)) as plan:
        caught = 0
        for seed in range(20):
            message = ""
            try:
                check_plan(plan, seed=seed)
            except AssertionError as e:
                message = str(e)
            assert not message or "canary" in message
            caught += bool(message)
        assert caught > 5


def test_an_op_that_is_no_sum_of_products_must_say_what_its_terms_are() -> None:
    desc = tp.SoftmaxBackwardDescriptor(input_shape=(9, 5), softmax_axis=1, element="f32")
    table = tp.KernelTable()
    table.register(replace(tp.TABLE.reference(desc.op), checks=CheckRules()))
    with pytest.raises(tp.InvalidProblem, match=r"dx below 0.*CheckRules"):
        magnitudes(desc, args_for(desc).host(), table=table)


def test_inputs_follow_from_those_that_are_given() -> None:
    desc = tp.LayerNormBackwardDescriptor(input_shape=(9, 5), element="f32")
    x, rstd = torch.randn(9, 5), torch.ones(9)
    args = args_for(desc, given={"x": x, "rstd": rstd}).args
    torch.testing.assert_close(args.mean, x.mean(1))
    assert torch.equal(args.rstd, rstd)


# --- any write may stay ---

ANY: Mapping[str, Any] = {
    "duplicates": tp.Duplicates.ANY,
    "deterministic": False,
    "bit_stable_on_same_hardware": False,
    "batch_invariant": False,
}


def mixed(good: Compute) -> Compute:
    """Where two writes meet, half of the bits of each."""

    def compute(d: Any, x: Mapping[str, Any]) -> Mapping[str, Any]:
        a, b = good(d, x)["out"].view(torch.int32), first_wins(good)(d, x)["out"].view(torch.int32)
        return {"out": ((a & 0xFFFF) | (b & -65536)).view(torch.float32)}

    return compute


def unwritten(good: Compute) -> Compute:
    return lambda d, x: {"out": torch.cat([x["out"][:1], good(d, x)["out"][1:]])}


def anothers(good: Compute) -> Compute:
    """Every write takes the value of its neighbour."""
    return lambda d, x: good(d, {**x, "src": x["src"].roll(1, 0)})


@pytest.mark.parametrize("shape", [(9, 5), (200, 5)])
@pytest.mark.parametrize("make", [first_wins, lambda good: good])
def test_where_any_write_may_stay_either_is_right(make: Any, shape: tuple[int, int]) -> None:
    with kernel_instead(SCATTER.replace(src_shape=shape), make, **ANY) as plan:
        assert check_plan(plan).exact > 0


@pytest.mark.parametrize("shape", [(9, 5), (200, 5)])
@pytest.mark.parametrize("make", [mixed, unwritten, anothers])
def test_what_no_write_gave_is_caught(make: Any, shape: tuple[int, int]) -> None:
    desc = SCATTER.replace(src_shape=shape)
    with kernel_instead(desc, make, **ANY) as plan, pytest.raises(AssertionError, match=r"out\["):
        check_plan(plan)


# --- judge, by numbers worked out by hand ---


def guarantee(rtol: float, ctol: float, underflow: float = 0.0, accumulator: str = "f32") -> tp.PrecisionGuarantee:
    return tp.PrecisionGuarantee(
        math_precision=tp.MathPrecision.F32,
        accumulator=accumulator,
        deterministic=False,
        bit_stable_on_same_hardware=False,
        batch_invariant=False,
        order_invariant=False,
        duplicates=tp.Duplicates.SUM,
        tolerance=tp.Tolerance(rtol=rtol, ctol=ctol, underflow=underflow),
    )


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("element", "got", "ref", "mag", "claim", "right"),
    [
        # |got - ref| <= rtol * |ref| + ctol * mag + underflow, each term alone, on either side of its bound
        ("f32", 1.124, 1.0, 1.0, guarantee(0.125, 0.0), True),
        ("f32", 1.126, 1.0, 1.0, guarantee(0.125, 0.0), False),
        ("f32", 0.874, 1.0, 1.0, guarantee(0.125, 0.0), False),
        ("f32", 1.99, 0.0, 16.0, guarantee(0.0, 0.125), True),
        ("f32", 2.01, 0.0, 16.0, guarantee(0.0, 0.125), False),
        ("f32", 0.4, 0.0, 0.0, guarantee(0.0, 0.125, 0.5), True),
        ("f32", 0.6, 0.0, 0.0, guarantee(0.0, 0.125, 0.5), False),
        # what is not finite must meet its like
        ("f32", NAN, NAN, 1.0, guarantee(0.1, 0.1), True),
        ("f32", 1.0, NAN, 1.0, guarantee(0.1, 0.1), False),
        ("f32", INF, NAN, 1.0, guarantee(0.1, 0.1), False),
        ("f32", NAN, 1.0, 1.0, guarantee(0.1, 0.1), False),
        ("f32", INF, INF, 1.0, guarantee(0.1, 0.1), True),
        ("f32", -INF, INF, 1.0, guarantee(0.1, 0.1), False),
        ("f32", 3e38, INF, 1.0, guarantee(0.1, 0.1), False),
        ("f32", INF, 1.0, 1.0, guarantee(0.1, 0.1), False),
        # beyond f16's largest, 65504: that infinity
        ("f16", INF, 7e4, 7e4, guarantee(2**-11, 2**-20), True),
        ("f16", -INF, 7e4, 7e4, guarantee(2**-11, 2**-20), False),
        ("f16", INF, 6e4, 6e4, guarantee(2**-11, 2**-20), False),
        ("f16", 65504.0, 65510.0, 7e4, guarantee(2**-11, 2**-20), True),
        # and beyond f32's, 3.4e38, where f64 holds what f32 computes
        ("f64", INF, 1e39, 0.0, guarantee(2**-24, 0.0), True),
        ("f64", -INF, 1e39, 0.0, guarantee(2**-24, 0.0), False),
        ("f64", INF, 3e38, 0.0, guarantee(2**-24, 0.0), False),
        ("f64", INF, 1e39, 0.0, guarantee(2**-24, 0.0, accumulator="f64"), False),
        # partial sums in f16 may pass its largest though the result does not; in f32 they may not
        ("f16", NAN, 10.0, 1e5, guarantee(2**-11, 2**-20, accumulator="f16"), True),
        ("f16", 11.0, 10.0, 1e5, guarantee(2**-11, 2**-20, accumulator="f16"), False),
        ("f16", NAN, 10.0, 5e4, guarantee(2**-11, 2**-20, accumulator="f16"), False),
        ("f16", NAN, 10.0, 1e5, guarantee(2**-11, 2**-20, accumulator="f32"), False),
    ],
)
def test_judge(element: str, got: float, ref: float, mag: float, claim: tp.PrecisionGuarantee, right: bool) -> None:
    g = torch.tensor([got], dtype=tp.ElementKind(element).torch)
    r, m = torch.tensor([ref], dtype=torch.float64), torch.tensor([mag], dtype=torch.float64)
    assert bool(judge(g, r, m, claim).wrong) is not right


def test_integers_are_exact_as_far_as_the_accumulator_counts() -> None:
    loose = guarantee(0.5, 0.5, accumulator="f16")  # counts to 2048
    got, ref = torch.tensor([9.0, 9.0]), torch.tensor([8.0, 8.0], dtype=torch.float64)
    verdict = judge(got, ref, torch.tensor([2048.0, 2049.0], dtype=torch.float64), loose, integers=True)
    assert verdict.wrong.tolist() == [True, False]
    assert verdict.exact == 1


# --- refusals ---


def test_every_rule_is_broken_somewhere() -> None:
    layouts = {
        "values": tp.Layout.strided(unit_axis=1),
        "out": tp.Layout.strided(alignment=16),
    }
    desc = tp.IndexPutDescriptor(out_shape=(4, 5), index_shape=(3,), element="f32", layouts=layouts)
    found = list(mutations(desc, workspace_bytes=64))
    assert {m.rule for m in found} == {
        "dtype", "shape", "device", "promise", "alignment", "overlap", "missing", "extra", "count", "type", "workspace",
    }  # fmt: skip
    assert {m.operand for m in found} >= {"values", "out", "indices", "status"}
    assert "scalar" in {m.rule for m in mutations(ADD)}


def test_each_mutation_misses_by_one_thing() -> None:
    """What is not mutated is right: undoing the one operand gives args that the plan takes."""
    plan = tp.plan(ADD, target=CPU)
    good = args_for(ADD).args
    for m in mutations(ADD):
        args = m.placed.args
        others = {n: getattr(args, n) for n in ("index", "src", "out", "alpha", "status") if n != m.operand}
        if m.rule == "overlap":
            continue  # two operands, each right by itself
        assert plan.can_implement(replace(good, **others)), m


def lenient(plan: tp.Plan[Any, Any], **changes: Any) -> tp.Plan[Any, Any]:
    cls = type("Lenient", (type(plan),), changes)
    try:
        return cls.select(plan.descriptor, target=plan.target)  # type: ignore[attr-defined, no-any-return]
    finally:
        type(plan).__init_subclass__()  # the op's Plan is the real one again


real_run, real_can_implement = tp.IndexAddPlan.run, tp.IndexAddPlan.can_implement


def writes_first(self: Any, args: Any, workspace: Any = None, stream: Any = None) -> None:
    if isinstance(args.out, torch.Tensor) and not args.out.is_meta:
        args.out.view(-1)[:1] += 1 if args.out.is_contiguous() else 0
    real_run(self, args, workspace, stream)


def takes_anything(self: Any, args: Any) -> tp.Support:
    return tp.Support()


def another_error(self: Any, args: Any) -> tp.Support:
    found = real_can_implement(self, args)
    return found if found else tp.Support.no(tp.Unsupported(found.reason))


def names_no_operand(self: Any, args: Any) -> tp.Support:
    found = real_can_implement(self, args)
    return found if found else tp.Support.no(type(found.error)("no"))  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("can_implement", takes_anything, "can_implement said"),
        ("run", writes_first, "bytes changed"),
        ("can_implement", another_error, "can_implement said"),
        ("can_implement", names_no_operand, "does not name"),
    ],
)
def test_wrong_refusals_are_caught(method: str, wrong: Callable[..., Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_refusals(lenient(tp.plan(ADD, target=CPU), **{method: wrong}))
