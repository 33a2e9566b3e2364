"""How much the tree weighs, each figure beside its goal: ``make weight``.

It reads the sources alone and imports nothing of them, so it can also weigh another checkout: ``weight.py ROOT``. The
rules without a figure (names, directions of imports) are held by ``tests/core/test_house.py``.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
TRITON = ROOT / "triplan" / "backends" / "triton"
#: The families that share the engine of ``common/rows``.
ROW_FAMILIES = ("softmax", "norms", "losses")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files(folder: Path, host_only: bool = False) -> list[Path]:
    """The modules below ``folder``; with ``host_only`` those that Triton does not compile."""
    return [p for p in sorted(folder.rglob("*.py")) if not (host_only and p.stem.endswith("kernels"))]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def calls(path: Path, names: set[str]) -> int:
    """How often ``path`` calls one of ``names``."""
    found = (node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
    return sum(isinstance(function, ast.Name) and function.id in names for function in found)


# --- the figures ---


def ops() -> dict[str, str]:
    """The family of each op, by the module or folder of its descriptor."""
    declared = re.compile(r"^    op: Literal\[(.*?)\]", re.MULTILINE)
    folder = ROOT / "triplan" / "descriptors"
    return {
        op: path.relative_to(folder).with_suffix("").parts[0]
        for path in files(folder)
        for literal in declared.findall(path.read_text())
        for op in re.findall(r'"(\w+)"', literal)
    }


def names(path: Path, used: bool) -> Iterator[str]:
    """The classes that the module defines, and its strings in quotes; with ``used`` every name of its code.

    ``OpCategory`` lists families, some of which have the name of an op.
    """
    nodes: list[ast.AST] = [*tree(path).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ClassDef) and node.name == "OpCategory":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and used:
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{node.value!r}"


def files_of_ops(used: bool) -> dict[str, int]:
    """In how many modules of the library each op is named: by a string that is its name and nothing else, or by the
    definition of a class of its own (``GatherPlan``). A new op beside it, or another name, changes these.

    ``used``: also where its classes are used, in annotations mostly. A word in a longer string, a function of torch or
    Triton and a family of the same name (gemm) do not name the op. Nor does a family outside ``functional``, whose
    families alone call each other's ops: there the word is an operand or a field (``copy`` of optimizers).
    """
    families = set(ops().values())
    by_file = [(owner(p, families), set(names(p, used))) for p in files(ROOT / "triplan")]
    found = {}
    for op, family in ops().items():
        classes = {op.title().replace("_", "") + suffix for suffix in ("Descriptor", "Args", "Plan")}
        known = {f"{op!r}", *classes}
        found[op] = sum(own in ("", family) and not named.isdisjoint(known) for own, named in by_file)
    return found


def owner(path: Path, families: set[str]) -> str:
    """The family of a module that knows the ops of no other; empty for one that may."""
    parts = path.relative_to(ROOT / "triplan").with_suffix("").parts
    return "" if parts[0] == "functional" else next((part for part in parts if part in families), "")


def arrows() -> int:
    """Imports among the folders of ``backends/triton`` (among its modules, if it has no folders)."""
    found = set()
    for path in files(TRITON):
        own = path.relative_to(TRITON).with_suffix("").parts[0]
        for name in re.findall(r"^\s*from triplan\.backends\.triton\.(\w+)", path.read_text(), re.MULTILINE):
            found.add((own, name))
    return sum(own != other for own, other in found)


def rows_engine() -> int:
    engine = [p for p in files(TRITON / "common", host_only=True) if p.stem.startswith("rows")]
    return lines(engine + [p for family in ROW_FAMILIES for p in files(TRITON / family, host_only=True)])


def export_lines() -> tuple[int, int]:
    """Lines of packages that re-export names of their modules, and how many of them stand there for one family each.

    An import under a private name is for the package itself, and exports nothing.
    """
    rooms = [ROOT / "triplan" / room for room in ("", "descriptors", "facade", "functional", "nn", "sku", "testing")]
    modules = [path for room in rooms for name in ("__init__", "_public") if (path := room / f"{name}.py").exists()]
    own, found, families = set(ops().values()), 0, 0
    for node in [node for module in modules for node in tree(module).body]:
        text, family = ast.unparse(node), False
        listed = text.startswith(("__all__ =", "_export("))
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            listed = any(not (name.asname or name.name).startswith("_") for name in node.names)
            family = node.module.split(".")[-1] in own
        found += ((node.end_lineno or node.lineno) - node.lineno + 1) * listed
        families += family
    return found, families


def guarantee_builders() -> int:
    backends = files(ROOT / "triplan" / "backends")
    return sum(calls(p, {"PrecisionGuarantee", "Tolerance"}) for p in backends if p.stem != "bounds")


def hardware_facts() -> int:
    """Names and fractional values of ``common/card`` that other host code defines again."""
    card = TRITON / "common" / "card.py"
    if not card.exists():
        return 0
    names = set(re.findall(r"^([A-Z]\w+) =", card.read_text(), re.MULTILINE))
    values = {n.value for n in ast.walk(tree(card)) if isinstance(n, ast.Constant) and isinstance(n.value, float)}
    found = 0
    for path in files(TRITON, host_only=True):
        for node in ast.walk(tree(path)) if path != card else ():
            if isinstance(node, ast.Assign):
                found += sum(isinstance(n, ast.Name) and n.id in names for t in node.targets for n in ast.walk(t))
            elif isinstance(node, ast.Constant) and isinstance(node.value, float):
                found += node.value in values and node.value > 1e3
    return found


def lines_an_op(family: str) -> int:
    """Lines of every module of the family, in all rooms of the library, for each of its ops."""
    own = [p for p in files(ROOT / "triplan") if family in p.relative_to(ROOT).with_suffix("").parts]
    folder = ROOT / "triplan" / "descriptors" / family  # of a table family: a line or a function an op
    table = re.compile(r"^\w+(?:: Function)? = function\(|^def [a-z]", re.MULTILINE)
    tabled = [len(table.findall(p.read_text())) for p in (folder / "functions.py", folder / "expr.py") if p.exists()]
    return round(lines(own) / (sum(tabled) or list(ops().values()).count(family)))


def table() -> Iterator[tuple[str, object, str]]:
    """(figure, its value, its goal)."""
    folders = [p for p in TRITON.iterdir() if p.is_dir() and list(p.glob("*.py"))]
    yield "folders of backends/triton", len(folders), "one a family, and common"
    yield "arrows among them", arrows(), "one a family, to common"
    for folder in sorted(folders):
        yield f"  modules in {folder.name}", len(files(folder)) - 1, ""
    for figure, used in (("name an op", False), ("name an op or use its classes", True)):
        of_ops = files_of_ops(used)
        most = max(of_ops, key=lambda op: of_ops[op])
        yield f"files that {figure}: median", statistics.median(of_ops.values()), "" if used else "<= 6"
        yield f"files that {figure}: most ({most})", of_ops[most], "" if used else "<= 6"
    yield "rows engine and its families: host lines", rows_engine(), "<= 1400"
    count, (exports, each) = len(set(ops().values())), export_lines()
    yield "lines of exports in packages", exports, ""
    yield "  of these for seven families", exports - each + round(each * 7 / count), "<= 70"
    anys = [len(re.findall(r"\bdesc: Any\b", p.read_text())) for p in files(TRITON, host_only=True)]
    yield "`desc: Any` in the kernels' host code", sum(anys), "0"
    yield "guarantees and tolerances built outside common/bounds", guarantee_builders(), "0"
    yield "hardware facts of common/card defined again", hardware_facts(), "0"
    for family in sorted(set(ops().values())):
        yield f"lines an op: {family}", lines_an_op(family), "<= 20 in a table family"
    library, tests = lines(files(ROOT / "triplan")), lines(files(ROOT / "tests"))
    yield f"test lines a library line ({tests} / {library})", f"{tests / library:.2f}", "<= 0.45"


def main() -> None:
    found = list(table())
    width = max(len(figure) for figure, _, _ in found)
    for figure, value, goal in found:
        print(f"{figure:{width}}  {value!s:>6}  {goal}".rstrip())


if __name__ == "__main__":
    main()
