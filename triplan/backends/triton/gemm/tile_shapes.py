"""Tiles of the kernels that read through pointers, and the tiles that a problem may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from triplan.backends.triton.gemm.matrices import (
    elements_per_load,
    has_elementwise_access,
    is_elementwise,
    lacks_unit_stride,
    unit_axis,
)
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, ElementKind, MathPrecision, Target


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of C per program, extent of a step along k, warps per program, and stages of the pipeline: its
    steps in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages}"

    @property
    def accumulators(self) -> int:
        """Elements of the tile that one thread accumulates."""
        return self.m * self.n // (32 * self.warps)

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the operands of all stages."""
        return (self.m + self.n) * self.k * itemsize * self.stages


_SMALL = (
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(16, 64, 128, 4, 4),
    Tile(16, 32, 128, 4, 4),
    Tile(16, 32, 256, 4, 4),
)
#: For elements of 2 bytes. The largest read shared memory seldom enough to keep the tensor cores busy; smaller ones
#: fill the card with smaller problems; those of 16 rows are for few rows of A, where B is streamed once.
TILES_2_BYTES = {
    ArchSku.SM80: (Tile(128, 128, 32, 8, 4), Tile(64, 128, 32, 4, 4), *_SMALL),
    ArchSku.SM90A: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4), *_SMALL),
    ArchSku.CPU: (Tile(64, 128, 64, 4, 4), *_SMALL),
}
#: For f32 multiplied as tf32 on tensor cores.
_TF32 = (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 4), Tile(16, 64, 32, 4, 4))
TILES_TF32 = {
    ArchSku.SM80: _TF32,
    ArchSku.SM90A: (*_TF32, Tile(128, 256, 32, 8, 4), Tile(64, 64, 64, 4, 3)),
    ArchSku.CPU: _TF32,
}
#: The same where k is not the unit-stride axis of a factor. wgmma reads tf32 along k alone, so each element would be
#: transposed on its way into shared memory, at a quarter of the speed; two warps or fewer than 64 rows keep Triton from
#: wgmma.
TILES_TF32_TURNED = {
    **TILES_TF32,
    ArchSku.SM90A: (
        Tile(64, 128, 32, 2, 3),
        Tile(64, 64, 32, 2, 4),
        Tile(64, 32, 32, 2, 4),
        Tile(32, 64, 32, 4, 4),
        Tile(16, 64, 32, 4, 4),
    ),
}
#: The same with elementwise access: as ``tiles_invariant`` takes the first.
TILES_TF32_ELEMENTWISE = (_TF32[1], _TF32[0], _TF32[2])
#: The same on sm90a where both factors lie along C. Their threads have one address for several elements, so that more
#: registers are left for accumulators; two warps keep Triton from wgmma, as above.
TILES_TF32_ALONG = (Tile(64, 128, 16, 2, 4), Tile(64, 64, 32, 2, 4), Tile(64, 32, 32, 2, 4))
#: Columns of C up to which wgmma's tile of tf32 has a fourth stage: rows of A are then streamed once, and more steps in
#: flight read more of each row at a time. From a run on an H200 that is not published.
STREAMED_COLUMNS = 128
#: For tf32x3: each operand is split into two parts of tf32, which both take registers. On Hopper tiles of 64 rows would
#: be multiplied by wgmma, which reads the parts of B from shared memory: they are written there, and waited for.
TILES_TF32X3 = {
    ArchSku.SM80: _TF32[1:],
    ArchSku.SM90A: (Tile(32, 128, 32, 4, 3), Tile(32, 64, 32, 4, 3), Tile(16, 64, 32, 4, 4)),
    ArchSku.CPU: _TF32[1:],
}
#: Further tiles of few columns of C on Hopper, whose steps load less of B, so that more of them are in flight.
#: The second is the fastest of three for 45,934 x 9 x 43 on an H200, by a run that is not published.
NARROW_TF32X3 = (Tile(32, 32, 32, 4, 4), Tile(32, 16, 64, 4, 3))
#: A further tile on Hopper with elementwise access: a thread has few elements of a step, each of which has an address.
SHALLOW_TF32X3 = Tile(32, 64, 16, 4, 4)
#: For i8.
TILES_I8 = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(16, 64, 128, 4, 4))
#: For f32 without tensor cores: the operands' registers bound the tile.
TILES_F32_ELEMENTWISE = (
    Tile(64, 64, 16, 4, 3),
    Tile(32, 32, 32, 4, 3),
    Tile(16, 64, 32, 4, 3),
    Tile(16, 32, 32, 4, 3),
)
#: The same where vector loads can read the factors: for a row-major B on sm90a, and otherwise.
TILES_F32_ROWS = (*TILES_F32_ELEMENTWISE, Tile(64, 128, 32, 4, 2))
TILES_F32 = (*TILES_F32_ELEMENTWISE, Tile(128, 128, 16, 8, 3))
#: The same for a column-major B on sm80, where the largest tiles spill with three stages and elements of C0.
TILES_F32_COLUMNS = (Tile(64, 64, 16, 4, 2), *TILES_F32_ELEMENTWISE[1:], Tile(128, 128, 16, 8, 2))
#: For f64, on tensor cores. The last one on sm90a is for elements with an address each, which few others have registers
#: for: three of its programs share a multiprocessor. Of 64 by 64 by 8 warps there is room for one, which multiplies
#: nothing while it computes an activation.
_F64 = (Tile(64, 64, 16, 8, 3), Tile(32, 32, 16, 2, 3))
TILES_F64 = {
    ArchSku.SM80: _F64,
    ArchSku.SM90A: (
        Tile(64, 64, 16, 2, 3),
        Tile(64, 128, 16, 4, 3),
        Tile(64, 64, 16, 4, 3),
        _F64[1],
        Tile(64, 32, 16, 4, 3),
    ),
    ArchSku.CPU: _F64,
}
#: A further tile for f64 of few columns under gelu: its error function takes as long where a tile is outside. Untuned.
NARROW_F64 = Tile(64, 16, 16, 2, 3)
#: The same on sm90a with elementwise access where both factors lie along C, as for tf32.
TILES_F64_ALONG = (Tile(64, 64, 16, 2, 3),)
#: The least number of these: few do not occupy every tensor core. Untuned.
LEAST_F64_ALONG = 1056
#: For elements of 1 or 2 bytes with elementwise access: each element has an address of its own, of two registers.
TILES_1_BYTE_ELEMENTWISE = (Tile(64, 64, 32, 4, 3), Tile(16, 64, 64, 4, 3))
#: The same for 2 bytes. Narrow tiles are for few columns or rows: on an H200 they take 0.65 of the time for 16 columns,
#: 0.4 for 2, and 0.5 for 31 rows.
TILES_2_BYTES_SINGLE = (
    *TILES_1_BYTE_ELEMENTWISE,
    Tile(64, 32, 32, 4, 3),
    Tile(64, 16, 64, 4, 3),
    Tile(32, 64, 64, 4, 3),
)
#: The same, unless both factors are read one element at a time: about m, n, k = 4096, 2157, 2049 the large tile then
#: took 1.09 times as long as the small one on an H200, but 0.8 times where one factor has vectors or words.
TILES_2_BYTES_ELEMENTWISE = (*TILES_2_BYTES_SINGLE, Tile(128, 128, 32, 8, 3))
#: A further tile with elementwise access: A is read once, and each column of B for twice as many rows.
TALL_2_BYTES_ELEMENTWISE = Tile(128, 64, 32, 4, 3)
#: Columns of C that have this tile. From runs on an H200 that are not published.
TALL_COLUMNS = range(33, 65)

