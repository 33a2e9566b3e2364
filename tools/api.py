"""The public API as text: ``make api`` writes what this prints to ``tests/core/api.txt``.

One block per package: every public name with its kind and signature; of a class also its bases, fields, and the public
methods and properties that it defines itself. ``tests/core/test_api.py`` fails when the file is stale, so a change of
the API shows up in review as a change of that file.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
import typing
from types import ModuleType
from typing import Any

import pydantic

PACKAGES = (
    "triplan",
    "triplan.backends",
    "triplan.descriptors",
    "triplan.extend",
    "triplan.facade",
    "triplan.functional",
    "triplan.nn",
    "triplan.optim",
    "triplan.sku",
    "triplan.testing",
)


def public_names(package: ModuleType) -> list[str]:
    """What ``dir`` shows, without private names and submodules."""
    names = (n for n in dir(package) if not n.startswith("_"))
    return sorted(n for n in names if not isinstance(getattr(package, n), ModuleType))


def signature(function: Any) -> str:
    """Without addresses, counts, and the names of functions that are defaults, which are private."""
    text = re.sub(r"<function [\w.<>]+ at 0x[0-9a-f]+>", "<function>", str(inspect.signature(function)))
    text = re.sub(r"KernelTable\(\d+ ops, \d+ entries\)", "TABLE", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text.replace("'", ""))


def constructor(cls: type[Any]) -> str:
    """The signature of its ``__init__``, unless fields say it, or another library, whose versions may differ."""
    owner = next(c for c in cls.__mro__ if "__init__" in vars(c))
    ours = owner.__module__.startswith("triplan") and not issubclass(cls, (pydantic.BaseModel, enum.Enum))
    return signature(cls.__init__) if ours else ""


def lineage(cls: type[Any]) -> tuple[list[type[Any]], list[type[Any]]]:
    """``cls`` with its private bases, whose members count as its own, and its public bases."""
    own, public = [cls], []
    for base in cls.__bases__:
        if base.__name__.startswith("_"):
            more, bases = lineage(base)
            own, public = own + more, public + bases
        else:
            public.append(base)
    return own, public


def member(name: str, value: Any) -> str | None:
    """A method or property; None for what is neither."""
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__} {name}{signature(value.__func__)}"
    if isinstance(value, property):
        return f"property {name}{signature(value.fget)}"
    if isinstance(value, functools.cached_property):
        return f"property {name}{signature(value.func)}"
    return f"def {name}{signature(value)}" if inspect.isfunction(value) else None


def members(cls: type[Any]) -> set[str]:
    """Fields, enum members, methods and properties of ``cls`` that no public base has."""
    found: dict[str, str | None] = {}
    fields = cls.model_fields if issubclass(cls, pydantic.BaseModel) else {}
    for part in lineage(cls)[0]:
        for name, annotation in inspect.get_annotations(part).items():
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            default = "" if name not in fields or fields[name].is_required() else f" = {fields[name].get_default()!r}"
            found.setdefault(name, f"{name}: {text}{default}")
        for name, value in vars(part).items():
            found.setdefault(name, member(name, value))
    if issubclass(cls, enum.Enum):
        found |= {m.name: f"{m.name} = {m.value!r}" for m in cls}
    return {text for name, text in found.items() if text and not name.startswith("_")}


def entry(name: str, value: Any) -> list[str]:
    """The line of one name; for a class, those of its members follow, indented."""
    origin = typing.get_origin(value)
    if origin is typing.Annotated:
        return [f"{name} = Annotated[{value.__origin__.__name__}, ...]"]
    if origin is not None:
        return [f"{name} = {re.sub(' at 0x[0-9a-f]+', '', str(value))}"]
    if inspect.isclass(value):
        bases = ", ".join(b.__qualname__ for b in lineage(value)[1])
        return [f"class {name}({bases}){constructor(value)}", *sorted(f"    {m}" for m in members(value))]
    return [f"def {name}{signature(value)}" if callable(value) else f"{name}: {type(value).__qualname__}"]


def api() -> str:
    lines: list[str] = []
    written: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += ["", f"# {package}"] if lines else [f"# {package}"]
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value) and id(value) in written:
                lines.append(f"class {name}, as above")
            else:
                lines += entry(name, value)
            if inspect.isclass(value):
                written.add(id(value))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(api(), end="")
