"""What the fields of a descriptor are: name, type, default and meaning. ``help``, ``triplan ops`` and schemas show it.

The meanings are written once, under ``Attributes:`` in the docstring of the class that declares the field.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from triplan.descriptors.fields import AxesField, AxisField, ExtentField, ShapeField
from triplan.sku import ElementKind, FrozenModel

#: Fields that every descriptor has, and that a description of one op need not repeat.
COMMON = ("op", "schema_version")
_ATTRIBUTES = re.compile(r"\n*Attributes:\n((?:(?:    .*)?(?:\n|$))*)")
_ENTRY = re.compile(r"^(\w[\w, ]*?)(?: \(.*?\))?: (.*(?:\n    .*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FieldMeaning:
    """One field. ``default`` is the text of its default value; None if the field is required."""

    name: str
    type: str
    default: str | None
    meaning: str


def fields(cls: type[FrozenModel]) -> tuple[FieldMeaning, ...]:
    """The fields of ``cls``, those of its bases first, without ``COMMON``; with ``op`` if it has no default."""
    said: dict[str, str] = {}
    mine = sorted(cls.model_fields.items(), key=lambda field: field[0] == "layouts")
    for c in cls.__mro__:
        for names, text in _entries(vars(c).get("__doc__") or ""):
            for name in names.split(", "):
                said.setdefault(name, text)
    return tuple(
        FieldMeaning(
            name,
            _type(info.annotation, list(info.metadata)),
            None if info.is_required() else _shown(info.default),
            said.get(name, ""),
        )
        for name, info in mine
        if name not in COMMON or info.is_required()
    )


def lines(cls: type[FrozenModel]) -> list[str]:
    """The fields of ``cls`` as text, ``names (type = default): meaning``; those that agree share a line."""
    grouped: dict[tuple[str, str | None, str], list[str]] = {}
    for f in fields(cls):
        grouped.setdefault((f.type, f.default, f.meaning), []).append(f.name)
    return [
        f"{', '.join(names)} ({kind}{'' if default is None else f' = {default}'}): {meaning}"
        for (kind, default, meaning), names in grouped.items()
    ]


def describe(cls: type[FrozenModel]) -> None:
    """Complete the docstring and the signature of ``cls``, all that ``help`` prints, with the inherited fields."""
    filled = [textwrap.fill(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines(cls)]
    summary = _ATTRIBUTES.sub("\n", inspect.cleandoc(cls.__doc__ or "")).strip()
    cls.__doc__ = "\n".join([summary, "", "Attributes:", *filled, "Methods: see ``triplan.Descriptor``."])
    cls._hides_members = True
    # pydantic's signature repeats every validator.
    parameters = (
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if info.is_required() else info.default,
        )
        for name, info in cls.model_fields.items()
    )
    type.__setattr__(cls, "__signature__", inspect.Signature(list(parameters)))


def _entries(doc: str) -> Iterator[tuple[str, str]]:
    found = _ATTRIBUTES.search(inspect.cleandoc(doc))
    for entry in _ENTRY.finditer(textwrap.dedent(found[1]) if found else ""):
        names, text = entry[1], " ".join(entry[2].split())
        if not re.match(r"(see|as in) ", text):
            yield names, text


def _shown(value: Any) -> str:
    return str(value.value) if hasattr(value, "value") else repr(value)


def _type(annotation: Any, metadata: list[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, (AxesField, AxisField)):
            return f"{'axes' if isinstance(mark, AxesField) else 'an axis'} of {mark.of}"
        if isinstance(mark, (ShapeField, ExtentField)):
            return "shape" if isinstance(mark, ShapeField) else "extent"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], list(args[1:]))
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " | ".join("None" if a is type(None) else _type(a, []) for a in args)
    if annotation is ElementKind:
        return "element"
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return " | ".join(repr(m.value) for m in annotation)
    if origin is tuple and get_origin(args[0]) is tuple:
        return "mapping of operands to Layouts"
    if origin is tuple:
        return f"tuple of {_type(args[0], [])}"
    return getattr(annotation, "__name__", str(annotation))
