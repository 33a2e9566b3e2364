"""Registration of the kernels of random numbers, and their common arguments and guarantees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, layout
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.random.shared_kernels import NUMBERS, SCALARS
from triplan.descriptors import Operand, RandomDescriptor
from triplan.descriptors.random import INTEGERS, PARAMETERS
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target

#: Roundings on the path of a term in f32 (1 ulp is 2 roundings).
#: uniform: low, high - low, the sum.
#: normal: the logarithm (3 ulp, halved by the root), the root, the angle and its functions (3 ulp), two products and a
#: sum, mean and std.
#: exponential: the logarithm (3 ulp), the rate, the product.
#: dropout: the scale, the product.
#: tests/families/random tests the errors of these functions.
ROUNDINGS = {"uniform": 3, "normal": 16, "exponential": 8, "dropout": 2}
#: The same of exponentials of 16 bits: 256 for the error of their logarithm, 2**-16, and the others.
SHORT_ROUNDINGS = 264
#: Evaluations of Philox per microsecond; one for four elements is mostly hidden by memory traffic. Untuned.
ELEMENTS_PER_US = 2e5
#: Elements per program of 4 warps: FEW up to SMALL elements in all, so that every multiprocessor has work. Untuned;
#: uniform f32 takes 23 instructions an element in blocks of MANY, 28 in blocks of 1024.
MANY, FEW, SMALL = 2048, 512, 1 << 18
#: The same at most where each element has an address: more take so many registers that few programs are resident, and
#: short integers spill.
STRIDED = 1024


def is_short(desc: RandomDescriptor) -> bool:
    """Whether the kernels take the shorter logarithm."""
    return desc.op == "exponential" and desc.element.itemsize == 2


def guarantee(desc: RandomDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Batch-invariant: an element depends on its index alone. Not order-invariant: other indices give other numbers."""
    roundings, compute = ROUNDINGS.get(desc.op), desc.element.compute
    if is_short(desc):
        roundings = SHORT_ROUNDINGS
    if roundings is None:
        return {"out": PrecisionGuarantee.exact(desc.element).replace(order_invariant=False)}
    kept = {"kept": PrecisionGuarantee.exact(ElementKind.I64)} if desc.keeps_state else {}
    if compute is ElementKind.F64:
        roundings *= 2  # the float64 oracle has as many
    relative, per_term = (0, roundings) if desc.op in ("uniform", "normal") else (roundings, 0)
    if desc.op == "uniform" and desc.element.itemsize == 2:
        return {"out": bounds.guarantee(compute, bounds.rounded_down(desc.element), batch=True)}
    return {"out": bounds.rounded(desc.element, compute, relative, per_term, batch=True), **kept}


def numerics(desc: RandomDescriptor) -> str:
    """The numerics id, the same for all kernels: all compute an element from the same words by the same function."""
    versions = {"normal": 2} if desc.element is ElementKind.F64 else {"normal": 3, "exponential": 2, "dropout": 2}
    version = versions.get(desc.op, 1)
    return f"random.{desc.op}.{desc.element}.v{version}"


def fits(desc: RandomDescriptor, programs: int) -> Support:
    """Whether a kernel with ``programs`` programs takes the operands."""
    if any(not o.layout.packed for o in desc.operands() if o.name in ("state", "kept")):
        return Support.no("it takes state and kept only packed")
    return fits_grid(programs)


def pointer(o: Operand) -> Ptr:
    """The operand's address; bool is written as i8."""
    return Ptr(o.name, ElementKind.I8 if o.element is ElementKind.BOOL else o.element, o.alignment)


def arguments(desc: RandomDescriptor) -> dict[str, Arg]:
    operands = {o.name: o for o in desc.operands()}
    # One binary wherever seed and offset are (see ``state_of``): unused pointers get the address of the result.
    i64 = ElementKind.I64
    place, name = (1, "state") if "state" in operands else (2, "kept") if "kept" in operands else (0, "out")
    seed: Arg = Int(0, True) if place == 1 else Scalar("seed", i64, 0)
    state = (Ptr(name, i64, i64.itemsize), seed, Scalar("offset", i64, 0), Int(place))
    return {
        "out": pointer(operands["out"]),
        "x": pointer(operands["x"]) if "x" in operands else None,
        "parameters": tuple(Scalar(name, operands[name].element, 0) for name in PARAMETERS[desc.op]) or None,
        "state": state,
        "first": Scalar("first", ElementKind.I64, 0),
    }


def constants(desc: RandomDescriptor) -> dict[str, Any]:
    return {
        "NUMBER": NUMBERS[desc.op],
        "SCALARS": SCALARS.get(desc.op),
        "PAIRED": desc.op == "normal",
        "WIDE": desc.is_wide,
        "POINT_TYPE": tl.int64 if desc.operand("out").numel >= I32_LIMIT else tl.int32,
    }


def block_of(desc: RandomDescriptor) -> int:
    """Elements per program."""
    return MANY if desc.operand("out").numel > SMALL else FEW


def cost(desc: RandomDescriptor, drawn: int = 0) -> float:
    """Estimated microseconds of a kernel that evaluates Philox once for the elements of a counter.

    drawn: elements of which it evaluates the words, if more than are written.
    """
    nbytes = sum(o.nbytes for o in desc.operands() if o.is_tensor)
    return LAUNCH_US + max(nbytes / BYTES_PER_US, max(desc.operand("out").numel, drawn) / 4 / ELEMENTS_PER_US)


def entry(
    name: str,
    supports: Callable[[RandomDescriptor, Target], Support],
    rank: Callable[[RandomDescriptor, Target], float],
) -> Callable[[Any], Any]:
    """Register the decorated function, which builds the launches, as the entry ``name`` of every op of the family."""

    def register(build: Any) -> Any:
        for op in RandomDescriptor.ops():
            kernel(
                op=op,
                name=name,
                elements=[
                    e for e in ElementKind if not e.value.startswith("fp8") and (e.is_floating_point or op in INTEGERS)
                ],
                guarantee=guarantee,
                supports=supports,
                rank=rank,
                numerics=numerics,
                # 2: signs of zeros with a mean of -0.0; scales by Newton's steps. 3: such signs of f64
                version=3 if op == "normal" else 2,
                layout=layout,
            )(build)
        return build

    return register
