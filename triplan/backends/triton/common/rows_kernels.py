"""How every rowwise kernel finds its rows: shared by softmax, norms and cross-entropy.

Rows of ``n`` elements lie in ``lanes`` (the axis that neighbouring rows of one program walk) and in outer dimensions,
one of whose points a program works at. A step of None is a stride that is known to be 1: the compiler then sees
contiguous addresses. Tuples of sizes and strides run from the innermost dimension outwards; ``sizes`` is None where
there are no outer dimensions, as divisions of 64-bit numbers would cost more than a short row's own work.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

#: log2(e)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Whether reductions leave a kernel one block of code, in which ptxas keeps whatever is computed twice. Triton 3.6 has
#: their stores to and loads from shared memory under predicates, which part it.
UNPARTED = tl.constexpr(not triton.__version__.startswith("3.6."))


@triton.jit
def exponential(v):
    """exp(v). In f32 by ex2.approx.ftz: Triton's ``exp`` takes thrice the instructions, for subnormal results."""
    if v.dtype == tl.float64:
        return tl.exp(v)
    return tl.exp2(v * LOG2_E)


@triton.jit
def along(position, step):
    """The offset of ``position`` along an axis of stride ``step``."""
    offset = position
    if step is not None:
        offset = position.to(tl.int64) * step
    return offset


@triton.jit
def again(v, COVERED: tl.constexpr = False):
    """``v``, of 16 bits an element, as if it were new: what is computed from it is computed again.

    A compiler otherwise keeps the first conversion to f32, which takes twice the registers. Not for the interpreter.
    With COVERED ptxas does not see that it is the same either, as it does through a move: for what another ``again``
    has led to before.
    """
    MOVE: tl.constexpr = "prmt.b32 $0, $1, $1, 0x3210;" if COVERED else "mov.b32 $0, $1;"
    return tl.inline_asm_elementwise(MOVE, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)


@triton.jit
def outer_offset(outer, sizes, strides):
    """The offset of the outer point number ``outer``."""
    offset = tl.zeros((), tl.int64)
    if sizes is not None:
        for d in tl.static_range(len(sizes)):
            offset += (outer % sizes[d]).to(tl.int64) * strides[d]
            outer = outer // sizes[d]
    return offset


@triton.jit
def placed(row, sizes, lanes):
    """(outer point, lane) of row number ``row``."""
    outer = row
    lane = row
    if sizes is not None:
        outer = row // lanes
        lane = row % lanes
    return outer, lane


@triton.jit
def rows_of(pointer, strides, outer, sizes, lane):
    """Addresses of the first elements of the rows ``lane``; ``strides`` are (outer strides, lane stride)."""
    return pointer + outer_offset(outer, sizes, strides[0]) + along(lane, strides[1])


@triton.jit
def lanes_of(group, blocks, lanes, sizes, ROWS: tl.constexpr):
    """(outer point, its rows [ROWS, 1]) of group number ``group``; each outer point has ``blocks`` groups. Where there
    are no outer dimensions nothing is divided: a short row's addresses would wait for it."""
    outer, first = group_of(group, blocks, lanes, sizes, ROWS)
    return outer, first + tl.arange(0, ROWS)[:, None]


@triton.jit
def group_of(group, blocks, lanes, sizes, ROWS: tl.constexpr):
    """(outer point, its first row) of group number ``group``, as in ``lanes_of``."""
    outer = group * 0
    if sizes is not None:
        outer = group // blocks
        group = group % blocks
    return outer, group.to(lanes.dtype) * ROWS


@triton.jit
def subtracted(top):
    """What is taken off before the exponential: nothing where all is -inf so far, as -inf - -inf is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)
