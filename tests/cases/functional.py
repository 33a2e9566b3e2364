"""Calls of triplan.functional beside torch's own: drawn by hypothesis, and one fixed call an op.

Values are small integers, so that every sum is exact in every dtype and torch's results can be compared bit for bit,
whatever the order of addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import triplan.functional as F  # noqa: N812
from triplan.functional._ops import Op
from triplan.functional.indexing import gather as gathering, put as putting, select as selecting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SUMMED = (*FLOATS, torch.int32, torch.int64)
COPIED = (*SUMMED, torch.bool)


class SeenDispatch(TorchDispatchMode):
    """Notes every op that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenFunction(TorchFunctionMode):
    """Notes every call of a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def forget_replays() -> None:
    """Make every functional call take the full path next time."""
    for module in (gathering, putting, selecting):
        for op in vars(module).values():
            if isinstance(op, Op):
                op.forget()


@dataclass
class Call:
    """``ours(*args, **kwargs)``, and ``theirs`` with the same; ``values`` are the arguments that hold values."""

    name: str
    args: tuple[Any, ...]
    values: tuple[int, ...]
    theirs: Callable[..., torch.Tensor]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Callable[..., torch.Tensor]:
        return getattr(F, self.name)

    def run(self, which: Callable[..., torch.Tensor], values: list[torch.Tensor] | None = None) -> torch.Tensor:
        """With ``values`` in place of the values; torch gets i64 indices, as not all of its backwards take i32."""
        args = list(self.args)
        for at, v in zip(self.values, values or [], strict=False):
            args[at] = v
        if which is self.theirs:
            args = [_wide(a) if i not in self.values else a for i, a in enumerate(args)]
        return which(*args, **self.kwargs)

    def copies(self, requires_grad: bool = False) -> list[torch.Tensor]:
        """Fresh value tensors, strides kept."""
        found = []
        for at in self.values:
            v = self.args[at]
            copy = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if 0 in v.stride():
                copy = v.detach().clone()
            found.append(copy.copy_(v).requires_grad_(requires_grad))
        return found


def _wide(a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return tuple(map(_wide, a))
    return a.long() if isinstance(a, torch.Tensor) and a.dtype == torch.int32 else a


# --- tensors ---


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Integers of -4 to 4 in ``dtype``."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=g).to(dtype).to(device)


def indices(shape: tuple[int, ...], extent: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Positions in [0, extent)."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(extent, 1), shape, generator=g).to(dtype).to(device)


def distinct(shape: tuple[int, ...], dim: int, extent: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Positions in [0, extent), none twice along ``dim``."""
    g = torch.Generator().manual_seed(seed)
    full = list(shape)
    full[dim] = extent
    return torch.rand(full, generator=g).argsort(dim).narrow(dim, 0, shape[dim]).to(dtype).to(device)


def laid_out(t: torch.Tensor, how: str) -> torch.Tensor:
    """``t`` with other strides or another address; ``expanded`` also repeats its first slice."""
    if how == "transposed" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "gaps" and t.dim():
        wide = torch.empty((*t.shape, 3), dtype=t.dtype, device=t.device)
        wide[..., 1] = t
        return wide[..., 1]
    if how == "misaligned":
        buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return buffer[1:].view(t.shape).copy_(t)
    if how == "expanded" and t.dim() and t.shape[0]:
        return t[:1].expand(t.shape)
    return t


# --- drawn calls ---

LAYOUTS = ("packed", "transposed", "gaps", "misaligned")


@st.composite
def calls(draw: st.DrawFn, device: str, dtypes: tuple[torch.dtype, ...] | None = None) -> Call:
    """Any call that torch allows as well."""
    name = draw(st.sampled_from(sorted(_DRAW)))
    copies = name in ("gather", "index_select", "embedding", "scatter")
    dtype = draw(st.sampled_from(dtypes or (COPIED if copies else SUMMED)))
    index_dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return _DRAW[name](draw, _Tensors(draw, device, dtype, index_dtype))


