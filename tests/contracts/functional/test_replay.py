"""Repeated functional calls on the GPU: a replay is taken where nothing changed, and never where something did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.functional import forget_replays
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import triplan.functional as tf
from triplan.facade import replay as replay_module

pytestmark = pytest.mark.gpu


def gather_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return torch.randn(9, 32, device="cuda").to(dtype), 0, torch.randint(0, 9, (n, 32), device="cuda")


def select_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return torch.randn(9, 32, device="cuda").to(dtype), 0, torch.randint(0, 9, (n,), device="cuda")


def embedding_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return torch.randint(0, 9, (2, n), device="cuda"), torch.randn(9, 32, device="cuda").to(dtype)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    buffer[1:] = t.reshape(-1)
    return buffer[1:].view(t.shape)


Maker = Callable[..., tuple[Any, ...]]
OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Maker]] = {
    "gather": (tf.gather, torch.gather, gather_args),
    "index_select": (tf.index_select, torch.index_select, select_args),
    "embedding": (tf.embedding, torch.nn.functional.embedding, embedding_args),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every replay that was tried: whether it answered."""
    answers: list[bool] = []
    original = replay_module.make_call_replay

    def make(*args: Any) -> replay_module.CallReplay | None:
        replay = original(*args)

        def asking(args: tuple[Any, ...]) -> torch.Tensor | None:
            found = replay(args) if replay is not None else None
            answers.append(found is not None)
            return found

        return None if replay is None else asking

    monkeypatch.setattr(replay_module, "make_call_replay", make)
    forget_replays()
    return answers


@pytest.mark.parametrize("op", OPS)
def test_repeats_are_right_and_short(op: str, taken: list[bool]) -> None:
    ours, torchs, make = OPS[op]
    for _ in range(5):
        args = make()
        assert torch.equal(ours(*args), torchs(*args))
    assert taken[-3:] == [True] * 3
    kept = ours(*args)
    again = ours(*args)
    assert kept.data_ptr() != again.data_ptr()


@pytest.mark.parametrize("op", OPS)
def test_whatever_changes_is_seen(op: str, taken: list[bool]) -> None:
    ours, torchs, make = OPS[op]

    def check(*args: Any) -> None:
        got, expected = ours(*args), torchs(*args)
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype
        assert got.requires_grad == expected.requires_grad

    for _ in range(3):
        check(*make())
        check(*make(torch.float16))
        check(*make(torch.bool))
        check(*make(n=7))
        check(*make(n=0))
        args = make()
        check(*(misaligned(a) if isinstance(a, torch.Tensor) else a for a in args))
        check(*(a.t().contiguous().t() if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args))
        check(*(a.int() if isinstance(a, torch.Tensor) and a.dtype == torch.int64 else a for a in args))
        if op != "embedding":
            square = torch.randn(9, 9, device="cuda")
            index = torch.randint(0, 9, (9, 9) if op == "gather" else (9,), device="cuda")
            check(square, 0, index)
            check(square, 1, index)
            check(square, -1, index)
    assert any(taken)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_never_dropped(op: str) -> None:
    ours, torchs, make = OPS[op]
    args = make()
    for _ in range(3):
        ours(*args)
    at = next(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point())
    grads = []
    for call in (ours, torchs):
        leaf = args[at].clone().requires_grad_()
        given = [leaf if i == at else a for i, a in enumerate(args)]
        with torch.no_grad():
            assert not call(*given).requires_grad
        out = call(*given)
        assert out.requires_grad
        out.backward(torch.ones_like(out))
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])
    parameter = torch.nn.Parameter(args[at])
    assert ours(*(parameter if i == at else a for i, a in enumerate(args))).requires_grad


