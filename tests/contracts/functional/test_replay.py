"""Replays of every function: a call that was made before gives what the function gives, whatever changed meanwhile.

On a CPU the reference runs in place of launches (``replaying``); on a GPU the kernels do.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import takewhile
from typing import Any

import pytest
import torch
from cases import drawing
from cases.functional import DEVICES, SeenDispatch, SeenFunction
from replaying import forget, kept, noted, replays_on_cpu
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import triplan.nn
from bench.functions import ALIKE, WITHOUT_TENSORS, Call, Draw, calls
from triplan import functional
from triplan.functional._replay import composed, program, replay as _replay
from triplan.functional._replay.recording import Recording, recording
from triplan.functional._replay.replay import replayed
from triplan.functional.elementwise.table import TABLE
from triplan.nn import elementwise as nn_elementwise

Tensor = torch.Tensor
Args = tuple[Any, ...]
SMALL = {n: call for n, call in calls(Draw(6, 8, torch.float32, torch.device("cpu"))).items() if n not in ALIKE}
NAMES = sorted(SMALL)
RECORDED = [name for name, call in SMALL.items() if call.grads]
#: Each function, and with a leaf that requires a gradient each that has one.
RECORDINGS = [*((name, False) for name in NAMES), *((name, True) for name in RECORDED)]


@pytest.fixture(params=DEVICES)
def answers(request: pytest.FixtureRequest) -> Iterator[list[bool]]:
    """Of every replay that was asked: whether it answered. The device is ``request.param``.

    torch's attention is the one by its definition: of steep scores its fused kernels' f32 gradients are three times as
    far off as ours.
    """
    with sdpa_kernel(SDPBackend.MATH), replays_on_cpu() if request.param == "cpu" else noted() as found:
        yield found


@pytest.fixture
def device(request: pytest.FixtureRequest, answers: list[bool]) -> str:
    return request.node.callspec.params["answers"]


class Whole(Draw):
    """Whole numbers, whose sums are exact: atomics give the same bits."""

    def values(self, *shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, device=self.device).to(self.dtype)


def drawn(name: str, device: str) -> Call:
    return drawing.drawn(Whole(6, 8, torch.float32, torch.device(device)), name)


def tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]


def outcome(function: Callable[..., Any], args: Args) -> Any:
    """What a call gives, or how it fails."""
    try:
        return function(*args)
    except Exception as e:
        return type(e), str(e)


def same(got: Any, expected: Any) -> None:
    if not tensors(expected):
        assert got == expected
    for g, e in zip(tensors(got), tensors(expected), strict=True):
        assert (g.dtype, g.shape, g.stride(), g.requires_grad) == (e.dtype, e.shape, e.stride(), e.requires_grad)
        assert (g.is_inference(), type(g)) == (e.is_inference(), type(e))
        torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


def given_to(name: str, args: Args) -> Args:
    """A call in place writes its first argument."""
    return (args[0].clone(), *args[1:]) if name.endswith("_") else args


def test_every_function_and_module_is_timed_and_tested_here() -> None:
    """One factory makes the elementwise functions. Some are here; ``families/elementwise`` replays each of them, and
    ``families/random`` those that are like another one here."""
    public = set(functional.__all__) | {f"nn.{name}" for name in triplan.nn.__all__}
    made = {*TABLE, *(f"nn.{name}" for name in nn_elementwise.__all__)}
    assert public - made - {*WITHOUT_TENSORS, *ALIKE} <= set(NAMES)
    assert set(ALIKE) <= public
    assert {"add", "add_", "gelu", "where"} <= made & set(NAMES)
    replays = {name for name in functional.__all__ if hasattr(getattr(functional, name), "replays")}
    assert replays == set(functional.__all__) - set(WITHOUT_TENSORS)


@pytest.mark.parametrize("name", NAMES)
def test_repeats_equal_torch_and_are_replayed(name: str, answers: list[bool], device: str) -> None:
    for _ in range(5):
        del answers[:]
        call = drawn(name, device)
        expected = call.theirs(*given_to(name, call.args))
        torch.testing.assert_close(call.ours(*given_to(name, call.args)), expected)
    assert answers == [True]


#: Functions whose backward passes the gradient on as it is, and asks no guard.
PASSED_ON = ("add", "clone", "contiguous")


@pytest.mark.parametrize("name", RECORDED)
def test_repeated_gradients_equal_torch_and_are_replayed(name: str, answers: list[bool], device: str) -> None:
    for _ in range(6):
        del answers[:]
        call = drawn(name, device)
        leaves, others = call.given(True), call.given(True)
        wanted = [[given[i] for i in call.grads] for given in (leaves, others)]
        for function, given in ((call.ours, leaves), (call.theirs, others)):
            wanted[given is others] += list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        found, expected = call.ours(*leaves), call.theirs(*others)
        torch.testing.assert_close(found, expected)
        grad = torch.randint_like(expected, -4, 5) / 4  # few bits, as the arguments: exact sums
        grads = torch.autograd.grad(found, wanted[0], grad)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, wanted[1], grad))
        assert not any(g.requires_grad for g in grads)
    assert answers == [True] * (1 if name in PASSED_ON else 2)


#: What may be different of a gradient.
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda g: g,
    "strides": lambda g: torch.empty_like(g.t()).t().copy_(g),
    "expanded": lambda g: g[:1].expand_as(g),
    "lazily negated": lambda g: torch._neg_view(g),
    "subclass": lambda g: g.as_subclass(Sub),
    "requires grad": lambda g: g.requires_grad_(),
}


@pytest.mark.parametrize("name", PASSED_ON)
@pytest.mark.parametrize("change", GRADIENTS)
def test_any_gradient_is_passed_on_as_it_is(name: str, change: str, answers: list[bool], device: str) -> None:
    call = drawn(name, device)
    leaves, again = call.given(True), change == "requires grad"
    wanted = [leaves[i] for i in call.grads]
    for how in ("nothing", "nothing", "nothing", change):
        result, expected = call.ours(*leaves), call.theirs(*leaves)
        grad = GRADIENTS[how](torch.randn_like(expected).detach())
        del answers[:]
        found = torch.autograd.grad(result, wanted, grad, create_graph=again)
        for got, theirs in zip(found, torch.autograd.grad(expected, wanted, grad), strict=True):
            assert (type(got), got.requires_grad) == (type(theirs), again and how == change)
            assert torch.equal(got, theirs)
    assert not answers


@pytest.mark.parametrize(("name", "recording"), RECORDINGS)
def test_no_tensor_outlives_its_call(name: str, recording: bool, answers: list[bool], device: str) -> None:
    """Nor is one part of a cycle of references, which would keep it until Python collects those."""
    gc.disable()
    try:
        for turn in range(4):
            call = drawn(name, device)
            given = call.given(recording)
            results = tensors(call.ours(*given_to(name, given)))
            if recording:
                wanted = [given[i] for i in call.grads]
                results += torch.autograd.grad(results[0], wanted, torch.ones_like(results[0]))
                del wanted
            kept = [weakref.ref(t) for t in (*tensors(given), *results)]
            del call, given, results
            # On a GPU the thread that ran the backward drops its last gradient shortly after the caller goes on.
            until = time.monotonic() + (1 if recording and device == "cuda" else 0)
            while any(t() is not None for t in kept) and time.monotonic() < until:
                time.sleep(0.001)
            assert [t() for t in kept] == [None] * len(kept), turn
    finally:
        gc.enable()


def test_a_recording_does_not_import_dynamo() -> None:
    """As torch does in a mode that it wraps; while the first op is recorded, whose tensors stay until a collection."""
    assert not hasattr(Recording.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("name", RECORDED)
def test_checkpoints_of_repeated_calls(name: str, answers: list[bool], device: str) -> None:
    """A checkpoint compares the tensors that the forward and its repetition save."""
    call = drawn(name, device)
    for _ in range(2):
        leaves, others = call.given(True), call.given(True)
        wanted = [[given[i] for i in call.grads] for given in (leaves, others)]
        found, expected = checkpoint(call.ours, *leaves, use_reentrant=False), call.theirs(*others)
        for _ in range(3):  # replayed from now on
            call.ours(*leaves)
        grad = torch.randint_like(expected, -4, 5) / 4
        torch.testing.assert_close(
            torch.autograd.grad(found, wanted[0], grad), torch.autograd.grad(expected, wanted[1], grad)
        )


#: Calls that are composed of several ops, of tensors by letter: x and y are leaves, i and j indices.
COMPOSED: dict[str, Callable[..., Tensor]] = {
    "bags' maxima": lambda x, y, i, j: functional.embedding_bag(i, x, mode="max"),
    "weighted bags": lambda x, y, i, j: functional.embedding_bag(i, x, mode="sum", per_sample_weights=y),
    "bags of some length": lambda x, y, i, j: functional.embedding_bag(i[0], x, j[0, :2], padding_idx=1),
    "gradients by frequency": lambda x, y, i, j: functional.embedding(i, x, scale_grad_by_freq=True),
    "mean": lambda x, y, i, j: functional.scatter_reduce(x, 0, i, y, "mean"),
    "a short source": lambda x, y, i, j: functional.masked_scatter(x[:1], i > 1, y[:2]),
    "a broadcast table": lambda x, y, i, j: functional.take_along_dim(x[:, :1], i, 0),
    "a value": lambda x, y, i, j: functional.index_fill(x, 1, i[0], y[0, 0]),
    "an inner axis": lambda x, y, i, j: functional.index_put(x, (None, j[0]), y),
    "a matrix for a bias": lambda x, y, i, j: functional.linear(x, y, x[:, :1]),
}


def leaf(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


@pytest.mark.parametrize("case", COMPOSED)
def test_composed_calls_are_one_node(case: str, answers: list[bool], device: str) -> None:
    found = list[list[Tensor]]()

    @replayed
    def composition(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return COMPOSED[case](x, y, i, j)

    i, j = torch.tensor([[0, 2, 2, 3], [1, 1, 0, 3]], device=device).repeat(2, 1), torch.tensor([[0, 2, 1, 3]] * 4)
    for _ in range(6):
        del answers[:]
        torch.manual_seed(0)
        x, y = leaf(4, 4, device=device), leaf(4, 4, device=device)
        result = composition(x, y, i, j.to(device))
        grad = torch.linspace(1, 2, result.numel(), device=device).reshape(result.shape)
        found.append([result, *torch.autograd.grad(result, (x, y), grad, materialize_grads=True, allow_unused=True)])
    assert answers == [True, True]
    for got, expected in zip(found[-1], found[0], strict=True):
        torch.testing.assert_close(got, expected)


@replayed
def masked_product(x: Tensor, y: Tensor) -> Tensor:
    return functional.mm(x, y) * (x > 0)  # the backward needs x > 0


@replayed
def dropped(x: Tensor) -> Tensor:
    return functional.softmax(x, -1) * (torch.rand_like(x) > 0.5)


@replayed
def two_rows(x: Tensor) -> Tensor:
    return (functional.softmax(x, -1) * 2)[:2]


def test_composed_calls_compute_again_what_they_may(
    answers: list[bool], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = leaf(4, 4, device=device), leaf(4, 4, device=device)
    for _ in range(3):
        result = dropped(x)  # other random numbers
    assert "MulBackward0" in str(result.grad_fn)
    for limits, name in (((1 << 22, 1 << 26), "triplan"), ((0, 1 << 26), "MulBack"), ((1 << 22, 0), "MulBack")):
        monkeypatch.setattr(composed, "_MAX_AGAIN", limits[0])
        monkeypatch.setattr(composed, "_MAX_TRIED", limits[1])
        masked_product.replays.forget()  # type: ignore[attr-defined]
        for _ in range(3):
            result = masked_product(x, y)
        assert name in str(result.grad_fn)
        with torch.autocast(device, torch.bfloat16):  # the product was f32
            grads = torch.autograd.grad(result.sum(), (x, y))
        torch.testing.assert_close(grads, torch.autograd.grad(((x @ y) * (x > 0)).sum(), (x, y)))


def test_composed_calls_that_find_no_memory_are_not_replayed(
    answers: list[bool], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    x, y = leaf(4, 4, device=device), leaf(4, 4, device=device)
    monkeypatch.setattr(composed.Composition, "_gradients", full)
    masked_product.replays.forget()  # type: ignore[attr-defined]
    for _ in range(3):
        result = masked_product(x, y)
    assert "MulBack" in str(result.grad_fn)
    torch.testing.assert_close(result, (x @ y) * (x > 0))
    masked_product.replays.forget()  # type: ignore[attr-defined]


@replayed
def doubled(x: Tensor, index: Tensor) -> Tensor:
    return functional.index_select(x, 0, index) * 2


def test_composed_calls_save_what_their_gradients_need(answers: list[bool], device: str) -> None:
    index = torch.arange(3, device=device)
    for _ in range(5):
        del answers[:]
        x = leaf(3, 4, device=device)
        result = doubled(x, index)
        x.detach().fill_(2)  # its values do not enter
        result.mul_(3)
        two_rows(x).mul_(3)  # a node's result that is a view could not be written
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.full_like(x, 6))
    assert answers == [True] * 3  # of softmax too


@pytest.mark.parametrize("case", ["mean", "weighted bags"])
def test_second_derivatives_of_composed_calls(case: str, answers: list[bool], device: str) -> None:
    """Of tensors with hooks, one of which is computed from the other."""
    i, found = torch.tensor([[0, 2, 2, 3], [1, 1, 0, 3]], device=device).repeat(2, 1), list[Any]()

    @replayed
    def composition(x: Tensor, y: Tensor) -> Tensor:
        return COMPOSED[case](x, y, i, i)

    for _ in range(4):
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.float64, device=device, requires_grad=True)
        x.register_hook(lambda g: g * 2)
        (first,) = torch.autograd.grad(composition(x, x * x).pow(2).sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.sum(), x)])
    torch.testing.assert_close(found[-1], found[0])


def test_views_of_a_tensor_that_begins_elsewhere_in_its_storage(answers: list[bool], device: str) -> None:
    x, y = leaf(4, 4, device=device), leaf(4, 4, device=device)
    whole = torch.arange(64.0, device=device).reshape(8, 8)
    for start in (0, 0, 0, 0, 0, 3, 4):
        del answers[:]
        grad = whole[start : start + 4]
        found = torch.autograd.grad(functional.cat((x, y), 1), (x, y), grad)
        torch.testing.assert_close(found, (grad[:, :4], grad[:, 4:]))
    assert answers == [True, True]


def test_a_result_that_is_a_view_can_be_written(answers: list[bool], device: str) -> None:
    x, y, index = leaf(4, 4, device=device), leaf(4, 4, device=device), torch.tensor([0, 2, 1, 3], device=device)
    for _ in range(4):
        result = functional.index_put(x, (None, index), y)
        result.mul_(3)
    assert answers[-1]
    assert torch.equal(result, y[:, index] * 3)
    assert torch.equal(torch.autograd.grad(result.sum(), y)[0], torch.full_like(y, 3))


@pytest.mark.parametrize("name", RECORDED)
def test_results_can_be_written(name: str, answers: list[bool], device: str) -> None:
    """As those of torch's functions: no result is a view that a Function returned, replayed or not."""
    for _ in range(4):
        call = drawn(name, device)
        leaves, others = call.given(True), call.given(True)
        wanted = [[given[i] for i in call.grads] for given in (leaves, others)]
        found, expected = call.ours(*leaves).mul_(2), call.theirs(*others)
        grad = torch.randint_like(expected, -4, 5) / 4
        try:
            grads = torch.autograd.grad(found, wanted[0], grad)
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)  # noqa: PT017  # the op saved its result
        else:
            torch.testing.assert_close(grads, torch.autograd.grad(expected * 2, wanted[1], grad))


