"""The kernel table's rows for matrix products by TMA and wgmma, on Hopper.

``wgmma`` has warps that only load, and deals its tiles to as many programs as multiprocessors; ``wgmma_tiles`` does one
tile a program with warps that do both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from triplan.backends.launch import Int, Launch, Scalar, TensorMap
from triplan.backends.table import kernel
from triplan.backends.triton import gemm_wgmma_kernels as kernels
from triplan.backends.triton.gemm import guarantee, layout
from triplan.backends.triton.gemm_launch import BYTES_PER_US, GROUP_M, LAUNCH_US, leading, pointer, vector
from triplan.backends.triton.gluon_names import gl
from triplan.descriptors import MatrixProductDescriptor, MultiplyingDescriptor
from triplan.sku import SUPPORTED, ArchSku, ElementKind, Support, Target


@dataclass(frozen=True, slots=True)
class Ring:
    """Columns of a tile of 128 rows, extent of a step of k, slots of the ring that steps go through, and how many rows
    of tiles are dealt together."""

    n: int
    k: int
    stages: int
    group: int = GROUP_M

    def __str__(self) -> str:
        return f"128x{self.n}x{self.k} s{self.stages} g{self.group}"

    def shared_bytes(self, out_itemsize: int) -> int:
        """Of a ring of 2-byte elements, half a tile of C, and barriers."""
        return (128 + self.n) * self.k * 2 * self.stages + 128 * (self.n // 2) * out_itemsize + 1024


#: Multiplications and additions a microsecond and multiprocessor, in millions, by columns of a tile; and bytes that TMA
#: brings to each multiprocessor in a microsecond: guesses until measured, as in ``gemm_launch``.
MFLOP = {256: 5.6, 128: 4.7, 64: 3.0}
FED_BY_TMA = 9.0e4
RINGS = (Ring(256, 64, 4), Ring(256, 64, 3), Ring(128, 64, 6), Ring(128, 64, 4), Ring(64, 64, 6))


def rings_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Ring, ...]:
    """The rings that fit ``target``; those of 256 columns have no registers for an error function."""
    most = 128 if desc.activation == "gelu" else 256
    return tuple(r for r in RINGS if r.n <= most and r.shared_bytes(desc.out.itemsize) <= target.shared_memory)


def ring_us(desc: MatrixProductDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds: waves of tiles, each fed from the L2 cache, and the first operands' way."""
    each = max(2 * 128 * ring.n * desc.k / (MFLOP[ring.n] * 1e6), (128 + ring.n) * desc.k * 2 / FED_BY_TMA)
    waves = math.ceil(-(-desc.m // 128) * -(-desc.n // ring.n) / max(target.sm_count, 1))
    nbytes = 2 * desc.k * (desc.m + desc.n) + desc.out.itemsize * desc.m * desc.n
    # A deeper ring of the same tile is never dearer.
    return LAUNCH_US + 1.0 + max(waves * each, nbytes / BYTES_PER_US) + 0.1 / ring.stages


@lru_cache(maxsize=4096)
def chosen_ring(desc: MatrixProductDescriptor, target: Target) -> Ring:
    """The cheapest ring."""
    return min(rings_of(desc, target), key=lambda r: (ring_us(desc, r, target), r.n))


ACTIVATIONS = {
    "identity": kernels.identity,
    "relu": kernels.relu,
    "gelu": kernels.gelu,
    "silu": kernels.silu,
}
_GL = {ElementKind.F16: gl.float16, ElementKind.BF16: gl.bfloat16, ElementKind.F32: gl.float32}


@lru_cache(maxsize=256)
def tensor_map(name: str, element: ElementKind, rows: int, columns: int, transposed: bool) -> TensorMap:
    """The map of blocks of ``rows`` by ``columns`` of a matrix, of its transpose if that is what memory holds."""
    block = (columns, rows) if transposed else (rows, columns)
    shared = gl.NVMMASharedLayout.get_default_for(list(block), _GL[element])
    return TensorMap(name, element, block, transposed, shared)


def wgmma_launch(desc: MatrixProductDescriptor, ring: Ring, target: Target, specialised: bool = True) -> list[Launch]:
    """``wgmma_kernel`` on as many programs as there are multiprocessors, or tiles; or ``wgmma_tiles_kernel``."""
    if desc.m == 0 or desc.n == 0:
        return []
    a, b = desc.operand("a"), desc.operand("b")
    a_rows, b_rows = leading(a)[0] == 1, leading(b)[0] == 1
    tiles = -(-desc.m // 128) * -(-desc.n // ring.n)
    # Each of two warpgroups loads and stores for itself, or both together.
    rows = 64 if specialised else 128
    return [
        Launch(
            kernels.wgmma_kernel if specialised else kernels.wgmma_tiles_kernel,
            min(tiles, target.sm_count) if specialised else tiles,
            {
                "a": tensor_map("a", a.element, rows, ring.k, not a_rows),
                "b": tensor_map("b", b.element, ring.k, ring.n, not b_rows),
                "c": tensor_map("c", desc.out, rows, ring.n // 2, False),
                "bias": pointer(desc.operand("bias")) if desc.has_bias else None,
                "alpha": Scalar("alpha", ElementKind.F32, 1.0),
                "m": Int(desc.m),
                "n": Int(desc.n),
                "k": Int(desc.k),
                "group_m": Int(ring.group),
            },
            {
                "A_ROWS": a_rows,
                "B_ROWS": b_rows,
                "BLOCK_N": ring.n,
                "BLOCK_K": ring.k,
                "STAGES": ring.stages,
                "ACTIVATION": ACTIVATIONS[desc.activation],
            },
            num_warps=4 if specialised else 8,
        )
    ]


# --- rows ---


def fits_maps(desc: MultiplyingDescriptor, name: str) -> str:
    """What keeps TMA from a matrix; empty if nothing does."""
    o = desc.operand(name)
    unit, multiple = leading(o)
    if unit is None or o.layout.zero_axes:
        return f"{name} is promised no unit stride"
    if name == "c" and unit != 1:
        return "c is column-major"
    if multiple % vector(o.element.itemsize) or o.alignment < 16:
        return f"{name} is not promised to be aligned to 16 bytes, its leading dimension among it"
    return ""


def wgmma_applies(desc: MatrixProductDescriptor, target: Target) -> Support:
    if desc.reads_c0:
        return Support.no("does not read c0")
    if desc.k == 0:
        return Support.no("k is 0, and TMA maps no empty matrix")
    if max(desc.m, desc.n, desc.k) >= 2**31 - 2**9:
        return Support.no("TMA counts places in 31 bits")
    if desc.has_bias and not (desc.operand("bias").layout.packed or desc.operand("bias").layout.unit_axis == 0):
        return Support.no("bias is promised no unit stride")
    reason = next((reason for name in "abc" if (reason := fits_maps(desc, name))), "")
    return Support.no(f"reads and writes by TMA: {reason}") if reason else SUPPORTED


def wgmma_rank(desc: MatrixProductDescriptor, target: Target) -> float:
    return ring_us(desc, chosen_ring(desc, target), target)


def wgmma_tiles_rank(desc: MatrixProductDescriptor, target: Target) -> float:
    # Nothing hides the first operands' way and the last result's.
    return 1.03 * wgmma_rank(desc, target)


_COMMON: dict[str, Any] = {
    "op": "gemm",
    "elements": ("f16", "bf16"),
    "archs": (ArchSku.SM90A,),
    "features": ("gluon", "tma"),
    "interpretable": False,
    "supports": wgmma_applies,
    "guarantee": guarantee,
    "layout": layout,
}


@kernel(name="wgmma", rank=wgmma_rank, **_COMMON)
def wgmma(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return wgmma_launch(desc, chosen_ring(desc, target), target)


@kernel(name="wgmma_tiles", rank=wgmma_tiles_rank, **_COMMON)
def wgmma_tiles(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return wgmma_launch(desc, chosen_ring(desc, target), target, specialised=False)
