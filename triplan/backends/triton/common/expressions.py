"""A tree of the maths table as one jit function, whose source text is generated; equal trees have equal text.

Triton 3.6 to 3.9 and its interpreter read the source of a jit function by ``inspect.getsource``, which looks it up in
``linecache``: the generated text is put there.
"""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice

from triplan.backends.triton.common import maths_kernels as maths
from triplan.descriptors.expressions.expression import FUNCTIONS, arguments, number_of
from triplan.descriptors.expressions.inputs import ExpressionProblem
from triplan.descriptors.expressions.tree import OF_BOOL
from triplan.sku import ElementKind, interpreting
from triplan.sku.facts import fact

BOOL, I8 = ElementKind.BOOL, ElementKind.I8
#: Triton's types, as source text.
TYPES = {
    ElementKind.F16: "tl.float16",
    ElementKind.BF16: "tl.bfloat16",
    ElementKind.F32: "tl.float32",
    ElementKind.F64: "tl.float64",
    ElementKind.I8: "tl.int8",
    ElementKind.I16: "tl.int16",
    ElementKind.I32: "tl.int32",
    ElementKind.I64: "tl.int64",
    ElementKind.U8: "tl.uint8",
    ElementKind.BOOL: "tl.int1",
}
#: Triton's types of elements in memory.
MEMORY = {e: getattr(tl, t.removeprefix("tl.")) if e is not BOOL else tl.int8 for e, t in TYPES.items()}


def cast(value: str, held: ElementKind, wanted: ElementKind) -> str:
    """Source text that converts ``value`` from the compute element ``held`` to ``wanted``."""
    if held is wanted:
        return value
    if wanted is BOOL:
        return f"({value} != 0)"
    # Integers are converted by way of f32, as in torch; Triton's interpreter cannot convert them, nor f64, to bf16.
    wide = held is ElementKind.F64 and wanted is ElementKind.BF16 and interpreting()
    by = ".to(tl.float32)" if wanted.compute is not wanted and (wide or not held.is_floating_point) else ""
    return f"{value}{by}.to({TYPES[wanted]})"


def text(desc: ExpressionProblem, rounds: bool = True, versions: bool = False) -> str:
    """Source text of a function of (values of the tensors, scalars) that returns the tuple of results.

    Values and results have their elements in memory, but results their compute elements if not ``rounds``; bool is i8.
    With ``versions``, which only a numerics id wants, the names of functions have those of ``maths.VERSIONS``.
    """
    tree, read = desc.tree, desc.inputs_read()
    tensors = [i.name for i in read if i.shape is not None]
    scalars = [i.name for i in read if i.shape is None]
    lines = []
    for at, (node, typed) in enumerate(zip(tree.nodes, tree.types, strict=True)):
        name, held = str(node[0]), typed.element.compute
        if name == "operand" and node[1] in tensors:
            memory = I8 if typed.element is BOOL else typed.element
            value = cast(f"values[{tensors.index(str(node[1]))}]", memory, held)
        elif name == "operand":
            value = f"tl.full((), scalars[{scalars.index(str(node[1]))}], {TYPES[held]})"
        elif name == "number":
            value = _constant(str(node[1]), held)
        else:
            function, args = FUNCTIONS[name], list(arguments(node))
            common = None if typed.common is None else typed.common.compute
            wanted = [common] * len(args)
            if function.result == "truth":
                wanted = [BOOL] * len(args)
            elif function.result == "select":
                wanted[0] = BOOL
            elif common is BOOL:
                wanted = [I8] * len(args)
            given = []
            for a, kind in zip(args, wanted, strict=True):
                assert kind is not None
                if tree.nodes[a][0] == "number":
                    given.append(_constant(str(tree.nodes[a][1]), kind))  # rounded to the compute element
                else:
                    given.append(cast(f"v{a}", tree.types[a].element.compute, kind))
            short = typed.element.itemsize == 2 and held is ElementKind.F32 and hasattr(maths, f"short_{name}")
            called = OF_BOOL.get(name, name) if common is BOOL else name
            value = _called(f"{'short_' if short else ''}{called}", given, versions)
            returned = I8 if function.result == "same" and common is BOOL else common
            returned = BOOL if function.result in ("bool", "truth") else returned
            assert returned is not None
            value = cast(value, returned, held)
        lines.append(f"    v{at} = {value}")
    out = []
    for at, element in tree.results:
        held = tree.types[at].element.compute
        value = cast(f"v{at}", held, element) if rounds or element is BOOL else f"v{at}"
        out.append(f"{value}.to(tl.int8)" if element is BOOL else value)
    return "\n".join(["def fused(values, scalars):", *lines, f"    return ({', '.join(out)},)", ""])


def digest(desc: ExpressionProblem, rounds: bool = True) -> str:
    """What stands for ``text`` in a numerics id, with the versions of its functions."""
    return hashlib.sha256(text(desc, rounds, versions=True).encode()).hexdigest()[:16]


def _called(name: str, args: list[str], versions: bool) -> str:
    if name in maths.OPERATORS:
        return f"({args[0]} {maths.OPERATORS[name]} {args[1]})"
    if name == "neg":
        return f"(-{args[0]})"
    module = next((f"{m}." for m, names in maths.NATIVE.items() if name in names.split()), "")
    version = f".v{maths.VERSIONS[name]}" if versions and name in maths.VERSIONS else ""
    return f"{module}{name}{version}({', '.join(args)})"


def _constant(written: str, element: ElementKind) -> str:
    value: Any = number_of(written)
    if element.is_floating_point:
        value = float(value)
        shown = repr(value) if value - value == 0 else f'float("{value}")'
        return f"tl.full((), {shown}, {TYPES[element]})"
    if element is BOOL:
        return f"tl.full((), {int(value != 0)}, tl.int1)"
    bits = 8 * element.itemsize
    value = int(value) % 2**bits  # out-of-range numbers wrap, as in torch
    if element is not ElementKind.U8 and value >= 2 ** (bits - 1):
        value -= 2**bits
    return f"tl.full((), {value}, {TYPES[element]})"


@fact
def _function(source: str, name: str) -> Any:
    filename = f"<triplan {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Without a modification time linecache keeps the entry, although there is no such file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = {n: v for n, v in vars(maths).items() if n.removeprefix("short_") in FUNCTIONS}
    scope: dict[str, Any] = {**names, "tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, filename, "exec"), scope)
    return triton.jit(scope[name])


@fact
def fused(desc: ExpressionProblem, rounds: bool = True) -> Any:
    """The jit function of the tree of ``desc``; see ``text``."""
    source = text(desc, rounds)
    stated = hasattr(desc, "nodes")  # one of many trees of its op
    name = f"expression_{hashlib.sha256(source.encode()).hexdigest()[:12]}" if stated else desc.op
    return _function(source.replace("def fused(", f"def {name}_(", 1), f"{name}_")
