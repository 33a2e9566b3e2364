"""Fixed-point sums against exact arithmetic: ``fractions``, rounded once.

Bit for bit independence of order and of batch is proved in ``test_guarantees``, every layout and policy in
``test_interpret`` and ``test_ops``: both walk the kernel table. Here is what is special to fixed point.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton.language as tl
from cases import H200, WHERE, required
from matrix import FLOAT_ATOMIC
from proofs import target
from samples import ACCUMULATING, SAMPLES, SetConstant

import triplan as tp
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.triton.indexing import fixed_point, stripes, stripes_kernels
from triplan.backends.triton.indexing.geometry import geometry
from triplan.testing import check_plan
from triplan.testing.oracle import judge

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
ROWS = [("fixed_f16", "f16"), ("fixed_scaled", "f16"), ("fixed_scaled", "bf16"), ("fixed_scaled", "f32")]
MAKE = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def each(test: Any) -> Any:
    """``test`` of every entry and element, in the interpreter and on the GPU."""
    rows = pytest.mark.parametrize(("kernel", "element"), ROWS)
    return pytest.mark.parametrize("where", WHERE)(rows(test))


def run(plan: tp.Plan[Any, Any], **operands: Any) -> None:
    """Run on copies where the plan runs, with rubbish in the workspace; outputs are copied back."""
    device = plan.target.device_type
    moved = {k: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in operands.items()}
    workspace = tp.Workspace.allocate(plan)
    workspace.tensor.fill_(0x5A)
    plan.run(plan.args_type(**moved), workspace)
    for o in plan.descriptor.operands():
        if o.is_written:
            operands[o.name].copy_(moved[o.name].cpu())


def scatter_add(shape: tuple[int, ...], table: int, element: str = "f16", **options: Any) -> tp.ScatterAddDescriptor:
    """Along the last axis but one, or the only one."""
    dim = max(len(shape) - 2, 0)
    return tp.ScatterAddDescriptor(src_shape=shape, scatter_dim=dim, out_dim_size=table, element=element, **options)


def index_add(
    where: str, kernel: str, out: torch.Tensor, index: torch.Tensor, src: torch.Tensor, alpha: float | None = None
) -> torch.Tensor:
    """out.index_add(0, index, src), by ``kernel``."""
    shape, rows, dtype = tuple(src.shape), out.shape[0], index.dtype
    desc = tp.IndexAddDescriptor(src_shape=shape, add_dim=0, out_dim_size=rows, element=src.dtype, index_element=dtype)
    got = out.clone()
    run(required(desc, kernel, target(where)), out=got, index=index, src=src, alpha=alpha)
    return got


def columns(where: str, kernel: str, cases: list[list[float]], element: str, old: list[float]) -> torch.Tensor:
    """One destination a case: the sums of ``cases`` onto ``old``, all in one run."""
    longest = max(len(c) for c in cases)
    src = torch.tensor([[*c, *[0.0] * (longest - len(c))] for c in cases], dtype=torch.float64).t().to(MAKE[element])
    out = torch.tensor([old], dtype=torch.float64).to(MAKE[element])
    return index_add(where, kernel, out, torch.zeros(longest, dtype=torch.int64), src.contiguous())[0]


def rounded(exact: Fraction, element: str) -> float:
    """``exact`` to the nearest of ``element``, ties to even, from the definition of IEEE 754."""
    info = torch.finfo(MAKE[element])
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact)))
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    quantum = Fraction(2) ** max(exponent, math.frexp(info.tiny)[1] - 1) * Fraction(info.eps)
    value = round(exact / quantum) * quantum  # Python rounds fractions half to even
    return math.copysign(math.inf, value) if abs(value) > Fraction(info.max) else float(value)


def any_bits(element: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Every exponent alike; subnormals, infinities and NaNs of every payload among them."""
    size = MAKE[element].itemsize
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(MAKE[element]).reshape(shape)


