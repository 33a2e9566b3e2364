"""Cases of random numbers: tensors filled in place, and dropout with and without its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as tf
from torch import Tensor

import triplan.functional as F  # noqa: N812
from bench.copies import CopyCase, Work
from bench.rows import Buffers

BF16, F32 = torch.bfloat16, torch.float32
LARGE, MATRIX = (2**28,), (16384, 16384)
P = 0.1


def _both_ways(dropout: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of dropout: forward and backward."""

    def run(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(dropout(leaf, P), leaf, leaf.detach())
        return found

    return run


#: By name. ``moved``: bytes read and written, divided by those of the tensor.
WORKS: dict[str, Work] = {
    f"{name}{' bf16' if dtype is BF16 else ''}": Work(ours, torchs, LARGE, dtype, 1.0)
    for dtype in (F32, BF16)
    for name, ours, torchs in (
        ("uniform_", F.uniform_, Tensor.uniform_),
        ("normal_", F.normal_, Tensor.normal_),
        ("exponential_", F.exponential_, Tensor.exponential_),
        ("bernoulli_", lambda x: F.bernoulli_(x, P), lambda x: x.bernoulli_(P)),
    )
}
WORKS |= {
    "random_ i64": Work(lambda x: F.random_(x, 1000), lambda x: x.random_(1000), (2**27,), torch.int64, 1.0),
    "random_ i32": Work(lambda x: F.random_(x, 1000), lambda x: x.random_(1000), LARGE, torch.int32, 1.0),
    "normal_ f64": Work(F.normal_, Tensor.normal_, (2**26,), torch.float64, 1.0),
    "normal_ of a column": Work(lambda x: F.normal_(x[:, 1:]), lambda x: x[:, 1:].normal_(), MATRIX, BF16, 1.0),
    "dropout": Work(lambda x: F.dropout(x, P), lambda x: tf.dropout(x, P), MATRIX, BF16, 2.0),
    "dropout f32": Work(lambda x: F.dropout(x, P), lambda x: tf.dropout(x, P), MATRIX, F32, 2.0),
    "dropout in place": Work(
        lambda x: F.dropout(x, P, True, True), lambda x: tf.dropout(x, P, True, True), MATRIX, BF16
    ),
    "dropout and gradient": Work(_both_ways(F.dropout), _both_ways(tf.dropout), MATRIX, BF16, 4.0),
    "small normal_": Work(F.normal_, Tensor.normal_, (1000,), F32, 1.0),
    "small dropout": Work(lambda x: F.dropout(x, P), lambda x: tf.dropout(x, P), (1000,), F32, 2.0),
}


def cases(tiny: bool = False) -> list[RandomCase]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    return [RandomCase(name, 64 if tiny else 0, 0, work.dtype) for name, work in WORKS.items()]


@dataclass(frozen=True)
class RandomCase(CopyCase):
    """One of ``WORKS``, by functional calls. Results are right if their mean and deviation are torch's."""

    @property
    def work(self) -> Work:
        return WORKS[self.op]

    def mismatch(self, b: Buffers) -> str:
        got, wanted = (t.double() for t in (b.tensors["out"], self.work.torchs(*self.inputs(b)).clone()))
        n, deviation = wanted.numel(), max(float(wanted.std()), 1e-9)
        # Six deviations of the difference of two means; those of squares, as far as an exponential's.
        apart = abs(float(got.mean() - wanted.mean())) / deviation
        wider = abs(float(got.std()) / deviation - 1)
        limit = 6 * (2 / n) ** 0.5
        return "" if apart <= limit and wider <= 2 * limit else f"wrong: mean or deviation, by {max(apart, wider):.2e}"
