"""The guarantees of elementwise ops, from the errors of the maths table's functions.

A result that is one function of operands has a relative tolerance. For a tree none holds for every input: additions
cancel, and exponentials amplify. Its tolerance is relative to the running error of the tree at the actual values, in
units of roundoff, which takes the place of sum|terms| (``reference/elementwise/errors.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.triton.common import bounds
from triplan.descriptors.elementwise.expression import FUNCTIONS, arguments
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee
from triplan.sku.facts import fact

#: Functions that are computed exactly.
EXACT = {
    *("neg", "abs", "sign", "maximum", "minimum", "fmax", "fmin", "copysign", "fmod", "where", "clamp"),
    *("floor", "ceil", "round", "trunc", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"),
    *("logical_not", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
}
#: Those of them that pass the relative errors of their arguments on unchanged.
PASSES = frozenset({"neg", "abs", "where"})
#: Largest errors in ulp (1 ulp is at most two units of roundoff), for f32 and f64 (CUDA C++ Programming Guide,
#: "Mathematical Functions Appendix"; sums of several functions are worked out there). By default half an ulp.
_ULP = {
    (1, 1): "remainder",
    (2, 2): "floor_divide sin cos asin acos atan cosh tanh erf",
    (1.5, 1.5): "rsqrt",
    (2, 1): "exp exp2 expm1 log log1p log2",
    (3, 1): "log10",
    (9, 2): "pow",
    (3, 2): "hypot xlogy sinh atanh atan2",
    (4, 2): "tan",
    (3, 3): "asinh",
    (4, 3): "acosh sigmoid",
    (4, 5): "erfc",
    # x / sqrt(2) has an error of one ulp, which erfc amplifies by up to 2 * (x / sqrt(2))**2: 176 in f32, 1,480 in f64.
    (360, 3000): "normal_cdf",
    (6, 4): "log1pexp",
}
ULP: Mapping[str, tuple[float, float]] = {name: ulp for ulp, names in _ULP.items() for name in names.split()}
#: Errors of the ``short_`` functions (``maths_kernels``), in ulp of f32.
SHORT: Mapping[str, float] = {"exp": 260, "sigmoid": 264, "normal_cdf": 500}
#: Functions whose result jumps where a quotient is rounded to an integer.
JUMPS = frozenset({"truncate_divide"})
#: Functions that flush subnormal f32 arguments to 0 where this changes the result by much.
FLUSHES = frozenset({"pow", "atan2"})


def function_error(name: str, element: ElementKind) -> float:
    """The relative error of function ``name`` in the compute element of ``element``, as which the result is stored."""
    if name in EXACT or not element.is_floating_point:
        return 0.0
    compute = element.compute
    f32, f64 = ULP.get(name, (0.5, 0.5))
    ulp = f64 if compute is ElementKind.F64 else SHORT.get(name, f32) if element.itemsize == 2 else f32
    return 2 * ulp * compute.unit_roundoff


def lost(compute: ElementKind) -> float:
    """The absolute error of a result if it or an argument is flushed: near 0 no function has a slope above 2."""
    return 2 * bounds.flushed(compute)


@fact
def static_errors(desc: ElementwiseDescriptor) -> tuple[float | None, ...]:
    """The relative error of each result; None if it depends on the values."""
    tree = desc.tree
    found: list[float | None] = []
    for node, typed in zip(tree.nodes, tree.types, strict=True):
        name, args = str(node[0]), [found[a] for a in arguments(node)]
        if name not in FUNCTIONS:
            found.append(0.0)
        elif not any(args) and None not in args:
            jumps = name in FLUSHES and typed.element.compute is ElementKind.F32
            jumps = jumps or (name in JUMPS and typed.element.is_floating_point)
            found.append(None if jumps else function_error(name, typed.element))
        elif name in PASSES and None not in args and not (name == "where" and args[0]):
            found.append(max(a for a in args if a is not None))
        else:
            found.append(None)
    return tuple(found[at] for at, _ in tree.results)


@fact
def guarantee(desc: ElementwiseDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Each result depends on its own element alone, so neither batch nor order changes its bits."""
    outputs = [o.name for o in desc.operands() if o.is_written]
    found = {}
    for name, (at, element), relative in zip(outputs, desc.tree.results, static_errors(desc), strict=True):
        compute = desc.tree.types[at].element.compute
        if relative == 0.0:
            tolerance = bounds.EXACT
        elif relative is None:
            tolerance = bounds.running(element, compute)
        else:
            relative *= 2 if compute is ElementKind.F64 else 1  # the float64 oracle has as large an error
            tolerance = bounds.tolerance(element, compute, relative=relative, lost=(lost(compute),))
        found[name] = (
            bounds.guarantee(compute, tolerance, batch=True, order=True)
            if compute.is_floating_point
            else PrecisionGuarantee.exact(compute).replace(tolerance=tolerance)
        )
    return found
