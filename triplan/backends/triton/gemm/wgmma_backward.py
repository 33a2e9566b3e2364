"""Kernel ``wgmma`` of the backward op, on Hopper: both products in one launch, and perhaps the sums of columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from triplan.backends.runtime.launch import Arg, Int, Launch, Scalar
from triplan.backends.table import Configuration
from triplan.backends.triton.gemm import column_sums, rings, tma, wgmma, wgmma_backward_kernels as kernels
from triplan.backends.triton.gemm.arguments import pointer
from triplan.backends.triton.gemm.entries import BACKWARD, hopper_kernel
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import (
    backward_layout,
    is_contiguous,
    is_row_major,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.products import Product, gradient_products
from triplan.backends.triton.gemm.rings import Ring
from triplan.descriptors import GemmBackwardDescriptor, Operand
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Bytes per microsecond of dc whose columns one program sums: what the copies of its ring bring. Untuned.
SUM_BYTES_PER_US = 9.0e4
#: Rows per step of the sums within the launch of the products.
SUM_ROWS = 64
#: How much longer tiles of at most 128 columns take than in a single product: both products read one operand
#: transposed. In ``bench/results/gemm-*-sweep`` tiles of 256 columns were the fastest at 2048 and 4096, not
#: at 8192.
NARROW_FACTOR = 1.05
#: Rows of tiles scheduled together: fewer than in a single product, for the same reason. (In the sweep 16
#: are at most 1% faster up to 4096, and 2% slower at 8192.)
GROUP_M = 4
#: Tiles are dealt by ``few`` only if the busiest program then has less than this share of its work. Untuned.
WORTH = 0.97


def rings_of(desc: GemmBackwardDescriptor, target: Target) -> tuple[Ring, ...]:
    """The rings that suit ``desc`` and fit ``target``."""
    product = next(iter(gradient_products(desc).values()))
    return tuple(replace(r, group=GROUP_M) for r in rings.rings_of(product.desc, target, specialised=True))


def _strips(desc: GemmBackwardDescriptor, ring: Ring) -> int:
    """Strips of columns to be summed, each as wide as a tile."""
    return -(-desc.n // ring.n)


def sums_within(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> bool:
    """Whether the launch of the products sums the columns too, on multiprocessors that its last wave leaves idle.

    It does if both products are wanted, its warpgroups share their tiles, dc's rows and dbias are contiguous, each
    strip finds an idle multiprocessor, and a strip takes no longer than a tile.
    """
    pair = list(gradient_products(desc).values())
    if not desc.wants_dbias or len(pair) < 2 or ring.pingpong:
        return False
    if not (is_contiguous(desc.operand("dbias")) and is_row_major(desc.operand("dc"))):
        return False
    idle = -sum(rings.tiles_in(p.desc, ring) for p in pair) % max(target.sm_count, 1)
    strip_us = desc.m * ring.n * desc.element.itemsize / SUM_BYTES_PER_US
    return _strips(desc, ring) <= idle and strip_us <= rings.tile_us(ring, min(p.desc.k for p in pair))


def dealt(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> tuple[int, float]:
    """``few`` for the kernel's ``rest_of``, and the busiest program's work with it, divided by that with -1.

    With many rows, db has few tiles of many steps and da many tiles of few. Dealt one by one, a program that has a tile
    of db would take as many tiles of da as one that has none.
    """
    one, two = sorted((p.desc for p in gradient_products(desc).values()), key=lambda d: -d.k)
    long, short = rings.tiles_in(one, ring), rings.tiles_in(two, ring)
    programs = max(min(long + short, target.sm_count), 1)
    more, others = long % programs, programs - long % programs
    if more == 0 or sums_within(desc, ring, target):
        return -1, 1.0
    ratio = rings.tile_us(ring, one.k) / rings.tile_us(ring, two.k)
    few = max(math.floor((short + more * ratio) / programs - ratio), 0)
    before = long // programs * ratio
    found = before + max(ratio + few, math.ceil((short - more * few) / others))
    items = -(-(long + short) // programs)  # of program 0
    plain = before + max(ratio + items - long // programs - 1, -(-(short - others) // programs) + 1)
    return (few, found / plain) if found < WORTH * plain else (-1, 1.0)


def ring_us(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds of all launches with this ring."""
    pair = list(gradient_products(desc).values())
    sms = max(target.sm_count, 1)
    if len(pair) < 2:
        return rings.ring_us(pair[0].desc, ring, target) + column_sums.cost_us(desc)
    one, two = (rings.ring_us(p.desc, ring, target) for p in pair)
    # In separate launches each product ends in a partial wave; in one launch they share it.
    waves_separate = sum(math.ceil(rings.tiles_in(p.desc, ring) / sms) for p in pair)
    waves = math.ceil(sum(rings.tiles_in(p.desc, ring) for p in pair) / sms)
    narrow = ring.n <= 128 and any(rings.is_short(p.desc) for p in pair)
    products_us = (one + two) * waves / max(waves_separate, 1) * (NARROW_FACTOR if narrow else 1.0)
    products_us *= dealt(desc, ring, target)[1]
    return products_us + (0.0 if sums_within(desc, ring, target) else column_sums.cost_us(desc))


@fact
def cheapest_ring(desc: GemmBackwardDescriptor, target: Target) -> Ring:
    """The ring of the lowest estimate; of equal ones that of the narrowest tile."""
    return min(rings_of(desc, target), key=lambda r: (ring_us(desc, r, target), r.n))


