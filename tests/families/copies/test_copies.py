"""Copies: every kernel against its reference, in the layouts that choose it; functional calls against torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import WHERE
from cases.functional import DEVICES
from proofs import target
from samples import same
from torch.library import opcheck
from torch.nn import functional as tf

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.testing import check_plan

Tensor = torch.Tensor
Call = tuple[Callable[..., Tensor], Callable[..., Tensor]]
TRIPLAN: Any = torch.ops.triplan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently

# --- plans ---

SHAPE = (2, 5, 40)
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "x turned": {"x": tp.Layout.strided(unit_axis=1)},
    "out turned": {"out": tp.Layout.strided(unit_axis=1)},
    "x across": {"x": tp.Layout.strided(unit_axis=0)},
    "strided": {"x": "strided", "out": "strided"},
    "expanded": {"x": tp.Layout.strided(zero_axes=(1,), unit_axis=2)},
}
CONVERSIONS = (("f64", "f16"), ("f32", "bf16"), ("bf16", "i32"), ("f32", "bool"), ("bool", "f16"), ("i64", "i8"))
CHANNELS_LAST = tp.Layout.strided(unit_axis=1, order=(0, 2, 3, 1))
AMOUNTS = {"flip": (0, 1, 1), "roll": (1, -2, 33), "tril": (1,), "triu": (-2,), "pad": (1, 0, -1, 2, 3, -4)}


def problems() -> Iterator[tp.Descriptor]:
    for element in ("i8", "bf16", "f32", "i64"):
        yield from (
            tp.CopyDescriptor(op="copy", element=element, input_shape=SHAPE, layouts=x) for x in LAYOUTS.values()
        )
    for element, other in CONVERSIONS:
        for how in ("packed", "x turned"):
            desc = tp.CopyDescriptor(op="copy", element=element, input_shape=SHAPE, layouts=LAYOUTS[how])
            yield desc.replace(out_element=other)
    for op, amounts in AMOUNTS.items():
        cls: Any = tp.descriptor_types()[op]
        for layouts in LAYOUTS.values():
            yield cls(op=op, element="bf16", input_shape=SHAPE, amounts=amounts, layouts=layouts)
    yield from (tp.PadDescriptor(element=e, input_shape=(3,), amounts=(-1, 2)) for e in ("f64", "i16", "bool"))
    yield tp.PadDescriptor(element="f32", input_shape=(0, 2), amounts=(2, 1, 0, 0))
    yield tp.CopyDescriptor(op="triu", element="f32", input_shape=(3, 1), amounts=(-1,))
    for op, amount in (("tril", -3), ("tril", 70), ("triu", 65), ("triu", -(1 << 40))):  # rows longer than a tile
        for x in (tp.Layout.strided(unit_axis=0), tp.Layout.strided(unit_axis=1, zero_axes=(0,))):
            layouts = {"x": x, "out": tp.Layout.strided(unit_axis=1)}
            yield tp.CopyDescriptor(op=op, element="f16", input_shape=(9, 300), amounts=(amount,), layouts=layouts)
    for element, widths in (("i8", (5, 40)), ("bf16", (16, 32, 64)), ("f64", (1, 0, 200, 7, 3)), ("bool", (1, 1))):
        yield tp.JoinDescriptor(element=element, rows=9, widths=widths)
        rows = tp.Layout.strided(unit_axis=1)
        yield tp.JoinDescriptor(element=element, rows=9, widths=widths, layouts={"x0": rows, "out": rows})
    yield tp.JoinDescriptor(element="f32", rows=0, widths=(3, 4))
    for element in ("bf16", "f64", "u8", "bool", "i64"):
        yield tp.FillDescriptor(element=element, out_shape=(3, 70), layouts={"out": "strided"})
        yield tp.FillDescriptor(element=element, out_shape=(2, 70, 3), layouts={"out": tp.Layout.strided(unit_axis=1)})
        # Long rows that begin anywhere.
        yield tp.FillDescriptor(element=element, out_shape=(2, 5000), layouts={"out": tp.Layout.strided(unit_axis=1)})
        yield tp.ArangeDescriptor(element=element, count=70)


def numbered() -> Iterator[tp.Descriptor]:
    """Packed results whose elements may be numbered regardless of rows."""
    # Interleaved, and numbered through: by elements, and by longer integers.
    for element, widths in (("i8", (1,) * 8), ("bf16", (1, 1)), ("bf16", (2,) * 4), ("f32", (2, 2)), ("f64", (1, 1))):
        yield tp.JoinDescriptor(element=element, rows=301, widths=widths)
    for element, widths in (("bool", (1,) * 7), ("bf16", (3, 3, 3)), ("i8", (4, 0, 2, 6)), ("f32", (2, 6))):
        yield tp.JoinDescriptor(element=element, rows=301, widths=widths)
        yield tp.JoinDescriptor(
            element=element, rows=301, widths=widths, layouts={"x0": tp.Layout.strided(zero_axes=(0,), unit_axis=1)}
        )
    for element, out in (("i8", "i8"), ("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16"), ("f64", "f64")):
        images = tp.CopyDescriptor(op="copy", element=element, input_shape=(2, 3, 17, 31), out_element=out)
        yield images.replace(layouts={"out": CHANNELS_LAST})
    for element in ("i8", "f16", "f32", "f64"):
        yield tp.PadDescriptor(element=element, input_shape=(3, 5, 7, 9), amounts=(0, 0, 0, 0, 3, 2, 1, 4))
        yield tp.PadDescriptor(element=element, input_shape=(1, 9, 3), amounts=(0, 0, -1, -2, 600, -1))
        yield tp.CopyDescriptor(op="flip", element=element, input_shape=(7, 300), amounts=(1, 1))
        for shape in ((5, 3, 60), (1, 1, 1204), (3, 2, 8), (3, 2, 9)):
            for amounts in ((1, 0, 1), (2, 1, -5), (0, 0, 4), (0, 0, 6), (0, 0, 7)):
                yield tp.CopyDescriptor(op="roll", element=element, input_shape=shape, amounts=amounts)


def checked(target: tp.Target | None, runs: int, found: Callable[[], Iterator[tp.Descriptor]] = problems) -> int:
    """Plans of the problems with each kernel that takes them."""
    count = 0
    for desc in found():
        for entry in tp.TABLE.rows(desc.op):
            try:
                plan = tp.plan(desc, target=target, kernel=entry.name)
            except tp.Unsupported:
                continue
            check_plan(plan, runs=runs)
            count += 1
    return count


def test_references_are_right_in_every_layout() -> None:
    assert checked(tp.Target.cpu(), 1) == len([*problems()])
    assert checked(tp.Target.cpu(), 1, numbered) == len([*numbered()])


@pytest.mark.interpret
def test_kernels_are_right_in_every_layout() -> None:
    assert checked(tp.Target.cpu(interpret=True), 1) > 1.3 * len([*problems()])
    assert checked(tp.Target.cpu(interpret=True), 1, numbered) > len([*numbered()])


@pytest.mark.gpu
def test_kernels_are_right_on_the_gpu() -> None:
    assert checked(None, 2) > 1.3 * len([*problems()])
    assert checked(None, 2, numbered) > len([*numbered()])


@pytest.mark.parametrize(
    ("op", "fields", "reason"),
    [
        ("flip", {"amounts": (2, 0, 0)}, "0 or 1"),
        ("roll", {"amounts": (1,)}, "roll of rank 3 has 3"),
        ("tril", {"input_shape": (4,)}, "takes matrices"),
        ("roll", {"out_element": "f16"}, "only copy converts"),
        ("pad", {"amounts": (0, 0, -3, -3, 0, 0)}, "leave out more"),
    ],
)
def test_problems_without_a_meaning_are_refused(op: str, fields: dict[str, Any], reason: str) -> None:
    cls: Any = tp.descriptor_types()[op]
    with pytest.raises(tp.InvalidProblem, match=reason):
        cls(op=op, **{"element": "f32", "input_shape": SHAPE, **fields})


@pytest.mark.parametrize(
    ("layouts", "kernel"), [({}, "rows"), ({"x": tp.Layout.strided(unit_axis=0, stride_multiple=8)}, "transposed")]
)
def test_select_turns_tiles_where_axes_differ(layouts: Any, kernel: str) -> None:
    desc = tp.CopyDescriptor(op="copy", element="bf16", input_shape=(8192, 8192), layouts=layouts)
    plan = tp.plan(desc, target="h200")
    assert plan.sku().kernel == kernel
    # Moves share binaries by the width of elements.
    others = [tp.plan(desc.replace(element=e), target="h200").launches[0].source() for e in ("f16", "i16")]
    assert {plan.launches[0].source()} == set(others)


PACKED = {"element": "bf16", "input_shape": (256, 3, 512, 512)}


@pytest.mark.parametrize(
    ("op", "fields", "kernel"),
    [
        ("copy", PACKED, "rows_kernel"),
        ("copy", {**PACKED, "layouts": {"out": CHANNELS_LAST}}, "flat_kernel"),
        ("copy", {**PACKED, "input_shape": (256, 64, 99, 99), "layouts": {"out": CHANNELS_LAST}}, "transposed_kernel"),
        ("pad", {**PACKED, "amounts": (0, 0, 0, 0, 3, 3, 3, 3)}, "flat_kernel"),
        ("pad", {**PACKED, "amounts": (0, 0, 3, 3, 0, 0, 0, 0)}, "rows_kernel"),
        ("flip", {**PACKED, "amounts": (0, 0, 1, 0)}, "rows_kernel"),
        ("flip", {**PACKED, "amounts": (0, 0, 0, 1)}, "flat_kernel"),
        ("flip", {**PACKED, "element": "f64", "amounts": (0, 0, 0, 1)}, "rows_kernel"),
        ("roll", {**PACKED, "element": "i8", "amounts": (0, 0, 0, 1)}, "flat_kernel"),
        ("roll", {**PACKED, "element": "i8", "input_shape": (999, 999), "amounts": (0, 1)}, "rows_kernel"),
        ("join", {"element": "bf16", "rows": 2**20, "widths": (1, 1)}, "interleave_kernel"),
        ("join", {"element": "i8", "rows": 2**20, "widths": (2,) * 8}, "interleave_kernel"),
        ("join", {"element": "f32", "rows": 2**20, "widths": (1,) * 8}, "join_flat_kernel"),
        ("join", {"element": "bf16", "rows": 2**20, "widths": (1, 1, 1)}, "join_flat_kernel"),
        ("join", {"element": "f32", "rows": 2**20, "widths": (1, 1, 1)}, "join_flat_kernel"),
        ("join", {"element": "bf16", "rows": 2**20, "widths": (4, 20, 2)}, "join_flat_kernel"),
        ("join", {"element": "i8", "rows": 2**18, "widths": (1001, 1003, 999)}, "join_flat_kernel"),
        ("join", {"element": "i8", "rows": 2**20, "widths": (3, 5, 2, 7, 1, 4, 3)}, "join_columns_kernel"),
        ("join", {"element": "bf16", "rows": 2**20, "widths": (64, 24)}, "join_kernel"),
    ],
)
def test_elements_are_numbered_where_rows_have_no_vectors(op: str, fields: dict[str, Any], kernel: str) -> None:
    desc = tp.descriptor_types()[op](op=op, **fields)
    assert tp.plan(desc, target="h200").launches[0].kernel.__name__ == kernel


@pytest.mark.parametrize("element", ["u8", "bf16"])
@pytest.mark.parametrize("where", WHERE)
def test_wide_odd_rows_are_joined_by_words(where: str, element: str) -> None:
    """Rows begin at every distance from a word, and some programs have elements of several inputs or rows."""
    desc = tp.JoinDescriptor(element=element, rows=5, widths=(8195, 37, 9001), layouts={"x0": tp.Layout(alignment=2)})
    plan = tp.plan(desc, target=target(where), kernel="join")
    assert plan.launches[0].constexprs["WIDE"]
    assert check_plan(plan, runs=1).compared


# --- functional ---

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "permuted": lambda x: x.permute(3, 0, 2, 1),
    "sliced": lambda x: x[:, ::2, 1:, ::3],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
}
#: Of a tensor of four axes.
CALLS: dict[str, Call] = {
    "clone": (F.clone, torch.clone),
    "contiguous": (F.contiguous, lambda x: x.contiguous()),
    "channels_last": (
        lambda x: F.contiguous(x, torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ),
    "expand_copy": (lambda x: F.expand_copy(x, (2, *x.shape)), lambda x: x.expand(2, *x.shape)),
    "permute_copy": (lambda x: F.permute_copy(x, (2, 0, 3, 1)), lambda x: x.permute(2, 0, 3, 1)),
    "transpose_copy": (lambda x: F.transpose_copy(x, 1, -1), lambda x: x.transpose(1, -1)),
    "flip": (lambda x: F.flip(x, (1, -1)), lambda x: x.flip(1, -1)),
    "roll": (lambda x: F.roll(x, (1, 2, 3), (0, 1, 0)), lambda x: x.roll((1, 2, 3), (0, 1, 0))),
    "roll all": (lambda x: F.roll(x, -3), lambda x: x.roll(-3)),
    "cat": (lambda x: F.cat([x, x[:, :1], x], 1), lambda x: torch.cat([x, x[:, :1], x], 1)),
    "cat first": (lambda x: F.cat([x, x, x * 2]), lambda x: torch.cat([x, x, x * 2])),
    "stack": (lambda x: F.stack([x, x], -1), lambda x: torch.stack([x, x], -1)),
    "stack three": (lambda x: F.stack([x, x * 2, x], -1), lambda x: torch.stack([x, x * 2, x], -1)),
    "stack eight": (
        lambda x: F.stack([x, *(x.detach() * i for i in range(7))], -1),
        lambda x: torch.stack([x, *(x.detach() * i for i in range(7))], -1),
    ),
    "stack inside": (lambda x: F.stack([x, x * 2], 2), lambda x: torch.stack([x, x * 2], 2)),
    "tril": (lambda x: F.tril(x, 1), lambda x: x.tril(1)),
    "triu_": (lambda x: F.triu_(x * 1, -1), lambda x: (x * 1).triu_(-1)),
    "copy_": (lambda x: F.copy_(x * 1, x[:1]), lambda x: (x * 1).copy_(x[:1])),
    "tile": (lambda x: F.tile(x, (2, 1, 3)), lambda x: x.tile(2, 1, 3)),
    "masked_fill": (lambda x: F.masked_fill(x, x[:1].bool(), 1), lambda x: x.masked_fill(x[:1].bool(), 1)),
    "masked_fill_": (lambda x: F.masked_fill_(x * 1, x[:1].bool(), 1), lambda x: (x * 1).masked_fill_(x[:1].bool(), 1)),
    "pad": (lambda x: F.pad(x, (1, 2, -1, 3), value=2), lambda x: tf.pad(x, (1, 2, -1, 3), value=2)),
    "fill_": (lambda x: F.fill_(x * 1, 3) + x, lambda x: (x * 1).fill_(3) + x),
    "zero_": (lambda x: F.zero_(x * 1), lambda x: (x * 1).zero_()),
    "full_like": (lambda x: F.full_like(x, 2), lambda x: torch.full_like(x, 2)),
}
#: These take their strides from torch.
PLACED = ("clone", "contiguous", "channels_last", "full_like", "zero_", "copy_", "triu_")


def drawn(dtype: torch.dtype, device: str) -> Tensor:
    found = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    return (found * 4).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_equal_torchs(name: str, view: str, device: str) -> None:
    ours, theirs = CALLS[name]
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        if dtype.is_complex and name in ("pad", "fill_", "zero_", "full_like", "masked_fill", "masked_fill_"):
            continue
        x = VIEWS[view](drawn(dtype, device))
        got, expected = ours(x), theirs(x)
        same(got, expected)
        assert name not in PLACED or got.stride() == expected.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_equal_torchs(name: str, device: str) -> None:
    ours, theirs = CALLS[name]
    leaves = [drawn(torch.float64, device).requires_grad_() for _ in range(2)]
    results = [call(x * x) for call, x in zip((ours, theirs), leaves, strict=True)]
    assert results[0].requires_grad == results[1].requires_grad
    if results[0].requires_grad:
        weights = torch.randn(results[0].shape, dtype=torch.float64, device=device)
        grads = [torch.autograd.grad(r, x, weights, create_graph=True)[0] for r, x in zip(results, leaves, strict=True)]
        same(grads[0].detach(), grads[1].detach())
        twice = [torch.autograd.grad(g.square().sum(), x)[0] for g, x in zip(grads, leaves, strict=True)]
        torch.testing.assert_close(*twice)


@pytest.mark.parametrize("device", DEVICES)
def test_conversions_equal_torchs(device: str) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool)
    for given in dtypes:
        x = drawn(given, device).mT
        for wanted in dtypes:
            same(F.cast(x, wanted), x.to(wanted))
            same(F.full_like(x, 2, dtype=wanted), torch.full_like(x, 2, dtype=wanted))
            same(F.cat([x, x.to(wanted)]), torch.cat([x, x.to(wanted)]))
    assert F.cast(x, x.dtype) is x
    fp8 = drawn(torch.float32, device).to(torch.float8_e4m3fn)
    same(F.clone(fp8.mT).view(torch.uint8), fp8.mT.view(torch.uint8))
    conjugated = drawn(torch.complex128, device).mH
    same(F.clone(conjugated).resolve_conj(), conjugated.resolve_conj())


@pytest.mark.parametrize("device", DEVICES)
def test_results_that_are_given(device: str) -> None:
    x = drawn(torch.float32, device)
    out = torch.empty(0, device=device)
    assert F.cat([x, x], 1, out=out) is out
    same(out, torch.cat([x, x], 1))
    same(F.permute_copy(x, (3, 2, 1, 0), out=torch.empty(5, 4, 3, 2, device=device)), x.permute(3, 2, 1, 0))
    square = drawn(torch.float32, device)[0, 0, :4, :4].contiguous()
    same(F.copy_(square.clone(), (kept := square.clone()).t()), kept.t())
    same(F.copy_(square, square.t()), kept.t())  # which overlaps
    deep = torch.randn([2] * 10, device=device)[:, 1:].permute(*reversed(range(10)))
    same(F.clone(deep), deep)
    same(F.fill_(deep, 2.0), torch.full_like(deep, 2.0))


def test_any_number_of_tensors_is_joined() -> None:
    many = [torch.full((2, 8 + i % 3 if i % 5 else 0), i, dtype=torch.float64) for i in range(40)]
    same(F.cat(many, 1), torch.cat(many, 1))
    compiled = torch.compile(lambda *t: F.cat(t, 1), backend="eager", fullgraph=True)
    same(compiled(*many), torch.cat(many, 1))


#: Of a tensor (6, 40, 8): what is joined along axis 1, and what is launched for that.
JOINED: dict[str, tuple[Callable[[Tensor], list[Tensor]], list[str]]] = {
    "packed": (lambda x: [x, x[:, :0], x * 2], ["join"]),
    "other widths": (lambda x: [x[:, :3], x * 2, x[:, 1:]], ["join"]),
    "parts of rows": (lambda x: [x[:, 1:20], x], ["join"]),
    "every other row": (lambda x: [x[::2], x[1::2]], ["join"]),
    "an expanded row": (lambda x: [x[:1].expand(6, -1, -1), x], ["join"]),
    "ten": (lambda x: [x] * 10, ["join", "join"]),
    "nine": (lambda x: [x] * 9, ["join", "copy"]),
    "turned": (lambda x: [x.mT.contiguous().mT, x], ["copy", "copy"]),
    "other dtypes": (lambda x: [x, x.to(torch.float64), x], ["copy"] * 4),
    "stacked": (lambda x: [x.repeat(2**10, 1, 1).view(-1, 1)] * 2, ["join"]),
    "many short rows": (lambda x: [x[:, :1].repeat(2**12, 1, 1), x.repeat(2**12, 1, 1)], ["copy", "copy"]),
}


@pytest.mark.parametrize("how", JOINED)
def test_one_launch_joins_matrices(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for plan_class in (tp.JoinPlan, tp.CopyPlan):
        run = plan_class.run

        def noted(plan: Any, *args: Any, run: Any = run) -> None:
            ran.append(plan.descriptor.op)
            run(plan, *args)

        monkeypatch.setattr(plan_class, "run", noted)
    joined, expected = JOINED[how]
    x = torch.randn(6, 40, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    same(F.cat(joined(x), 1), torch.cat(joined(x), 1))
    assert ran == expected


def test_refusals_say_why() -> None:
    x = torch.zeros(2, 3)
    for call, error, reason in (
        (lambda: F.pad(x, (1, 1), "reflect"), NotImplementedError, "only 'constant'"),
        (lambda: F.pad(x, (-2, -2)), RuntimeError, "leaves"),
        (lambda: F.flip(x, (0, -2)), RuntimeError, "multiple times"),
        (lambda: F.roll(x, (1, 2), (0,)), RuntimeError, "must align"),
        (lambda: F.cat([x, x.t()]), RuntimeError, "must match"),
        (lambda: F.stack([x, x.t()]), RuntimeError, "equal size"),
        (lambda: F.tril(x[0]), RuntimeError, "at least 2"),
        (lambda: F.copy_(x, torch.zeros(3, 3)), RuntimeError, "broadcast|match"),
        (lambda: F.fill_(x.to(torch.int8), 300), RuntimeError, "without overflow"),
        (lambda: F.fill_(x.to(torch.complex64), 1), NotImplementedError, "not supported"),
        (lambda: F.masked_fill(x, x, 1), RuntimeError, "boolean masks"),
        (lambda: F.masked_fill_(x[:1], x.bool(), 1), RuntimeError, "broadcast shape"),
        (lambda: F.masked_fill(x, x.bool(), x[0]), RuntimeError, "0-dimensional"),
        (lambda: F.cast(x.to(torch.complex64), torch.float32), NotImplementedError, "not converted"),
    ):
        with pytest.raises(error, match=reason):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_ops_are_registered_as_torch_expects(device: str) -> None:
    x = drawn(torch.float32, device)[0].contiguous().requires_grad_()
    for op, args in (
        (TRIPLAN.cat_2, (x, x.detach(), 1)),
        (TRIPLAN.move, (x, "pad", [0, 1, 2, 0, 0, 0], 2.5)),
        (TRIPLAN.triangle, (x, True, 1)),
        (TRIPLAN.copy, (x, x[:1])),
        (TRIPLAN.cast, (x, torch.bfloat16, torch.preserve_format)),
        (TRIPLAN.contiguous, (x.mT,)),
        (TRIPLAN.fill, (x, 2.0)),
    ):
        opcheck(op, args)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_without_a_tensor(device: str) -> None:
    same(F.zeros(2, 3, device=device), torch.zeros(2, 3, device=device))
    same(F.ones((2, 3), dtype=torch.int8, device=device), torch.ones((2, 3), dtype=torch.int8, device=device))
    for value in (True, 3, 0.1):
        same(F.full((4,), value, device=device), torch.full((4,), value, device=device))
    out = torch.empty(0, device=device)
    assert F.full((2, 2), 3, out=out) is out
    same(out, torch.full((2, 2), 3.0, device=device))
    for given in ((5,), (2, 9, 3), (5, -1, -2), (0.5, 3.0), (1, 2.5, 0.5), (3, 3), (1e9, 1e9 + 7)):
        for dtype in (None, torch.float64, torch.bfloat16, torch.int32):
            same(F.arange(*given, dtype=dtype, device=device), torch.arange(*given, dtype=dtype, device=device))
    assert F.zeros(3, requires_grad=True, device=device).requires_grad
    for wrong, reason in (((0, 3, 0), "nonzero"), ((0, 3, -1), "sign")):
        with pytest.raises(RuntimeError, match=reason):
            F.arange(*wrong)


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    """Offsets of 64 bits: packed, transposed, padded."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    x = torch.arange(2**16 + 8, device="cuda").to(torch.uint8).repeat(2**15 + 8, 1)
    assert torch.equal(F.clone(x), x)
    assert torch.equal(F.t_copy(x), x.t())
    assert torch.equal(F.pad(x, (1, -2), value=3)[:, 1:], x[:, :-2])
    assert torch.equal(F.cat([x[:, 9:], x], 1), torch.cat([x[:, 9:], x], 1))
    assert int(F.fill_(x, 7).amin()) == 7


