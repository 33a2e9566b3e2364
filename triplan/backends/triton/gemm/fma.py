"""Kernel ``fma``: products of f32 by FMAs on Hopper, in larger tiles per thread than Triton's own layout has.

Where k is cut, a second launch adds the pieces, as in ``split_k``, or those of the last wave's tiles, as in ``cuts``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.card import BYTES_PER_US, MAX_THREAD_REGISTERS, SMS
from triplan.backends.triton.gemm import copies, cuts
from triplan.backends.triton.gemm.arguments import GROUP_M, epilogue_arguments, extent, pointer, product_arguments
from triplan.backends.triton.gemm.copies import MatrixCopy
from triplan.backends.triton.gemm.cuts import Cut
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.fma_kernels import fma_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import (
    I32_COUNTER_LIMIT,
    is_elementwise,
    is_row_major,
    layout,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.products import Product, transposed
from triplan.backends.triton.gemm.split_k import Split, padded_columns, pieces_bytes, sum_launch, sum_us
from triplan.backends.triton.gemm.tile_shapes import Tile, programs_of
from triplan.backends.triton.gemm.tma import ACTIVATIONS
from triplan.descriptors import GemmDescriptor, Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: Tiles of 8 rows by 16 columns for each thread, or of 16 by 8 for few columns. 255 registers a thread leave a
#: multiprocessor 8 warps. The last three are for at most 32 columns or rows (see ``_suits``).
TILES = (
    Tile(128, 256, 16, 8, 3),
    Tile(128, 128, 16, 4, 3),
    Tile(64, 128, 16, 2, 3),
    Tile(128, 64, 16, 2, 3),
    Tile(256, 32, 16, 2, 3),
    Tile(256, 32, 16, 2, 2),
    Tile(32, 128, 16, 1, 2),
)
#: Columns of the narrowest tile, and rows of the lowest. Eight programs of the latter share a multiprocessor, whose
#: shared memory has no third stage for them: each waits for its operands while seven compute.
LEAST_N, LEAST_M = 32, 32
#: Rows of C from which on it is computed as its transpose, or has the lowest tile: fewer leave half of the tile empty,
#: and other kernels have tiles of 16 rows, which are faster. From a run on an H200 that is not published.
LEAST_TURNED_M = 17
#: C of at most so many rows, the columns of a narrow tile, is also computed as its transpose if that saves copies which
#: take longer than C at so many bytes per microsecond, which is written by columns. Untuned.
MOST_TURNED_M, TURNED_BYTES_PER_US = 64, 1e6
#: k from which on a C of few rows is computed so: a shorter one takes less time than writing C, whose rows are then
#: columns. Untuned.
LEAST_TURNED_K = 512
#: Columns of C for a warp at most.
WARP_N = 128
#: Warps that a multiprocessor holds.
RESIDENT_WARPS = 8
#: Pieces that k may be cut into, beside those whose programs are whole waves: so many, and pieces at most.
PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WAVES, MOST_PIECES = (1, 2, 3, 4), 256
#: Least extent of a piece along k: what fills the pipeline takes as long as a step.
LEAST_DEPTH = 32
#: Microseconds outside the steps along k, of the kernel and of each wave of tiles but the first. The former from
#: products of one wave and up to six steps in ``bench/results/anywhere-gemm-*``.
FIXED_US, BETWEEN_US = 3.3, 5.0
#: Microseconds of 1e6 floating-point operations on one multiprocessor, in the widest tile and in others. These were set
#: by hand, from cubes of 1024 to 4096 and products of short k on H100 and H200, which no sweep has.
WIDE_MFLOP_US, MFLOP_US = 2.65, 2.78
#: Factor on it for each factor that is loaded one element at a time. From products of odd extents.
SINGLE = 1.06
#: Factor on it in tiles of few columns, which load more of A. From products of 33 and 73 columns on an H100.
NARROW = 1.1
#: Factor on it in tiles of few rows, which load more of B. From products of 17 and 32 rows on an H200.
LOW = 1.38
#: The same of tiles of 64 columns and of fewer where single elements of rows of A are copied. From runs on an H200
#: that are not published.
NARROW_COPIED, NARROWEST_COPIED = 1.2, 1.9
#: Bytes of partial sums per microsecond where their rows begin at any element, or those of a C without unit stride:
#: they are written one at a time.
SINGLE_BYTES_PER_US = 1e6
#: Elements of a large tile, and from which k on it copies single elements of A. From runs on an H200 that are not
#: published: at k = 4111 copies are faster than registers; at 129 a large tile with registers is faster than a smaller
#: one with copies. Untuned between these.
LARGE, COPIED_K = 128 * 128, 2048
#: Factor on FMAs in tiles of 128 by 128 for a row-major A: tiles of 64 rows begin sooner. From runs on an H200 that are
#: not published.
TALL_ROWS = 1.03
#: Waves up to which that factor counts, if A passes through registers. From the same runs.
TALL_ROWS_WAVES = 2
#: A row-major A is copied into columns, which need no registers on their way into shared memory, if that takes at most
#: such a part of the FMAs' time. From runs on an H200 that are not published, of 2048 and 4096 rows.
COPIED_SHARE = 0.02
#: The same of a factor whose rows begin anywhere: its copy is loaded in vectors, which saves as much (``SINGLE``), and
#: lets the widest tile be taken. From a product of 186,832 rows on an H200, of which the copy takes a share
#: between .06 and this: with it, it took .88 of the time, by a run that is not published.
COPIED_SINGLE_SHARE = 0.08
#: Least steps along k of a part of a tile of the last wave. Untuned.
LEAST_STEPS = 4
#: Part of the time of the fastest split that a cut may be estimated to take. Untuned.
CUT_WORTH = 0.97
#: Of splits whose estimates are within this factor of the lowest, that of the fewest pieces is taken. Untuned.
NEAR = 1.005


@fact
def turned(desc: MatrixProductDescriptor) -> Product | None:
    """The transposed product, where C has few rows: they are few columns then, which have narrow tiles. And where its
    copies take less time: it reads a column-major B as rows."""
    if not isinstance(desc, GemmDescriptor) or desc.has_bias or desc.reads_c0 or desc.saves_pre:
        return None
    if not LEAST_TURNED_M <= desc.m <= min(MOST_TURNED_M, desc.n) or desc.k < LEAST_TURNED_K:
        return None
    product = transposed(desc)
    if desc.m <= LEAST_N < desc.n:
        return product
    saved = sum(copy.cost_us for copy in moved(desc)) - sum(copy.cost_us for copy in moved(product.desc))
    return product if saved > desc.operand("c").nbytes / TURNED_BYTES_PER_US else None


#: How a product is divided among programs: all of it alike, or the last wave of tiles into more of them.
Division = Split | Cut[Tile]


class Problem(NamedTuple):
    """A product as it is multiplied, and the copies that are read in place of its factors."""

    desc: MatrixProductDescriptor
    copies: tuple[MatrixCopy, ...]


@fact
def problem_of(desc: MatrixProductDescriptor, copied: bool = True) -> Problem:
    """The problem, or the transposed one, with all copies, or with those alone that the kernel cannot do without."""
    product = turned(desc)
    multiplied = desc if product is None else product.desc
    return Problem(multiplied, moved(multiplied, copied))


@fact
def moved(desc: MatrixProductDescriptor, copied: bool = True) -> tuple[MatrixCopy, ...]:
    """The factors that are copied: an A without unit stride, a B that is not row-major; and, if they are small beside
    the product and ``copied``, a row-major A, and one whose rows begin anywhere. A small A becomes columns: vectors of
    these need no registers on their way into shared memory."""
    a, b = MatrixCopy(desc.operand("a"), 1), MatrixCopy(desc.operand("b"), 1)
    found = (a,) if unit_axis(a.operand) is None else ()
    columns = MatrixCopy(a.operand, 0)
    worth = copied and (is_row_major(a.operand) or is_elementwise(a.operand)) and _is_small(columns, desc.n)
    if not found and worth:
        found = (columns,)
    if not is_row_major(b.operand) or (copied and is_elementwise(b.operand) and _is_small(b, desc.m)):
        return (*found, b)
    return found


def _is_small(copy: MatrixCopy, others: int) -> bool:
    """Whether a factor, whose elements are each multiplied by ``others`` elements, is small beside the product."""
    fmas_us = 2e-6 * copy.operand.numel * others * WIDE_MFLOP_US / SMS
    return copy.cost_us <= fmas_us * (COPIED_SINGLE_SHARE if is_elementwise(copy.operand) else COPIED_SHARE)


@fact
def _factors(p: Problem) -> tuple[Operand, Operand]:
    """A and B as the kernel reads them. Copies that lie along C have zeros behind each row, which m and n include."""
    extents = {("a", 0): "m", ("b", 1): "n"}
    placed = {(copy.operand.name, copy.unit): copy.leading for copy in p.copies}
    wider = {extents[place]: leading for place, leading in placed.items() if place in extents}
    read = copies.of_copies(p.desc, p.copies).replace(symmetric=False, **wider)
    return read.operand("a"), read.operand("b")


def _vector(o: Operand) -> int:
    """Elements of a load."""
    return 1 if is_elementwise(o) else vector_elements(o.element.itemsize)


def _is_held(p: Problem, tile: Tile) -> bool:
    """Whether a row-major A passes through registers.

    Narrow tiles, which load more of A, copy it. Of others, single elements are copied in less time, but their addresses
    and those of single elements of B would spill. Large tiles copy them only where k is long (see ``COPIED_K``).
    """
    a, b = _factors(p)
    short = tile.m * tile.n >= LARGE and p.desc.k < COPIED_K
    return is_row_major(a) and tile.n >= WARP_N and (_vector(a) > 1 or _vector(b) == 1 or short)


def _stores_singly(desc: MatrixProductDescriptor) -> bool:
    """Whether elements of C, or of partial sums, are stored one by one: their rows begin anywhere."""
    c = desc.operand("c")
    return is_row_major(c) and is_elementwise(c)


def _is_summed(p: Problem, division: Division) -> bool:
    """Whether a second launch writes C: it sums pieces, or spares this one an epilogue whose registers would spill."""
    if isinstance(division, Cut):
        return False
    desc = p.desc
    unit = unit_axis(desc.operand("c"))
    heavy = desc.reads_c0 or desc.saves_pre or desc.activation == "gelu" or unit is None
    # A thread that stores along columns has elements of every column of its warp, and biases.
    heavy = heavy or (unit == 0 and desc.epilogue != "identity" and division.tile.n >= WARP_N)
    if _stores_singly(desc):
        heavy = heavy or _is_narrow(p, division) or (division.tile.m <= LEAST_M and desc.epilogue != "identity")
    return heavy or division.count(desc.k) > 1


def _is_narrow(p: Problem, division: Division) -> bool:
    """Whether stores of single elements would spill registers: in narrow tiles of a row-major A."""
    return division.tile.n < WARP_N and is_row_major(_factors(p)[0])


def _leading(p: Problem, division: Division) -> int:
    """Elements from one row of partial sums to the next."""
    vector = vector_elements(p.desc.sums.itemsize)
    return -(-p.desc.n // vector) * vector if _is_narrow(p, division) else padded_columns(p.desc)


def _partial_bytes(p: Problem, division: Division) -> int:
    """Exact bytes of the partial sums."""
    if isinstance(division, Cut):
        return division.nbytes
    return pieces_bytes(p.desc, division.count(p.desc.k), _leading(p, division)) if _is_summed(p, division) else 0


def launches(desc: MatrixProductDescriptor, division: Division, copied: bool = True) -> list[Launch]:
    """Copies, ``fma_kernel``, and the sums of its pieces; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    p, product = problem_of(desc, copied), turned(desc)
    found = copies.around(p.copies, _on_lines(p, division))
    return found if product is None else [product.on_operands(x) for x in found]


