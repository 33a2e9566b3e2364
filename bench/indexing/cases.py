"""Cases of the indexing benches: operands, implementations, the bytes that must move, and the right result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding

import triplan as tp

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: |got - ref| / |ref| that torch's own result may have: not a tolerance, only proof that both did the same work.
SAME_WORK = 0.25

#: Where indices point. ``uniform``: anywhere; ``zipf``: as words of a text; ``one``: all to row 0; ``distinct``: each
#: to another row; ``sorted``: anywhere, ascending; ``rowwise``: anywhere, one index per row where the op takes one per
#: element.
Pattern = Literal["uniform", "zipf", "one", "distinct", "sorted", "rowwise"]


@dataclass(frozen=True)
class Case:
    """``count`` rows of ``width`` elements, moved between a dense tensor and a table of ``rows`` rows, along axis 0.

    In index_add a width of 1 means one-dimensional operands.
    """

    group: str
    op: str
    rows: int
    width: int
    count: int
    pattern: Pattern = "uniform"

    @property
    def name(self) -> str:
        return f"{self.op} ({self.rows}, {self.width})/{self.count}"

    @property
    def full(self) -> bool:
        """Whether every element has an index of its own."""
        return self.op in ("gather", "scatter_add", "gather_backward")

    @property
    def adds(self) -> bool:
        return self.op not in ("index_select", "gather", "embedding")

    @property
    def fills(self) -> bool:
        """Whether every element of the table is written, whatever the indices."""
        return self.op.endswith("_backward")

    @property
    def flat(self) -> bool:
        return self.op == "index_add" and self.width == 1

    def tiny(self) -> Case:
        """The case in the size of a smoke test."""
        width = self.width if self.width == 1 else max(self.width >> 5, 2)
        return replace(self, rows=max(self.rows >> 9, 2), width=width, count=max(self.count >> 10, 2))


SEED_SIZES = ((1024, 256, 128), (4096, 1024, 512), (16384, 1024, 2048))


def cases(tiny: bool = False) -> list[Case]:
    """All cases of the bench; ``tiny``: in the size of a smoke test."""
    found = [Case("seed", op, *size) for op in ("index_select", "index_add") for size in SEED_SIZES]
    found += [Case("full index", op, *size) for op in ("gather", "scatter_add") for size in SEED_SIZES]
    found += [Case("large", op, 131072, 1024, 262144) for op in ("index_select", "index_add", "gather", "scatter_add")]
    found += [Case("large", op, 50304, 1024, 65536, "zipf") for op in ("embedding", "embedding_backward")]
    return [c.tiny() for c in found] if tiny else found


@dataclass(frozen=True)
class Buffers:
    """One set of operands. ``dense`` is (count, width), ``table`` (rows, width)."""

    dense: Tensor
    table: Tensor
    index: Tensor


def zipf_tokens(n: int, vocabulary: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """``n`` tokens, token k with probability proportional to 1 / (k + 1), numbered in random order."""
    weight = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64, device=device)
    below = torch.cumsum(weight, 0) / weight.sum()
    drawn = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
    token = torch.searchsorted(below, drawn).clamp_(max=vocabulary - 1)
    return torch.randperm(vocabulary, device=device, generator=generator)[token]


def make(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Buffers:
    def values(*shape: int) -> Tensor:
        # Small, because timing accumulates the same values thousands of times: f16 must not reach infinity.
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).div_(8)

    shape = (case.count, case.width) if case.full else (case.count,)
    if case.pattern in ("zipf", "rowwise"):
        # One index per row, also where the op takes one per element.
        if case.pattern == "zipf":
            index = zipf_tokens(case.count, case.rows, device, generator)
        else:
            index = torch.randint(0, case.rows, shape[:1], device=device, generator=generator)
        index = index.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    elif case.pattern == "distinct":
        places = torch.rand((case.rows, *shape[1:]), device=device, generator=generator).argsort(0)
        index = places[: case.count].contiguous()
    else:
        index = torch.randint(0, 1 if case.pattern == "one" else case.rows, shape, device=device, generator=generator)
    if case.pattern == "sorted":
        index = index.sort(0).values
    return Buffers(values(case.count, case.width), values(case.rows, case.width), index)


# --- implementations ---


def descriptor(case: Case, dtype: torch.dtype) -> tp.Descriptor:
    shape, element = (case.count, case.width), tp.ElementKind.of(dtype)
    if case.op == "index_select":
        return tp.IndexSelectDescriptor(out_shape=shape, select_dim=0, src_dim_size=case.rows, element=element)
    if case.op == "gather":
        return tp.GatherDescriptor(out_shape=shape, gather_dim=0, src_dim_size=case.rows, element=element)
    if case.op == "index_add":
        src_shape = shape[:1] if case.flat else shape
        return tp.IndexAddDescriptor(src_shape=src_shape, add_dim=0, out_dim_size=case.rows, element=element)
    if case.op == "index_put":
        out_shape = (case.rows, case.width)
        return tp.IndexPutDescriptor(out_shape=out_shape, index_shape=shape[:1], element=element, accumulate=True)
    if case.op in ("index_select_backward", "gather_backward"):
        backward: dict[str, Any] = {"out_shape": shape, "src_dim_size": case.rows, "accumulate": False}
        if case.op == "gather_backward":
            return tp.GatherBackwardDescriptor(gather_dim=0, element=element, **backward)
        return tp.IndexSelectBackwardDescriptor(select_dim=0, element=element, **backward)
    if case.op == "scatter_add":
        return tp.ScatterAddDescriptor(src_shape=shape, scatter_dim=0, out_dim_size=case.rows, element=element)
    table: dict[str, Any] = {"num_embeddings": case.rows, "embedding_dim": case.width, "element": element}
    if case.op == "embedding":
        return tp.EmbeddingDescriptor(index_shape=(case.count,), **table)
    if case.op == "embedding_backward":
        return tp.EmbeddingBackwardDescriptor(index_shape=(case.count,), accumulate=False, **table)
    raise ValueError(f"no case {case.op!r}")


def plan_args(case: Case, b: Buffers) -> Any:
    if case.op == "index_select":
        return tp.IndexSelectArgs(src=b.table, index=b.index, out=b.dense)
    if case.op == "gather":
        return tp.GatherArgs(src=b.table, index=b.index, out=b.dense)
    if case.op == "index_add":
        dense, table = (b.dense.view(-1), b.table.view(-1)) if case.flat else (b.dense, b.table)
        return tp.IndexAddArgs(index=b.index, src=dense, out=table)
    if case.op == "index_put":
        return tp.IndexPutArgs(indices=[b.index], values=b.dense, out=b.table)
    if case.op == "gather_backward":
        return tp.GatherBackwardArgs(dout=b.dense, index=b.index, dsrc=b.table)
    if case.op == "index_select_backward":
        return tp.IndexSelectBackwardArgs(dout=b.dense, index=b.index, dsrc=b.table)
    if case.op == "scatter_add":
        return tp.ScatterAddArgs(index=b.index, src=b.dense, out=b.table)
    if case.op == "embedding":
        return tp.EmbeddingArgs(weight=b.table, index=b.index, out=b.dense)
    return tp.EmbeddingBackwardArgs(dout=b.dense, index=b.index, dweight=b.table)


def torch_call(case: Case, b: Buffers) -> Callable[[], Tensor]:
    """torch's own op, which returns its result: for the embeddings, which have no ``out=``, a new tensor."""
    dense, table, index, rows = b.dense, b.table, b.index, case.rows
    if case.op == "index_select":
        return lambda: torch.index_select(table, 0, index, out=dense)
    if case.op == "gather":
        return lambda: torch.gather(table, 0, index, out=dense)
    if case.flat:
        flat, values = table.view(-1), dense.view(-1)
        return lambda: flat.index_add_(0, index, values).view(rows, 1)
    if case.op == "index_add":
        return lambda: table.index_add_(0, index, dense)
    if case.op == "index_put":
        return lambda: table.index_put_((index,), dense, accumulate=True)
    if case.op == "index_select_backward":  # what torch's own backward does, without the allocation
        return lambda: table.zero_().index_add_(0, index, dense)
    if case.op == "gather_backward":
        return lambda: table.zero_().scatter_add_(0, index, dense)
    if case.op == "scatter_add":
        return lambda: table.scatter_add_(0, index, dense)
    if case.op == "embedding":
        return lambda: embedding(index, table)
    backward = torch.ops.aten.embedding_dense_backward.default
    return lambda: backward(dense, index, rows, -1, False)


