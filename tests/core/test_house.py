"""The layout of the tree: one family, one name, in every room; imports that go one way; words for tables and tensors.

A *family* is a group of ops (a folder of ``backends/triton``), a *room* a package or folder that all families share.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from samples import SAMPLES, family_of

import triplan as tp

ROOT = Path(__file__).parents[2]
#: What a room has besides one module or folder for each family.
SHARED = {
    "triplan/descriptors": {"base", "expressions", "fields", "layout", "meanings", "operand"},
    "triplan/backends/reference": {"expressions", "philox", "run"},
    "triplan/backends/triton": {"common"},
    "triplan/facade": {"bound", "cache", "check", "plan", "prepared", "replay", "tables", "tune", "workspace"},
    "triplan/functional": {
        *("_autocast", "_flops", "_forward", "_ops", "_plans", "_replay", "_seeds", "_shapes", "_sharding"),
        "_watching",
    },
    "tests/families": set(),
    "bench": {
        *(
            "anywhere",
            "determinism",
            "fit",
            "functions",
            "host",
            "jit_kernel",
            "liger",
            "lm",
            "models",
            "report",
            "rows",
        ),
        *("stub", "timing"),
    },
    "bench/anywhere": {"drawing", "run"},
}
#: Modules that stand on several families, which do not know them.
ABOVE = {"triplan/functional": {"composed", "reduced_expressions"}}
#: Rooms that only some families have a module in, and what they have besides.
OPTIONAL = {"triplan/nn": {"_known", "_modules", "patching"}}
#: A room imports only rooms of the lines above its own ("" is the package ``triplan`` itself).
ORDER = (
    ("errors", "_exports", "_interrupts"),
    ("sku",),
    ("descriptors",),
    ("backends",),
    ("facade",),
    ("",),
    ("functional",),
    ("extend", "nn", "optim", "testing"),
    ("cli",),
    ("__main__",),
)
MAX_LINES = 500


def contents(room: str) -> set[str]:
    """The modules and folders of ``room``, without those that only start it or re-export."""
    skipped = ("__init__", "__main__", "_public")
    modules = {path.stem for path in (ROOT / room).glob("*.py") if path.stem not in skipped}
    folders = {path.parent.name for path in (ROOT / room).glob("*/*.py")}
    return modules | folders


FAMILIES = contents("triplan/backends/triton") - SHARED["triplan/backends/triton"]


@pytest.mark.parametrize("room", SHARED)
def test_a_room_holds_each_family_by_its_name_and_a_few_shared_modules(room: str) -> None:
    assert contents(room) == FAMILIES | SHARED[room] | ABOVE.get(room, set())


def test_no_family_imports_what_stands_on_families() -> None:
    above = {f"{room.replace('/', '.')}.{module}" for room, found in ABOVE.items() for module in found}
    wrong = [f"{a} imports {b}" for a, b in edges() if b in above and families_of(a)]
    assert not wrong, "\n".join(wrong)


def test_each_op_is_of_a_family() -> None:
    """``make test FAMILY=...`` picks the tests of its ops."""
    assert {family_of(op) for op in SAMPLES} == FAMILIES


@pytest.mark.parametrize("room", OPTIONAL)
def test_an_optional_room_holds_families_and_a_few_shared_modules(room: str) -> None:
    assert contents(room) - FAMILIES == OPTIONAL[room]


def modules() -> dict[str, Path]:
    """The files of the library by module."""
    found = {}
    for path in (ROOT / "triplan").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def test_a_module_past_500_lines_becomes_a_folder() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


# --- the kernel that explain() prints is the file ---

#: Lists (op, entry, module whose import registers it). A profiler sees each call of ``KernelTable.register``; the
#: module is the nearest caller that is being imported, whatever functions of ``common`` stand in between.
LIST_REGISTRATIONS = """
import gc, json, sys
import pydantic, torch, triton
found = []
def watch(frame, event, arg):
    called = event == "call" and frame.f_code.co_name == "register" and "self" in frame.f_locals
    if called and frame.f_globals["__name__"] == "triplan.backends.table":
        entry = frame.f_locals["row"]
        while frame.f_code.co_name != "<module>":
            frame = frame.f_back
        found.append((entry.op, entry.name, frame.f_globals["__name__"]))
