"""Run a plan on plain tensors: derive the descriptor, look up the plan, allocate its workspace, run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from triplan.facade import Plan, PlanCache, Workspace, plan_type
from triplan.functional._replay.numbers import plain
from triplan.functional._replay.recording import Step, recording, setting
from triplan.sku import Target
from triplan.sku.facts import fact

#: The plans of functional calls, of about 10 KiB each. Calls that are replayed need none.
PLANS = PlanCache(1024)
#: Bytes: the strongest alignment that a layout can promise.
_MAX_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a descriptor is derived from, of one tensor: hashable, so that equal calls derive it once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int

    @classmethod
    def of(cls, t: torch.Tensor) -> _Facts:
        address = t.data_ptr()
        return cls(
            tuple(t.shape), t.stride(), t.dtype, min(address & -address, _MAX_ALIGNMENT) if address else _MAX_ALIGNMENT
        )

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.alignment

    def element_size(self) -> int:
        return self.dtype.itemsize


_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def _of_products() -> bool:
    if _precision is not None:  # once this setting is set, torch refuses to read the legacy flag
        return bool(_precision("cuda", "matmul") == "tf32")
    return torch._C._get_cublas_allow_tf32()


def _of_convolutions() -> bool:
    return bool(_precision("cuda", "conv") == "tf32") if _precision is not None else torch._C._get_cudnn_allow_tf32()


#: Whether torch's settings let f32 multiply in tf32 on CUDA.
_TF32 = {"matmul": _of_products, "conv": _of_convolutions}


def tf32_allowed(t: torch.Tensor, op: Literal["matmul", "conv"]) -> bool:
    """Whether torch's settings let the products of ``t`` multiply in tf32: of f32, on CUDA."""
    return t.dtype == torch.float32 and t.is_cuda and bool(setting(_TF32[op]))


def always_checks(device: torch.device) -> bool:
    """Whether bad indices on ``device`` raise unasked: where looking costs no wait."""
    return device.type == "cpu"


def _types(value: Any) -> Any:
    """The types in ``value``: an axis of 1.0 or True is refused, though it equals 1."""
    return tuple(map(_types, value)) if isinstance(value, tuple) else type(value)


@fact
def _describe(plan: Any, facts: tuple[Any, ...], options: tuple[tuple[str, Any], ...], types: Any) -> Any:
    return plan.descriptor_type.from_args(SimpleNamespace(**dict(facts)), **dict(options))


def run(
    plan_class: type[Plan[Any, Any]],
    operands: dict[str, Any],
    *,
    check_indices: bool = False,
    scalars: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run ``plan_class`` on ``operands`` (tensors and sequences of tensors) and ``scalars``; ``options`` are fields.

    The plan is looked up at every call, because determinism follows torch's global setting. Raises ``IndexError`` for
    a bad index on the CPU, and on CUDA with ``check_indices``, which synchronises; otherwise a bad index is skipped.
    Backward ops do not pass ``check_indices``: their forward has checked.
    """
    tensors = [t for v in operands.values() for t in (v if isinstance(v, (list, tuple)) else (v,))]
    device = tensors[0].device
    reports = "out_of_bounds" in plan_class.descriptor_type.model_fields
    check = reports and (check_indices or always_checks(device))
    if check:
        operands = {**operands, "status": torch.empty(1, dtype=torch.int64, device=device)}
        options["out_of_bounds"] = "error"
    facts: tuple[Any, ...] = tuple(
        (name, tuple(map(_Facts.of, v)) if isinstance(v, (list, tuple)) else _Facts.of(v))
        for name, v in operands.items()
    )
    # Of a scalar the type alone: 1 == 1.0, but 1 is not 0.5.
    facts += tuple((name, 0.5 if isinstance(v, float) else 1) for name, v in (scalars or {}).items())
    hashed: Any = plan_class  # to mypy, a class with a generic base is not
    desc = _describe(hashed, facts, tuple(options.items()), _types(tuple(options.values())))
    plan = PLANS.get(desc, target=Target.of(device))
    scalars = scalars or {}
    record = recording()
    args = plan.args_type(**operands, **(scalars if record is None else {n: plain(v) for n, v in scalars.items()}))
    workspace = Workspace.allocate(plan, device) if plan.workspace_size() else None
    plan.run(args, workspace)
    if check:
        plan.check(args)
    if record is not None:
        record.steps.append(Step(plan, operands, scalars, workspace))


def run_expression(
    operands: dict[str, torch.Tensor], out: str, root: Any, scalars: dict[str, Any] | None = None
) -> None:
    """Write ``root``, an expression of the other ``operands`` and of ``scalars``, to the operand ``out``."""
    run(plan_type("expression"), operands, scalars=scalars, results=((out, root),))


def run_reduced_expression(
    op: str, operands: dict[str, torch.Tensor], axes: Sequence[int], root: Any, scalars: dict[str, Any] | None = None
) -> None:
    """Write the ``op`` ("sum", ...) over ``axes`` of ``root``, an expression as above, to the operand ``out``."""
    op = f"{op}_expression"
    run(plan_type(op), operands, scalars=scalars, op=op, reduce_axes=tuple(axes), expression=root)