# --- bytes ---


def bytes_moved(case: Case, itemsize: int, touched: int) -> int:
    """The fewest bytes that any kernel must move. Every index is read once, and

    - a copy reads and writes each value (a row that is read twice counts twice, so with a cache fewer may be moved);
    - an addition reads each value, and reads and writes each of the ``touched`` table elements;
    - embedding_backward reads each value and writes the whole table.
    """
    values = case.count * case.width
    index = 8 * (values if case.full else case.count)
    if not case.adds:
        return 2 * values * itemsize + index
    if case.fills:
        return (values + case.rows * case.width) * itemsize + index
    return (values + 2 * touched) * itemsize + index


def touched_elements(case: Case, index: Tensor) -> int:
    """The number of table elements that indices point to."""
    touched = torch.zeros((case.rows, case.width) if case.full else (case.rows,), dtype=torch.bool, device=index.device)
    true = torch.ones((), dtype=torch.bool, device=index.device)
    touched.scatter_(0, index, true.expand(index.shape))
    return int(touched.sum()) * (1 if case.full else case.width)


# --- the right result ---


@dataclass(frozen=True)
class Truth:
    """torch's op in float64: the result, sum|terms|, and the number of terms of each element."""

    value: Tensor
    magnitude: Tensor
    terms: Tensor