def _product_arguments(p: Product, ring: Ring, i: str) -> tuple[dict[str, Arg], dict[str, object]]:
    """The arguments of ``wgmma_pair_kernel`` for product ``i`` (1 or 2), whose factors it calls x and y."""
    a, b, c = (p.argument(m) for m in tma.operand_maps(p.desc, ring).values())
    args: dict[str, Arg] = {f"x{i}": a, f"y{i}": b, f"c{i}": c}
    args |= {f"m{i}": Int(p.desc.m), f"n{i}": Int(p.desc.n), f"k{i}": Int(p.desc.k)}
    x_rows, y_rows = (is_row_major(p.desc.operand(name)) for name in "ab")
    return args, {f"X{i}_ROWS": x_rows, f"Y{i}_ROWS": y_rows}


def pair_launch(desc: GemmBackwardDescriptor, ring: Ring, target: Target, sums: bool) -> Launch:
    """Both products, that of the larger k first, and with ``sums`` the sums of columns."""
    pair = sorted(gradient_products(desc).values(), key=lambda p: -p.desc.k)
    first, first_known = _product_arguments(pair[0], ring, "1")
    second, second_known = _product_arguments(pair[1], ring, "2")
    items = sum(rings.tiles_in(p.desc, ring) for p in pair)
    summed: dict[str, Arg] = dict.fromkeys(("summed", "sums", "rows", "columns"))
    if sums:
        dc = desc.operand("dc")
        summed = {
            "summed": tma.tensor_map("dc", dc.element, ring.k, ring.n // 2, row_major=True),
            "sums": pointer(desc.operand("dbias")),
            "rows": Int(desc.m),
            "columns": Int(desc.n),
        }
        items += _strips(desc, ring)
    return Launch(
        kernels.wgmma_pair_kernel,
        max(min(items, target.sm_count), 1),
        {
            **first,
            **second,
            **summed,
            "alpha": Scalar("alpha", ElementKind.F32, 1.0),
            "group_m": Int(ring.group),
            "few": Int(-1 if sums else dealt(desc, ring, target)[0]),
        },
        {
            **first_known,
            **second_known,
            "PIECES": ring.pieces,
            "BUFFERS": ring.buffers,
            "BLOCK_N": ring.n,
            "BLOCK_K": ring.k,
            "STAGES": ring.stages,
        },
        num_warps=4,
        overlaps=True,
    )


def launches(desc: GemmBackwardDescriptor, ring: Ring, target: Target, within: bool = True) -> list[Launch]:
    """All launches with one ring: both products in one, or the only one by gemm's ``wgmma``.

    ``within``: whether the launch of both products may sum the columns too.
    """
    pair = list(gradient_products(desc).values())
    within = within and sums_within(desc, ring, target)
    if len(pair) == 2:
        found = [pair_launch(desc, ring, target, within)]
    else:
        found = [pair[0].on_operands(x) for x in wgmma.launches(pair[0].desc, ring, target)]
    return found if within else [*found, *column_sums.launches(desc)]


def _unmappable(desc: GemmBackwardDescriptor, o: Operand) -> str:
    """Why TMA cannot read or write a matrix; empty if it can."""
    if reason := tma.unmappable(desc, o.name):
        return reason
    unit, width = unit_axis(o), vector_elements(o.element.itemsize)
    # TMA writes each row (each column of a column-major matrix) up to the next 16-byte boundary.
    if unit is not None and o.shape[unit] % width:
        return f"{o.name} has {o.shape[unit]} elements along its unit-stride axis, which is no multiple of 16 bytes"
    return ""


def supports(desc: GemmBackwardDescriptor, target: Target) -> Support:
    """Whether TMA can read and write the matrices, and ``wgmma`` takes every product."""
    if not (desc.wants_da or desc.wants_db):
        return Support.no("neither da nor db is wanted: there is nothing to multiply")
    if min(desc.m, desc.n, desc.k) == 0:
        return Support.no(f"m, n, k = {desc.m}, {desc.n}, {desc.k}: TMA maps no empty matrix")
    matrices = [o for o in desc.operands() if len(o.shape) == 2]
    if reason := next((reason for o in matrices if (reason := _unmappable(desc, o))), ""):
        return Support.no(f"reads and writes by TMA: {reason}")
    refused = (s for p in gradient_products(desc).values() if not (s := tma.supports(p.desc, target)))
    return next(refused, SUPPORTED)


def rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest ring."""
    return ring_us(desc, cheapest_ring(desc, target), target)


def workspace_with(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> int:
    """Bytes that the launches with this ring need."""
    return 0 if sums_within(desc, ring, target) else column_sums.workspace(desc)


def workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    """Bytes with the cheapest ring."""
    return workspace_with(desc, cheapest_ring(desc, target), target)


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Covers both ways to sum the columns: the target decides between them, and no guarantee depends on it."""
    within = -(-desc.m // SUM_ROWS) + SUM_ROWS  # steps one after the other, and the rows of a step
    return backward_guarantee(desc, max(within, column_sums.roundings(desc)))


def configurations(desc: GemmBackwardDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each ring that fits; where its launch can sum the columns too, also with separate sums."""
    found = {}
    for ring in rings_of(desc, target):
        cost, build = ring_us(desc, ring, target), partial(launches, desc, ring, target)
        found[str(ring)] = Configuration(cost, build, workspace_with(desc, ring, target))
        if sums_within(desc, ring, target):
            cost += column_sums.cost_us(desc)
            # "apart": the name in tuning tables and bench/results.
            found[f"{ring}, sums apart"] = Configuration(
                cost, partial(build, within=False), column_sums.workspace(desc)
            )
    return found


@hopper_kernel(
    op=BACKWARD,
    name="wgmma",
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    layout=backward_layout,
    configurations=configurations,
)
def wgmma_backward(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_ring(desc, target), target)
