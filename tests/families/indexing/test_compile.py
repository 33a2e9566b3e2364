"""Every Triton row of the indexing family, compiled without a GPU for each architecture that it claims."""

from __future__ import annotations

import os
import re

import pytest
from cases.indexing import OPS, STORING
from proofs import FLOAT_ATOMIC
from samples import SAMPLES

import triplan as tp
from triplan.backends.runtime.compile import compile_source, compiled_count, record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}


def rows() -> list[tuple[str, str, str]]:
    found = []
    for op in OPS:
        for row in tp.TABLE.rows(op):
            if row.backend is tp.BackendKind.TRITON:
                found += [(op, row.name, str(arch)) for arch in sorted(row.archs)]
    return found


def configurations(op: str, kernel: str) -> list[tp.Descriptor]:
    """The main configurations of a row: wide rows, narrow rows, strided, every policy, both index elements."""
    base = SAMPLES[op]
    if op == "index_put":
        base = base.replace(accumulate=kernel not in STORING)
    big = {
        "gather": {"out_shape": (4096, 1024)},
        "gather_backward": {"out_shape": (4096, 1024)},
        "index_select": {"out_shape": (4096, 1024)},
        "index_select_backward": {"out_shape": (4096, 1024)},
        "scatter_add": {"src_shape": (4096, 1024)},
        "scatter": {"src_shape": (4096, 1024)},
        "index_add": {"src_shape": (4096, 1024)},
        "index_put": {"out_shape": (512, 1024), "index_shape": (4096,)},
        "embedding": {"index_shape": (4096,), "embedding_dim": 1024},
        "embedding_backward": {"index_shape": (4096,), "embedding_dim": 1024, "padding_idx": 3},
    }[op]
    tensors = [o for o in base.operands() if o.kind == "tensor"]
    strided = {o.name: "strided" for o in tensors}
    unaligned = {o.name: tp.Layout(alignment=o.element.itemsize) for o in tensors}
    half = "f16" if kernel != "atomic_f32" else "bf16"
    shapes = [
        base.replace(**big, element=half),
        base.replace(**big, index_element="i32", out_of_bounds="error", wrap_negative=True),
        base.replace(element=half, layouts=unaligned, out_of_bounds="clamp"),
        base.replace(element=half, layouts=strided, index_element="i32"),
        base.replace(
            layouts={**strided, **({"indices": "strided"} if op == "index_put" else {})}, out_of_bounds="error"
        ),
        base.replace(element="f64"),
    ]
    if op == "index_put":
        shapes.append(base.replace(num_indices=2))
    if hasattr(base, "accumulate") and op != "index_put":
        shapes.append(base.replace(**big, accumulate=False))
    return shapes


@pytest.mark.parametrize(("op", "kernel", "arch"), rows())
def test_compiles_without_spills(op: str, kernel: str, arch: str) -> None:
    preference = tp.PlanPreference(deterministic=False, kernel=kernel)
    built = 0
    for desc in configurations(op, kernel):
        try:
            plan = tp.plan(desc, preference=preference, target=TARGETS[arch])
        except tp.Unsupported:
            continue  # the row refuses this layout or element; another configuration must build
        guarantee = plan.precision_guarantee()
        for kernel_record in plan.compile():
            built += 1
            assert kernel_record.spill_bytes == 0, (
                f"{desc.key}: {kernel_record.name} spills {kernel_record.spill_bytes}"
            )
            assert 0 < kernel_record.registers <= 255
            assert kernel_record.shared_bytes <= TARGETS[arch].shared_memory
            assert f".target sm_{arch[2:]}" in kernel_record.ptx
            assert kernel_record.cubin[:4] == b"\x7fELF"
            if guarantee.deterministic and desc.element.is_floating_point:  # type: ignore[attr-defined]
                # Integer atomics (the lowest bad position) are free of order; floating-point ones never are.
                assert not FLOAT_ATOMIC.search(kernel_record.ptx), f"{desc.key}: {kernel_record.name}"
    assert built, f"no configuration of {op}/{kernel} builds for {arch}"


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
    import triton
    import triton.language as tl

    from triplan.backends.runtime.launch import Launch, Ptr

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
