"""Sampling: tokens against definitions, distributions against exact probabilities, rows that nothing else changes."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import WHERE, pinned
from torch import Tensor

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.reference.sampling import masses
from triplan.backends.triton.sampling import split_kernels
from triplan.backends.triton.sampling.shared_kernels import exp2_near, mass_of, scale_of

INF, NAN = math.inf, math.nan
ENTRIES = ["looped", "split"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: The tests of a distribution are of fixed seeds, at which they hold. This is how often others would fail.
FALSE_ALARM = 1e-6


def softmax_kept(x: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Probabilities after the filters, in float64, pair by pair: no sort, no mass."""
    p = x.double().softmax(-1)
    above = x[None, :] > x[:, None]  # [i, j]: j is greater than i
    if top_k:
        p = torch.where(above.sum(1) < top_k, p, 0)
        p = p / p.sum()
    p = torch.where((above * p).sum(1) < top_p, p, 0) if top_p < 1 else p
    p = torch.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1}],
    ids=lambda f: "-".join(f) or "none",
)
def test_distribution(filters: dict[str, float], device: str) -> None:
    """A chi-square test: each row draws once from one distribution with ties, at its own position.

    The reference takes rows one by one: of 6000, a probability that is wrong by 0.05 shows.
    """
    x, draws = torch.tensor([0.5, 2.0, -1.0, 0.5, 1.5, 2.0, 0.0, -3.0]), 6_000 if device == "cpu" else 1_000_000
    rows = (x * 0.9).to(device).expand(draws, len(x)).contiguous()
    tokens = F.sample(rows, temperature=0.9, seed=5, position=torch.arange(draws, device=device), **filters)  # type: ignore[arg-type]
    p = softmax_kept(x, **filters)  # type: ignore[arg-type]
    counts = torch.bincount(tokens.cpu(), minlength=len(x)).double()
    assert not counts[p == 0].any()
    expected = p[p > 0] * draws
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > FALSE_ALARM


@pytest.mark.parametrize("seed", range(20))
def test_kept_set(seed: int) -> None:
    """The tokens that filters keep, of logits with many ties, are those of the definition in float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-12, 12, (200,), generator=g).double() / 4
    top_k, top_p = int(torch.randint(1, 60, (), generator=g)), float(torch.rand((), generator=g))
    for filters in ({"top_k": top_k}, {"top_p": top_p}, {"top_k": top_k, "top_p": top_p, "min_p": 0.05}):
        wanted = softmax_kept(x, **filters) > 0  # type: ignore[arg-type]
        assert torch.equal(masses(x, 1.0, **filters) > 0, wanted)  # type: ignore[arg-type]


def extremes() -> tuple[Tensor, list[int]]:
    """Rows of which a token is certain, and the token."""
    x = torch.full((6, 50), -INF)
    x[0, 7] = 0  # a mask that allows one token
    x[2] = 0
    x[2, 9] = NAN
    x[3] = 1
    x[3, 11] = INF
    x[4, 13] = -3e38
    x[5] = 0
    x[5, 17] = 100
    return x, [7, -1, -1, 11, 13, 17]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.5, "min_p": 0.5}], ids=["none", "all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, INF])
def test_extremes(temperature: float, filters: dict[str, float], device: str) -> None:
    x, tokens = extremes()
    if temperature == INF:  # where all finite logits are alike
        x, tokens = x[:5], tokens[:5]
    for seed in range(3):
        found = F.sample(x.to(device), temperature=temperature, seed=seed, **filters)  # type: ignore[arg-type]
        assert found.tolist() == tokens


@pytest.mark.parametrize("device", DEVICES)
def test_greedy(device: str) -> None:
    """The first of the largest; filters keep it, whatever they are."""
    x = torch.randint(-5, 5, (30, 70), generator=torch.Generator().manual_seed(0)).float().to(device)
    wanted = x.cpu().argmax(1)
    for filters in ({}, {"top_k": 1}, {"top_p": -1.0}, {"min_p": 2.0}):
        assert torch.equal(F.sample(x, temperature=0, seed=1, **filters).cpu(), wanted)  # type: ignore[arg-type]
    one = F.sample(x, top_k=1, seed=3)
    assert torch.equal(x.gather(1, one[:, None])[:, 0], x.amax(1))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_alone(device: str) -> None:
    """A row's token depends on no other row, nor on its place, nor on strides."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 200, generator=g).bfloat16().to(device)
    seed, k = (torch.randint(1, 200, (40,), generator=g).to(device) for _ in range(2))
    whole = F.sample(x, top_k=k, top_p=0.9, seed=seed, position=3)
    turned = torch.randperm(40, generator=g).to(device)
    assert torch.equal(F.sample(x[turned], top_k=k[turned], top_p=0.9, seed=seed[turned], position=3), whole[turned])
    assert torch.equal(F.sample(x.t().contiguous().t(), top_k=k, top_p=0.9, seed=seed, position=3), whole)
    for r in range(0, 40, 13):
        one = slice(r, r + 1)
        assert torch.equal(F.sample(x[one], top_k=k[one], top_p=0.9, seed=seed[one], position=3), whole[one])


