"""Calls of triplan.functional beside torch's own: drawn by hypothesis, and one fixed call an op.

Values are small integers, so that every sum is exact in every dtype and torch's results can be compared bit for bit,
whatever the order of addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import assume, strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import triplan as tp
import triplan.functional as F  # noqa: N812
from cases.indexing import FIELDS
from triplan.testing import args_for, descriptors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SUMMED = (*FLOATS, torch.int32, torch.int64)
IN_PLACE = ("scatter_add_", "index_add_")
#: Those that register ops of the indexing family; as attributes of the package some are functions.
MODULES = [
    import_module(f"triplan.functional.indexing.{m}") for m in ("embedding", "gather", "put", "reduce", "select")
]


class _Seen:
    """Notes what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def _note(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenDispatch(_Seen, TorchDispatchMode):
    """Notes every op that reaches the dispatcher."""

    __torch_dispatch__ = _Seen._note


class SeenFunction(_Seen, TorchFunctionMode):
    """Notes every call of a function of torch."""

    __torch_function__ = _Seen._note


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

#: The field that names the axis.
DIMS = {op: FIELDS[op][1] for op in ("gather", "scatter", "scatter_add", "index_select", "index_add")}


@st.composite
def calls(draw: st.DrawFn, device: str, dtypes: tuple[torch.dtype, ...] | None = None) -> Call:
    """Any call that torch allows as well, of operands as a descriptor may promise them."""
    op = draw(st.sampled_from((*DIMS, "index_put", "embedding")))
    given = {"out_of_bounds": "skip", "wrap_negative": op == "index_put"}
    if dtypes is not None:
        given["element"] = draw(st.sampled_from(dtypes))
    # So few bytes that sums of small integers are exact in bf16.
    target = tp.Target.cpu() if device == "cpu" else tp.Target.current()
    desc: Any = draw(descriptors(tp.descriptor_types()[op], 1 << 8, target=target, fixed=given))
    overwrites = op == "scatter" or (op == "index_put" and not desc.accumulate)
    how = "distinct" if overwrites else "valid"
    x = args_for(desc, device, draw(st.integers(0, 2**16)), values="integers", indices=how).args
    (index,) = (o for o in desc.operands() if o.index_extents)
    tensors = x.indices if op == "index_put" else [x.index]
    for t, n in zip(tensors, index.index_extents, strict=True):
        assume(bool(((t >= (-n if desc.wrap_negative else 0)) & (t < n)).all()))
    if op == "embedding":
        # torch's own backward of no width reads what it must not on CUDA (2.11), and the process is lost.
        assume(desc.embedding_dim)
        n = desc.num_embeddings
        padding = draw(st.none() | st.integers(-n, n - 1)) if n else None
        return Call(op, (x.index, x.weight, padding), (1,), torch.nn.functional.embedding)
    if op == "index_put":
        return Call(op, (x.out, tuple(x.indices), x.values, desc.accumulate), (0, 2), torch.index_put)
    rank = len(x.out.shape)
    dim = getattr(desc, DIMS[op]) - draw(st.sampled_from((0, rank)))
    if op in ("gather", "index_select"):
        return Call(op, (x.src, dim, x.index), (0,), getattr(torch, op))
    name = draw(st.sampled_from([name for name in (op, f"{op}_") if name == op or name in IN_PLACE]))
    scale = {"alpha": 1 if x.alpha is None else x.alpha} if op == "index_add" else {}
    return Call(name, (x.out, dim, x.index, x.src), (0, 3), getattr(torch.Tensor, name), scale)


# --- one call an op ---


def _leading(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """What torch has a gradient for."""
    return src[tuple(slice(n) for n in index.shape)]


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
WITH_OUT = ("gather", "scatter_add", "scatter", "index_select", "index_add")


def on_copies(call: Call, which: Any) -> Any:
    """``which`` as a function of the values. An in-place call works on a copy (a leaf refuses it), which is read."""

    def function(*values: torch.Tensor) -> torch.Tensor:
        if call.name not in IN_PLACE:
            return call.run(which, list(values))
        target = values[0].clone()
        call.run(which, [target, *values[1:]])
        return target

    return function
