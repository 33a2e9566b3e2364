"""What is special to binaries of the indexing family."""

from __future__ import annotations

import os
import re

import pytest
from samples import SAMPLES

import triplan as tp

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}


def test_wide_rows_move_in_vectors() -> None:
    desc = tp.IndexSelectDescriptor(out_shape=(4096, 1024), select_dim=0, src_dim_size=4096, element="f16")
    (kernel_record,) = tp.plan(desc, target=TARGETS["sm90a"]).compile()
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", kernel_record.ptx)
    assert re.search(r"st\.global\.v4\.b32|st\.global\.v2\.b64", kernel_record.ptx)


def test_half_additions_are_vectors_or_pairs_and_never_compare_and_swap() -> None:
    for op in ("index_add", "scatter_add"):
        desc = SAMPLES[op].replace(element="f16")
        (kernel_record,) = tp.plan(
            desc, preference=tp.PlanPreference(deterministic=False), target=TARGETS["sm90a"]
        ).compile()
        assert ".cas." not in kernel_record.ptx
        assert re.search(r"\.add\.noftz\.v[28]\.f16|\.add\.noftz\.f16x2", kernel_record.ptx), op


@pytest.mark.parametrize("op", ["index_select", "gather", "index_add", "gather_backward"])
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    shape = "out_shape" if op in ("index_select", "gather", "gather_backward") else "src_shape"
    sources = set()
    for batch in range(1, 1001):
        desc = SAMPLES[op].replace(**{shape: (batch, 64)})
        sources.update(launch.source() for launch in tp.plan(desc, target=TARGETS["sm90a"]).launches)
    assert 1 <= len(sources) <= 4
