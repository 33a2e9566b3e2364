"""The adjoint of a matrix product: the reference, every row in the interpreter, compiled, and on the GPU."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from cases.gemm import (
    COLUMN,
    EDGES,
    ELEMENTS,
    LOOSE_ROW,
    ROW,
    SUBSETS,
    backward,
    backward_grid,
    backward_magnitude,
    check,
    pinned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import triplan as tp
from triplan.backends.runtime.compile import sass
from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.gemm import wgmma_backward
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.testing import check_refusals, descriptors, oracle

CPU, INTERPRETER = tp.Target.cpu(), tp.Target.cpu(interpret=True)
TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
INTERPRETED = ("tiles", "tiles_invariant")
ROWS = (*INTERPRETED, "wgmma")
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")


def of_edges(element: str) -> list[tp.GemmBackwardDescriptor]:
    """Where something is missing, or there is but one: every subset among them."""
    return [backward(*edge, element, SUBSETS[turn % 2]) for turn, edge in enumerate(EDGES)] + [
        backward(5, 4, 3, element, subset) for subset in SUBSETS
    ]


# --- what is asked ---


def test_from_args_wants_what_is_given() -> None:
    a, w, dc = torch.randn(6, 16).half(), torch.randn(24, 16).half(), torch.randn(6, 24).half()
    da, dw = torch.empty(6, 16), torch.empty(24, 16)
    args = tp.GemmBackwardArgs(dc=dc, a=a, b=w.t(), da=da, db=dw.t(), dbias=torch.empty(24))
    desc = tp.GemmBackwardDescriptor.from_args(args)
    assert (desc.m, desc.n, desc.k, desc.out) == (6, 24, 16, tp.ElementKind.F32)
    assert (desc.wants_da, desc.wants_db, desc.wants_dbias) == (True, True, True)
    assert desc.operand("b").layout == COLUMN
    assert tp.plan(desc, target=CPU).can_implement(args)
    assert tp.plan(desc, target=TARGETS["sm90a"]).sku().layout == "nnt"
    some = tp.GemmBackwardArgs(dc=dc, b=w.t(), da=da)
    desc = tp.GemmBackwardDescriptor.from_args(some)
    assert (desc.wants_da, desc.wants_db, desc.wants_dbias) == (True, False, False)
    assert tp.plan(desc, target=CPU).can_implement(some)
    refused = tp.plan(desc, target=CPU).can_implement(args)
    assert not refused
    assert "a was passed" in refused.reason


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"wants_da": False, "wants_db": False}, ("wants_da", "wants_dbias", "at least one gradient")),
        ({"out_element": "f16"}, ("out_element", "f16", "bf16 or f32")),
        ({"math": "tf32"}, ("math", "tf32", "bf16")),
        ({"layouts": {"dbias": "strided"}}, ("dbias",)),
    ],
)
def test_bad_fields(change: dict[str, object], names: tuple[str, ...]) -> None:
    with pytest.raises(tp.InvalidProblem) as info:
        tp.GemmBackwardDescriptor(m=2, n=3, k=4, element="bf16").replace(**change)
    assert all(n in str(info.value) for n in names), str(info.value)


# --- the reference ---


def test_the_definition_is_torchs_gradient() -> None:
    desc = backward(3, 2, 4, "f64", (1, 1, 1))
    a, b, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 2), (2,)))
    dc = torch.randn(3, 2, dtype=torch.float64)
    (2.0 * a @ b + bias).backward(dc)
    empty = {"da": torch.empty(3, 4).double(), "db": torch.empty(4, 2).double(), "dbias": torch.empty(2).double()}
    found = oracle(desc, tp.GemmBackwardArgs(dc=dc, a=a.detach(), b=b.detach(), alpha=2.0, **empty))
    for name, t in (("da", a), ("db", b), ("dbias", bias)):
        torch.testing.assert_close(found[name], t.grad)


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_cpu_backend_keeps_its_guarantee(element: str) -> None:
    # The reference is the same for all layouts.
    for turn, desc in enumerate([*[*backward_grid(element, 17, 35, 40)][::4], *of_edges(element)]):
        plan = tp.plan(desc, target=CPU)
        check(plan, turn)
        assert turn % 4 or check_refusals(plan, seed=turn) > 0


# --- in the interpreter ---


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_subset_interpreted(element: str) -> None:
    held = 0
    # More rows than one line of the sums of columns has.
    for turn, desc in enumerate([*backward_grid(element, 33, 18, 20), *of_edges(element)]):
        plan = pinned(desc, INTERPRETED[turn % 2], INTERPRETER)
        assert plan is not None
        held += check(plan, turn, runs=1 if turn else 2)
    assert held > 0


# --- compiled ---


@compiles
def test_the_machine_code_of_both_products_in_one_launch() -> None:
    plan = pinned(backward(2048, 2048, 2048, "bf16", (1, 1, 1)), "wgmma", TARGETS["sm90a"])
    assert plan is not None
    (found,) = plan.compile()  # the sums of columns among it
    assert plan.workspace_size() == 0
    code = sass(found.cubin)
    assert "HGMMA.64x256x16" in code
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert "SHFL.BFLY" in code  # by which the sums of columns meet


@compiles
@pytest.mark.parametrize("row", ROWS)
def test_a_thousand_shapes_compile_a_handful_of_kernels(row: str) -> None:
    sources = set()
    for size in range(8, 8008, 8):
        plan = pinned(backward(size, 4096, size // 8 * 8, "f16", (1, 1, 1)), row, TARGETS["sm90a"])
        assert plan is not None
        sources.update(launch.source() for launch in plan.launches)
    assert 1 <= len(sources) <= 40


def test_the_hopper_row_says_why_it_is_not_taken() -> None:
    base = backward(64, 64, 64, "f16", (1, 1, 1))
    for change, word in (
        ({"n": 63}, "dc"),
        ({"k": 60}, "b"),
        ({"m": 0}, "empty"),
        ({"wants_da": False, "wants_db": False}, "nothing to multiply"),
        ({"layouts": {"a": "strided"}}, "no unit stride"),
        ({"layouts": {"db": "strided"}}, "no unit stride"),
        ({"layouts": {"dc": LOOSE_ROW}}, "alignment"),
        # Rows that end within 16 bytes: TMA would write beyond them.
        ({"n": 68, "layouts": {"dc": ROW, "b": ROW, "db": ROW}}, "68"),
    ):
        plan = tp.plan(base.replace(**change), target=TARGETS["sm90a"])
        (refused,) = [c for c in plan.candidates if c.kernel == "wgmma"]
        assert refused.cost_us is None
        assert word in refused.reason, refused.reason
    with pytest.raises(tp.Unsupported, match="excluded"):
        tp.plan(base, target=TARGETS["sm90a"], preference=tp.PlanPreference(kernel="wgmma", exclude=("tma",)))


def test_one_launch_has_both_products_and_the_sums_that_fit_beside_them() -> None:
    """256 tiles and 8 strips on 132 multiprocessors: two full rounds."""
    desc = backward(2048, 2048, 2048, "bf16", (1, 1, 1))
    plan = pinned(desc, "wgmma", TARGETS["sm90a"])
    assert plan is not None
    (launch,) = plan.launches
    assert (launch.grid, launch.constexprs["BLOCK_N"], plan.workspace_size()) == (132, 256, 0)
    # A strip that would be waited for has launches of its own, and partial sums.
    tall = pinned(desc.replace(m=65536), "wgmma", TARGETS["sm90a"])
    assert tall is not None
    assert [x.kernel.__name__ for x in tall.launches][1:] == ["column_sums_kernel"] * 2
    assert tall.workspace_size() > 0


# --- on the GPU ---

#: Less than a block, a few of them, and more tiles than multiprocessors, none a multiple of anything but 8.
SIZES = ((17, 35, 70), (8, 16, 24), (136, 264, 200), (1544, 2056, 712))


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_subset_on_the_gpu(row: str, element: str) -> None:
    target, ran = tp.Target.current(), 0
    for m, n, k in SIZES:
        large = m > 1000
        if large and (row == "tiles_invariant" or element in ("f32", "f64")):
            continue  # the oracle takes long: two rows and elements stand for all
        for turn, desc in enumerate([*backward_grid(element, m, n, k)][:: 4 if large else 1]):
            plan = pinned(desc, row, target)
            if plan is not None:
                ran += check(plan, turn)
    for turn, desc in enumerate(of_edges(element)):
        plan = pinned(desc, row, target)
        if plan is not None:
            ran += check(plan, turn)
    applies = row in INTERPRETED or (target.arch is tp.ArchSku.SM90A and element in ("f16", "bf16"))
    assert (ran > 0) == applies


@pytest.mark.gpu
def test_tf32_on_the_gpu() -> None:
    for turn, desc in enumerate(backward_grid("f32", 136, 264, 200)):
        assert check(tp.plan(desc.replace(math="tf32")), turn) > 0


def keeps_its_word(plan: tp.Plan[Any, Any], args: tp.GemmBackwardArgs) -> None:
    """The gradients that ``args`` hold, against float64 on the same device at the plan's own tolerance."""
    inputs = {name: None if (x := getattr(args, name)) is None else x.double() for name in ("dc", "a", "b")}
    reference = tp.TABLE.reference("gemm_backward").compute
    assert reference is not None
    want = reference(plan.descriptor, inputs)
    terms = backward_magnitude(plan.descriptor, {name: None if x is None else x.abs() for name, x in inputs.items()})
    for name, ref in want.items():
        t = plan.precision_guarantee(name).tolerance
        bound = t.rtol * ref.abs() + t.ctol * terms[name] + t.underflow
        wrong = ~((getattr(args, name).double() - ref).abs() <= bound)
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} elements are wrong: {plan!r}, {plan.descriptor!r}"


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
def test_every_ring_on_the_gpu(element: str) -> None:
    """Each, on tiles that stick out of the gradients, with the sums of columns beside them and after them."""
    target = tp.Target.current()
    if target.arch is not tp.ArchSku.SM90A:
        pytest.skip("no Hopper")
    beside = set()
    for out, layouts in (
        (None, {}),
        ("f32", {"b": COLUMN, "db": COLUMN}),
        (None, {"a": COLUMN, "b": COLUMN}),
        (None, {"dc": COLUMN}),
    ):
        desc = backward(1032, 1048, 1064, element, (1, 1, 1), layouts=layouts, out_element=out)
        for ring in wgmma_backward.rings_of(desc, target):
            beside.add(wgmma_backward.sums_within(desc, ring, target))
            launches = wgmma_backward.launches(desc, ring, target)
            plan = plan_of(desc, f"wgmma {ring}", launches, wgmma_backward.workspace_with(desc, ring, target), target)
            args = gradients(desc, 3)
            plan.run(args, tp.Workspace.allocate(plan, "cuda"))
            keeps_its_word(plan, args)
    assert beside == {True, False}


