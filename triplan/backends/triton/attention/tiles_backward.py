"""Kernel ``tiles`` of the backward op: dq by tiles of queries, then dk and dv by tiles of keys; no atomics."""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.attention import arguments, tiles
from triplan.backends.triton.attention.arguments import (
    Choice,
    Tile,
    arithmetic,
    columns_of,
    constants,
    has_edge,
    tiles_of_rows,
)
from triplan.backends.triton.attention.costs import Pace, backward_us
from triplan.backends.triton.attention.entries import pointers_entry
from triplan.backends.triton.attention.tiles_backward_kernels import attention_dkdv_kernel, attention_dq_kernel
from triplan.backends.triton.common import card
from triplan.descriptors import AttentionBackwardDescriptor, packed_strides
from triplan.sku import Support, Target

#: Of the entry and of its numerics ids.
VERSION = 9
#: As those of the forward op, but operands of a step are loaded before it. Of parts and f64 from a few problems each:
#: steps of parts wait for one thing after another, so that they take about as long with more queries or keys.
PACES = {
    "half": Pace(0.56, 0.0, 261.0, loads=2.85e4),
    "tf32": replace(tiles.PACES["tf32"], loads=2e4),
    "parts": Pace(0.0, 3.8, 74.0, together=1.18, loads=1e5),
    "scalar": Pace(2.4, 0.7, 14.0, together=1.65),
}
#: (tile of dq, tile of dk and dv), chosen as the forward op's, but for parts of heads wider than 32: there steps wait
#: so long that instructions cost less than more steps. On Hopper these spill all the same: up to 280 bytes of heads of
#: up to 128, 640 with some masks or where elements are loaded one by one, and 5 KB of wider heads. Of four
#: to six tiles of dq, and of dk and dv, each was the fastest on an H200, or nearly, by a run that is not published.
#: Those of f64 were the fastest of three to seven there, and of two for dq of heads from 129 to 192 wide, of which two
#: programs share a multiprocessor. They read shared memory least often, by their machine code: with four warps along
#: 32 keys (or queries) no two multiply the same. Of heads wider than 128 on Hopper they spill up to 3 KB,
#: most of it before and after their loops.
TILES = Choice(
    usual={
        ("half", 64): (Tile(128, 64, 8, 2), Tile(32, 128, 8, 1)),
        ("half", 128): (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
        ("half", 256): (Tile(128, 32, 8, 2), Tile(32, 32, 8, 1)),
        ("tf32", 64): (Tile(64, 32, 4, 1, 256), Tile(32, 64, 8, 1, 256)),
        ("tf32", 128): (Tile(32, 16, 4, 1, 256), Tile(32, 64, 8, 1, 256)),
        ("tf32", 256): (Tile(16, 16, 4, 1, 256), Tile(16, 32, 8, 1, 256)),
        ("parts", 32): (Tile(64, 64, 4, 1, 32), Tile(32, 64, 4, 1, 32)),
        ("parts", 64): (Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)),
        ("parts", 128): (Tile(32, 32, 4, 1), Tile(64, 32, 8, 1)),
        ("parts", 256): (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
        ("scalar", 64): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ("scalar", 128): (Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
        ("scalar", 192): (Tile(16, 32, 4, 1, lean=True), Tile(32, 32, 4, 1)),
        ("scalar", 256): (Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    },
    dropout={
        ("half", 64): (Tile(64, 64, 8, 2), Tile(16, 128, 8, 1)),
        ("half", 256): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        ("tf32", 64): (Tile(64, 32, 8, 1, 256), Tile(32, 32, 8, 1, 256)),
        ("tf32", 128): (Tile(32, 16, 8, 1, 256), Tile(32, 32, 8, 1, 256)),
        ("parts", 64): (Tile(32, 32, 8, 1), Tile(16, 128, 8, 1)),
        ("parts", 128): (Tile(16, 16, 8, 1), Tile(16, 32, 8, 1)),
        ("parts", 256): (Tile(16, 64, 8, 1), Tile(32, 16, 8, 1)),
        ("scalar", 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        ("scalar", 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    sm80={
        ("half", 128): (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2, 128)),
        ("half", 256): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        ("parts", 64): (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
        ("parts", 128): (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
        ("parts", 256): (Tile(16, 64, 8, 1), Tile(32, 16, 8, 1)),
        ("scalar", 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
)


def programs_of(desc: AttentionBackwardDescriptor, target: Target) -> tuple[int, int]:
    of_queries, of_keys = TILES.of(desc, target)
    return (
        tiles_of_rows(desc, desc.queries, of_queries.queries) * desc.batch * desc.heads,
        tiles_of_rows(desc, desc.keys, of_keys.keys) * desc.batch * desc.key_heads,
    )


def supports(desc: AttentionBackwardDescriptor, target: Target) -> Support:
    return arguments.supports(desc, lambda d: max(programs_of(d, target)))


def rank(desc: AttentionBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    dq, dkdv = TILES.of(desc, target)
    of_queries, of_keys = (dq.queries, dq.keys), (dkdv.keys, dkdv.queries)
    return backward_us(desc, target, of_queries, of_keys, columns_of(desc, dq), PACES[arithmetic(desc)])


def workspace(desc: AttentionBackwardDescriptor, target: Target) -> int:
    """Bytes of sum(dout * out) for each query; at least one element, so that kernels get an address."""
    lse = desc.operand("lse")
    return max(lse.nbytes, lse.element.itemsize if desc.operand("dk").numel else 0)


@pointers_entry(
    AttentionBackwardDescriptor,
    name="tiles",
    supports=supports,
    rank=rank,
    numerics=lambda desc: tiles.numerics(desc, TILES, VERSION),
    priority=2,  # after wgmma and wgmma_stored, which give other bits
    version=VERSION,
    workspace=workspace,
)
def tiles_backward(desc: AttentionBackwardDescriptor, target: Target) -> list[Launch]:
    of_queries, of_keys = TILES.of(desc, target)
    lse = desc.operand("lse")
    known = packed_strides(lse.shape)
    delta: dict[str, Arg] = {
        "delta": Scratch(0, lse.element),
        "delta_strides": tuple(Int(s, wide=True) for s in known),
    }
    # Of tf32, by wgmma. Where it reads two layouts at an address in shared memory, ptxas 12.8, which Triton 3.6 brings,
    # can compute the descriptors of one from registers that nothing writes: so of values of up to 16 elements.
    alike = arithmetic(desc) == "tf32"
    found = []
    if lse.numel:
        found.append(
            Launch(
                attention_dq_kernel,
                programs_of(desc, target)[0],
                {**arguments.arguments(desc, attention_dq_kernel), **delta},
                {**constants(desc, of_queries, alike), "EDGE": has_edge(desc, of_queries), "LEAN": of_queries.lean},
                num_warps=of_queries.warps,
                num_stages=of_queries.stages,
                max_registers=card.MAX_THREAD_REGISTERS,
            )
        )
    if desc.operand("dk").numel:
        found.append(
            Launch(
                attention_dkdv_kernel,
                programs_of(desc, target)[1],
                {**arguments.arguments(desc, attention_dkdv_kernel), **delta},
                constants(desc, of_keys, alike),
                num_warps=of_keys.warps,
                num_stages=of_keys.stages,
                max_registers=card.MAX_THREAD_REGISTERS,
            )
        )
    return found
