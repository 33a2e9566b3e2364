"""Docstrings of elementwise functions, from the maths table: formula, domain, gradient."""

from __future__ import annotations

from collections.abc import Sequence

from triplan.descriptors.elementwise.problems import NAMED
from triplan.descriptors.expressions.derivatives import gradients
from triplan.descriptors.expressions.expression import COMPOSED, FUNCTIONS, Expr, leaf, operand

#: Where functions are defined; elsewhere floats give NaN.
_DOMAINS = {
    "sqrt rsqrt log log2 log10": "{0} >= 0",
    "log1p": "{0} >= -1",
    "asin acos atanh": "-1 <= {0} <= 1",
    "acosh": "{0} >= 1",
    "logit": "0 <= {0} <= 1",
    "xlogy": "{1} >= 0, or {0} == 0",
    "pow": "{0} >= 0, or whole {1}",
    "fmod remainder": "finite {0}, {1} != 0",
    "sin cos tan": "finite {0}",
}
DOMAINS = {name: domain for names, domain in _DOMAINS.items() for name in names.split()}
#: What the formula does not say.
_NOTES = {
    "add sub": "``alpha`` is a number.",
    "clamp": "A bound may be None. Where min > max, out is max; where a bound is NaN, out is, too.",
    "div": "``rounding_mode`` 'floor' or 'trunc' rounds the quotient; the gradient is 0 then.",
    "gelu": "``approximate='tanh'``: out = input * sigmoid(1.596 * (input + 0.044715 * input**3)).",
    "glu": "a and b are the halves of ``input`` along ``dim``.",
    "geglu reglu swiglu": "Without ``other``, both are the halves of the last axis of ``input``.",
    "logit": "``eps``: input is clamped to [eps, 1 - eps] before, to eps first; a negative one is ignored.",
    "maximum minimum": "NaN if an operand is.",
    "fmax fmin": "NaN if both operands are.",
    "nan_to_num": "By default NaN becomes 0, and infinities the largest finite numbers of the dtype.",
    "prelu": "``weight`` has one element, or one for each channel (axis 1).",
    "round": "Halves go to the even neighbour; ``decimals`` scales by its power of ten before and after.",
    "where": "``input`` and ``other`` are promoted; ``condition`` is a bool.",
}
NOTES = {name: note for names, note in _NOTES.items() for name in names.split()}
#: Named ops that the formulas of functions of other names are.
_ALSO = {"add": "add_scaled", "sub": "sub_scaled"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">"}
_INFIX |= {"ge": ">=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
#: Characters beyond which a gradient is not shown: that of its formula, term by term.
_LONGEST = 160


def written(e: Expr, inner: bool = False) -> str:
    """``e`` as Python has it; ``inner``: within another operator."""
    if e.name in ("operand", "number"):
        return str(e.args[0])
    if e.name == "neg":
        return f"-{written(e.args[0], True)}"
    if e.name not in _INFIX:
        return f"{e.name}({', '.join(map(written, e.args))})"
    given = [a for a in e.args if e.name != "mul" or a.args != ("1.0",)] or [*e.args]
    text = f" {_INFIX[e.name]} ".join(written(a, len(given) > 1 or inner) for a in given)
    return f"({text})" if inner and len(given) > 1 else text


def _gradients(name: str, operands: list[str], built: Expr) -> list[str]:
    """The gradients of ``operands``; those of a function of the maths table in its result, ``out``."""
    if name in FUNCTIONS:
        function = FUNCTIONS[name].gradient
        given = (operand("g"), operand("out"), *map(operand, operands))
        return ["0" if e is None else written(leaf(e)) for e in (function(*given) if function else ())]
    found = gradients({"out": built}, operands)
    return [written(found[f"d{n}"]).replace("dout", "g") for n in operands]


def documented(function: str, parameters: Sequence[str], out: bool, inplace: bool) -> str:
    """The docstring of ``function``, whose operands are the first of ``parameters``."""
    name = _ALSO.get(function, function)
    named = NAMED[name]
    operands = ["a", "b"] if name == "glu" else list(parameters[: named.operands])
    numbers = [operand(n) if n in parameters else leaf(value) for n, value in named.parameters.items()]
    built = named.build(*map(operand, operands), *numbers)
    body = COMPOSED[built.name].body if built.name in COMPOSED else None
    tree = built if body is None else body(*built.args)
    formula = f"{name}({', '.join(operands)})" if name in FUNCTIONS else written(tree)
    lines = [f"Domain: {DOMAINS[name].format(*operands)}; NaN elsewhere."] if name in DOMAINS else []
    lines += [NOTES[function]] if function in NOTES else []
    found = _gradients(name, operands, built)
    pairs = zip(operands, found, strict=False)
    if not found or set(found) == {"0"}:
        lines.append("The gradient is 0.")
    elif all(len(text) <= _LONGEST for text in found):
        lines.append("Gradients, g being that of out: " + ", ".join(f"``d{n} = {text}``" for n, text in pairs) + ".")
    else:
        lines.append("Gradients: of the formula, term by term.")
    shared = ""
    if len(operands) > 1:
        shared = "Operands broadcast and are promoted as in torch" + ", and may be numbers" * (name not in NOTES) + "."
    shared += " ``out`` is resized, and converted to." * out + " ``inplace`` writes the first operand." * inplace
    shared += " Raises ``NotImplementedError`` for dtypes that it does not take. docs/elementwise.md has more."
    return "\n\n".join((f"``out = {formula}``, element by element, by one kernel.", "\n".join(lines), shared.strip()))
