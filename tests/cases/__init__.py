"""What several test modules share."""

from __future__ import annotations

from typing import Any

import pytest

import triplan as tp
from triplan.sku import interpreting

CPU, INTERPRETER = tp.Target.cpu(), tp.Target.cpu(interpret=True)
SM80, H200 = tp.Target.sm80(), tp.Target.sm90a()
WHERE = [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
#: Of a test that compiles kernels.
compiles = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")


def places(*kernels: str) -> list[Any]:
    """Where a kernel runs, and which: the reference, each kernel in the interpreter, each on a GPU."""
    marked = [(where, kernel) for where in ("interpret", "gpu") for kernel in kernels]
    return [
        pytest.param("cpu", None, id="cpu"),
        *(pytest.param(w, k, marks=getattr(pytest.mark, w), id=f"{w}-{k}") for w, k in marked),
    ]


def required(desc: tp.Descriptor, kernel: str | None, target: tp.Target) -> tp.Plan[Any, Any]:
    """The plan of exactly this kernel."""
    return tp.plan(desc, preference=tp.PlanPreference(kernel=kernel, deterministic=False), target=target)


def pinned(desc: tp.Descriptor, kernel: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    """The plan of exactly this kernel, or None where it does not apply."""
    try:
        return required(desc, kernel, target)
    except tp.Unsupported:
        return None


def repeats(plan: tp.Plan[Any, Any]) -> int:
    """How often ``check_plan`` runs each of a grid's problems: on the CPU once, where programs run one after the other.
    (``contracts/guarantees`` runs each entry again, over other rubbish.)"""
    return 2 if plan.target.device_type == "cuda" else 1