#: Most registers of accumulators per thread without register spills.
MAX_ACCUMULATORS = 128
#: The same with the temporaries of an error function, elements of C0, or addresses of a second output.
MAX_ACCUMULATORS_EPILOGUE = 64
#: Both with elementwise access.
MAX_ACCUMULATORS_ELEMENTWISE, MAX_ACCUMULATORS_ELEMENTWISE_EPILOGUE = 64, 32


def max_accumulators(desc: MatrixProductDescriptor, elementwise: bool) -> int:
    """Most registers of accumulators per thread that do not spill. ``elementwise``: each element has an address of its
    own."""
    heavy = desc.activation == "gelu" or desc.reads_c0 or desc.saves_pre
    if elementwise:
        heavy = heavy or lacks_unit_stride(desc)
        return MAX_ACCUMULATORS_ELEMENTWISE_EPILOGUE if heavy else MAX_ACCUMULATORS_ELEMENTWISE
    heavy = heavy or (desc.activation == "silu" and desc.multiplicands in (MathPrecision.TF32, MathPrecision.F64))
    return MAX_ACCUMULATORS_EPILOGUE if heavy else MAX_ACCUMULATORS


def tiles_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Tile, ...]:
    """The tiles that suit ``desc`` and fit ``target``."""
    turned, elementwise = any(is_turned(desc.operand(name)) for name in "ab"), has_elementwise_access(desc)
    along = _along_tiles(desc) if elementwise and target.arch is ArchSku.SM90A else ()
    found = tiles_for(desc, target, elementwise, turned)
    tf32 = desc.multiplicands is MathPrecision.TF32 and not (elementwise or turned)
    streamed = replace(_TF32[0], stages=4)
    if tf32 and target.arch is ArchSku.SM90A and desc.n <= STREAMED_COLUMNS and _fits(streamed, desc, target):
        found = tuple(streamed if t == _TF32[0] else t for t in found)
    return (*(t for t in along if _fits(t, desc, target)), *found)


