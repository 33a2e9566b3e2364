"""The adjoint of a matrix product by TMA and wgmma, on Hopper: both products in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

from triplan.backends.runtime.launch import Arg, Int, Launch, Scalar
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.gemm import backward as launching
from triplan.backends.triton.gemm import launches as gemm_launch
from triplan.backends.triton.gemm import wgmma as gemm_wgmma
from triplan.backends.triton.gemm import wgmma_backward_kernels as kernels
from triplan.backends.triton.gemm.backward import Product
from triplan.backends.triton.gemm.tiles_backward import guarantee, layout
from triplan.backends.triton.gemm.wgmma import Ring
from triplan.descriptors import GemmBackwardDescriptor, Operand
from triplan.sku import SUPPORTED, ArchSku, ElementKind, Support, Target

#: Bytes a microsecond in which a program sums columns: what the copies of a ring bring (a guess until measured).
SUMMED_PER_US = 9.0e4
#: How much longer tiles of fewer columns take than in one product, as each product has an operand that lies across: in
#: the committed runs of ``python -m bench gemm --sweep`` those of 256 were the fastest at 2048 and 4096, not at 8192.
NARROW = 1.05
#: Rows of tiles dealt together: fewer than of one product, as each has an operand that lies across.
GROUP_M = 4


def rings_of(desc: GemmBackwardDescriptor, target: Target) -> tuple[Ring, ...]:
    """The rings that fit ``target``."""
    product = next(iter(launching.products(desc).values()))
    return tuple(replace(r, group=GROUP_M) for r in gemm_wgmma.rings_of(product.desc, target, specialised=True))


def _tiles(p: Product, ring: Ring) -> int:
    return -(-p.desc.m // 128) * -(-p.desc.n // ring.n)


def sums_beside(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> bool:
    """Whether the columns are summed by the launch of the products, on multiprocessors that its last tiles leave over.

    So they are if it deals both products, with warpgroups that share its tiles, dc's rows and dbias are contiguous, as
    many are left over as there are strips, and a strip takes no longer than a tile.
    """
    pair = list(launching.products(desc).values())
    if not desc.wants_dbias or len(pair) < 2 or ring.turns or not _contiguous(desc, "dbias"):
        return False
    if gemm_launch.leading(desc.operand("dc"))[0] != 1:
        return False
    left_over = -sum(_tiles(p, ring) for p in pair) % max(target.sm_count, 1)
    tile_us = gemm_wgmma.tile_us(ring, min(p.desc.k for p in pair))
    strip_us = desc.m * ring.n * desc.element.itemsize / SUMMED_PER_US
    return -(-desc.n // ring.n) <= left_over and strip_us <= tile_us


def _contiguous(desc: GemmBackwardDescriptor, name: str) -> bool:
    o = desc.operand(name)
    return o.layout.packed or o.layout.unit_axis == 0


def ring_us(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds of all launches with this ring."""
    pair = list(launching.products(desc).values())
    sms = max(target.sm_count, 1)
    if len(pair) < 2:
        return gemm_wgmma.ring_us(pair[0].desc, ring, target) + launching.sum_us(desc)
    one, two = (gemm_wgmma.ring_us(p.desc, ring, target) for p in pair)
    # Each alone ends in a wave that is not full; together in one such wave.
    apart = sum(math.ceil(_tiles(p, ring) / sms) for p in pair)
    together = math.ceil(sum(_tiles(p, ring) for p in pair) / sms)
    narrow = ring.n <= 128 and any(gemm_wgmma.is_short(p.desc) for p in pair)
    products_us = (one + two) * together / max(apart, 1) * (NARROW if narrow else 1.0)
    return products_us + (0.0 if sums_beside(desc, ring, target) else launching.sum_us(desc))


@lru_cache(maxsize=4096)
def chosen_ring(desc: GemmBackwardDescriptor, target: Target) -> Ring:
    """The cheapest ring."""
    return min(rings_of(desc, target), key=lambda r: (ring_us(desc, r, target), r.n))


