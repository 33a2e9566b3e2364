"""``elements`` of scale_gradient: packed operands are scaled block by block, by as many programs as are resident."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, values
from triplan.backends.triton.common.rows_entries import FLOATS, layout
from triplan.backends.triton.losses import elements_kernels as kernels
from triplan.backends.triton.losses.shared import elementwise_numerics, rounded
from triplan.descriptors import ScaleGradientDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target

#: Elements that a program scales at a time. Untuned.
BLOCK = 8192
#: Programs on a multiprocessor: each loops, so that little is launched where dloss is 1 and nothing is to be done.
RESIDENT = 4


def programs(target: Target) -> int:
    return RESIDENT * max(target.sm_count, 1)


def guarantee(desc: ScaleGradientDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """One product."""
    return {"dx": rounded(desc.element, desc.element.compute, 2, 0, True, True)}


def supports(desc: ScaleGradientDescriptor, target: Target) -> Support:
    for o in desc.operands():
        if not o.layout.packed and o.numel > 1:
            return Support.no(f"{o.name} is not promised packed")
    return SUPPORTED


def rank(desc: ScaleGradientDescriptor, target: Target) -> float:
    return LAUNCH_US + 2 * desc.operand("dx").nbytes / BYTES_PER_US


@kernel(
    op="scale_gradient",
    name="elements",
    elements=FLOATS,
    guarantee=guarantee,
    supports=supports,
    rank=rank,
    numerics=elementwise_numerics,
    layout=layout,
)
def scale_launches(desc: ScaleGradientDescriptor, target: Target) -> list[Launch]:
    numel = desc.operand("dx").numel
    if numel == 0:
        return []
    args: dict[str, Arg] = {o.name: values(o) for o in desc.operands()}
    args.setdefault("unscaled", args["dx"])
    args["numel"] = Int(numel, numel >= I32_LIMIT, 16 if numel % 16 == 0 else 1)
    constants = {"IN_PLACE": desc.in_place, "COMPUTE": TL[desc.element.compute], "BLOCK": BLOCK}
    return [Launch(kernels.scale_gradient_kernel, min(-(-numel // BLOCK), programs(target)), args, constants, 16)]
