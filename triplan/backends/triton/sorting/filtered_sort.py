"""Kernel ``filtered_sort`` of topk: ``filtered`` finds the first k of each row, and ``block`` sorts these.

For more elements than are soon ranked by comparing all pairs.
"""

from __future__ import annotations

from functools import partial

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.sorting import turned
from triplan.backends.triton.sorting.block import ordered_us, sort_launch
from triplan.backends.triton.sorting.filtered import (
    READS,
    Stage,
    buffers_of,
    filter_launches,
    filtered_us,
    stages,
    supports,
)
from triplan.backends.triton.sorting.shared import row_args, sorting_kernel
from triplan.descriptors import TopKDescriptor
from triplan.sku import Target


def _stages(desc: TopKDescriptor, target: Target) -> list[Stage]:
    return stages(desc, target, is_ordered=False)


def rank(desc: TopKDescriptor, target: Target) -> float:
    found = filtered_us(desc, _stages(desc, target), target) + LAUNCH_US + ordered_us(desc, desc.k, target)
    return found + turned.across_us(desc, READS)


def workspace(desc: TopKDescriptor, target: Target) -> int:
    return _stages_bytes(desc, target) + turned.nbytes(desc, READS) if desc.rows * desc.k else 0


def _stages_bytes(desc: TopKDescriptor, target: Target) -> int:
    return buffers_of(desc, _stages(desc, target)).size


@sorting_kernel(
    op="topk",
    name="filtered_sort",
    supports=supports,
    rank=rank,
    workspace=workspace,
    features=("gluon",),
    interpretable=False,
)
def filtered_sort(desc: TopKDescriptor, target: Target) -> list[Launch]:
    if desc.rows * desc.k == 0:
        return []
    return turned.launches(desc, partial(_launches, target), _stages_bytes(desc, target), READS)


def _launches(target: Target, desc: TopKDescriptor) -> list[Launch]:
    launches, taken = filter_launches(desc, _stages(desc, target), None)
    args = {**row_args(desc), **taken, "n": Int(desc.k), "first": None, "kept": None}
    return [*launches, sort_launch(desc, desc.k, args)]