def pair_launch(desc: GemmBackwardDescriptor, ring: Ring, target: Target, sums: bool) -> Launch:
    """Both products, those of the longer sums first, and with them the ``sums`` of columns."""
    pair = sorted(launching.products(desc).values(), key=lambda p: -p.desc.k)
    args: dict[str, Arg] = {}
    known: dict[str, bool] = {}
    for i, p in zip("12", pair, strict=True):
        x, y = p.desc.operand("a"), p.desc.operand("b")
        x_rows, y_rows = gemm_launch.leading(x)[0] == 1, gemm_launch.leading(y)[0] == 1
        maps = {
            "x": gemm_wgmma.tensor_map("a", x.element, ring.rows, ring.k, not x_rows),
            "y": gemm_wgmma.tensor_map("b", y.element, ring.k, ring.n, not y_rows),
            "c": gemm_wgmma.tensor_map("c", p.desc.out, ring.rows, ring.part, False),
        }
        args |= {f"{name}{i}": p.argument(tensor_map) for name, tensor_map in maps.items()}
        args |= {f"m{i}": Int(p.desc.m), f"n{i}": Int(p.desc.n), f"k{i}": Int(p.desc.k)}
        known |= {f"X{i}_ROWS": x_rows, f"Y{i}_ROWS": y_rows}
    args |= {"alpha": Scalar("alpha", ElementKind.F32, 1.0), "group_m": Int(ring.group)}
    args |= dict.fromkeys(("summed", "sums", "rows", "columns"))
    items = sum(_tiles(p, ring) for p in pair)
    if sums:
        dc = desc.operand("dc")
        args |= {
            "summed": gemm_wgmma.tensor_map("dc", dc.element, ring.k, ring.n // 2, False),
            "sums": gemm_launch.pointer(desc.operand("dbias")),
            "rows": Int(desc.m),
            "columns": Int(desc.n),
        }
        items += -(-desc.n // ring.n)
    return Launch(
        kernels.wgmma_pair_kernel,
        max(min(items, target.sm_count), 1),
        args,
        {
            **known,
            "PIECES": ring.pieces,
            "BUFFERS": ring.buffers,
            "BLOCK_N": ring.n,
            "BLOCK_K": ring.k,
            "STAGES": ring.stages,
        },
        num_warps=4,
        overlaps=True,
    )


def wgmma_launches(desc: GemmBackwardDescriptor, ring: Ring, target: Target, beside: bool = True) -> list[Launch]:
    """All launches with one ring: both products in one, or the one that is wanted as ``gemm`` has it.

    ``beside``: whether the columns may be summed by the same launch.
    """
    pair = list(launching.products(desc).values())
    beside = beside and sums_beside(desc, ring, target)
    if len(pair) == 2:
        found = [pair_launch(desc, ring, target, beside)]
    else:
        found = [pair[0].recast(x) for x in gemm_wgmma.wgmma_launch(pair[0].desc, ring, target)]
    return found if beside else [*found, *launching.sum_launches(desc)]


# --- the row ---


def _fits_maps(desc: GemmBackwardDescriptor, o: Operand) -> str:
    """What keeps TMA from a matrix; empty if nothing does."""
    if reason := gemm_wgmma.fits_maps(desc, o.name):
        return reason
    unit, _ = gemm_launch.leading(o)
    # TMA writes a row to the next 16-byte boundary.
    if unit is not None and o.shape[unit] % gemm_launch.vector(o.element.itemsize):
        return f"{o.name} has lines of {o.shape[unit]} elements, no multiple of 16 bytes"
    return ""


def _applies(desc: GemmBackwardDescriptor, target: Target) -> Support:
    if not (desc.wants_da or desc.wants_db):
        return Support.no("neither da nor db is wanted: there is nothing to multiply")
    if min(desc.m, desc.n, desc.k) == 0:
        return Support.no(f"m, n, k = {desc.m}, {desc.n}, {desc.k}: TMA maps no empty matrix")
    matrices = [o for o in desc.operands() if len(o.shape) == 2]
    if reason := next((reason for o in matrices if (reason := _fits_maps(desc, o))), ""):
        return Support.no(f"reads and writes by TMA: {reason}")
    refused = (s for p in launching.products(desc).values() if not (s := gemm_wgmma.wgmma_applies(p.desc, target)))
    return next(refused, SUPPORTED)


def _rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    return ring_us(desc, chosen_ring(desc, target), target)


def _roundings(desc: GemmBackwardDescriptor) -> int:
    # Beside the products: sums of 64 rows, one after the other. The target decides which it is.
    return max(-(-desc.m // 64) + 64, launching.sum_roundings(desc))


def configurations(desc: GemmBackwardDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each ring, with the sums of columns beside the products where they can be, and apart."""
    found = {}
    for ring in rings_of(desc, target):
        build = partial(wgmma_launches, desc, ring, target)
        cost, workspace = ring_us(desc, ring, target), workspace_of(desc, ring, target)
        found[str(ring)] = Configuration(cost, build, workspace)
        if sums_beside(desc, ring, target):
            apart = partial(build, beside=False)
            cost += launching.sum_us(desc)
            found[f"{ring}, sums apart"] = Configuration(cost, apart, launching.sum_workspace(desc))
    return found


def workspace_of(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> int:
    """Bytes that the launches with this ring need."""
    return 0 if sums_beside(desc, ring, target) else launching.sum_workspace(desc)


def _workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    return workspace_of(desc, chosen_ring(desc, target), target)


@kernel(
    op="gemm_backward",
    name="wgmma",
    elements=("f16", "bf16"),
    archs=(ArchSku.SM90A,),
    features=("gluon", "tma"),
    interpretable=False,
    supports=_applies,
    rank=_rank,
    workspace=_workspace,
    guarantee=partial(guarantee, _roundings),
    layout=layout,
    configurations=configurations,
)
def wgmma(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return wgmma_launches(desc, chosen_ring(desc, target), target)
