"""The base of every frozen record: strict pydantic with ``InvalidProblem`` as its error and one string as its identity.

``key`` contains *all* fields, except those that a class declares to be display only, so that no field added later can
be missing from a cache key. Equality and hash follow the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError
from typing_extensions import Self, dataclass_transform

from triplan.errors import InvalidProblem, shown
from triplan.sku.facts import cached_property

#: Errors of one model that a message lists.
_MOST_ERRORS = 8


def explain(cls: type[FrozenModel], error: ValidationError) -> InvalidProblem:
    """Convert a pydantic error to an ``InvalidProblem`` that names each field, its value and the broken rule."""
    parts = []
    errors = error.errors(include_url=False)
    for e in errors[:_MOST_ERRORS]:
        where = ".".join(shown(p).strip("'") if str(p).isidentifier() else shown(p) for p in e["loc"]) or "(model)"
        rule = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden" and len(e["loc"]) == 1:
            rule = f"no such field; the fields are {', '.join(cls.model_fields)}"
        value = "" if e["type"] in ("missing", "json_invalid") or not e["loc"] else f" = {shown(e['input'])}"
        parts.append(f"{where}{value}: {rule}")
    if len(errors) > _MOST_ERRORS:
        parts.append(f"and {len(errors) - _MOST_ERRORS} more")
    return InvalidProblem(f"{cls.__name__}: " + "; ".join(parts))


Stored = TypeVar("Stored", covariant=True)
Taken = TypeVar("Taken", contravariant=True)

if TYPE_CHECKING:
    # What type checkers see instead of pydantic, with its mypy plugin or without: dataclasses of keywords. Neither
    # knows of fields that take other types than they store; of a dataclass's fields, ``__set__`` says so.
    class Converted(Generic[Stored, Taken]):
        """The type of a field that takes ``Taken`` and stores ``Stored``; ``field(default=...)`` gives it a default."""

        def __get__(self, obj: Any, owner: Any = None) -> Stored: ...
        def __set__(self, obj: Any, value: Taken) -> None: ...

    def field(*, default: object) -> Any: ...

    # With frozen_default, mypy 2.4 forgets the __get__ of inherited fields. It takes the first of the two classes,
    # other type checkers the second.
    if False:

        @dataclass_transform(kw_only_default=True, field_specifiers=(field, Field))
        class _Meta(type): ...
    else:

        @dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
        class _Meta(type): ...  # type: ignore[no-redef]

    class _Model:
        model_fields: ClassVar[dict[str, Any]]

        @classmethod
        def __pydantic_init_subclass__(cls, **kwargs: Any) -> None: ...
        @classmethod
        def model_json_schema(cls, **kwargs: Any) -> dict[str, Any]: ...
        @classmethod
        def model_validate(cls, obj: Any, **kwargs: Any) -> Self: ...
        @classmethod
        def model_validate_json(cls, json_data: str | bytes | bytearray, **kwargs: Any) -> Self: ...
        @classmethod
        def model_validate_strings(cls, obj: Any, **kwargs: Any) -> Self: ...
        def model_dump(self, **kwargs: Any) -> dict[str, Any]: ...
        def model_dump_json(self, **kwargs: Any) -> str: ...
else:
    _Model, field = BaseModel, Field

    class _Meta(type(BaseModel)):
        # The constructor is intercepted here and not in __init__: pydantic keeps its fast path, and nested validation
        # does not wrap our error in another ValidationError.
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as e:
                raise explain(cls, e) from None

        def __dir__(cls) -> list[str]:
            # What help() and completion list: not pydantic's names, which are 500 lines of help.
            names = [] if cls._hides_members else super().__dir__()
            return [name for name in names if not name.startswith("_") and not hasattr(BaseModel, name)]


class FrozenModel(_Model, metaclass=_Meta):
    """Immutable, strict (only fields that say so coerce values), hashable, with an exact JSON round trip."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings", ignored_types=(cached_property,)
    )
    #: Fields that are shown to people but do not identify the record.
    display_only: ClassVar[frozenset[str]] = frozenset()
    #: Whether ``help`` shows the docstring and the signature alone.
    _hides_members: ClassVar[bool] = False

    @cached_property
    def key(self) -> str:
        """The canonical string of every identifying field. Stable across processes."""
        try:
            return self.model_dump_json(exclude=set(self.display_only) or None)
        except PydanticSerializationError as e:  # text that is not Unicode
            raise InvalidProblem(f"{type(self).__name__}: {e}") from None

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
            raise explain(cls, e) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **kwargs: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as e:
            raise explain(cls, e) from None

    @classmethod
    def model_validate_strings(cls, obj: Any, **kwargs: Any) -> Self:
        try:
            return super().model_validate_strings(obj, **kwargs)
        except ValidationError as e:
            raise explain(cls, e) from None

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
