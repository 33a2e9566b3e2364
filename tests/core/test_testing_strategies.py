"""The strategies: valid, mostly non-empty problems of any Descriptor class, within their budget, of every kind."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
import torch
from cases.indexing import OPS
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import Field, PositiveInt

import triplan as tp
from triplan.descriptors import AxisField, Extent, IndexValueField, Shape, base
from triplan.sku import Element
from triplan.testing import args_for, descriptors

CPU = tp.Target.cpu()


def sample(cls: type[tp.Descriptor], n: int, **how: Any) -> list[tp.Descriptor]:
    """``n`` independent problems, for shares to be counted.

    After 10 examples Hypothesis mutates those it has, so that many have the same element: 10 have all.
    """
    found: list[tp.Descriptor] = []

    @settings(max_examples=10, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(descriptors(cls, **how), min_size=n // 10, max_size=n // 10))
    def collect(drawn: list[tp.Descriptor]) -> None:
        found.extend(drawn)

    collect()
    return found


@pytest.mark.parametrize("op", OPS)
def test_problems_are_valid_varied_and_within_budget(op: str) -> None:
    cls = tp.descriptor_types()[op]
    found = sample(cls, 150, max_bytes=4096, fixed={"op": op})
    assert len(found) == 150
    sizes = [sum(o.nbytes * o.count for o in d.operands()) for d in found]
    assert max(sizes) <= 4096
    for d in found:
        assert tp.parse_descriptor(d.to_json()) == d
    share = {
        "non-empty": sum(all(o.numel for o in d.operands() if o.is_tensor) for d in found) / len(found),
        "with promises": sum(bool(d.layouts) for d in found) / len(found),
    }
    assert share["non-empty"] > 0.6, share
    assert share["with promises"] > 0.5, share
    assert any(0 in o.shape for d in found for o in d.operands())
    values: dict[str, Counter[Any]] = {}
    for d in found:
        for name in cls.model_fields:
            values.setdefault(name, Counter())[getattr(d, name)] += 1
    assert len(values["element"]) == len({e for entry in tp.TABLE.rows(op) for e in entry.elements})
    assert len(values["index_element"]) == 2
    assert len(values["out_of_bounds"]) == 3
    assert len(values["wrap_negative"]) == 2
    kinds = Counter(
        (layout.kind, layout.unit_axis is not None, bool(layout.zero_axes), (layout.alignment or 0) >= 16)
        for d in found
        for _, layout in d.layouts
    )
    assert len(kinds) >= 6, kinds


@pytest.mark.parametrize("cls", sorted(set(tp.descriptor_types().values()), key=str), ids=lambda cls: cls.__name__)
def test_problems_of_every_class_are_drawn(cls: type[tp.Descriptor]) -> None:
    """Hypothesis refuses some bounds: attention's softcap is below 1e30, which is no f32."""
    assert len(sample(cls, 10, max_bytes=4096)) == 10


class _Flavour(str, Enum):
    SWEET = "sweet"
    SOUR = "sour"


class OwnDescriptor(tp.Descriptor):
    """A user's own, with every kind of field that has a meaning."""

    op: Literal["strategies::own"] = "strategies::own"
    element: Element
    shape: Annotated[Shape, Field(min_length=2, max_length=3)]
    axis: Annotated[int, AxisField("shape")]
    rows: Extent
    favourite: Annotated[int, IndexValueField("rows")] | None = None
    mode: Literal["a", "b"] = "a"
    flavour: _Flavour = _Flavour.SWEET
    groups: PositiveInt = 1
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    label: str = "kept"

    def check_problem(self) -> None:
        if self.favourite is not None and not 0 <= self.favourite < self.rows:
            raise ValueError("favourite is no row")
        if self.groups > len(self.shape):
            raise ValueError("more groups than axes")

    def declare_operands(self) -> tuple[tp.Operand, ...]:
        return (
            tp.Operand("x", tp.Role.INPUT, self.element, self.shape),
            tp.Operand("table", tp.Role.OUTPUT, self.element, (self.rows,)),
        )


base._REGISTRY.pop("strategies::own")  # other tests list every op


def test_fields_of_a_users_own_op_are_understood() -> None:
    found = sample(OwnDescriptor, 200, max_bytes=2048)
    assert len(found) > 150
    seen = {name: {getattr(d, name) for d in found} for name in OwnDescriptor.model_fields}
    assert {len(s) for s in seen["shape"]} == {2, 3}
    assert seen["axis"] >= {0, 1, 2}
    assert None in seen["favourite"]
    assert len(seen["favourite"]) > 2
    assert seen["mode"] == {"a", "b"}
    assert seen["flavour"] == set(_Flavour)
    assert seen["groups"] >= {1, 2}
    assert len(seen["share"]) > 5
    assert seen["label"] == {"kept"}
    assert len(seen["element"]) == len(tp.ElementKind)


