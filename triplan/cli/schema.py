"""JSON Schema (draft 2020-12) of the JSON forms that ``parse_descriptor`` reads."""

from __future__ import annotations

import inspect
from typing import Any

from triplan.descriptors import Descriptor, descriptor_types
from triplan.descriptors.meanings import fields

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema(op: str | None = None) -> dict[str, Any]:
    """The schema of the descriptor of ``op``, or of any op. Raises ``KeyError``."""
    if op is not None:
        return {"$schema": _DRAFT, **_schema(descriptor_types()[op])}
    found = {cls.__name__: _schema(cls) for cls in descriptor_types().values()}
    shared: dict[str, Any] = {}
    for one in found.values():
        shared |= one.pop("$defs", {})
    return {
        "$schema": _DRAFT,
        "title": "Descriptor",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in found],
        "$defs": {**shared, **found},
    }


def _schema(cls: type[Descriptor]) -> dict[str, Any]:
    found = cls.model_json_schema()
    found["description"] = inspect.cleandoc(cls.__doc__ or "").split("\n\nAttributes:")[0]
    # In JSON ``layouts`` is an object, and ``op`` is what tells one descriptor from another.
    layout = {"oneOf": [{"$ref": "#/$defs/Layout"}, {"enum": ["packed", "strided"]}]}
    found["properties"]["layouts"] = {"type": "object", "additionalProperties": layout, "default": {}}
    found["required"] = ["op", *(name for name in found.get("required", ()) if name != "op")]
    for field in fields(cls):
        if field.meaning:
            found["properties"][field.name]["description"] = field.meaning
    return found
