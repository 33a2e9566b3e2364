"""The vocabulary and the descriptors: identity, strictness, JSON, keys."""

from __future__ import annotations

import dataclasses
import json
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from samples import ACCUMULATING, REPRESENTED, SAMPLES, known

import triplan as tp
from triplan.backends.select import canonical_key

H200 = tp.Target.preset("h200")
LOOSE = tp.PlanPreference(deterministic=False)


@pytest.mark.parametrize("op", SAMPLES)
def test_json_round_trip_is_exact(op: str) -> None:
    desc = SAMPLES[op].replace(layouts={SAMPLES[op].operands()[0].name: tp.Layout.strided(unit_axis=0)})
    again = tp.parse_descriptor(desc.to_json())
    assert type(again) is type(desc)
    assert again == desc
    assert again.key == desc.key
    assert hash(again) == hash(desc)
    assert pickle.loads(pickle.dumps(desc)) == desc
    assert tp.parse_descriptor(json.loads(desc.to_json())) == desc


@pytest.mark.parametrize("op", SAMPLES)
def test_sku_round_trips_and_says_what_the_kernel_is(op: str) -> None:
    index = known(SAMPLES[op], index_element="i32")
    sku = tp.plan(SAMPLES[op].replace(**index), target=H200).sku()
    assert tp.KernelSku.model_validate_json(sku.model_dump_json()) == sku
    assert (sku.op, sku.element, str(sku.arch)) == (op, SAMPLES[op].element, "sm90a")
    assert sku.index_element == index.get("index_element")
    named = sku.id.replace("i64", "").replace(f"/v{sku.version}/", "/")
    assert "6" not in named  # free of shapes


@pytest.mark.parametrize("op", SAMPLES)
def test_args_fields_are_the_operands(op: str) -> None:
    desc = SAMPLES[op].replace(
        **known(SAMPLES[op], out_of_bounds="error", residual=True, mask="f32", amsgrad=True, slopes=True, sink=True),
        **known(SAMPLES[op], copy_element="bf16", branch_element="bf16", branch_gradient=True, dropout=True, relu=True),
    )
    args = tp.plan_type(op).args_type
    if issubclass(args, tp.NamedArgs):
        args = type(args(**{o.name: None for o in desc.operands()}))
    fields = [f.name for f in dataclasses.fields(args)]
    rounded: dict[str, Any] = {"stochastic": True, "element": "bf16", "copy_element": None}
    others = ({"table_rows": None}, {"mask": None, "sequences": 3}, rounded if hasattr(desc, "stochastic") else {})
    variants = [[o.name for o in d.operands()] for d in (desc, *(desc.replace(**known(desc, **o)) for o in others))]
    for names in variants:
        assert [f for f in fields if f in names] == names
    assert set(fields) == {name for names in variants for name in names}


def test_every_op_has_descriptor_plan_reference_and_rows() -> None:
    ops = {op for op in tp.TABLE.ops() if not op.startswith("acme")}
    assert {REPRESENTED[op] for op in ops} == set(SAMPLES)
    for op in ops:
        assert tp.TABLE.reference(op).op == op
        assert tp.plan_type(op).descriptor_type is type(SAMPLES[REPRESENTED[op]])
        assert {str(r.backend) for r in tp.TABLE.rows(op)} == {"triton", "reference"}


# --- strictness ---


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"gather_dim": 2}, ("gather_dim", "2", "[0, 2)")),
        ({"gather_dim": -1}, ("gather_dim", "-1")),
        ({"gather_dim": True}, ("gather_dim", "True")),
        ({"gather_dim": 0.0}, ("gather_dim", "0.0")),
        ({"out_shape": ()}, ("out_shape", "rank 0")),
        ({"out_shape": (1,) * 9}, ("out_shape", "rank 9")),
        ({"out_shape": (4, -1)}, ("out_shape", "-1")),
        ({"out_shape": "ab"}, ("out_shape", "ab")),
        ({"out_shape": (2**61, 2**10)}, ("bytes",)),
        ({"element": "f33"}, ("element", "f33")),
        ({"element": None}, ("element",)),
        ({"index_element": torch.float32}, ("index_element", "float32")),
        ({"out_of_bounds": "wrap"}, ("out_of_bounds", "wrap")),
        ({"layouts": {"nope": "strided"}}, ("nope", "src")),
        ({"layouts": {"out": tp.Layout.strided(zero_axes=[0])}}, ("out", "stride 0")),
        ({"layouts": {"src": tp.Layout.strided(unit_axis=2)}}, ("src", "axis 2")),
        ({"layouts": {"src": tp.Layout(alignment=2)}}, ("src", "4 bytes")),
        ({"layouts": {"src": "dense"}}, ("layouts",)),
        ({"surprise": 1}, ("surprise",)),
        ({"schema_version": 2}, ("schema_version", "2")),
    ],
)
def test_bad_fields_name_field_value_and_rule(change: dict[str, object], names: tuple[str, ...]) -> None:
    desc = SAMPLES["gather"]
    with pytest.raises(tp.InvalidProblem) as info:
        desc.replace(**change)
    assert all(n in str(info.value) for n in names), str(info.value)
    with pytest.raises(tp.InvalidProblem):
        desc.model_copy(update=change)
    if "layouts" not in change and change.get("element") != "f33":
        text = json.dumps(
            {**json.loads(desc.to_json()), **{k: str(v) if k == "index_element" else v for k, v in change.items()}}
        )
        with pytest.raises(tp.InvalidProblem):
            tp.parse_descriptor(text)
        with pytest.raises(tp.InvalidProblem):
            type(desc).model_validate_json(text)


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"op": "no_such"}', '{"op": 3}', '{"op": "gather"}'])
def test_parse_descriptor_refuses_bad_json(text: str) -> None:
    with pytest.raises(tp.InvalidProblem, match=r"descriptor|GatherDescriptor"):
        tp.parse_descriptor(text)


