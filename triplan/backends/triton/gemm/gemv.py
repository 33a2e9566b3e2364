"""Kernel ``gemv``: a product of one row or one column, as sums of products along k.

The other factor is streamed once, in blocks that are wide along its unit-stride axis. Where its rows do not fill the
card, k is cut into pieces, whose sums a second launch adds in order, as in ``split_k``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import (
    BYTES_PER_US,
    L2_BYTES_PER_US,
    LINE_BYTES,
    MAX_THREAD_REGISTERS,
    SECTOR,
    WARP_THREADS,
)
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.common.tiles import combined
from triplan.backends.triton.gemm import gemv_kernels as kernels, split_k
from triplan.backends.triton.gemm.arguments import (
    THREE_PROGRAMS_REGISTERS,
    epilogue_arguments,
    extent,
    matrix_strides,
    pointer,
)
from triplan.backends.triton.gemm.entries import ELEMENTS, for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import elements_per_load, is_elementwise, layout, unit_axis, vector_elements
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Elements of the matrix per program and step, by bytes of an element: 64 KiB in the registers of 4 warps at most.
BLOCK_ELEMENTS = {2: 8192, 4: 4096, 8: 2048}
#: The same where each element has an address of its own.
BLOCK_ELEMENTS_ELEMENTWISE = {2: 4096, 4: 4096, 8: 2048}
#: Columns of a block where k is the matrix's unit-stride axis. Few suit short rows, which fewer threads then share.
DEPTHS = (8, 32, 128, 512, 2048, 8192)
#: Rows of a block where its rows lie along the unit-stride axis; fewer of few rows.
WIDTHS = (32, 128, 512)
#: By how much a block may be smaller, for small products: fewer elements are waited for.
SMALLER = (1, 8)
#: Programs that a multiprocessor holds at a time, by their registers, where each element has an address of its own: by
#: how many of a thread share an element of the vector (3: ``SHARED_BY_FEW_ROWS``), and of others. Words of two elements
#: have fewer addresses.
RESIDENT_SINGLE, RESIDENT, RESIDENT_WORDS = {1: 2, 2: 4, 3: 3, 4: 4, 8: 4, 16: 3, 32: 2}, {2: 3, 4: 4, 8: 4}, 4
#: Microseconds of a kernel besides its steps. From products of one step in ``bench/results/anywhere-gemm-*``.
FIXED_US = 0.6
#: Microseconds of a step whose operands come from memory (untuned), and of 1000 elements of a block in one
#: multiprocessor. The latter, and what follows where nothing else is said, by least squares of logarithms over up to 16
#: blocks of each of 18 products on an H200, by a run that is not published.
STEP_US, ELEMENTS_US = 0.8, 0.027
#: Microseconds of 1000 loads in one multiprocessor where each has an address of its own, and of 1000 elements of the
#: vector. From the instructions of their loops, of 16 and 32 bits.
SINGLE_US, VECTOR_US = 0.03, 0.055
#: Microseconds of a program that begins on a multiprocessor, whose threads add sums of whole rows.
PROGRAM_US = 0.05
#: Parts of a sector, at both ends of a block that begins within one, that are read in vain.
ENDS_READ = 0.6
#: By how much reads take longer for each line of L2 that a block's rows are too short to fill.
LINE_PART = 0.23
#: Microseconds of 1000 threads in one multiprocessor that exchange and add a sum. The threads of a row do as many times
#: as their number has powers of two, of one warp at most.
EXCHANGE_US = 0.057
#: Elements of the matrix that share one of the vector in blocks of few rows, where threads load it for each other.
SHARED_BY_FEW_ROWS = 3
#: Threads of a program.
THREADS = 128
LIMITS_POWER = 3.0
#: Microseconds of the second launch (of small products; of large ones 2.5), and bytes of partial sums per microsecond,
#: which are written and read.
SUMMING_US, PARTIAL_BYTES_PER_US = 1.5, 1.5e6


class Block(NamedTuple):
    """Rows and columns of the matrix that a program reads in a step, and pieces that k is cut into."""

    rows: int
    depth: int
    pieces: int

    def piece(self, k: int) -> int:
        """Extent of a piece: whole steps."""
        return max(-(-k // (self.depth * self.pieces)), 1) * self.depth

    def count(self, k: int) -> int:
        """Pieces that are not empty; 1 for k = 0."""
        return max(-(-k // self.piece(k)), 1)


def _is_one_row(desc: MatrixProductDescriptor) -> bool:
    """Whether C is computed as b.T @ a.T: one row of it, not one column."""
    return desc.n != 1


def matrix_of(desc: MatrixProductDescriptor) -> tuple[Operand, bool]:
    """The factor that is the matrix, and whether blocks of it are wide along k: where its rows have no unit stride.
    Without any, neighbours are taken to lie along axis 1, as in slices of row-major matrices."""
    one_row = _is_one_row(desc)
    o = desc.operand("b" if one_row else "a")
    return o, rows_of(desc) == 1 or (unit_axis(o) == 0) == one_row


def rows_of(desc: MatrixProductDescriptor) -> int:
    """Elements of each product's result."""
    return desc.n if _is_one_row(desc) else desc.m


