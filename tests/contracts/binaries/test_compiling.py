"""What compiling gives: one binary a source, and a record that tells spills."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from samples import SAMPLES

import triplan as tp
from triplan.backends.runtime.compile import compile_source, compiled_count, record
from triplan.backends.runtime.launch import Launch, Ptr
from triplan.sku import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}


def test_binaries_are_shared_process_wide() -> None:
    def source(batch: int) -> object:
        desc = tp.IndexSelectDescriptor(out_shape=(batch, 64), select_dim=0, src_dim_size=9, element="f32")
        (launch,) = tp.plan(desc, target=TARGETS["sm90a"]).launches
        return launch.source()

    first = compile_source(source(5), tp.ArchSku.SM90A)  # type: ignore[arg-type]
    count = compiled_count()
    assert compile_source(source(77), tp.ArchSku.SM90A) is first  # type: ignore[arg-type]
    assert compiled_count() == count


@triton.jit
def hungry(x, y, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(x + i + B)
    c = tl.load(x + i + 2 * B)
    # Sums need every element, and every element is needed again after them.
    tl.store(y + i, a * tl.sum(b) + b * tl.sum(c) + c * tl.sum(a))


def of_hungry(block: int, warps: int, max_registers: int | None = None) -> Launch:
    pointer = Ptr("x", tp.ElementKind.F32, 16)
    args = {"x": pointer, "y": pointer}
    return Launch(hungry, 1, args, {"B": block}, num_warps=warps, max_registers=max_registers)


def test_spills_would_be_seen() -> None:
    """A kernel forced into few registers spills, and the record says so."""
    assert record(of_hungry(4096, 1).source(), tp.ArchSku.SM80).spill_bytes > 0


@pytest.mark.parametrize("warps", [8, 16, 32])
def test_registers_of_a_thread_are_at_most_its_share_of_a_block_s(warps: int) -> None:
    """Without this, blocks of many threads compile and cannot be launched."""
    found = record(of_hungry(64 * 32 * warps, warps, 255).source(), tp.ArchSku.SM90A)
    share = (1 << 16) // (32 * warps)
    assert share // 2 < found.registers <= share


def test_cpu_plans_have_nothing_to_compile() -> None:
    with pytest.raises(tp.Unsupported, match="nothing to compile"):
        tp.plan(SAMPLES["gather"], target=tp.Target.cpu()).compile()
