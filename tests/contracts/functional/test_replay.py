"""Repeated functional calls on the GPU: a replay is taken where nothing changed, and never where something did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.functional import SeenDispatch, SeenFunction, forget_replays

import triplan.functional as tf
from triplan.facade import replay as replay_module

pytestmark = pytest.mark.gpu
Maker = Callable[..., tuple[Any, ...]]
Op = Callable[..., torch.Tensor]


def drawn(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 32, device="cuda").to(dtype)


def positions(*shape: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, device="cuda")


def gather_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return drawn(9, dtype), 0, positions(n, 32)


def select_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return drawn(9, dtype), 0, positions(n)


def embedding_args(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return positions(2, n), drawn(9, dtype)


def scattered(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return drawn(9, dtype), 0, positions(n, 32), drawn(n, dtype)


def added(dtype: torch.dtype = torch.float32, n: int = 6) -> tuple[Any, ...]:
    return drawn(9, dtype), 0, torch.randperm(9, device="cuda")[:n], drawn(n, dtype)


def with_out(ours: Op, theirs: Op, make: Maker) -> tuple[Op, Op, Maker]:
    """The calls with ``out=``, a tensor for the result first among their arguments."""

    def made(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = make(*args, **kwargs)
        return torch.full_like(theirs(*found), 7), *found

    return lambda out, *args: ours(*args, out=out), lambda out, *args: theirs(*args, out=out), made


NEW: dict[str, tuple[Op, Op, Maker]] = {
    "gather": (tf.gather, torch.gather, gather_args),
    "index_select": (tf.index_select, torch.index_select, select_args),
    "embedding": (tf.embedding, torch.nn.functional.embedding, embedding_args),
}
#: Into tensors of the caller's, which come first.
INTO: dict[str, tuple[Op, Op, Maker]] = {
    "gather_out": with_out(*NEW["gather"]),
    "index_select_out": with_out(*NEW["index_select"]),
    "index_add_": (tf.index_add_, lambda t, *args, **kwargs: t.index_add_(*args, **kwargs), added),
    "scatter_add_": (tf.scatter_add_, lambda t, *args: t.scatter_add_(*args), scattered),
}
CALLS = {**NEW, **INTO}


def is_values(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point()


def misaligned(t: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    buffer[1:] = t.reshape(-1)
    return buffer[1:].view(t.shape)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else t


def narrowed(t: torch.Tensor) -> torch.Tensor:
    return t.int() if t.dtype == torch.int64 else t


def changed(args: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor], *at: int) -> tuple[Any, ...]:
    """The tensors changed, or only those at ``at``."""
    return tuple(change(a) if isinstance(a, torch.Tensor) and (not at or i in at) else a for i, a in enumerate(args))


def both(op: str, *args: Any, **kwargs: Any) -> None:
    """Ours equals torch's on operands of the same bits, and bumps the version of a given tensor."""
    ours, theirs, _ = CALLS[op]
    other = (args[0].clone(), *args[1:]) if op in INTO else args
    version = args[0]._version
    got, expected = ours(*args, **kwargs), theirs(*other, **kwargs)
    assert (got.dtype, got.requires_grad) == (expected.dtype, expected.requires_grad)
    if op in INTO:
        assert got is args[0]
        assert got._version > version
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)


def warmed(op: str) -> tuple[Any, ...]:
    """Arguments of a call that has been made with them."""
    args = CALLS[op][2]()
    for _ in range(3):
        CALLS[op][0](*args)
    return args


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


@pytest.mark.parametrize("op", CALLS)
def test_repeats_are_right_and_short(op: str, taken: list[bool]) -> None:
    ours, _, make = CALLS[op]
    for _ in range(5):
        both(op, *make())
    assert taken[-3:] == [True] * 3
    args = make()
    for _ in range(3):
        both(op, *args)
    assert taken[-2:] == [True] * 2
    kept, again = ours(*args), ours(*args)
    assert (kept.data_ptr() == again.data_ptr()) == (op in INTO)


