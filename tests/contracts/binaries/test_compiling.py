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


def test_spills_would_be_seen() -> None:
    """A kernel forced into few registers spills, and the record says so."""

    @triton.jit
    def hungry(x, y, B: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, B)
        a = tl.load(x + i)
        b = tl.load(x + i + B)
        c = tl.load(x + i + 2 * B)
        # Sums need every element, and every element is needed again after them.
        tl.store(y + i, a * tl.sum(b) + b * tl.sum(c) + c * tl.sum(a))

    pointer = Ptr("x", tp.ElementKind.F32, 16)
    launch = Launch(hungry, 1, {"x": pointer, "y": pointer}, {"B": 4096}, num_warps=1)
    assert record(launch.source(), tp.ArchSku.SM80).spill_bytes > 0


def test_cpu_plans_have_nothing_to_compile() -> None:
    with pytest.raises(tp.Unsupported, match="nothing to compile"):
        tp.plan(SAMPLES["gather"], target=tp.Target.cpu()).compile()
