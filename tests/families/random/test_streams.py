"""Streams of random numbers: Philox's published words, which an element gets, shards, accuracy, distributions.

Statistical tests draw from fixed seeds, so that they pass or fail for good; each would fail for one seed in a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases.functional import DEVICES
from proofs import target
from samples import SetConstant, same

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.reference.philox import philox
from triplan.backends.triton.common.philox_kernels import minus_log
from triplan.backends.triton.random import groups, rows
from triplan.backends.triton.random.shared_kernels import NUMBERS, circle, root

Tensor = torch.Tensor
OPS: dict[str, dict[str, float]] = {
    "uniform": {"low": -1.0, "high": 3.0},
    "normal": {"mean": 0.5, "std": 2.0},
    "exponential": {"lambd": 1.5},
    "randint": {"low": -7, "high": 1000},
    "bernoulli_p": {"p": 0.3},
}
#: Of a normal distribution, what lies further from 0 than this is one in a million; of Kolmogorov's, above this.
Z, KOLMOGOROV = 4.892, math.sqrt(math.log(2e6) / 2)
WHERE = [pytest.param("cpu"), pytest.param("interpret", marks=pytest.mark.interpret)]
WHERE.append(pytest.param("gpu", marks=pytest.mark.gpu))


def drawn(
    op: str,
    shape: tuple[int, ...],
    first: int = 0,
    where: str = "cpu",
    *,
    seed: int = 1,
    offset: int = 0,
    element: str = "f32",
    kernel: str | None = None,
    parameters: dict[str, float] | None = None,
    **fields: Any,
) -> Tensor:
    desc = tp.RandomDescriptor(op=op, element=element, out_shape=shape, **fields)
    plan = tp.plan(desc, target=target(where), kernel=kernel)
    out = torch.empty(shape, dtype=desc.element.torch, device=plan.target.device_type)
    numbers = {**(parameters or OPS[op]), "seed": seed, "offset": offset, "first": first}
    plan.run(plan.args_type(**numbers, out=out))
    return out.cpu()


# --- words ---

#: Random123's known answers (kat_vectors, philox4x32 10): counter, key, words.
ANSWERS = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_published_words(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in philox([torch.tensor(c) for c in counter], key)) == words


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kernel", ["groups", "rows"])
def test_which_word_an_element_gets(kernel: str, where: str) -> None:
    """The document's definition. (The upper half of a counter is that of 64-bit numbers, two to a counter.)"""
    seed, offset, start = 0x299F31D0_A4093822, 0x03707344_13198A2E, 0x05A308D3_243F6A88
    halves = [n & 0xFFFFFFFF for n in (offset, offset >> 32)]
    key = (seed & 0xFFFFFFFF, seed >> 32)
    found = [philox([torch.tensor(n) for n in (c & 0xFFFFFFFF, c >> 32, *halves)], key) for c in (start, start + 1)]
    words = [int(w) for four in found for w in four]
    given = {"seed": seed, "offset": offset, "kernel": None if where == "cpu" else kernel}
    unit = drawn("uniform", (7,), 4 * start + 1, where, **given)
    expected = torch.tensor([(w >> 8) * 2.0**-24 for w in words[1:]])
    torch.testing.assert_close(unit, torch.addcmul(torch.tensor(-1.0), expected, torch.tensor(4.0)), rtol=0, atol=2e-7)
    whole = drawn("randint", (3,), 2 * start + 1, where, element="i64", **given)
    pairs = [(words[i + 1] << 32 | words[i]) * 1007 >> 64 for i in (2, 4, 6)]
    assert whole.tolist() == [n - 7 for n in pairs]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("low", "high"), [(0, 2**32 - 1), (-5, 2**32 - 5), (-6, 2**32 - 5), (-(2**62), 2**62), (-(2**63), 2**63 - 1)]
)
def test_integers_are_upper_halves_of_products(low: int, high: int, where: str) -> None:
    """Where the span has 32 bits, and where it has more."""
    zero = torch.zeros(64, dtype=torch.int64)
    words = torch.stack(philox([torch.arange(64), zero, zero, zero], (1, 0)), 1).flatten().tolist()
    found = drawn("randint", (128,), where=where, element="i64", parameters={"low": low, "high": high})
    pairs = zip(words[::2], words[1::2], strict=True)
    assert found.tolist() == [low + ((above << 32 | below) * (high - low) >> 64) for below, above in pairs]


