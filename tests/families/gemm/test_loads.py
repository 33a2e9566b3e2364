"""How matrix products by pointers read their operands: by vectors where lines allow, without spills where they do not;
and extents that 31 bits hardly hold."""

from __future__ import annotations

import os
from typing import Any

import pytest
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, backward, pinned

import triplan as tp
from triplan.backends.runtime.compile import record
from triplan.backends.triton.gemm.arguments import extent

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")


def multiplying(plan: tp.Plan[Any, Any], arch: str) -> tp.CompiledRecord:
    return record(plan.launches[0].source(), TARGETS[arch].arch)


@compiles
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("row", ["tiles", "tiles_invariant", "split_k"])
def test_lines_of_whole_vectors_are_copied_by_vectors(row: str, arch: str) -> None:
    """Lines end at multiples of 16 bytes, and not of 16 elements."""
    for element, end in (("f16", 1000), ("f32", 1004)):
        plan = pinned(tp.GemmDescriptor(m=512, n=end, k=end, element=element), row, TARGETS[arch])
        assert plan is not None
        found = multiplying(plan, arch)
        assert "cp.async.cg.shared.global" in found.ptx
        assert "cp.async.ca" not in found.ptx
        assert "ld.global.b16" not in found.ptx
        assert found.spill_bytes == 0


@compiles
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("row", ["tiles", "split_k"])
def test_elements_read_one_by_one_do_not_spill(row: str, arch: str) -> None:
    odd = tp.GemmDescriptor(m=100, n=1001, k=4096, element="bf16", out_element="f32", epilogue="bias_silu")
    problems = [
        odd.replace(layouts={"a": COLUMN, "b": LOOSE_ROW, "c": COLUMN}, reads_c0=True),
        odd.replace(n=8, layouts={"b": LOOSE_COLUMN, "c": LOOSE_ROW}),
        odd.replace(m=1, n=8, k=1000, layouts={"a": COLUMN}),
        odd.replace(m=2048, n=72, k=1001, element="f32", out_element=None, math="tf32", saves_pre=True),
    ]
    for desc in problems:
        plan = pinned(desc, row, TARGETS[arch])
        assert plan is not None
        assert multiplying(plan, arch).spill_bytes == 0, desc.key


@compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_elements_of_fixed_lines_read_one_by_one_do_not_spill(arch: str) -> None:
    """With one tile for every number of rows: k or B are the same for all of them, and end within vectors."""
    base = tp.GemmDescriptor(m=64, n=8, k=4096, element="f16", out_element="f32", epilogue="silu")
    for desc in (
        base.replace(layouts={"a": LOOSE_ROW, "b": LOOSE_COLUMN}),
        base.replace(k=4095),
        base.replace(n=1001, layouts={"b": LOOSE_ROW}),
    ):
        plan = pinned(desc, "tiles_invariant", TARGETS[arch])
        assert plan is not None
        assert multiplying(plan, arch).spill_bytes == 0, desc.key
    adjoint = pinned(backward(64, 1001, 1024, "f16", (1, 0, 0)), "tiles_invariant", TARGETS[arch])
    assert adjoint is not None
    assert multiplying(adjoint, arch).spill_bytes == 0


@compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_integers_read_one_by_one_do_not_spill(arch: str) -> None:
    desc = tp.BatchedGemmDescriptor(batch=3, m=2048, n=1001, k=1000, element="i8", epilogue="bias")
    a, b = tp.Layout.strided(unit_axis=2), tp.Layout.strided(unit_axis=1)
    for layouts in ({"a": a, "b": b, "c": b}, {"a": a, "b": "strided", "c": a}):
        plan = pinned(desc.replace(layouts=layouts), "integer_tiles", TARGETS[arch])
        assert plan is not None
        assert multiplying(plan, arch).spill_bytes == 0


@compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_sums_of_pieces_in_f64_do_not_spill(arch: str) -> None:
    desc = tp.GemmDescriptor(m=2048, n=8, k=64, element="f64", epilogue="bias", layouts={"c": COLUMN})
    plan = pinned(desc, "split_k", TARGETS[arch])
    assert plan is not None
    assert [found.spill_bytes for found in plan.compile()] == [0, 0]


# --- counters ---


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
def test_a_loop_over_a_k_of_31_bits_ends(element: str) -> None:
    """Its counter goes beyond k by up to a step, which 32 bits would not hold."""
    one = {"a": tp.Layout.strided(zero_axes=(0, 1)), "b": tp.Layout.strided(zero_axes=(0, 1))}
    for k in (2**31 - 1, 2**31 - 16):
        desc = tp.GemmDescriptor(m=1, n=1, k=k, element=element, layouts=one)
        for row in ("tiles", "tiles_invariant"):
            plan = pinned(desc, row, TARGETS["sm90a"])
            assert plan is not None
            (launch,) = plan.launches
            assert k + launch.constexprs["BLOCK_K"] >= 2**31
            assert dict(launch.source().signature)["k"] == "i64"
        assert pinned(desc, "split_k", TARGETS["sm90a"]) is None
    assert not extent(2**31 - 2**10, 2).wide


def test_tiles_that_31_bits_do_not_count_are_refused() -> None:
    shared = {name: tp.Layout.strided(unit_axis=2, zero_axes=(0,), alignment=16, stride_multiple=8) for name in "ab"}
    base = tp.BatchedGemmDescriptor(batch=2**31 - 2**10, m=1, n=8, k=8, element="f16", layouts=shared)
    assert pinned(base, "wgmma", TARGETS["sm90a"]) is not None
    for change in ({"batch": 2**31 - 100}, {"batch": 2**31}, {"batch": 2**30, "m": 65, "n": 256}):
        with pytest.raises(tp.Unsupported) as info:
            tp.plan(base.replace(**change), target=TARGETS["sm90a"], preference=tp.PlanPreference(kernel="wgmma"))
        (reason,) = [c.reason for c in info.value.candidates if c.kernel == "wgmma"]
        assert "31 bits" in reason