def test_inference_of_calls_that_make_tensors(answers: list[bool], device: str) -> None:
    x, index = leaf(4, 4, device=device), torch.tensor([1, 2], device=device)
    for _ in range(4):
        with torch.inference_mode():
            result = functional.index_fill(x, 1, index, 2.0)
    assert answers[-1]
    assert torch.equal(result, x.detach().index_fill(1, index, 2.0))


class Real(float):
    """As numpy.float64 is."""


@pytest.mark.parametrize("kind", [float, Real])
def test_zeros_keep_their_signs(kind: type[float], answers: list[bool], device: str) -> None:
    x, index = torch.ones(2, 4, device=device), torch.tensor([1, 2], device=device)
    for value in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
        result = functional.index_fill(x, 1, index, kind(value))
        assert bool(result[0, 1].signbit()) == (str(value) == "-0.0")
    assert answers[-1]


@pytest.mark.parametrize("name", ["softmax", "cumsum"])
def test_an_axis_of_another_type_is_refused_whatever_came_before(name: str, answers: list[bool], device: str) -> None:
    x, call = torch.ones(2, 4, device=device), getattr(functional, name)
    for axis in (1, 1, 1, 1.0, 1, 1.0):
        if isinstance(axis, float):
            with pytest.raises(ValueError, match="valid integer"):
                call(x, axis)
        else:
            call(x, axis)
    assert any(answers)


