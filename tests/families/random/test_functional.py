"""Functional random numbers and dropout: torch's rules, gradients, generators, replays, captured graphs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases.functional import DEVICES
from replaying import replays_on_cpu
from samples import same
from torch.library import opcheck
from torch.nn import functional as tf

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan import nn
from triplan.functional import _seeds
from triplan.functional._replay import replay as _replay
from triplan.functional._replay.replay import replayed
from triplan.functional.random import engine

Tensor = torch.Tensor
TRIPLAN: Any = torch.ops.triplan


def drawn(shape: tuple[int, ...], seed: int, offset: int, **fields: Any) -> Tensor:
    """Uniform numbers of [-1, 3), by a plan."""
    plan = tp.plan(tp.RandomDescriptor(op="uniform", element="f32", out_shape=shape, **fields), target="cpu")
    out = torch.empty(shape)
    plan.run(tp.RandomArgs(low=-1.0, high=3.0, seed=seed, offset=offset, out=out))
    return out


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Calls whose result is one number, or that leave no choice.
CERTAIN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "uniform_": (lambda x: F.uniform_(x, 2, 2), lambda x: x.uniform_(2, 2)),
    "normal_": (lambda x: F.normal_(x, -1.5, 0), lambda x: x.normal_(-1.5, 0)),
    "bernoulli_": (lambda x: F.bernoulli_(x, 1), lambda x: x.bernoulli_(1)),
    "bernoulli_ tensor": (lambda x: F.bernoulli_(x, x * 0), lambda x: x.bernoulli_(x * 0)),
    "bernoulli": (lambda x: F.bernoulli(x * 0 + 1), lambda x: torch.bernoulli(x * 0 + 1)),
    "bernoulli p": (lambda x: F.bernoulli(x, 0.0), lambda x: torch.bernoulli(x, 0.0)),
    "random_": (lambda x: F.random_(x, 5, 6), lambda x: x.random_(5, 6)),
    "random_ to": (lambda x: F.random_(x, 1), lambda x: x.random_(1)),
    "randint_like": (lambda x: F.randint_like(x, -3, -2), lambda x: torch.randint_like(x, -3, -2)),
    "normal": (lambda x: F.normal(x, 0.0), lambda x: torch.normal(x, 0.0)),
    "normal of std": (lambda x: F.normal(2.0, x * 0), lambda x: torch.normal(2.0, x * 0)),
    "dropout": (lambda x: F.dropout(x, 1.0), lambda x: tf.dropout(x * 0, 1.0)),
    "dropout 0": (lambda x: F.dropout(x, 0.0), lambda x: tf.dropout(x, 0.0)),
    "dropout off": (lambda x: F.dropout(x, 0.7, False), lambda x: tf.dropout(x, 0.7, False)),
    "dropout in place": (lambda x: F.dropout(x, 1.0, inplace=True), lambda x: x.zero_()),
    "dropout1d": (lambda x: F.dropout1d(x.flatten(2), 1.0), lambda x: tf.dropout1d(x.flatten(2), 1.0)),
    "dropout2d": (lambda x: F.dropout2d(x, 1.0), lambda x: tf.dropout2d(x, 1.0)),
    "dropout3d": (lambda x: F.dropout3d(x, 1.0, inplace=True), lambda x: tf.dropout3d(x, 1.0, inplace=True)),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "turned": lambda x: x.permute(3, 0, 2, 1),
    "sliced": lambda x: x[:, ::2, 1:, ::3],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CERTAIN)
def test_certain_calls_equal_torchs(name: str, view: str, device: str) -> None:
    for dtype in FLOATS[1:3]:
        x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        results = [call(VIEWS[view](x.clone())) for call in CERTAIN[name]]
        same(*results)
        assert results[0].stride() == results[1].stride()


@pytest.mark.parametrize("device", DEVICES)
def test_new_tensors_are_as_torchs(device: str) -> None:
    x = torch.zeros(3, 4, device=device).t()
    g = torch.Generator(device).manual_seed(0)
    for name, args in (
        ("rand", ((2, 3),)),
        ("randn", (2, 3)),
        ("randint", (5, (2, 3))),
        ("randint", (2, 5, (0,))),
        ("normal", (0.0, 1.0, (2,))),
    ):
        for dtype in (None, torch.bfloat16):
            options: dict[str, Any] = {"device": device, "generator": g}
            options |= {} if dtype is None else {"dtype": dtype}
            ours, theirs = (getattr(of, name)(*args, **options) for of in (F, torch))
            assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
    for name, args in (("rand_like", ()), ("randn_like", ()), ("randint_like", (7,))):
        for dtype in (None, torch.float64):
            ours, theirs = (getattr(of, name)(x, *args, dtype=dtype) for of in (F, torch))
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    out = torch.empty(0, device=device)
    assert F.rand(2, 2, out=out) is out
    assert out.shape == (2, 2)
    assert F.randn(3, device=device, requires_grad=True).requires_grad
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16):
        full = F.random_(torch.empty(4000, dtype=dtype, device=device), generator=g).double()
        most = 2**11 if dtype is torch.float16 else 1 if dtype is torch.bool else torch.iinfo(dtype).max
        assert 0 <= float(full.min()) < most / 50 + 0.5
        assert 0.98 * most < float(full.max()) <= most
    short = F.trunc_normal_(torch.empty(4000, dtype=torch.bfloat16, device=device), 1.0, 2.0, -1.0, 2.0)
    assert -1 <= float(short.min()) < -0.9
    assert 1.9 < float(short.max()) <= 2
    assert F.random_(torch.empty(9, dtype=torch.int64, device=device)).min() >= 0


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda x: F.uniform_(x, 2, 1), RuntimeError, "range"),
        (lambda x: F.uniform_(x.half(), 0, 1e6), RuntimeError, "range"),
        (lambda x: F.uniform_(x.int()), NotImplementedError, "int32"),
        (lambda x: F.normal_(x, 0, -1), RuntimeError, "std >= 0"),
        (lambda x: F.exponential_(x, 0), RuntimeError, "lambda > 0"),
        (lambda x: F.bernoulli_(x, 1.5), RuntimeError, r"\[0, 1\]"),
        (lambda x: F.bernoulli(x.int()), NotImplementedError, "int32"),
        (lambda x: F.random_(x, 3, 3), RuntimeError, "less than"),
        (lambda x: F.random_(x.to(torch.int8), 0, 300), RuntimeError, "out of bounds"),
        (lambda x: F.randint(3, 3, (2,)), RuntimeError, "less than"),
        (lambda x: F.dropout(x, 1.5), ValueError, "between 0 and 1"),
        (lambda x: F.dropout(x.to(torch.complex64)), NotImplementedError, "complex64"),
        (lambda x: F.dropout2d(x), RuntimeError, "axes"),
        (lambda x: F.uniform_(x.requires_grad_()), RuntimeError, "leaf"),
        (lambda x: F.normal(0.0, 1.0), TypeError, "size"),
        (lambda x: drawn((2,), 0, 0, global_shape=(1,)), tp.InvalidProblem, "no part"),
        (lambda x: tp.RandomDescriptor(op="normal", element="i32", out_shape=(2,)), tp.InvalidProblem, "floats"),
        (
            lambda x: tp.RandomDescriptor(op="normal", element="f32", out_shape=(2,), keeps_state=True),
            tp.InvalidProblem,
            "dropout",
        ),
    ],
)
def test_refusals_say_why(call: Callable[[Tensor], Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(torch.zeros(2, 3))


# --- dropout ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_and_its_gradients(dtype: torch.dtype, device: str) -> None:
    x = torch.rand(40, 50, device=device).add(0.5).to(dtype).requires_grad_()
    for call in (F.dropout, nn.Dropout(0.3)):
        y = call(x, 0.3) if call is F.dropout else call(x)
        kept = y != 0
        assert 0.6 < float(kept.double().mean()) < 0.8
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        scale = torch.tensor(1 / 0.7, dtype=wide, device=device)
        same(y, torch.where(kept, (x.to(wide) * scale).to(dtype), 0))
        g = torch.randn_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
        same(dx, torch.where(kept, (g.to(wide) * scale).to(dtype), 0))
        (again,) = torch.autograd.grad(dx, g, torch.ones_like(dx))
        same(again != 0, kept)
        with torch.no_grad():
            assert (call(x, 0.3) if call is F.dropout else call(x)).ne(0).ne(kept).any()
    wild = torch.full((4,), math.inf, device=device)
    same(F.dropout(wild, 1.0), torch.zeros_like(wild))
    assert F.dropout(x, 0.3, False) is x


def test_dropout_in_place_and_in_forward_mode() -> None:
    x = torch.ones(30, requires_grad=True)
    y = F.dropout(x * 1, 0.5, inplace=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    same(dx, y.detach())
    value, tangent = torch.func.jvp(lambda t: F.dropout(t, 0.5), (torch.ones(30),), (torch.ones(30),))
    same(value, tangent)
    rows = torch.func.vmap(lambda t: F.dropout(t, 0.5), randomness="different")(torch.ones(4, 30))
    assert len({tuple(r.tolist()) for r in rows}) == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "shape"), [("Dropout1d", (8, 9, 5)), ("Dropout2d", (8, 9, 2, 3)), ("Dropout3d", (8, 9, 2, 2, 2))]
)
def test_channels_are_dropped_as_a_whole(name: str, shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    module = getattr(nn, name)(0.5)
    y = module(x)
    channels = y.detach().flatten(2)
    same(channels.amin(2), channels.amax(2))
    assert set(channels.flatten().tolist()) == {0.0, 2.0}
    (dx,) = torch.autograd.grad(y.sum(), x)
    same(dx, y.detach())
    assert module.eval()(x) is x
    assert module.train()(x[0].detach()).shape == x.shape[1:]


@pytest.mark.parametrize("device", DEVICES)
def test_ops_are_registered_as_torch_expects(device: str) -> None:
    x = torch.rand(4, 5, device=device, requires_grad=True)
    state = torch.tensor([3, 5], device=device)
    opcheck(TRIPLAN.dropout, (x, state, 0, 0, 0.5, 0))
    opcheck(TRIPLAN.dropout, (x.detach().t(), None, 1, 2, 0.5, 7))
    opcheck(TRIPLAN.dropout_and_keep, (x, 1, 2, 0.5, 7))
    opcheck(TRIPLAN.bernoulli, (x, state, 0, 0, 0))
    opcheck(TRIPLAN.random, (x, state, 0, 0, "normal", [0.0, 1.0], 0))
    opcheck(TRIPLAN.random_, (x.detach().int(), state, 0, 0, "randint", [0, 9], 0))


def test_compiled_code_draws_anew() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + F.rand_like(x), backend="aot_eager", fullgraph=True)
    x = torch.ones(50, requires_grad=True)
    first, second = compiled(x), compiled(x)
    assert first.ne(second).any()
    (dx,) = torch.autograd.grad(first.sum(), x)
    same(dx.ne(0), first.detach() >= 2)


# --- generators and replays ---


class HostGenerator:
    """Stands for a generator of a GPU."""

    device = torch.device("cuda")

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture(params=["host", "device"])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose state is read on the host, as a GPU's is, or one that torch draws with."""
    if request.param == "device":
        return torch.Generator().manual_seed(5)
    monkeypatch.setattr(engine, "_is_alone", lambda t: True)
    monkeypatch.setattr(engine, "is_capturing", lambda: False)
    return HostGenerator(2**64 - 5)