def test_fixed_fields_stay_and_the_target_filters() -> None:
    fixed = {"out_shape": (3, 4), "gather_dim": 1}
    for d in sample(tp.GatherDescriptor, 30, fixed=fixed, promises=False):
        assert (d.out_shape, d.gather_dim, d.layouts) == ((3, 4), 1, ())
    # On a GPU nothing adds bools.
    adding: dict[str, Any] = {"max_bytes": 2048, "fixed": {"accumulate": True}}
    assert any(d.element is tp.ElementKind.BOOL for d in sample(tp.IndexPutDescriptor, 50, **adding))
    found = sample(tp.IndexPutDescriptor, 50, target=tp.Target.preset("h200"), **adding)
    assert not any(d.element is tp.ElementKind.BOOL for d in found)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(OPS), st.integers(0, 2**31))
def test_args_keep_every_promise_and_no_more_alignment_than_promised(data: Any, op: str, seed: int) -> None:
    desc = data.draw(descriptors(tp.descriptor_types()[op], 4096, target=CPU))
    placed, again = args_for(desc, seed=seed), args_for(desc, seed=seed)
    plan = tp.plan(desc, target=CPU)
    assert plan.can_implement(placed.args), plan.can_implement(placed.args).reason
    for name, region in placed.regions.items():
        o = desc.operand(name.partition("[")[0])
        tensor = region.tensor
        alignment = o.layout.alignment or o.element.itemsize
        if tensor.numel():
            assert tensor.data_ptr() % (2 * alignment) == alignment
        assert torch.equal(region.owned().sum(), torch.tensor(_bytes_of(tensor)))
        start = tensor.storage_offset() * tensor.element_size()
        assert start >= 256
        assert not region.owned()[:start].any()
        assert not region.owned()[-200:].any()
        twin = again.regions[name]
        if (tensor.data_ptr() - twin.tensor.data_ptr()) % 2048 == 0:
            assert torch.equal(region.pristine, twin.pristine)


def _bytes_of(t: torch.Tensor) -> int:
    count = 1
    for n, s in zip(t.shape, t.stride(), strict=True):
        count *= n if s or n == 0 else 1
    return count * t.element_size()


def strides_seen(layout: tp.Layout, written: bool) -> set[tuple[int, ...]]:
    desc = tp.IndexAddDescriptor(
        src_shape=(3, 4), add_dim=0, out_dim_size=5, element="f32", layouts={"out" if written else "src": layout}
    )
    found = [getattr(args_for(desc, seed=s).args, "out" if written else "src") for s in range(60)]
    return {t.stride() for t in found}


def test_strided_operands_come_transposed_with_gaps_and_repeats() -> None:
    inputs = strides_seen(tp.Layout.strided(), written=False)
    assert any(a < b for a, b in inputs if a)  # transposed
    assert any(a > 4 * b for a, b in inputs)  # padded rows
    assert any(b > 1 for a, b in inputs)  # gaps between elements
    assert any(a == 0 or b == 0 for a, b in inputs)  # repeats
    outputs = strides_seen(tp.Layout.strided(), written=True)
    assert all(a and b for a, b in outputs)
    assert any(a < b for a, b in outputs)
    assert {b for _, b in strides_seen(tp.Layout.strided(unit_axis=1), written=True)} == {1}
    assert {a for a, _ in strides_seen(tp.Layout.strided(zero_axes=[0]), written=False)} == {0}


def test_indices_are_valid_hostile_or_distinct_as_asked() -> None:
    desc = tp.GatherDescriptor(out_shape=(30, 4), gather_dim=0, src_dim_size=40, element="f32")
    valid = args_for(desc, indices="valid").host().index
    assert int(valid.min()) >= 0
    assert int(valid.max()) < 40
    assert len(valid[:, 0].unique()) < 30  # repeats
    hostile = set(args_for(desc).host().index.reshape(-1).tolist())
    assert {-1, 40, 2**63 - 1, -(2**63)} <= hostile
    assert any(0 <= i < 40 for i in hostile)
    distinct = args_for(desc, indices="distinct").host().index
    for column in distinct.T:
        assert len(column.unique()) == 30
    wrapped = args_for(desc.replace(wrap_negative=True), indices="valid").host().index
    assert int(wrapped.min()) < 0
    assert int(wrapped.min()) >= -40


def test_values_reach_the_edges_of_their_element() -> None:
    desc = tp.GatherDescriptor(out_shape=(9,), gather_dim=0, src_dim_size=4000, element="f16")
    special = args_for(desc, values="special").host().src
    assert bool(special.isnan().any())
    assert bool((special == float("inf")).any())
    assert bool((special == -float("inf")).any())
    wide = args_for(desc, values="wide").host().src
    assert bool(wide.isfinite().all())
    assert float(wide[wide != 0].abs().min()) < 1e-6  # subnormal
    assert bool((wide.view(torch.int16) == -(2**15)).any())  # -0.0
    bits = args_for(desc, values="bits").host().src
    assert len(bits[bits.isnan()].view(torch.int16).unique()) > 20  # NaNs of many payloads
    integers = args_for(desc, values="integers").host().src
    assert set(integers.tolist()) == set(range(-4, 5))
    whole = args_for(desc.replace(element="i32"), values="wide").host().src
    assert {-(2**31), 2**31 - 1, 0} <= set(whole.tolist())