def plan_of(
    desc: tp.GemmBackwardDescriptor, name: str, launches: list[Launch], workspace: int, target: tp.Target
) -> tp.Plan[Any, Any]:
    """A plan that runs ``launches``, of a row that is in the table while it is selected."""
    tp.kernel(
        op="gemm_backward",
        name=name,
        elements=("f16", "bf16"),
        guarantee=lambda desc: backward_guarantee(desc, desc.m),
        rank=lambda desc, target: 1e9,
        workspace=lambda desc, target: workspace,
    )(lambda desc, target: launches)
    try:
        plan = pinned(desc, name, target)
        assert plan is not None
        _ = plan.launches, plan.workspace_size()  # asked of the row while it is there
        return plan
    finally:
        tp.TABLE.unregister("gemm_backward", name)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("size", [(2048, 2048, 2048), (2056, 2056, 1032), (4104, 1544, 1032), (20000, 264, 136)])
def test_what_select_takes_gives_the_same_bits_every_time_on_the_gpu(size: tuple[int, int, int], element: str) -> None:
    plan = tp.plan(backward(*size, element, (1, 1, 1)))
    workspace, first = tp.Workspace.allocate(plan, "cuda"), None
    for _ in range(20):
        args = gradients(plan.descriptor, 7)
        plan.run(args, workspace)
        found = [t.view(torch.int16).clone() for t in (args.da, args.db, args.dbias) if t is not None]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    keeps_its_word(plan, args)


@pytest.mark.gpu
def test_any_problem_on_the_gpu() -> None:
    @settings(max_examples=25)
    @given(descriptors(tp.GemmBackwardDescriptor, 1 << 20, target=tp.Target.current()), st.integers(0, 2**31))
    def holds(desc: tp.GemmBackwardDescriptor, seed: int) -> None:
        plan = tp.plan(desc)
        check(plan, seed)
        check_refusals(plan, seed=seed)

    holds()
