"""Mistakes in a registration are found before a launch, by errors that name the kernel and the mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl
from samples import SAMPLES

import triplan as tp
from triplan import extend
from triplan.backends.select import select, sku_of

DESC, H200 = SAMPLES["relu_squared"], tp.Target.preset("h200")
X = extend.Ptr("x", tp.ElementKind.F32, 16)
EXACT = tp.PrecisionGuarantee.exact(tp.ElementKind.F32)


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def chosen(args: dict[str, Any], constexprs: dict[str, Any], guarantee: Any = EXACT, supports: Any = None) -> None:
    """Register a kernel of relu_squared, select it, and ask for what it launches and promises."""
    table = tp.KernelTable()
    register = tp.kernel(
        op="relu_squared",
        name="mine",
        elements=("f32",),
        guarantee=lambda desc: guarantee if isinstance(guarantee, dict) else {"out": guarantee},
        rank=lambda desc, target: 1.0,
        table=table,
        **({} if supports is None else {"supports": supports}),
    )
    register(lambda desc, target: [extend.Launch(copy_kernel, 1, args, constexprs)])
    entry, _ = select(DESC, tp.PlanPreference().resolved(), H200, table=table)
    entry.launches(DESC, H200)
    sku_of(entry, DESC, H200)


ARGS = {"x": X, "out": replace(X, operand="out"), "n": extend.Int(5)}
BLOCK = {"BLOCK": 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"args": {"x": X, "n": None}}, "copy_kernel: it gets no 'out'", id="argument missing"),
        pytest.param({"constexprs": {}}, "copy_kernel: it gets no 'BLOCK'", id="constexpr missing"),
        pytest.param(
            {"args": {**ARGS, "y": X}}, "copy_kernel: it has no argument 'y' .it has x,", id="argument unknown"
        ),
        pytest.param({"constexprs": {**BLOCK, "B": 1}}, "copy_kernel: it has no argument 'B'", id="constexpr unknown"),
        pytest.param({"constexprs": {**BLOCK, "n": 1}}, "copy_kernel: it gets 'n' in args and in", id="both"),
        pytest.param(
            {"args": {**ARGS, "BLOCK": None}, "constexprs": {}}, "'BLOCK' is a constexpr, but", id="constexpr in args"
        ),
        pytest.param(
            {"args": {**ARGS, "n": (None, (extend.Stride("y", 0),))}},
            "'mine' of relu_squared: argument 'n' of copy_kernel is read from operand 'y'; .* x, out",
            id="operand unknown",
        ),
        pytest.param({"guarantee": {"y": EXACT}}, "'mine' of relu_squared: its guarantee is of y; .* out", id="output"),
        pytest.param({"supports": lambda d, t: True}, "'mine' of .* returned True; .* triplan.Support", id="true"),
        pytest.param({"supports": lambda d, t: False}, "'mine' of .* returned False", id="false"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], said: str) -> None:
    good = {"args": ARGS, "constexprs": BLOCK}
    chosen(**good)
    with pytest.raises(tp.InvalidProblem, match=said):
        chosen(**{**good, **changes})


def test_an_operand_names_what_it_overwrites_in_a_tuple() -> None:
    """In a string every part of a name would be found."""
    with pytest.raises(tp.InvalidProblem, match="over = 'x0'; a tuple of names is wanted"):
        tp.Operand("out", tp.Role.OUTPUT, tp.ElementKind.F32, over="x0")  # type: ignore[arg-type]


def test_a_reference_returns_the_outputs_that_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    plan = tp.plan(DESC, target=tp.Target.cpu())
    monkeypatch.setattr(plan, "_entry", replace(plan._entry, compute=lambda desc, inputs: {"dx": inputs["x"]}))
    x = torch.zeros(DESC.input_shape)
    with pytest.raises(tp.InvalidProblem, match="'reference' of relu_squared returned dx; the outputs are out"):
        plan.run(tp.UnaryArgs(x=x, out=torch.empty_like(x)))


@pytest.mark.parametrize("name", ["scale", "::scale", "acme::", "acme:scale"])
def test_a_functional_op_has_a_namespace(name: str) -> None:
    nothing: Any = None
    with pytest.raises(tp.InvalidProblem, match="namespace::name"):
        extend.Op(name, "Tensor x", shape=nothing, fill=nothing, setup=nothing, backward=nothing)
