"""How matrix products by pointers read their operands: by vectors where lines allow, without spills where they do not;
and extents that 31 bits hardly hold."""

from __future__ import annotations

import os

import pytest
from cases.gemm import pinned

import triplan as tp
from triplan.backends.triton.gemm.arguments import extent

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")


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