@replayed
def unconverted(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x @ x.T


@pytest.mark.parametrize("name", [*RECORDED, "without autocast within"])
def test_calls_under_autocast_are_replayed(name: str, answers: list[bool], device: str) -> None:
    if name in SMALL:
        call = drawing.drawn(Draw(6, 8, torch.float32, torch.device(device)), name)
    else:
        call = Call(unconverted, torch.mm, (torch.randn(6, 8, device=device),), (0,))

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        given = call.given(True)
        with torch.autocast(device, dtype):
            result = call.ours(*given)
        wanted = [given[i] for i in call.grads]
        return [result, *torch.autograd.grad(result, wanted, torch.ones_like(result))]

    found = [outcome(torch.bfloat16) for _ in range(6)]
    assert answers[-2:] == [True, True]
    changed = outcome(torch.float16)
    forget()
    for got, expected in ((found[5], found[0]), (changed, outcome(torch.float16))):
        for g, e in zip(got, expected, strict=True):
            assert g.dtype == e.dtype
            torch.testing.assert_close(g, e)


# --- guards ---


def misaligned(t: Tensor) -> Tensor:
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else t


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def floating(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda t: change(t) if t.is_floating_point() else t


#: What may be different of every tensor.
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda t: t.clone(),
    "dtype": floating(lambda t: t.double()),
    "index dtype": lambda t: t if t.is_floating_point() else t.int(),
    "address": misaligned,
    "strides": transposed,
    "shape": lambda t: t[:-1].clone() if t.dim() else t,
    "storage freed": freed,
    "lazily negated": floating(lambda t: torch._neg_view(t.clone())),
    "requires grad": floating(lambda t: t.clone().requires_grad_()),
    "parameter": floating(lambda t: torch.nn.Parameter(t.clone())),
    "subclass": lambda t: t.clone().as_subclass(Sub),
    "inference": lambda t: inferred(t),
}


class Sub(Tensor):
    """A tensor of another type."""


def inferred(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: What may be different around a call.
CONTEXTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "no grad": lambda device: torch.no_grad(),
    "inference mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "deterministic": lambda device: deterministic(),
    "dispatch mode": lambda device: SeenDispatch(),
    "function mode": lambda device: SeenFunction(),
    "forward mode": lambda device: torch.autograd.forward_ad.dual_level(),
}


@lru_cache(maxsize=1)  # tests of a function come one after the other
def _warm(name: str, device: str, recording: bool) -> tuple[Callable[..., Any], Args, Callable[[], None]]:
    call = drawn(name, device)
    args = call.given(recording)
    for _ in range(3):
        call.ours(*given_to(name, args))
    return call.ours, args, kept()


def warm(name: str, device: str, recording: bool) -> tuple[Callable[..., Any], Args]:
    """A function and arguments with which it has been called until calls like that are replayed."""
    function, args, restore = _warm(name, device, recording)
    restore()
    return function, args


def changed_as(change: str, t: Tensor) -> Tensor:
    """``t`` changed, a leaf that requires a gradient if ``t`` is."""
    with torch.no_grad():
        found = TENSORS[change](t.detach())
    able = t.requires_grad and found.is_floating_point() and not found.is_inference()
    return found.detach().requires_grad_() if able and not isinstance(found, torch.nn.Parameter) else found


@contextmanager
def error_names(change: str) -> Iterator[None]:
    """Says which change an error is of. They share a test: thousands of tests take long to set up."""
    try:
        yield
    except Exception as e:
        raise AssertionError(f"{change}: {e}") from e


@pytest.mark.parametrize(("name", "recording"), RECORDINGS)
def test_changed_tensors_are_noticed(name: str, recording: bool, answers: list[bool], device: str) -> None:
    for change in TENSORS:
        with error_names(change):
            function, args = warm(name, device, recording)
            changed = tuple(changed_as(change, a) if isinstance(a, Tensor) else a for a in args)
            del answers[:]
            freed = change == "storage freed"  # and cannot be copied
            got = outcome(function, changed if freed else given_to(name, changed))
            assert change != "nothing" or (answers and all(answers))
            forget()
            same(got, outcome(function, changed if freed else given_to(name, changed)))


@pytest.mark.parametrize(("name", "recording"), RECORDINGS)
def test_changed_surroundings_are_noticed(name: str, recording: bool, answers: list[bool], device: str) -> None:
    for change, context in CONTEXTS.items():
        with error_names(change):
            function, args = warm(name, device, recording)
            del answers[:]
            results = []
            for _ in range(2):
                with context(device) as seen:
                    results.append((outcome(function, given_to(name, args)), list(getattr(seen, "ops", []))))
                if len(results) == 1:
                    forget()
            same(results[0][0], results[1][0])
            assert results[0][1] == results[1][1]


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_default_dtype_is_noticed(name: str, answers: list[bool], device: str) -> None:
    """Which torch's functions give to results of integers."""
    call, default = drawn(name, device), torch.get_default_dtype()
    args = tuple(a.int() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.args)
    try:
        torch.set_default_dtype(torch.float64)
        expected = outcome(call.ours, given_to(name, args))
        torch.set_default_dtype(default)
        for _ in range(3):
            outcome(call.ours, given_to(name, args))
        torch.set_default_dtype(torch.float64)
        same(outcome(call.ours, given_to(name, args)), expected)
    finally:
        torch.set_default_dtype(default)


def test_calls_under_a_profiler_are_not_recorded(answers: list[bool], device: str) -> None:
    """It marks plans by ops of its own."""
    with torch.profiler.profile():
        for name in RECORDED:
            for _ in range(3):
                call = drawn(name, device)
                torch.testing.assert_close(call.ours(*call.given(True)), call.theirs(*call.given(True)))
    assert not any(answers)
    assert all(f.replays._count == 0 for f in map(vars(functional).get, functional.__all__) if hasattr(f, "replays"))


@pytest.mark.parametrize("name", RECORDED)
def test_transforms_go_the_long_way(name: str, answers: list[bool], device: str) -> None:
    function, args = warm(name, device, False)
    at = drawn(name, device).grads[0]
    del answers[:]

    def of(x: Tensor) -> Tensor:
        result: Tensor = function(*(x if i == at else a for i, a in enumerate(args)))
        return result

    mapped = torch.func.vmap(of, randomness="different")(torch.stack([args[at]] * 2))[1]
    torch.testing.assert_close(mapped, of(args[at]))
    forget()
    leaf = args[at].clone().requires_grad_()
    by_autograd = torch.autograd.grad(of(leaf).sum(), leaf)[0]
    assert not by_autograd.requires_grad
    torch.testing.assert_close(torch.func.grad(lambda x: of(x).sum())(args[at]), by_autograd)


@pytest.mark.parametrize("name", RECORDED)
def test_second_derivatives_equal_those_of_the_function(name: str, answers: list[bool], device: str) -> None:
    call = drawing.drawn(Draw(3, 4, torch.float64, torch.device(device)), name)
    args, second = call.given(True), []
    for turn in range(4):
        result = call.ours(*args)
        grad = (
            torch.linspace(1, 2, result.numel(), dtype=result.dtype, device=device)
            .reshape(result.shape)
            .requires_grad_()
        )
        wanted = [args[i] for i in call.grads]
        first = torch.autograd.grad(result, wanted, grad, create_graph=True)
        total = sum((t * (1 + torch.arange(t.numel(), device=device).reshape(t.shape))).sum() for t in first)
        second.append(torch.autograd.grad(total, [*wanted, grad], allow_unused=True, materialize_grads=True))
        if turn == 2:
            assert any(answers)
            forget()
    torch.testing.assert_close(second[2], second[3])


def test_scales_vary_without_a_new_recording(answers: list[bool], device: str) -> None:
    x, index, source = torch.zeros(9, 4, device=device), torch.arange(9, device=device), torch.ones(9, 4, device=device)
    for alpha in (2.5, 2.5, 2.5, 3.5, -4.25, 1e-3):
        del answers[:]
        assert torch.equal(functional.index_add(x, 0, index, source, alpha=alpha), source * alpha)
    assert answers == [True]
    for alpha in (0.0, -0.0, 1.0, -1.0, 2, float("inf")):
        got = functional.index_add(x, 0, index, source, alpha=alpha)
        assert torch.equal(got, x.index_add(0, index, source, alpha=alpha))


def other_numbers(value: Any) -> Args:
    """What may stand in place of a number, a flag or a list of numbers."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1, float(value)
    if isinstance(value, float):
        return -value, value + 0.7, 1e30
    if isinstance(value, (list, tuple)) and value and all(isinstance(n, int) for n in value):
        others = [[n + 1 for n in value], value[:-1], map(float, value), [*value[:-1], float(value[-1])]]
        return *map(type(value), others), type(value)(bool(n) if n in (0, 1) else n for n in value)
    return ()


def with_defaults(function: Callable[..., Any], args: Args) -> Args:
    """``args``, and the defaults of what may follow by position; floats between 0 and 1, which may be scales."""
    rest = list(inspect.signature(function).parameters.values())[len(args) :]
    known = takewhile(lambda p: p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty, rest)
    return (*args, *(0.3 if type(p.default) is float else p.default for p in known))


@pytest.mark.parametrize("name", NAMES)
def test_changed_numbers_are_noticed(name: str, answers: list[bool], device: str) -> None:
    call = drawn(name, device)

    def seeded(*args: Any) -> Any:
        torch.manual_seed(7)
        return call.ours(*[a.detach().clone() if isinstance(a, Tensor) else a for a in args])

    args = with_defaults(call.ours, call.args)
    if isinstance(outcome(seeded, args), tuple) and isinstance(outcome(seeded, args)[0], type):
        args = call.args  # a default does not suit the others
    for i, value in enumerate(args):
        for other in other_numbers(value):
            changed = (*args[:i], other, *args[i + 1 :])
            forget()
            expected = outcome(seeded, changed)
            forget()
            for _ in range(3):
                seeded(*args)
            same(outcome(seeded, changed), expected)


#: Of what is not among NAMES: a call of a tensor and a number, numbers that it takes, and numbers that it refuses.
REFUSING: dict[str, tuple[Callable[[Tensor, float], Any], tuple[float, ...], tuple[float, ...]]] = {
    "uniform_": (lambda x, low: functional.uniform_(x, low, 0.75), (0.3, 0.3, 0.3), (0.8,)),
    "uniform_ of f16": (lambda x, low: functional.uniform_(x.half(), low, 60000.0), (0.3, 0.3, 0.3), (-60000.0,)),
    "normal_": (lambda x, std: functional.normal_(x, 0.5, std), (0.3, 0.3, 0.4), (-0.5,)),
    "exponential_": (functional.exponential_, (0.3, 0.3, 0.4), (-0.5,)),
    "bernoulli_": (functional.bernoulli_, (0.3, 0.3, 0.4), (1.5, -0.5)),
}


@pytest.mark.parametrize("name", REFUSING)
def test_numbers_are_refused_whatever_came_before(name: str, answers: list[bool], device: str) -> None:
    call, taken, refused = REFUSING[name]
    x = torch.zeros(9, 16, device=device)
    for number in taken:
        del answers[:]
        call(x, number)
    assert any(answers)
    for number in refused:
        forget()
        first = outcome(call, (x, number))
        for other in taken:
            call(x, other)
        assert outcome(call, (x, number)) == first
        assert issubclass(first[0], Exception)


DECIDING: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "compared": lambda x, a, b: functional.mul(x, a) if a > b else functional.neg(functional.mul(x, a)),
    "compared with a scale": lambda x, a, b: functional.mul(x, b) if a < b else functional.neg(functional.mul(x, b)),
    "a factor": lambda x, a, b: functional.mul(functional.mul(x, a), a * 2),
    "a difference": lambda x, a, b: functional.mul(functional.mul(x, a), b) if b - a > 1 else functional.mul(x, a),
    "torch's too": lambda x, a, b: functional.add(functional.mul(x, a), x.mul(a)),
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_number_that_decides_is_no_scale(name: str, answers: list[bool], device: str) -> None:
    """What is made of it, or how it compares, may have decided what was launched."""
    decide = DECIDING[name]

    @replayed
    def call(x: Tensor, a: float, b: float) -> Tensor:
        return decide(x, a, b)

    x = torch.ones(9, 4, device=device)
    for a, b in ((2.25, 2.5), (2.25, 2.5), (2.25, 2.5), (2.75, 2.5), (0.0, 2.5), (0.0, 2.5), (0.0, -2.5), (-7.5, 2.5)):
        assert torch.equal(call(x, a, b), decide(x, a, b))


def test_one_tensor_given_twice(answers: list[bool], device: str) -> None:
    x, y = torch.randn(2, 4, 4, device=device)
    for a, b in ((x, y), (x, y), (x, y), (x, x), (x, x), (x, x), (x, y), (y, x), (y, y)):
        torch.testing.assert_close(functional.mm(a, b), a @ b)


def test_lists_may_change(answers: list[bool], device: str) -> None:
    x, shape = torch.randn(2, 3, 4, device=device), [4]
    for _ in range(3):
        functional.layer_norm(x, shape)
    shape.insert(0, 3)
    torch.testing.assert_close(functional.layer_norm(x, shape), torch.nn.functional.layer_norm(x, (3, 4)))


def test_lists_of_tensors_may_get_longer_or_shorter(answers: list[bool], device: str) -> None:
    x, rows, columns = torch.zeros(5, 5, device=device), *torch.arange(5, device=device).repeat(2, 1)
    for indices in ((rows, columns), (rows, columns), (rows, columns), (rows,), [rows, columns], (rows, columns)):
        values = torch.randn(5, *(5,) * (2 - len(indices)), device=device)
        assert torch.equal(functional.index_put(x, indices, values), x.index_put(tuple(indices), values))


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
def test_calls_with_and_without_gradients_take_turns(parameter: bool, answers: list[bool], device: str) -> None:
    """Dynamo's guard does not compare the grad mode."""
    leaf, y = torch.randn(4, 4, device=device, requires_grad=True), torch.randn(4, 4, device=device)
    leaf = torch.nn.Parameter(leaf.detach()) if parameter else leaf
    for _ in range(4):
        del answers[:]
        with torch.no_grad():
            assert not functional.mm(leaf, y).requires_grad
        assert functional.mm(leaf, y).requires_grad
    assert answers.count(True) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.index_fill(x, 0, torch.arange(4, device=x.device), float("nan")),
        lambda x: functional.index_add(x, 0, torch.arange(4, device=x.device), x, alpha=float("nan")),
    ],
    ids=["value", "alpha"],
)
def test_calls_that_pass_no_guard_are_not_recorded_for_ever(
    call: Callable[[Tensor], Tensor], answers: list[bool], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recording] = []

    def noting() -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(_replay, "Recording", noting)
    x = torch.zeros(4, 4, device=device)
    for i in range(40):
        assert call(x).isnan().all()
        if i == 30:  # so often that the functions within have given up too
            assert len(made) >= _replay._MAX_ALIKE
            made.clear()
    assert not made