@pytest.mark.parametrize("op", OPS)
def test_modes_and_transforms_still_see_the_call(op: str, taken: list[bool]) -> None:
    ours, torchs, make = OPS[op]
    args = make()
    expected = torchs(*args)
    for _ in range(3):
        ours(*args)
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*given, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, given: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*given, **(kwargs or {}))

    for mode in (Dispatch, Function):
        seen.clear()
        del taken[:]
        with mode():
            assert torch.equal(ours(*args), expected)
        assert any(op in s for s in seen), mode
        assert not any(taken)
    with torch.inference_mode():
        assert torch.equal(ours(*args), expected)
        assert ours(*args).is_inference()
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(ours(*args), expected)
        assert ours(*args).dtype == expected.dtype
    batched = torch.func.vmap(
        lambda x: ours(*(x if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    )
    table = next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    assert torch.equal(batched(torch.stack([table, table]))[1], expected)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), expected)


def test_determinism_is_looked_up_at_every_call(taken: list[bool]) -> None:
    args = gather_args()
    for _ in range(3):
        tf.gather(*args)
    torch.use_deterministic_algorithms(True)
    try:
        del taken[:]
        assert torch.equal(tf.gather(*args), torch.gather(*args))
        assert not any(taken)
    finally:
        torch.use_deterministic_algorithms(False)


