"""Matrix products in other arithmetic: i8 into i32, exact; f32 in three products of tf32."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from cases import CPU, H200, INTERPRETER, SM80, required
from cases.gemm import (
    EDGES,
    batched_grid,
    check,
    check_on_the_cpu,
    compared,
    grid,
)

import triplan as tp
from triplan.backends.reference.gemm import TF32_SMALLEST, TF32X3_LEAST, factors
from triplan.backends.triton.gemm.guarantees import tolerance
from triplan.testing.values import draw


def integer_problems(m: int, n: int, k: int) -> list[tp.Descriptor]:
    edges = [tp.GemmDescriptor(m=m, n=n, k=k, element="i8", epilogue="bias_relu", reads_c0=True) for m, n, k in EDGES]
    return [*grid("i8", m, n, k), *edges, *islice(batched_grid("i8", 2, m, n, k), 3)]


# --- i8 ---


def test_what_integers_are_asked_for() -> None:
    bare = tp.GemmDescriptor(m=2, n=3, k=4, element="i8")
    assert bare.replace(out_element="i32", math="exact", accumulator="i32") == bare
    assert (bare.out, bare.operand("alpha").element) == (tp.ElementKind.I32, tp.ElementKind.I32)
    g = tp.plan(bare, target=H200).precision_guarantee("c")
    assert g.tolerance.exact
    assert g.order_invariant
    assert g.batch_invariant
    with pytest.raises(tp.Unsupported, match="131071"):
        tp.plan(bare.replace(k=131072), target=SM80)


def test_integers_by_their_definition() -> None:
    """By loops; and modulo 2**32 once they leave i32."""
    desc = tp.GemmDescriptor(m=2, n=2, k=3, element="i8", reads_c0=True)
    a, b = (
        torch.tensor([[-128, 127, 5], [1, 2, 3]]).to(torch.int8),
        torch.tensor([[-128, 1], [127, 0], [7, -9]]).to(torch.int8),
    )
    c0, c = torch.tensor([[2**31 - 1, 1], [2, 3]], dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
    tp.plan(desc, target=CPU).run(tp.GemmArgs(a=a, b=b, c=c, c0=c0, alpha=3, beta=2))
    for i in range(2):
        for j in range(2):
            exact_sum = 3 * sum(int(a[i, p]) * int(b[p, j]) for p in range(3)) + 2 * int(c0[i, j])
            assert int(c[i, j]) == (exact_sum + 2**31) % 2**32 - 2**31


def test_the_cpu_backend_keeps_its_guarantee() -> None:
    check_on_the_cpu(integer_problems(17, 35, 70))


@pytest.mark.interpret
def test_integers_interpreted() -> None:
    assert compared(integer_problems(5, 35, 70), lambda desc: required(desc, "integer_tiles", INTERPRETER)) > 0


@pytest.mark.gpu
def test_integers_on_the_gpu() -> None:
    def taken(desc: tp.Descriptor) -> tp.Plan:  # type: ignore[type-arg]
        plan = tp.plan(desc)
        assert plan.sku().kernel == "integer_tiles"
        return plan

    for sizes in ((17, 35, 70), (136, 264, 208), (300, 520, 1000)):
        assert compared(integer_problems(*sizes), taken) > 0
    # The largest sums that are promised: all of one sign.
    k = 131071
    a, b = (torch.full(shape, -128, dtype=torch.int8, device="cuda") for shape in ((1, k), (k, 16)))
    c = torch.empty(1, 16, dtype=torch.int32, device="cuda")
    tp.plan(tp.GemmDescriptor(m=1, n=16, k=k, element="i8")).run(tp.GemmArgs(a=a, b=b, c=c))
    assert torch.equal(c.cpu(), torch.full((1, 16), k * 2**14, dtype=torch.int32))


# --- 3 x tf32 ---


def test_three_products_of_tf32_are_between_f32_and_tf32() -> None:
    base = tp.GemmDescriptor(m=64, n=64, k=64, element="f32")
    plans = [tp.plan(base.replace(math=math), target=H200) for math in ("f32", "tf32x3", "tf32")]
    found = [plan.precision_guarantee("c") for plan in plans]
    assert [str(g.math_precision) for g in found] == ["f32", "tf32x3", "tf32"]
    assert found[0].tolerance.ctol < found[1].tolerance.ctol < found[2].tolerance.ctol
    invariant = tp.PlanPreference(batch_invariant=True)
    ids = {tp.plan(p.descriptor, target=H200, preference=invariant).sku().numerics_id for p in plans}
    assert len(ids) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("entry", ["tiles", "tiles_invariant", "split_k"])
def test_three_products_on_the_gpu(entry: str) -> None:
    for turn, desc in enumerate(grid("f32", 136, 264, 200)):
        assert check(required(desc.replace(math="tf32x3"), entry, tp.Target.current()), turn) > 0


@pytest.mark.gpu
def test_three_products_are_far_nearer_than_one_on_the_gpu() -> None:
    """Few terms, all of one sign, so that what is cut off the multiplicands shows."""
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.rand(s, generator=g, device="cuda") + 0.5 for s in ((64, 32), (32, 64)))
    want = a.double() @ b.double()
    errors = []
    for math in ("tf32x3", "tf32"):
        c = torch.empty(64, 64, device="cuda")
        plan = tp.plan(tp.GemmDescriptor(m=64, n=64, k=32, element="f32", math=math))
        plan.run(tp.GemmArgs(a=a, b=b, c=c), tp.Workspace.allocate(plan))
        errors.append(float(((c.double() - want) / want).abs().max()))
    assert errors[0] < 2.0**-17
    assert errors[0] * 16 < errors[1] < 2.0**-9


@pytest.mark.gpu
@pytest.mark.parametrize("math", ["tf32", "tf32x3"])
def test_what_vanishes_does_not_meet_an_infinity_on_the_gpu(math: str) -> None:
    """An infinity times the least number of tf32 is infinite; times far smaller ones it is NaN, as the docs say."""
    plan = tp.plan(tp.GemmDescriptor(m=16, n=2, k=16, element="f32", math=math))
    a, b, c = torch.zeros(16, 16, device="cuda"), torch.ones(16, 2, device="cuda"), torch.empty(16, 2, device="cuda")
    a[:, 3], b[3] = torch.inf, torch.tensor([TF32_SMALLEST, TF32_SMALLEST / 8], device="cuda")
    plan.run(tp.GemmArgs(a=a, b=b, c=c), tp.Workspace.allocate(plan))
    assert bool((c[:, 0] == torch.inf).all())
    assert bool(c[:, 1].isnan().all())


def cut(x: torch.Tensor) -> torch.Tensor:
    """f32 as tf32 at its coarsest: the last 13 bits cut off."""
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)


@pytest.mark.parametrize(("math", "least"), [("tf32", torch.finfo(torch.float32).tiny), ("tf32x3", TF32X3_LEAST)])
def test_tolerances_cover_what_is_cut_off(math: str, least: float) -> None:
    """(The interpreter multiplies whole numbers.) Products of one pair each, of every size, subnormal ones too."""
    g = torch.Generator().manual_seed(0)
    a, b = (draw((100_000,), tp.ElementKind.F32, "wide", 1, g) for _ in range(2))
    (high, low), (other_high, other_low) = ((cut(x).double(), cut(x - cut(x)).double()) for x in (a, b))
    got = high * other_high
    if math == "tf32x3":
        got += high * other_low + low * other_high
    wanted = a.double() * b.double()
    desc = tp.GemmDescriptor(m=1, n=1, k=1, element="f32", math=math)
    factor, other = factors(desc, {"a": a.double().abs(), "b": b.double().abs()}, "a", "b")
    assert float(factor[factor > 0].min()) == least
    t = tolerance(desc.element, desc.out, tp.MathPrecision(math), 1)
    error, allowed = (got - wanted).abs(), t.rtol * wanted.abs() + t.underflow
    kept = wanted.abs() < torch.finfo(torch.float32).max
    assert bool((error <= allowed + t.ctol * factor * other)[kept].all())
    assert not bool((error <= allowed + t.ctol * wanted.abs())[kept].all())
