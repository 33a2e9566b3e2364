"""Elementwise ops: the reference against torch, layouts, special values, the functional calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import places
from hypothesis import given, settings, strategies as st
from proofs import target
from proofs.elementwise import OPS
from samples import SetConstant

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.triton.elementwise import rows
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
#: torch's way to compute each function.
TORCH: dict[str, Any] = {"relu_squared": lambda x: torch.relu(x).square()}
SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 3.0, -3.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan"))
PLACES = places("flat", "strided")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def with_gradient(name: str, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = TORCH[name](x)
    (dx,) = torch.autograd.grad(out, x, dout)
    return out.detach(), dx


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_special_values_as_in_torch(where: str, kernel: str | None, name: str) -> None:
    x = torch.tensor(SPECIAL, device=target(where).device_type)
    out, dx = with_gradient(name, x, torch.ones_like(x))
    preference = tp.PlanPreference(kernel=kernel)
    forward = tp.plan(
        tp.UnaryDescriptor(op=name, input_shape=x.shape, element="f32"), target=target(where), preference=preference
    )
    got = torch.empty_like(x)
    forward.run(tp.UnaryArgs(x=x, out=got))
    torch.testing.assert_close(got, out, equal_nan=True)
    desc = tp.UnaryBackwardDescriptor(op=f"{name}_backward", input_shape=x.shape, element="f32")
    tp.plan(desc, target=target(where), preference=preference).run(
        tp.UnaryBackwardArgs(dout=torch.ones_like(x), x=x, dx=got)
    )
    torch.testing.assert_close(got, dx, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
@settings(max_examples=8)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, op: str, data: st.DataObject) -> None:
    desc = data.draw(descriptors(tp.descriptor_types()[op], 1 << 11, fixed={"op": op}))
    try:
        plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    except tp.Unsupported:
        return  # ``flat`` refuses operands with gaps
    check_plan(plan)


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_f64_is_rounded_to_bf16(where: str, kernel: str | None) -> None:
    desc = tp.UnaryDescriptor(op="relu_squared", input_shape=(5,), element="f64", out_element="bf16")
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)))


@pytest.mark.parametrize("op", ["exp", "square"])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_a_wider_result_has_no_wider_range(where: str, kernel: str | None, op: str) -> None:
    """f32 computes: what it cannot hold is infinite, also where f64 could hold it."""
    desc = tp.UnaryDescriptor(op=op, input_shape=(4,), element="bf16", out_element="f64")
    x = torch.tensor([1.0, 88.0, 90.0, 1e20], dtype=torch.bfloat16)
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)), given={"x": x})


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flat", "strided"])
def test_more_than_two_to_the_31st_elements(kernel: str) -> None:
    n = 2**31 + 5
    x = torch.zeros(n, dtype=torch.float16, device="cuda")
    out = torch.full_like(x, float("nan"))
    x[-3:] = 2
    desc = tp.UnaryDescriptor(op="relu_squared", input_shape=(n,), element="f16")
    tp.plan(desc, preference=tp.PlanPreference(kernel=kernel)).run(tp.UnaryArgs(x=x, out=out))
    assert out[-3:].tolist() == [4, 4, 4]
    assert out[:-3].count_nonzero().item() == 0  # NaN would count


@pytest.mark.parametrize("name", TORCH)
def test_derivatives_of_the_functional_call(name: str) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64).transpose(0, 2).requires_grad_()
    ours = getattr(F, name)
    torch.testing.assert_close(ours(x), TORCH[name](x))
    assert torch.autograd.gradcheck(ours, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, x)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_registered_op_passes_opcheck(name: str, device: str) -> None:
    x = torch.randn(5, 7, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.triplan.expression_1_1.default, (x, f"{name} t", []))
    torch.library.opcheck(torch.ops.triplan.expression_2_1.default, (x, x[0], "add_scaled ttn", [2.5]))
    compiled = torch.compile(getattr(F, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), getattr(F, name)(x))


@pytest.mark.parametrize("name", TORCH)
def test_out_is_written_and_integers_are_refused(name: str) -> None:
    x, out = torch.randn(6), torch.full((6,), float("nan"))
    assert getattr(F, name)(x, out=out) is out
    torch.testing.assert_close(out, TORCH[name](x))
    with pytest.raises(RuntimeError, match="floating-point"):
        getattr(F, name)(torch.arange(3))


def test_a_class_of_several_ops_requires_one_by_name() -> None:
    with pytest.raises(tp.InvalidProblem, match="op: Field required"):
        tp.UnaryDescriptor(input_shape=(3,), element="f32")  # type: ignore[call-arg]
    with pytest.raises(tp.InvalidProblem, match="op = 'nothing'"):
        tp.UnaryDescriptor(op="nothing", input_shape=(3,), element="f32")  # type: ignore[arg-type]


@pytest.mark.parametrize("over", [("y",), ("z",), ("y", "z")], ids=",".join)
@pytest.mark.parametrize(("where", "kernel"), places("flat", "strided", "rows", "transposed"))
def test_a_result_may_lie_over_any_operand(where: str, kernel: str | None, over: tuple[str, ...]) -> None:
    device = target(where).device_type
    drawn = {name: torch.randn(40, 70, device=device) for name in ("x", "y", "z")}
    if kernel == "transposed":
        drawn["x"] = torch.randn(70, 40, device=device).t()
    values = {name: drawn[over[0]] if name in over else t for name, t in drawn.items()}
    args = tp.TernaryArgs(**values, out=values[over[0]])
    desc = tp.TernaryDescriptor.from_args(args, op="addcmul")
    expected = torch.addcmul(*values.values())
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    plan.run(args)
    torch.testing.assert_close(args.out, expected)


@pytest.mark.parametrize(("y", "z"), [((301,), (45, 1)), ((45, 301), (301,)), ((1, 1), (45, 1))])
@pytest.mark.parametrize("element", ["bf16", "f32", "i8"])
@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
def test_rows_that_begin_anywhere_are_read_as_consecutive_elements(
    where: str, element: str, y: tuple[int, ...], z: tuple[int, ...], constant: SetConstant
) -> None:
    """As those of large problems; vectors of elements wrap around at the end of a row."""
    constant(rows, "LARGE", 1)
    desc = tp.TernaryDescriptor(op="clamp", element=element, input_shape=(45, 301), y_shape=y, z_shape=z)
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel="rows"))
    assert plan.launches[0].kernel.__name__ == "wrapped_kernel"
    assert check_plan(plan).compared >= 45 * 301