def test_streams_and_capture(taken: list[bool]) -> None:
    args = gather_args()
    for _ in range(3):
        tf.gather(*args)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        args[0].fill_(3.0)
        out = tf.gather(*args)
    assert taken[-1]
    stream.synchronize()
    assert bool((out == 3).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tf.gather(*args)
    assert taken[-1]
    args[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, torch.gather(*args))


def test_bad_indices_are_still_checked_on_request() -> None:
    values, dim, index = gather_args()
    for _ in range(3):
        tf.gather(values, dim, index)
    index[1, 2] = 9
    assert tf.gather(values, dim, index)[1, 2] == 0
    with pytest.raises(IndexError, match=r"index\[1, 2\] = 9"):
        tf.gather(values, dim, index, check_indices=True)
    with pytest.raises(RuntimeError):
        tf.gather(values, dim, index.float())
    with pytest.raises(IndexError):
        tf.gather(values, 2, index)


# --- into tensors of the caller's ---


def scattered(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    target, src = torch.randn(9, 32, device="cuda").to(dtype), torch.randn(n, 32, device="cuda").to(dtype)
    return target, 0, torch.randint(0, 9, (n, 32), device="cuda"), src


def added(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    target, src = torch.randn(9, 32, device="cuda").to(dtype), torch.randn(n, 32, device="cuda").to(dtype)
    return target, 0, torch.randperm(9, device="cuda")[:n], src


def given(call: Callable[..., torch.Tensor], make: Maker) -> Maker:
    """Arguments of ``call``, a tensor for the result first."""

    def made(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = make(*args, **kwargs)
        return torch.full_like(call(*found), 7), *found

    return made


INTO: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Maker]] = {
    "gather": (
        lambda out, *args: tf.gather(*args, out=out),
        lambda out, *args: torch.gather(*args, out=out),
        given(torch.gather, gather_args),
    ),
    "index_select": (
        lambda out, *args: tf.index_select(*args, out=out),
        lambda out, *args: torch.index_select(*args, out=out),
        given(torch.index_select, select_args),
    ),
    "index_add_": (tf.index_add_, lambda t, *args, **kwargs: t.index_add_(*args, **kwargs), added),
    "scatter_add_": (tf.scatter_add_, lambda t, *args: t.scatter_add_(*args), scattered),
}


def both(op: str, *args: Any, **kwargs: Any) -> None:
    """Ours and torch's on operands of the same bits; ours bumps the version of what it wrote."""
    ours, torchs, _ = INTO[op]
    target, *rest = args
    other = target.clone()
    version = target._version
    got = ours(target, *rest, **kwargs)
    assert got is target
    assert target._version > version
    expected = torchs(other, *rest, **kwargs)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("op", INTO)
def test_repeats_into_given_tensors(op: str, taken: list[bool]) -> None:
    _, _, make = INTO[op]
    for _ in range(4):
        both(op, *make())
    assert taken[-2:] == [True] * 2
    args = make()
    for _ in range(3):
        both(op, *args)
    assert taken[-2:] == [True] * 2


@pytest.mark.parametrize("op", INTO)
def test_whatever_changes_in_given_tensors_is_seen(op: str, taken: list[bool]) -> None:
    _, _, make = INTO[op]
    for _ in range(3):
        both(op, *make())
        both(op, *make(torch.float64))
        both(op, *make(n=5))
        args = make()
        for at, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                both(op, *(misaligned(a) if i == at else b for i, b in enumerate(args)))
        target, *rest = make()
        both(op, target.t().contiguous().t(), *rest)
    assert any(taken)


def test_a_result_that_overlaps_what_is_read(taken: list[bool]) -> None:
    index = torch.tensor([5, 0, 3, 3, 1, 2], device="cuda")
    for shift in (40, 40, 20, 3, 0, 40):
        buffer = torch.randn(64, 32, device="cuda")
        source, out = buffer[:6], buffer[shift : shift + 6]
        expected = source.index_select(0, index)
        del taken[:]
        assert torch.equal(tf.index_select(source, 0, index, out=out), expected)
        assert shift >= 6 or not any(taken)
    buffer = torch.randn(64, 32, device="cuda")
    for shift in (40, 40, 4, 40):
        target, source = buffer[:6], buffer[shift : shift + 6]
        expected = target.index_add(0, index, source.clone())
        tf.index_add_(target, 0, index, source)
        torch.testing.assert_close(target, expected)


def test_scales_are_told_apart(taken: list[bool]) -> None:
    for alpha in (1, 1, 1, 2.5, 2.5, 2.5, 1.0, 1.0, -1, -1, -1):
        both("index_add_", *added(), alpha=alpha)
    assert any(taken)
    target, dim, index, source = (
        a.int() if isinstance(a, torch.Tensor) and a.dtype.is_floating_point else a for a in added()
    )
    for _ in range(3):
        tf.index_add_(target, dim, index, source, alpha=1)
    with pytest.raises(RuntimeError):
        tf.index_add_(target, dim, index, source, alpha=1.0)


@pytest.mark.parametrize("op", INTO)
def test_gradients_of_given_tensors_are_never_dropped(op: str) -> None:
    ours, torchs, make = INTO[op]
    args = make()
    for _ in range(3):
        ours(*args)
    for at, a in enumerate(args):
        if not (isinstance(a, torch.Tensor) and a.is_floating_point()):
            continue
        outcomes = []
        for call in (ours, torchs):
            leaf = a.clone().requires_grad_()
            changed = leaf * 1 if at == 0 else leaf
            rest = [changed if i == at else b for i, b in enumerate(args)]
            if at:
                rest[0] = args[0].clone()
            try:
                out = call(*rest)
                out.backward(torch.ones_like(out))
                outcomes.append(leaf.grad)
            except RuntimeError:
                outcomes.append(None)
        if outcomes[1] is None:
            assert outcomes[0] is None
        else:
            assert outcomes[0] is not None
            assert torch.equal(outcomes[0], outcomes[1])


def test_modes_see_calls_into_given_tensors() -> None:
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for op, (ours, _, make) in INTO.items():
        for _ in range(3):
            ours(*make())
        args = make()
        seen.clear()
        with Dispatch():
            ours(*args)
        assert any(op in s for s in seen), op
    with torch.inference_mode():
        for op, (_, _, make) in INTO.items():
            args = make()
            expected = INTO[op][1](args[0].clone(), *args[1:])
            torch.testing.assert_close(INTO[op][0](*args), expected)


def test_in_place_under_determinism(taken: list[bool]) -> None:
    args = added()
    for _ in range(3):
        both("index_add_", *args)
    torch.use_deterministic_algorithms(True)
    try:
        del taken[:]
        both("index_add_", *args)
        assert not any(taken)
    finally:
        torch.use_deterministic_algorithms(False)