def blocks_of(desc: MatrixProductDescriptor) -> list[Block]:
    """Every block that suits the matrix's layout, with every number of pieces that k is long enough for."""
    o, along_k = matrix_of(desc)
    most = (BLOCK_ELEMENTS_ELEMENTWISE if is_elementwise(o) else BLOCK_ELEMENTS)[o.element.itemsize]
    widths = DEPTHS if along_k else [min(w, ceil_power(rows_of(desc))) for w in WIDTHS]
    shapes = []
    for elements in (most // s for s in SMALLER):
        for wide in (min(w, elements) for w in widths):
            shapes.append((elements // wide, wide) if along_k else (wide, elements // wide))
    pieces = (1, *split_k.PIECES)
    return [Block(*shape, p) for shape in dict.fromkeys(shapes) for p in pieces if p == 1 or shape[1] * p <= desc.k]


def _programs(desc: MatrixProductDescriptor, block: Block) -> int:
    return math.prod(desc.lead) * -(-rows_of(desc) // block.rows) * block.count(desc.k)


def _shared(desc: MatrixProductDescriptor, block: Block, along_k: bool) -> int:
    """Elements of the matrix in one thread that are multiplied by the same element of the vector."""
    if along_k:
        return max(min(block.rows, rows_of(desc)) * min(block.depth, THREADS) // THREADS, 1)
    return block.rows // THREADS or SHARED_BY_FEW_ROWS


def _resident(desc: MatrixProductDescriptor, block: Block) -> int:
    """Programs that a multiprocessor holds at a time, where each element has an address of its own."""
    matrix, along_k = matrix_of(desc)
    if elements_per_load(matrix) > 1:
        return RESIDENT_WORDS
    return RESIDENT_SINGLE.get(_shared(desc, block, along_k), RESIDENT[matrix.element.itemsize])


def _exchanges(matrix: Operand, block: Block) -> int:
    """How often threads that share a row along k exchange sums, over all of them."""
    width = int(elements_per_load(matrix)) if is_elementwise(matrix) else vector_elements(matrix.element.itemsize)
    sharing = max(min(block.depth // max(width, 1), THREADS), 1)
    return sharing * (min(sharing, WARP_THREADS).bit_length() - 1)


def block_us(desc: MatrixProductDescriptor, block: Block, target: Target) -> float:
    """Estimated microseconds."""
    sms, programs = target.sm_count, _programs(desc, block)
    steps = -(-block.piece(desc.k) // block.depth)
    matrix, along_k = matrix_of(desc)
    wide, row = (
        (e * matrix.element.itemsize) for e in ((block.depth, desc.k) if along_k else (block.rows, rows_of(desc)))
    )
    # Blocks may begin and end within sectors, which another block may have brought into the L2 cache.
    slower = (ENDS_READ * SECTOR / (2 * wide) if row % SECTOR else 0.0) + LINE_PART * max(LINE_BYTES / wide - 1, 0.0)
    read = matrix.numel * matrix.element.itemsize * (1 + slower)
    # Each block of rows reads the vector, which the L2 cache holds.
    vectors = math.prod(desc.lead) * -(-rows_of(desc) // block.rows) * desc.k * matrix.element.itemsize
    # Vectors are waited for while programs of other waves compute; single elements take them all.
    each, waves = ELEMENTS_US, 1
    if is_elementwise(matrix):
        waves = -(-programs // (sms * _resident(desc, block)))
        each = (SINGLE_US + VECTOR_US / _shared(desc, block, along_k)) / max(elements_per_load(matrix), 1)
    waiting = waves * steps * STEP_US
    added = block.rows * _exchanges(matrix, block) * EXCHANGE_US if along_k else 0.0
    computed = -(-programs // sms) * (steps * block.rows * block.depth * each + added) / 1000
    limits = read / BYTES_PER_US, vectors / L2_BYTES_PER_US, waiting, computed
    begun = 0.0 if along_k else programs / sms * PROGRAM_US
    summing = SUMMING_US + 2 * partial_bytes(desc, block) / PARTIAL_BYTES_PER_US if block.pieces > 1 else 0.0
    return FIXED_US + combined(*limits, power=LIMITS_POWER) + begun + summing


@fact
def cheapest_block(desc: MatrixProductDescriptor, target: Target) -> Block:
    """The block of the lowest estimate; of equal ones that of the fewest pieces."""
    return min(blocks_of(desc), key=lambda block: (block_us(desc, block, target), block.pieces))


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether C has one row or one column, and i32 counts the programs and the steps along k."""
    if desc.m != 1 and desc.n != 1:
        return Support.no(f"C is {desc.m} by {desc.n}: neither one row nor one column")
    return split_k.are_counted(desc, max(_programs(desc, block) for block in blocks_of(desc)))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest block."""
    return block_us(desc, cheapest_block(desc, target), target)


def partial_bytes(desc: MatrixProductDescriptor, block: Block) -> int:
    """Exact bytes of the pieces' sums; none for a single piece."""
    pieces = block.count(desc.k)
    return pieces * desc.operand("c").numel * desc.sums.itemsize if pieces > 1 else 0


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the pieces' sums with the cheapest block."""
    return partial_bytes(desc, cheapest_block(desc, target))


def _factors(desc: MatrixProductDescriptor) -> tuple[dict[str, Arg], dict[str, int]]:
    """The arguments of the matrix and of the vector, and those among them that are known."""
    one_row = _is_one_row(desc)
    (x, _), y = matrix_of(desc), desc.operand("a" if one_row else "b")
    x_names, y_names = (("xk", "xr"), ("", "yk")) if one_row else (("xr", "xk"), ("yk", ""))
    found: dict[str, Arg] = {"x": pointer(x), "y": pointer(y)}
    known: dict[str, int] = {}
    for o, names, batch in ((x, x_names, "x_batch"), (y, y_names, "y_batch")):
        args, constants = matrix_strides(o, (*names, batch))
        found |= args
        known |= constants
    if y.layout.packed:  # a packed vector is contiguous, whichever extent is 1
        found.pop("yk", None)
        known["yk"] = 1
        if desc.lead:  # vectors follow each other without gaps, whatever divides their extent of 1
            found["y_batch"] = replace(extent(desc.k, y.element.itemsize), wide=True)
    return {n: a for n, a in found.items() if n}, {n: s for n, s in known.items() if n}


def launches(desc: MatrixProductDescriptor, block: Block) -> list[Launch]:
    """One kernel, or one for the pieces and one that adds them; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    itemsize, pieces = desc.element.itemsize, block.count(desc.k)
    args, known = _factors(desc)
    # ptxas would take a few registers more of some blocks, and a multiprocessor then hold two programs, not three.
    registers = MAX_THREAD_REGISTERS if is_elementwise(matrix_of(desc)[0]) else THREE_PROGRAMS_REGISTERS
    # A counter passes k by up to a block's depth.
    args["k"] = replace(extent(desc.k, itemsize), wide=desc.k > 2**31 - max(DEPTHS))
    constants: Mapping[str, object] = {**known, "ROWS": block.rows, "DEPTH": block.depth, "ACC": TL[desc.sums]}
    if pieces == 1:
        epilogue, epilogue_constants = epilogue_arguments(desc)
        return [
            Launch(
                kernels.gemv_kernel,
                _programs(desc, block),
                {
                    **args,
                    **epilogue,
                    "c": pointer(desc.operand("c")),
                    "m": extent(desc.m, itemsize),
                    "n": extent(desc.n, itemsize),
                },
                {**constants, **epilogue_constants, "ONE_ROW": _is_one_row(desc)},
                overlaps=True,
                max_registers=registers,
            )
        ]
    depth = block.piece(desc.k)
    return [
        Launch(
            kernels.gemv_pieces_kernel,
            _programs(desc, block),
            {
                **args,
                "partial": Scratch(0, desc.sums),
                "products": Int(math.prod(desc.lead)) if desc.lead else None,
                "depth": Int(depth, divisibility=power_of_two_in(depth)),
                "rows": extent(rows_of(desc), itemsize),
            },
            constants,
            overlaps=True,
            max_registers=registers,
        ),
        split_k.sum_launch(desc, pieces, desc.n),
    ]


@for_products(
    partial(
        kernel,
        name="gemv",
        version=8,
        elements=ELEMENTS,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
    )
)
def gemv(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_block(desc, target))
