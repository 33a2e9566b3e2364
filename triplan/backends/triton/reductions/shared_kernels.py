"""What the kernels of reductions share: offsets of elements, and how they are accumulated, merged and finished.

An accumulator is a pair (a, b): (sum, product or extremum; unused), (extremum; its position), (mean; sum of squared
deviations from it), (maximum; sum of exp(x - maximum)), or (minimum; maximum).
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient
from triplan.backends.triton.common.rows_kernels import exponential

#: KIND: what is accumulated.
SUM, PRODUCT, MAX, MIN, ARGMAX, ARGMIN, MOMENTS, EXPONENTIALS, ENDS = (tl.constexpr(i) for i in range(9))
#: MAP: how an element is mapped before it is accumulated.
PLAIN, NONZERO, ABSOLUTE, SQUARE, POWER = (tl.constexpr(i) for i in range(5))
#: FINISH: how the accumulator becomes the result.
KEEP, MEAN, VARIANCE, DEVIATION, ROOT, INVERSE_POWER, LOGARITHM, POSITION, TRUTH = (tl.constexpr(i) for i in range(9))
#: How elements stay in the L2 cache that no program reads again.
ONCE_READ = tl.constexpr("evict_first")


@jit
def offset_of(point, dims, WHICH: tl.constexpr, VECTOR: tl.constexpr = 1):
    """The offset of ``point``, numbered row-major over ``dims``: (size, stride, ...) of each, innermost first.

    For sizes see ``quotient``. VECTOR: so many consecutive, aligned points are promised to be contiguous in memory.
    Without dimensions (None) there is one point.
    """
    at = (point * 0).to(tl.int64)
    if dims is not None:
        for d in tl.static_range(len(dims)):
            if d == len(dims) - 1:
                at += point.to(tl.int64) * dims[d][WHICH]
            else:
                rest = quotient(point, dims[d][0])
                at += (point - rest * dims[d][0][0]).to(tl.int64) * dims[d][WHICH]
                point = rest
    if VECTOR > 1:
        at = tl.max_contiguous(tl.multiple_of(at, VECTOR), VECTOR)
    return at


@jit
def neighbours(lane, count, BESIDE: tl.constexpr):
    """``lane`` [ROWS], which ascends by 1; but beyond the vector of BESIDE lanes that holds the last of ``count``, the
    lanes of that vector again. So all of a vector are read, and no mask narrows loads. What lies behind the
    last lane, up to a multiple of 16 bytes, is read too: it may lie behind the operand, though not in another page of
    memory, and changes no result."""
    if BESIDE == 1:
        found = tl.minimum(lane, count - 1)
    else:
        found = tl.minimum(lane // BESIDE, (count - 1) // BESIDE) * BESIDE + lane % BESIDE
        found = tl.max_contiguous(tl.multiple_of(found, BESIDE), BESIDE)
    return found


@jit
def flat_lines(unit, lanes, size, ROWS: tl.constexpr, POINT_TYPE: tl.constexpr, FLAT: tl.constexpr):
    """(numbers, points of ``kept``, lanes within these, which exist) of the ROWS results of group ``unit``, of which
    ``size`` (see ``quotient``) are neighbours at each point: those of several points are reduced side by side.

    FLAT: elements of a vector of neighbours; it divides their number and the distances between them.
    """
    number = unit.to(POINT_TYPE) * ROWS + tl.arange(0, ROWS)
    own = neighbours(number, lanes, FLAT)
    point = quotient(own, size)
    return number, point, own - point * size[0], number < lanes


@jit
def side_by_side(point_at, lane, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """Offsets ``point_at + lane`` of ``flat_lines``, with what the compiler is told of them."""
    at = point_at + lane
    if FLAT > 1:
        at = tl.max_contiguous(tl.multiple_of(at, FLAT), FLAT)
    else:
        # True but where a point ends. It makes neighbours of threads neighbours in memory, and no vectors: as nothing
        # is said of divisors, a load has one element. (So ``lanes`` and ``size`` must be passed without one.)
        at = tl.max_contiguous(at, ROWS)
    return at


@jit
def chunk_of(n, chunk, chunks):
    """(group of lines, chunk of these, its first element, elements of a chunk at most) of this program. Without chunks
    (None), a program reduces whole lines, and divides nothing before its first load."""
    if chunks is None:
        group, part, first, most = tl.program_id(0), 0, n * 0, n
    else:
        group, part = tl.program_id(0) // chunks, tl.program_id(0) % chunks
        first, most = part.to(n.dtype) * chunk, chunk
    return group, part, first, most


@jit
def accumulator_at(number, part, lanes, chunks, LANES_BESIDE: tl.constexpr):
    """Where the accumulator of chunk ``part`` of line ``number`` is: [lanes, chunks]; [chunks, lanes] if LANES_BESIDE,
    where a program has neighbouring lines, so that it writes whole sectors."""
    if LANES_BESIDE:
        at = number.to(tl.int64) + part * lanes.to(tl.int64)
    else:
        at = number.to(tl.int64) * chunks + part
    return at


@jit
def beside_lines(unit, kept, size, ROWS: tl.constexpr, POINT_TYPE: tl.constexpr):
    """(point of ``kept``, lanes [ROWS] at it) of group ``unit`` of results: ``size`` are neighbours at each point.
    Where there is one point (``kept`` is None), no division delays the first load."""
    if kept is None:
        point = unit.to(POINT_TYPE) * 0
    else:
        blocks = tl.cdiv(size, ROWS)
        point = (unit // blocks).to(POINT_TYPE)
        unit = unit % blocks
    return point, unit.to(POINT_TYPE) * ROWS + tl.arange(0, ROWS)


@jit
def lines_of(
    unit,
    lanes,
    outer,
    kept,
    along,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BESIDE: tl.constexpr = 1,
    FLAT: tl.constexpr = 0,
):
    """(offsets in x, in out, in the second result, numbers, which exist) of the ROWS results of group ``unit``.

    ACROSS: they are neighbours along the dimension ``along`` (a stride of None is 1: results are stored in vectors), at
    one of the ``outer`` points of the dimensions ``kept``. Otherwise they are consecutive points of ``kept``. There are
    ``lanes`` results in all. With FLAT and no stride along the results, these lie as they are numbered.
    Those beyond the last have the offsets in x of others, so that loads need no mask: a masked load waits for the one
    before it (ptxas of Triton 3.6). BESIDE: see ``neighbours``. FLAT: see ``flat_lines``.
    """
    if FLAT > 0:
        number, point, lane, live = flat_lines(unit, lanes, along[0], ROWS, POINT_TYPE, FLAT)
        x_at = side_by_side(offset_of(point, kept, 1), lane, ROWS, FLAT)
        if along[2] is None:
            out_at, second_at = number, number
        else:
            out_at = offset_of(point, kept, 2) + lane * along[2]
            second_at = offset_of(point, kept, 3) + lane * along[3]
    elif ACROSS:
        point, lane = beside_lines(unit, kept, along[0], ROWS, POINT_TYPE)
        live = lane < along[0]
        x_at = neighbours(lane, along[0], BESIDE)
        if along[1] is not None:
            x_at = x_at.to(tl.int64) * along[1]
        x_at = offset_of(point, kept, 1) + x_at
        out_at = offset_of(point, kept, 2) + (lane if along[2] is None else lane * along[2])
        second_at = offset_of(point, kept, 3) + (lane if along[3] is None else lane * along[3])
        number = point * along[0] + lane
    else:
        number = unit.to(POINT_TYPE) * ROWS + tl.arange(0, ROWS)
        live = number < lanes
        own = tl.minimum(number, lanes - 1)
        x_at = offset_of(own, kept, 1)
        out_at = offset_of(own, kept, 2)
        second_at = offset_of(own, kept, 3)
    return x_at, out_at, second_at, number, live


@jit
def element_of(v, order, MAP: tl.constexpr, COMPUTE: tl.constexpr):
    """The element ``v`` as it is accumulated: MAP(v) in COMPUTE.

    NONZERO in i32, of which only extrema are taken: any positive number says that ``v`` is not 0, as the bits of short
    elements do. A comparison and a choice for each would take more instructions.
    """
    WIDTH: tl.constexpr = v.dtype.primitive_bitwidth
    if v.dtype.is_floating() and WIDTH < 32 and (MAP != NONZERO or COMPUTE != tl.int32):
        v = v.to(tl.float32)
    if MAP == NONZERO and COMPUTE == tl.int32 and WIDTH == 8:
        v = v.to(tl.uint8, bitcast=True).to(COMPUTE)
    elif MAP == NONZERO and COMPUTE == tl.int32 and WIDTH == 16:
        bits = v.to(tl.uint16, bitcast=True).to(COMPUTE)
        v = bits & 0x7FFF if v.dtype.is_floating() else bits  # -0 is 0
    elif MAP == NONZERO:
        v = (v != 0).to(COMPUTE)
    else:
        v = v.to(COMPUTE)
    if MAP == ABSOLUTE:
        v = tl.abs(v)
    elif MAP == SQUARE:
        v = v * v
    elif MAP == POWER:
        v = tl.where(v == 0, 0.0, tl.exp2(order * tl.log2(tl.abs(v))))
    return v


@jit
def shift_of(top):
    """What is subtracted from exponents: the largest of them if it is finite, else 0."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@jit