@pytest.mark.parametrize("value", [0.5, -0.25, float("nan"), 0.0, 256])
def test_a_bool_filled_with_a_number_is_its_truth(value: float, device: str) -> None:
    x, mask = torch.tensor([[True, False, True], [True, True, False]], device=device)
    assert torch.equal(F.masked_fill(x, mask, value), x.masked_fill(mask, value))
    assert torch.equal(F.masked_fill_(x.clone(), mask, value), x.masked_fill(mask, value))


@pytest.mark.parametrize(
    "end", [np.float32(3), np.float64(2.5), np.int32(3), np.bool_(True), torch.tensor(2.5), torch.tensor(3)], ids=repr
)
def test_ranges_end_where_numpy_or_a_tensor_says(end: Any) -> None:
    same(F.arange(end), torch.arange(end))
    same(F.arange(end, 0, -1), torch.arange(end, 0, -1))


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.int32(3), np.bool_(True), torch.tensor(3), torch.tensor(True)], ids=repr
)
def test_tensors_of_one_number_have_the_dtype_of_numpys_or_a_tensors(value: Any) -> None:
    same(F.full((3,), value), torch.full((3,), value))
    same(F.full((3,), value, dtype=torch.float16), torch.full((3,), value, dtype=torch.float16))
    same(F.full_like(torch.empty(3), value), torch.full_like(torch.empty(3), value))
