"""Expressions of one's own: built, refused, planned alike everywhere, differentiated, and held to their bounds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CPU, H200, WHERE, pinned
from proofs import target

import triplan as tp
from triplan.testing import args_for, check_plan, magnitudes, oracle
from triplan.testing.oracle import judge

E = tp.expr
a, b, c = (E.operand(name) for name in "abc")
SHAPE = (33, 70)
L = tp.Layout.strided
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def fused(shape: tuple[int, int] = SHAPE, **layouts: Any) -> tp.ExpressionDescriptor:
    """silu(a) * b + c in bf16, with a row b of f32 and a column c."""
    inputs = {"a": ("bf16", shape), "b": ("f32", shape[1:]), "c": ("bf16", (shape[0], 1))}
    return tp.ExpressionDescriptor.of(E.silu(a) * b + c, {"out": "bf16"}, **inputs).replace(layouts=layouts)


def chain(n: int) -> tp.expr.Expr:
    x = a
    for _ in range(n):
        x = x + 1
    return x


def of(root: Any, **inputs: Any) -> tp.ExpressionDescriptor:
    return tp.ExpressionDescriptor.of(root, **(inputs or {"a": ("f32", (4,))}))


SUM = (("operand", "a"), ("add", 0, 0))


def raw(nodes: Any, results: Any = (("out", 1, "f32"),), inputs: Any = (("a", "f32", (4,)),)) -> tp.Descriptor:
    return tp.parse_descriptor(json.dumps({"op": "expression", "inputs": inputs, "nodes": nodes, "results": results}))


#: What is refused, and what the error says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown function": (lambda: raw([("operand", "a"), ("zeta", 0)]), "not in the maths table"),
    "unknown operand": (lambda: of(a + b), "names operand 'b'"),
    "later node": (lambda: raw([("operand", "a"), ("add", 0, 1)]), "takes 2 earlier nodes"),
    "too few arguments": (lambda: raw([("operand", "a"), ("add", 0)]), "takes 2 earlier nodes"),
    "text for a node": (lambda: raw([("operand", "a"), ("add", 0, "0")]), "takes 2 earlier nodes"),
    "no number": (lambda: raw([("number", "import os"), ("add", 0, 0)]), "a leaf must be"),
    "no such result": (lambda: raw(SUM, (("out", 7, None),)), "there are 2 nodes"),
    "no result": (lambda: raw(SUM, ()), "at least one result"),
    "twice a name": (lambda: raw(SUM, (("a", 1, None),)), "distinct identifiers"),
    "no tensor": (lambda: of(a + 1, a=("f32", None)), "no operand is a tensor"),
    "shapes": (lambda: of(a + b, a=("f32", (3,)), b=("f32", (4,))), "do not broadcast"),
    "rank": (lambda: of(a + b, a=("f32", (1,) * 8), b=("f32", (2,) * 9)), "rank"),
    "float bits": (lambda: of(a & 1), "bitwise_and does not take f32"),
    "bool difference": (lambda: of(a - a, a=("bool", (4,))), "sub does not take bool"),
    "selection": (lambda: of(E.where(a, a, 0)), "selects by bool"),
    "float as integer": (lambda: tp.ExpressionDescriptor.of(a, {"out": "i32"}, a=("f32", (4,))), "cannot be stored as"),
    "depth": (lambda: of(chain(300)), "nested more than 200 deep"),
    "size": (lambda: of(chain(12_000)), "a tree must have 1 to 10000"),
    "truth": (lambda: of(1 if a < 0 else a), "no truth value"),
    "arity": (lambda: E.tanh(a, a), "takes 1 arguments"),
    "no expression": (lambda: of("a + 1"), "not an expression"),
    "gradient of nothing": (lambda: fused().backward(["z"]), "wrt names z"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_trees_are_refused_quickly(case: str) -> None:
    make, says = REFUSED[case]
    start = time.process_time()
    with pytest.raises(tp.InvalidProblem, match=says):
        make()
    assert time.process_time() - start < 2


def test_a_tree_of_ten_thousand_nodes_is_taken() -> None:
    rows = [a * float(i) for i in range(3300)]
    while len(rows) > 1:
        rows = [x + y for x, y in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) - len(rows) % 2 :]
    assert tp.plan(of(rows[0]), target=CPU).precision_guarantee().deterministic


def test_equal_trees_are_one_problem_and_shared_values_stand_once() -> None:
    one = of({"p": E.exp(a) * 2, "q": E.exp(a) + 1}, a=("f32", (4,)))
    assert sum(node[0] == "exp" for node in one.nodes) == 1
    assert tp.parse_descriptor(one.to_json()) == one
    assert of(E.silu(a)) == of(a * E.sigmoid(a))
    assert of(a * 0.0) != of(a * -0.0)


def test_another_process_plans_the_same_sku_from_json() -> None:
    code = "import sys, triplan as tp; p = tp.plan(tp.parse_descriptor(sys.stdin.read()), target='h200'); "
    code += "print(p.sku().model_dump_json())"
    out = subprocess.run(
        [sys.executable, "-c", code], input=fused().to_json(), capture_output=True, text=True, check=True
    )
    assert tp.KernelSku.model_validate_json(out.stdout) == tp.plan(fused(), target="h200").sku()


#: Layouts for the kernels: name -> (kernel, descriptor).
GEOMETRIES: dict[str, tuple[str, tp.ExpressionDescriptor]] = {
    "flat": ("flat", of(E.silu(a) * b, a=("bf16", SHAPE), b=("f32", ()))),
    "row and column": ("rows", fused()),
    "padded": ("rows", fused(a=L(unit_axis=1), out=L(unit_axis=1, alignment=16, stride_multiple=8))),
    "between": ("rows", of(a * b + c, a=("f16", (2, 3, 5, 33)), b=("f16", (2, 1, 5, 1)), c=("f32", (33,)))),
    "transposed": ("transposed", fused(a=L(unit_axis=0, alignment=16, stride_multiple=8))),
    "transposed in a batch": (
        "transposed",
        of(a - b, a=("i32", (3, 65, 40)), b=("i32", (3, 65, 1))).replace(layouts={"a": L(unit_axis=1)}),
    ),
    "result transposed": ("transposed", fused(out=L(unit_axis=0))),
    "strided": ("strided", fused(a=L(), b=L())),
    "expanded": ("strided", of(a + b, a=("f64", SHAPE), b=("f64", SHAPE)).replace(layouts={"b": L(zero_axes=(0,))})),
    "bools and bytes": ("rows", of(E.where(a, b, c) * 3, a=("bool", SHAPE), b=("u8", (70,)), c=("i8", (33, 1)))),
}


@pytest.mark.parametrize("where", ["cpu", *WHERE])
@pytest.mark.parametrize("case", GEOMETRIES)
def test_every_geometry(case: str, where: str) -> None:
    kernel, desc = GEOMETRIES[case]
    kernels = ("reference",) if where == "cpu" else ("flat", "rows", "transposed", "strided")
    plans = [p for k in kernels if (p := pinned(desc, k, target(where)))]
    assert kernel in {p.sku().kernel for p in plans} | ({kernel} if where == "cpu" else set())
    bits = []
    for plan in plans:
        assert check_plan(plan, runs=1 if where == "interpret" else 2).compared
        placed = args_for(desc, plan.target.device_type, values="special")
        plan.run(placed.args)
        bits.append(torch.nan_to_num(placed.host().out, 9.0))
        assert torch.equal(bits[0], bits[-1])  # as their equal numerics ids say


def test_select_takes_the_kernel_of_the_geometry() -> None:
    turned = L(unit_axis=0, alignment=16, stride_multiple=8)
    promises = {"rows": {}, "transposed": {"a": turned}, "strided": {"a": L()}}
    for kernel, layouts in promises.items():
        assert tp.plan(fused((4096, 7000), **layouts), target=H200).sku().kernel == kernel
    assert tp.plan(of(a + b, a=("f32", (7, 9)), b=("f32", (7, 9))), target=H200).sku().kernel == "flat"


def test_short_sides_are_transposed_beside_a_third_axis_alone() -> None:
    """Of two dimensions, consecutive threads share sectors along the short side, and none of their lanes is idle."""
    for shape, axis, kernel in (((1 << 20, 3), 0, "strided"), ((2400, 2, 1000), 1, "transposed")):
        layouts = {"a": L(unit_axis=axis, alignment=16, stride_multiple=8)}
        desc = of(a + b, a=("bf16", shape), b=("bf16", shape)).replace(layouts=layouts)
        assert tp.plan(desc, target=H200).sku().kernel == kernel


@pytest.mark.parametrize(
    ("tree", "element", "shape", "side"),
    [
        (a + b, "bf16", (8192, 8192), 128),
        (a + b, "bf16", (8192, 8193), 64),  # rows begin between vectors: it would spill
        (a + b, "bf16", (4096, 4096), 64),
        (a + b, "bf16", (1 << 20, 136), 64),  # columns of 128 would leave lanes idle
        (a + b, "f32", (8192, 8192), 64),
        (E.tanh(a) * b, "bf16", (8192, 8192), 64),
    ],
)
def test_large_tiles_are_of_functions_of_few_registers(
    tree: tp.Expr, element: str, shape: tuple[int, int], side: int
) -> None:
    turned = L(unit_axis=0, alignment=16, stride_multiple=8)
    desc = of(tree, a=(element, shape), b=(element, shape)).replace(layouts={"a": turned})
    for of_target in (H200, tp.Target.preset("a100")):
        plan = tp.plan(desc, target=of_target, preference=tp.PlanPreference(kernel="transposed"))
        assert plan.launches[0].constexprs["BLOCK_ROWS"] == side
        assert plan.compile()[0].spill_bytes == 0


@pytest.mark.parametrize("where", ["cpu", *WHERE])
def test_numbers_in_args_vary_without_another_kernel(where: str) -> None:
    s = E.operand("s")
    desc = of({"out": a * s, "more": a + s}, a=("f32", (5,)), s=("f32", None))
    plan = tp.plan(desc, target=target(where))
    x = torch.arange(5.0, device=plan.target.device_type)
    for value in (0.1, -3.0):
        args = tp.ExpressionArgs(a=x, s=value, out=torch.empty_like(x), more=torch.empty_like(x))
        plan.run(args)
        torch.testing.assert_close(args.out, x * value)
        torch.testing.assert_close(args.more, x + value)


#: Expressions whose gradients are compared with autograd's: of shared values, several results, functions of functions.
DIFFERENTIATED: dict[str, tuple[Any, Callable[..., Any]]] = {
    "fused": (E.silu(a) * b + c, lambda a, b, c: torch.nn.functional.silu(a) * b + c),
    "shared": (E.tanh(a * b) * E.exp(E.tanh(a * b)) + 0 * c, lambda a, b, c: (a * b).tanh() * (a * b).tanh().exp()),
    "selected": (E.where(a > b, E.log(E.abs(a)), E.sqrt(E.abs(c))) ** 2,
                 lambda a, b, c: torch.where(a > b, a.abs().log(), c.abs().sqrt()) ** 2),
    "reversed": (2 / (1 + abs(a)) - b % 3 + 2**c, lambda a, b, c: 2 / (1 + a.abs()) - b % 3 + 2**c),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradients_are_autograds(case: str) -> None:
    root, formula = DIFFERENTIATED[case]
    g = torch.Generator().manual_seed(0)
    given = {n: torch.randn(64, generator=g, dtype=torch.float64).requires_grad_() for n in "abc"}
    desc = of(root, **dict.fromkeys("abc", ("f64", (64,))))
    dout = torch.randn(64, generator=g, dtype=torch.float64)
    wanted = torch.autograd.grad(formula(**given), list(given.values()), dout, allow_unused=True)
    back = desc.backward("abc")
    found = {f"d{n}": torch.empty(64, dtype=torch.float64) for n in "abc"}
    read = {o.name: {**given, "dout": dout}[o.name].detach() for o in back.operands() if not o.is_written}
    tp.plan(back, target=CPU).run(tp.ExpressionArgs(**read, **found))
    for n, right in zip("abc", wanted, strict=True):
        torch.testing.assert_close(found[f"d{n}"], torch.zeros(64, dtype=torch.float64) if right is None else right)


@pytest.mark.parametrize("pair", ["i64 f16", "f16 bf16", "u8 i8", "bool i16", "i32 f64"])
@pytest.mark.parametrize("shape", [(3,), ()], ids=["vector", "point"])
def test_promotion_is_torchs(pair: str, shape: tuple[int, ...]) -> None:
    x, y = (tp.ElementKind(e).torch for e in pair.split())
    right = torch.result_type(torch.empty(3, dtype=x), torch.empty(shape, dtype=y))
    assert of(a + b, a=(x, (3,)), b=(y, shape)).tree.results[0][1].torch == right
    assert of(a * 300, a=(x, (3,))).tree.results[0][1].torch == torch.result_type(torch.empty(3, dtype=x), 300)


# --- running errors ---

#: Trees that amplify: a sum that cancels, an exponential of a sum, a quotient by a difference, a step at a sum.
AMPLIFIERS: dict[str, Any] = {
    "cancellation": (a + b) - a,
    "exponential of a sum": E.exp(a * b + c),
    "quotient by a difference": a / (b * c - b),
    "polynomial near its root": a * a * a - 3 * a * a + 3 * a - 1,
    "step": E.where(a * b > c, a, b),
    "logarithm near 1": E.log(1 + a * b),
    "rounded": E.floor(a * b) + E.sin(a * c),
}


@pytest.mark.parametrize("where", ["cpu", *WHERE])
@pytest.mark.parametrize("case", AMPLIFIERS)
def test_running_errors_bound_hostile_values_and_say_something(case: str, where: str) -> None:
    desc = of(AMPLIFIERS[case], **dict.fromkeys("abc", ("f32", (999,))))
    plan = tp.plan(desc, target=target(where))
    check_plan(plan, runs=1, passes=("unit", "wide", "special"))
    x = args_for(desc, values="unit").host()
    terms = magnitudes(desc, x)["out"]
    assert terms.isfinite().double().mean() > 0.8
    # With operands rounded to bf16 the same tree is outside: the bound is not merely large.
    rounded = type(x)(**{n: None if v is None else v.bfloat16().float() for n, v in vars(x).items()})
    wrong = oracle(desc, rounded)["out"]
    verdict = judge(wrong.float(), oracle(desc, x)["out"], terms, plan.precision_guarantee())
    assert verdict.wrong.any()


def test_only_trees_have_a_tolerance_that_follows_the_values() -> None:
    assert tp.plan(of(E.exp(-a)), target=H200).precision_guarantee().tolerance.ctol == 0
    assert tp.plan(of(E.relu(a)), target=H200).precision_guarantee().tolerance.exact
    assert tp.plan(of(E.exp(a + 1)), target=H200).precision_guarantee().tolerance.ctol > 0
    # erf(x) is 1.13 x near 0: a subnormal result may be flushed.
    assert tp.plan(of(E.erf(a)), target=H200).precision_guarantee().tolerance.underflow > 1.13 * 2.0**-126


@pytest.mark.parametrize("where", ["cpu", *WHERE])
def test_a_result_may_overwrite_the_operand_of_its_shape(where: str) -> None:
    plan = tp.plan(of(a * b, a=("f32", (6, 5)), b=("f32", (5,))), target=target(where))
    x, y = (torch.rand(n, device=plan.target.device_type) for n in ((6, 5), (5,)))
    right = x * y
    plan.run(tp.ExpressionArgs(a=x, b=y, out=x))
    torch.testing.assert_close(x, right)
