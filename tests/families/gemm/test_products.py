"""Matrix products: the reference, every row in the interpreter, compiled, and on the GPU."""

from __future__ import annotations

import os
import re

import pytest
import torch
from cases.gemm import COLUMN, EDGES, ELEMENTS, ROW, batched_grid, check, grid, magnitude, pinned
from hypothesis import given, settings
from hypothesis import strategies as st

import triplan as tp
from triplan.backends.runtime.compile import sass
from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.gemm import tiles, wgmma, wgmma_tiles
from triplan.backends.triton.gemm.rings import RINGS, Ring
from triplan.backends.triton.gemm.tile_shapes import tiles_of
from triplan.testing import check_refusals, descriptors, oracle

CPU, INTERPRETER = tp.Target.cpu(), tp.Target.cpu(interpret=True)
TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
INTERPRETED = ("tiles", "tiles_invariant")
HOPPER = ("wgmma", "wgmma_tiles")
ROWS = (*INTERPRETED, "split_k", *HOPPER)
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")


def of_edges(element: str) -> list[tp.GemmDescriptor]:
    found = []
    for m, n, k in EDGES:
        for epilogue, reads_c0 in (("bias", True), ("identity", False)):
            found.append(tp.GemmDescriptor(m=m, n=n, k=k, element=element, epilogue=epilogue, reads_c0=reads_c0))
    return found


def batches(element: str, m: int, n: int, k: int) -> list[tp.BatchedGemmDescriptor]:
    found = list(batched_grid(element, 3, m, n, k))
    return [*found, *(found[1].replace(layouts={}, **{x: 0}) for x in ("batch", "m", "n", "k"))]


# --- what is asked ---


def test_defaults_spelled_out_are_no_other_problem() -> None:
    bare = tp.GemmDescriptor(m=2, n=3, k=4, element="bf16")
    spelled = {"out_element": torch.bfloat16, "math": "bf16", "accumulator": "f32"}
    assert bare.replace(**spelled) == bare
    assert bare.replace(out_element="f32") != bare
    assert tp.parse_descriptor(bare.replace(out_element="f32").to_json()) == bare.replace(out_element="f32")
    f32 = bare.replace(element="f32")
    assert f32.replace(math="tf32").multiplicands == tp.MathPrecision.TF32 != f32.multiplicands


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"math": "tf32"}, ("math", "tf32", "bf16")),
        ({"math": "fp8"}, ("math", "fp8")),
        ({"out_element": "f16"}, ("out_element", "f16", "bf16 or f32")),
        ({"accumulator": "bf16"}, ("accumulator", "f32")),
        ({"epilogue": "bias_tanh"}, ("epilogue", "bias_tanh")),
        ({"m": -1}, ("m", "-1")),
        ({"layouts": {"bias": "strided"}}, ("bias",)),
    ],
)
def test_bad_fields(change: dict[str, object], names: tuple[str, ...]) -> None:
    with pytest.raises(tp.InvalidProblem) as info:
        tp.GemmDescriptor(m=2, n=3, k=4, element="bf16").replace(**change)
    assert all(n in str(info.value) for n in names), str(info.value)


def test_from_args_promises_transposes_as_they_lie() -> None:
    a, w = torch.randn(6, 16).half(), torch.randn(24, 16).half()
    args = tp.GemmArgs(a=a, b=w.t(), c=torch.empty(6, 24).half(), bias=torch.randn(24).half())
    desc = tp.GemmDescriptor.from_args(args, epilogue="bias")
    assert (desc.m, desc.n, desc.k) == (6, 24, 16)
    assert desc.operand("b").layout == COLUMN
    assert tp.plan(desc, target=CPU).can_implement(args)
    assert tp.plan(desc, target=TARGETS["sm90a"]).sku().layout == "nt"
    odd = tp.GemmDescriptor.from_args(tp.GemmArgs(a=a[:, 1:], b=w.t()[1:], c=args.c))
    assert odd.operand("a").layout.stride_multiple == 8
    assert odd.operand("a").layout.alignment == 2