def larger(a, v):
    return tl.maximum(a, v, propagate_nan=tl.PropagateNan.ALL)


@jit
def smaller(a, v):
    return tl.minimum(a, v, propagate_nan=tl.PropagateNan.ALL)


@triton.constexpr_function
def opposite(identity):
    """The identity of maxima, of that of minima: -inf of inf, the least integer of the largest."""
    return -identity if isinstance(identity, float) else ~identity


@jit
def merged(a, b, v, w, live, KIND: tl.constexpr, IDENTITY: tl.constexpr):
    """The accumulators (a, b) merged with (v, w) where ``live`` (None: everywhere). Not of MOMENTS, which need counts.

    EXPONENTIALS: the larger maximum stays, and the sum of the other is scaled by exp(-abs(a - v)), or by 1 if both
    maxima are equal, which may be infinite.
    """
    if live is not None:
        if KIND == PRODUCT:
            v = tl.where(live, v, 1)
        elif KIND == EXPONENTIALS:
            v, w = tl.where(live, v, float("-inf")), tl.where(live, w, 0.0)
        elif KIND == ENDS:
            v, w = tl.where(live, v, IDENTITY), tl.where(live, w, opposite(IDENTITY))
        elif KIND != ARGMAX and KIND != ARGMIN:
            v = tl.where(live, v, IDENTITY)
    if KIND == SUM:
        a = a + v
    elif KIND == PRODUCT:
        a = a * v
    elif KIND == MAX:
        a = larger(a, v)
    elif KIND == MIN:
        a = smaller(a, v)
    elif KIND == ENDS:
        a, b = smaller(a, v), larger(b, w)
    elif KIND == ARGMAX or KIND == ARGMIN:
        if a.dtype.is_floating():  # a NaN is better than every number, and the first one stays
            better = ~((v <= a) if KIND == ARGMAX else (v >= a)) & (a == a)
        else:
            better = (v > a) if KIND == ARGMAX else (v < a)
        if live is not None:
            better = live & better
        a = tl.where(better, v, a)
        b = tl.where(better, w, b)
    elif KIND == EXPONENTIALS:
        less = tl.where(a == v, 1.0, tl.exp(-tl.abs(a - v)))
        b = tl.where(v > a, b * less + w, b + w * less)
        a = larger(a, v)
    return a, b


