"""What the Hopper kernels share: tensor maps of the operands, and which problems TMA can read and write."""

from __future__ import annotations

import torch

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Arg, Int, TensorMap
from triplan.descriptors import Operand
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support
from triplan.sku.facts import fact

_GLUON_ELEMENT = {ElementKind.F16: gl.float16, ElementKind.BF16: gl.bfloat16, ElementKind.F32: gl.float32}
#: Queries or keys of a tile.
TILE = 128
#: Bytes of L2 cache that the heads whose tiles run at the same time may occupy.
SECTION_BYTES = 32 << 20
#: Programs for each head that read its operands at about the same time. Untuned.
NEAR = 4
#: What a tile costs besides its blocks, in blocks. Untuned.
OVERHEAD = 1.0
#: An earlier order is kept if its busiest program has at most this many times the least work. Untuned.
SLACK = 1.05
#: Sections of n of SIZES parts of what fits into the cache are tried, from all to half.
SIZES = 16
#: So many tiles for each program are balanced in any order, within a few per cent.
MANY_TURNS = 64
#: 16-bit elements in 16 bytes, the smallest unit that TMA moves: strides and rows must be multiples of it.
VECTOR = 8


@fact
def tensor_map(name: str, element: ElementKind, rows: int, width: int) -> TensorMap:
    """The tensor map of an operand (batch, row, head, element), in boxes of ``rows`` rows of one head."""
    block = (1, rows, 1, width)
    return TensorMap(
        name, element, block, shared=gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_ELEMENT[element])
    )


def width_of(desc: AttendingDescriptor) -> int:
    """Elements of a head in shared memory, a multiple of 64. TMA fills columns beyond the head with 0."""
    return -(-max(desc.head_dim, desc.values) // 64) * 64


def shift_of(desc: AttendingDescriptor) -> int:
    """The position of query 0; 0 without a causal mask, when no position matters."""
    return desc.shift if desc.causal else 0


def is_invariant(desc: AttendingDescriptor) -> bool:
    """Whether ``supports`` holds for any number of queries (with ``align`` "end", that number moves query 0)."""
    return not (desc.causal and desc.align == "end")


def section_heads(desc: AttendingDescriptor, rows: int) -> int:
    """The power of two of heads whose two operands of ``rows`` rows fit into SECTION_BYTES together."""
    fitting = SECTION_BYTES // max(2 * rows * width_of(desc) * desc.element.itemsize, 1)
    return 1 << min(max(fitting, 1).bit_length() - 1, 20)


def order_of(
    tiles: int, heads: int, fitting: int, programs: int, causal: bool, in_turns: bool = False
) -> dict[str, Arg]:
    """``section`` and ``turning`` of ``numbered_tile`` for heads of ``tiles`` tiles.

    ``fitting``: heads of a section that fit into the L2 cache. ``causal``: each tile of a head is shorter than the one
    before; else all are alike. ``in_turns``: do not try sections that fit; the backward does not. Untuned.
    """
    section, turning = _balanced(tiles, heads, fitting, programs, in_turns) if causal else (fitting, 0)
    # (Not more heads than there are: the tiles of a section must fit into 32 bits.)
    return {"section": Int(min(section, heads)), "turning": Int(turning)}


@fact
def _balanced(tiles: int, heads: int, fitting: int, programs: int, in_turns: bool = False) -> tuple[int, int]:
    """The first order whose busiest program has at most SLACK times the least work that one of the orders reaches.

    The tiles of a program are ``programs`` apart. Where that is about a multiple of a section's tiles, one program has
    the longest tile of section after section: up to twice the mean work. Three orders are tried: the best sections that
    fit into the cache; sections of one head, reversed at every other turn; and all heads as one section, reversed
    likewise. The last reads operands more often, and is tried only if at least NEAR programs work on each head: these
    read neighbouring tiles at about the same time, so that most reads hit the cache.
    """
    if tiles * heads >= MANY_TURNS * programs:
        return (1, 1) if in_turns else (fitting, 0)

    def work(order: tuple[int, int]) -> float:
        return _longest(tiles, heads, order[0], programs, order[1])

    sections = {max(fitting * n // SIZES, 1): None for n in range(SIZES, SIZES // 2 - 1, -1)}
    fit = [] if in_turns else [min(((s, turning) for s in sections for turning in (0, 1)), key=work)]
    orders = [*fit, (1, 1), *([(heads, 1)] if programs >= NEAR * heads else [])]
    longest = [work(order) for order in orders]
    return next(order for order, work in zip(orders, longest, strict=True) if work <= SLACK * min(longest))


def _longest(tiles: int, heads: int, section: int, programs: int, turning: int) -> float:
    """Blocks of the busiest of ``programs``, if tile i of a head has ``tiles`` - i, and costs OVERHEAD more."""
    total = tiles * heads
    index = torch.arange(total)
    turn = index // programs
    if turning:
        end = (turn * programs + programs).clamp(max=total)
        index = torch.where(turn % 2 == 1, turn * programs + end - 1 - index, index)
    first = index // (tiles * section) * section
    tile = index % (tiles * section) // (heads - first).clamp(max=section)
    work = torch.zeros(-(-total // programs) * programs)
    work[:total] = tiles - tile + OVERHEAD
    return float(work.view(-1, programs).sum(0).max())


def unmappable(o: Operand) -> str:
    """Why TMA cannot map an operand; empty if it can."""
    if o.alignment < 16:
        return f"{o.name} is promised an alignment of {o.alignment} bytes; 16 are needed"
    if o.shape[-1] % VECTOR:
        return f"{o.name} has rows of {o.shape[-1]} elements; TMA needs a multiple of {VECTOR}"
    if o.layout.packed:
        return ""
    if o.layout.unit_axis != 3:
        return f"{o.name} is promised no unit stride along its last axis"
    if any(o.shape[axis] > 1 for axis in o.layout.zero_axes):
        return f"{o.name} has a stride of 0"
    if o.layout.stride_multiple % VECTOR:
        return f"{o.name} is promised stride_multiple={o.layout.stride_multiple}; a multiple of {VECTOR} is needed"
    return ""


def supports(desc: AttendingDescriptor, widest: int = 128) -> Support:
    """Whether the kernels implement all options of the problem, and TMA can read and write the operands. ``widest``:
    the elements of the widest head."""
    asked = {"a softcap": desc.softcap > 0, "a mask": desc.mask is not None}
    asked["a window"] = desc.window_left is not None or desc.window_right is not None
    asked["packed sequences"] = desc.sequences is not None
    asked["dropout"] = desc.dropout
    asked |= {name: any(o.name == name for o in desc.operands()) for name in ("slopes", "sink")}
    if missing := next((name for name, on in asked.items() if on), ""):
        return Support.no(f"has no {missing.removeprefix('a ')}")
    if max(desc.head_dim, desc.values) > widest:
        return Support.no(f"heads of {desc.head_dim} and {desc.values} elements; it holds up to {widest}")
    if desc.keys == 0:
        return Support.no("there are no keys, and TMA maps no empty tensor")
    if shift_of(desc) % TILE:
        return Support.no(f"the first query's position, {shift_of(desc)}, is not a multiple of {TILE}")
    if not desc.operand("lse").layout.packed:
        return Support.no("lse is not promised to be packed")
    mapped = (o for o in desc.operands() if len(o.shape) == 4)
    if reason := next((reason for o in mapped if (reason := unmappable(o))), ""):
        return Support.no(f"reads and writes by TMA: {reason}")
    return SUPPORTED
