"""Random tensors by torch's names: in place, like another tensor, and of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan.errors import shown
from triplan.functional._ops import RECORDED, overwritten
from triplan.functional._replay.numbers import as_float
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import broadcast
from triplan.functional._sharding import is_dtensor, local_of, part, unsummed, write
from triplan.functional.random.engine import (
    MAX_RANK,
    Number,
    Tensor,
    chosen,
    fillable,
    filled,
    next_state,
    require_floats,
)

# fmt: off
__all__ = [
    "bernoulli", "bernoulli_", "exponential_", "normal", "normal_", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random_", "trunc_normal_", "uniform_",
]
# fmt: on

# --- in place ---


def _write(t: Tensor, op: str, numbers: Sequence[Number], generator: torch.Generator | None, first: int) -> Tensor:
    """``t``, written with numbers of ``op``; of no elements, it draws nothing."""
    fillable(t, None, 0, 0, op)
    if not t.numel():
        return t
    state, seed, offset = next_state(t, generator)
    if is_dtensor(t):
        own = part(t, MAX_RANK)
        how = (local_of(state), seed, offset, op, list(numbers), first + own.first, own.whole)
        return write(op, t, own.joined(filled(own.local.detach(), *how)))
    return filled.in_place(t, state, seed, offset, op, list(numbers), first)


def _check(holds: bool, message: Callable[[], str]) -> None:
    if not holds:
        raise RuntimeError(message())


@replayed
def uniform_(
    input: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: torch.Generator | None = None, first: int = 0
) -> Tensor:
    """Write numbers of [``from_``, ``to``), uniformly distributed, into ``input``; returns it. As ``Tensor.uniform_``.

    f16, bf16, f32, f64, of any shape and strides. f16 and bf16 are rounded down, so that ``to`` does not occur (but the
    number before ``from_`` may, where they do not have that).
    ``first``: the index in the stream of the first element, in row-major order. Raises ``RuntimeError`` for an empty or
    too large range, ``NotImplementedError`` for other dtypes.
    """
    require_floats("uniform_", input)
    most = torch.finfo(input.dtype).max
    _check(-most <= from_ <= to <= most and to - from_ <= most, lambda: _no_range("uniform_", from_, to, input))
    return _write(input, "uniform", (as_float(from_), as_float(to)), generator, first)


def _no_range(name: str, low: Number, high: Number, t: Tensor) -> str:
    return f"{name} expects to return a [from, to) range of {t.dtype}, but found from={shown(low)}, to={shown(high)}"


@replayed
def normal_(
    input: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None, first: int = 0
) -> Tensor:
    """Write normally distributed numbers into ``input``; returns it. As ``Tensor.normal_``.

    By the method of Box and Muller, of 32-bit words (f64: 64-bit): at most 6.8 (8.6) standard deviations from the mean.
    Dtypes and ``first`` as ``uniform_`` has them. Raises ``RuntimeError`` for ``std`` < 0.
    """
    _check(std >= 0, lambda: f"normal expects std >= 0.0, but found std {shown(std)}")
    return _write(input, "normal", (as_float(mean), as_float(std)), generator, first)


@replayed
def exponential_(
    input: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None, first: int = 0
) -> Tensor:
    """Write exponentially distributed numbers of rate ``lambd`` into ``input``; returns it. As ``Tensor.exponential_``.

    Dtypes and ``first`` as ``uniform_`` has them. Raises ``RuntimeError`` for ``lambd`` <= 0.
    """
    _check(lambd > 0, lambda: f"exponential_ expects lambda > 0.0, but found lambda={shown(lambd)}")
    return _write(input, "exponential", (as_float(lambd),), generator, first)


@replayed
def bernoulli_(
    input: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None, first: int = 0
) -> Tensor:
    """Write 1 with probability ``p``, else 0, into ``input``; returns it. As ``Tensor.bernoulli_``.

    ``input``: floats, integers or bool. ``p``: a number, or a tensor of floats that broadcasts. Raises ``RuntimeError``
    for a number outside [0, 1]; values of a tensor are not looked at (below 0 counts as 0, above 1 as 1, NaN as 0).
    """
    if isinstance(p, Tensor):
        return _into(input, bernoulli(p.expand(input.shape), generator=generator, first=first))
    _check(0 <= p <= 1, lambda: f"bernoulli_ expects p to be in [0, 1], but got p={shown(p)}")
    return _write(input, "bernoulli_p", (as_float(p),), generator, first)


@replayed
def random_(
    input: Tensor,
    from_: int | None = None,
    to: int | None = None,
    *,
    generator: torch.Generator | None = None,
    first: int = 0,
) -> Tensor:
    """Write integers of [``from_``, ``to``) into ``input``; returns it. As ``Tensor.random_``.

    With one bound it is ``to``, and they begin at 0; without, they are all that the dtype has from 0 on (of floats: up
    to where it has every integer). ``input``: floats, integers or bool. Probabilities differ by at most
    (to - from_) / 2**64 of themselves. Raises ``RuntimeError`` for an empty range, or one that the dtype does not have.
    """
    low, high = (0, from_) if to is None else (0 if from_ is None else from_, to)
    return _write(input, "randint", _whole_range("random_", input.dtype, low, high), generator, first)


def _whole_range(name: str, dtype: torch.dtype, low: int, high: int | None) -> tuple[int, int]:
    """(low, high) as i64; None is one more than all that ``dtype`` has."""
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        least = -most
    elif dtype is torch.bool:
        least, most = 0, 1
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    high = most + 1 if high is None else int(high)
    _check(low < high, lambda: f"{name} expects 'from' to be less than 'to', but got from={low} >= to={high}")
    for what, bound in (("from", low), ("to - 1", high - 1)):
        wide = dtype.is_floating_point and abs(bound) <= torch.finfo(dtype).max  # rounded, as in torch
        _check(least <= bound <= most or wide, lambda what=what: f"{what} is out of bounds for {dtype}")  # type: ignore[misc]
    return int(low), (high + 2**63) % 2**64 - 2**63


@replayed
@torch.no_grad()
def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
    *,
    first: int = 0,
) -> Tensor:
    """Write normally distributed numbers of [``a``, ``b``] into ``tensor``; returns it: torch.nn.init.trunc_normal_.

    By the inverse of the distribution, of uniform numbers of f32 (f64: f64), in several launches.
    """

    def below(x: float) -> float:
        return math.erf((x - mean) / std / math.sqrt(2))

    require_floats("trunc_normal_", tensor)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    found = tensor if tensor.dtype is wide else torch.empty_like(tensor, dtype=wide)
    uniform_(found, below(a), below(b), generator=generator, first=first)
    found.erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)
    return tensor if found is tensor else _into(tensor, found)


# --- new tensors, like others ---


def _like(input: Tensor, dtype: Any, device: Any, memory_format: torch.memory_format) -> Tensor:
    return unsummed(torch.empty_like(input.detach(), dtype=dtype, device=device, memory_format=memory_format))  # type: ignore[no-any-return]


@replayed
def rand_like(
    input: Tensor,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    first: int = 0,
) -> Tensor:
    """Numbers of [0, 1), uniformly distributed, in ``input``'s shape: ``torch.rand_like``, by ``uniform_``."""
    found = _like(input, dtype, device, memory_format)
    return _write(found, "uniform", (0.0, 1.0), generator, first).requires_grad_(requires_grad)