def _along_tiles(desc: MatrixProductDescriptor) -> tuple[Tile, ...]:
    """Tiles that suit elementwise access only where both factors lie along C, and the epilogue takes few registers."""
    plain = desc.epilogue == "identity" and not (desc.reads_c0 or desc.saves_pre)
    if not plain or lacks_unit_stride(desc) or not all(is_turned(desc.operand(name)) for name in "ab"):
        return ()
    if desc.multiplicands is MathPrecision.TF32:
        return TILES_TF32_ALONG
    if desc.element is ElementKind.F64 and programs_of(desc, TILES_F64_ALONG[0]) >= LEAST_F64_ALONG:
        return TILES_F64_ALONG
    return ()


def _fits(tile: Tile, desc: MatrixProductDescriptor, target: Target) -> bool:
    """Whether a program has the shared memory of a tile."""
    return not target.is_gpu or tile.shared_bytes(desc.element.itemsize) <= target.shared_memory


def is_turned(o: Operand) -> bool:
    """Whether k is not the unit-stride axis of a factor."""
    return unit_axis(o) != (1 if o.name == "a" else 0)


def tiles_for(desc: MatrixProductDescriptor, target: Target, elementwise: bool, turned: bool) -> tuple[Tile, ...]:
    """``tiles_of`` with elementwise access, and whether a factor ``is_turned``, decided by the caller."""
    most, registers = max_accumulators(desc, elementwise), 2 if desc.element is ElementKind.F64 else 1
    return tuple(
        t
        for t in _candidates(desc, target, elementwise, turned)
        if t.accumulators * registers <= most and _fits(t, desc, target)
    )


def _candidates(desc: MatrixProductDescriptor, target: Target, elementwise: bool, turned: bool) -> tuple[Tile, ...]:
    itemsize = desc.element.itemsize
    if itemsize == 2:
        if elementwise:
            single = all(is_elementwise(o) and elements_per_load(o) <= 1 for o in map(desc.operand, "ab"))
            tall = (TALL_2_BYTES_ELEMENTWISE,) if desc.n in TALL_COLUMNS else ()
            return (*(TILES_2_BYTES_SINGLE if single else TILES_2_BYTES_ELEMENTWISE), *tall)
        return TILES_2_BYTES[target.arch]
    if itemsize == 1:
        return TILES_1_BYTE_ELEMENTWISE if elementwise else TILES_I8
    if desc.multiplicands is MathPrecision.TF32X3:
        if target.arch is not ArchSku.SM90A:
            return TILES_TF32X3[target.arch]
        shallow = (SHALLOW_TF32X3,) if elementwise else ()
        return (*TILES_TF32X3[target.arch], *(t for t in NARROW_TF32X3 if desc.n <= t.n), *shallow)
    if desc.multiplicands is MathPrecision.TF32:
        return TILES_TF32_ELEMENTWISE if elementwise else (TILES_TF32_TURNED if turned else TILES_TF32)[target.arch]
    if desc.element is ElementKind.F32:
        if elementwise:
            return TILES_F32_ELEMENTWISE
        if is_turned(desc.operand("b")):
            return TILES_F32_ROWS if target.arch is ArchSku.SM90A else TILES_F32
        return TILES_F32_COLUMNS if target.arch is ArchSku.SM80 else TILES_F32
    narrow = (NARROW_F64,) if desc.activation == "gelu" and desc.n <= NARROW_F64.n else ()
    return (*TILES_F64[target.arch], *narrow)


def programs_of(desc: MatrixProductDescriptor, tile: Tile) -> int:
    """Programs of a launch: one per tile of every product."""
    return math.prod(desc.lead) * -(-desc.m // tile.m) * -(-desc.n // tile.n)
