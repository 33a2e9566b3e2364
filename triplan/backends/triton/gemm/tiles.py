"""The kernel table's rows for matrix products.

``tiles`` reads by pointers whatever strides are promised. ``tiles_invariant`` is the same kernel with one tile and one
order of additions for every number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.gemm import launches as launching
from triplan.backends.triton.gemm.launches import Tile
from triplan.descriptors import MatrixProductDescriptor
from triplan.sku import SUPPORTED, ElementKind, MathPrecision, PrecisionGuarantee, Support, Target, Tolerance

ELEMENTS = ("f16", "bf16", "f32", "f64")
MOST_INTEGERS = (2**31 - 1) // 2**14


# --- what may be said ---


@lru_cache(maxsize=1024)
def tolerance(element: ElementKind, out: ElementKind, math_precision: MathPrecision, k: int) -> Tolerance:
    """Worst case of k products added in the accumulator, with alpha, beta, bias and an activation on top.

    Tensor cores add the products of one step (k at least 4) to the accumulator after aligning all to the largest and
    cutting off what is below its last bit: an error of one unit in the last place, not half of one, for every addend,
    and one for the sum (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021). So
    (1 + 2u)^n - 1 with n = k + k / 4 and a few for the epilogue; it covers fused multiply-adds, which round. A
    subnormal multiplicand counts for as much as the smallest normal one: tensor cores align unnormalised products. An
    activation has a slope of at most 1.13 and is computed within 16 roundings. tf32 cuts each multiplicand to 11 bits,
    subnormal ones to multiples of 2**-136. tf32x3 cuts twice, so that 22 are left, and a multiplicand below 2**-116,
    whose second part is subnormal, counts for as much as that one; it leaves out the product of the two second parts,
    at most 2**-20 of the whole, and adds three times as many products. The float64 oracle, where it is no wider, is off
    by as much.
    """
    compute = element.compute
    u, final = compute.unit_roundoff, out.unit_roundoff if out is not compute else 0.0
    thrice = math_precision is MathPrecision.TF32X3
    addends = 3 * k if thrice else k
    roundings = math.expm1(min((addends + addends // 4 + 8) * math.log1p(2 * u), 700.0))
    if compute is ElementKind.F64:
        roundings *= 2
    cut = {MathPrecision.TF32: 2.0**-10, MathPrecision.TF32X3: 2.0**-20}.get(math_precision, 0.0)
    # The parts' magnitudes add up to a little more than the whole's.
    roundings, left_out = (roundings * (1 + 2.0**-8), 2.0**-20) if thrice else (roundings, 0.0)
    multiplied = ((1 + cut) ** 2 + left_out) * (1 + roundings) - 1
    info, smallest = torch.finfo(compute.torch), torch.finfo(out.torch)
    # f32 results of tensor cores and of approximations may be flushed; |alpha| and |beta| beyond 4 scale what was lost.
    lost = float(info.tiny) if compute is ElementKind.F32 else float(info.smallest_normal * info.eps)
    return Tolerance(
        rtol=final,
        ctol=(1.13 * multiplied + 16 * u) * (1 + final),
        underflow=4 * (k + 8) * lost + float(smallest.smallest_normal * smallest.eps),
    )


@lru_cache(maxsize=1024)
def _guarantee(
    element: ElementKind,
    out: ElementKind,
    math_precision: MathPrecision,
    k: int,
    invariant: bool,
    written: tuple[str, ...],
) -> Mapping[str, PrecisionGuarantee]:
    found = PrecisionGuarantee(
        math_precision=math_precision,
        accumulator=element.compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=invariant,
        order_invariant=False,
        tolerance=tolerance(element, out, math_precision, k),
    )
    return dict.fromkeys(written, found)


def guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return _guarantee(desc.element, desc.out, desc.multiplicands, desc.k, False, desc.written)


def invariant_guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return _guarantee(desc.element, desc.out, desc.multiplicands, desc.k, True, desc.written)


def integer_guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Addition modulo 2**32 is associative: order cannot show."""
    return dict.fromkeys(desc.written, PrecisionGuarantee.exact(desc.sums))