@dataclass
class _Tensors:
    draw: st.DrawFn
    device: str
    dtype: torch.dtype
    index_dtype: torch.dtype

    def seed(self) -> int:
        return self.draw(st.integers(0, 2**16))

    def target(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = integers(shape, self.dtype, self.device, self.seed())
        return laid_out(values, self.draw(st.sampled_from(LAYOUTS)))

    def source(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = integers(shape, self.dtype, self.device, self.seed())
        return laid_out(values, self.draw(st.sampled_from((*LAYOUTS, "expanded"))))

    def index(self, shape: tuple[int, ...], extent: int) -> torch.Tensor:
        if extent == 0:
            assert math.prod(shape) == 0
        at = indices(shape, extent, self.index_dtype, self.device, self.seed())
        return laid_out(at, self.draw(st.sampled_from((*LAYOUTS, "expanded"))))

    def dim(self, rank: int) -> int:
        return self.draw(st.integers(-max(rank, 1), max(rank, 1) - 1))

    def shape(self, min_rank: int = 0) -> tuple[int, ...]:
        return tuple(self.draw(st.lists(st.integers(0, 4), min_size=min_rank, max_size=3)))

    def narrower(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.draw(st.integers(max(n - 1, 0), n)) for n in shape)

    def count(self, extent: int) -> int:
        return self.draw(st.integers(0, 6)) if extent else 0

    def along(self, shape: tuple[int, ...], dim: int, n: int) -> tuple[int, ...]:
        return (*shape[: dim % len(shape)], n, *shape[dim % len(shape) + 1 :]) if shape else ()


def _draw_gather(draw: st.DrawFn, t: _Tensors) -> Call:
    shape = t.shape()
    dim = t.dim(len(shape))
    extent = shape[dim] if shape else 1
    index = t.index(t.along(t.narrower(shape), dim, t.count(extent)), extent)
    return Call("gather", (t.target(shape), dim, index), (0,), torch.gather)


def _scatter_parts(draw: st.DrawFn, t: _Tensors) -> tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]:
    shape = t.shape()
    dim = t.dim(len(shape))
    index_shape = t.along(t.narrower(shape), dim, t.count(shape[dim] if shape else 1))
    src_shape = tuple(n + draw(st.integers(0, 1)) for n in index_shape)
    return shape, dim, index_shape, src_shape


def _leading(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return src[tuple(slice(n) for n in index.shape)]


def _draw_scatter_add(draw: st.DrawFn, t: _Tensors) -> Call:
    shape, dim, index_shape, src_shape = _scatter_parts(draw, t)
    index = t.index(index_shape, shape[dim] if shape else 1)
    name = draw(st.sampled_from(("scatter_add", "scatter_add_")))

    def theirs(x: Any, dim: Any, index: Any, src: Any) -> torch.Tensor:
        # torch has no gradient for what lies beyond the index.
        return getattr(torch.Tensor, name)(x, dim, index, _leading(src, index))

    return Call(name, (t.target(shape), dim, index, t.source(src_shape)), (0, 3), theirs)


def _draw_scatter(draw: st.DrawFn, t: _Tensors) -> Call:
    shape, dim, index_shape, src_shape = _scatter_parts(draw, t)
    if shape:
        index_shape = t.along(index_shape, dim, min(index_shape[dim], shape[dim]))
        index = distinct(index_shape, dim, shape[dim], t.index_dtype, t.device, t.seed())
    else:
        index = torch.zeros((), dtype=t.index_dtype, device=t.device)
    if draw(st.booleans()):
        return Call("scatter", (t.target(shape), dim, index, 3), (0,), torch.scatter)

    def theirs(x: Any, dim: Any, index: Any, src: Any) -> torch.Tensor:
        return torch.scatter(x, dim, index, _leading(src, index))

    src_shape = tuple(max(a, b) for a, b in zip(index_shape, src_shape, strict=True))
    return Call("scatter", (t.target(shape), dim, index, t.source(src_shape)), (0, 3), theirs)


def _draw_index_select(draw: st.DrawFn, t: _Tensors) -> Call:
    shape = t.shape()
    dim = t.dim(len(shape))
    index_shape = draw(st.sampled_from(((), (1,)))) if not shape else (t.count(shape[dim]),)
    index = t.index(index_shape, shape[dim] if shape else 1)
    return Call("index_select", (t.target(shape), dim, index), (0,), torch.index_select)


def _draw_index_add(draw: st.DrawFn, t: _Tensors) -> Call:
    shape = t.shape()
    dim = t.dim(len(shape))
    n = t.count(shape[dim]) if shape else 1
    alphas = (1, -2, 0.5) if t.dtype.is_floating_point else (1, -2)
    name = draw(st.sampled_from(("index_add", "index_add_")))
    args = (t.target(shape), dim, t.index((n,), shape[dim] if shape else 1), t.source(t.along(shape, dim, n)))
    return Call(name, args, (0, 3), getattr(torch.Tensor, name), {"alpha": draw(st.sampled_from(alphas))})


def _draw_index_put(draw: st.DrawFn, t: _Tensors) -> Call:
    shape = t.shape(min_rank=1)
    k = draw(st.integers(1, len(shape)))
    lead, rest = shape[:k], shape[k:]
    accumulate = draw(st.booleans())
    if accumulate:
        index_shape = () if math.prod(lead) and draw(st.booleans()) else (2 if math.prod(lead) else 0, t.count(3))
        at = [t.index(index_shape, n) for n in lead]
    else:
        cells = torch.randperm(math.prod(lead), generator=torch.Generator().manual_seed(t.seed()))
        cells = cells[: draw(st.integers(0, 6))]
        index_shape = tuple(cells.shape)
        at = [a.to(t.index_dtype).to(t.device) for a in torch.unravel_index(cells, lead)]
    if draw(st.booleans()):  # from the end
        at = [a - n for a, n in zip(at, lead, strict=True)]
    values_shape = (*index_shape, *rest)
    cut = draw(st.integers(0, len(values_shape)))
    values = t.source(tuple(1 if n and draw(st.booleans()) else n for n in values_shape[cut:]))
    return Call("index_put", (t.target(shape), tuple(at), values, accumulate), (0, 2), torch.index_put)


def _draw_embedding(draw: st.DrawFn, t: _Tensors) -> Call:
    # No width of 0: torch's own backward on CUDA then reads what it must not (2.11), and the process is lost.
    rows, width = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    shape = t.shape() if rows else (0, 2)
    padding = draw(st.none() | st.integers(-rows, rows - 1)) if rows else None
    args = (t.index(shape, rows), t.target((rows, width)), padding)
    return Call("embedding", args, (1,), torch.nn.functional.embedding)


_DRAW: dict[str, Callable[[st.DrawFn, _Tensors], Call]] = {
    "gather": _draw_gather,
    "scatter_add": _draw_scatter_add,
    "scatter": _draw_scatter,
    "index_select": _draw_index_select,
    "index_add": _draw_index_add,
    "index_put": _draw_index_put,
    "embedding": _draw_embedding,
}


# --- one call an op ---


def fixed(device: str, dtype: torch.dtype = torch.float64, index_dtype: torch.dtype = torch.int64) -> dict[str, Call]:
    """Repeated indices where sums are made, distinct ones where writes are; gather's and scatter's index is narrow."""
    x = integers((4, 5), dtype, device, 1)
    narrow = torch.tensor([[3, 1], [1, 1], [0, 1]], dtype=index_dtype, device=device)
    apart = torch.tensor([[3, 1, 0], [0, 2, 1]], dtype=index_dtype, device=device)
    vector = torch.tensor([3, 1, 1], dtype=index_dtype, device=device)
    columns = torch.tensor([[2], [-1]], dtype=index_dtype, device=device)
    src = integers((3, 5), dtype, device, 2)
    narrow_add = lambda name: lambda x, d, i, s: getattr(torch.Tensor, name)(x, d, i, _leading(s, i))  # noqa: E731
    put = lambda x, d, i, s: torch.scatter(x, d, i, _leading(s, i))  # noqa: E731
    return {
        "gather": Call("gather", (x, 0, narrow), (0,), torch.gather),
        "gather_with_grad": Call("gather_with_grad", (x, -2, narrow), (0,), torch.gather),
        "scatter_add": Call("scatter_add", (x, 0, narrow, src), (0, 3), narrow_add("scatter_add")),
        "scatter_add_": Call("scatter_add_", (x, 0, narrow, src), (0, 3), narrow_add("scatter_add_")),
        "scatter": Call("scatter", (x, 0, apart, src), (0, 3), put),
        "scatter_value": Call("scatter", (x, -2, apart, 2), (0,), torch.scatter),
        "index_select": Call("index_select", (x, 1, vector), (0,), torch.index_select),
        "index_add": Call("index_add", (x, 0, vector, src), (0, 3), torch.Tensor.index_add, {"alpha": -2}),
        "index_add_": Call("index_add_", (x, 0, vector, src), (0, 3), torch.Tensor.index_add_, {"alpha": 3}),
        "index_put": Call("index_put", (x, (columns, narrow[2]), src[0, :2]), (0, 2), torch.index_put),
        "index_put_add": Call("index_put", (x, (vector,), src[:1], True), (0, 2), torch.index_put),
        "embedding": Call("embedding", (vector[None], x), (1,), torch.nn.functional.embedding),
        "embedding_padded": Call("embedding", (vector, x, -3), (1,), torch.nn.functional.embedding),
    }


FIXED = tuple(fixed("cpu"))
IN_PLACE = ("scatter_add_", "index_add_")
WITH_OUT = ("gather", "scatter_add", "scatter", "index_select", "index_add")
