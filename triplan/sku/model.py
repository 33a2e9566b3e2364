"""The base of every frozen record: strict pydantic with ``InvalidProblem`` as its error and one string as its identity.

``key`` contains *all* fields, except those that a class declares to be display only, so that no field added later can
be missing from a cache key. Equality and hash follow the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from triplan.errors import InvalidProblem
from triplan.sku.facts import cached_property


def explain(name: str, error: ValidationError) -> InvalidProblem:
    """Convert a pydantic error to an ``InvalidProblem`` that names each field, its value and the broken rule."""
    parts = []
    for e in error.errors(include_url=False):
        where = ".".join(str(p) for p in e["loc"]) or "(model)"
        rule = e["msg"].removeprefix("Value error, ")
        value = "" if e["type"] in ("missing", "json_invalid") or not e["loc"] else f" = {e['input']!r}"
        parts.append(f"{where}{value}: {rule}")
    return InvalidProblem(f"{name}: " + "; ".join(parts))


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Meta(ModelMetaclass):
    # The constructor is intercepted here and not in __init__: pydantic keeps its fast path, and nested validation does
    # not wrap our error in another ValidationError.
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as e:
            raise explain(cls.__name__, e) from None


class FrozenModel(BaseModel, metaclass=_Meta):
    """Immutable, strict (only fields that say so coerce values), hashable, with an exact JSON round trip."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings", ignored_types=(cached_property,)
    )
    #: Fields that are shown to people but do not identify the record.
    display_only: ClassVar[frozenset[str]] = frozenset()

    @cached_property
    def key(self) -> str:
        """The canonical string of every identifying field. Stable across processes."""
        return self.model_dump_json(exclude=set(self.display_only) or None)

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``, validated again. Raises ``InvalidProblem``."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return self.replace(**(update or {}))

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as e:
            raise explain(cls.__name__, e) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **kwargs: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as e:
            raise explain(cls.__name__, e) from None

    @classmethod
    def model_validate_strings(cls, obj: Any, **kwargs: Any) -> Self:
        try:
            return super().model_validate_strings(obj, **kwargs)
        except ValidationError as e:
            raise explain(cls.__name__, e) from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, tuple[type[Self], dict[str, Any]]]:
        # Unpickling validates: cached keys are not pickled, and a pickle from another version is checked.
        return _rebuild, (type(self), {name: getattr(self, name) for name in type(self).model_fields})


def _rebuild(cls: type[FrozenModel], fields: dict[str, Any]) -> FrozenModel:
    return cls(**fields)
