"""What kernels claim of their bits, beyond repeated runs: batch and order invariance, stability between processes.

Every row of the kernel table that makes a claim is held to it: references on the CPU, Triton rows in the interpreter
and on the GPU. Indices point along the first axis. Values differ so much in magnitude that any other order of adding
shows in the last bits; ``test_the_values_show_a_change_of_order`` holds that against us.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import ACCUMULATING, SAMPLES

import triplan as tp

WIDTH, TABLE = 32, 10
#: Contributions: a few in the interpreter, where each step costs a millisecond, many blocks of them elsewhere.
COUNT = {"cpu": 500, "interpret": 16, "gpu": 5000}
MARKS = {"cpu": (), "interpret": pytest.mark.interpret, "gpu": pytest.mark.gpu}

MAKE: dict[str, Callable[..., tp.Descriptor]] = {
    "gather": lambda n, **o: tp.GatherDescriptor(out_shape=(n, WIDTH), gather_dim=0, src_dim_size=TABLE, **o),
    "gather_backward": lambda n, **o: tp.GatherBackwardDescriptor(
        out_shape=(n, WIDTH), gather_dim=0, src_dim_size=TABLE, **o
    ),
    "index_select": lambda n, **o: tp.IndexSelectDescriptor(
        out_shape=(n, WIDTH), select_dim=0, src_dim_size=TABLE, **o
    ),
    "index_select_backward": lambda n, **o: tp.IndexSelectBackwardDescriptor(
        out_shape=(n, WIDTH), select_dim=0, src_dim_size=TABLE, **o
    ),
    "scatter": lambda n, **o: tp.ScatterDescriptor(src_shape=(n, WIDTH), scatter_dim=0, out_dim_size=TABLE, **o),
    "scatter_add": lambda n, **o: tp.ScatterAddDescriptor(src_shape=(n, WIDTH), scatter_dim=0, out_dim_size=TABLE, **o),
    "index_add": lambda n, **o: tp.IndexAddDescriptor(src_shape=(n, WIDTH), add_dim=0, out_dim_size=TABLE, **o),
    "index_put": lambda n, **o: tp.IndexPutDescriptor(out_shape=(TABLE, WIDTH), index_shape=(n,), **o),
    "embedding": lambda n, **o: tp.EmbeddingDescriptor(
        index_shape=(n,), num_embeddings=TABLE, embedding_dim=WIDTH, **o
    ),
    "embedding_backward": lambda n, **o: tp.EmbeddingBackwardDescriptor(
        index_shape=(n,), num_embeddings=TABLE, embedding_dim=WIDTH, **o
    ),
}


def target(where: str) -> tp.Target:
    return tp.Target.current() if where == "gpu" else tp.Target.cpu(interpret=where == "interpret")


def plans(where: str, op: str, row: str, n: int) -> Iterator[tp.Plan[Any, Any]]:
    """One plan an element that the row takes, for ``n`` contributions."""
    (found,) = (r for r in tp.TABLE.rows(op) if r.name == row)
    # The interpreter is slow; bits of other elements pass through the same lines of the kernels.
    few = found.elements & {"f32", "bf16", "i64"}
    elements = few if few and where == "interpret" else found.elements
    for element in sorted(elements):
        for options in ({"accumulate": False}, {"accumulate": True}) if op == "index_put" else ({},):
            try:
                desc = MAKE[op](n, element=element, **options)
                preference = tp.PlanPreference(deterministic=False, kernel=row)
                yield tp.plan(desc, preference=preference, target=target(where))
            except tp.Unsupported:
                continue


def claims(flag: str, ops: tuple[str, ...] = tuple(MAKE)) -> list[Any]:
    """(where, op, row) of every row that claims ``flag`` for one of its elements."""
    found = []
    for op in ops:
        for row in tp.TABLE.rows(op):
            guarantees = []
            for e in row.elements:
                for accumulate in (False, True) if op == "index_put" else (None,):
                    options = {} if accumulate is None else {"accumulate": accumulate}
                    guarantees.append(row.guarantee(MAKE[op](24, element=e, **options)))
            if any(getattr(g, flag) for outputs in guarantees for g in outputs.values()):
                places = ("cpu",) if row.backend is tp.BackendKind.REFERENCE else ("interpret", "gpu")
                found += [pytest.param(where, op, row.name, marks=MARKS[where]) for where in places]
    return found


class Problem:
    """``table`` (TABLE, WIDTH), ``dense`` (n, WIDTH) and ``index`` (n,) or (n, WIDTH), on the CPU.

    The rows where ``kept`` point at even positions only, the others at odd ones.
    """

    def __init__(self, plan: tp.Plan[Any, Any], n: int) -> None:
        g = torch.Generator().manual_seed(0)
        desc = plan.descriptor
        (index,) = (o for o in desc.operands() if o.index_extents)
        element = desc.element  # type: ignore[attr-defined]

        def draw(rows: int) -> torch.Tensor:
            if element.is_floating_point:
                scale = torch.randint(-8, 8, (rows, WIDTH), generator=g)
                values = torch.randn(rows, WIDTH, generator=g, dtype=torch.float64)
                return values.mul(2.0**scale).to(element.torch)
            high = 2 if element == "bool" else 2**31 - 1
            return torch.randint(0, high, (rows, WIDTH), generator=g).to(element.torch)

        self.table, self.dense = draw(TABLE), draw(n)
        self.kept = torch.rand(n, generator=g) < 0.5
        at = torch.randint(0, TABLE // 2, index.shape, generator=g) * 2
        odd = (~self.kept).long().reshape(-1, *[1] * (at.dim() - 1))
        self.index = (at + odd).to(index.element.torch)
        if element.is_floating_point and element != "f16":  # f16 has no room for it
            self._cancel(n // 4)

    def _cancel(self, pairs: int) -> None:
        """Let the first pairs of rows cancel each other, each column another factor larger than the remaining rows.

        What the larger values cost the smaller ones is then not hidden by the result's own rounding.
        """
        larger, smaller = self.dense[: 2 * pairs : 2], self.dense[1 : 2 * pairs : 2]
        larger *= 2.0 ** torch.linspace(8, 56, WIDTH).round()
        smaller.copy_(-larger)
        for paired in (self.index, self.kept):
            paired[1 : 2 * pairs : 2] = paired[: 2 * pairs : 2]

    def take(self, rows: torch.Tensor) -> Problem:
        """The same with only ``rows`` of the contributions, in their order."""
        new = object.__new__(Problem)
        new.table, new.dense, new.index, new.kept = self.table, self.dense[rows], self.index[rows], self.kept[rows]
        return new

    def run(self, plan: tp.Plan[Any, Any]) -> torch.Tensor:
        """What the plan writes."""
        device, values, written = plan.target.device_type, {}, None
        for o in plan.descriptor.operands():
            if o.index_extents:
                index = self.index.to(device)
                values[o.name] = [index] if o.kind == "tensor_list" else index
            elif o.kind != "host_scalar":
                values[o.name] = (self.table if o.shape[0] == TABLE else self.dense).to(device, copy=True)
                written = values[o.name] if o.is_written else written
        plan.run(plan.args_type(**values), workspace=tp.Workspace.allocate(plan))
        assert isinstance(written, torch.Tensor)
        return written.cpu()


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def resized(plan: tp.Plan[Any, Any], n: int) -> tp.Plan[Any, Any]:
    options = {"accumulate": plan.descriptor.accumulate} if plan.descriptor.op == "index_put" else {}
    desc = MAKE[plan.descriptor.op](n, element=plan.descriptor.element, **options)
    return tp.plan(desc, preference=plan.preference, target=plan.target)


@pytest.mark.parametrize(("where", "op", "row"), claims("batch_invariant"))
def test_batch_invariant(where: str, op: str, row: str) -> None:
    """Each even position gets the same bits with and without the contributions to odd ones in between."""
    n, held = COUNT[where], 0
    for plan in plans(where, op, row, n):
        if not plan.precision_guarantee().batch_invariant:
            continue
        problem = Problem(plan, n)
        part = problem.take(problem.kept)
        smaller = resized(plan, len(part.dense))
        assert plan.sku().numerics_id == smaller.sku().numerics_id
        whole, alone = problem.run(plan), part.run(smaller)
        if next(o for o in plan.descriptor.operands() if o.is_written).shape[0] == TABLE:
            assert bits(whole[::2]) == bits(alone[::2]), plan.key
            assert bits(alone[1::2]) == bits(problem.table[1::2]), plan.key
        else:
            assert bits(whole[problem.kept]) == bits(alone), plan.key
        held += 1
    assert held > 0


@pytest.mark.parametrize(("where", "op", "row"), claims("order_invariant", ACCUMULATING))
def test_order_invariant(where: str, op: str, row: str) -> None:
    n, held = COUNT[where], 0
    for plan in plans(where, op, row, n):
        if not plan.precision_guarantee().order_invariant:
            continue
        problem = Problem(plan, n)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
        assert bits(problem.run(plan)) == bits(problem.take(order).run(plan)), plan.key
        held += 1
    assert held > 0


@pytest.mark.parametrize("where", [pytest.param(where, marks=mark) for where, mark in MARKS.items()])
def test_the_values_show_a_change_of_order(where: str) -> None:
    """A kernel that adds in order gives other bits for another order: else the tests above would prove nothing."""
    n, row = COUNT[where], "reference" if where == "cpu" else "ordered_sum"
    for plan in plans(where, "index_add", row, n):
        if not plan.descriptor.element.is_floating_point or plan.descriptor.element.itemsize < 4:
            continue  # rounding to a half hides most of what f32 sums lose
        problem = Problem(plan, n)
        order = torch.arange(n).flip(0)
        assert bits(problem.run(plan)) != bits(problem.take(order).run(plan)), plan.key


def digests(where: str) -> dict[str, str]:
    """A hash of what every row writes that claims to be bit-stable."""
    found = {}
    for op in MAKE:
        for row in tp.TABLE.rows(op):
            for plan in plans(where, op, row.name, COUNT[where]):
                if plan.precision_guarantee().bit_stable_on_same_hardware:
                    out = Problem(plan, COUNT[where]).run(plan)
                    found[f"{plan.sku().id} {plan.descriptor.key}"] = hashlib.sha256(bits(out)).hexdigest()
    return found


@pytest.mark.parametrize("where", [pytest.param(where, marks=mark) for where, mark in MARKS.items()])
def test_bit_stable_between_processes(where: str, tmp_path: Path) -> None:
    """Another process, with an empty Triton cache and another number of threads, gives the same bits."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, __file__, where], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    here = digests(where)
    assert len(here) >= len(SAMPLES)
    assert json.loads(done.stdout) == here


if __name__ == "__main__":
    print(json.dumps(digests(sys.argv[1])))