def test_states_of_generators() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_is_alone", lambda t: True)
        patch.setattr(engine, "is_capturing", lambda: False)
        g: Any = HostGenerator(2**64 - 5)
        draws = [F.uniform_(torch.empty(8), -1, 3, generator=g) for _ in range(2)]
        assert g.offset == 8
    for i, x in enumerate(draws):
        same(x, drawn((8,), -5, 4 * i - 2**63))
    g = torch.Generator().manual_seed(5)
    before = g.get_state()
    x, y = F.rand(8, generator=g), F.rand(8, generator=g)
    assert x.ne(y).all()
    same(F.rand(8, generator=g.set_state(before)), x)
    torch.manual_seed(3)
    z = F.randn(8)
    torch.manual_seed(3)
    same(F.randn(8), z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_is_alone", lambda t: True)
        patch.setattr(engine, "is_capturing", lambda: False)
        with pytest.raises(RuntimeError, match="'cuda' device type"):
            F.rand(8, generator=g)


REPLAYED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "uniform_": lambda x, g: F.uniform_(x, generator=g),
    "normal_": lambda x, g: F.normal_(x, 1.0, 2.0, generator=g),
    "exponential_": lambda x, g: F.exponential_(x, generator=g),
    "random_": lambda x, g: F.random_(x, 1000, generator=g),
    "bernoulli_": lambda x, g: F.bernoulli_(x, generator=g),
    "rand_like": lambda x, g: F.rand_like(x, generator=g),
    "randn_like": lambda x, g: F.randn_like(x, generator=g),
    "randint_like": lambda x, g: F.randint_like(x, 1000, generator=g),
    "normal": lambda x, g: F.normal(x, 1.0, generator=g),
    "bernoulli": lambda x, g: F.bernoulli(torch.full_like(x, 0.5), generator=g),
    "dropout": lambda x, g: F.dropout(x.fill_(1), 0.5, generator=g),
    "dropout in place": lambda x, g: F.dropout(x.fill_(1), 0.5, inplace=True, generator=g),
    "dropout2d": lambda x, g: F.dropout2d(x.fill_(1).view(4, 4, 2, 4), 0.5, generator=g),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_calls_draw_anew(name: str, generator: Any) -> None:
    """Five calls, of which a replay answers the last three, draw what five calls draw that are not replayed."""
    torch.manual_seed(0)
    state = generator.offset if isinstance(generator, HostGenerator) else generator.get_state()
    alone = [REPLAYED[name](torch.zeros(2, 64), generator).clone() for _ in range(5)]
    if isinstance(generator, HostGenerator):
        generator.offset = state
    else:
        generator.set_state(state)
    with replays_on_cpu() as answers:
        found = [REPLAYED[name](torch.zeros(2, 64), generator).clone() for _ in range(5)]
    assert answers.count(True) >= 3
    for a, b in zip(found, alone, strict=True):
        same(a, b)
    assert len({tuple(t.flatten().tolist()) for t in found}) == 5


@pytest.mark.parametrize("call", [F.dropout, F.dropout1d])
def test_replayed_gradients_drop_what_their_call_dropped(call: Callable[..., Tensor], generator: Any) -> None:
    with replays_on_cpu() as answers:
        for p in (0.5, 0.25):
            masks = set[tuple[float, ...]]()
            for _ in range(6):
                del answers[:]
                x = torch.ones(16, 4, 1, requires_grad=True)
                y = call(x, p, generator=generator)
                (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
                same(dx, y.detach())
                masks.add(tuple(y.flatten().tolist()))
            assert len(masks) == 6
            assert answers == [True, True]


def test_composed_calls_are_not_drawn_again_by_their_backward(generator: Any) -> None:
    """A composition's backward runs the function again, with other numbers."""

    @replayed
    def twice(input: Tensor, generator: Any) -> Tensor:
        return F.dropout(F.dropout(input, 0.5, generator=generator), 0.5, generator=generator)

    with replays_on_cpu():
        for _ in range(5):
            x = torch.ones(64, requires_grad=True)
            y = twice(x, generator)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            same(dx, y.detach())


class Capture:
    """Stands for captures of graphs: ``number`` of the one under way, 0 for none, and the current ``stream``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number, self.stream, self.states = 1, 7, list[int]()
        for name in ("_is_alone", "is_capturing"):
            patch.setattr(engine, name, lambda *args: bool(self.number))
        patch.setattr(_replay, "is_capturing", lambda: bool(self.number))
        patch.setattr(_seeds, "current_stream", lambda index: self.stream)
        patch.setattr(_seeds, "capture_of", lambda stream: self.number)
        patch.setattr(_seeds, "uncaptured", lambda device: nullcontext())
        patch.setattr(_seeds, "_unused", {})
        patch.setattr(_seeds, "_captured", _seeds._Captured())
        unused = _seeds._unused_state

        def counted(device: torch.device) -> Tensor:
            self.states.append(self.stream)
            return unused(device)

        patch.setattr(_seeds, "_unused_state", counted)


class Registered(torch.Generator):
    """A CPU's generator that says it is a GPU's."""

    device = torch.device("cuda")
    offset = 0

    def get_offset(self) -> int:
        return self.offset


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    return Capture(monkeypatch)


def test_draws_of_a_capture_share_a_state(capture: Capture) -> None:
    """One a capture, stream, thread and state of a generator. No two draws have the same seed and offset."""
    g, other = Registered(), Registered()
    x = torch.empty(8)
    found: list[Any] = []

    def draw(generator: Any = g) -> None:
        state, seed, added = engine.next_state(x, generator)
        assert state is not None
        assert seed == 0
        found.append((state.data_ptr(), added))

    for _ in range(3):
        draw()
    capture.stream = 8  # forked: none of its draws waits for the other stream's
    draw()
    capture.stream = 7  # joined
    draw()
    draw(other)
    assert [added for _, added in found] == [0, 1, 2, 0, 3, 0]
    assert capture.states == [7, 8, 7]
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert capture.states == [7, 8, 7, 7]
    draw()
    seed = g.initial_seed()
    for changed in ({"seed": seed, "offset": 4}, {"seed": seed + 1, "offset": 0}):
        g.manual_seed(changed["seed"])  # stands for graphsafe_set_state
        g.offset = changed["offset"]
        draw()
        assert found[-1][1] == 0
    g.manual_seed(seed)
    draw()
    assert found[-1] == (found[0][0], 5)
    assert capture.states == [7, 8, 7, 7, 7, 7]
    capture.number = 2
    draw()
    assert capture.states == [7, 8, 7, 7, 7, 7, 7]
    assert len(set(found)) == len(found) == 12


def test_a_capture_of_another_device_than_the_current_one(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers were those of the host, which every replay has again."""
    monkeypatch.setattr(engine, "is_capturing", lambda: False)
    monkeypatch.setattr(engine, "current_device", lambda: 1)
    state, _, _ = engine.next_state(torch.empty(8), Registered())
    assert state is not None
    capture.number = 0
    monkeypatch.setattr(engine, "_is_alone", lambda t: True)
    state, *_ = engine.next_state(torch.empty(8), HostGenerator(5))
    assert state is None


def test_captured_draws_add_to_the_offset(capture: Capture) -> None:
    """Also when the third call comes, which a replay would answer; and eager calls are replayed all the same."""
    g = Registered()
    g.manual_seed(5)
    with replays_on_cpu() as answers:
        _replay.is_capturing = lambda: bool(capture.number)  # type: ignore[assignment]
        found = [F.uniform_(torch.empty(8), -1, 3, generator=g) for _ in range(12)]
        assert not any(answers)
    (state,) = {t for t, _ in _seeds._captured.states.values()}
    for i, x in enumerate(found):
        same(x, drawn((8,), int(state[0]), int(state[1]) + i))


def test_captured_dropout_drops_the_same_in_its_backward(capture: Capture) -> None:
    g = Registered()
    with torch.inference_mode():
        F.dropout(torch.ones(64), generator=g)  # its state is saved by those that follow
    x = torch.ones(64, requires_grad=True)
    results = [F.dropout(x, 0.5, generator=g) for _ in range(4)]
    for y in results:
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        same(dx, y.detach())
    assert len({tuple(y.tolist()) for y in results}) == 4
    assert capture.states == [7]


@pytest.mark.gpu
def test_captured_graphs_draw_anew() -> None:
    x = torch.ones(10_000, device="cuda", requires_grad=True)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(F.dropout(x, 0.5).sum(), x)
            F.rand_like(x.detach())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, z = F.dropout(x, 0.5), F.rand_like(x.detach())
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    found = []
    for _ in range(3):
        graph.replay()
        found.append((y.detach().clone(), z.clone()))
        same(dx, y.detach())
    assert all(a.ne(b).any() for i in range(3) for j in range(i) for a, b in zip(found[i], found[j], strict=True))
    torch.cuda.manual_seed(11)
    graph.replay()
    first = y.detach().clone()
    torch.cuda.manual_seed(11)
    graph.replay()
    same(y.detach(), first)


@pytest.mark.gpu
def test_captured_draws_differ() -> None:
    """Of one stream and of a forked one, of two graphs, and of replays; dropout's backward drops what it dropped."""
    x = torch.ones(1000, device="cuda", requires_grad=True)
    side, graphs, results = torch.cuda.Stream(), [torch.cuda.CUDAGraph() for _ in range(2)], list[Tensor]()
    for _ in range(3):
        torch.autograd.grad(F.dropout(x, 0.5).sum(), x)
        F.rand(1000, device="cuda")
    torch.cuda.synchronize()
    pairs: list[tuple[Tensor, Tensor]] = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results += [F.rand(1000, device="cuda") for _ in range(3)]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                results += [F.rand(1000, device="cuda") for _ in range(3)]
            torch.cuda.current_stream().wait_stream(side)
            results.append(F.rand(1000, device="cuda"))
            for _ in range(3):
                y = F.dropout(x, 0.5)
                pairs.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
    found: list[Tensor] = []
    before = torch.cuda.default_generators[0].get_offset()
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        found += [t.clone() for t in results]
        for y, dx in pairs:
            same(dx, y)
    assert torch.cuda.default_generators[0].get_offset() > before
    assert len({tuple(t.tolist()) for t in found}) == len(found) == 42
    assert len({tuple(y.tolist()) for y, _ in pairs}) == 6
    for _ in range(2):
        torch.cuda.manual_seed(11)
        for graph in graphs:
            graph.replay()
        found.append(torch.stack(results))
    same(found[-1], found[-2])


@pytest.mark.gpu
def test_a_generator_whose_state_is_swapped_within_a_capture() -> None:
    """As ranks do that share some numbers and not others: what is drawn from a rank's own state is its own."""
    default = torch.cuda.default_generators[0]

    def rank(seed: int) -> list[Tensor]:
        own, graph = torch.Generator("cuda").manual_seed(seed), torch.cuda.CUDAGraph()
        torch.cuda.manual_seed(3)
        graph.register_generator_state(own)
        with torch.cuda.graph(graph):
            shared = default.graphsafe_get_state()
            before = F.rand(1000, device="cuda")
            default.graphsafe_set_state(own)
            within = F.rand(1000, device="cuda")
            default.graphsafe_set_state(shared)
            after = F.rand(1000, device="cuda")
        graph.replay()
        return [before.clone(), within.clone(), after.clone()]

    F.rand(1000, device="cuda")
    one, two = rank(5), rank(6)
    same(one[0], two[0])
    same(one[2], two[2])
    assert len({tuple(t.tolist()) for t in (*one, two[1])}) == 4
