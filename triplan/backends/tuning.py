"""Tuning tables: measured times that select may use. They change the order of entries, never add one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from triplan.backends.storing import software, write_json
from triplan.backends.table import KernelRow
from triplan.errors import InvalidProblem, shown
from triplan.sku import FrozenModel, Target
from triplan.sku.facts import cached_property

#: Format of saved files.
_FORMAT = 1


Microseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Measured(NamedTuple):
    """Microseconds of one problem by ``"entry"`` or ``"entry configuration"``; if there are none, ``miss`` says why."""

    times: Mapping[str, float]
    miss: str = ""


class TuningTable(FrozenModel):
    """Measured microseconds by problem and kernel, and the conditions under which they were measured.

    Its digest is part of the canonical key of every plan selected with it. Times measured under other conditions
    (another device, other versions of the software or of a kernel) are ignored; ``plan.explain()`` says why.

    Attributes:
        times: (problem, ((kernel, microseconds), ...)) pairs. A problem is ``TuningTable.problem(desc_key, target)``. A
            kernel is an entry's name, or that name, a space and one of its configurations. Times are finite and not
            negative.
        software: versions of triplan, triton and torch, by name. Empty in a table made by hand, which fits any version.
        kernels: versions of the entries that were timed, by ``op/entry``.
        device: the model of GPU that was timed.
        foreign: why the table does not fit this GPU; empty if it does. ``here`` sets it; files do not store it.
    """

    times: tuple[tuple[str, tuple[tuple[str, Microseconds], ...]], ...] = ()
    software: tuple[tuple[str, str], ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()
    device: str = ""
    foreign: str = ""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        for what, pairs in (("problem", self.times), *(("kernel", rows) for _, rows in self.times)):
            names = [name for name, _ in pairs]
            if len(set(names)) != len(names):
                raise ValueError(f"times name the {what} {shown(max(names, key=names.count))} twice")
        return self

    @staticmethod
    def problem(descriptor_key: str, target: Target) -> str:
        """The key of one problem."""
        return f"{descriptor_key}|{target.key}"

    @classmethod
    def of(
        cls,
        times: Mapping[str, Mapping[str, float]],
        software: Mapping[str, str] | None = None,
        kernels: Mapping[str, int] | None = None,
        device: str = "",
    ) -> TuningTable:
        """A table from mappings, sorted, so that equal contents have equal digests."""
        return cls(
            times=tuple(sorted((p, tuple(sorted(rows.items()))) for p, rows in times.items())),
            software=tuple(sorted((software or {}).items())),
            kernels=tuple(sorted((kernels or {}).items())),
            device=device,
        )

    def joined(self, newer: TuningTable) -> TuningTable:
        """Both tables' problems, with ``newer``'s times where both have one.

        ``newer`` alone if this table is stale or of another device.
        """
        if self.stale or self.device != newer.device:
            return newer
        by_problem = {problem: dict(rows) for problem, rows in (*self.times, *newer.times)}
        return TuningTable.of(
            by_problem, dict(newer.software), {**dict(self.kernels), **dict(newer.kernels)}, self.device
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the contents."""
        return hashlib.sha256(self.key.encode()).hexdigest()

    @cached_property
    def stale(self) -> str:
        """Why no time in the table is valid here; empty if the times are valid."""
        here = software()
        changed = [
            f"{name} {then}, here {here.get(name, 'none')}" for name, then in self.software if here.get(name) != then
        ]
        return self.foreign or (f"measured with {'; '.join(changed)}" if changed else "")

    @cached_property
    def _by_problem(self) -> dict[str, dict[str, float]]:
        return {problem: dict(rows) for problem, rows in self.times}

    def measured(self, descriptor_key: str, target: Target, rows: Sequence[KernelRow] = ()) -> Measured:
        """The times of one problem. ``rows``: its op's entries, whose versions must be the ones that were timed."""
        if self.stale:
            return Measured({}, self.stale)
        found = self._by_problem.get(self.problem(descriptor_key, target))
        if found is None:
            others = any(problem.startswith(f"{descriptor_key}|") for problem in self._by_problem)
            return Measured({}, f"measured for another target than {target.key}" if others else "never measured")
        timed = dict(self.kernels)
        for entry in rows:
            then = timed.get(f"{entry.op}/{entry.name}", entry.version)
            if then != entry.version and any(name.partition(" ")[0] == entry.name for name in found):
                return Measured({}, f"version {then} of {entry.name} was measured, here is version {entry.version}")
        return Measured(found)

    def here(self) -> TuningTable:
        """The table as it is valid on this machine: ``foreign`` if the current GPU is another model."""
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        other = name and self.device and name != self.device
        foreign = f"measured on {self.device}, here is {name}" if other else ""
        return self if foreign == self.foreign else self.replace(foreign=foreign)

    def to_json(self) -> str:
        """JSON that ``from_json`` reads back, on this machine or another."""
        return self.model_dump_json(exclude={"foreign"})

    @classmethod
    def from_json(cls, data: str) -> TuningTable:
        """Read what ``to_json`` wrote, as it is valid here. Raises ``InvalidProblem``."""
        return cls.model_validate_json(data).here()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, atomically."""
        write_json(path, {"format": _FORMAT, "table": json.loads(self.to_json())})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TuningTable:
        """Read what ``save`` wrote. The table is ``foreign`` on a machine whose current GPU is another model.

        Raises ``InvalidProblem`` if the file is no saved table.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {shown(content['format'])}, expected {_FORMAT}")
            return cls.from_json(json.dumps(content["table"]))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise InvalidProblem(f"{os.fspath(path)} is no saved TuningTable: {e}") from e
