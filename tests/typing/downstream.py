"""What a package that uses triplan writes. Type checkers must refuse the lines marked ``# refused`` and no other.

Checked by tests/core/test_packaging.py, never run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from typing_extensions import assert_type

import triplan as tp
from triplan.extend import AxisField, Element, Extent, OptionalElement, Shape, field

# --- descriptors: names, torch dtypes and lists are taken, unknown and missing fields are not ---

gemm = tp.GemmDescriptor(m=1, n=2, k=3, element="f32", out_element=torch.float32, math="tf32x3")
gather = tp.GatherDescriptor(out_shape=[4], gather_dim=0, src_dim_size=9, element=tp.ElementKind.F32)
soft = tp.SoftmaxDescriptor(input_shape=torch.Size((2, 3)), softmax_axis=1, element=torch.bfloat16)
promised = tp.RmsNormDescriptor(input_shape=(2, 3), element="f32", layouts={"x": "strided", "out": tp.Layout()})
tp.GemmDescriptor(mm=1)  # refused
tp.GemmDescriptor(m=1, n=2, k=3)  # refused
tp.GemmDescriptor(m=1, n=2, k=3, element="f33")  # refused
tp.GemmDescriptor(m="1", n=2, k=3, element="f32")  # refused
tp.GemmDescriptor(1, 2, 3, "f32")  # refused
tp.GatherDescriptor(out_shape=4, gather_dim=0, src_dim_size=9, element="f32")  # refused
tp.RmsNormDescriptor(input_shape=(2, 3), element="f32", layouts={"x": "stridden"})  # refused
tp.Layout.strided(unit_axes=0)  # refused
assert_type(gemm.element, tp.ElementKind)
assert_type(gemm.out_element, tp.ElementKind | None)
assert_type(gather.out_shape, tuple[int, ...])
assert_type(gather.replace(src_dim_size=8), tp.GatherDescriptor)

# --- requests ---

required = tp.PlanPreference(deterministic=True, exclude=["tma"])
tp.PlanPreference(determinstic=True)  # refused
tp.plan(gemm, preference=required, target="h200", batch_invariant=True)
tp.plan(gemm, determinstic=True)  # refused
tp.plan(gemm, target="h20")  # refused
tp.plan(gemm, deterministic="yes")  # refused
print(tp.Target.preset("a100").sm_counts)  # refused

# --- the plan of a descriptor, and its args ---

cache = tp.PlanCache()
assert_type(tp.plan(gather), tp.GatherPlan)
assert_type(tp.plan(gemm, target=tp.Target.cpu(), kernel="tiles"), tp.GemmPlan)
assert_type(tp.GemmPlan.select(gemm, order_invariant=True), tp.GemmPlan)
assert_type(cache.get(soft, deterministic=True), tp.SoftmaxPlan)
assert_type(tp.plan(tp.parse_descriptor("{}")), tp.Plan[Any, Any])
tp.GemmPlan.select(gather)  # refused
x = torch.empty(2, 3)
tp.plan(soft).run(tp.SoftmaxArgs(x=x, out=x))
tp.plan(soft).bind(tp.SoftmaxArgs(x=x, out=x))()
tp.plan(soft).run(tp.GatherArgs(src=x, index=x, out=x))  # refused
cache.get(soft).bind(tp.GatherArgs(src=x, index=x, out=x))  # refused
tp.SoftmaxArgs(x=x)  # refused


# --- an op of its own ---


class TopK(tp.Descriptor):
    op: Literal["acme::topk"] = "acme::topk"
    element: Element = field(default="f32")
    input_shape: Shape
    others: Shape = field(default=())
    aux: OptionalElement = field(default=None)
    axis: Annotated[int, AxisField("input_shape")] = 1
    k: Extent


top = TopK(input_shape=[2, 3], k=1, aux="f16")
assert_type(top.input_shape, tuple[int, ...])
assert_type(tp.plan(top), tp.Plan[Any, Any])
TopK(input_shape=[2, 3], kk=1)  # refused