def test_elements_are_taken_in_three_spellings_and_lists_become_tuples() -> None:
    spellings = [tp.ElementKind.BF16, "bf16", torch.bfloat16]
    made = {tp.GatherDescriptor(out_shape=[2, 3], gather_dim=0, src_dim_size=4, element=e) for e in spellings}
    assert len(made) == 1
    (desc,) = made
    assert desc.out_shape == (2, 3)
    assert desc.element.torch is torch.bfloat16
    for kind in tp.ElementKind:
        assert tp.ElementKind.of(kind.torch) is kind


def test_frozen() -> None:
    desc = SAMPLES["gather"]
    with pytest.raises((tp.InvalidProblem, ValueError)):
        desc.gather_dim = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "strided", "stride_multiple": 3},
        {"kind": "packed", "stride_multiple": 2},
        {"alignment": 3},
        {"kind": "packed", "unit_axis": 0},
        {"kind": "strided", "zero_axes": [1, 0]},
        {"kind": "strided", "order": [1, 0]},
        {"kind": "strided", "unit_axis": 0, "order": [0, 0]},
    ],
)
def test_nested_layout_errors_are_invalid_problem(bad: dict[str, Any]) -> None:
    with pytest.raises(tp.InvalidProblem):
        tp.Layout.model_validate_json(json.dumps(bad))
    with pytest.raises(tp.InvalidProblem):
        SAMPLES["gather"].replace(layouts={"src": bad})


@pytest.mark.parametrize("order", [(0,), (2, 1, 0)])
def test_an_order_names_every_axis_of_more_than_one_element(order: tuple[int, ...]) -> None:
    with pytest.raises(tp.InvalidProblem, match="layouts"):
        SAMPLES["gather"].replace(layouts={"src": tp.Layout.strided(order=order)})


# --- keys ---


#: Another valid value of a field, by its name; None where a product of f32 has no other (see families/gemm).
CHANGED: dict[str, object] = {
    "reduce_axes": (0,),
    "op": None,
    "schema_version": None,
    "element": "f16",
    "index_element": "i32",
    "slot_element": "i32",
    "out_of_bounds": "clamp",
    "padding_idx": 3,
    "out_element": None,
    "accumulator": None,
    "math": "tf32",
    "state": "host",
    "keeps_state": None,
    "global_shape": (5, 40),
    "epilogue": "bias_relu",
    "reduction": "sum",
    "eps": 0.5,
    "label_smoothing": 0.5,
    "y_element": "f16",
    "z_element": "f16",
    "y_shape": (5, 1),
    "z_shape": (1, 1),
    "numbers": ("y",),
    "inputs": (("a", "f32", (5, 32)), ("b", "f16", (5, 1))),
    "nodes": (("operand", "a"), ("tanh", 0), ("mul", 0, 1), ("operand", "b"), ("add", 2, 3)),
    "results": (("out", 2, "f32"),),
    "rotary_dim": 6,
    "in_channels": 8,
    "out_channels": 8,
    "pairs": "interleaved",
    "table_element": None,
    "heads": 8,
    "key_heads": 4,
    "align": "start",
    "window_left": 1,
    "window_right": 1,
    "mask": "bool",
    "sequences": 3,
    "grad_element": "bf16",
    "parameter_element": "f32",
    "state_element": "bf16",
    "branch_element": "bf16",
    "branch_gradient": None,  # needs a branch_element
    "copy_element": "bf16",
    "stochastic": None,
    "symmetric": None,
}


def changed(desc: tp.Descriptor, name: str) -> object:
    value = getattr(desc, name)
    if name == "inputs" and desc.op == "list_expression":
        return (value[0], ("b", "f16", "list"))
    if name in CHANGED:
        return CHANGED[name]
    if name == "residual" and not getattr(desc, "relu", True):
        return None  # needs relu
    if name == "layouts":
        return {desc.operands()[0].name: "strided"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value[:-1], value[-1] + 1) if value else None
    if name.endswith("_axis"):
        return 1 - value
    if name == "channels":
        return 2 * value  # groups divide them
    return 1 if name.endswith("_dim") and name != "embedding_dim" else value + 1