@pytest.mark.parametrize("op", CALLS)
def test_whatever_changes_is_seen(op: str, taken: list[bool]) -> None:
    make = CALLS[op][2]
    for _ in range(3):
        both(op, *make())
        for dtype in (torch.float64,) if op in INTO else (torch.float16, torch.bool):
            both(op, *make(dtype))
        for n in (5,) if op in INTO else (7, 0):
            both(op, *make(n=n))
        args = make()
        if op in INTO:
            for at, a in enumerate(args):
                if isinstance(a, torch.Tensor):
                    both(op, *changed(args, misaligned, at))
            both(op, *changed(args, transposed, 0))
        else:
            for change in (misaligned, transposed, narrowed):
                both(op, *changed(args, change))
        if op in ("gather", "index_select"):
            square, index = torch.randn(9, 9, device="cuda"), positions(*((9, 9) if op == "gather" else (9,)))
            for dim in (0, 1, -1):
                both(op, square, dim, index)
    assert any(taken)


@pytest.mark.parametrize("op", CALLS)
def test_gradients_are_never_dropped(op: str) -> None:
    args = warmed(op)
    for at, a in enumerate(args):
        if not is_values(a):
            continue
        grads = []
        for call in CALLS[op][:2]:
            leaf = a.clone().requires_grad_()
            given = [args[0].clone() if i == 0 and op in INTO else b for i, b in enumerate(args)]
            given[at] = leaf * 1 if op in INTO and at == 0 else leaf  # a leaf cannot be written to
            try:
                out = call(*given)
                out.backward(torch.ones_like(out))
                grads.append(leaf.grad)
            except RuntimeError:  # torch's out= takes no gradients
                grads.append(None)
        assert (grads[0] is None) == (grads[1] is None) == op.endswith("_out")
        assert grads[1] is None or torch.equal(*grads)
        if op in NEW:
            parameter = torch.nn.Parameter(a)
            given = [parameter if i == at else b for i, b in enumerate(args)]
            with torch.no_grad():
                assert not CALLS[op][0](*given).requires_grad
            assert CALLS[op][0](*given).requires_grad


@pytest.mark.parametrize("mode", [SeenDispatch, SeenFunction])
@pytest.mark.parametrize("op", CALLS)
def test_modes_see_the_call(op: str, mode: Any, taken: list[bool]) -> None:
    ours, theirs, _ = CALLS[op]
    args = warmed(op)
    expected = theirs(*changed(args, torch.clone, 0))
    del taken[:]
    with mode() as seen:
        got = ours(*args)
    torch.testing.assert_close(got, expected)
    assert any(op.removesuffix("_out") in s for s in seen.ops)
    assert not any(taken)


@pytest.mark.parametrize("op", INTO)
def test_inference_mode_writes_given_tensors(op: str) -> None:
    ours, theirs, make = INTO[op]
    warmed(op)
    with torch.inference_mode():
        args = make()
        expected = theirs(*changed(args, torch.clone, 0))
        torch.testing.assert_close(ours(*args), expected)


@pytest.mark.parametrize("op", NEW)
def test_inference_autocast_and_transforms(op: str) -> None:
    ours, theirs, _ = NEW[op]
    args = warmed(op)
    expected = theirs(*args)
    with torch.inference_mode():
        assert torch.equal(ours(*args), expected)
        assert ours(*args).is_inference()
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(ours(*args), expected)
        assert ours(*args).dtype == expected.dtype
    at = next(i for i, a in enumerate(args) if is_values(a))
    batched = torch.func.vmap(lambda x: ours(*changed(args, lambda _: x, at)))
    assert torch.equal(batched(torch.stack([args[at]] * 2))[1], expected)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), expected)


@pytest.mark.parametrize("op", ["gather", "index_add_"])
def test_determinism_is_looked_up_at_every_call(op: str, taken: list[bool], request: pytest.FixtureRequest) -> None:
    args = warmed(op)
    request.getfixturevalue("deterministic")
    del taken[:]
    both(op, *args)
    assert not any(taken)


def test_streams_and_capture(taken: list[bool]) -> None:
    args = warmed("gather")
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
    values, dim, index = warmed("gather")
    index[1, 2] = 9
    assert tf.gather(values, dim, index)[1, 2] == 0
    with pytest.raises(IndexError, match=r"index\[1, 2\] = 9"):
        tf.gather(values, dim, index, check_indices=True)
    with pytest.raises(RuntimeError):
        tf.gather(values, dim, index.float())
    with pytest.raises(IndexError):
        tf.gather(values, 2, index)


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
