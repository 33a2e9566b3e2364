"""Functions and modules of triplan beside torch's: small calls, whose time is the host's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as tf

Tensor = torch.Tensor
#: (rows, width, dtype): so small that the device is rarely slower than the host.
SIZES = ((64, 256, torch.bfloat16), (8, 64, torch.float32))


@dataclass(frozen=True)
class Draw:
    """Draws the arguments of a call."""

    m: int
    n: int
    dtype: torch.dtype
    device: torch.device

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def x(self) -> Tensor:
        return self.values(self.m, self.n)

    def positions(self, *shape: int, of: int) -> Tensor:
        return torch.randint(of, shape, device=self.device)

    def distinct(self, *shape: int) -> Tensor:
        """Positions below the extent of the first axis, none of which comes twice along it."""
        return torch.rand(*shape, device=self.device).argsort(0)


@dataclass(frozen=True)
class Call:
    """A function of ours, torch's, and the arguments; those numbered ``grads`` get a gradient."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    args: tuple[Any, ...]
    grads: tuple[int, ...] = ()
    composed: bool = False  # ours consists of ops of torch too, which autograd records one by one

    def given(self, recording: bool) -> tuple[Any, ...]:
        """The arguments, with leaves that require a gradient if ``recording``."""
        return tuple(
            a.detach().clone().requires_grad_() if recording and i in self.grads else a for i, a in enumerate(self.args)
        )