def truth(case: Case, b: Buffers) -> Truth:
    """The truth for ``b`` as it is now: to be computed before any implementation adds to it."""
    if not case.adds:
        value = b.table.gather(0, b.index) if case.full else b.table.index_select(0, b.index)
        return Truth(value.double(), value.double().abs(), torch.ones((), device=value.device))
    start = torch.zeros_like(b.table, dtype=torch.float64) if case.fills else b.table.double()
    ones = torch.ones((), device=b.dense.device).expand(b.index.shape)
    if case.full:
        value = start.scatter_add(0, b.index, b.dense.double())
        magnitude = start.abs().scatter_add_(0, b.index, b.dense.double().abs())
        terms = torch.zeros_like(b.table, dtype=torch.float32).scatter_add_(0, b.index, ones)
    else:
        value = start.index_add(0, b.index, b.dense.double())
        magnitude = start.abs().index_add_(0, b.index, b.dense.double().abs())
        terms = torch.zeros(case.rows, device=b.dense.device).index_add_(0, b.index, ones)[:, None]
    return Truth(value, magnitude, terms + 1)


def mismatch(truth: Truth, got: Tensor, guarantee: tp.PrecisionGuarantee) -> str:
    """How ``got`` breaks the guarantee; empty if it does not.

    The plan's tolerance allows for as many terms as its descriptor does. Here the number of terms of each element is
    known. Each is held to the bound for that number (``sum_tolerance`` of the indexing kernels) if it is tighter: then
    a contribution that is lost or added twice shows even in f16.
    """
    t = guarantee.tolerance
    u = guarantee.accumulator.unit_roundoff
    counted = torch.expm1((truth.terms + 3).double() * math.log1p(u)) * (1 + t.rtol)
    # A sum in integers (fixed point) has no roundings to count: its bound is the plan's.
    counted = counted.clamp_(max=t.ctol) if u else torch.full_like(counted, t.ctol)
    allowed = truth.magnitude * counted + (t.rtol * truth.value.abs() + t.underflow)
    error = (got.double() - truth.value).abs()
    bad = ~(error <= allowed)  # NaN is bad
    if not bool(bad.any()):
        return ""
    at = int(bad.reshape(-1).to(torch.int8).argmax())
    row, column = divmod(at, got.shape[1])
    return (
        f"wrong: {int(bad.sum())} of {got.numel()} elements; [{row}, {column}] is {got[row, column].item()!r}, "
        f"torch in float64 says {truth.value[row, column].item()!r}, allowed {allowed[row, column].item():.3g}"
    )


def relative_error(truth: Truth, got: Tensor) -> float:
    """The norm of the error over the norm of the truth."""
    return float((got.double() - truth.value).norm() / truth.value.norm().clamp(min=1e-300))
