"""What the kernels of sampling share on the host: operands as arguments, and what all of them guarantee."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Ptr, power_of_two_in
from triplan.backends.triton.common.strides import known_strides, stride_arg
from triplan.descriptors import SampleDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee

#: Steps of a search, of two bits each: those of a logit that may not be 0, as f32 has them.
STEPS = {ElementKind.F32: 16, ElementKind.F16: 10, ElementKind.BF16: 8}
#: Exponentials in f64 that one multiprocessor takes in a microsecond: 64 lanes, 30 operations each, 1.7 GHz. Untuned.
SM_EXPONENTIALS_PER_US = 3600
#: The operands with one value a row.
EACH = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "out")


def guarantee(desc: SampleDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Sums of integers: a row's token depends on that row alone."""
    return {"out": PrecisionGuarantee.exact(ElementKind.I64).replace(order_invariant=False)}


def numerics(desc: SampleDescriptor) -> str:
    """All kernels take a mass by one function, and the rest is exact."""
    return "sampling.sample.v5"


def logits_args(desc: SampleDescriptor) -> dict[str, Arg]:
    logits = desc.operand("logits")
    row_step, step = known_strides(logits, 2)
    return {
        "logits": Ptr("logits", desc.element, logits.alignment),
        "row_stride": stride_arg(logits, row_step),
        "stride": None if step == 1 or desc.vocabulary == 1 else stride_arg(logits, step),
        "n": Int(desc.vocabulary, divisibility=power_of_two_in(desc.vocabulary)),
    }


def row_args(desc: SampleDescriptor) -> dict[str, Arg]:
    """``each``: addresses of the values of each row, None of an absent filter; ``strides``: their strides."""
    operands = {o.name: o for o in desc.operands()}
    found = [operands.get(name) for name in EACH]
    return {
        "each": tuple(None if o is None else Ptr(o.name, o.element, o.alignment) for o in found),
        "strides": tuple(Int(0, True) if o is None else stride_arg(o, known_strides(o, 1)[0]) for o in found),
    }
