"""Registration of the elementwise kernels: each is an entry of every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triplan.backends.table import kernel
from triplan.backends.triton.common.accuracy import of_results
from triplan.backends.triton.common.expressions import digest
from triplan.backends.triton.elementwise import geometry
from triplan.descriptors import (
    BinaryDescriptor,
    ExpressionDescriptor,
    TernaryDescriptor,
    UnaryBackwardDescriptor,
    UnaryDescriptor,
)
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target

DESCRIPTORS = (UnaryDescriptor, UnaryBackwardDescriptor, BinaryDescriptor, TernaryDescriptor, ExpressionDescriptor)
ELEMENTS = tuple(e for e in ElementKind if not e.value.startswith("fp8"))
FLOATS = tuple(e for e in ELEMENTS if e.is_floating_point)
#: The elements that kernels take, by op; the descriptor refuses those that a function does not take.
OPS = {op: FLOATS if cls is UnaryBackwardDescriptor else ELEMENTS for cls in DESCRIPTORS for op in cls.ops()}
#: Versions of ops that got new bits. 2: their trees have functions that got a short form for 16-bit results, or they
#: are gradients of logit, which became NaN outside [0, 1], or of expm1, which became exp. 3: they have an rsqrt, of
#: which f32 takes the hardware's, or it is logit_clamped, which takes the lower limit where limits cross; or they are
#: gradients of tanh, which became sech2, or of elu, or compute mish, softcap_tanh or atanh of f32 in another way. 6:
#: expressions, which may have such functions.
_VERSIONS = {
    2: "acosh asinh atan cosh cosh_backward erfc expm1_backward log log10 log1p log1pexp log2 logit "
    "logit_backward logit_clamped_backward logsigmoid pow sinh sinh_backward softplus sqrt sqrt_backward tanh "
    "tanhshrink",
    3: "acos_backward acosh_backward asin_backward asinh_backward atanh celu_backward elu_backward logit_clamped mish "
    "mish_backward rsqrt rsqrt_backward selu_backward softcap_tanh softcap_tanh_backward tanh_backward "
    "tanhshrink_backward",
    6: "expression",
}
VERSIONS = {op: version for version, ops in _VERSIONS.items() for op in ops.split()}


def guarantee(desc: ElementwiseDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return of_results(desc.tree, tuple(o.name for o in desc.operands() if o.is_written))


def numerics(desc: ElementwiseDescriptor) -> str:
    """The numerics id, the same for all kernels: without contraction all evaluate the function to the same bits."""
    return f"elementwise.{digest(desc)}.v1"


def layout(desc: ElementwiseDescriptor) -> str:
    return "packed" if all(o.layout.packed for o in geometry.tensors(desc)) else "strided"


def elementwise(
    name: str,
    supports: Callable[[ElementwiseDescriptor, Target], Support],
    rank: Callable[[ElementwiseDescriptor, Target], float],
) -> Callable[[Any], Any]:
    """Register the decorated function, which builds the launches, as the entry ``name`` of every elementwise op."""

    def register(build: Any) -> Any:
        for op, elements in OPS.items():
            kernel(
                op=op,
                name=name,
                elements=elements,
                guarantee=guarantee,
                supports=supports,
                rank=rank,
                numerics=numerics,
                layout=layout,
                version=VERSIONS.get(op, 1),
            )(build)
        return build

    return register