sys.setprofile(watch)
import triplan.backends
sys.setprofile(None)
assert gc.isenabled()  # the import switches the search for garbage off
print(json.dumps(found))
"""


@cache
def registrations() -> dict[tuple[str, str], str]:
    """The module that registers each entry of the kernel table, by (op, entry)."""
    out = subprocess.run(
        [sys.executable, "-c", LIST_REGISTRATIONS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {(op, name): module for op, name, module in json.loads(out.stdout)}


ENTRIES = [(op, entry.name) for op in SAMPLES for entry in tp.TABLE.rows(op)]


@pytest.mark.parametrize(("op", "name"), ENTRIES, ids=lambda part: part)
def test_an_entry_is_registered_in_the_module_of_its_name(op: str, name: str) -> None:
    room = f"triplan.backends.{'reference' if name == 'reference' else 'triton'}.{family_of(op)}"
    expected = {room} if name == "reference" else {f"{room}.{name}", f"{room}.{name}_backward"}
    assert registrations()[op, name] in expected


def test_compiled_functions_are_in_modules_of_kernels() -> None:
    jit = re.compile(r"^@((triton|gluon)\.)?jit\b", re.MULTILINE)
    found = {path.relative_to(ROOT).as_posix() for path in MODULES.values() if jit.search(path.read_text())}
    others = {path for path in found if not path.endswith("_kernels.py")}
    assert others <= {"triplan/backends/triton/common/overlap.py"}


def test_kernels_are_read_when_they_are_used() -> None:
    """``@triton.jit`` would read a source where it is defined, and so in each import of triplan."""
    eager = {name for name, path in MODULES.items() if re.search(r"^\s*@triton\.jit", path.read_text(), re.MULTILINE)}
    assert not eager, "use triplan.backends.runtime.jit.jit"


# --- imports ---


def imports(name: str) -> Iterator[str]:
    """The modules of triplan that module ``name`` imports anywhere: in functions and under TYPE_CHECKING too.

    A name that a package re-exports counts as an import of the module that defines it as well. A family's descriptors
    name its plans to type checkers (``PlannedBy``): ``if TYPE_CHECKING: from triplan.facade.FAMILY import ...``.
    """
    tree = ast.parse(MODULES[name].read_text())
    plans = ".".join(name.replace(".descriptors.", ".facade.").split(".")[:3])  # of a folder, too
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [n for n in node.body if not isinstance(n, ast.ImportFrom) or n.module != plans]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "triplan")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: line {node.lineno}: import by the full name"
            if node.module and node.module.split(".")[0] == "triplan":
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    yield submodule if submodule in MODULES else node.module
                    defined = getattr(getattr(sys.modules.get(node.module), alias.name, None), "__module__", None)
                    if defined in MODULES and MODULES[node.module].stem == "__init__":
                        yield defined


@cache
def import_graph() -> dict[str, frozenset[str]]:
    return {name: frozenset(imports(name)) - {name} for name in MODULES}


def edges() -> list[tuple[str, str]]:
    return sorted((name, imported) for name, found in import_graph().items() for imported in found)


def families_of(module: str) -> set[str]:
    """The family that a module belongs to; below it a module may have the name of another (indexing's copies)."""
    return set([part for part in module.split(".") if part in FAMILIES][:1])


def test_no_family_imports_another() -> None:
    wrong = [f"{a} imports {b}" for a, b in edges() if families_of(a) and families_of(b) - families_of(a)]
    assert not wrong, "\n".join(wrong)


def test_what_families_share_imports_no_family() -> None:
    shared = [f"triplan.{room.removeprefix('triplan/').replace('/', '.')}.{module}"
              for room, found in SHARED.items() if room.startswith("triplan/") for module in found]  # fmt: skip
    wrong = [
        f"{a} imports {b}"
        for a, b in edges()
        if families_of(b) and any(a == module or a.startswith(f"{module}.") for module in shared)
    ]
    assert not wrong, "\n".join(wrong)


def level(module: str) -> tuple[int, str]:
    """Where ``module``'s room stands in ORDER, and the room."""
    room = (*module.split("."), "")[1]
    return next(i for i, rooms in enumerate(ORDER) if room in rooms), room


def test_imports_go_one_way() -> None:
    wrong = []
    for a, b in edges():
        (own, room), (other, imported) = level(a), level(b)
        if other > own or (other == own and room != imported):
            wrong.append(f"{a} imports {b}")
    assert not wrong, "\n".join(wrong)


def test_only_testing_imports_hypothesis() -> None:
    imported = re.compile(r"^\s*(import|from) hypothesis\b", re.MULTILINE)
    found = {name for name, path in MODULES.items() if imported.search(path.read_text())}
    assert found
    assert {name for name in found if not name.startswith("triplan.testing")} == set()


def test_runtime_knows_no_kernel() -> None:
    """``backends/runtime`` builds and launches what the table and the families hand it, and imports neither."""
    wrong = [
        f"{a} imports {b}"
        for a, b in edges()
        if ".backends.runtime" in a and ".backends." in b and ".backends.runtime" not in b
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    graph, done, circles = import_graph(), set(), []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            circles.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert not circles, "\n".join(circles)


# --- public names ---

EXPORTING = ("triplan.descriptors", "triplan.facade", "triplan.functional", "triplan.nn")


def declared(module: str) -> list[str]:
    """The names that ``module`` writes down in ``__all__``."""
    lists = []
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == "__all__":
                lists.append(ast.literal_eval(node.value))
    return [name for names in lists for name in names]


@pytest.mark.parametrize("package", EXPORTING)
def test_a_public_name_is_declared_once_by_its_family(package: str) -> None:
    """The names themselves are held by ``test_api.py``."""
    names = [n for m in MODULES if m.startswith(f"{package}.") and families_of(m) for n in declared(m)]
    assert names
    assert len(names) == len(set(names))
    assert set(names) <= set(importlib.import_module(package).__all__)
    assert declared(package) == []


# --- words ---

#: "Entry" is a line of the kernel table, "row" that of a tensor. ``KernelRow`` and ``KernelTable.rows`` are public
#: names with a public parameter each, and stay.
WORDS = {
    "a row of the kernel table": r"(?i)\brows? of the kernel table\b|\bkernel table's rows?\b",
    "a kernel's row": r"(?i)\b(kernel|triton|reference|candidate) rows?\b",
    "a variable row for an entry": r"(?<!self, )\brow: (tp\.)?KernelRow|\bfor row in (tp\.)?TABLE\.",
    "a variable rows for entries": r"(?<!Target, )\brows: \w+\[(tp\.)?KernelRow",
}
TEXTS = [
    path
    for folder in ("", "docs", "triplan", "tests", "bench", "tools", "examples")
    for path in sorted((ROOT / folder).glob("**/*" if folder else "*"))
    if path.suffix in (".md", ".py") and path != Path(__file__)
]


@pytest.mark.parametrize("word", WORDS)
def test_an_entry_is_of_the_table_and_a_row_of_a_tensor(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(WORDS[word], line)
    ]
    assert not found, "\n".join(found)