def test_seeds() -> None:
    x = torch.zeros(64, 1000)
    assert F.sample(x, seed=torch.arange(64)).unique().numel() > 50  # each row has its own
    alike = F.sample(x, seed=4, position=9)
    assert alike.unique().numel() == 1
    assert not torch.equal(F.sample(x, seed=4, position=10), alike)


def test_repeats_are_not_frozen() -> None:
    """Calls that are replayed see the numbers of each call."""
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    for i in range(12):
        given = {"temperature": 0.5 + i / 4, "top_k": 3 + 20 * i, "top_p": 0.3 + i / 20, "seed": i, "position": 2 * i}
        tensors = {k: torch.tensor([v, v]) for k, v in given.items()}
        assert torch.equal(F.sample(x, **given), F.sample(x.clone(), **tensors))  # type: ignore[arg-type]


def tokens_of(entry: str, desc: tp.SampleDescriptor, args: dict[str, Tensor], where: str) -> tuple[Tensor, Tensor]:
    """Those of an entry, and the reference's, in float64."""
    device = "cuda" if where == "gpu" else "cpu"
    plan = pinned(desc, entry, tp.Target.cpu(interpret=True) if where == "interpret" else tp.Target.current())
    assert plan is not None
    found = torch.empty(desc.rows, dtype=torch.int64, device=device)
    given = {name: t.to(device) for name, t in args.items()}
    plan.run(tp.SampleArgs(**given, out=found), tp.Workspace.allocate(plan, device))
    wanted = tp.TABLE.reference("sample").compute(desc, {**args, "logits": args["logits"].double()})["out"]
    return found.cpu(), wanted


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("element", "filters"), [("f32", "kpm"), ("f16", "kp"), ("bf16", "p"), ("f32", "k"), ("f32", "m")]
)
def test_rows(element: str, filters: str, entry: str, where: str) -> None:
    """Rows of several chunks, flat and steep, with ties, of few tokens, infinite, with NaN: the reference's tokens."""
    g, n = torch.Generator().manual_seed(2), 9000 if where == "interpret" else 128_256
    x = torch.randn(14, n, generator=g) * torch.tensor([2, 2, 12, 1, 1, 1, 1, 2, 6, 1, 2, 2, 1, 1])[:, None]
    x[3], x[4, 3:], x[5, 77], x[6, n - 2 :], x[13] = 0.5, -INF, NAN, INF, -INF
    x[7] = (x[7] * 4).round() / 4
    given = {
        "top_k": torch.tensor([50, 0, 0, 0, 0, 3, 0, 40, 0, 3, 600, 1, 0, 0]),
        "top_p": torch.tensor([1, 0.9, 0.9, 0.9, 0.5, 0.9, 0.9, 0.9, 0.99, 0.9, 0.9, 0.95, 0.5, 0.5]),
        "min_p": torch.tensor([0, 0, 0.1, 0, 0, 0, 0, 0, 0.001, 0, 0, 0, 0, 0.1]),
    }
    args = {
        "logits": x.to(tp.ElementKind.of(element).torch),
        "temperature": torch.tensor([1, 0.7, 1, 1.3, 1, 1, 1, 1.2, 0.5, 0, 1, 2, INF, 1]),
        **{name: t for letter, (name, t) in zip("kpm", given.items(), strict=True) if letter in filters},
        "seed": torch.arange(14) * 7 - 5,
        "position": torch.arange(14) + 2**33,
    }
    desc = tp.SampleDescriptor(element=element, rows=14, vocabulary=n, **{name: name in args for name in given})
    found, wanted = tokens_of(entry, desc, args, where)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("temperature", [1e-40, INF])
