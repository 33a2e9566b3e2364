"""Products whose extents and numbers of tiles 31 bits hardly hold."""

from __future__ import annotations

import pytest
from cases import H200, pinned, required

import triplan as tp
from triplan.backends.triton.gemm.arguments import extent


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
def test_a_loop_over_a_k_of_31_bits_ends(element: str) -> None:
    """Its counter goes beyond k by up to a step, which 32 bits would not hold."""
    one = {"a": tp.Layout.strided(zero_axes=(0, 1)), "b": tp.Layout.strided(zero_axes=(0, 1))}
    for k in (2**31 - 1, 2**31 - 16):
        desc = tp.GemmDescriptor(m=1, n=1, k=k, element=element, layouts=one)
        for entry in ("tiles", "tiles_invariant"):
            (launch,) = required(desc, entry, H200).launches
            assert k + launch.constexprs["BLOCK_K"] >= 2**31
            assert dict(launch.source().signature)["k"] == "i64"
        assert pinned(desc, "split_k", H200) is None
    assert not extent(2**31 - 2**10, 2).wide


def test_tiles_that_31_bits_do_not_count_are_refused() -> None:
    shared = {name: tp.Layout.strided(unit_axis=2, zero_axes=(0,), alignment=16, stride_multiple=8) for name in "ab"}
    base = tp.BatchedGemmDescriptor(batch=2**31 - 2**10, m=1, n=8, k=8, element="f16", layouts=shared)
    assert pinned(base, "wgmma", H200) is not None
    for change in ({"batch": 2**31 - 100}, {"batch": 2**31}, {"batch": 2**30, "m": 65, "n": 256}):
        with pytest.raises(tp.Unsupported) as info:
            tp.plan(base.replace(**change), target=H200, preference=tp.PlanPreference(kernel="wgmma"))
        (reason,) = [c.reason for c in info.value.candidates if c.kernel == "wgmma"]
        assert "31 bits" in reason