def integer_numerics(desc: MatrixProductDescriptor) -> str:
    return f"gemm-integers.{desc.epilogue}.v1"


def invariant_numerics(desc: MatrixProductDescriptor) -> str:
    return f"gemm-tiles-invariant.{desc.multiplicands}.{desc.out}.{desc.epilogue}.{tile_class(desc)}.v1"


def layout(desc: MatrixProductDescriptor) -> str:
    """Of A and B, as BLAS names them: n for row-major, t for column-major, x for any strides."""
    names = {1: "n", 0: "t", None: "x"}
    return "".join(names[launching.leading(desc.operand(o))[0]] for o in "ab")


# --- rows ---


def invariantly_apart(desc: MatrixProductDescriptor, fixed: str) -> bool:
    """Whether the tile for every number of rows is one for elements that are read one by one: as far as the extent of
    k and the factor that is ``fixed`` tell. What lines of the other one promise changes with the rows."""
    width = launching.vector(desc.element.itemsize)
    return launching.scattered(desc) or launching.by_elements(desc.operand(fixed)) or bool(desc.k % width)


def invariant_tile(desc: MatrixProductDescriptor, target: Target, fixed: str = "b") -> Tile:
    """The same for every m (or, with A ``fixed``, every n): of the tiles the one of 64 rows, or the largest."""
    tiles = launching.tiles_for(desc, target, invariantly_apart(desc, fixed))
    return next((t for t in tiles if t.m == 64 and t.n == 128), tiles[0])


def tile_class(desc: MatrixProductDescriptor, fixed: str = "b") -> str:
    """All of ``desc`` that ``invariant_tile`` depends on besides the multiplicands, so that equal ids mean one tile."""
    apart = invariantly_apart(desc, fixed)
    return f"{'apart' if apart else 'lines'}-{launching.most_accumulators(desc, apart)}"


def tiles_rank(desc: MatrixProductDescriptor, target: Target) -> float:
    return launching.tile_us(desc, launching.chosen_tile(desc, target), target)


def tiles_configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    return {
        str(tile): Configuration(launching.tile_us(desc, tile, target), partial(launching.tiles_launch, desc, tile))
        for tile in launching.tiles_of(desc, target)
    }


def invariant_rank(desc: MatrixProductDescriptor, target: Target) -> float:
    # The same kernel: where both take the same tile, the row that promises less comes first by this much.
    return launching.tile_us(desc, invariant_tile(desc, target), target) * 1.001


def tiles_apply(desc: MatrixProductDescriptor, target: Target) -> Support:
    most = max(launching.programs_of(desc, tile) for tile in launching.tiles_of(desc, target))
    if most < 2**31:
        return SUPPORTED
    return Support.no(f"C has up to {most} tiles; a grid holds fewer than 2**31")


def integers_apply(desc: MatrixProductDescriptor, target: Target) -> Support:
    # Tensor cores of sm80 saturate: up to here no sum of products can leave 32 bits.
    if desc.k > MOST_INTEGERS:
        return Support.no(f"k = {desc.k}: only {MOST_INTEGERS} products of i8 are sure to add up within i32")
    return tiles_apply(desc, target)


def tiles(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launching.tiles_launch(desc, launching.chosen_tile(desc, target))


def tiles_invariant(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launching.tiles_launch(desc, invariant_tile(desc, target))


for _op in ("gemm", "batched_gemm"):
    _common: dict[str, Any] = {"op": _op, "layout": layout}
    _several: dict[str, Any] = {"rank": tiles_rank, "configurations": tiles_configurations}
    kernel(name="tiles", elements=ELEMENTS, guarantee=guarantee, supports=tiles_apply, **_several, **_common)(tiles)
    kernel(
        name="integer_tiles",
        elements=("i8",),
        guarantee=integer_guarantee,
        supports=integers_apply,
        numerics=integer_numerics,
        **_several,
        **_common,
    )(tiles)
    kernel(
        name="tiles_invariant",
        elements=ELEMENTS,
        guarantee=invariant_guarantee,
        supports=tiles_apply,
        rank=invariant_rank,
        numerics=invariant_numerics,
        **_common,
    )(tiles_invariant)
