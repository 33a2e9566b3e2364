"""What is special to binaries of the indexing family."""

from __future__ import annotations

import re

import pytest
from cases import H200, SM80, compiles, required
from matrix import VECTORS
from samples import SAMPLES

import triplan as tp

pytestmark = compiles


def test_wide_rows_move_in_vectors() -> None:
    desc = tp.IndexSelectDescriptor(out_shape=(4096, 1024), select_dim=0, src_dim_size=4096, element="f16")
    (record,) = tp.plan(desc, target=H200).compile()
    assert all(re.search(rf"{move}\.global({VECTORS})", record.ptx) for move in ("ld", "st"))


@pytest.mark.parametrize("op", ["index_add", "scatter_add"])
def test_half_additions_are_vectors_or_pairs_and_never_compare_and_swap(op: str) -> None:
    (record,) = required(SAMPLES[op].replace(element="f16"), None, H200).compile()
    assert ".cas." not in record.ptx
    assert re.search(r"\.add\.noftz\.v[28]\.f16|\.add\.noftz\.f16x2", record.ptx)


@pytest.mark.parametrize("op", ["index_select", "gather", "index_add", "gather_backward"])
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(op: str) -> None:
    (shape,) = {"out_shape", "src_shape"} & set(type(SAMPLES[op]).model_fields)
    plans = (tp.plan(SAMPLES[op].replace(**{shape: (batch, 64)}), target=H200) for batch in range(1, 1001))
    assert 1 <= len({launch.source() for plan in plans for launch in plan.launches}) <= 4


def test_copies_of_short_rows_across_memory_do_not_spill() -> None:
    """Left alone, ptxas spills four registers of this one."""
    dout = tp.Layout.strided(unit_axis=0)
    desc = tp.EmbeddingBackwardDescriptor(
        index_shape=(4096, 160), num_embeddings=90, embedding_dim=16, element="f64", layouts={"dout": dout}
    )
    (copy,) = (x for x in required(desc, "sorted_sum", SM80).compile() if x.name == "matrix_copy_kernel")
    assert copy.spill_bytes == 0


def test_copies_of_the_longest_rows_count_in_64_bits() -> None:
    """A row of 2**31 - 1 elements is padded to 2**31."""
    desc = tp.EmbeddingBackwardDescriptor(
        index_shape=(2, 1),
        num_embeddings=2,
        embedding_dim=2**31 - 1,
        element="f16",
        layouts={"dout": tp.Layout.strided(unit_axis=0)},
    )
    (copy,) = (x for x in required(desc, "sorted_sum", H200).launches if x.kernel.__name__ == "matrix_copy_kernel")
    assert {"i64"} == {dict(copy.source().signature)[name] for name in ("source_columns", "out_columns")}