@jit
def _times(a, b):
    return a * b


@jit
def extremum_of(a, LARGEST: tl.constexpr):
    """The extremum of each row: NaN if it holds one."""
    if a.dtype.is_floating():
        top = tl.reduce(a, 1, larger if LARGEST else smaller)
        top = tl.where(top != top, float("nan"), top + 0.0)  # + 0.0: -0 becomes 0, or the order of zeros would matter
    else:
        top = tl.max(a, 1) if LARGEST else tl.min(a, 1)
    return top


@jit
def position_of(a, b, top):
    """The smallest position ``b``, of 32 or 64 bits, at which a equals ``top``, or at which it is NaN if ``top`` is."""
    LAST: tl.constexpr = 0x7FFFFFFF if b.dtype.primitive_bitwidth == 32 else 0x7FFFFFFFFFFFFFFF
    is_it = (a == top[:, None]) | (a != a)  # without a NaN in the row, the second is false; with one, the first
    return tl.min(tl.where(is_it, b, LAST), 1)


@jit
def folded(a, b, count, share, KIND: tl.constexpr):
    """The accumulators [ROWS, BLOCK] of a tile merged into one for each row: (a, b) [ROWS].

    MOMENTS: an accumulator has ``count`` elements, which are the part ``share`` of those of a row.
    """
    if KIND == SUM:
        a = tl.sum(a, 1)
        b = a
    elif KIND == PRODUCT:
        a = tl.reduce(a, 1, _times)
        b = a
    elif KIND == MAX or KIND == MIN:
        a = extremum_of(a, KIND == MAX)
        b = a
    elif KIND == ENDS:
        a = extremum_of(a, False)
        b = extremum_of(b, True)
    elif KIND == ARGMAX or KIND == ARGMIN:
        top = extremum_of(a, KIND == ARGMAX)
        b = position_of(a, b, top)
        a = top
    elif KIND == MOMENTS:
        mean = tl.sum(a * share, 1)  # not sum / n: the sum of all elements may overflow
        apart = a - mean[:, None]
        b = tl.sum(b, 1) + tl.sum(count * apart * apart, 1)
        a = mean
    elif KIND == EXPONENTIALS:
        top = extremum_of(a, True)
        shift = shift_of(top)
        b = tl.sum(b * tl.exp(a - shift[:, None]), 1)
        a = top
    return a, b


