"""The backward of a matrix product: what is asked, what is in one launch, every ring. The rest is in test_products."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import CPU, H200, INTERPRETER, compiles, required
from cases.gemm import (
    BACKWARD_INTERPRETED,
    COLUMN,
    ELEMENTS,
    LOOSE_COLUMN,
    backward,
    backward_grid,
    check,
    edges,
    keeps_its_word,
    plan_with,
)

import triplan as tp
from triplan.backends.runtime.compile import sass
from triplan.backends.triton.gemm import separate, separate_wgmma, wgmma_backward
from triplan.backends.triton.gemm.column_sums import PROGRAMS
from triplan.backends.triton.gemm.copies import MatrixCopy
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import unit_axis


def test_from_args_wants_what_is_given() -> None:
    a, w, dc = torch.randn(6, 16).half(), torch.randn(24, 16).half(), torch.randn(6, 24).half()
    da, dw = torch.empty(6, 16), torch.empty(24, 16)
    args = tp.GemmBackwardArgs(dc=dc, a=a, b=w.t(), da=da, db=dw.t(), dbias=torch.empty(24))
    desc = tp.GemmBackwardDescriptor.from_args(args)
    assert (desc.m, desc.n, desc.k, desc.out) == (6, 24, 16, tp.ElementKind.F32)
    assert (desc.wants_da, desc.wants_db, desc.wants_dbias) == (True, True, True)
    assert desc.operand("b").layout == COLUMN.model_copy(update={"order": (1, 0)})
    assert tp.plan(desc, target=CPU).can_implement(args)
    assert tp.plan(desc, target=H200).sku().layout == "nnt"
    some = tp.GemmBackwardArgs(dc=dc, b=w.t(), da=da)
    desc = tp.GemmBackwardDescriptor.from_args(some)
    assert (desc.wants_da, desc.wants_db, desc.wants_dbias) == (True, False, False)
    assert tp.plan(desc, target=CPU).can_implement(some)
    refused = tp.plan(desc, target=CPU).can_implement(args)
    assert not refused
    assert "a was passed" in refused.reason


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_subset_interpreted(element: str) -> None:
    # More rows than one row of partial sums of columns has.
    problems = enumerate([*backward_grid(element, 33, 18, 20), *edges("gemm_backward", element)])
    assert sum(check(required(d, BACKWARD_INTERPRETED[i % 2], INTERPRETER), i) for i, d in problems) > 0


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_shared_copy_of_dc_interpreted(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(desc: Any, target: tp.Target, ways: tuple[separate.Way, ...]) -> tuple[MatrixCopy, ...]:
        dc = desc.operand("dc")
        return (MatrixCopy(dc, 0 if unit_axis(dc) == 0 else 1),) if desc.wants_da and desc.wants_db else ()

    monkeypatch.setattr(separate, "shared", always)
    held = 0
    for turn, desc in enumerate(backward_grid(element, 33, 19, 20)):
        plan = required(desc, "separate", INTERPRETER)
        assert ("matrix_copy_kernel" in {x.kernel.__name__ for x in plan.launches}) >= (desc.wants_da and desc.wants_db)
        held += check(plan, turn)
    assert held > 0


def test_both_products_share_a_copy_of_a_dc_that_no_vectors_can_read() -> None:
    """Each would copy it by itself; a single product has nobody to share it with."""
    odd = backward(20480, 1025, 1024, "f16", (1, 1, 1))
    plan = required(odd, "separate_wgmma", H200)
    assert [x.kernel.__name__ for x in plan.launches].count("matrix_copy_kernel") == 3  # of dc, of b, and out of db
    (copy,) = separate.shared(odd, H200, separate_wgmma.WAYS)
    assert (copy.operand.name, copy.unit, copy.leading) == ("dc", 1, 1088)  # whole lines of 64
    for other in (odd.replace(n=1024), odd.replace(wants_da=False), odd.replace(wants_db=False), odd.replace(m=0)):
        assert separate.shared(other, H200, separate_wgmma.WAYS) == ()
    strided = backward(361, 3824, 511, "f32", (1, 1, 0), math="tf32x3", layouts={"dc": "strided"})
    assert len(separate.shared(strided, H200, separate.WAYS)) == 1


@pytest.mark.gpu
def test_a_shared_copy_of_dc_on_the_gpu() -> None:
    target = tp.Target.current()
    for turn, element in enumerate(("f16", "bf16", "f32")):
        for layouts in ({}, {"dc": "strided"}, {"dc": LOOSE_COLUMN, "db": COLUMN}):
            plan = tp.plan(backward(2050, 1025, 520, element, (1, 1, 1), layouts=layouts), target=target)
            assert check(plan, turn) > 0


#: Rows and columns of dc, and launches that sum the columns. A block has more rows where columns are few.
SUMS = [((1, 300), 1), ((8, 700), 1), ((256, 1), 1), ((500, 3), 1), ((600, 3), 2), ((300, 40), 2), ((1100, 40), 2)]


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("extents", "launches"), SUMS, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_sums_of_columns_interpreted(strided: bool, extents: tuple[int, int], launches: int, element: str) -> None:
    m, n = extents
    layouts = {"dc": tp.Layout.strided()} if strided else {}
    desc = backward(m, n, 1, element, (0, 0, 1), layouts=layouts)
    plan = required(desc, "separate", INTERPRETER)
    assert [x.kernel.__name__ for x in plan.launches] == ["column_sums_kernel"] * launches
    assert check(plan, 0)


def test_sums_of_columns_without_unit_stride_load_few_rows_at_a_time() -> None:
    """The lanes of a warp lie along the first axis of a block: 64 rows were 32 sectors for each load."""
    desc = backward(12288, 4288, 1, "f16", (0, 0, 1), layouts={"dc": tp.Layout.strided()})
    first = required(desc, "separate", H200).launches[0].constexprs
    packed = required(desc.replace(layouts={}), "separate", H200).launches[0].constexprs
    assert (first["ROWS"], first["GROUPS"], packed["ROWS"], packed["GROUPS"]) == (8, 8, 64, 1)


@pytest.mark.parametrize("n", [1, 768, 4099, 4288, 11008, 80000])
def test_sums_of_columns_have_one_wave_of_programs(n: int) -> None:
    """34 blocks of columns by 16 chunks were 544 programs, and 528 are resident at a time."""
    launch = required(backward(12288, n, 1, "f16", (0, 0, 1)), "separate", H200).launches[0]
    assert launch.grid <= max(PROGRAMS, -(-n // launch.constexprs["BLOCK"]))


@compiles
def test_the_machine_code_of_both_products_in_one_launch() -> None:
    plan = required(backward(2048, 2048, 2048, "bf16", (1, 1, 1)), "wgmma", H200)
    (found,) = plan.compile()  # the sums of columns among it
    assert plan.workspace_size() == 0
    code = "".join(sass(found.cubin))
    assert "HGMMA.64x256x16" in code
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert "SHFL.BFLY" in code  # by which the sums of columns meet


def test_one_launch_has_both_products_and_the_sums_that_fit_beside_them() -> None:
    """256 tiles and 8 strips on 132 multiprocessors: two full rounds."""
    desc = backward(2048, 2048, 2048, "bf16", (1, 1, 1))
    plan = required(desc, "wgmma", H200)
    (launch,) = plan.launches
    assert (launch.grid, launch.constexprs["BLOCK_N"], plan.workspace_size()) == (132, 256, 0)
    # A strip that would be waited for has launches of its own, and partial sums.
    tall = required(desc.replace(m=65536), "wgmma", H200)
    assert [x.kernel.__name__ for x in tall.launches][1:] == ["column_sums_kernel"] * 2
    assert tall.workspace_size() > 0


def test_the_columns_are_summed_in_tiles_of_db_whose_first_factor_is_dc() -> None:
    desc = backward(65536, 2048, 2048, "bf16", (1, 1, 1), layouts={"b": COLUMN, "db": COLUMN})
    plan = required(desc, "wgmma", H200)
    (launch,) = plan.launches
    assert (launch.constexprs["SUMS_X1"], launch.constexprs["SUMS_X2"]) == (True, False)
    assert plan.workspace_size() == 0
    wide = desc.replace(m=4096, n=8192)  # of which the sum over n is the longer one
    (launch,) = required(wide, "wgmma", H200).launches
    assert (launch.constexprs["SUMS_X1"], launch.constexprs["SUMS_X2"]) == (False, True)
    for d in (desc.replace(layouts={}), desc.replace(layouts={**dict(desc.layouts), "dc": COLUMN})):
        assert {wgmma_backward.sums_of(d, r, H200, 1) for r in wgmma_backward.rings_of(d, H200)} == {"apart"}
    assert {r.n: wgmma_backward.sums_of(desc, r, H200, 1) for r in wgmma_backward.rings_of(desc, H200)} == {
        256: "tiles",
        128: "apart",
        64: "apart",
    }


def test_the_larger_k_is_cut_where_its_product_has_few_tiles() -> None:
    """Each part of a tile is an item of the work list; the partial products, and sums of columns, are added after."""
    desc = backward(32768, 768, 768, "bf16", (1, 1, 1), layouts={"b": COLUMN, "db": COLUMN})
    ring = wgmma_backward.cheapest_ring(desc, H200)
    parts = wgmma_backward.parts_of(desc, ring, H200)
    assert (ring.n, parts > 1) == (256, True)
    plan = required(desc, "wgmma", H200)
    assert [x.kernel.__name__ for x in plan.launches] == ["wgmma_pair_kernel", "pieces_kernel", "column_sums_kernel"]
    assert plan.workspace_size() == parts * (768 * 768 + 768) * 4
    assert all(found.spill_bytes == 0 for found in plan.compile())
    busiest = [wgmma_backward.dealt(desc, ring, H200, p).busiest for p in (1, parts)]
    assert busiest[1] < 0.7 * busiest[0]
    square = backward(4096, 4096, 4096, "bf16", (1, 1, 1))
    assert wgmma_backward.parts_of(square, wgmma_backward.cheapest_ring(square, H200), H200) == 1


# --- on the GPU ---


def gradients(desc: tp.GemmBackwardDescriptor, seed: int) -> tp.GemmBackwardArgs:
    """Args of packed operands, but for those that are promised column-major; outputs are NaN."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    named: dict[str, Any] = {}
    for o in desc.operands():
        if not o.is_tensor:
            continue
        column = o.layout.unit_axis == 0 and len(o.shape) == 2
        shape = o.shape[::-1] if column else o.shape
        t = torch.randn(shape, generator=g, device="cuda").to(o.element.torch)
        t = torch.full_like(t, float("nan")) if o.is_written else t
        named[o.name] = t.t() if column else t
    return tp.GemmBackwardArgs(**named)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("out", "layouts"),
    [
        (None, {}),
        ("f32", {"b": COLUMN, "db": COLUMN}),
        (None, {"a": COLUMN, "b": COLUMN, "db": COLUMN}),
        (None, {"dc": COLUMN}),
    ],
    ids=["rows", "linear_f32", "columns", "dc_column"],
)
def test_every_ring_on_the_gpu(out: str | None, layouts: Any, element: str) -> None:
    """Each, on tiles that stick out of the gradients; with whole and partial products of the larger k, which is that of
    db or that of da; with the sums of columns within the launch and after it."""
    target = tp.Target.current()
    if target.arch is not tp.ArchSku.SM90A:
        pytest.skip("no Hopper")
    seen = set()
    for size in ((1032, 1048, 1064), (8200, 264, 136), (136, 8200, 264)):
        desc = backward(*size, element, (1, 1, 1), layouts=layouts, out_element=out)
        for ring in wgmma_backward.rings_of(desc, target):
            parts = wgmma_backward.parts_of(desc, ring, target)
            seen |= {wgmma_backward.sums_of(desc, ring, target, parts), "parts" if parts > 1 else "whole"}
            launches = wgmma_backward.launches(desc, ring, target)
            workspace = wgmma_backward.workspace_with(desc, ring, target)
            plan = plan_with(desc, f"wgmma {ring}", launches, workspace, lambda d: backward_guarantee(d, d.m), target)
            args = gradients(desc, 3)
            plan.run(args, tp.Workspace.allocate(plan, "cuda"))
            keeps_its_word(plan, args)
    rows_of_dc, first_factor = "dc" not in layouts, "db" in layouts
    assert seen == {"apart", "parts", "whole"} | ({"strips"} if rows_of_dc else set()) | (
        {"tiles"} if rows_of_dc and first_factor else set()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(
    "size", [(2048, 2048, 2048), (2056, 2056, 1032), (4104, 1544, 1032), (20000, 264, 136), (32768, 768, 3072)]
)
def test_what_select_takes_gives_the_same_bits_every_time_on_the_gpu(size: tuple[int, int, int], element: str) -> None:
    plan = tp.plan(backward(*size, element, (1, 1, 1)))
    workspace, first = tp.Workspace.allocate(plan, "cuda"), None
    for _ in range(50):
        args = gradients(plan.descriptor, 7)
        plan.run(args, workspace)
        found = [t.view(torch.int16).clone() for t in (args.da, args.db, args.dbias) if t is not None]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    keeps_its_word(plan, args)
