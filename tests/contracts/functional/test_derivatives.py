"""Derivatives of every order beside torch's: autograd, torch.func, forward mode, compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import FAST
from cases.derivatives import FIXED, LOSSES, NAMES, ROWS, SHAPED, derivable
from cases.functional import integers
from samples import same
from torch.autograd import gradcheck, gradgradcheck


def detached(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(v.detach() for v in values)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str, device: str) -> None:
    ours, _, values = derivable(name, device)
    if name != "embedding_padded":  # its gradient is no derivative, on purpose
        assert gradcheck(ours, values, check_forward_ad=True, **FAST)
    assert gradgradcheck(lambda *v: ours(*v) ** 2 if name in FIXED else ours(*v), values, **FAST)  # linear ones


@pytest.mark.parametrize("name", [*ROWS, *LOSSES])
def test_third_derivatives(name: str, device: str) -> None:
    ours, _, (x, *rest) = derivable(name, device, (1, 2, 3))
    others = detached(rest)
    assert gradgradcheck(lambda x: torch.autograd.grad((ours(x, *others) ** 3).sum(), x, create_graph=True), x, **FAST)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_an_expanded_gradient(name: str, device: str) -> None:
    ours, theirs, values = derivable(name, device)
    torch.testing.assert_close(*(torch.autograd.grad(f(*values).sum(), values) for f in (ours, theirs)))


@pytest.mark.parametrize("name", [*NAMES, *SHAPED])
def test_func_transforms(name: str, device: str) -> None:
    ours, theirs, leaves = derivable(name, device)
    values, everything = detached(leaves), tuple(range(len(leaves)))
    batch = tuple(torch.stack([v, 2 * v, v + 1]) for v in values)

    def every(f: Callable[..., torch.Tensor]) -> Iterator[Any]:
        total = lambda *values: (f(*values) ** 3).sum()  # noqa: E731
        gradient = torch.func.grad(total, everything)
        yield gradient(*values)
        yield torch.func.vmap(gradient)(*batch)
        yield torch.func.vmap(total, (-1, *[None] * (len(values) - 1)))(batch[0].movedim(0, -1), *values[1:])
        yield torch.func.grad(lambda *b: torch.func.vmap(total)(*b).sum(), everything)(*batch)
        yield torch.func.jacfwd(total, everything)(*values)
        yield torch.func.jacrev(gradient, everything)(*values)
        yield torch.func.jacfwd(gradient, everything)(*values)
        if name == "index_put":
            return  # torch batches no op with a list of tensors in autograd.grad
        out = f(*leaves)
        several = torch.stack([torch.ones_like(out), out.detach()])
        for each in (False, True):
            yield torch.autograd.grad(out, leaves, several, True, is_grads_batched=True, create_graph=each)
            if name.split()[0] not in FIXED:  # column by column, and all at once
                yield torch.autograd.functional.hessian(total, tuple(leaves), vectorize=each)

    for got, wanted in zip(every(ours), every(theirs), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("fresh_compiler")
def test_graphs_refuse_forward_mode(name: str, device: str) -> None:
    """The op that a graph holds would drop the tangents."""
    ours, _, leaves = derivable(name, device)
    values = detached(leaves)
    whole = torch.compile(lambda *v: torch.func.jvp(ours, v, v), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="has no jvp in a compiled graph"):
        whole(*values)


@pytest.mark.parametrize(
    ("backend", "dynamic", "name"),
    [
        *(("aot_eager", dynamic, name) for dynamic in (False, True) for name in NAMES),
        # It calls a C++ compiler for each graph: one that writes an argument and one that does not stand for all.
        *(("inductor", None, name) for name in ("scatter_add_", "linear")),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_whole(backend: str, dynamic: bool | None, name: str, device: str) -> None:
    ours, _, values = derivable(name, device)
    # A recorded cross_entropy multiplies its gradient later than a compiled one.
    equal = torch.testing.assert_close if name in LOSSES else same
    function = lambda *values: ours(*(v * 1 for v in values)) * 2  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    got, expected = compiled(*values), function(*values)
    equal(got, expected)
    weight = integers(tuple(got.shape), got.dtype, device, 5)
    equal(*(torch.autograd.grad(out, values, weight) for out in (got, expected)))
    with torch.no_grad():
        equal(compiled(*values), expected)
