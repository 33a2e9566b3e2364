"""What several test modules share."""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any

import pytest
import triton
import triton.language as tl

import triplan as tp
from triplan.sku import interpreting

CPU, INTERPRETER = tp.Target.cpu(), tp.Target.cpu(interpret=True)
SM80, H200 = tp.Target.sm80(), tp.Target.sm90a()
WHERE = [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
#: Of a test that compiles kernels.
compiles = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
#: Of gradcheck and gradgradcheck: along one direction, not for each element, which takes four times as long. There a
#: wrong element is one of many terms, and so the tolerances are a thousandth and a ten-thousandth of the usual ones.
FAST: Any = {"fast_mode": True, "rtol": 1e-6, "atol": 1e-9}


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


def empty_kernel(kernel: Any) -> Any:
    """A kernel of the name and the parameters of ``kernel`` that does nothing, and so compiles fast."""
    parameters = (f"{p.name}: tl.constexpr" if p.is_constexpr else p.name for p in kernel.params)
    return _empty(kernel.__name__, ", ".join(parameters))


@cache
def _empty(name: str, parameters: str) -> Any:
    source, filename = f"def {name}({parameters}):\n    pass\n", f"<{name}({parameters})>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = {"tl": tl, "__name__": __name__}
    exec(compile(source, filename, "exec"), scope)
    return triton.jit(scope[name])
