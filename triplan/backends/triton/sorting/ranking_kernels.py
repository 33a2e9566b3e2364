"""What ``onesweep`` and ``block`` share (Gluon): the stable order of a tile by one digit, found in shared memory.

A program holds a tile as [WARPS, ITEMS, 32]: a warp has consecutive elements, and takes 32 of them at a time, one a
lane. Lanes of equal digits find each other by votes, one for each bit of a digit. Each warp has a counter for each
digit, from which its elements take numbers. Source: A. Adinets and D. Merrill, "Onesweep: A Faster Least Significant
Digit Radix Sort for GPUs", 2022, arXiv 2206.01784.

Gluon cannot store to computed places of shared memory, so PTX does it here. Only ``thread_barrier`` orders these
accesses: Triton does not see them, and inserts no barriers for them.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, thread_barrier
from triplan.backends.triton.sorting.shared_kernels import DIGITS

#: Bytes of the counters of one warp.
COUNTERS = gl.constexpr(4 * DIGITS.value)
#: $0 = a mask of the lanes whose digit, $1, is this lane's: those that vote as it does on each bit.
ALIKE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 votes, same; mov.b32 same, 0xffffffff;"
    + "".join(
        f"""
    and.b32 votes, $1, {1 << bit};
    setp.ne.b32 p, votes, 0;
    vote.sync.ballot.b32 votes, p, 0xffffffff;
    @!p not.b32 votes, votes;
    and.b32 same, same, votes;"""
        for bit in range(8)
    )
    + """
    mov.b32 $0, same;
}"""
)
#: $0 = the number that a lane takes from the counter at address $1; the lanes of mask $2, which share the counter, take
#: consecutive ones. All lanes read before the highest one of each mask writes, and it writes before they read again.
COUNT = gl.constexpr("""{
    .reg .pred p;
    .reg .b32 lanes, before, after;
    ld.shared.b32 before, [$1];
    mov.u32 lanes, %lanemask_lt;
    and.b32 lanes, lanes, $2;
    popc.b32 lanes, lanes;
    add.u32 $0, before, lanes;
    add.u32 after, $0, 1;
    mov.u32 lanes, %lanemask_gt;
    and.b32 lanes, lanes, $2;
    setp.eq.u32 p, lanes, 0;
    bar.warp.sync 0xffffffff;
    @p st.shared.b32 [$1], after;
    bar.warp.sync 0xffffffff;
}""")


@gluon.constexpr_function
def tile_layout(WARPS, ITEMS):
    """Of [WARPS, ITEMS, 32]."""
    return gl.BlockedLayout([1, ITEMS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def counter_layout(WARPS):
    """Of [WARPS, DIGITS]: a thread holds all counters of its digits."""
    return gl.BlockedLayout([WARPS, DIGITS.value // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])


@gluon.constexpr_function
def digit_layout(WARPS):
    """Of [DIGITS]."""
    return gl.BlockedLayout([DIGITS.value // (32 * WARPS)], [32], [WARPS], [0])


@gluon.constexpr_function
def allocate_asm(nbytes):
    return f"{{ .shared .align 16 .b8 bytes[{nbytes}]; mov.u32 $0, bytes; }}"


@gluon.jit
def allocate_shared(BYTES: gl.constexpr):
    """The address (i32) of BYTES bytes of shared memory. Call it once a kernel: each call allocates."""
    return gl.inline_asm_elementwise(allocate_asm(BYTES), "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_shared(at, BITS: gl.constexpr = 32):
    """The integers of BITS bits at the addresses ``at``."""
    if BITS == 64:
        found = gl.inline_asm_elementwise("ld.shared.b64 $0, [$1];", "=l,r", [at], gl.int64, is_pure=False, pack=1)
    else:
        found = gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], gl.int32, is_pure=False, pack=1)
    return found


@gluon.jit
def store_shared(at, value):
    """Store ``value`` (i32 or i64) at the addresses ``at``."""
    if value.dtype.primitive_bitwidth == 64:
        gl.inline_asm_elementwise(
            "st.shared.b64 [$1], $2; mov.u32 $0, 0;", "=r,r,l", [at, value], gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [at, value], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def lanes_alike(digit):
    """Masks of the lanes of a warp that hold the same ``digit``, of 8 bits."""
    return gl.inline_asm_elementwise(ALIKE, "=r,r", [digit], gl.int32, is_pure=False, pack=1)


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def lanes_of(WARPS: gl.constexpr, ITEMS: gl.constexpr):
    """(The warp of each element, [WARPS, 1, 1]; places in the tile, [WARPS, ITEMS, 32])."""
    LAYOUT: gl.constexpr = tile_layout(WARPS, ITEMS)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    item = gl.arange(0, ITEMS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    return warp, (warp * ITEMS + item) * 32 + lane


@gluon.jit
def ranked(digit, warp, counters, WARPS: gl.constexpr):
    """(the rank of each element in the order of digits, stably; for each digit its first rank; its number of elements).

    digit: [WARPS, ITEMS, 32] of i32; counters: the address of WARPS * COUNTERS bytes, unused since the last barrier.
    """
    LAYOUT: gl.constexpr = counter_layout(WARPS)
    of_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    of_digit = gl.arange(0, DIGITS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = counters + of_warp * COUNTERS + of_digit * 4
    store_shared(at, at * 0)
    same = lanes_alike(digit)
    thread_barrier()
    counter = counters + warp * COUNTERS + digit * 4
    number = gl.inline_asm_elementwise(COUNT, "=&r,r,r", [counter, same], gl.int32, is_pure=False, pack=1)
    thread_barrier()
    counted = load_shared(at)
    upto = gl.associative_scan(counted, 0, added)
    total = gl.convert_layout(gl.sum(counted, 0), digit_layout(WARPS))
    first = gl.associative_scan(total, 0, added) - total
    store_shared(at, gl.convert_layout(first, gl.SliceLayout(0, LAYOUT))[None, :] + upto - counted)
    thread_barrier()
    return number + load_shared(counter), first, total


@gluon.jit
def exchanged(value, rank, place, buffer):
    """For each place of the tile the ``value`` whose rank it is. buffer: the address of TILE words of its width."""
    BYTES: gl.constexpr = value.dtype.primitive_bitwidth // 8
    store_shared(buffer + rank * BYTES, value)
    thread_barrier()
    return load_shared(buffer + place * BYTES, 8 * BYTES)