def test_extreme_rows(temperature: float, entry: str, where: str) -> None:
    """+inf alone has mass in its row, also at an infinite temperature, where infinities cancel."""
    x, tokens = extremes()
    every = torch.arange(5)
    args = {"logits": x[:5], "temperature": torch.full((5,), temperature), "top_p": torch.full((5,), 0.9)}
    args |= {"seed": every, "position": every}
    desc = tp.SampleDescriptor(element="f32", rows=5, vocabulary=50, top_p=True)
    found, wanted = tokens_of(entry, desc, args, where)
    assert found.tolist() == wanted.tolist() == tokens[:5]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["top_k", "top_p", "both"])
def test_thresholds(name: str, entry: str, where: str) -> None:
    """Ten logits, ties among them, at every top_k and as many top_p: hot rows of which each kept token is drawn."""
    x = torch.tensor([0.0, 1.0, 2.0, 2.0, -1.0, 0.5, 3.0, 1.0, -4.0, 2.0]).expand(30, 10).contiguous()
    every = torch.arange(30)
    args = {"logits": x, "temperature": torch.full((30,), 50.0), "seed": every * 5, "position": every}
    if name != "top_p":
        args["top_k"] = every % 10 + 1
    if name != "top_k":
        args["top_p"] = (every % 10 + 1) / 11 if name == "top_p" else torch.full((30,), 0.95)
    desc = tp.SampleDescriptor(element="f32", rows=30, vocabulary=10, top_k="top_k" in args, top_p="top_p" in args)
    found, wanted = tokens_of(entry, desc, args, where)
    assert torch.equal(found, wanted)