@jit
def folded_elements(v, live, n, KIND: tl.constexpr):
    """The accumulators (a, b) [ROWS] of the ``n`` elements v [ROWS, BLOCK] of each line, of MOMENTS or EXPONENTIALS.
    ``live``: which of them exist, or None; the others are 0."""
    if KIND == MOMENTS:
        a = tl.sum(v * (1.0 / n), 1)  # not sum / n: the sum of all elements may overflow
        apart = v - a[:, None]
        if live is not None:
            apart = tl.where(live, apart, 0.0)
        b = tl.sum(apart * apart, 1)
    else:
        if live is not None:
            v = tl.where(live, v, float("-inf"))
        a = extremum_of(v, True)
        b = tl.sum(exponential(v - shift_of(a)[:, None]), 1)
    return a, b


@jit
def finished(a, b, n, correction, order, FINISH: tl.constexpr):
    """The result FINISH(a, b) of an accumulator of ``n`` elements."""
    if FINISH == MEAN:
        a = a / n
    elif FINISH == VARIANCE:
        a = b / tl.maximum(n - correction, 0.0)
    elif FINISH == DEVIATION:
        a = tl.sqrt(b / tl.maximum(n - correction, 0.0))
    elif FINISH == ROOT:
        a = tl.sqrt(a)
    elif FINISH == INVERSE_POWER:
        a = tl.where(a == 0, 0.0, tl.exp2(tl.log2(a) / order))
    elif FINISH == LOGARITHM:
        a = tl.log(b) + a
    elif FINISH == POSITION:
        a = b
    elif FINISH == TRUTH:
        a = (a != 0).to(a.dtype)
    return a


@jit
def store_second(at, a, b, mask, KIND: tl.constexpr):
    """Store the second result of the accumulators (a, b): the mean beside a variance, else b."""
    tl.store(at, (a if KIND == MOMENTS else b).to(at.dtype.element_ty), mask=mask)