@pytest.mark.parametrize("where", WHERE)
def test_words_are_compared_with_a_probability_exactly(where: str) -> None:
    """An element is 1 if its word is below p * 2**32, which the reference compares as a float."""
    words = torch.stack(philox([torch.tensor([0, 1]), *[torch.zeros(2, dtype=torch.int64)] * 3], (1, 0)), 1).flatten()
    desc = tp.RandomDescriptor(op="bernoulli_p", element="i8", out_shape=(8,))
    plan = tp.plan(desc, target=target(where))
    out = torch.empty(8, dtype=torch.int8, device=plan.target.device_type)
    for least in (0, 1, *words.tolist(), *(words + 1).tolist(), 2**32 - 1, 2**32):
        plan.run(plan.args_type(p=least / 2**32, seed=1, offset=0, first=0, out=out))
        assert torch.equal(out.cpu() != 0, words < least)


# --- shards ---


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("op", OPS)
def test_a_shard_has_the_bits_of_the_whole(op: str, where: str) -> None:
    """Any part, at any place in any vector: consecutive elements by both kernels, and blocks of matrices."""
    for element in ("f32", "bf16", "f64") if where != "interpret" else ("f32",):
        whole = drawn(op, (6, 50), where=where, element=element)
        for first in range(5):
            part = drawn(op, (97,), first, where, element=element)
            same(part, whole.flatten()[first : first + 97])
            if where != "cpu":
                same(drawn(op, (97,), first, where, element=element, kernel="rows"), part)
        if where != "cpu":  # several programs, whole and not
            for first in (8, 2**40 + 1):
                same(*(drawn(op, (4500,), first, where, element=element, kernel=k) for k in ("groups", "rows")))
        block = drawn(op, (3, 21), 2 * 50 + 13, where, element=element, global_shape=(6, 50))
        same(block, whole[2:5, 13:34])


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize("op", [*OPS, "dropout"])
def test_any_strides_have_the_packed_bits(op: str, where: str) -> None:
    """x and out contiguous along the same axis, along different ones, or along none; rows of whole counters or not."""
    plans, device = set(), target(where).device_type
    numbers = {**OPS.get(op, {"p": 0.3}), "seed": 3, "offset": 4}
    for shape in ((3, 70, 2), (2, 5, 40), (130, 33), (3, 2, 263), (67, 44)):
        views = [
            lambda t: t,
            lambda t: torch.empty_like(t.mT, memory_format=torch.contiguous_format).mT,
            lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., : t.shape[-1]],
            lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2],
        ]
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
        for first in (0, 3):
            found = []
            for of_x in views if op == "dropout" else views[:1]:
                for of_out in views:
                    given = {"x": of_x(x).copy_(x)} if op == "dropout" else {}
                    args = tp.RandomArgs(**numbers, **given, first=first, out=of_out(torch.empty_like(x)))
                    plan = tp.plan(tp.RandomDescriptor.from_args(args, op=op), target=target(where))
                    plan.run(args)
                    plans.add(plan.sku().kernel)
                    found.append(args.out.clone())
            assert all(torch.equal(f, found[0]) for f in found)
    assert plans == {"groups", "rows"}


