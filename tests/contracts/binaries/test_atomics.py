"""What the PTX says of determinism, for every architecture that rows are compiled for, at hand or not.

Additions of floating-point numbers in memory come in whatever order the hardware chooses. A row that claims to be
deterministic has none in its PTX, nor a compare-and-swap, by whose loops they are emulated; and each row that does not
claim it has one, so that the search is known to find them. Integer atomics are left out: their sums know no order.
"""

from __future__ import annotations

import os

import pytest
from proofs import COUNT, FAMILIES, FLOAT_ATOMIC, pinned

import triplan as tp
from triplan.backends.runtime.compile import compile_source

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.gpu.acq_rel.add.f32",
        "atom.add.f64",
        "red.relaxed.gpu.global.add.noftz.f16x2",
        "red.global.add.noftz.bf16",
        "red.relaxed.gpu.global.v4.f32.add",
        "red.global.gpu.relaxed.add.noftz.v8.f16",
        "atom.global.gpu.acq_rel.cas.b32",
        "atom.cas.b64",
    ],
)
def test_floating_point_atomics_are_found(instruction: str) -> None:
    assert FLOAT_ATOMIC.search(f"\t@%p1 {instruction} [ %rd1 + 0 ], %r2;\n")


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.gpu.relaxed.add.u64",
        "atom.global.min.s64",
        "red.global.max.u32",
        "add.f32",
        "fma.rn.f32",
        "bar.red.popc.u32",
    ],
)
def test_what_knows_no_order_is_not(instruction: str) -> None:
    assert not FLOAT_ATOMIC.search(f"\t@%p1 {instruction} %r1, [ %rd1 + 0 ], %r2;\n")


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_the_ptx_of_every_row(op: str, arch: str) -> None:
    read = 0
    for row in (r for r in tp.TABLE.rows(op) if arch in r.archs):
        for element in sorted(e for e in row.elements if e.is_floating_point):
            for option in FAMILIES[op].options:
                plan = pinned(FAMILIES[op].make(COUNT["gpu"], element, "equal", **option), row.name, TARGETS[arch])
                if plan is None:
                    continue
                sources = dict.fromkeys(launch.source() for launch in plan.launches)
                found = [s.name for s in sources if FLOAT_ATOMIC.search(compile_source(s, plan.target.arch).asm["ptx"])]
                g = plan.precision_guarantee()
                if g.deterministic:
                    assert not found, f"deterministic, and yet {found} in {plan.sku().id}"
                elif g.duplicates is tp.Duplicates.SUM:
                    assert found, f"nothing that depends on order in {plan.sku().id}"
                read += len(sources)
    assert read > 0