def calls(d: Draw) -> dict[str, Call]:
    """Every function and module, by name."""
    ours: Any = importlib.import_module("triplan.functional")
    modules: Any = importlib.import_module("triplan.nn")
    x, w, b, square = d.x, d.values(d.n), d.values(d.n), d.values(d.n, d.n)
    target, rows = d.positions(d.m, of=d.n), d.positions(d.m, of=d.m)
    wide, once = d.positions(d.m, d.n, of=d.m), d.distinct(d.m, d.n)
    matrix, shape = d.values(d.n, d.m), (d.n,)
    vector, mask, bag = d.distinct(d.m), d.positions(d.m, d.n, of=2).bool(), d.positions(4, d.m // 2, of=d.m)
    first, second, whole = d.values(4, d.m, d.n), d.values(4, d.n, d.m), d.values(4, d.m, d.m)
    found: dict[str, Call] = {
        "relu_squared": Call(ours.relu_squared, lambda x: tf.relu(x).square(), (x,), (0,)),
        "softmax": Call(ours.softmax, torch.softmax, (x, -1), (0,)),
        "log_softmax": Call(ours.log_softmax, torch.log_softmax, (x, -1), (0,)),
        "layer_norm": Call(ours.layer_norm, tf.layer_norm, (x, shape, w, b), (0, 2, 3)),
        "rms_norm": Call(ours.rms_norm, tf.rms_norm, (x, shape, w, 1e-5), (0, 2)),
        "l2_norm": Call(lambda x: ours.l2_norm(x), lambda x: tf.normalize(x, dim=-1), (x,), (0,)),
        "cross_entropy": Call(ours.cross_entropy, tf.cross_entropy, (x, target), (0,)),
        "nll_loss": Call(ours.nll_loss, tf.nll_loss, (x, target), (0,)),
        "mm": Call(ours.mm, torch.mm, (x, square), (0, 1)),
        "bmm": Call(ours.bmm, torch.bmm, (d.values(4, d.m, d.n), d.values(4, d.n, d.m)), (0, 1)),
        "matmul": Call(ours.matmul, torch.matmul, (d.values(4, d.m, d.n), matrix), (0, 1)),
        "addmm": Call(ours.addmm, torch.addmm, (b, x, square), (0, 1, 2)),
        "linear": Call(ours.linear, tf.linear, (x, square, b), (0, 1, 2)),
        "gather": Call(ours.gather, torch.gather, (x, 0, wide), (0,)),
        "scatter": Call(ours.scatter, torch.scatter, (x, 0, once, d.x), (0, 3)),
        "scatter_add": Call(ours.scatter_add, torch.scatter_add, (x, 0, wide, d.x), (0, 3)),
        "scatter_add_": Call(ours.scatter_add_, Tensor.scatter_add_, (d.x, 0, wide, d.x)),
        "index_select": Call(ours.index_select, torch.index_select, (x, 0, rows), (0,)),
        "index_add": Call(ours.index_add, torch.index_add, (x, 0, rows, d.x), (0, 3)),
        "index_add_": Call(ours.index_add_, Tensor.index_add_, (d.x, 0, rows, d.x)),
        "addbmm": Call(ours.addbmm, torch.addbmm, (whole[0], first, second), (0, 1, 2), composed=True),
        "baddbmm": Call(ours.baddbmm, torch.baddbmm, (whole, first, second), (0, 1, 2)),
        "normalize": Call(ours.normalize, tf.normalize, (x, 2.0, -1), (0,)),
        "gather_with_grad": Call(ours.gather_with_grad, torch.gather, (x, 0, wide), (0,)),
        "take_along_dim": Call(ours.take_along_dim, torch.take_along_dim, (x, wide, 0), (0,), composed=True),
        "index_copy": Call(ours.index_copy, torch.index_copy, (x, 0, vector, d.x), (0, 3)),
        "index_copy_": Call(ours.index_copy_, Tensor.index_copy_, (d.x, 0, vector, d.x)),
        "index_fill": Call(ours.index_fill, torch.index_fill, (x, 0, vector, 2.5), (0,), composed=True),
        "index_fill_": Call(ours.index_fill_, Tensor.index_fill_, (d.x, 0, vector, 2.5), composed=True),
        "masked_scatter": Call(ours.masked_scatter, torch.masked_scatter, (x, mask, d.x), (0, 2), composed=True),
        "masked_scatter_": Call(ours.masked_scatter_, Tensor.masked_scatter_, (d.x, mask, d.x), composed=True),
        "scatter_": Call(ours.scatter_, Tensor.scatter_, (d.x, 0, once, d.x)),
        "scatter_reduce": Call(ours.scatter_reduce, torch.scatter_reduce, (x, 0, wide, d.x, "amax"), (0, 3), True),
        "scatter_reduce_": Call(ours.scatter_reduce_, Tensor.scatter_reduce_, (d.x, 0, wide, d.x, "amax")),
        "index_put_": Call(ours.index_put_, Tensor.index_put_, (d.x, (vector,), d.x)),
        "embedding_bag": Call(ours.embedding_bag, tf.embedding_bag, (bag, x), (1,), composed=True),
        "index_put": Call(ours.index_put, torch.index_put, (x, (d.distinct(d.m),), d.x), (0, 2)),
        "embedding": Call(ours.embedding, tf.embedding, (rows, x), (1,)),
    }
    for name, make, args in (
        ("LayerNorm", "LayerNorm", (d.n,)),
        ("RMSNorm", "RMSNorm", (d.n,)),
    ):
        mine, its = (getattr(m, make)(*args).to(d.device, d.dtype) for m in (modules, torch.nn))
        found[f"nn.{name}"] = Call(mine, its, (x,), (0,))
    mine, its = modules.CrossEntropyLoss(), torch.nn.CrossEntropyLoss()
    found["nn.CrossEntropyLoss"] = Call(mine, its, (x, target), (0,))
    return found


def kinds(call: Call, function: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed of ``function``: (kind, call)."""
    args = call.given(False)
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []

    def plain() -> object:
        with torch.no_grad():
            return function(*args)

    yield "forward", (plain if parameters else lambda: function(*args))
    if not call.grads:
        return
    leaves = call.given(True)
    yield "forward, recorded", lambda: function(*leaves)
    wanted = [leaves[i] for i in call.grads] + parameters
    result = function(*leaves)
    grad = torch.ones_like(result)

    def by_grad() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    def by_backward() -> object:
        for t in wanted:
            t.grad = None
        return function(*leaves).backward(grad)

    yield "autograd.grad", by_grad
    yield "backward()", by_backward
