"""Tuning tables: measured times that select may be given. They reorder rows; they never invent one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from triplan.sku import FrozenModel, Target


class TuningTable(FrozenModel):
    """Measured microseconds by problem and row.

    ``times`` holds (problem, ((row, microseconds), ...)) pairs, a problem being ``TuningTable.problem(desc_key,
    target)``. Its digest enters the canonical key of every plan selected with it.
    """

    times: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()

    @staticmethod
    def problem(descriptor_key: str, target: Target) -> str:
        """The key of one problem."""
        return f"{descriptor_key}|{target.key}"

    @classmethod
    def of(cls, times: Mapping[str, Mapping[str, float]]) -> TuningTable:
        """From nested mappings, in canonical order."""
        return cls(times=tuple(sorted((p, tuple(sorted(rows.items()))) for p, rows in times.items())))

    @property
    def digest(self) -> str:
        """SHA-256 of the contents."""
        return hashlib.sha256(self.key.encode()).hexdigest()

    def measured(self, descriptor_key: str, target: Target) -> Mapping[str, float]:
        """Microseconds by row for one problem; empty if it was never timed."""
        wanted = self.problem(descriptor_key, target)
        return next((dict(rows) for problem, rows in self.times if problem == wanted), {})
