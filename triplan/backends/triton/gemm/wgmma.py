"""The kernel table's rows for matrix products by TMA and wgmma, on Hopper.

``wgmma`` has warps that only load, and deals its tiles to as many programs as multiprocessors; ``wgmma_tiles`` does one
tile a program with warps that do both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Int, Launch, Scalar, TensorMap
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.gemm import wgmma_kernels as kernels
from triplan.backends.triton.gemm.costs import together
from triplan.backends.triton.gemm.launches import COUNTED, GROUP_M, leading, pointer, vector
from triplan.backends.triton.gemm.tiles import guarantee, layout
from triplan.backends.triton.gemm.wgmma_tiles_kernels import wgmma_tiles_kernel
from triplan.descriptors import MatrixProductDescriptor, MultiplyingDescriptor
from triplan.sku import SUPPORTED, ArchSku, ElementKind, Support, Target


@dataclass(frozen=True, slots=True)
class Ring:
    """Rows and columns of a tile, extent of a step of k, slots of the ring that steps go through, whether it has a warp
    of its own that loads (``specialised``), whether two warpgroups then take tiles in ``turns``, and how many rows of
    tiles are dealt together."""

    m: int
    n: int
    k: int
    stages: int
    specialised: bool
    turns: bool = False
    group: int = GROUP_M

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} s{self.stages} g{self.group}{' turns' if self.turns else ''}"

    @property
    def part(self) -> int:
        """Columns of C that one buffer holds."""
        return min(self.n, 64)

    @property
    def pieces(self) -> int:
        """Warpgroups that share a tile and write their own rows of it."""
        return 2 if self.specialised and not self.turns else 1

    @property
    def rows(self) -> int:
        """Rows of a piece."""
        return self.m // self.pieces

    @property
    def accumulators(self) -> int:
        """Of a thread: of a warpgroup's for each piece, or two for each row of a tile."""
        return self.rows * self.n // 128 if self.specialised else self.n // 2

    @property
    def buffers(self) -> int:
        """Of C, for each warpgroup, if they have their own."""
        return min(self.n // self.part, 1 if self.turns else 2)

    def shared_bytes(self, out_itemsize: int) -> int:
        """Of a ring of 2-byte elements, buffers of C, barriers and a tile of bias."""
        buffers = 2 * self.rows * self.part * self.buffers * out_itemsize if self.specialised else 0
        return (self.m + self.n) * self.k * 2 * self.stages + buffers + 3072

    def fits(self, desc: MatrixProductDescriptor, target: Target) -> bool:
        # There are no registers for an error function; nor, if f32 leaves, under the newest Triton for an exponential.
        wide = self.specialised and desc.out.itemsize > 2
        most = 64 if desc.activation == "gelu" or (desc.activation == "silu" and wide) else 128
        # Without buffers of their own, results go through B's ring.
        staged = self.specialised or self.stages * self.k * 2 >= self.m * desc.out.itemsize
        return self.accumulators <= most and staged and self.shared_bytes(desc.out.itemsize) <= target.shared_memory


#: The rings, and of each: operations (multiplications, additions) that a multiprocessor does in a microsecond while all
#: are busy, and bytes of operands that all of them stream in one, both in millions. Fitted, as what follows, by least
#: squares of logarithms to the rings' times in the committed runs of ``python -m bench gemm --sweep``; then moved by
#: hand so that what measured fastest is taken: the first ring in turns and ``AROUND_US`` of a loading warp for products
#: of one round of tiles and batches, what one of 128 columns multiplies for cubes of 4096, and what that of 64 by 64
#: streams for 64 rows. ``tests/families/gemm/test_costs.py`` holds the choices.
RATES = {
    Ring(128, 256, 64, 4, True, group=4): (5.20, 3.96),
    Ring(128, 256, 64, 3, True): (5.18, 3.96),
    Ring(128, 128, 64, 6, True): (5.16, 3.96),
    Ring(128, 128, 64, 4, True): (5.00, 3.79),
    Ring(128, 64, 64, 6, True): (3.68, 2.44),
    Ring(128, 128, 64, 6, True, turns=True): (5.34, 3.98),
    Ring(128, 128, 64, 5, True, turns=True): (5.33, 3.41),
    Ring(128, 128, 64, 4, True, turns=True): (5.05, 3.18),
    Ring(128, 256, 64, 4, False): (5.10, 3.96),
    Ring(128, 256, 64, 3, False): (5.09, 3.96),
    Ring(128, 128, 64, 6, False): (5.10, 3.64),
    Ring(128, 128, 64, 4, False): (4.80, 3.18),
    Ring(128, 64, 64, 6, False): (3.25, 1.93),
    Ring(64, 128, 64, 8, False): (4.15, 3.96),
    Ring(64, 128, 128, 4, False): (4.01, 3.96),
    Ring(64, 64, 128, 6, False): (2.84, 4.40),
    Ring(64, 32, 128, 8, False): (2.17, 3.22),
}
RINGS = tuple(RATES)
_RATES = {replace(ring, group=GROUP_M): rates for ring, rates in RATES.items()}
#: Microseconds around the tiles, by whether a warp of its own loads.
AROUND_US = {True: 2.8, False: 1.52}
#: How much two limits that are close to each other add.
POWER = 4.5
#: Operations from which on a product is taken to meet the card's power limit by itself, and how much longer rings in
#: turns multiply in shorter ones. Both by hand: with a bias, turns took 1.04 of addmm's speed at 4096 in a committed
#: sweep, and 0.97 in the committed bench, when the card was cool; from 9e11 operations on they led in every run.
LONG, COOL = 5e11, 1.05
#: How much faster one multiprocessor multiplies alone (the card's power is shared), and how much slower operands stream
#: where none of a tile's rows lie within A.
ALONE, OUTSIDE = 0.48, 0.4


def rings_of(desc: MatrixProductDescriptor, target: Target, specialised: bool) -> tuple[Ring, ...]:
    """The rings that fit ``target``."""
    return tuple(r for r in RINGS if r.specialised == specialised and r.fits(desc, target))


def tiles_in(desc: MatrixProductDescriptor, ring: Ring) -> int:
    """Tiles of C, of all products."""
    return math.prod(desc.lead) * -(-desc.m // ring.m) * -(-desc.n // ring.n)


def tile_us(ring: Ring, k: int, busy: float = 1.0) -> float:
    """Estimated microseconds of one tile, while this share of the multiprocessors is busy."""
    operations, _ = _RATES[replace(ring, group=GROUP_M)]
    return 2 * ring.m * ring.n * k / (operations * 1e6 * (1 + ALONE * (1 - busy)))


def ring_us(desc: MatrixProductDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds: waves of tiles, or streams of operands, whichever is longer."""
    _, streamed = _RATES[replace(ring, group=GROUP_M)]
    batch, sms = math.prod(desc.lead), max(target.sm_count, 1)
    tiles = tiles_in(desc, ring)
    multiplying = math.ceil(tiles / sms) * tile_us(ring, desc.k, min(tiles / sms, 1.0))
    if ring.turns and is_short(desc):
        multiplying *= COOL
    nbytes = batch * (2 * desc.k * (desc.m + desc.n) + desc.out.itemsize * desc.m * desc.n)
    within = min(desc.m / ring.m, 1.0)
    streaming = nbytes / (streamed * 1e6 * (1 - OUTSIDE * (1 - within)))
    return AROUND_US[ring.specialised] + together(multiplying, streaming, power=POWER)


def is_short(desc: MatrixProductDescriptor) -> bool:
    """Whether products may be over before the card's power limit counts."""
    return 2 * math.prod(desc.lead) * desc.m * desc.n * desc.k < LONG


@lru_cache(maxsize=4096)
def chosen_ring(desc: MatrixProductDescriptor, target: Target, specialised: bool) -> Ring:
    """The cheapest ring."""
    return min(rings_of(desc, target, specialised), key=lambda r: (ring_us(desc, r, target), r.n))


ACTIVATIONS = {
    "identity": kernels.identity,
    "relu": kernels.relu,
    "gelu": kernels.gelu,
    "silu": kernels.silu,
}
_GL = {ElementKind.F16: gl.float16, ElementKind.BF16: gl.bfloat16, ElementKind.F32: gl.float32}


@lru_cache(maxsize=256)
def tensor_map(
    name: str, element: ElementKind, rows: int, columns: int, transposed: bool, batched: bool = False
) -> TensorMap:
    """The map of blocks of ``rows`` by ``columns`` of a matrix, of its transpose if that is what memory holds."""
    block: tuple[int, ...] = (columns, rows) if transposed else (rows, columns)
    block = (1, *block) if batched else block
    return TensorMap(name, element, block, transposed, gl.NVMMASharedLayout.get_default_for(list(block), _GL[element]))


def of_batch(desc: MatrixProductDescriptor, maps: dict[str, TensorMap]) -> dict[str, Any]:
    """Constexprs that say how a batch is read."""
    if not desc.lead:
        return dict.fromkeys(("A_EACH", "B_EACH", "A_SHARED", "B_SHARED", "C_SHARED"))
    shared = {
        f"{name.upper()}_SHARED": gl.NVMMASharedLayout.get_default_for(list(m.block[1:]), _GL[m.element])
        for name, m in maps.items()
    }
    return {**shared, **{f"{name.upper()}_EACH": int(0 not in desc.operand(name).layout.zero_axes) for name in "ab"}}


def wgmma_launch(desc: MatrixProductDescriptor, ring: Ring, target: Target) -> list[Launch]:
    """``wgmma_kernel`` on as many programs as there are multiprocessors, or tiles, if the ring is ``specialised``: two
    warpgroups that multiply and a warp that loads; else ``wgmma_tiles_kernel`` on a program for each tile."""
    if desc.operand("c").numel == 0:
        return []
    a, b = desc.operand("a"), desc.operand("b")
    a_rows, b_rows = leading(a)[0] == 1, leading(b)[0] == 1
    tiles = tiles_in(desc, ring)
    rows, batched = ring.rows, bool(desc.lead)
    maps = {
        "a": tensor_map("a", a.element, rows, ring.k, not a_rows, batched),
        "b": tensor_map("b", b.element, ring.k, ring.n, not b_rows, batched),
        "c": tensor_map("c", desc.out, rows, ring.part, False, batched),
    }
    return [
        Launch(
            kernels.wgmma_kernel if ring.specialised else wgmma_tiles_kernel,
            min(tiles, target.sm_count) if ring.specialised else tiles,
            {
                **maps,
                "bias": pointer(desc.operand("bias")) if desc.has_bias else None,
                "alpha": Scalar("alpha", ElementKind.F32, 1.0),
                "m": Int(desc.m),
                "n": Int(desc.n),
                "k": Int(desc.k),
                "group_m": Int(ring.group),
                **({"batch": Int(math.prod(desc.lead))} if ring.specialised else {}),
            },
            {
                "A_ROWS": a_rows,
                "B_ROWS": b_rows,
                "BLOCK_N": ring.n,
                "BLOCK_K": ring.k,
                "STAGES": ring.stages,
                "ACTIVATION": ACTIVATIONS[desc.activation],
                **({} if ring.specialised else {"BLOCK_M": ring.m}),
                **({"PIECES": ring.pieces, "BUFFERS": ring.buffers} if ring.specialised else {}),
                **(of_batch(desc, maps) if ring.specialised else {}),
            },
            num_warps=4 if ring.specialised else ring.m // 16,
            overlaps=True,
        )
    ]


# --- rows ---


def fits_maps(desc: MultiplyingDescriptor, name: str) -> str:
    """What keeps TMA from a matrix; empty if nothing does."""
    o = desc.operand(name)
    unit, multiple = leading(o)
    if (
        unit is None
        or any(axis >= len(o.shape) - 2 for axis in o.layout.zero_axes)
        or (name == "c" and o.layout.zero_axes)
    ):
        return f"{name} is promised no unit stride"
    if name == "c" and unit != 1:
        return "c is column-major"
    if multiple % vector(o.element.itemsize) or o.alignment < 16:
        return f"{name} is not promised to be aligned to 16 bytes, its leading dimension among it"
    return ""


def wgmma_applies(desc: MatrixProductDescriptor, target: Target) -> Support:
    if desc.saves_pre:
        return Support.no("does not write pre")
    if desc.reads_c0:
        return Support.no("does not read c0")
    if desc.k == 0:
        return Support.no("k is 0, and TMA maps no empty matrix")
    if max(desc.m, desc.n, desc.k) >= COUNTED:
        return Support.no("TMA counts places in 31 bits")
    if (most := max(tiles_in(desc, ring) for ring in RINGS)) >= COUNTED:
        return Support.no(f"c has up to {most} tiles, which are counted in 31 bits")
    if desc.has_bias and not (desc.operand("bias").layout.packed or desc.operand("bias").layout.unit_axis == 0):
        return Support.no("bias is promised no unit stride")
    reason = next((reason for name in "abc" if (reason := fits_maps(desc, name))), "")
    if reason:
        return Support.no(f"reads and writes by TMA: {reason}")
    if desc.n % vector(desc.out.itemsize):
        # The hardware writes rows of C up to the next 16 bytes (seen on an H200), into what lies between them.
        return Support.no(f"TMA writes 16 bytes at a time, and n is no multiple of {vector(desc.out.itemsize)}")
    return SUPPORTED


def wgmma_rank(desc: MatrixProductDescriptor, target: Target, specialised: bool) -> float:
    return ring_us(desc, chosen_ring(desc, target, specialised), target)


def ring_configurations(
    desc: MatrixProductDescriptor, target: Target, specialised: bool
) -> Mapping[str, Configuration]:
    return {
        str(ring): Configuration(ring_us(desc, ring, target), partial(wgmma_launch, desc, ring, target))
        for ring in rings_of(desc, target, specialised)
    }


def _of(specialised: bool) -> dict[str, Any]:
    return {
        "rank": partial(wgmma_rank, specialised=specialised),
        "configurations": partial(ring_configurations, specialised=specialised),
    }


_COMMON: dict[str, Any] = {
    "elements": ("f16", "bf16"),
    "archs": (ArchSku.SM90A,),
    "features": ("gluon", "tma"),
    "interpretable": False,
    "supports": wgmma_applies,
    "guarantee": guarantee,
    "layout": layout,
}


def wgmma(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return wgmma_launch(desc, chosen_ring(desc, target, True), target)


for _op in ("gemm", "batched_gemm"):
    kernel(op=_op, name="wgmma", **_of(specialised=True), **_COMMON)(wgmma)


@kernel(op="gemm", name="wgmma_tiles", **_of(specialised=False), **_COMMON)
def wgmma_tiles(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return wgmma_launch(desc, chosen_ring(desc, target, False), target)
