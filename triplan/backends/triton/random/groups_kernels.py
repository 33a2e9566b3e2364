"""Kernel of ``groups``: random numbers of consecutive indices, with one evaluation of Philox per counter."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient, steps, unravel
from triplan.backends.triton.common.philox_kernels import as_i64, keep, state_of
from triplan.backends.triton.random.shared_kernels import pairs


@jit
def _offset(vector, columns, sizes, strides, VECTOR):
    """Offset of the first element of each ``vector``: VECTOR elements of a row of ``columns`` vectors.

    strides: (of the rows along ``sizes``, innermost dimension first; along the columns, None for 1).
    """
    row = quotient(vector, columns)
    column = (vector - row * columns[0]) * VECTOR
    return unravel(row, sizes, strides[0]) + (column if strides[1] is None else steps(column, strides[1]))


@jit
def _places(start, point, live, columns, sizes, strides, VECTOR):
    """Offsets of the elements ``point``; of whole blocks (``live`` is None), which begin at ``start``, as vectors."""
    if columns is None:
        found = point
    elif live is not None or VECTOR == 1:
        found = _offset(point // VECTOR, columns, sizes, strides, VECTOR) + (point & (VECTOR - 1))
    else:
        vector = start // VECTOR + tl.arange(0, point.shape[0] // VECTOR)
        found = _offset(vector, columns, sizes, strides, VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    return found


@jit
def _write(
    out, x, parameters, seed, offset, counter, start, point, live, columns, sizes, out_strides, x_strides, NUMBER,
    PAIRED, WIDE, VECTOR,
):  # fmt: skip
    # Words are computed within each branch: shared by both, they would be converted to both layouts in shared memory.
    a, b = pairs(seed, offset, counter, WIDE)
    out_at = _places(start, point, live, columns, sizes, out_strides, VECTOR)
    OUT: tl.constexpr = out.dtype.element_ty
    if x is not None:
        given = tl.load(x + _places(start, point, live, columns, sizes, x_strides, VECTOR), mask=live)
        found = NUMBER(tl.join(a, b).reshape(out_at.shape), given, parameters, OUT).to(OUT)
    else:  # (If threads exchange elements, these are results, which are as wide as words or narrower.)
        if PAIRED:
            a, b = NUMBER(a, b, parameters)
        else:
            a, b = NUMBER(a, None, parameters, OUT), NUMBER(b, None, parameters, OUT)
        found = tl.join(a.to(OUT), b.to(OUT)).reshape(out_at.shape)
    tl.store(out + out_at, found, mask=live)


@jit
def groups_kernel(
    out,
    x,
    parameters,
    state,
    first,
    numel,
    columns,
    sizes,
    out_strides,
    x_strides,
    NUMBER: tl.constexpr,
    SCALARS: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out[i] = NUMBER(word(first + i), x[i], parameters) for i < numel, in BLOCKS blocks per program.

    out, x (or None): any elements; packed if ``columns`` is None, else as ``_offset`` has it. state: see ``state_of``.
    A counter serves 4 elements, 2 if WIDE. If ``first`` is a multiple of that, a vector holds the elements of one
    counter, and only the last block is masked, because masks narrow accesses; otherwise every block is.
    """
    seed, offset = state_of(state)
    keep(state)
    if SCALARS is not None:
        parameters = SCALARS(parameters, out.dtype.element_ty)
    SHARED: tl.constexpr = 2 if WIDE else 4
    first = as_i64(first)
    skipped = (first & (SHARED - 1)).to(POINT_TYPE)
    ALL: tl.constexpr = 2**63 - 1 if WIDE else 2**62 - 1
    for i in tl.range(BLOCKS):
        block = tl.program_id(0) * BLOCKS + i
        start = block.to(POINT_TYPE) * BLOCK
        group = block.to(tl.int64) * (BLOCK // SHARED) + tl.arange(0, BLOCK // SHARED)
        counter = ((first >> (1 if WIDE else 2)) + group) & ALL
        # Vectors hold the elements of one counter: those of two would have to be exchanged through shared memory.
        point = tl.max_contiguous(start + tl.arange(0, BLOCK), SHARED)
        if (skipped == 0) & (start + BLOCK <= numel):
            _write(
                out, x, parameters, seed, offset, counter, start, point, None, columns, sizes, out_strides, x_strides,
                NUMBER, PAIRED, WIDE, VECTOR,
            )  # fmt: skip
        else:
            point -= skipped
            live = (point >= 0) & (point < numel)
            _write(
                out, x, parameters, seed, offset, counter, start, point, live, columns, sizes, out_strides, x_strides,
                NUMBER, PAIRED, WIDE, VECTOR,
            )  # fmt: skip