@pytest.mark.interpret
@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_few_rows_are_slow(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels find the threshold of top-p in flat, steep and peaked rows: none is left to the search of ``looped``."""
    slow = []
    looped = split_kernels.looped_token

    def counted(*given: Any) -> Any:
        slow.append(given)
        return looped(*given)

    monkeypatch.setattr(split_kernels, "looped_token", counted)
    g, n = torch.Generator().manual_seed(5), 16_000
    x = (
        torch.randn(20, n, generator=g)
        * torch.tensor([0.01, 0.5, 1, 1, 1, 2, 2, 3, 3, 5, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1])[:, None]
    )
    x[8, :20] += torch.linspace(8, 30, 20)  # a few tokens have most mass
    x[9, torch.randperm(n, generator=g)[:3]] += 40
    x[10, 30:] = -INF  # a mask allows few tokens
    x[11] = -x[11].exp()
    x[12, ::2] = x[12].median()  # more ties at the threshold than there are places
    x[13] = 2.0
    x[14], x[15] = x[14].sort().values, (3 * x[15]).round()
    sampled = torch.arange(n) // 8 % 4 == 0  # levels_kernel takes every fourth run of 8 tokens
    x[16, sampled] -= 30  # all have a key above the levels, in chunks that have places for a third of them
    x[17, sampled | (torch.arange(n) % 4096 > 1200)] -= 30  # in chunks that have places for them
    x[18, ::9] = 0.01 + 1e-5 * x[18, ::9]  # more values in one bucket than are tried
    x[19, torch.nonzero(~sampled)[:300:3]] += 200  # estimates that f32 does not hold, of many tokens
    args = {
        "logits": x.to(tp.ElementKind.of(element).torch),
        "temperature": torch.ones(20),
        "top_p": torch.tensor(
            [0.9, 0.5, 0.9, 0.1, 0.99, 0.9, 0.95, 0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 0.3, 0.9, 0.9, 0.6, 0.7, 0.8, 0.9]
        ),
        "seed": torch.arange(20),
        "position": torch.zeros(20, dtype=torch.int64),
    }
    desc = tp.SampleDescriptor(element=element, rows=20, vocabulary=n, top_p=True)
    found, wanted = tokens_of("split", desc, args, "interpret")
    assert torch.equal(found, wanted)
    assert not slow
    one = {name: t[1:2].clone() for name, t in args.items()}
    alone, _ = tokens_of("split", desc.replace(rows=1), one, "interpret")  # programs of one chunk, not of four
    assert torch.equal(alone, wanted[1:2])
    one["top_k"] = torch.tensor([600])  # in too many groups
    found, wanted = tokens_of("split", desc.replace(rows=1, top_k=True), one, "interpret")
    assert torch.equal(found, wanted)
    assert len(slow) == 1


@triton.jit
def powers_of(x, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    tl.store(out + i, exp2_near(tl.load(x + i)))


@pytest.mark.interpret
def test_powers() -> None:
    """Powers of two against those of 60 digits, and that of 0, which the mass of the largest logit is."""
    x = (torch.arange(4096, dtype=torch.float64) - 2047) / 4096
    x[0] = -0.5
    found = torch.empty(4096, dtype=torch.float64)
    powers_of[(1,)](x, found, 4096)
    with localcontext() as context:
        context.prec = 60
        off = [abs(Decimal(p) / Decimal(2) ** Decimal(v) - 1) for v, p in zip(x.tolist(), found.tolist(), strict=True)]
    assert max(off) < Decimal(2) ** -40
    assert found[2047] == 1


@triton.jit
def masses_of(x, out, rate, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    tl.store(out + i, mass_of(tl.load(x + i), scale_of(tl.load(rate), tl.load(x))))


@pytest.mark.interpret
@pytest.mark.parametrize("temperature", [1.0, 0.25, 8.0])
def test_masses(temperature: float) -> None:
    """Those of 60 digits, as far as the exponential allows: at most one unit off."""
    below = torch.rand(4095, generator=torch.Generator().manual_seed(0)) * 32 * temperature
    x = torch.cat([torch.tensor([3.0]), 3 - below])
    found = torch.empty(4096, dtype=torch.int64)
    masses_of[(1,)](x, found, torch.tensor([1 / temperature], dtype=torch.float64), 4096)
    with localcontext() as context:
        context.prec = 60
        exact = [((Decimal(v) - 3) / Decimal(temperature)).exp() * 2**40 for v in x.tolist()]
        assert all(abs(m - e) < Decimal("0.5") + e / 2**40 for m, e in zip(found.tolist(), exact, strict=True))
        off = [abs(m - int(e.to_integral_value())) for m, e in zip(found.tolist(), exact, strict=True)]
    assert found[0] == 2**40
    assert max(off) <= 1


@pytest.mark.parametrize(
    ("logits", "given", "error"),
    [
        (torch.zeros(3), {}, RuntimeError),
        (torch.zeros(3, 4, dtype=torch.float64), {}, NotImplementedError),
        (torch.zeros(3, 4), {"top_k": torch.tensor([1, 2])}, RuntimeError),
    ],
)
def test_refusals(logits: Tensor, given: dict[str, Tensor], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"sample\(\)"):
        F.sample(logits, seed=1, **given)  # type: ignore[arg-type]


def test_refused_descriptors() -> None:
    with pytest.raises(tp.InvalidProblem, match="at most"):
        tp.SampleDescriptor(element="f32", rows=1, vocabulary=2**22 + 1)
    with pytest.raises(tp.InvalidProblem, match="f16, bf16 or f32"):
        tp.SampleDescriptor(element="f64", rows=1, vocabulary=8)


def test_opcheck() -> None:
    seed = torch.arange(3)
    args = (torch.randn(3, 9), torch.ones(3), seed, seed, None, torch.full((3,), 0.9), None)
    torch.library.opcheck(torch.ops.triplan.sample.default, args)