def checkpointed(reentrant: bool) -> Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], object]:
    def run(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
        checkpoint(f, x, use_reentrant=reentrant).backward(grad)

    return run


def hooked(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        result = f(x)
    result.register_hook(lambda g: 2 * g)
    result.backward(grad, retain_graph=True)
    result.backward(grad)


def watched(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    with torch.autograd.detect_anomaly():
        f(x).backward(grad)


def compiled(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    result = f(x)
    with compiled_autograd._enable(lambda graph: graph):
        result.backward(grad)


def modified(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    result = f(x)
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward(grad)


def twice(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    result = f(x)
    result.backward(grad)
    with pytest.raises(RuntimeError, match="a second time"):
        result.backward(grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("way", "replays"),
    [
        *((way, True) for way in (checkpointed(True), watched, compiled, modified, twice)),
        *((way, False) for way in (checkpointed(False), hooked)),
    ],
    ids=["reentrant checkpoint", "anomaly mode", "compiled autograd", "modified", "twice", "checkpoint", "hooks"],
)
def test_ways_of_autograd_with_replays(
    way: Callable[..., object], replays: bool, answers: list[bool], device: str
) -> None:
    x, y, grad = torch.randn(3, 4, 4, device=device)
    leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(5):
        del answers[:]
        way(lambda t: functional.softmax(functional.mm(t, y), -1), leaves[0], grad)
        way(lambda t: torch.softmax(t @ y, -1), leaves[1], grad)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert any(answers) is replays


def test_an_exception_ends_a_recording(answers: list[bool], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4, device=device)
    functional.softmax(x, -1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            functional.softmax(x, -1)
    assert recording() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    for _ in range(3):
        torch.testing.assert_close(functional.softmax(x, -1), torch.softmax(x, -1))
    assert answers == [True, True]


@replayed
def rows_above_zero(x: Tensor) -> Tensor:
    return functional.index_select(x, 0, (x[:, 0] > 0).nonzero().reshape(-1))


def test_shapes_that_values_decide_are_not_repeated(answers: list[bool], device: str) -> None:
    for count in (3, 3, 3, 5, 1, 0, 3):
        x = (torch.arange(6, device=device) < count).float().reshape(6, 1).expand(6, 4).contiguous()
        assert rows_above_zero(x).shape == (count, 4)


def test_what_a_capture_launches_stays_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(program, "keep_loaded", kept.extend)
    monkeypatch.setattr(program, "is_capturing", lambda: bool(capturing))
    monkeypatch.setattr(program, "current_stream", lambda index: 7)
    capturing: list[bool] = []
    with replays_on_cpu() as answers:
        x = torch.randn(3, 4, requires_grad=True)
        for capturing in ([], [], [], [], [], [True]):
            del answers[:], kept[:]
            torch.autograd.grad(functional.softmax(x, -1), x, torch.ones(3, 4))
            assert len(kept) == 2 * len(capturing)  # forward and backward
    assert answers == [True, True]


@pytest.mark.parametrize(
    ("rows", "stream", "captured", "allocated"),
    [(3, 7, False, 1), (3, 8, False, 2), (3, 7, True, 2), (5000, 7, False, 2)],
    ids=["same stream", "other stream", "captured", "large"],
)
def test_scratch_memory_of_one_launch_is_kept_for_its_stream(
    rows: int, stream: int, captured: bool, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms without gradients drop what a gradient would need of each row."""
    on, state = [7], [False]
    made: list[int] = []
    monkeypatch.setattr(program, "is_capturing", lambda: state[0])
    monkeypatch.setattr(program, "current_stream", lambda index: on[0])
    with replays_on_cpu() as answers:
        empty = program._empty
        monkeypatch.setattr(program, "_empty", lambda *args: made.append(1) or empty(*args))
        x, w = torch.randn(rows, 8), torch.randn(8)
        for _ in range(2):
            functional.rms_norm(x, (8,), w)
        on[0], state[0] = stream, captured
        for _ in range(2):
            del made[:]
            torch.testing.assert_close(functional.rms_norm(x, (8,), w), torch.rms_norm(x, (8,), w))
            assert len(made) == allocated
    assert answers == [True, True]


@pytest.mark.parametrize(
    ("change", "error", "by_driver"),
    [(torch.clone, 0, 2), (torch.clone, 201, 2), (lambda t: t.t().contiguous().t(), 0, 0), (lambda t: t[:0], 0, 0)],
    ids=["dense", "no context", "other strides", "empty"],
)
def test_plain_copies_are_the_drivers(
    change: Callable[[Tensor], Tensor], error: int, by_driver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def copy(to: int, source: int, count: int, stream: int) -> int:
        copied.append(count)
        return error or (ctypes.memmove(to, source, count) and 0)

    with replays_on_cpu() as answers:
        monkeypatch.setattr(program, "copy_memory", copy)
        x, index, source = change(torch.randn(6, 8)), torch.zeros(6, dtype=torch.int64), torch.ones(6, 8)
        index, source = index[: len(x)], source[: len(x)]
        for _ in range(4):
            torch.testing.assert_close(functional.index_add(x, 0, index, source), x.index_add(0, index, source))
    assert answers.count(True) == 2
    assert copied == [x.nbytes] * by_driver


ODD: dict[str, Callable[[str], Args]] = {
    "fake": lambda device: (FakeTensorMode().from_tensor(torch.randn(3, 4, device=device)), -1),
    "nested": lambda device: (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device), -1),
    "a dict": lambda device: (torch.randn(3, 4, device=device), {}),
    "a slice": lambda device: (torch.randn(3, 4, device=device), slice(1)),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_arguments_are_left_to_the_function(odd: str, answers: list[bool], device: str) -> None:
    plain = functional.softmax.__wrapped__  # type: ignore[attr-defined]
    args = ODD[odd](device)
    for _ in range(3):
        got, expected = outcome(functional.softmax, args), outcome(plain, args)
        assert type(got) is type(expected)
        assert isinstance(got, Tensor) or got == expected
    assert not answers


def test_shapes_that_come_once_leave_nothing(answers: list[bool], device: str) -> None:
    forget()
    for n in range(1, 40):
        functional.softmax(torch.randn(2, n, device=device), -1)
    assert functional.softmax.replays._alike == {}  # type: ignore[attr-defined]
    assert not answers


def test_what_is_kept_is_bounded(answers: list[bool], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "_MAX_REPLAYS", 8)
    replays = functional.softmax.replays  # type: ignore[attr-defined]
    for n in range(1, 30):
        x = torch.randn(2, n, device=device)
        for _ in range(3):
            torch.testing.assert_close(functional.softmax(x, -1), torch.softmax(x, -1))
        assert sum(map(len, replays._alike.values())) <= 8
        assert len(replays._came) <= 8


def test_threads_share_replays(answers: list[bool], device: str) -> None:
    failures: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in range(60):
                x = torch.full((3, 1 + (seed + i) % 3), float(i), device=device)
                assert torch.equal(functional.relu_squared(x), x * x)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.gpu
def test_streams_and_capture() -> None:
    with noted() as answers:
        x, leaf = torch.randn(64, 32, device="cuda"), torch.randn(64, 32, device="cuda", requires_grad=True)
        rows = torch.arange(64, device="cuda")

        def work() -> list[Tensor]:
            result = functional.log_softmax(leaf, -1)
            twice = functional.index_add(x, 0, rows, x)
            return [functional.softmax(x, -1), twice, *torch.autograd.grad((result * x).sum(), leaf)]

        for _ in range(6):
            work()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.fill_(3.0)
            del answers[:]
            found = work()
        assert all(answers)
        stream.synchronize()
        assert torch.equal(found[0], torch.full_like(x, 1 / 32))
        assert torch.equal(found[1], torch.full_like(x, 6.0))
        graph = torch.cuda.CUDAGraph()
        del answers[:]
        with torch.cuda.graph(graph):
            captured = work()
        assert all(answers)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured[0], torch.softmax(x, -1))
        assert torch.equal(captured[1], x + x)


@pytest.mark.gpu
def test_another_device_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with noted():
        x = torch.randn(8, 8, device="cuda:1")
        with torch.cuda.device(1):
            for _ in range(4):
                functional.softmax(x, -1)
        same(functional.softmax(x, -1), torch.softmax(x, -1))