# --- the reference ---


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_cpu_backend_keeps_its_guarantee(element: str) -> None:
    for turn, desc in enumerate([*grid(element, 17, 35, 70), *of_edges(element), *batches(element, 9, 7, 20)]):
        plan = tp.plan(desc, target=CPU)
        check(plan, turn)
        assert check_refusals(plan, seed=turn) > 0


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
@pytest.mark.parametrize("row", INTERPRETED)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_epilogue_interpreted(row: str, element: str) -> None:
    held = 0
    for turn, desc in enumerate([*grid(element, 17, 35, 70), *of_edges(element), *batches(element, 17, 35, 40)]):
        plan = pinned(desc, row, INTERPRETER)
        assert plan is not None
        held += check(plan, turn)
    assert held > 0


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_beta_zero_never_reads_c0_interpreted() -> None:
    never_reads_c0(INTERPRETER, "cpu")


def never_reads_c0(target: tp.Target, device: str) -> None:
    a, b = torch.ones(5, 4, device=device), torch.ones(4, 3, device=device)
    c0, c = torch.full((5, 3), float("nan"), device=device), torch.empty(5, 3, device=device)
    desc = tp.GemmDescriptor(m=5, n=3, k=4, element="f32", reads_c0=True)
    tp.plan(desc, target=target).run(tp.GemmArgs(a=a, b=b, c=c, c0=c0, alpha=0.5, beta=0.0))
    assert torch.equal(c.cpu(), torch.full((5, 3), 2.0))
    tp.plan(desc, target=target).run(tp.GemmArgs(a=a, b=b, c=c, c0=c0, beta=1.0))
    assert bool(c.isnan().all())


def test_beta_zero_never_reads_c0() -> None:
    never_reads_c0(CPU, "cpu")


# --- compiled ---


@compiles
def test_the_machine_code_has_tensor_core_instructions() -> None:
    desc = tp.GemmDescriptor(m=4096, n=4096, k=4096, element="bf16", epilogue="bias", layouts={"b": COLUMN})
    for arch, row, instruction in (
        ("sm80", "tiles", "HMMA.16816"),
        ("sm90a", "tiles", "HGMMA.64x"),
        # One instruction is as wide as a tile: narrower ones would read A more often.
        ("sm90a", "wgmma", "HGMMA.64x{BLOCK_N}x16"),
        ("sm90a", "wgmma_tiles", "HGMMA.64x{BLOCK_N}x16"),
    ):
        plan = pinned(desc, row, TARGETS[arch])
        assert plan is not None
        (found,), (launch,) = plan.compile(), plan.launches
        code = sass(found.cubin)
        assert instruction.format(**launch.constexprs) in code
        assert not re.search(r"\b(STL|LDL)\b", code)


def of_ring(desc: tp.GemmDescriptor, ring: Ring, target: tp.Target) -> list[Launch]:
    return wgmma.launches(desc, ring, target) if ring.specialised else wgmma_tiles.launches(desc, ring)


