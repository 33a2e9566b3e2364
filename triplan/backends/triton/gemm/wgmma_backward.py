"""Kernel ``wgmma`` of the backward op, on Hopper: both products in one launch, and perhaps the sums of columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from triplan.backends.runtime.launch import Arg, Copy, Counter, Float, Int, Launch, Scalar, Scratch, TensorMap
from triplan.backends.table import Configuration
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.tiles import combined
from triplan.backends.triton.gemm import column_sums, rings, split_k, tma, wgmma, wgmma_backward_kernels as kernels
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
#: Rows per step of the sums within the launch of the products: ``BLOCK_K`` of every ring here.
SUM_ROWS = 64
#: Columns of a tile that is multiplied while the columns of its first factor are summed. Narrower tiles keep shared
#: memory busy by multiplying alone. Set by hand: on an H100, sums in tiles of 128 columns took longer than separate
#: launches for the sums.
SUM_TILE_COLUMNS = 256
#: How much longer tiles of at most 128 columns take than in a single product: both products read one operand
#: transposed. In ``bench/results/gemm-*-sweep`` tiles of 256 columns were the fastest at 2048 and 4096, not
#: at 8192.
NARROW_FACTOR = 1.05
#: Rows of tiles scheduled together: fewer than in a single product, for the same reason. (In the sweep 16
#: are at most 1% faster up to 4096, and 2% slower at 8192.)
GROUP_M = 4
#: Least steps along k of a part, of those that k may be cut into. Untuned.
LEAST_STEPS = 16
#: Most parts: as ``split_k`` adds at a time.
MOST_PARTS = split_k.PIECES_AT_ONCE
#: Tiles are dealt by ``few`` only if the busiest program then has less than this share of its work. Untuned.
WORTH = 0.97


def rings_of(desc: GemmBackwardDescriptor, target: Target) -> tuple[Ring, ...]:
    """The rings that suit ``desc`` and fit ``target``."""
    product = next(iter(gradient_products(desc).values()))
    found = (r for r in rings.rings_of(product.desc, target, specialised=True) if r.is_plain)
    return tuple(replace(r, group=GROUP_M) for r in found)


#: Where dc's columns are summed: by ``strips``, on multiprocessors that the last wave of the products leaves idle; in
#: ``tiles`` of db, from the ring; in launches of their own (``apart``, the name in tuning tables and bench/results).
Sums = Literal["strips", "tiles", "apart"]


class Pair(NamedTuple):
    """Both products: that of the larger k, whose tiles begin the work list, and the other one."""

    first: Product
    second: Product


def pair_of(desc: GemmBackwardDescriptor) -> Pair:
    """The products of a problem that wants both gradients; of equal k, da's is the first."""
    return Pair(*sorted(gradient_products(desc).values(), key=lambda p: -p.desc.k))


def wants_both(desc: GemmBackwardDescriptor) -> bool:
    """Whether there are two products, to be computed in one launch."""
    return desc.wants_da and desc.wants_db


