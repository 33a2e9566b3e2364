"""Steps of optimizers, norms and clipping of lists of tensors: what ``triplan.optim`` runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from triplan.descriptors import Layout
from triplan.errors import Unsupported
from triplan.facade import ClipArgs, ClipPlan, TotalNormArgs, TotalNormPlan, Workspace, plan_type
from triplan.facade.bound import BoundRun, bump_versions
from triplan.facade.tables import TablePlan
from triplan.functional._plans import PLANS, run
from triplan.sku import Target

__all__: list[str] = []

#: Sets of addresses whose tables one list keeps: gradients that are made anew take turns at a few. Untuned.
MAX_BOUND = 8
#: Lists whose norms and clipping are kept bound, of all models together. Untuned.
MAX_LISTS = 64


class ListStep:
    """One step of a list of parameters, for as long as the list and its states stay where they are.

    On a GPU the addresses are bound (``Plan.bind``), so that a step with addresses that are known is two launches. The
    numbers lie on the device, and are written when they change.
    """

    def __init__(
        self, kind: type[TablePlan[Any, Any]], operands: Mapping[str, Any], numbers: int, options: Mapping[str, Any]
    ) -> None:
        """``operands``: of the plan ``kind``, without ``grad``, ``hyper`` and scales; ``options``: fields."""
        self._kind, self._operands, self._options = kind, dict(operands), dict(options)
        self.device: torch.device = operands["steps"].device
        self.hyper = torch.zeros(numbers, dtype=torch.float64, device=self.device)
        self._written: tuple[Any, ...] = ()
        self._one: Tensor | None = None
        self._bound: OrderedDict[tuple[int, ...], BoundRun] = OrderedDict()
        #: What captured graphs read.
        self._captured: list[Any] = []
        self._plans: dict[tuple[Any, ...], TablePlan[Any, Any]] = {}

    def __call__(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[float | Tensor],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the list. ``grad_scale`` and ``found_inf``: those of a GradScaler; either may be absent.

        Raises ``Unsupported`` while a stream is captured, if the numbers are not those of the step before.
        """
        given = self._scales(grad_scale, found_inf)
        args = self._kind.args_type(grad=grads, hyper=self.hyper, **self._operands, **given)
        if self.device.type != "cuda":
            self._write(numbers)
            plan = self._plan(args)
            plan.run(args, Workspace.allocate(plan, self.device) if plan.workspace_size() else None)
            return
        key = self._key(grads, given)
        call = self._bound.get(key)
        if call is None:
            call = self._bound[key] = self._plan(args).locate(args)
            if len(self._bound) > MAX_BOUND:
                self._bound.popitem(last=False)
        self._repeat(call, numbers)

    def known(
        self, grads: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> Callable[[Sequence[float | Tensor]], None] | None:
        """What makes a step with these gradients, given the numbers, if their addresses are known; else None."""
        call = self._bound.get(self._key(grads, self._scales(grad_scale, found_inf)))
        return None if call is None else partial(self._repeat, call)

    def _repeat(self, call: BoundRun, numbers: Sequence[float | Tensor]) -> None:
        self._write(numbers)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(call)
        call()

    def _key(self, grads: Sequence[Tensor], given: Mapping[str, Tensor]) -> tuple[int, ...]:
        return tuple(map(Tensor.data_ptr, (*grads, *given.values())))

    def _scales(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> dict[str, Tensor]:
        if grad_scale is None and found_inf is None:
            return {}
        if self._one is None:
            self._one = torch.tensor([1.0, 0.0], device=self.device)
        return {
            "grad_scale": self._one[:1] if grad_scale is None else self._as_f32(grad_scale),
            "found_inf": self._one[1:] if found_inf is None else self._as_f32(found_inf),
        }

    def _as_f32(self, t: Tensor) -> Tensor:
        return t.detach().to(self.device, torch.float32, non_blocking=True).reshape(1)

    def _plan(self, args: Any) -> TablePlan[Any, Any]:
        grad = args.grad[0].dtype
        found = self._plans.get((grad, args.grad_scale is None))
        if found is None:
            desc = self._kind.descriptor_type.from_args(args, **self._options)
            if desc.scaled:  # type: ignore[attr-defined]
                single = Layout(alignment=args.found_inf.element_size())  # a scaler's may be parts of larger tensors
                desc = desc.replace(layouts={**dict(desc.layouts), "grad_scale": single, "found_inf": single})
            plan: Any = PLANS.get(desc, target=Target.of(self.device))
            found = self._plans[grad, args.grad_scale is None] = plan
        return found

    def _write(self, numbers: Sequence[float | Tensor]) -> None:
        known = tuple([None if isinstance(x, Tensor) else float(x) for x in numbers])
        if known != self._written:
            if self.device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    raise Unsupported(
                        f"the numbers {known} differ from those of the last step, {self._written}, and cannot be "
                        "written while a stream is captured: make a step with them before, or pass lr as a tensor"
                    )
                # torch's allocator of pinned memory takes it back when the copy is over: nothing waits.
                values = torch.tensor([x or 0.0 for x in known], dtype=torch.float64).pin_memory()
                self.hyper.copy_(values, non_blocking=True)
            else:
                self.hyper.copy_(torch.tensor([x or 0.0 for x in known], dtype=torch.float64))
            self._written = known
        for i, x in enumerate(numbers):
            if isinstance(x, Tensor):
                self.hyper[i : i + 1].copy_(x.detach().reshape(1), non_blocking=True)


def symmetric_product(a: Tensor, b: Tensor, c0: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """alpha * a @ b + beta * c0, of batches of matrices of which the caller knows that these are symmetric."""
    operands = {"a": a, "b": b, "c": a.new_empty(a.size(0), a.size(1), b.size(2))}
    scalars = {"alpha": alpha}
    if c0 is not None:
        operands["c0"], scalars["beta"] = c0, beta
    run(plan_type("batched_gemm"), operands, scalars=scalars, symmetric=True)
    return operands["c"]


def packed(t: Tensor, like: Tensor) -> Tensor:
    """``t`` with its axes in the order in which ``like`` lies in memory; copied if it does not lie so itself."""
    if like.is_contiguous():
        return t.detach().contiguous()
    order = sorted(range(like.dim()), key=lambda axis: (like.stride()[axis], like.shape[axis]), reverse=True)
    return t.detach().permute(order).contiguous()


class TensorList:
    """Contiguous tensors of one element and device, of which norms are taken and which are clipped.

    On a GPU the runs are bound, and found again by the addresses and sizes of the tensors: a list that is known is
    launched without a look at its tensors. No tensor of a list is held.
    """

    #: The groups of ranks that hold the other parts of these tensors.
    divided: tuple[Any, ...] = ()

    #: The bound runs, and the tensor besides the list that each reads or writes.
    _bound: ClassVar[OrderedDict[tuple[Any, ...], tuple[BoundRun, Tensor | None]]] = OrderedDict()
    #: What captured graphs read, for as long as the process lives: nothing tells when a graph is gone.
    _captured: ClassVar[dict[tuple[Any, ...], tuple[BoundRun, Tensor | None]]] = {}

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.device = tensors, tensors[0].device
        self._key: tuple[Any, ...] = ()
        if self.device.type == "cuda":
            self._key = (self.device, tensors[0].dtype, tuple(map(Tensor.data_ptr, tensors)))
            self._key += (tuple(map(Tensor.numel, tensors)),)

    def norm(self, order: float) -> Tensor:
        """f64, of one element; good until the next call for tensors at these addresses."""
        norm = torch.empty(1, dtype=torch.float64, device=self.device)
        args = TotalNormArgs(self.tensors, norm)
        found = self._run(TotalNormPlan, args, (order,), {"order": order}, norm)
        assert found is not None
        return found

    def clip_(self, limit: float, norm: Tensor | None = None) -> None:
        """Scale the tensors by ``min(1, limit / (norm + 1e-6))``, or clamp them to [-limit, limit]."""
        of = (limit, None if norm is None else norm.data_ptr())
        options = {"op": "clip_value" if norm is None else "clip_norm"}
        self._run(ClipPlan, ClipArgs(self.tensors, limit, norm), of, options, norm)
        if self._key:  # plans run on the CPU count by themselves
            bump_versions(self.tensors)

    def written(self) -> None:
        """Tell the list that its tensors were written: some may be copies of those that were meant."""

    def _run(
        self,
        kind: type[TablePlan[Any, Any]],
        args: Any,
        of: tuple[Any, ...],
        options: Mapping[str, Any],
        beside: Tensor | None,
    ) -> Tensor | None:
        """Run. ``of``: the numbers and addresses besides the list's. Returns what the run reads or writes besides."""
        key, capturing = (kind, of, *self._key), bool(self._key) and torch.cuda.is_current_stream_capturing()
        found = None
        if self._key:
            found = self._bound.get(key) or (self._captured.get(key) if capturing else None)
        if found is None:
            plan: Any = PLANS.get(kind.descriptor_type.from_args(args, **options), target=Target.of(self.device))
            if not self._key:
                plan.run(args, Workspace.allocate(plan, self.device) if plan.workspace_size() else None)
                return beside
            found = self._bound[key] = plan.locate(args, counted=False), beside
            if len(self._bound) > MAX_LISTS:
                self._bound.popitem(last=False)
        if capturing:
            self._captured[key] = found
        found[0]()
        return found[1]