@pytest.mark.parametrize("shape", [(5, 0), (0, 5)])
def test_results_without_elements_may_lie_transposed(shape: tuple[int, int]) -> None:
    layouts = {"out": tp.Layout.strided(unit_axis=0)}
    plan = tp.plan(tp.RandomDescriptor(op="normal", element="f32", out_shape=shape, layouts=layouts), target="h200")
    assert not plan.launches


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize(("op", "element"), [("normal", "f32"), ("randint", "i64"), ("uniform", "bf16")])
def test_threads_of_several_counters_have_the_packed_bits(
    op: str, element: str, where: str, constant: SetConstant
) -> None:
    """As where results are many."""
    constant(rows, "THREADS", 1)
    constant(rows, "LOOPED_THREADS", 1)
    for shape, first in (((37, 132), 0), ((37, 133), 3), ((5, 3, 71), 2)):
        found = []
        for turns in (False, True):
            out = torch.empty(shape, dtype=tp.ElementKind(element).torch, device=target(where).device_type)
            out = torch.empty_like(out.mT, memory_format=torch.contiguous_format).mT if turns else out
            args = tp.RandomArgs(**OPS[op], seed=3, offset=4, first=first, out=out)
            plan = tp.plan(tp.RandomDescriptor.from_args(args, op=op), target=target(where))
            plan.run(args)
            found.append(out)
        assert plan.launches[0].constexprs["GROUPS"] > 1
        assert torch.equal(*found)


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize(("op", "element"), [("normal", "f32"), ("bernoulli_p", "u8"), ("uniform", "bf16")])
def test_narrow_results_that_no_cache_holds_have_the_packed_bits(
    op: str, element: str, where: str, constant: SetConstant
) -> None:
    """They are turned by threads that exchange elements."""
    constant(rows, "L2_SHARE", 0)
    for shape, first in (((3, 2, 264), 0), ((3, 2, 265), 3), ((2, 3, 257), 2)):
        desc = tp.RandomDescriptor(op=op, element=element, out_shape=shape)
        out = torch.empty(shape, dtype=desc.element.torch, device=target(where).device_type)
        out = torch.empty_like(out.mT, memory_format=torch.contiguous_format).mT
        args = tp.RandomArgs(**OPS[op], seed=3, offset=4, first=first, out=out)
        plan = tp.plan(tp.RandomDescriptor.from_args(args, op=op), target=target(where))
        plan.run(args)
        assert plan.launches[0].constexprs["TURNED"]
        assert torch.equal(out.cpu(), drawn(op, shape, first, where, seed=3, offset=4, element=element))


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize(("op", "element"), [("normal", "f32"), ("exponential", "f16"), ("bernoulli_p", "u8")])
def test_blocks_of_one_program_have_the_bits_of_others(
    op: str, element: str, where: str, constant: SetConstant
) -> None:
    """Also where the last program has fewer of them."""
    shape, firsts = (5 * 512 + 7,), (0, 3)
    alone = [drawn(op, shape, first, where, element=element, kernel="groups") for first in firsts]
    constant(groups, "PROGRAMS", 1)
    desc = tp.RandomDescriptor(op=op, element=element, out_shape=shape)
    assert tp.plan(desc, target=target(where), kernel="groups").launches[0].constexprs["BLOCKS"] > 1
    for one, first in zip(alone, firsts, strict=True):
        assert torch.equal(one, drawn(op, shape, first, where, element=element, kernel="groups"))
        out = torch.zeros(2 * one.numel(), dtype=one.dtype, device=target(where).device_type)[::2]
        args = tp.RandomArgs(**OPS[op], seed=1, offset=0, first=first, out=out)
        tp.plan(desc.replace(layouts={"out": "strided"}), target=target(where), kernel="groups").run(args)
        assert torch.equal(one, out.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_shards_of_functional_calls(device: str) -> None:
    def drop(x: Tensor, first: int) -> Tensor:
        return F.dropout(x, 0.4, generator=torch.Generator(device).manual_seed(3), first=first)

    x = torch.randn(8, 9, device=device)
    whole = drop(x, 0)
    same(torch.cat([drop(x[:3], 0), drop(x[3:], 27)]), whole)
    same(drop(x.t().contiguous().t(), 0), whole)  # the index is that of the shape, whatever the strides


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kernel", ["groups", "rows"])
@pytest.mark.parametrize("added", [None, 0, 7, -9, 2**62])
def test_an_offset_is_added_to_that_of_a_state(added: int | None, kernel: str, where: str) -> None:
    """Modulo 2**64, with a carry from the lower half."""
    seed, offset = -3, 2**62 + 2**32 - 1
    desc = tp.RandomDescriptor(op="normal", element="f32", out_shape=(3, 40), state="device")
    chosen = None if where == "cpu" else kernel  # of the reference there is one
    plan = tp.plan(desc, target=target(where), kernel=chosen)
    device = plan.target.device_type
    out, state = torch.empty(3, 40, device=device), torch.tensor([seed, offset], device=device)
    plan.run(tp.RandomArgs(**OPS["normal"], state=state, offset=added, out=out))
    expected = (offset + (added or 0) + 2**63) % 2**64 - 2**63
    same(out.cpu(), drawn("normal", (3, 40), where=where, seed=seed, offset=expected, kernel=chosen))
    assert state.tolist() == [seed, offset]


def test_one_binary_wherever_seeds_are() -> None:
    """Eager calls have them on the host, captured ones on the device: a capture may not compile."""
    for element in ("bf16", "f64", "f32"):
        desc = tp.RandomDescriptor(op="dropout", element=element, out_shape=(2**20,))
        kinds = (desc, desc.replace(keeps_state=True), desc.replace(state="device"))
        assert len({tp.plan(d, target="h200").launches[0].source() for d in kinds}) == 1


# --- accuracy ---


@triton.jit
def evaluated(words, log, short, cos, sin, unit, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The functions of each of BLOCK words (u32), and ``uniform`` of [0, 1) in the type of ``unit``."""
    at = tl.arange(0, BLOCK)
    word = tl.load(words + at).to(tl.uint32, bitcast=True)
    x, y, sign = circle(word)
    tl.store(log + at, minus_log(word))
    tl.store(short + at, minus_log(word, True))
    tl.store(cos + at, (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True))
    tl.store(sin + at, (y.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True))
    found = UNIFORM(word, None, (0.0, 1.0), unit.dtype.element_ty)
    tl.store(unit + at, found.to(unit.dtype.element_ty))


@pytest.mark.parametrize("where", WHERE[1:])
def test_errors_of_the_functions(where: str) -> None:
    """f32, in ulp, where they are least accurate: the ends, the seam of the logarithm's two ways, quadrants."""
    near = [0, 2**32 - 64, 0xB504F400 - 32, *(2**29 * i - 32 for i in range(1, 8))]
    words = torch.cat([torch.arange(n, n + 64) for n in near])
    words = torch.cat([words, torch.randint(2**32, (8192 - len(words),), generator=torch.Generator().manual_seed(0))])
    device = target(where).device_type
    given = words.to(torch.int32).to(device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        outs = [torch.empty(8192, device=device) for _ in range(4)]
        unit = torch.empty(8192, dtype=dtype, device=device)
        evaluated[(1,)](given, *outs, unit, NUMBERS["uniform"], 8192, enable_fp_fusion=False)
        assert 0 <= float(unit.min()) <= float(unit.max()) < 1
    log, short, cos, sin = (t.cpu().double() for t in outs)
    u, turn = (words.double() + 0.5) * 2.0**-32, words.double() * 2.0**-32
    quarter = (turn * 4).round()
    rest = (turn - quarter / 4) * (2 * math.pi)
    exact = torch.stack([rest.cos(), -rest.sin(), -rest.cos(), rest.sin()])
    cosine, sine = (exact.roll(n, 0).gather(0, quarter.long()[None] % 4)[0] for n in (0, 1))
    exact_log = -torch.where(u < 0.5, u.log(), torch.log1p(u - 1))
    assert float((short / exact_log - 1).abs().max()) <= 2.0**-16
    for got, expected in ((log, exact_log), (cos, cosine), (sin, sine)):
        ulp = torch.ldexp(torch.ones_like(expected), torch.frexp(expected)[1] - 24)
        assert float(((got - expected).abs() / ulp).max()) <= 3


@triton.jit
def rooted(roots, rounded, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``root`` and sqrt.rn of the f32 whose bits are those of 1/2 and the element's number more."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = (0x3F000000 + at).to(tl.float32, bitcast=True)
    tl.store(roots + at, root(x))
    tl.store(rounded + at, tl.sqrt_rn(x))


@pytest.mark.gpu
def test_roots_are_rounded_to_nearest() -> None:
    """Of all f32 in [1/2, 2): others differ from these by powers of 4."""
    roots, rounded = torch.empty(2, 1 << 24, device="cuda")
    rooted[(1 << 14,)](roots, rounded, 1 << 10, enable_fp_fusion=False)
    assert torch.equal(roots, rounded)


# --- distributions ---

COUNT = 2**16


def distance(values: Tensor, below: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's and Smirnov's sqrt(n) * D against the distribution function ``below``."""
    x = below(values.double().flatten().sort().values)
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    return math.sqrt(len(x)) * max(float((x - steps[:-1]).max()), float((steps[1:] - x).max()))


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: (x + 1) / 4,
    "normal": lambda x: torch.special.ndtr((x - 0.5) / 2),
    "exponential": lambda x: -torch.expm1(-1.5 * x),
}


@pytest.mark.parametrize("op", DISTRIBUTIONS)
def test_distributions(op: str) -> None:
    for element, seed in (("f32", 1), ("f64", -5), ("f32", 2**40)):
        assert distance(drawn(op, (COUNT,), seed=seed, element=element), DISTRIBUTIONS[op]) < KOLMOGOROV
    assert distance(drawn(op, (COUNT,)) * 1.05, DISTRIBUTIONS[op]) > KOLMOGOROV  # it can fail


def test_integers_and_choices() -> None:
    counts = torch.bincount((drawn("randint", (COUNT,), element="i32") + 7).long(), minlength=1007).double()
    square = float(((counts - COUNT / 1007).square() / (COUNT / 1007)).sum())
    assert abs(square - 1006) < Z * math.sqrt(2 * 1006)
    ones = float(drawn("bernoulli_p", (COUNT,)).sum())
    assert abs(ones - 0.3 * COUNT) < Z * math.sqrt(0.3 * 0.7 * COUNT)
    p = torch.linspace(0, 1, COUNT, dtype=torch.float64)
    chosen = F.bernoulli(p, generator=torch.Generator().manual_seed(0))
    assert abs(float((chosen - p).sum())) < Z * math.sqrt(float((p * (1 - p)).sum()))
    assert not bool(chosen[0])
    assert bool(chosen[-1])


def related() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs of draws that must not be correlated."""
    for op in ("uniform", "normal", "exponential"):
        x = drawn(op, (COUNT,))
        yield from ((f"{op} lag {n}", x[:-n], x[n:]) for n in (1, 2, 3, 4, 8, 1024))
        if op == "normal":  # both of a pair have one radius
            yield "squares", x[::2].sub(0.5).square(), x[1::2].sub(0.5).square()
        yield from ((f"{op} lanes {i} {j}", x[i::4], x[j::4]) for i in range(4) for j in range(i))
        yield f"{op} seeds", x, drawn(op, (COUNT,), seed=2)
        yield from ((f"{op} offset {n}", x, drawn(op, (COUNT,), offset=n)) for n in (1, 4, 2**32, -(2**63)))


def test_no_correlation() -> None:
    for name, a, b in related():
        z = float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) * math.sqrt(len(a))
        assert abs(z) < Z, name
