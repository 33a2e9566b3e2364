"""Kernels that walk lists of tensors: chunks and addresses lie in tables, or are arguments if tensors are few."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def chunk_of(chunks, starts, sizes, columns, CHUNK: tl.constexpr, PARTS: tl.constexpr = 1):
    """(tensor, column, first element, elements from there to the tensor's end) of this program's chunk, or part of one.

    chunks: i32 [2, programs / PARTS], of a tensor and the number of a chunk in it, with sizes: i64 [tensors]; or i64
    [3, columns], of these and of the tensor's size; or None if tensors are few: then ``sizes`` is a tuple, and
    ``starts`` are the numbers of the first chunks of all but the first tensor, or None of a single one. column: where
    ``address_of`` finds the tensor. PARTS programs share a chunk; those behind the tensor's end have no elements or
    fewer.
    """
    program = tl.program_id(0).to(tl.int64) // PARTS
    if chunks is not None and chunks.dtype.element_ty == tl.int64:
        tensor, column = tl.load(chunks + program), program
        number, size = tl.load(chunks + columns + program), tl.load(chunks + 2 * columns + program)
    elif chunks is not None:
        tensor = tl.load(chunks + program).to(tl.int64)
        number = tl.load(chunks + tl.num_programs(0) // PARTS + program).to(tl.int64)
        column, size = tensor, tl.load(sizes + tensor)
    else:
        tensor, number, size = program * 0, program, program * 0 + sizes[0]
        if starts is not None:
            for i in tl.static_range(len(starts)):
                tensor += (program >= starts[i]).to(tl.int64)
                number = tl.where(program >= starts[i], program - starts[i], number)
                size = tl.where(program >= starts[i], sizes[i + 1], size)
        column = tensor
    first = number * CHUNK + tl.program_id(0) % PARTS * (CHUNK // PARTS)  # a known multiple: loads are vectors
    return tensor, column, first, size - first


@jit
def shift_of(address, TYPE: tl.constexpr):
    """Elements of TYPE by which ``address`` lies behind a multiple of 128 bytes, a line of the cache."""
    # Not %, which is of a signed number and takes a dozen instructions, one after the other.
    return (address & 127).to(tl.int32) // (TYPE.primitive_bitwidth // 8)


@jit
def shifted(address, shift, TYPE: tl.constexpr):
    """The address of ``shift`` elements of TYPE before ``address``.

    Tensors within one vector begin anywhere. Elements are therefore counted from the start of a line of the cache, so
    that blocks are whole vectors in as few lines as possible; the first block lacks ``shift`` elements.
    """
    return address - shift * (TYPE.primitive_bitwidth // 8)


@jit
def shifted_count(rest, shift, CHUNK: tl.constexpr):
    """Elements of a chunk of shifted ones, of which ``rest`` would be left from its first: the last chunk is longer."""
    return tl.where(rest <= CHUNK, rest + shift, CHUNK).to(tl.int32)


@jit
def address_of(addresses, stream: tl.constexpr, column, columns):
    """addresses: i64 [streams, columns]; or if columns is None, a tuple for each stream, of pointers to the tensors."""
    if columns is None:
        found = addresses[stream][0].to(tl.int64)
        for i in tl.static_range(1, len(addresses[stream])):
            found = tl.where(column >= i, addresses[stream][i].to(tl.int64), found)
    else:
        found = tl.load(addresses + stream * columns + column)
    return found


@jit
def half_of(half, first, i, shift, count, BLOCK: tl.constexpr):
    """(elements, which exist) of one half of the block at ``i``, for a masked path.

    Of whole blocks Triton would give each thread as many neighbours as the unmasked path does, whose vectors it cannot
    load under a mask: then lanes load with gaps, and exchange values before they store them. Of another length they do
    not.
    """
    offset = first + i + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    return offset, (offset >= shift) & (offset < first + count)


@jit
def read_stream(address, offset, mask, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Elements of TYPE at ``address``. WHOLE: the address is a multiple of 16 and the mask is true.

    Without the promise of alignment, Triton emits no vector loads from an address that it has read from memory.
    """
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        x = tl.load(tl.multiple_of(pointer, 16) + offset)
    else:
        x = tl.load(pointer + offset, mask=mask, other=0)
    return x


@jit
def load_stream(address, offset, mask, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """What ``read_stream`` reads, as f32."""
    return read_stream(address, offset, mask, TYPE, WHOLE).to(tl.float32)


@jit
def store_stream(address, offset, value, mask, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """The store of what ``read_stream`` reads."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        tl.store(tl.multiple_of(pointer, 16) + offset, value.to(TYPE))
    else:
        tl.store(pointer + offset, value.to(TYPE), mask=mask)
