"""The CPU backend's own bugs of the past."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

import triplan as tp

CPU = tp.Target.cpu()
LONG = 2**33


def test_f32_sums_have_the_same_bits_on_every_run_whatever_the_threads() -> None:
    """torch's index_put_(accumulate=True) on the CPU adds f32 atomically from many threads."""
    g = torch.Generator().manual_seed(0)
    src, index = torch.randn(5000, 64, generator=g), torch.randint(10, (5000,), generator=g)
    plan = tp.plan(tp.IndexAddDescriptor(src_shape=(5000, 64), add_dim=0, out_dim_size=10, element="f32"), target=CPU)
    seen, threads = set(), torch.get_num_threads()
    try:
        for count in (1, 4, 16):
            torch.set_num_threads(count)
            for _ in range(5):
                out = torch.zeros(10, 64)
                plan.run(tp.IndexAddArgs(index=index, src=src, out=out))
                seen.add(out.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def none(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory in kilobytes")
def test_empty_problems_cost_nothing_however_long_their_other_axes_are() -> None:
    """Coordinates of axes of 2**33, or a marker for each of 2**33 empty rows, would take 64 GiB."""
    i64 = torch.int64
    problems = [
        (
            tp.ScatterAddDescriptor(src_shape=(0, LONG), scatter_dim=0, out_dim_size=0, element="f32"),
            tp.ScatterAddArgs(none(0, LONG, dtype=i64), none(0, LONG), none(0, LONG)),
        ),
        (
            tp.IndexAddDescriptor(src_shape=(0, LONG), add_dim=0, out_dim_size=0, element="f32"),
            tp.IndexAddArgs(none(0, dtype=i64), none(0, LONG), none(0, LONG)),
        ),
        (
            tp.EmbeddingBackwardDescriptor(index_shape=(0,), num_embeddings=0, embedding_dim=LONG, element="f32"),
            tp.EmbeddingBackwardArgs(none(0, LONG), none(0, dtype=i64), none(0, LONG)),
        ),
        (
            tp.IndexPutDescriptor(out_shape=(LONG, 0), index_shape=(3,), element="f32"),
            tp.IndexPutArgs([torch.zeros(3, dtype=i64)], none(3, 0), none(LONG, 0)),
        ),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for desc, args in problems:
        tp.plan(desc, target=CPU).run(args)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