def _on_lines(p: Problem, division: Division) -> list[Launch]:
    """The launches on factors with unit stride."""
    desc, tile, summed, (a, b) = p.desc, division.tile, _is_summed(p, division), _factors(p)
    args, constants = product_arguments(copies.of_copies(desc, p.copies), tile)
    del constants["WHOLE_K"], constants["PRECISION"]
    cut: dict[str, Arg] = {"c": pointer(desc.operand("c")), **dict.fromkeys(("depth", "partial", "whole", "rest"))}
    result, leading = desc, _leading(p, division)
    rows, columns = a.shape[-2], b.shape[-1]
    # In the tile of few columns, vectors of B spill registers where single elements of columns of A are copied.
    b_vector = 1 if tile.n <= LEAST_N and _vector(a) == 1 and not is_row_major(a) else _vector(b)
    programs, after = programs_of(desc, tile), []
    if isinstance(division, Cut):
        programs, after = division.items, [cuts.sum_launch(desc, division, GROUP_M)]
        cut |= {
            **cuts.arguments(division),
            "rest": Int(division.rest),
            "depth": Int(division.depth * tile.k, divisibility=tile.k),
        }
    elif summed:
        pieces = division.count(desc.k)
        programs, after = pieces * programs, [sum_launch(desc, pieces, leading)]
        plain = {"epilogue": "identity", "reads_c0": False, "saves_pre": False, "symmetric": False, "layouts": {}}
        result = desc.replace(n=leading, **plain)
        depth = division.depth(desc.k)
        cut |= {"c": Scratch(0, desc.sums), "depth": Int(depth, divisibility=power_of_two_in(depth))}
        args["n"] = extent(leading, desc.sums.itemsize)
    epilogue, known = epilogue_arguments(result)
    if summed:
        slab = desc.m * leading
        epilogue["c_batch"] = Int(slab, wide=True, divisibility=power_of_two_in(slab))
        del epilogue["alpha"]
        known["alpha"] = 1.0
    warps_n = -(-tile.n // WARP_N)
    launch = Launch(
        fma_kernel,
        programs,
        {
            **args,
            **epilogue,
            **cut,
            "products": Int(math.prod(desc.lead)) if desc.lead else None,
            "a_rows": None if rows == desc.m else extent(rows, desc.element.itemsize),
            "b_columns": None if columns == result.n else extent(columns, desc.element.itemsize),
        },
        {
            **constants,
            **known,
            "STAGES": tile.stages,
            "WARPS_M": tile.warps // warps_n,
            "WARPS_N": warps_n,
            "A_VECTOR": _vector(a),
            "B_VECTOR": b_vector,
            "A_ROWS": is_row_major(a),
            "A_HELD": _is_held(p, tile),
            "C_SINGLE": tile.n >= WARP_N and _stores_singly(result),
            "C_COLUMNS": not summed and unit_axis(result.operand("c")) == 0,
            "ACTIVATION": ACTIVATIONS[result.activation],
        },
        num_warps=tile.warps,
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,
    )
    return [launch, *after]


def fma_us(desc: MatrixProductDescriptor, division: Division, target: Target, copied: bool = True) -> float:
    """Estimated microseconds."""
    p = problem_of(desc, copied)
    desc, tile, slots = p.desc, division.tile, _slots(division.tile, target)
    if isinstance(division, Cut):
        full, rounds = division.whole // slots, -(-division.rest * division.parts // slots)
        waves, along_k = full + rounds, full * desc.k + rounds * division.depth * tile.k
    else:
        waves = -(-division.count(desc.k) * programs_of(desc, tile) // slots)
        along_k = waves * division.depth(desc.k)
    computed = along_k * _step_us(p, tile, waves)
    found = FIXED_US + computed + max(waves - 1, 0) * BETWEEN_US + sum(copy.cost_us for copy in p.copies)
    if isinstance(division, Cut):
        found += cuts.sum_us(division)
    elif _is_summed(p, division):
        # Nothing is multiplied while the second launch reads C0 and writes C.
        results = desc.operand("c").nbytes * (1 + desc.reads_c0 + desc.saves_pre)
        found += sum_us(desc, division.count(desc.k), target) + results / BYTES_PER_US
        vector = vector_elements(desc.sums.itemsize)
        if _leading(p, division) % vector or (desc.n % vector and unit_axis(desc.operand("c")) is None):
            found += _partial_bytes(p, division) / SINGLE_BYTES_PER_US
    return found


def _step_us(p: Problem, tile: Tile, waves: int) -> float:
    """Microseconds of a multiprocessor for 1 along k of the tiles that it computes at a time, in so many waves."""
    resident = RESIDENT_WARPS // tile.warps
    rate = WIDE_MFLOP_US if resident == 1 else MFLOP_US
    a, b = _factors(p)
    slower = SINGLE ** sum(_vector(o) == 1 for o in (a, b))
    direct = is_row_major(a) and not _is_held(p, tile)
    if is_row_major(a) and (tile.m, tile.n) == (128, 128) and (waves <= TALL_ROWS_WAVES or direct):
        slower *= TALL_ROWS
    if tile.n < WARP_N and direct and _vector(a) == 1:
        slower *= NARROWEST_COPIED if tile.n <= LEAST_N else NARROW_COPIED
    elif tile.n < WARP_N:
        slower *= NARROW
    elif tile.m <= LEAST_M:
        slower *= LOW
    return resident * 2e-6 * tile.m * tile.n * rate * slower


def _slots(tile: Tile, target: Target) -> int:
    """Programs of a wave."""
    return target.sm_count * RESIDENT_WARPS // tile.warps


def _pieces(desc: MatrixProductDescriptor, tile: Tile, target: Target) -> list[int]:
    """The numbers of pieces that k is long enough for: a wave that is not full takes as long as a full one."""
    programs = max(programs_of(desc, tile), 1)
    full = (waves * _slots(tile, target) // programs for waves in WAVES)
    return sorted({1, *(p for p in (*PIECES, *full) if 1 < p <= min(MOST_PIECES, desc.k // LEAST_DEPTH))})


@fact
def splits_of(desc: MatrixProductDescriptor, target: Target, copied: bool = True) -> tuple[Split, ...]:
    """Every tile with every number of pieces that suits it."""
    p = problem_of(desc, copied)
    return tuple(Split(t, n) for t in TILES if _suits(p, t) for n in _pieces(p.desc, t, target))


def _suits(p: Problem, tile: Tile) -> bool:
    """Whether a tile suits the factors."""
    a, b = _factors(p)
    if tile.n <= LEAST_N:
        # Single elements of rows pass through the L1 cache, of which three stages leave too little for so many rows.
        return p.desc.n <= LEAST_N and (tile.stages == 2) == (is_row_major(a) and _vector(a) == 1)
    if tile.m <= LEAST_M:
        return LEAST_TURNED_M <= p.desc.m <= LEAST_M
    # The addresses and masks of single elements spill in the widest tile.
    return tile.warps < RESIDENT_WARPS or 1 not in (_vector(a), _vector(b))


@fact
def cuts_of(desc: MatrixProductDescriptor, target: Target, copied: bool = True) -> tuple[Cut[Tile], ...]:
    """Every tile whose last wave may be cut, in each way, where the first launch has registers for the whole tiles'
    epilogue: of a row-major C, and not in narrow tiles."""
    p = problem_of(desc, copied)
    if not is_row_major(p.desc.operand("c")):
        return ()
    tiles = (t for t in TILES if t.n >= WARP_N and _suits(p, t) and not _is_summed(p, Split(t, 1)))
    return tuple(
        cut
        for t in tiles
        for cut in cuts.cuts_of(t, programs_of(p.desc, t), _slots(t, target), -(-p.desc.k // t.k), LEAST_STEPS)
        if cut.whole
    )


@fact
def divisions_of(desc: MatrixProductDescriptor, target: Target, copied: bool = True) -> tuple[Division, ...]:
    """Every split and every cut."""
    return (*splits_of(desc, target, copied), *cuts_of(desc, target, copied))


@fact
def cheapest(desc: MatrixProductDescriptor, target: Target) -> Division:
    """The split of the lowest estimate, of near ones that of the fewest pieces; or a cut worth its workspace."""
    found = {division: fma_us(desc, division, target) for division in divisions_of(desc, target)}
    cut = min((d for d in found if isinstance(d, Cut)), key=lambda d: (found[d], d.parts), default=None)
    splits = [d for d in found if isinstance(d, Split)]
    least = min(found[d] for d in splits)
    if cut is not None and found[cut] < CUT_WORTH * least:
        return cut
    return min((d for d in splits if found[d] <= NEAR * least), key=lambda d: (d.pieces, found[d]))


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether the factors may be multiplied as f32 on Hopper, and 31 bits count everything."""
    if target.arch is not ArchSku.SM90A or target.interpret:
        return Support.no("runs on sm90a, not in the interpreter")
    if desc.multiplicands not in (MathPrecision.F32, MathPrecision.TF32X3):  # FMAs err less than tf32x3
        return Support.no(f"multiplies as {desc.multiplicands}, not as f32")
    if desc.k == 0:
        return Support.no("k is 0: there is nothing to multiply")
    p = problem_of(desc)
    programs = max(programs_of(p.desc, t) for t in TILES)
    if max(desc.m, desc.n, desc.k, MOST_PIECES * programs) >= I32_COUNTER_LIMIT:
        return Support.no("extents and programs are counted in 31 bits")
    return copies.counted(p.copies)


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds of the cheapest split."""
    return fma_us(desc, cheapest(desc, target), target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the copies and of the partial sums."""
    return workspace_with(desc, cheapest(desc, target))


def workspace_with(desc: MatrixProductDescriptor, division: Division, copied: bool = True) -> int:
    if desc.operand("c").numel == 0:
        return 0
    p = problem_of(desc, copied)
    return copies.workspace_bytes(p.copies) + _partial_bytes(p, division)


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each split; and without the copies that the kernel can do without, so that one needs no workspace."""
    found = {}
    for name, copied in (("", True), (" in place", False)):
        if copied or problem_of(desc, copied) != problem_of(desc):
            for division in divisions_of(desc, target, copied):
                us, nbytes = fma_us(desc, division, target, copied), workspace_with(desc, division, copied)
                found[f"{division}{name}"] = Configuration(us, partial(launches, desc, division, copied), nbytes)
    return found


@for_products(
    partial(
        kernel,
        name="fma",
        version=15,
        elements=("f32",),
        archs=(ArchSku.SM90A,),
        features=("gluon",),
        interpretable=False,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def fma(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest(desc, target))
