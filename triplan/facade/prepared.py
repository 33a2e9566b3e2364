"""PreparedIndices: what a plan makes of its indices alone, kept in the caller's memory for any number of runs."""

from __future__ import annotations

from typing import Any

import torch

from triplan.errors import InvalidProblem
from triplan.facade.workspace import Workspace


class PreparedIndices:
    """Made by ``Plan.prepare_indices``, taken by ``Plan.run`` and ``Plan.bind`` of plans with the same key.

    The caller promises that until the last run that uses it the storage is written by nobody else, and that the runs'
    indices are those that it was made of: ``run`` doesn't look at them. ``verify`` does, for debugging.
    """

    __slots__ = ("plan", "storage")

    def __init__(self, plan: Any, storage: Workspace) -> None:
        self.plan, self.storage = plan, storage

    def __repr__(self) -> str:
        return f"PreparedIndices({self.plan!r}, {self.storage!r})"

    def verify(self, index: Any) -> None:
        """Raise ``InvalidProblem`` if ``index`` isn't what this was made of. Allocates as much again, and synchronises.

        Indices that any run would treat alike pass, such as other values that are out of bounds and dropped.
        """
        # A copy, so that the gaps between its parts are equal as well.
        again = Workspace(self.storage.tensor.clone())
        workspace = Workspace.allocate(self.plan, self.storage.device)
        self.plan.prepare_indices(index, again, workspace)
        if not torch.equal(again.tensor, self.storage.tensor):
            raise InvalidProblem(
                f"{self.plan.descriptor.op}: the index has changed since it was prepared, or the storage was written; "
                "call plan.prepare_indices again"
            )

    def check(self, plan: Any, device: torch.device) -> None:
        """Raise ``InvalidProblem`` unless ``plan`` may run with it on ``device``."""
        op = plan.descriptor.op
        if self.plan.key != plan.key:
            raise InvalidProblem(f"{op}: the indices were prepared by another plan: {self.plan.key}, not {plan.key}")
        if self.storage.device != device:
            raise InvalidProblem(f"{op}: the prepared indices are on {self.storage.device}, the operands on {device}")
