"""The kernel table's rows for the adjoint of a matrix product.

``tiles`` is gemm's kernel by pointers, once for each factor, and sums of columns; ``tiles_invariant`` the same with one
tile for every number of rows, on which the bits of a row of da then do not depend. ``wgmma`` is in a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import backward as launching
from triplan.backends.triton.gemm import launches as gemm_launch
from triplan.backends.triton.gemm import tiles as gemm
from triplan.backends.triton.gemm.backward import Product
from triplan.backends.triton.gemm.launches import Tile
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import SUPPORTED, ElementKind, MathPrecision, PrecisionGuarantee, Support, Target, Tolerance

# --- what may be said ---


@lru_cache(maxsize=1024)
def sum_tolerance(element: ElementKind, out: ElementKind, roundings: int) -> Tolerance:
    """A sum in the accumulator each of whose terms is rounded so many times, then once into the result."""
    compute = element.compute
    final = out.unit_roundoff if out is not compute else 0.0
    error = math.expm1(roundings * math.log1p(compute.unit_roundoff))
    if compute is ElementKind.F64:
        error *= 2  # the oracle's own
    smallest = torch.finfo(out.torch)
    return Tolerance(rtol=final, ctol=error * (1 + final), underflow=float(smallest.smallest_normal * smallest.eps))


def guarantee(
    roundings: Callable[[GemmBackwardDescriptor], int], desc: GemmBackwardDescriptor, invariant: bool = False
) -> Mapping[str, PrecisionGuarantee]:
    """``roundings``: that a row of dc goes through on its way into dbias. ``invariant``: rows of da, by any number."""
    element, out = desc.element, desc.out

    def of(math_precision: MathPrecision, t: Tolerance, invariant: bool = False) -> PrecisionGuarantee:
        return PrecisionGuarantee(
            math_precision=math_precision,
            accumulator=element.compute,
            deterministic=True,
            bit_stable_on_same_hardware=True,
            batch_invariant=invariant,
            order_invariant=False,
            tolerance=t,
        )

    found = {
        name: of(
            desc.multiplicands,
            gemm.tolerance(element, out, desc.multiplicands, product.desc.k),
            invariant and name == "da",
        )
        for name, product in launching.products(desc).items()
    }
    if desc.wants_dbias:
        # Nothing is multiplied, so dc keeps its own precision.
        found["dbias"] = of(MathPrecision(element.value), sum_tolerance(element, out, roundings(desc)))
    return found


def layout(desc: GemmBackwardDescriptor) -> str:
    """Of dc and the factors that are read, as BLAS names them: n for row-major, t for column-major, x for any."""
    names = {1: "n", 0: "t", None: "x"}
    return "".join(names[gemm_launch.leading(o)[0]] for o in desc.operands() if o.name in ("dc", "a", "b"))


# --- by pointers ---


def _tiles_apply(desc: GemmBackwardDescriptor, target: Target) -> Support:
    refused = (s for p in launching.products(desc).values() if not (s := gemm.tiles_apply(p.desc, target)))
    return next(refused, SUPPORTED)


def _tiles_rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    return launching.sum_us(desc) + sum(gemm.tiles_rank(p.desc, target) for p in launching.products(desc).values())


def _invariant_tile(p: Product, target: Target) -> Tile:
    return gemm.invariant_tile(p.desc, target, p.fixed)


def _invariant_rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    each = (gemm_launch.tile_us(p.desc, _invariant_tile(p, target), target) for p in launching.products(desc).values())
    # Where both rows take the same tiles, or none, that which promises less comes first.
    return 1.001 * (launching.sum_us(desc) + sum(each))


def _workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    return launching.sum_workspace(desc)


def _numerics(desc: GemmBackwardDescriptor) -> str:
    da = launching.products(desc).get("da")
    how = "" if da is None else f".{gemm.tile_class(da.desc, da.fixed)}-{da.fixed}"
    return f"gemm-backward-tiles-invariant.{desc.multiplicands}.{desc.out}{how}.v1"


_COMMON: dict[str, Any] = {
    "op": "gemm_backward",
    "elements": gemm.ELEMENTS,
    "supports": _tiles_apply,
    "workspace": _workspace,
    "layout": layout,
}


@kernel(name="tiles", rank=_tiles_rank, guarantee=partial(guarantee, launching.sum_roundings), **_COMMON)
def tiles(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launching.tiles_launches(desc, lambda p: gemm_launch.chosen_tile(p.desc, target))


@kernel(
    name="tiles_invariant",
    rank=_invariant_rank,
    guarantee=partial(guarantee, launching.sum_roundings, invariant=True),
    numerics=_numerics,
    **_COMMON,
)
def tiles_invariant(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launching.tiles_launches(desc, lambda p: _invariant_tile(p, target))
