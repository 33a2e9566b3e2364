"""What the kernels of copies share: where an element comes from, and how it is loaded and converted."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient

#: Maps of positions along a dimension; 0 is the identity. Numbers, because Triton takes no tuples of strings.
FLIP, ROLL, PAD = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@jit
def source(i, dim, MAP: tl.constexpr):
    """The position in x, along one dimension, that out's position ``i`` reads. ``dim``: (size, amount, extent, ...)."""
    at = i
    if MAP == FLIP:
        at = dim[2] - 1 - i
    elif MAP == ROLL:
        at = i - dim[1]
        at = tl.where(at < 0, at + dim[2], at)
    elif MAP == PAD:
        at = i - dim[1]
    return at


@jit
def is_inside(at, dim, MAP: tl.constexpr):
    """Whether position ``at`` lies within x."""
    found = at == at
    if MAP == PAD:
        found = (at >= 0) & (at < dim[2])
    return found


@jit
def place(point, dims, MAPS: tl.constexpr):
    """(offset in x, offset in out, whether the position lies within x) of ``point``, numbered row-major over ``dims``.

    ``dims``: (size, amount, extent of x, stride of x, stride of out) of each dimension, innermost first; for sizes see
    ``quotient``. None: there is one point. Offsets have the type of the strides: i64, or in x also i32. Without
    strides of out, its offset is not found.
    """
    x_at = (point * 0).to(tl.int64)
    out_at = x_at
    inside = point == point
    if dims is not None:
        x_at = x_at.to(dims[0][3].dtype)
        for d in tl.static_range(len(dims)):
            i = point
            if d < len(dims) - 1:
                point = quotient(i, dims[d][0])
                i = i - point * dims[d][0][0]
            at = source(i, dims[d], MAPS[d])
            inside = inside & is_inside(at, dims[d], MAPS[d])
            x_at += at * dims[d][3]
            if len(dims[d]) > 4:
                out_at += i * dims[d][4]
    return x_at, out_at, inside


@jit
def as_words(at, WORD: tl.constexpr):
    """The address ``at`` as one of integers of type WORD."""
    return at.to(tl.pointer_type(WORD), bitcast=True)


@jit
def outside(x, value, VALUE_TYPE: tl.constexpr):
    """What is written where x has no element, in the type in which x is read: 0, or ``value`` as VALUE_TYPE."""
    element: tl.constexpr = x.dtype.element_ty
    if value is None:
        found = tl.full((), 0, element)
    elif VALUE_TYPE == tl.float64:
        found = tl.full((), value, tl.float64).to(element, bitcast=True)
    elif VALUE_TYPE.is_floating():
        found = tl.full((), value, tl.float32).to(VALUE_TYPE).to(element, bitcast=True)
    elif VALUE_TYPE == tl.int1:
        found = (tl.full((), value, tl.int64) != 0).to(element)
    else:
        found = tl.full((), value, tl.int64).to(element)
    return found


@jit
def converted(value, out, CAST: tl.constexpr):
    """``value`` converted to out's element. CAST: "none", "bool" (held as i8), "f32" (by way of f32) or "direct"."""
    if CAST == "bool":
        value = (value != 0).to(tl.int8)
    elif CAST == "f32":
        value = value.to(tl.float32).to(out.dtype.element_ty)
    elif CAST == "direct":
        value = value.to(out.dtype.element_ty)
    return value
