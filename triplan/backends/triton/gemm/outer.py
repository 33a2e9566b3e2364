"""Kernel ``outer``: a matrix product of a short k, or of few rows (columns), by multiply-adds.

Its time is that of writing C, or of reading the one large factor once, without a tile of tensor cores that few rows
would leave almost empty.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import TL
from triplan.backends.triton.common.tiles import combined, fits_grid
from triplan.backends.triton.gemm import outer_kernels as kernels
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, matrix_strides, pointer
from triplan.backends.triton.gemm.entries import ELEMENTS, for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import I32_COUNTER_LIMIT, layout, unit_axis
from triplan.backends.triton.gemm.split_k import SUM_ELEMENTS
from triplan.backends.triton.gemm.tile_costs import stray_us
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Longest k, and that of a C of one row or column, of which ``gemv`` reads k side by side.
MOST_K, MOST_K_OF_VECTORS = 16, 8
#: Rows of C up to which k may be of any length, where B is row-major; or columns, where A is column-major. Untuned.
FEW = 8
#: Threads of a program.
THREADS = 128
#: Columns of a program of such a product, and how much of k it loads at once; the widest of which there are enough for
#: ``FILLED`` on each multiprocessor. Untuned.
BLOCKS = ((512, 8), (256, 16), (128, 16))
#: Programs that a multiprocessor holds of these; microseconds that it waits for a step; and that one takes for an
#: element of the streamed factor times one of the other, which all columns of a thread share: by bytes of an element of
#: the accumulator, and by the number of these columns. From 13 products on an H200, by a run that is not published.
RESIDENT, WAITED_US, PRODUCT_US, SHARED_BY_COLUMNS = 5, 0.9, {4: 1.6e-5, 8: 3.2e-5}, {4: 1.0, 2: 1.25, 1: 1.5}
STREAM_POWER = 4
#: Longest k that is loaded at once, each power of two by one binary; of a longer one so much is, or registers spill.
AT_ONCE, STEP_K = 8, 4
#: Elements of C per program, by bytes of an element of the accumulator; and how often such tiles must fill the card.
#: With 2048 of f64 a multiprocessor holds too few programs: on an H100 they took 1.35 times as long.
ELEMENTS_OF_TILE, FILLED = {4: 4096, 8: 1024}, 2
#: Elements of smaller tiles, which are taken where larger ones would not fill the card.
ELEMENTS_OF_SMALL_TILE, ELEMENTS_OF_LEAST_TILE = 1024, 256
#: Most columns of a tile: a row of 512 bytes or more, of which each warp writes whole sectors. Untuned.
MOST_COLUMNS = 256
#: Columns to which a tile is narrowed if more than one in so many of its columns does not exist: a warp of them.
LEAST_COLUMNS, IDLE = 32, 8
#: Most rows of a tile where C has no unit stride, which also has no more elements than that of the second kernel of
#: ``split_k``. Triton then has neighbouring threads store down the columns of a tile: of 32 rows, each element would be
#: in a sector of its own. Untuned.
STRAY_ROWS = 4
#: Microseconds of a kernel besides its programs. From small results in ``bench/results/anywhere-gemm-*``.
FIXED_US = 0.6
#: Microseconds that one multiprocessor takes for an element of C, besides its bytes. Untuned.
ELEMENT_US = 6e-5
#: Microseconds of waiting for each further ``STEP_K`` of a k that is not loaded at once. From products with a k of 11
#: and 15 on an H200.
PASS_US = 1.0


class OuterTile(NamedTuple):
    """Rows and columns of C per program."""

    m: int
    n: int


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _width(extent: int, most: int) -> int:
    """The widest tile, of ``most`` elements of C along its unit-stride axis, that leaves few of them idle."""
    width = min(_power(extent), most)
    while width > LEAST_COLUMNS and IDLE * (-(-extent // width) * width - extent) > extent:
        width //= 2
    return width


def tile_of(desc: MatrixProductDescriptor, target: Target) -> OuterTile:
    """As wide along C's unit-stride axis as C is, up to ``MOST_COLUMNS``; without one, of few rows."""
    elements, numel, sms = ELEMENTS_OF_TILE[desc.sums.itemsize], desc.operand("c").numel, target.sm_count
    if numel < FILLED * elements * sms:
        elements = ELEMENTS_OF_SMALL_TILE if numel >= ELEMENTS_OF_SMALL_TILE * sms else ELEMENTS_OF_LEAST_TILE
    unit = unit_axis(desc.operand("c"))
    if unit is None and desc.n > LEAST_COLUMNS:
        rows = min(_power(desc.m), STRAY_ROWS)
        return OuterTile(rows, min(_power(desc.n), min(elements, SUM_ELEMENTS) // rows))
    if unit == 0:
        height = _width(desc.m, min(max(MOST_COLUMNS, elements // _power(desc.n)), elements))
        return OuterTile(height, min(elements // height, _power(desc.n)))
    width = _width(desc.n, min(max(MOST_COLUMNS, elements // _power(desc.m)), elements))
    return OuterTile(min(elements // width, _power(desc.m)), width)


def _programs(desc: MatrixProductDescriptor, tile: OuterTile) -> int:
    return math.prod(desc.lead) * -(-desc.m // tile.m) * -(-desc.n // tile.n)


class Stream(NamedTuple):
    """A product of few rows, or the transpose of one of few columns, whose one large factor is read once.

    Attributes:
        few, columns: extents of the result.
        x, y: names of the large factor and of the other one.
        block: columns of a program.
        step: how much of k it loads at once.
    """

    few: int
    columns: int
    x: str
    y: str
    block: int
    step: int

    def programs(self, desc: MatrixProductDescriptor) -> int:
        return math.prod(desc.lead) * -(-self.columns // self.block)


@fact
def streamed(desc: MatrixProductDescriptor, target: Target) -> Stream | None:
    """How a product of a long k is streamed; None where k is short, or C does not lie along one factor's rows."""
    axis = 1 if desc.m <= desc.n else 0
    few, columns, x, y = (desc.m, desc.n, "b", "a") if axis else (desc.n, desc.m, "a", "b")
    along = all(unit_axis(desc.operand(name)) == axis for name in (x, "c"))
    if desc.k <= MOST_K or not 1 < few <= FEW or not along:
        return None
    blocks = [Stream(few, columns, x, y, *block) for block in BLOCKS]
    return next((s for s in blocks if s.programs(desc) >= FILLED * target.sm_count), blocks[-1])


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether k is short, or a factor is streamed, and the grid has room for every tile."""
    most = MOST_K_OF_VECTORS if 1 in (desc.m, desc.n) else MOST_K
    if stream := streamed(desc, target):
        return fits_grid(stream.programs(desc))
    if desc.k > most:
        return Support.no(f"k = {desc.k} is longer than {most}, and neither factor is streamed for {FEW} rows or fewer")
    return fits_grid(_programs(desc, tile_of(desc, target)))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    results = desc.operand("c").numel * desc.out.itemsize * (1 + desc.reads_c0 + desc.saves_pre)
    factors = math.prod(desc.lead) * desc.k * (desc.m + desc.n) * desc.element.itemsize
    memory = (results + factors) / BYTES_PER_US
    if stream := streamed(desc, target):
        return FIXED_US + combined(memory, *_stream_us(desc, stream, target), power=STREAM_POWER)
    tile, sms = tile_of(desc, target), target.sm_count
    written = -(-_programs(desc, tile) // sms) * tile.m * tile.n * ELEMENT_US * (1 + desc.k / 4)
    stray = stray_us(desc.operand("c"))
    passes = 1 if desc.k <= AT_ONCE else -(-desc.k // STEP_K)
    return FIXED_US + (passes - 1) * PASS_US + max(memory, written, stray)


def _stream_us(desc: MatrixProductDescriptor, stream: Stream, target: Target) -> tuple[float, float]:
    """Estimated microseconds of a stream's programs: what they compute, and how long they wait for operands."""
    programs, sms = stream.programs(desc), target.sm_count
    each = stream.few * PRODUCT_US[desc.sums.itemsize] * SHARED_BY_COLUMNS[stream.block // THREADS]
    steps = -(-desc.k // stream.step)
    return -(-programs // sms) * stream.block * desc.k * each, -(-programs // (sms * RESIDENT)) * steps * WAITED_US


@for_products(
    partial(kernel, name="outer", elements=ELEMENTS, supports=supports, rank=rank, guarantee=guarantee, layout=layout)
)
def outer(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    if desc.operand("c").numel == 0:
        return []
    if stream := streamed(desc, target):
        return [_stream_launch(desc, stream)]
    tile, itemsize = tile_of(desc, target), desc.element.itemsize
    a, a_known = matrix_strides(desc.operand("a"), ("am", "ak", "a_batch"))
    b, b_known = matrix_strides(desc.operand("b"), ("bk", "bn", "b_batch"))
    epilogue, constants = epilogue_arguments(desc)
    return [
        Launch(
            kernels.outer_kernel,
            _programs(desc, tile),
            {
                **{name: pointer(desc.operand(name)) for name in "abc"},
                "m": extent(desc.m, itemsize),
                "n": extent(desc.n, itemsize),
                "k": extent(desc.k, itemsize),
                **a,
                **b,
                **epilogue,
            },
            {
                **a_known,
                **b_known,
                **constants,
                "BLOCK_M": tile.m,
                "BLOCK_N": tile.n,
                "STEP_K": _power(desc.k) if desc.k <= AT_ONCE else STEP_K,
                "LOOPS": desc.k > AT_ONCE,
                "ACC": TL[desc.sums],
            },
            overlaps=True,
            max_registers=MAX_THREAD_REGISTERS,
        )
    ]


def _stream_launch(desc: MatrixProductDescriptor, stream: Stream) -> Launch:
    itemsize, rows = desc.element.itemsize, stream.x == "b"
    x, x_known = matrix_strides(desc.operand(stream.x), ("xk", "", "x_batch") if rows else ("", "xk", "x_batch"))
    y, y_known = matrix_strides(desc.operand(stream.y), ("yr", "yk", "y_batch") if rows else ("yk", "yr", "y_batch"))
    epilogue, constants = epilogue_arguments(desc)
    x_known.pop("")  # 1
    return Launch(
        kernels.streamed_kernel,
        stream.programs(desc),
        {
            "x": pointer(desc.operand(stream.x)),
            "y": pointer(desc.operand(stream.y)),
            "c": pointer(desc.operand("c")),
            "m": extent(desc.m, itemsize),
            "n": extent(desc.n, itemsize),
            "k": replace(extent(desc.k, itemsize), wide=desc.k >= I32_COUNTER_LIMIT),
            **x,
            **y,
            **epilogue,
        },
        {
            **x_known,
            **y_known,
            **constants,
            "FEW": stream.few,
            "ROWS": rows,
            "BLOCK": stream.block,
            "STEP_K": stream.step,
            "ACC": TL[desc.sums],
        },
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,
    )