def any_finite(element: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    raw = any_bits(element, shape, generator)
    return torch.where(raw.isfinite(), raw, 0.0)


def as_ints(t: torch.Tensor) -> torch.Tensor:
    return t.view(tp.ElementKind.of(t.dtype).bits.torch)


def exact_sums(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> list[list[Fraction]]:
    """Of ``src`` (n, width) at ``index`` (n, width) added to ``out``."""
    sums = [[Fraction(x) for x in row] for row in out.tolist()]
    for rows, values in zip(index.tolist(), src.tolist(), strict=True):
        for column, (row, value) in enumerate(zip(rows, values, strict=True)):
            sums[row][column] += Fraction(value)
    return sums


@pytest.mark.parametrize("width", [64, 45, 5])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("where", WHERE)
def test_f16_sums_are_exact_and_rounded_once(where: str, keep: bool, width: int, constant: SetConstant) -> None:
    """In stripes, whatever is left of them, and (width 5) by the traversal of single elements."""
    constant(stripes, "L2_SHARE", 1)
    n, table = 40, 3
    g = torch.Generator().manual_seed(width)
    desc = tp.GatherBackwardDescriptor(
        out_shape=(n, width), gather_dim=0, src_dim_size=table, element="f16", accumulate=keep
    )
    plan = required(desc, "fixed_f16", target(where))
    assert len(plan.launches) == (4 if width >= 16 else 3)
    # Half of them small, that sums stay in range; the last row of the table gets none.
    dout = any_finite("f16", (n, width), g) * torch.where(torch.rand(n, width, generator=g) < 0.7, 2.0**-6, 0.5).half()
    index = torch.randint(0, table - 1, (n, width), generator=g)
    start = any_finite("f16", (table, width), g)
    got = start.clone()
    run(plan, dsrc=got, index=index, dout=dout)
    want = exact_sums(start if keep else torch.zeros_like(start), index, dout)
    assert got.tolist() == [[rounded(x, "f16") for x in row] for row in want]


@pytest.mark.parametrize("element", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("where", WHERE)
def test_terms_near_the_largest_are_exact_whatever_their_neighbours(where: str, element: str) -> None:
    """Each destination has a scale of its own; within a factor of 2**16 nothing is lost but the last rounding."""
    info, g = torch.finfo(MAKE[element]), torch.Generator().manual_seed(1)
    low, high = math.frexp(info.smallest_normal * info.eps)[1], math.frexp(info.max)[1]
    scales = torch.randint(low, high - 22, (60,), generator=g).double()
    terms = torch.randn(30, 60, generator=g, dtype=torch.float64)
    terms *= 2.0 ** torch.randint(0, 10, (30, 60), generator=g)
    terms = (terms * 2.0 ** (scales / 2).floor() * 2.0 ** (scales / 2).ceil()).to(MAKE[element])
    smallest = torch.where(terms == 0, math.inf, terms.abs().double()).min(0).values
    near = terms.abs().double().max(0).values / smallest < 2.0**15
    assert near.sum() > 20
    out, index = torch.zeros(1, 60, dtype=MAKE[element]), torch.zeros(30, dtype=torch.int32)
    got = index_add(where, "fixed_scaled", out, index, terms)
    for c in near.nonzero().flatten().tolist():
        want = sum((Fraction(float(x)) for x in terms[:, c]), Fraction(0))
        # bf16 is rounded to f32 first: its guarantee says so.
        once = rounded(Fraction(rounded(want, "f32")), element) if element == "bf16" else rounded(want, element)
        assert float(got[0, c]) == once, c


@pytest.mark.parametrize("room", [23, 31])
@each
def test_the_tolerance_holds_against_exact_sums(
    where: str, kernel: str, element: str, room: int, constant: SetConstant
) -> None:
    """Exponents over the element's whole range, in both classes of headroom, by the guarantee's own tolerance."""
    if room == 31:
        constant(fixed_point, "HEADROOM", (0, 31))  # what 2**23 contributions would get
        if kernel == "fixed_f16":
            pytest.skip("refuses that many")
    n, width, table = 24, 64, 2
    g = torch.Generator().manual_seed(2)
    plan = required(scatter_add((n, width), table, element), kernel, target(where))
    # Scaled down by 2**-6: no sum of 24 leaves the range. Half of the terms cancel against others.
    src = any_finite(element, (n, width), g) * 2.0**-6
    src[n // 2 :: 2] = -src[: n // 2 : 2]
    index = torch.randint(0, table, (n, width), generator=g)
    start = any_finite(element, (table, width), g) * 2.0**-6
    got = start.clone()
    run(plan, out=got, index=index, src=src)
    t = plan.precision_guarantee().tolerance
    rtol, ctol, underflow = (Fraction(x) for x in (t.rtol, t.ctol, t.underflow))
    wanted, sizes = exact_sums(start, index, src), exact_sums(start.abs(), index, src.abs())
    for row, want_row, size_row in zip(got.tolist(), wanted, sizes, strict=True):
        for value, want, size in zip(row, want_row, size_row, strict=True):
            assert abs(Fraction(value) - want) <= rtol * abs(want) + ctol * size + underflow / 2
    assert (got != start).sum() > width


@each
def test_one_contribution_comes_out_as_it_went_in(where: str, kernel: str, element: str) -> None:
    """Every bit pattern of the 16-bit floats, 2**16 of f32: no shift, no subnormal and no flag goes astray."""
    if element == "f32":
        src = any_bits("f32", (2**16,), torch.Generator().manual_seed(3))
        src[:4096] = src[:4096].view(torch.int32).bitwise_and(-(2**31) | 0x7FFFFF).view(torch.float32)  # subnormals
    else:
        src = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(MAKE[element])
    fields: dict[str, Any] = {"gather_dim": 0, "src_dim_size": 1, "element": element, "accumulate": False}
    desc = tp.GatherBackwardDescriptor(out_shape=(1, 2**16), **fields)
    got = torch.zeros(1, 2**16, dtype=src.dtype)
    run(required(desc, kernel, target(where)), dsrc=got, index=torch.zeros(1, 2**16, dtype=torch.int64), dout=src[None])
    assert torch.equal(got[0].isnan(), src.isnan())
    assert torch.equal(got[0][~src.isnan()], src[~src.isnan()])


@each
def test_infinities_nan_and_overflow(where: str, kernel: str, element: str) -> None:
    info = torch.finfo(MAKE[element])
    inf, nan, top, least = math.inf, math.nan, info.max, info.smallest_normal * info.eps
    cases: list[tuple[list[float], float, float]] = [
        # contributions, the former value, the sum
        ([inf, 1], 0, inf),
        ([-inf, 1], 0, -inf),
        ([inf, -inf], 0, nan),
        ([inf, inf, -1], -2, inf),
        ([nan, 1], 0, nan),
        ([nan, inf], 0, nan),
        ([-inf, nan], 0, nan),
        ([1, 2], inf, inf),
        ([1, 2], nan, nan),
        ([-inf], inf, nan),
        ([-inf], -inf, -inf),
        ([top, top], 0, inf),
        ([-top] * 9, 0, -inf),
        ([top], top, inf),
        ([top, top, -top], 0, top),  # partial sums beyond the range do no harm
        ([top, top], -top, top),
        ([top] * 7 + [-top] * 8, 0, -top),
        ([top, -top / 2, top], -top / 2, top),
        ([least] * 3, 0, 3 * least),
        ([least, -least], least, least),
        ([0.0, -0.0], 5, 5),
        ([top, least, -top], 0, least if element == "f16" else 0),
    ]  # fmt: skip
    got = columns(where, kernel, [c for c, _, _ in cases], element, [o for _, o, _ in cases])
    for value, (terms, old, want) in zip(got.tolist(), cases, strict=True):
        assert value == want or (math.isnan(value) and math.isnan(want)), (terms, old, want, value)


@pytest.mark.parametrize("kernel", ["fixed_f16", "fixed_scaled"])
@pytest.mark.parametrize("where", WHERE)
def test_f16_is_not_rounded_by_way_of_f32(where: str, kernel: str) -> None:
    """1 + 2**-11 + 2**-24 would be a tie in f32, and then again in f16."""
    terms, want = [1.0, 2.0**-11, 2.0**-24], 1 + 2.0**-10
    cases = [terms, terms[1:], [-x for x in terms]]
    assert columns(where, kernel, cases, "f16", [0, 1, 0]).tolist() == [want, want, -want]


@pytest.mark.parametrize("room", [23, 31])
@pytest.mark.parametrize("where", WHERE)
def test_terms_are_rounded_to_the_nearest_unit(where: str, room: int, constant: SetConstant) -> None:
    """Beside a largest term of 1 the unit is 2**-39, or 2**-31: what the module's error bound is derived from."""
    if room == 31:
        constant(fixed_point, "HEADROOM", (0, 31))
    unit = 2.0 ** -(63 - room - 1)
    cases = [[1, x * unit, -1] for x in (0.75, -0.75, 0.25, -0.25, 0.5, 1.0, 3.25)]
    got = columns(where, "fixed_scaled", cases, "f32", [0] * len(cases))
    assert (got.double() / unit).tolist() == [1, -1, 0, 0, 1, 1, 3]


@pytest.mark.parametrize("alpha", [2.0, -0.5, 0.0, math.inf, -math.inf, math.nan, 1e-30, 3e38])
@each
def test_alpha_meets_every_contribution(where: str, kernel: str, element: str, alpha: float) -> None:
    """The exact value where all are finite, and otherwise the infinities and NaNs that torch gives."""
    info, alpha = torch.finfo(MAKE[element]), float(torch.tensor(alpha))
    values = [0.0, 1.0, -1.0, 3.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.smallest_normal]
    pairs = [(a, b) for a in values for b in values]
    src = torch.tensor(pairs).t().contiguous().to(MAKE[element])
    out = torch.ones(1, len(pairs), dtype=MAKE[element])
    index = torch.zeros(2, dtype=torch.int64)
    got = index_add(where, kernel, out, index, src, alpha)[0].tolist()
    torchs = out.double().index_add(0, index, src.double(), alpha=alpha)[0].tolist()
    for pair, value, special in zip(pairs, got, torchs, strict=True):
        if not all(map(math.isfinite, (*pair, alpha))):
            assert value == special or (math.isnan(value) and math.isnan(special)), (pair, value, special)
            continue
        exact = 1 + Fraction(alpha) * (Fraction(pair[0]) + Fraction(pair[1]))
        once = rounded(exact, element)
        near = math.isfinite(value) and abs(Fraction(value) - exact) <= Fraction(info.eps) * abs(exact)
        assert value == once or near, (pair, value, once)


@each
def test_untouched_elements_keep_their_bits(where: str, kernel: str, element: str) -> None:
    """NaNs of every payload, signalling ones too, and zeros of either sign."""
    out = any_bits(element, (3, 64), torch.Generator().manual_seed(4))
    as_ints(out)[:, ::3] |= as_ints(torch.tensor([math.inf]).to(out))
    out[:, ::7] = -0.0
    index = torch.tensor([1, 1, -1, 7])  # the others are out of bounds
    got = index_add(where, kernel, out, index, torch.ones(4, 64).to(out))
    assert torch.equal(as_ints(got)[[0, 2]], as_ints(out)[[0, 2]])
    finite = out[1].isfinite()
    assert not torch.equal(got[1][finite], out[1][finite])


@each
def test_no_order_shows_even_among_infinities(where: str, kernel: str, element: str) -> None:
    g = torch.Generator().manual_seed(5)
    src, index = any_bits(element, (50, 70), g), torch.randint(0, 4, (50,), generator=g)
    out, order = any_finite(element, (5, 70), g), torch.randperm(50, generator=g)
    first, again = (index_add(where, kernel, out, index[at], src[at]) for at in (torch.arange(50), order))
    assert torch.equal(as_ints(first), as_ints(again))


@pytest.mark.parametrize("shape", [(20, 83), (3, 9, 70), (40, 16), (3, 150)])
@each
def test_the_width_of_stripes_shows_in_no_bit(
    where: str, kernel: str, element: str, shape: tuple[int, ...], constant: SetConstant
) -> None:
    """Any bits at all, infinities and NaN among them: in one go, in stripes of each width, of that which was found."""
    g = torch.Generator().manual_seed(6)
    src = any_bits(element, shape, g)
    index = torch.randint(-6, 6, shape, generator=g)  # bad ones too
    start = torch.randn((*shape[:-2], 5, shape[-1]), generator=g).to(src)
    desc = scatter_add(shape, 5, element, out_of_bounds="error", wrap_negative=True)
    found = []

    def once(launches: int) -> None:
        plan = required(desc, kernel, target(where))
        assert len(plan.launches) == launches
        out, status = start.clone(), torch.zeros(1, dtype=torch.int64)
        run(plan, out=out, index=index, src=src, status=status)
        found.append((as_ints(out), int(status)))

    few = 4 if kernel == "fixed_f16" else 5
    once(few)
    constant(stripes, "L2_SHARE", 1)
    once(few + (shape[-1] > 16))
    for fixed in (16, 32, 64):
        widths = stripes.Stripes(fixed, fixed)
        constant(fixed_point, "stripes", lambda g, itemsize, found=widths: found)
        once(few)
    # The same binary, made to find either width by what it asks of the sample.
    constant(fixed_point, "stripes", lambda g, itemsize: stripes.Stripes(16, 64))
    for enough in (0, stripes.SAMPLES + 1):
        constant(stripes, "ENOUGH", enough)
        once(few + 1)
    bad = ((index < -5) | (index >= 5)).flatten().nonzero()
    assert all(status == int(bad[0]) for _, status in found)
    for out, _ in found[1:]:
        assert torch.equal(out, found[0][0])


@pytest.mark.parametrize("shape", [(4, 96), (2, 300, 96), (900, 33)])
@pytest.mark.parametrize("where", WHERE)
def test_stripes_are_as_wide_as_the_indices_suggest(where: str, shape: tuple[int, ...], constant: SetConstant) -> None:
    """(The interpreter, which is slow, runs the sample alone.)"""
    constant(stripes, "L2_SHARE", 1)
    desc = scatter_add(shape, 100)
    plan, device = required(desc, "fixed_f16", target(where)), target(where).device_type
    g = torch.Generator().manual_seed(7)
    one_a_row = torch.randint(0, 100, (*shape[:-1], 1), generator=g).expand(shape).contiguous()
    scattered = torch.randint(0, 100, shape, generator=g)
    runs = torch.arange(math.prod(shape)).reshape(shape) // 8 % 100
    half = {"dtype": torch.float16, "device": device}
    out, src = torch.zeros((*shape[:-2], 100, shape[-1]), **half), torch.ones(shape, **half)
    for index, width in ((one_a_row, 64), (scattered, 16), (runs, 16)):
        workspace = tp.Workspace.allocate(plan)
        args = plan.args_type(out=out, index=index.to(device), src=src)
        if where == "gpu":
            plan.run(args, workspace)
        else:
            interpret([x for x in plan.launches if x.kernel is stripes_kernels.sample_kernel], args, workspace.tensor)
        word = workspace.tensor.view(torch.uint8)[fixed_point.scratchpad(desc, exact=True).stripe.offset :][:4]
        assert 2 ** int(word.view(torch.int32)) == width


@each
def test_an_index_of_stride_zero(where: str, kernel: str, element: str) -> None:
    """All contributions meet in one place, with hostile indices; and every operand strided."""
    desc = scatter_add((6, 5), 4, element)
    index = tp.Layout.strided(zero_axes=(0,))
    for layouts in ({"index": index}, {"index": index, "src": "strided", "out": "strided"}):
        assert check_plan(required(desc.replace(layouts=layouts), kernel, target(where)), runs=2).exact > 0


# --- what is known when planning ---


def test_sums_have_room_for_their_terms() -> None:
    """Fewer than 2**bits terms and, of whatever exponent, the largest mantissa: below 2**63."""
    for bits in fixed_point.HEADROOM:
        assert ((2**24 - 1) << (63 - bits - 24)) * (2**bits - 1) < 2**63
    assert 65504 * 2**24 * (2 ** fixed_point.HEADROOM[0] - 1) < 2**63


def test_counts_that_could_overflow_are_refused() -> None:
    assert required(scatter_add((2**23 - 1,), 8), "fixed_f16", H200)
    with pytest.raises(tp.Unsupported) as e:
        required(scatter_add((2**23,), 8), "fixed_f16", H200)
    assert any("8388608 contributions" in c.reason and "2**23" in c.reason for c in e.value.candidates)
    classes = [required(scatter_add((n,), 8), "fixed_scaled", H200).sku().numerics_id for n in (2**23 - 1, 2**23)]
    assert classes[0] != classes[1]  # bits may differ between the classes of headroom
    assert required(scatter_add((2**31 - 1,), 8, "f32"), "fixed_scaled", H200)
    for count, element in ((2**31, "f32"), (5, "f64")):
        with pytest.raises(tp.Unsupported):
            required(scatter_add((count,), 8, element), "fixed_scaled", H200)


@pytest.mark.parametrize(("kernel", "element"), ROWS)
def test_the_workspace_is_the_table(kernel: str, element: str) -> None:
    desc = scatter_add((262144, 1024), 131072, element, index_element="i64")
    plan = required(desc, kernel, H200)
    slot = 9 if kernel == "fixed_f16" else 12  # a sum with a byte of flags, or with a word of flags and exponent
    assert plan.workspace_size() == 131072 * 1024 * slot + 16  # and the chosen stripe
    assert len(plan.launches) == (4 if kernel == "fixed_f16" else 5)
    assert f"{plan.workspace_size()} bytes" in plan.explain()
    limited = tp.PlanPreference(kernel=kernel, max_workspace_bytes=plan.workspace_size() - 1)
    with pytest.raises(tp.Unsupported, match="no kernel"):
        tp.plan(desc, preference=limited, target=H200)


@pytest.mark.parametrize(("rows_", "inner", "widths"), [
    (131072, 1024, (16, 64)),
    (65536, 1024, (32, 64)),
    (32768, 1024, (64, 64)),
    (10**7, 32, (16, 32)),
    (10**7, 16, (16, 16)),
    (2048, 1024, None),  # 16 MiB
    (10**7, 15, None),
])  # fmt: skip
def test_stripes_fit_in_the_cache_or_are_as_narrow_as_pays(
    rows_: int, inner: int, widths: tuple[int, int] | None
) -> None:
    assert stripes.stripes(geometry(scatter_add((999, inner), rows_)), 8) == (widths and stripes.Stripes(*widths))


@pytest.mark.parametrize("op", ACCUMULATING)
@pytest.mark.parametrize("arch", ["a100", "h200"])
def test_stripes_compile_without_spills_or_float_atomics(op: str, arch: str, constant: SetConstant) -> None:
    """Entries and elements in turns: the binaries of the ops differ in how indices are read."""
    constant(stripes, "L2_SHARE", 1)
    desc = SAMPLES[op].replace(accumulate=True) if op == "index_put" else SAMPLES[op]
    wide = {"out_shape", "src_shape"} & set(type(desc).model_fields)
    shape = {n: (*getattr(desc, n)[:-1], 96) for n in wide} or {"embedding_dim": 96}
    for kernel, element in ROWS[ACCUMULATING.index(op) % 2 :: 2]:
        for record in required(desc.replace(element=element, **shape), kernel, tp.Target.preset(arch)).compile():
            assert record.spill_bytes == 0
            assert not FLOAT_ATOMIC.search(record.ptx)


@pytest.mark.parametrize(("shape", "table"), [
    ((2**21, 1024), 131072),  # offsets pass 2**31
    ((9, 999, 1024), 131072),
    ((999, 1024), 16384),  # one width
])  # fmt: skip
@pytest.mark.parametrize("kernel", ["fixed_f16", "fixed_scaled"])
def test_stripes_of_large_tables_compile(kernel: str, shape: tuple[int, ...], table: int) -> None:
    plan = required(scatter_add(shape, table), kernel, H200)
    names = [launch.source().name for launch in plan.launches]
    assert "stripes_kernel" in names
    assert ("sample_kernel" in names) == (table == 131072)
    offsets = {launch.constexprs["OFFSET"] for launch in plan.launches if "OFFSET" in launch.constexprs}
    assert offsets == {tl.int64 if shape[0] == 2**21 else tl.int32}
    assert all(record.spill_bytes == 0 for record in plan.compile())


@pytest.mark.parametrize("table", [77, 131072])
@pytest.mark.parametrize(("kernel", "most"), [("fixed_f16", 3), ("fixed_scaled", 4)])
def test_a_thousand_batch_sizes_compile_a_handful_of_kernels(kernel: str, most: int, table: int) -> None:
    plans = (required(scatter_add((batch, 64), table), kernel, H200) for batch in range(1, 1001))
    sources = {launch.source() for plan in plans for launch in plan.launches}
    assert len(sources) == most + (table > 77)  # and the sample


def test_fixed_point_has_no_partial_sums_to_excuse_an_infinity() -> None:
    guarantee = required(scatter_add((9, 8), 4, "f32"), "fixed_scaled", H200).precision_guarantee()
    one = torch.ones(1)
    assert judge(one * math.inf, one.double(), one.double() * 1e39, guarantee).wrong.all()
    floating = guarantee.replace(accumulator="f32")
    assert not judge(one * math.inf, one.double(), one.double() * 1e39, floating).wrong.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "element"), ROWS[1:])
def test_more_contributions_than_the_first_class_holds(kernel: str, element: str) -> None:
    n = 2**23 + 5
    got = torch.zeros(2, dtype=MAKE[element])
    index, src = torch.zeros(n, dtype=torch.int64), torch.full((n,), 2.0**-9, dtype=MAKE[element])
    run(required(scatter_add((n,), 2, element), kernel, target("gpu")), out=got, index=index, src=src)
    assert got.tolist() == [rounded(Fraction(n, 2**9), element), 0.0]
