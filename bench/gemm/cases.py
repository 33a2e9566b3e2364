"""The products that the bench times, their operands, and the plan that each asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import triplan as tp
from triplan.descriptors.gemm import MultiplyingDescriptor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Most sets of operands that calls rotate through.
MAX_SETS = 16

Args = tp.GemmArgs | tp.BatchedGemmArgs | tp.GemmBackwardArgs


@dataclass(frozen=True)
class Case:
    """One product, or its backward pass.

    Attributes:
        m, n, k: its extents.
        layout: of A and B as BLAS names them: n for row-major, t for column-major.
        bias: whether a bias is added.
        backward: the gradients of both factors and of the bias, instead of the product.
        batch: products of these extents; 0 for one product of plain matrices.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    bias: bool = False
    backward: bool = False
    batch: int = 0

    @property
    def name(self) -> str:
        size = f"{self.m}" if self.m == self.n == self.k else f"{self.m}x{self.n}x{self.k}"
        size = f"{self.batch} x {size}" if self.batch else size
        what = "backward" if self.backward else f"{self.layout.upper()}{' + bias' if self.bias else ''}"
        return f"{size} {what}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.m * self.n * self.k * (2 if self.backward else 1) * max(self.batch, 1)

    def bytes(self, itemsize: int) -> int:
        """Bytes of the matrices, each counted once per product."""
        once = itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)
        return once * (2 if self.backward else 1) * max(self.batch, 1)


SQUARES = (2048, 4096, 8192)
CASES = (
    *(Case(n, n, n, bias=True) for n in SQUARES),
    *(Case(n, n, n, bias=True, backward=True) for n in SQUARES),
    Case(8192, 4096, 14336, "nt"),
    Case(8192, 14336, 4096, "nt"),
    *(Case(4096, 4096, 4096, layout) for layout in ("nn", "nt", "tn")),
    Case(16, 4096, 4096, "nt"),
    Case(64, 14336, 4096, "nt"),
    Case(512, 4096, 4096, "nt"),
    Case(1024, 1024, 128, batch=64),
)
#: Products of few rows that only a sweep times: the cost model is fitted to them too.
SWEPT = (
    Case(1, 4096, 4096, "nt"),
    Case(32, 4096, 14336, "nt"),
    Case(64, 1024, 8192, "nt"),
    Case(128, 4096, 4096, "nt"),
)


def cases(tiny: bool, sweep: bool = False, wanted: str = "") -> list[Case]:
    """Every case whose name contains ``wanted``; ``tiny`` shrinks them for a smoke test."""
    found = [c for c in (*CASES, *(SWEPT if sweep else ())) if wanted in c.name]
    return [replace(c, m=max(c.m >> 7, 2), n=c.n >> 7, k=max(c.k >> 7, 8)) for c in found] if tiny else found


# --- operands ---


@dataclass(frozen=True)
class Buffers:
    """``a`` (m, k) and ``b`` (k, n) in the case's layout; all else is packed. ``c`` is dc in a backward case."""

    a: Tensor
    b: Tensor
    c: Tensor
    bias: Tensor
    da: Tensor
    db: Tensor
    dbias: Tensor


def make(case: Case, dtype: torch.dtype, device: torch.device, g: torch.Generator | None) -> Buffers:
    """Random operands, and memory for the gradients of a backward case."""

    def values(rows: int, columns: int, layout: str = "n") -> Tensor:
        shape = (columns, rows) if layout == "t" else (rows, columns)
        lead = (case.batch,) if case.batch else ()
        found = torch.randn((*lead, *shape), dtype=dtype, device=device, generator=g)
        return found.transpose(-1, -2) if layout == "t" else found

    a, b = values(case.m, case.k, case.layout[0]), values(case.k, case.n, case.layout[1])
    c, bias = values(case.m, case.n), torch.randn(case.n, dtype=dtype, device=device, generator=g)
    empty = torch.empty(0, dtype=dtype, device=device)
    da, db, dbias = (torch.empty_like(t) if case.backward else empty for t in (a, b, bias))
    return Buffers(a, b, c, bias, da, db, dbias)


def rotated(case: Case, itemsize: int, l2: int) -> int:
    """Sets of buffers to rotate through: together twice the L2 cache, so that no call finds its operands in it."""
    return max(1, min(MAX_SETS, -(-2 * l2 // case.bytes(itemsize))))


# --- plans ---


def args_of(case: Case, x: Buffers) -> Args:
    """The Args of one call on ``x``."""
    if case.backward:
        return tp.GemmBackwardArgs(dc=x.c, a=x.a, b=x.b, da=x.da, db=x.db, dbias=x.dbias)
    if case.batch:
        return tp.BatchedGemmArgs(a=x.a, b=x.b, c=x.c)
    return tp.GemmArgs(a=x.a, b=x.b, c=x.c, bias=x.bias if case.bias else None)


def descriptor_of(args: Args) -> MultiplyingDescriptor:
    """The problem that ``args`` pose."""
    if isinstance(args, tp.GemmBackwardArgs):
        return tp.GemmBackwardDescriptor.from_args(args)
    epilogue = "identity" if args.bias is None else "bias"
    if isinstance(args, tp.GemmArgs):
        return tp.GemmDescriptor.from_args(args, epilogue=epilogue)
    return tp.BatchedGemmDescriptor.from_args(args, epilogue=epilogue)


def results(args: Args) -> dict[str, Tensor]:
    """The tensors that a call writes, by operand."""
    names = ("da", "db", "dbias") if isinstance(args, tp.GemmBackwardArgs) else ("c",)
    return {name: getattr(args, name) for name in names}
