"""Tuning tables: measured times that select may be given. They reorder rows; they never invent one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from triplan.backends.storing import software, write_json
from triplan.backends.table import KernelRow
from triplan.errors import InvalidProblem
from triplan.sku import FrozenModel, Target

_FORMAT = 1


Microseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Measured(NamedTuple):
    """Microseconds by row, ``"row"`` or ``"row configuration"``, for one problem; or why there are none."""

    times: Mapping[str, float]
    miss: str = ""


class TuningTable(FrozenModel):
    """Measured microseconds by problem and row, and what they depend on.

    Its digest enters the canonical key of every plan selected with it. What was measured otherwise than here, on
    another device, with other versions of software or of a kernel, is a miss, and ``plan.explain()`` says why.

    Attributes:
        times: (problem, ((row, microseconds), ...)) pairs, a problem being ``TuningTable.problem(desc_key, target)``
            and a row its name, or its name, a space and one of its configurations. Finite, and not negative.
        software: versions of triplan, triton and torch, by name; empty in a table made by hand, which is never stale.
        kernels: versions of the rows that were timed, by ``op/row``.
        device: the model of GPU that was timed.
        foreign: why nothing in the table holds here; empty if it does. ``here`` finds that out; no file holds it.
    """

    times: tuple[tuple[str, tuple[tuple[str, Microseconds], ...]], ...] = ()
    software: tuple[tuple[str, str], ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()
    device: str = ""
    foreign: str = ""

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
        """From mappings, in canonical order."""
        return cls(
            times=tuple(sorted((p, tuple(sorted(rows.items()))) for p, rows in times.items())),
            software=tuple(sorted((software or {}).items())),
            kernels=tuple(sorted((kernels or {}).items())),
            device=device,
        )

    def joined(self, newer: TuningTable) -> TuningTable:
        """Both tables' problems, ``newer``'s times where both have one; ``newer`` alone if this one holds no more."""
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
        """Why nothing in the table holds any more; empty if it does."""
        here = software()
        changed = [f"{name} {then}, here {here[name]}" for name, then in self.software if here.get(name) != then]
        return self.foreign or (f"measured with {'; '.join(changed)}" if changed else "")

    @cached_property
    def _by_problem(self) -> dict[str, dict[str, float]]:
        return {problem: dict(rows) for problem, rows in self.times}

    def measured(self, descriptor_key: str, target: Target, rows: Sequence[KernelRow] = ()) -> Measured:
        """The times of one problem. ``rows``: those of its op, whose versions must be the ones that were timed."""
        if self.stale:
            return Measured({}, self.stale)
        found = self._by_problem.get(self.problem(descriptor_key, target))
        if found is None:
            others = any(problem.startswith(f"{descriptor_key}|") for problem in self._by_problem)
            return Measured({}, f"measured for another target than {target.key}" if others else "never measured")
        timed = dict(self.kernels)
        for row in rows:
            then = timed.get(f"{row.op}/{row.name}", row.version)
            if then != row.version and any(name.partition(" ")[0] == row.name for name in found):
                return Measured({}, f"version {then} of {row.name} was measured, here is version {row.version}")
        return Measured(found)

    def here(self) -> TuningTable:
        """The table as it holds on this machine: ``foreign`` where the current GPU is another model."""
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        other = name and self.device and name != self.device
        foreign = f"measured on {self.device}, here is {name}" if other else ""
        return self if foreign == self.foreign else self.replace(foreign=foreign)

    def to_json(self) -> str:
        """JSON that ``from_json`` reads back, on this machine or another."""
        return self.model_dump_json(exclude={"foreign"})

    @classmethod
    def from_json(cls, data: str) -> TuningTable:
        """What ``to_json`` wrote, as it holds here. Raises ``InvalidProblem``."""
        return cls.model_validate_json(data).here()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, atomically."""
        write_json(path, {"format": _FORMAT, "table": json.loads(self.to_json())})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TuningTable:
        """Read what ``save`` wrote. On a machine whose current GPU is another model, the table is ``foreign``.

        Raises ``InvalidProblem`` for a file that is no saved table.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r}, expected {_FORMAT}")
            return cls.from_json(json.dumps(content["table"]))
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidProblem(f"{os.fspath(path)} is no saved TuningTable: {e}") from e