def _strips(desc: GemmBackwardDescriptor, ring: Ring) -> int:
    """Strips of columns to be summed, each as wide as a tile."""
    return -(-desc.n // ring.n)


def sums_of(desc: GemmBackwardDescriptor, ring: Ring, target: Target, parts: int) -> Sums:
    """Where the columns are summed, with the larger k in ``parts``.

    Strips need warpgroups that share their tiles, an idle multiprocessor for each strip, and a strip that takes no
    longer than a tile. Sums in tiles need dc as db's first factor, as where db is column-major, and wide tiles. Both
    need contiguous rows of dc, and a contiguous dbias.
    """
    if not (wants_both(desc) and desc.wants_dbias):
        return "apart"
    if not (is_contiguous(desc.operand("dbias")) and is_row_major(desc.operand("dc"))):
        return "apart"
    pair = pair_of(desc)
    idle = -sum(rings.tiles_in(p.desc, ring) for p in pair) % target.sm_count
    strip_us = desc.m * ring.n * desc.element.itemsize / SUM_BYTES_PER_US
    soon = strip_us <= rings.tile_us(ring, pair.second.desc.k)
    if parts == 1 and not ring.pingpong and _strips(desc, ring) <= idle and soon:
        return "strips"
    wide = ring.n == SUM_TILE_COLUMNS
    return "tiles" if wide and gradient_products(desc)["db"].views["a"].operand.name == "dc" else "apart"


class Deal(NamedTuple):
    """How the items of both products are dealt to the programs; works are in tiles of the product of the smaller k.

    Attributes:
        few: for the kernel's ``rest_of``.
        busiest: the busiest program's work.
        plain: the same, were items dealt one by one.
    """

    few: int
    busiest: float
    plain: float


def dealt(desc: GemmBackwardDescriptor, ring: Ring, target: Target, parts: int = 1) -> Deal:
    """The way that gives the busiest program less work.

    With many rows, db has few tiles of many steps and da many tiles of few. Dealt one by one, a program that has a tile
    of db would take as many tiles of da as one that has none.
    """
    one, two = (p.desc for p in pair_of(desc))
    long, short = parts * rings.tiles_in(one, ring), rings.tiles_in(two, ring)
    programs = max(min(long + short, target.sm_count), 1)
    more, others = long % programs, programs - long % programs
    ratio = rings.tile_us(ring, one.k / parts) / rings.tile_us(ring, two.k)
    before = long // programs * ratio
    if more == 0:
        plain = before + -(-short // programs)
        return Deal(-1, plain, plain)
    items = -(-(long + short) // programs)  # of program 0
    plain = before + max(ratio + items - long // programs - 1, -(-(short - others) // programs) + 1)
    few = max(math.floor((short + more * ratio) / programs - ratio), 0)
    found = before + max(ratio + few, math.ceil((short - more * few) / others))
    return Deal(few, found, plain) if found < WORTH * plain else Deal(-1, plain, plain)


def _partial_bytes(desc: GemmBackwardDescriptor, parts: int) -> int:
    """Bytes of the partial products of the larger k; none of a whole one."""
    if parts == 1:
        return 0
    one = pair_of(desc).first.desc
    return parts * one.m * one.n * ElementKind.F32.itemsize


def _partial_sums_bytes(desc: GemmBackwardDescriptor, parts: int) -> int:
    """Bytes of the sums of columns in tiles of db, which are partial if the parts are those of db."""
    if parts == 1 or pair_of(desc).first is not gradient_products(desc)["db"]:
        return 0
    return parts * desc.n * ElementKind.F32.itemsize


def _parts_us(desc: GemmBackwardDescriptor, ring: Ring, target: Target, parts: int) -> float:
    """Estimated microseconds of both products with the larger k in ``parts``: the busiest program's, and the sum's."""
    busiest = dealt(desc, ring, target, parts).busiest * rings.tile_us(ring, pair_of(desc).second.desc.k)
    streamed = sum(o.nbytes for o in desc.operands()) / BYTES_PER_US
    adding = 2 * _partial_bytes(desc, parts) / split_k.PARTIAL_BYTES_PER_US
    if parts > 1:
        adding += split_k.SUM_LAUNCH_US[target.arch] + LAUNCH_US
    return rings.FIXED_US[True] + combined(busiest, streamed, power=rings.LIMITS_POWER) + adding


def _sums_us(desc: GemmBackwardDescriptor, ring: Ring, target: Target, parts: int) -> float:
    """Estimated microseconds of summing the columns."""
    return column_sums.cost_us(desc) if sums_of(desc, ring, target, parts) == "apart" else 0.0


@fact
def parts_of(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> int:
    """Into how many parts the larger k is cut: more than one where its product has too few tiles to share evenly."""
    if not wants_both(desc):
        return 1
    one = pair_of(desc).first.desc
    most = min(-(-one.k // ring.k) // LEAST_STEPS, MOST_PARTS) if rings.tiles_in(one, ring) < target.sm_count else 1
    return min(
        range(1, most + 1),
        key=lambda parts: _parts_us(desc, ring, target, parts) + _sums_us(desc, ring, target, parts),
        default=1,
    )


def ring_us(desc: GemmBackwardDescriptor, ring: Ring, target: Target) -> float:
    """Estimated microseconds of all launches with this ring."""
    if not wants_both(desc):
        (product,) = gradient_products(desc).values()
        return rings.ring_us(product.desc, ring, target) + column_sums.cost_us(desc)
    pair, sms, parts = pair_of(desc), target.sm_count, parts_of(desc, ring, target)
    if parts > 1:
        products_us = _parts_us(desc, ring, target, parts)
    else:
        one, two = (rings.ring_us(p.desc, ring, target) for p in pair)
        # In separate launches each product ends in a partial wave; in one launch they share it.
        waves_separate = sum(math.ceil(rings.tiles_in(p.desc, ring) / sms) for p in pair)
        waves = math.ceil(sum(rings.tiles_in(p.desc, ring) for p in pair) / sms)
        products_us = (one + two) * waves / max(waves_separate, 1)
        if sums_of(desc, ring, target, parts) != "strips":
            deal = dealt(desc, ring, target)
            products_us *= deal.busiest / deal.plain
    if ring.n <= 128 and not ring.pingpong and any(rings.is_short(p.desc) for p in pair):
        products_us *= NARROW_FACTOR
    return products_us + _sums_us(desc, ring, target, parts)


@fact
def cheapest_ring(desc: GemmBackwardDescriptor, target: Target) -> Ring:
    """The ring of the lowest estimate; of equal ones that of the narrowest tile."""
    return min(rings_of(desc, target), key=lambda r: (ring_us(desc, r, target), r.n))


def _product_arguments(p: Product, ring: Ring, i: str, parts: int) -> tuple[dict[str, Arg], dict[str, object]]:
    """The arguments of ``wgmma_pair_kernel`` for product ``i`` (1 or 2), whose factors it calls x and y."""
    a, b, c = (p.argument(m) for m in tma.operand_maps(p.desc, ring).values())
    args: dict[str, Arg] = {f"x{i}": a, f"y{i}": b, f"c{i}": c}
    args[f"tiles_m{i}"], args[f"tiles_n{i}"] = Int(-(-p.desc.m // ring.m)), Int(-(-p.desc.n // ring.n))
    args[f"steps{i}"] = Int(-(-p.desc.k // (ring.k * parts)))
    x_rows, y_rows = (is_row_major(p.desc.operand(name)) for name in "ab")
    return args, {f"X{i}_ROWS": x_rows, f"Y{i}_ROWS": y_rows}


def _partial_map(p: Product, ring: Ring, parts: int) -> TensorMap:
    """The map of the partial products, in blocks of as many bytes as those of c."""
    m, n = p.desc.m, p.desc.n
    columns = ring.buffer_columns * p.desc.out.itemsize // ElementKind.F32.itemsize
    found = tma.tensor_map("c", ElementKind.F32, ring.rows, columns, row_major=True, batched=True)
    return replace(found, operand=p.views["c"].operand.name, copy=Copy(0, (parts, m, n), (m * n, n, 1)))


def pair_launch(desc: GemmBackwardDescriptor, ring: Ring, target: Target, sums: Sums, parts: int) -> Launch:
    """Both products, and the sums of columns unless these are ``apart``.

    With several ``parts`` of the larger k, what sums over it is partial, and lies in the workspace: the products, then
    the sums.
    """
    pair, db = pair_of(desc), gradient_products(desc)["db"]
    first, first_known = _product_arguments(pair.first, ring, "1", parts)
    second, second_known = _product_arguments(pair.second, ring, "2", 1)
    shared: object = None
    if parts > 1:
        first["c1"] = found = _partial_map(pair.first, ring, parts)
        shared = tma.shared_layout(found.block[1:], found.element)
    few = -1 if sums == "strips" else dealt(desc, ring, target, parts).few
    first_items = parts * rings.tiles_in(pair.first.desc, ring)
    products = items = first_items + rings.tiles_in(pair.second.desc, ring)
    summed: dict[str, Arg] = dict.fromkeys(("summed", "sums", "rows", "columns"))
    if sums == "strips":
        dc = desc.operand("dc")
        summed["summed"] = tma.tensor_map("dc", dc.element, ring.k, ring.n // 2, row_major=True)
        items += _strips(desc, ring)
    if sums != "apart":
        summed |= {"sums": pointer(desc.operand("dbias")), "rows": Int(desc.m), "columns": Int(desc.n)}
        if _partial_sums_bytes(desc, parts):
            summed["sums"] = Scratch(_partial_bytes(desc, parts), ElementKind.F32)
    programs = max(min(items, target.sm_count), 1)
    rounds = rings.meeting_rounds(first_items, programs, pair.first.desc.k / parts)
    if few < 0 and pair.second.desc.k >= rings.MEETING_K:
        rounds = rings.meeting_rounds(products, programs, pair.second.desc.k)
    return Launch(
        kernels.wgmma_pair_kernel,
        programs,
        {
            **first,
            **second,
            **summed,
            "alpha": Scalar("alpha", ElementKind.F32, 1.0),
            "parts": Int(parts),
            "group_m": Int(ring.group),
            "few": Int(few),
            "counter": Counter(),
            "rounds": Int(rounds),
        },
        {
            **first_known,
            **second_known,
            "PIECES": ring.pieces,
            "BUFFERS": ring.buffers,
            "BLOCK_N": ring.n,
            "BLOCK_K": ring.k,
            "STAGES": ring.stages,
            "SUMS_X1": sums == "tiles" and pair.first is db,
            "SUMS_X2": sums == "tiles" and pair.second is db,
            "PARTIAL_1": shared,
        },
        num_warps=4,
        overlaps=rings.has_one_round(items, programs),
    )


def launches(desc: GemmBackwardDescriptor, ring: Ring, target: Target, apart: bool = False) -> list[Launch]:
    """All launches with one ring: both products in one, or the only one by gemm's ``wgmma``; then what sums are left.

    ``apart``: the columns are summed in launches of their own in any case.
    """
    if not wants_both(desc):
        (product,) = gradient_products(desc).values()
        found = [product.on_operands(x) for x in wgmma.launches(product.desc, ring, target)]
        return [*found, *column_sums.launches(desc)]
    first, parts = pair_of(desc).first, parts_of(desc, ring, target)
    sums = "apart" if apart else sums_of(desc, ring, target, parts)
    found = [pair_launch(desc, ring, target, sums, parts)]
    if parts > 1:
        whole = split_k.sum_launch(first.desc, parts, first.desc.n)
        scaled = {**whole.args, "alpha": Float(1.0, ElementKind.F32)}  # the partial products are scaled
        found.append(first.on_operands(replace(whole, args=scaled)))
    if sums == "apart":
        return [*found, *column_sums.launches(desc)]
    if _partial_sums_bytes(desc, parts):
        found.append(column_sums.sum_launch(desc, parts, _partial_bytes(desc, parts)))
    return found


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


def workspace_with(desc: GemmBackwardDescriptor, ring: Ring, target: Target, apart: bool = False) -> int:
    """Bytes that ``launches`` with this ring need."""
    parts = parts_of(desc, ring, target)
    if apart or sums_of(desc, ring, target, parts) == "apart":
        return max(_partial_bytes(desc, parts), column_sums.workspace(desc))  # the partial products are added before
    return _partial_bytes(desc, parts) + _partial_sums_bytes(desc, parts)


def workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    """Bytes with the cheapest ring."""
    return workspace_with(desc, cheapest_ring(desc, target), target)


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Covers all ways to sum the columns: ring and target decide between them, and no guarantee depends on these."""
    within = -(-desc.m // SUM_ROWS) + SUM_ROWS  # steps one after the other, and the rows of a step
    return backward_guarantee(desc, max(within, column_sums.roundings(desc)))


def configurations(desc: GemmBackwardDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each ring that fits; where its launch can sum the columns too, also with separate sums."""
    found = {}
    for ring in rings_of(desc, target):
        cost, build = ring_us(desc, ring, target), partial(launches, desc, ring, target)
        found[str(ring)] = Configuration(cost, build, workspace_with(desc, ring, target))
        if sums_of(desc, ring, target, parts_of(desc, ring, target)) != "apart":
            cost += column_sums.cost_us(desc)
            found[f"{ring}, sums apart"] = Configuration(
                cost, partial(build, apart=True), workspace_with(desc, ring, target, apart=True)
            )
    return found


@hopper_kernel(
    op=BACKWARD,
    name="wgmma",
    version=3,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    layout=backward_layout,
    configurations=configurations,
)
def wgmma_backward(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_ring(desc, target), target)
