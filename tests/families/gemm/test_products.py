"""Matrix products and their backward: the reference, every entry in the interpreter, compiled, and on the GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import CPU, H200, INTERPRETER, SM80, compiles, pinned, required
from cases.gemm import (
    COLUMN,
    ELEMENTS,
    ENTRIES,
    HOPPER,
    INTERPRETED,
    LOOSE_ROW,
    ROW,
    backward,
    backward_grid,
    batches,
    check,
    check_on_the_cpu,
    compared,
    edges,
    grid,
    keeps_its_word,
    plan_with,
)
from hypothesis import given, settings, strategies as st
from proofs import MARKS, target

import triplan as tp
from triplan.backends.runtime.compile import sass
from triplan.backends.triton.gemm import tiles, wgmma, wgmma_tiles
from triplan.backends.triton.gemm.rings import RINGS
from triplan.backends.triton.gemm.tile_shapes import tiles_of
from triplan.testing import check_refusals, descriptors, oracle

# --- what is asked ---


def test_defaults_spelled_out_are_no_other_problem() -> None:
    bare = tp.GemmDescriptor(m=2, n=3, k=4, element="bf16")
    spelled = {"out_element": torch.bfloat16, "math": "bf16", "accumulator": "f32"}
    assert bare.replace(**spelled) == bare
    assert bare.replace(out_element="f32") != bare
    assert tp.parse_descriptor(bare.replace(out_element="f32").to_json()) == bare.replace(out_element="f32")
    f32 = bare.replace(element="f32")
    assert f32.replace(math="tf32").multiplicands == tp.MathPrecision.TF32 != f32.multiplicands


BARE = tp.GemmDescriptor(m=2, n=3, k=4, element="bf16")
BARE_BACKWARD = tp.GemmBackwardDescriptor(m=2, n=3, k=4, element="bf16")


@pytest.mark.parametrize(
    ("bare", "change", "names"),
    [
        (BARE, {"math": "tf32"}, ("math", "tf32", "bf16")),
        (BARE, {"math": "fp8"}, ("math", "fp8")),
        (BARE, {"out_element": "f16"}, ("out_element", "f16", "bf16 or f32")),
        (BARE, {"accumulator": "bf16"}, ("accumulator", "f32")),
        (BARE, {"epilogue": "bias_tanh"}, ("epilogue", "bias_tanh")),
        (BARE, {"m": -1}, ("m", "-1")),
        (BARE, {"layouts": {"bias": "strided"}}, ("bias",)),
        (BARE, {"element": "f16", "math": "tf32x3"}, ("tf32x3",)),
        (BARE, {"element": "i8", "out_element": "i8"}, ("out_element", "i32")),
        (BARE, {"element": "i8", "math": "f32"}, ("math", "exact")),
        (BARE, {"element": "i8", "epilogue": "bias_gelu"}, ("epilogue", "gelu")),
        (BARE_BACKWARD, {"wants_da": False, "wants_db": False}, ("wants_da", "wants_dbias", "at least one gradient")),
        (BARE_BACKWARD, {"out_element": "f16"}, ("out_element", "f16", "bf16 or f32")),
        (BARE_BACKWARD, {"math": "tf32"}, ("math", "tf32", "bf16")),
        (BARE_BACKWARD, {"layouts": {"dbias": "strided"}}, ("dbias",)),
    ],
)
def test_bad_fields(bare: tp.Descriptor, change: dict[str, object], names: tuple[str, ...]) -> None:
    with pytest.raises(tp.InvalidProblem) as info:
        bare.replace(**change)
    assert all(n in str(info.value) for n in names), str(info.value)


def test_from_args_promises_transposes_as_they_lie() -> None:
    a, w = torch.randn(6, 16).half(), torch.randn(24, 16).half()
    args = tp.GemmArgs(a=a, b=w.t(), c=torch.empty(6, 24).half(), bias=torch.randn(24).half())
    desc = tp.GemmDescriptor.from_args(args, epilogue="bias")
    assert (desc.m, desc.n, desc.k) == (6, 24, 16)
    assert desc.operand("b").layout == COLUMN.model_copy(update={"order": (1, 0)})
    assert tp.plan(desc, target=CPU).can_implement(args)
    assert tp.plan(desc, target=H200).sku().layout == "nt"
    odd = tp.GemmDescriptor.from_args(tp.GemmArgs(a=a[:, 1:], b=w.t()[1:], c=args.c))
    assert odd.operand("a").layout.stride_multiple == 8
    assert odd.operand("a").layout.alignment == 2


# --- the reference ---


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("op", ENTRIES)
def test_the_cpu_backend_keeps_its_guarantee(op: str, element: str) -> None:
    if op == "gemm_backward":  # the reference is the same for all layouts
        check_on_the_cpu([*[*backward_grid(element, 17, 35, 40)][::4], *edges(op, element)], refusals_every=4)
    else:
        check_on_the_cpu([*grid(element, 17, 35, 70), *edges(op, element), *batches(element, 9, 7, 20)])


def test_the_definition() -> None:
    """By loops, on a problem that has everything."""
    desc = tp.GemmDescriptor(m=3, n=2, k=4, element="f64", epilogue="bias_relu", reads_c0=True)
    a, b, c0, bias = (torch.randn(s).double() for s in ((3, 4), (4, 2), (3, 2), (2,)))
    want = torch.empty(3, 2, dtype=torch.float64)
    for i in range(3):
        for j in range(2):
            want[i, j] = max(0.0, 2.0 * sum(a[i, p] * b[p, j] for p in range(4)) - 3.0 * c0[i, j] + bias[j])
    args = tp.GemmArgs(a=a, b=b, c=torch.empty(3, 2).double(), c0=c0, bias=bias, alpha=2.0, beta=-3.0)
    torch.testing.assert_close(oracle(desc, args)["c"], want)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_activations_are_torchs(name: str) -> None:
    x = torch.linspace(-9, 9, 101, dtype=torch.float64)[None]
    desc = tp.GemmDescriptor(m=1, n=101, k=1, element="f64", epilogue=name)
    args = tp.GemmArgs(a=torch.ones(1, 1).double(), b=x, c=torch.empty_like(x))
    torch.testing.assert_close(oracle(desc, args)["c"], getattr(torch.nn.functional, name)(x))


# --- in the interpreter ---


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("entry", INTERPRETED)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_epilogue_interpreted(entry: str, element: str) -> None:
    problems = [*grid(element, 17, 35, 70), *edges("gemm", element), *batches(element, 17, 35, 40)]
    assert compared(problems, lambda desc: required(desc, entry, INTERPRETER)) > 0


@pytest.mark.parametrize("where", [pytest.param(where, marks=mark) for where, mark in MARKS.items()])
def test_beta_zero_never_reads_c0(where: str) -> None:
    desc = tp.GemmDescriptor(m=5, n=3, k=4, element="f32", reads_c0=True)
    plan = tp.plan(desc, target=target(where))
    device = plan.target.device_type
    a, b, c0 = (
        torch.ones(5, 4, device=device),
        torch.ones(4, 3, device=device),
        torch.full((5, 3), torch.nan).to(device),
    )
    for beta, want in ((0.0, 2.0), (1.0, torch.nan)):
        c = torch.empty(5, 3, device=device)
        plan.run(tp.GemmArgs(a=a, b=b, c=c, c0=c0, alpha=0.5, beta=beta))
        assert torch.equal(c.nan_to_num(9.0), torch.full_like(c, want).nan_to_num(9.0))


# --- compiled ---


@compiles
@pytest.mark.parametrize(
    ("target", "entry", "instruction"),
    [
        (SM80, "tiles", "HMMA.16816"),
        (H200, "tiles", "HGMMA.64x"),
        # One instruction is as wide as a tile: narrower ones would read A more often.
        (H200, "wgmma", "HGMMA.64x{BLOCK_N}x16"),
        (H200, "wgmma_tiles", "HGMMA.64x{BLOCK_N}x16"),
    ],
)
def test_the_machine_code_has_tensor_core_instructions(target: tp.Target, entry: str, instruction: str) -> None:
    desc = tp.GemmDescriptor(m=4096, n=4096, k=4096, element="bf16", epilogue="bias", layouts={"b": COLUMN})
    plan = required(desc, entry, target)
    (found,), (launch,) = plan.compile(), plan.launches
    code = "".join(sass(found.cubin))
    assert instruction.format(**launch.constexprs) in code
    assert not re.search(r"\b(STL|LDL)\b", code)


@compiles
@pytest.mark.parametrize(("op", "entry"), [(op, entry) for op, entries in ENTRIES.items() for entry in entries])
def test_a_thousand_shapes_compile_a_handful_of_kernels(op: str, entry: str) -> None:
    sources = set()
    for i in range(1, 1001):
        if op == "gemm":
            desc: tp.Descriptor = tp.GemmDescriptor(m=i, n=4096, k=8 * i, element="f16")
        else:
            desc = backward(8 * i, 4096, 8 * i, "f16", (1, 1, 1))
        sources.update(launch.source() for launch in required(desc, entry, H200).launches)
    # Each of two products takes a kernel of its own.
    assert 1 <= len(sources) <= (60 if entry == "separate" else 40)


FORWARD = tp.GemmDescriptor(m=64, n=64, k=64, element="f16")
BACKWARD = backward(64, 64, 64, "f16", (1, 1, 1))
TAKEN = FORWARD.replace(layouts={"a": COLUMN, "b": ROW, "c": ROW})


def column(alignment: int, **facts: Any) -> tp.Layout:
    return tp.Layout.strided(unit_axis=0, alignment=alignment, **facts)


@pytest.mark.parametrize(
    ("base", "change", "word"),
    [
        (FORWARD, {"k": 63}, "a is promised stride_multiple=1 "),
        (FORWARD, {"n": 63}, "b is promised stride_multiple=1 "),
        (FORWARD, {"k": 0}, "k is 0"),
        (FORWARD, {"n": 60, "layouts": {"b": COLUMN, "c": ROW}}, "n is not a multiple of 8"),
        (FORWARD, {"reads_c0": True, "layouts": {"c0": COLUMN}}, "c0 is not row-major"),
        (FORWARD, {"layouts": {"a": "strided"}}, "a is promised no unit stride"),
        (FORWARD, {"layouts": {"b": column(16)}}, "b is promised stride_multiple=1 "),
        (FORWARD, {"layouts": {"b": column(8, stride_multiple=8)}}, "b is promised an alignment of 8 "),
        (FORWARD, {"layouts": {"c": COLUMN}}, "column-major"),
        (FORWARD, {"epilogue": "bias", "layouts": {"bias": "strided"}}, "bias"),
        (BACKWARD, {"n": 63}, "dc"),
        (BACKWARD, {"k": 60}, "b"),
        (BACKWARD, {"m": 0}, "empty"),
        (BACKWARD, {"wants_da": False, "wants_db": False}, "nothing to multiply"),
        (BACKWARD, {"layouts": {"a": "strided"}}, "no unit stride"),
        (BACKWARD, {"layouts": {"db": "strided"}}, "no unit stride"),
        (BACKWARD, {"layouts": {"dc": LOOSE_ROW}}, "alignment"),
        # Rows that end within 16 bytes: TMA would write beyond them.
        (BACKWARD, {"n": 68, "layouts": {"dc": ROW, "b": ROW, "db": ROW}}, "68"),
    ],
)
def test_the_hopper_entries_say_why_they_are_not_taken(base: tp.Descriptor, change: dict[str, Any], word: str) -> None:
    plan = tp.plan(base.replace(**change), target=H200)
    refused = [c for c in plan.candidates if c.kernel in HOPPER]
    assert [c.kernel for c in refused] == list(HOPPER if base is FORWARD else ("wgmma",))
    assert all(c.cost_us is None and word in c.reason for c in refused), refused


@pytest.mark.parametrize("desc", [TAKEN, BACKWARD], ids=lambda desc: desc.op)
def test_the_hopper_entries_are_excluded_with_tma(desc: tp.Descriptor) -> None:
    required(desc, "wgmma", H200)
    with pytest.raises(tp.Unsupported, match="excluded"):
        tp.plan(desc, target=H200, preference=tp.PlanPreference(kernel="wgmma", exclude=("tma",)))


# --- on the GPU ---

#: Less than a block, a few of them, and more tiles than multiprocessors, none a multiple of anything but 8.
SIZES = ((17, 35, 70), (8, 16, 24), (136, 264, 200), (1544, 2056, 712))


def problems_on_the_gpu(op: str, entry: str, element: str) -> list[tp.Descriptor]:
    if op == "gemm":
        several = [*batches(element, 17, 35, 70), *batches(element, 136, 264, 200)]
        return [*(desc for size in SIZES for desc in grid(element, *size)), *edges(op, element), *several]
    found: list[tp.Descriptor] = [desc for size in SIZES[:-1] for desc in backward_grid(element, *size)]
    if entry != "tiles_invariant" and element not in ("f32", "f64"):
        # The oracle takes long: two entries and elements stand for all.
        found += [*backward_grid(element, *SIZES[-1])][::4]
    return [*found, *edges(op, element)]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "entry"), [(op, entry) for op, entries in ENTRIES.items() for entry in entries])
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_on_the_gpu(op: str, entry: str, element: str) -> None:
    target = tp.Target.current()
    ran = compared(problems_on_the_gpu(op, entry, element), lambda desc: pinned(desc, entry, target))
    applies = entry not in HOPPER or (target.arch is tp.ArchSku.SM90A and element in ("f16", "bf16"))
    assert (ran > 0) == applies


@pytest.mark.gpu
@pytest.mark.parametrize("problems", [grid, backward_grid])
def test_tf32_on_the_gpu(problems: Any) -> None:
    for turn, desc in enumerate(problems("f32", 136, 264, 200)):
        assert check(tp.plan(desc.replace(math="tf32")), turn) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_ring_and_tile_on_the_gpu(element: str) -> None:
    """Each configuration, on a problem that goes through its ring many times and whose tiles stick out of it."""
    target = tp.Target.current()
    desc = tp.GemmDescriptor(m=1544, n=2056, k=1096, element=element, epilogue="bias_silu", layouts={"b": COLUMN})
    g = torch.Generator(device="cuda").manual_seed(0)
    a, w = (torch.randn(s, generator=g, device="cuda").to(desc.element.torch) for s in ((1544, 1096), (2056, 1096)))
    bias = torch.randn(2056, generator=g, device="cuda").to(desc.element.torch)
    made = {f"tiles {x}": tiles.launches(desc, x) for x in tiles_of(desc, target)}
    if target.arch is tp.ArchSku.SM90A:
        for x in RINGS:
            if x.fits(desc, target):
                launches = wgmma.launches(desc, x, target) if x.specialised else wgmma_tiles.launches(desc, x)
                made[f"{x.specialised} {x}"] = launches
    found = {"c": tp.plan(desc, target=target).precision_guarantee("c")}
    for name, launches in made.items():
        plan = plan_with(desc, name, launches, 0, lambda desc: found, target)
        args = tp.GemmArgs(a=a, b=w.t(), c=torch.full((1544, 2056), float("nan")).to(a), bias=bias)
        plan.run(args)
        keeps_its_word(plan, args)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cls", "examples"),
    [(tp.GemmDescriptor, 15), (tp.BatchedGemmDescriptor, 15), (tp.GemmBackwardDescriptor, 25)],
)
def test_any_problem_on_the_gpu(cls: type[tp.Descriptor], examples: int) -> None:
    @settings(max_examples=examples)
    @given(descriptors(cls, 1 << 20, target=tp.Target.current()), st.integers(0, 2**31))
    def holds(desc: tp.Descriptor, seed: int) -> None:
        plan = tp.plan(desc)
        check(plan, seed)
        check_refusals(plan, seed=seed)

    holds()


@pytest.mark.gpu
def test_maps_follow_addresses_and_shapes_on_the_gpu() -> None:
    """Tensor maps are kept by address: other tensors at other addresses, and other shapes at the same one."""
    torch.manual_seed(0)
    memory = torch.randn(4096 * 64, device="cuda").half()
    for rows, columns in ((64, 128), (128, 64), (8, 512), (1, 64), (64, 128)):
        a = memory[: rows * columns].view(rows, columns)
        b = torch.randn(columns, 72, device="cuda").half()
        desc = tp.GemmDescriptor(m=rows, n=72, k=columns, element="f16")
        hopper = tp.Target.current().arch is tp.ArchSku.SM90A
        plan = tp.plan(desc, preference=tp.PlanPreference(kernel="wgmma" if hopper else None))
        for _ in range(3):
            args = tp.GemmArgs(a=a, b=b, c=torch.empty(rows, 72, device="cuda").half())
            plan.run(args)
            keeps_its_word(plan, args)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_no_less_accurate_than_torch_on_the_gpu(element: str, scaled: bool) -> None:
    """Root mean square of the error, relative to Σ|terms|: of every entry that takes the problem, beside cuBLAS's."""
    dtype = tp.ElementKind.of(element).torch
    g = torch.Generator(device="cuda").manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=g, device="cuda", dtype=torch.float64)
        # Badly scaled: lines along k, so that what is added differs by up to 2**24.
        spread = torch.randint(-10, 3, (1024,), generator=g, device="cuda", dtype=torch.float64)
        lines = spread.reshape([1024 if n == 1024 else 1 for n in shape]) if scaled else 0.0
        return (drawn * 2.0**lines).to(dtype)

    a, b = values(512, 1024), values(1024, 768)
    want, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def error(c: torch.Tensor) -> float:
        return float(((c.double() - want) / terms).square().mean().sqrt())

    theirs = error(torch.mm(a, b))
    desc = tp.GemmDescriptor(m=512, n=768, k=1024, element=element)
    tried = 0
    for entry in ENTRIES["gemm"]:
        plan = pinned(desc, entry, tp.Target.current())
        if plan is not None:
            c = torch.full((512, 768), float("nan"), device="cuda", dtype=dtype)
            plan.run(tp.GemmArgs(a=a, b=b, c=c), tp.Workspace.allocate(plan, torch.device("cuda")))
            assert error(c) <= 1.005 * theirs, f"{entry}: {error(c)}, torch {theirs}"
            tried += 1
    assert tried >= 2


@pytest.mark.parametrize("kernel", ["tiles", "tiles_invariant", "split_k"])
def test_an_empty_batch_is_planned(kernel: str) -> None:
    desc = tp.BatchedGemmDescriptor(batch=0, m=129, n=7, k=127, element="bf16")
    plan = tp.plan(desc, preference=tp.PlanPreference(kernel=kernel), target=tp.Target.preset("a100"))
    assert plan.launches == ()
