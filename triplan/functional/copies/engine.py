"""Plans on any tensors: views of few axes, dtypes as integers of their width, numbers as torch converts them."""

from __future__ import annotations

import torch

from triplan.facade import CopyPlan
from triplan.functional._plans import run
from triplan.functional._replay.numbers import as_float
from triplan.sku import ElementKind
from triplan.sku.facts import fact

Tensor = torch.Tensor
Number = bool | int | float
#: Descriptors have this many axes at most.
MAX_RANK = 8


@fact
def known(dtype: torch.dtype) -> bool:
    """Whether plans take ``dtype``."""
    try:
        return not ElementKind.of(dtype).value.startswith("fp8")
    except ValueError:
        return False


def as_bits(t: Tensor) -> Tensor:
    """A view of ``t`` whose dtype plans know, of the same width."""
    if known(t.dtype):
        return t
    if t.itemsize > 8:
        return torch.view_as_real(t)
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def _merged(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of both with the fewest axes, those of ``out`` by descending stride."""
    axes = zip(out.shape, out.stride(), x.stride(), strict=True)
    found: list[tuple[int, int, int]] = []
    for n, s, t in sorted((d for d in axes if d[0] != 1), key=lambda d: -d[1]):
        if found and found[-1][1:] == (s * n, t * n):
            found[-1] = (found[-1][0] * n, s, t)
        else:
            found.append((n, s, t))
    shape, strides, others = zip(*found, strict=True) if found else ((1,), (1,), (1,))
    return out.as_strided(shape, strides), x.as_strided(shape, others)


def write(out: Tensor, x: Tensor) -> None:
    """``out = x``, which broadcasts, by one launch."""
    x = x.resolve_conj().resolve_neg()
    if x.dtype != out.dtype and not (known(x.dtype) and known(out.dtype)):
        raise NotImplementedError(f"copy: {x.dtype} is not converted to {out.dtype}")
    out, x = as_bits(out), as_bits(x.expand(out.shape))
    if out.dim() != 1 and out.numel():
        out, x = _merged(out, x)
    if out.dim() > MAX_RANK:
        for part, from_part in zip(out.unbind(), x.unbind(), strict=True):
            write(part, from_part)
    else:
        run(CopyPlan, {"x": x, "out": out}, op="copy")


def number(value: Number, dtype: torch.dtype) -> Number:
    """``value`` as a number that becomes ``dtype``, with torch's refusals."""
    if dtype.is_floating_point:
        return as_float(value)
    if dtype is torch.bool:
        return int(bool(value))
    whole, info = int(value), torch.iinfo(dtype)
    if not (info.min or -info.max) <= whole <= info.max:
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow")
    # As signed integers of the same bits, which wrap.
    half = 1 << (info.bits - 1)
    return (whole + half) % (2 * half) - half


def check_fillable(name: str, dtype: torch.dtype) -> None:
    if not known(dtype) and (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f"{name}(): {dtype} is not supported")
