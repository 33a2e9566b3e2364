"""PreparedIndices: a plan's work on its indices, done once, stored in the caller's memory for any number of runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from triplan.backends.runtime.interpreter import interpret
from triplan.backends.runtime.launch import Launch, overlapping
from triplan.backends.runtime.launcher import STORAGE, WORKSPACE, LoadedKernel, Places
from triplan.backends.table import TABLE, KernelRow, Preparation
from triplan.descriptors import OperandKind
from triplan.errors import InvalidProblem, Unsupported
from triplan.facade.bound import launch_all
from triplan.facade.check import check_memory, check_operand, named_tensors
from triplan.facade.workspace import Workspace
from triplan.sku import Candidate, Target
from triplan.sku.facts import cached_property

__all__ = ["PreparedIndices"]


class PreparedIndices:
    """Made by ``Plan.prepare_indices``, taken by ``Plan.run`` and ``Plan.bind`` of plans with the same key.

    The caller promises that until its last run nobody else writes the storage, and that the runs have the indices that
    it was made from: ``run`` does not read these. ``verify`` does, for debugging.
    """

    __slots__ = ("plan", "storage")

    def __init__(self, plan: Any, storage: Workspace) -> None:
        self.plan, self.storage = plan, storage

    def __repr__(self) -> str:
        return f"PreparedIndices({self.plan!r}, {self.storage!r})"

    def verify(self, index: Any) -> None:
        """Raise ``InvalidProblem`` if this was not made from ``index``. Allocates as much again, and synchronises.

        Indices that runs treat alike pass, such as different values that are out of bounds and dropped.
        """
        # A copy of the storage: the gaps between its parts, which nothing writes, then compare equal.
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


class Preparing:
    """The part of a Plan that prepares indices."""

    descriptor: Any
    target: Target
    candidates: tuple[Candidate, ...]
    _entry: KernelRow

    def workspace_size(self) -> int:
        raise NotImplementedError

    def _load(self, which: str, index: int) -> tuple[LoadedKernel, ...]:
        raise NotImplementedError

    @cached_property
    def preparing_launches(self) -> tuple[Launch, ...]:
        """What ``prepare_indices`` launches. Raises ``Unsupported`` for a kernel that prepares nothing."""
        return overlapping(self._preparation.build(self.descriptor, self.target), self.target)

    @cached_property
    def prepared_launches(self) -> tuple[Launch, ...]:
        """What ``run`` launches with prepared indices. Raises ``Unsupported`` for a kernel that prepares nothing."""
        return overlapping(self._preparation.run(self.descriptor, self.target), self.target)

    @property
    def _preparation(self) -> Preparation:
        if self._entry.preparation is None:
            able = [c.kernel for c in self.candidates if c.cost_us is not None]
            able = [entry.name for entry in TABLE.rows(self.descriptor.op) if entry.preparation and entry.name in able]
            raise Unsupported(
                f"{self.descriptor.op}: the kernel {self._entry.name} has no work on the indices alone to prepare; "
                f"of those that meet the request, {', '.join(able) or 'none'} can (PlanPreference(kernel=...))"
            )
        return self._entry.preparation

    @property
    def _op(self) -> str:
        return f"{self.descriptor.op} ({self._entry.name})"

    def prepared_size(self) -> int:
        """Exact bytes of storage that ``prepare_indices`` fills. Raises ``Unsupported`` as that does."""
        return self._preparation.size(self.descriptor, self.target)

    def prepare_indices(
        self,
        index: Any,
        storage: Workspace,
        workspace: Workspace | None = None,
        stream: torch.cuda.Stream | int | None = None,
    ) -> PreparedIndices:
        """Do a run's work on the indices once, into ``storage`` (``prepared_size()`` bytes of the caller's).

        ``index`` is the plan's index operand, ``workspace`` is as for a run. Allocates nothing and never synchronises.
        ``PreparedIndices`` says what the caller promises. Raises ``Unsupported`` for a kernel that does no such work
        (naming those that do), and as ``run`` for an index, a storage or a workspace that does not fit.
        """
        needed = self.prepared_size()
        operand = next(o for o in self.descriptor.operands() if o.index_extents)
        tensors = check_operand(self.descriptor, self.target, operand, index)
        device, named = tensors[0].device, [(operand.name, t) for t in tensors]
        check_memory(self._op, "the storage", storage, needed, device, named)
        if storage is not None:
            named = [*named, ("the storage", storage.tensor)]
        check_memory(self._op, "the workspace", workspace, self.workspace_size(), device, named)
        args = SimpleNamespace(**{operand.name: index})
        if self.target.is_gpu:
            names = [
                (operand.name, i if operand.kind is OperandKind.TENSOR_LIST else None) for i in range(len(tensors))
            ]
            keys = [*names, WORKSPACE, STORAGE]
            places: Places = {key: at for at, key in enumerate(keys)}
            values = (*(t.data_ptr() for t in tensors), 0 if workspace is None else workspace.address, storage.address)
            kernels = self._load("preparing_launches", tensors[0].get_device())
            calls = [kernel.template(args, places).fill(values) for kernel in kernels]
            launch_all(calls, tensors[0].get_device(), stream)
        else:
            interpret(self.preparing_launches, args, None if workspace is None else workspace.tensor, storage.tensor)
        return PreparedIndices(self, storage)

    def _check_prepared(self, prepared: PreparedIndices, args: Any, workspace: Workspace | None) -> None:
        named = named_tensors(self.descriptor, args)
        prepared.check(self, named[0][1].device)
        if workspace is not None:
            named = [*named, ("the workspace", workspace.tensor)]
        check_memory(self._op, "the storage", prepared.storage, self.prepared_size(), prepared.storage.device, named)