@pytest.mark.parametrize("op", SAMPLES)
def test_every_field_is_in_the_key(op: str) -> None:
    desc = SAMPLES[op]
    keys = {desc.key}
    for name in type(desc).model_fields:
        if (value := changed(desc, name)) is None:
            continue
        other = desc.replace(**{name: value})
        assert other.key not in keys, name
        assert other != desc
        keys.add(other.key)
        assert other.replace(**{name: getattr(desc, name)}).key == desc.key  # cached keys do not travel


def test_every_promise_preference_target_and_tuning_fact_is_in_the_key() -> None:
    desc = SAMPLES["gather"]
    strided: list[dict[str, Any]] = [
        {},
        {"alignment": 16},
        *({"unit_axis": axis} for axis in (0, 1)),
        *({"stride_multiple": n} for n in (2, 4)),
        *({"zero_axes": axes} for axes in ([0], [0, 1])),
        {"order": [1, 0]},
    ]
    layouts = [*(tp.Layout(alignment=n) for n in (8, None)), *(tp.Layout.strided(**promise) for promise in strided)]
    preferences: list[dict[str, Any]] = [
        {},
        *({word: True} for word in ("deterministic", "batch_invariant", "order_invariant")),
        *({"max_workspace_bytes": n} for n in (0, 1)),
        {"backend": tp.BackendKind.TRITON},
        {"kernel": "rows"},
        {"exclude": ("tma",)},
    ]
    smaller = [H200.replace(sm_count=1), H200.replace(shared_memory=1)]
    targets = [tp.Target.preset("a100"), *smaller, *(tp.Target.cpu(interpret=i) for i in (False, True))]
    tunings = [tp.TuningTable(), *(tp.TuningTable.of({"p": {"rows": us}}) for us in (1.0, 2.0))]
    keys = [canonical_key(desc.replace(layouts={o: x}), LOOSE, H200, None) for x in layouts for o in ("src", "index")]
    keys += [canonical_key(desc, LOOSE.replace(**change), H200, None) for change in preferences]
    keys += [canonical_key(desc, LOOSE, t, None) for t in targets]
    keys += [canonical_key(desc, LOOSE, H200, t) for t in tunings]
    assert len(set(keys)) == len(keys)


def test_defaults_spelled_out_do_not_change_the_key() -> None:
    desc = SAMPLES["gather"]
    assert desc.replace(layouts={"src": "packed", "out": tp.Layout(alignment=16)}).key == desc.key
    assert tp.PlanPreference(exclude=["b", "a", "a"]).key == tp.PlanPreference(exclude=("a", "b")).key


def test_a_target_name_is_for_people_only() -> None:
    other = H200.replace(name="my card")
    assert other.key == H200.key
    assert other == H200
    assert hash(other) == hash(H200)
    assert tp.Target.preset("h200").name == "h200"
    with pytest.raises(tp.InvalidProblem, match="h300"):
        tp.Target.preset("h300")


# --- from_args ---


def test_from_args_derives_shapes_elements_and_promises() -> None:
    src = torch.randn(5, 4).t()
    base = torch.zeros(3 * 5 + 1, dtype=torch.int32)
    index = base[1:].reshape(3, 5)  # packed, but 4 bytes past an aligned address
    args = tp.GatherArgs(src=src, index=index, out=torch.empty(1, 1).expand(3, 5).clone())
    desc = tp.GatherDescriptor.from_args(args, gather_dim=0, out_of_bounds="clamp")
    assert desc.out_shape == (3, 5)
    assert desc.src_dim_size == 4
    assert str(desc.index_element) == "i32"
    assert desc.operand("src").layout == tp.Layout.strided(alignment=16, stride_multiple=4, order=(1, 0))
    assert desc.operand("index").layout == tp.Layout(alignment=4)
    assert desc.operand("out").layout.packed
    assert tp.plan(desc, target=tp.Target.cpu()).can_implement(args)
    expanded = tp.GatherArgs(src=torch.randn(4, 1).expand(4, 5), index=index, out=args.out)
    found = tp.GatherDescriptor.from_args(expanded, gather_dim=0)
    assert found.operand("src").layout.zero_axes == (1,)


@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64", "i32", "i64"])
@pytest.mark.parametrize("op", ACCUMULATING)
def test_accumulating_ops_always_have_a_deterministic_and_an_atomic_entry(op: str, element: str) -> None:
    base = SAMPLES[op].replace(element=element, **({"accumulate": True} if op == "index_put" else {}))
    strided = {o.name: "strided" for o in base.operands() if o.kind == "tensor"}
    for desc, target in product((base, base.replace(layouts=strided)), (H200, tp.Target.preset("a100"))):
        strict = tp.plan(desc, preference=tp.PlanPreference(deterministic=True), target=target)
        assert strict.precision_guarantee().deterministic
        loose = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=target)
        assert any(c.kernel.startswith("atomic") for c in loose.candidates if c.cost_us is not None)