@replayed
def randn_like(
    input: Tensor,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    first: int = 0,
) -> Tensor:
    """Normally distributed numbers in ``input``'s shape: ``torch.randn_like``, by ``normal_``."""
    found = _like(input, dtype, device, memory_format)
    return _write(found, "normal", (0.0, 1.0), generator, first).requires_grad_(requires_grad)


@replayed
def randint_like(
    input: Tensor,
    low: int,
    high: int | None = None,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    first: int = 0,
) -> Tensor:
    """Integers of [``low``, ``high``) or [0, ``low``), in ``input``'s shape: ``torch.randint_like``, by ``random_``."""
    low, high = (0, low) if high is None else (low, high)
    found = _like(input, dtype, device, memory_format)
    return _write(found, "randint", _whole_range("random_", found.dtype, low, high), generator, first)


@replayed
def bernoulli(
    input: Tensor,
    p: float | None = None,
    *,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """1 with the probabilities ``input`` (with ``p``: that one), else 0, of its dtype and shape: ``torch.bernoulli``.

    ``input``: floats; with ``p``, also integers and bool. Else as ``bernoulli_`` with a tensor. The gradient is 0.
    """
    if p is not None:
        found = _like(input, None, None, torch.contiguous_format) if out is None else out.resize_(input.shape)
        return bernoulli_(found, p, generator=generator, first=first)
    require_floats("bernoulli", input)
    if not input.numel():
        return chosen.into(out, input, None, 0, 0, first)
    if is_dtensor(input):
        own, (state, *host) = part(input, MAX_RANK), next_state(input, generator)
        found = own.joined(chosen(own.local, local_of(state), *host, first + own.first, own.whole))
        return found if out is None else write("bernoulli", out, found)
    return chosen.into(out, input, *next_state(input, generator), first)


@replayed
def normal(
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    size: Sequence[int] | None = None,
    *,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    first: int = 0,
) -> Tensor:
    """``mean + std * z``, z normally distributed: as ``torch.normal``, by ``normal_``. Records no gradient.

    Of two numbers and ``size``, or of tensors (one may be a number), which broadcast; the result has the dtype of the
    first of them. Raises ``RuntimeError`` for ``std`` < 0; values of a tensor are not looked at.
    """
    tensors = [t.detach() for t in (mean, std) if isinstance(t, Tensor)]
    if not tensors:
        if size is None:
            raise TypeError("normal() takes tensors, or two numbers and a size")
        found = _created(size, out, dtype, device)
        return normal_(found, mean, std, generator=generator, first=first)  # type: ignore[arg-type]
    shape = broadcast(*(t.shape for t in tensors))
    z = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    given = (mean, normal_(z, 0.0, 1.0, generator=generator, first=first), std)
    kinds = "".join("t" if isinstance(v, Tensor) else "n" for v in given)
    numbers = [v for v in given if not isinstance(v, Tensor)]
    # The result is contiguous, as torch's.
    packed = RECORDED["contiguous"]
    tensors = [v if v.is_contiguous() else packed(v) for v in (v.detach() for v in given if isinstance(v, Tensor))]
    return _into(out, RECORDED[f"expression_{len(tensors)}_1"](*tensors, f"addcmul {kinds}n", [*numbers, 1]))


def _into(out: Tensor | None, found: Tensor) -> Tensor:
    """``out``, resized, with the values of ``found``; ``found`` itself if there is none."""
    if out is None:
        return found
    return overwritten(out if out.shape == found.shape else out.resize_(found.shape), found)


# --- new tensors of any shape ---


def _created(size: Sequence[Any], out: Tensor | None, dtype: torch.dtype | None, device: Any) -> Tensor:
    """A tensor of ``size``, which may be one sequence; ``out`` itself, resized, if it is given."""
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype not in (None, out.dtype):
        raise RuntimeError(f"dtype {dtype} does not match dtype of out parameter ({out.dtype})")
    return out if out.shape == shape else out.resize_(shape)


def rand(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    first: int = 0,
) -> Tensor:
    """Numbers of [0, 1), uniformly distributed, of shape ``size``: ``torch.rand``, by ``uniform_``."""
    found = _write(_created(size, out, dtype, device), "uniform", (0.0, 1.0), generator, first)
    return found.requires_grad_(requires_grad)


def randn(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    first: int = 0,
) -> Tensor:
    """Normally distributed numbers of shape ``size``: ``torch.randn``, by ``normal_``."""
    found = _write(_created(size, out, dtype, device), "normal", (0.0, 1.0), generator, first)
    return found.requires_grad_(requires_grad)


def randint(
    low: int,
    high: int | Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    *,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    first: int = 0,
) -> Tensor:
    """Integers of [``low``, ``high``), or of [0, ``low``), of shape ``size``: ``torch.randint``, by ``random_``.

    ``randint(high, size)`` and ``randint(low, high, size)``; i64 by default.
    """
    if size is None:
        low, high, size = 0, low, high  # type: ignore[assignment]
    if not isinstance(size, Sequence) or not isinstance(high, int):
        raise TypeError("randint() takes (high, size) or (low, high, size)")
    found = _created((tuple(size),), out, dtype or (None if out is not None else torch.int64), device)
    return _write(found, "randint", _whole_range("random_", found.dtype, low, high), generator, first)
