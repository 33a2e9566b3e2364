"""The errors of the maths table's functions, and those of trees that need no values.

A result that is one function of operands has a relative tolerance. For a tree none holds for every input: additions
cancel, and exponentials amplify. Its tolerance is relative to the running error of the tree at the actual values, in
units of roundoff, which takes the place of sum|terms| (``reference/expressions/errors.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.triton.common import bounds
from triplan.descriptors.expressions.expression import FUNCTIONS, arguments
from triplan.descriptors.expressions.tree import Tree
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee
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
#: "Mathematical Functions Appendix"; sums of several functions are worked out there). By default half an ulp. f32's
#: rsqrt is the hardware's: 2**-22.9 (PTX ISA, "rsqrt").
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
    (4, 3): "acosh sigmoid tanh_log1pexp",
    (4, 5): "erfc",
    # x / sqrt(2) has an error of one ulp, which erfc amplifies by up to 2 * (x / sqrt(2))**2: 176 in f32, 1,480 in f64.
    (360, 3000): "normal_cdf",
    (6, 4): "log1pexp",
    # Half of it is that of 1 / cosh(x): 2 ulp of the exponential, 2 of the division (f64: half), half of the sum.
    (10, 5): "sech2",
}
ULP: Mapping[str, tuple[float, float]] = {name: ulp for ulp, names in _ULP.items() for name in names.split()}
#: Errors of the ``short_`` functions (``maths_kernels``), in ulp of f32. The logarithms' are those of the hardware's
#: log2, 2**-22, relative to log2(17 / 16), from where on it is used. The arguments of the hyperbolic ones add a few.
_SHORT = {
    3: "sqrt",
    10: "tanh",
    12: "atan",
    30: "log log2 log10",
    40: "log1p",
    50: "acosh asinh atanh",
    260: "exp",
    264: "cosh sech2 sigmoid sinh tanh_log1pexp",
    302: "log1pexp",
    500: "erfc normal_cdf",
    1200: "pow",
}
SHORT: Mapping[str, float] = {name: ulp for ulp, names in _SHORT.items() for name in names.split()}
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
def static_errors(tree: Tree) -> tuple[float | None, ...]:
    """The relative error of each result; None if it depends on the values."""
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


def halvings(n: int) -> int:
    """Roundings that some term of a sum of ``n`` terms takes at least, in any order of additions; 1 at least."""
    return max((n - 1).bit_length(), 1)


def of_reduction(tree: Tree, reduction: str, out: ElementKind, depth: float, batch: bool) -> PrecisionGuarantee:
    """The guarantee of ``reduction`` of the values v of a tree, in ``out``; ``depth``: roundings on a term's path.

    E bounds |computed v - v|: the running error of the tree at the actual values. What stands for sum|terms|:

    - Extrema: how far max(v + E) and max(v - E) are from max(v), in units of roundoff u; see ``bounds.running``.
    - Sums are off by sum E + g * sum |computed v|, g = exp(depth * u) - 1: at most (1 + g) * sum E + g * sum |v|.
      With terms = sum |v| + sum E / (u * L), L = ``halvings``, the factor c = exp((depth + 2) * u) - 1 covers this:
      c > g, and c / (u * L) >= (depth + 2) / L >= 1 + g, as depth >= L and g <= 2 / L. (Only with millions of roundings
      is g larger; then depth / L is, too.)
    - Sums of integers are exact modulo 2**64, up to sum E, which is not 0 where they depend on inexact floats.
    """
    (at, _), *_ = tree.results
    compute = tree.types[at].element.compute
    exact = static_errors(tree)[0] == 0.0
    if not out.is_floating_point:
        tolerance = bounds.EXACT if exact else bounds.running(out, compute)
        return bounds.guarantee(out, tolerance, math_precision=MathPrecision.EXACT, batch=batch, order=True)
    if reduction in ("amax", "amin"):
        return bounds.guarantee(
            compute, bounds.EXACT if exact else bounds.running(out, compute), batch=batch, order=True
        )
    wide = ElementKind.F64 if ElementKind.F64 in (compute, out) else ElementKind.F32
    return bounds.rounded(out, wide, 3, depth + 2, flushes=4 * depth, batch=batch)


@fact
def of_results(tree: Tree, names: tuple[str, ...]) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee of each result, of elements that depend on their own place alone: neither batch nor order changes
    their bits."""
    found = {}
    for name, (at, element), relative in zip(names, tree.results, static_errors(tree), strict=True):
        compute = tree.types[at].element.compute
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