@compiles
@pytest.mark.parametrize("row", ROWS)
def test_a_thousand_shapes_compile_a_handful_of_kernels(row: str) -> None:
    sources = set()
    for size in range(8, 8008, 8):
        plan = pinned(tp.GemmDescriptor(m=size // 8, n=4096, k=size, element="f16"), row, TARGETS["sm90a"])
        assert plan is not None
        sources.update(launch.source() for launch in plan.launches)
    assert 1 <= len(sources) <= 40


def test_the_hopper_row_says_why_it_is_not_taken() -> None:
    base = tp.GemmDescriptor(m=64, n=64, k=64, element="f16")
    for change, word in (
        ({"k": 63}, "a is not promised"),
        ({"n": 63}, "b is not promised"),
        ({"k": 0}, "k is 0"),
        ({"n": 60, "layouts": {"b": COLUMN, "c": ROW}}, "n is not a multiple of 8"),
        ({"reads_c0": True}, "c0"),
        ({"layouts": {"a": "strided"}}, "a is promised no unit stride"),
        ({"layouts": {"b": tp.Layout.strided(unit_axis=0, alignment=16)}}, "b is not promised"),
        ({"layouts": {"b": tp.Layout.strided(unit_axis=0, alignment=8, stride_multiple=8)}}, "b is not promised"),
        ({"layouts": {"c": COLUMN}}, "column-major"),
        ({"epilogue": "bias", "layouts": {"bias": "strided"}}, "bias"),
    ):
        plan = tp.plan(base.replace(**change), target=TARGETS["sm90a"])
        refused = [c for c in plan.candidates if c.kernel in HOPPER]
        assert len(refused) == 2
        assert all(c.cost_us is None and word in c.reason for c in refused)
    taken = base.replace(layouts={"a": COLUMN, "b": ROW, "c": ROW})
    assert pinned(taken, "wgmma", TARGETS["sm90a"]) is not None
    with pytest.raises(tp.Unsupported, match="excluded"):
        tp.plan(taken, target=TARGETS["sm90a"], preference=tp.PlanPreference(kernel="wgmma", exclude=("tma",)))


# --- on the GPU ---

#: Less than a block, a few of them, and more tiles than multiprocessors, none a multiple of anything but 8.
SIZES = ((8, 16, 24), (136, 264, 200), (1544, 2056, 712))


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_layout_and_epilogue_on_the_gpu(row: str, element: str) -> None:
    target, ran = tp.Target.current(), 0
    for m, n, k in ((17, 35, 70), *SIZES):
        for turn, desc in enumerate(grid(element, m, n, k)):
            plan = pinned(desc, row, target)
            if plan is not None:
                ran += check(plan, turn)
    edges = of_edges(element)
    for turn, desc in enumerate([*edges, *batches(element, 17, 35, 70), *batches(element, 136, 264, 200)]):
        plan = pinned(desc, row, target)
        if plan is not None:
            ran += check(plan, turn)
    applies = row not in HOPPER or (target.arch is tp.ArchSku.SM90A and element in ("f16", "bf16"))
    assert (ran > 0) == applies


def keeps_its_word(plan: tp.Plan, args: tp.GemmArgs) -> None:  # type: ignore[type-arg]
    """The result that ``args`` hold, against float64 on the same device at the plan's own tolerance."""
    inputs = {name: None if (x := getattr(args, name)) is None else x.double() for name in ("a", "b", "bias")}
    reference = tp.TABLE.reference("gemm").compute
    assert reference is not None
    want = reference(plan.descriptor, inputs)["c"]
    terms = magnitude(plan.descriptor, {name: None if x is None else x.abs() for name, x in inputs.items()})["c"]
    t = plan.precision_guarantee("c").tolerance
    wrong = ~((args.c.double() - want).abs() <= t.rtol * want.abs() + t.ctol * terms + t.underflow)
    assert not bool(wrong.any()), f"{int(wrong.sum())} elements are wrong: {plan!r}, {plan.descriptor!r}"


@pytest.mark.gpu
def test_tf32_on_the_gpu() -> None:
    for turn, desc in enumerate(grid("f32", 136, 264, 200)):
        plan = tp.plan(desc.replace(math="tf32"))
        assert check(plan, turn) > 0


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
                made[f"{x.specialised} {x}"] = of_ring(desc, x, target)
    for name, launches in made.items():
        # A row of its own, so that the plan's own machinery runs it.
        tp.kernel(
            op="gemm",
            name=name,
            elements=("f16", "bf16"),
            guarantee=lambda desc: {"c": tp.plan(desc, target=target).precision_guarantee("c")},
            rank=lambda desc, target: 1e9,
        )(lambda desc, target, launches=launches: launches)
        try:
            plan = pinned(desc, name, target)
            assert plan is not None
            c = torch.full((1544, 2056), float("nan"), device="cuda", dtype=desc.element.torch)
            plan.run(tp.GemmArgs(a=a, b=w.t(), c=c, bias=bias))
            keeps_its_word(plan, tp.GemmArgs(a=a, b=w.t(), c=c, bias=bias))
        finally:
            tp.TABLE.unregister("gemm", name)


@pytest.mark.gpu
def test_beta_zero_never_reads_c0_on_the_gpu() -> None:
    never_reads_c0(tp.Target.current(), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [tp.GemmDescriptor, tp.BatchedGemmDescriptor])
def test_any_problem_on_the_gpu(cls: type[tp.Descriptor]) -> None:
    @settings(max_examples=15)
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
            c = torch.empty(rows, 72, device="cuda").half()
            plan.run(tp.GemmArgs(a=a, b=b, c=c))
            keeps_its_word(plan, tp.GemmArgs(a=a, b=b, c=c))


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_no_less_accurate_than_torch_on_the_gpu(element: str, scaled: bool) -> None:
    """Root mean square of the error, relative to Σ|terms|: of every row that takes the problem, beside cuBLAS's."""
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
    for row in ROWS:
        plan = pinned(desc, row, tp.Target.current())
        if plan is not None:
            c = torch.full((512, 768), float("nan"), device="cuda", dtype=dtype)
            plan.run(tp.GemmArgs(a=a, b=b, c=c), tp.Workspace.allocate(plan, torch.device("cuda")))
            assert error(c) <= 1.005 * theirs, f"{row}: {error(c)}, torch {theirs}"
            tried += 1
    assert tried >= 2
