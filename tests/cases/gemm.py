"""Matrix products for the tests: layouts, epilogues, extents that are no multiple of anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import triplan as tp
from cases import CPU, required
from triplan.testing import args_for, check_plan, check_refusals

INTERPRETED = ("tiles", "tiles_invariant")
HOPPER = ("wgmma", "wgmma_tiles")
#: The entries of both ops for halves and floats.
ENTRIES = {"gemm": (*INTERPRETED, "split_k", *HOPPER), "gemm_backward": (*INTERPRETED, "wgmma")}

ELEMENTS = ("f16", "bf16", "f32", "f64")
EPILOGUES = ("identity", "relu", "gelu", "silu", "bias", "bias_relu", "bias_gelu", "bias_silu")
ROW = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
COLUMN = tp.Layout.strided(unit_axis=0, alignment=16, stride_multiple=8)
LOOSE_ROW = tp.Layout.strided(unit_axis=1)
LOOSE_COLUMN = tp.Layout.strided(unit_axis=0)
#: Of a, b and c. A name that is missing is packed and aligned.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"b": COLUMN},
    {"a": COLUMN},
    {"a": COLUMN, "b": COLUMN, "c": ROW},
    {"a": ROW, "b": ROW, "c": COLUMN},
    {"a": LOOSE_COLUMN, "b": LOOSE_ROW, "c": LOOSE_ROW},
    {"a": tp.Layout(alignment=8), "b": tp.Layout(alignment=8), "c": tp.Layout(alignment=8)},
    {"a": "strided", "b": "strided", "c": "strided"},
)


#: Below which tf32x3's second parts are subnormal numbers of tf32, 22 bits from the leading one.
TF32X3_LEAST = 2.0**-116
#: The least number of tf32: what is smaller may become 0, and NaN where it meets an infinity.
TF32_SMALLEST = 2.0**-136


def factors(desc: Any, x: Mapping[str, Any], *names: str) -> list[torch.Tensor]:
    """Magnitudes of what is multiplied: tensor cores align products before they are normalised, so that a subnormal
    number of f16 or bf16 counts for as much as the smallest normal one. So it does in tf32, whose steps are no finer
    there, and in tf32x3 whatever has a subnormal second part."""
    tiny = torch.finfo(desc.element.torch).tiny
    of_f32 = {tp.MathPrecision.TF32: tiny, tp.MathPrecision.TF32X3: TF32X3_LEAST}
    least = tiny if desc.element.itemsize == 2 else of_f32.get(desc.multiplicands, 0.0)
    return [torch.where(x[name] > 0, x[name].clamp(min=least), x[name]) for name in names]


def magnitude(desc: Any, x: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Σ|terms| before the activation; infinite, so that nothing is asked, where the bare product leaves its range.

    Nothing is asked of integers' either: they are exact.
    """
    if not desc.element.is_floating_point:
        return dict.fromkeys(desc.written, torch.zeros(desc.operand("c").shape))
    alpha, beta = (1.0 if x.get(name) is None else abs(x[name]) for name in ("alpha", "beta"))
    a, b = factors(desc, x, "a", "b")
    product = a @ b
    found = alpha * product
    if desc.reads_c0:
        found = found + beta * x["c0"]
    if desc.has_bias:
        found = found + x["bias"]
    reach = torch.finfo(desc.element.compute.torch).max / 2
    return dict.fromkeys(getattr(desc, "written", ("c",)), torch.where(product > reach, torch.inf, found))


def check(plan: tp.Plan[Any, Any], seed: int, runs: int = 2) -> int:
    """The number of elements that were compared with the oracle, of a product or of its backward."""
    desc = plan.descriptor
    backward = desc.op == "gemm_backward"
    found = partial(
        check_plan,
        plan,
        seed=seed,
        runs=runs,
        magnitude=backward_magnitude if backward else magnitude,
        exact_integers=backward or exact(desc),
    )
    if desc.multiplicands not in (tp.MathPrecision.TF32, tp.MathPrecision.TF32X3):
        return found().compared
    # Special values as ever, without those that only tf32 takes for 0.
    drawn = vars(args_for(desc, seed=seed, values="special").host())
    multiplied = {name: drawn[name] for name in ("a", "b", "dc") if name in drawn}
    given = {name: torch.where(x.abs() < TF32_SMALLEST, 0.0, x) for name, x in multiplied.items()}
    return found(passes=("unit", "wide", "integers")).compared + found(passes=("special",), given=given).compared


def exact(desc: Any) -> bool:
    """Whether small integers in give integers out."""
    return desc.activation in ("identity", "relu")


def compared(problems: Iterable[tp.Descriptor], plan_of: Callable[[Any], tp.Plan[Any, Any] | None]) -> int:
    """The number of elements that were compared with the oracle, over the problems that ``plan_of`` has a plan for."""
    plans = ((turn, plan_of(desc)) for turn, desc in enumerate(problems))
    return sum(check(plan, turn) for turn, plan in plans if plan is not None)


def check_on_the_cpu(problems: Iterable[tp.Descriptor], refusals_every: int = 1) -> None:
    """The reference keeps its guarantee, and refuses what it must."""
    for turn, desc in enumerate(problems):
        plan = tp.plan(desc, target=CPU)
        check(plan, turn)
        assert turn % refusals_every or check_refusals(plan, seed=turn) > 0


def plan_with(
    desc: Any, name: str, launches: list[Any], workspace: int, guarantee: Callable[[Any], Any], target: tp.Target
) -> tp.Plan[Any, Any]:
    """A plan that runs ``launches``, of an entry that is in the table while it is selected."""
    tp.kernel(
        op=desc.op,
        name=name,
        elements=(str(desc.element),),
        guarantee=guarantee,
        rank=lambda desc, target: 1e9,
        workspace=lambda desc, target: workspace,
    )(lambda desc, target: launches)
    try:
        plan = required(desc, name, target)
        _ = plan.launches, plan.workspace_size()  # asked of the entry while it is there
        return plan
    finally:
        tp.TABLE.unregister(desc.op, name)


def keeps_its_word(plan: tp.Plan[Any, Any], args: Any) -> None:
    """The results that ``args`` hold, against float64 on the same device at the plan's own tolerance."""
    desc = plan.descriptor
    inputs = {n: None if (x := getattr(args, n)) is None else x.double() for n in args.__slots__ if n in FACTORS}
    reference = tp.TABLE.reference(desc.op).compute
    assert reference is not None
    of = backward_magnitude if desc.op == "gemm_backward" else magnitude
    terms = of(desc, {name: None if x is None else x.abs() for name, x in inputs.items()})
    for name, ref in reference(desc, inputs).items():
        t = plan.precision_guarantee(name).tolerance
        bound = t.rtol * ref.abs() + t.ctol * terms[name] + t.underflow
        wrong = ~((getattr(args, name).double() - ref).abs() <= bound)
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} elements are wrong: {plan!r}, {desc!r}"


FACTORS = ("dc", "a", "b", "bias")


def epilogues(element: str) -> tuple[str, ...]:
    """Those that its products can have."""
    return EPILOGUES if element != "i8" else ("identity", "relu", "bias", "bias_relu")


def grid(element: str, m: int, n: int, k: int) -> Iterator[tp.GemmDescriptor]:
    """Every layout; epilogues and the optional operands in turns."""
    for turn, layouts in enumerate(LAYOUTS):
        epilogue = epilogues(element)[turn % len(epilogues(element))]
        reads_c0 = turn % 3 == 1
        wide = element in ("f16", "bf16") and turn % 4 == 2
        extra: dict[str, Any] = {"c0": tp.Layout.strided(zero_axes=[0])} if reads_c0 and turn % 2 else {}
        yield tp.GemmDescriptor(
            m=m,
            n=n,
            k=k,
            element=element,
            out_element="f32" if wide else None,
            epilogue=epilogue,
            reads_c0=reads_c0,
            layouts={**layouts, **extra},
        )


def batched_grid(element: str, batch: int, m: int, n: int, k: int) -> Iterator[tp.BatchedGemmDescriptor]:
    """Packed, transposed, shared by all of the batch, and of any strides."""
    column = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    shared = tp.Layout.strided(unit_axis=2, alignment=16, zero_axes=[0])
    layouts: tuple[dict[str, Any], ...] = (
        {},
        {"b": column},
        {"a": column, "c": column},
        {"b": shared},
        {"a": shared, "b": tp.Layout.strided(zero_axes=[0]), "c": tp.Layout.strided(unit_axis=0)},
        {"a": "strided", "b": "strided", "c": "strided"},
    )
    for turn, layout in enumerate(layouts):
        reads_c0 = turn % 3 == 1
        epilogue = epilogues(element)[(3 * turn) % len(epilogues(element))]
        options: dict[str, Any] = {"epilogue": epilogue, "reads_c0": reads_c0}
        wide = "f32" if element in ("f16", "bf16") and turn == 3 else None
        yield tp.BatchedGemmDescriptor(
            batch=batch, m=m, n=n, k=k, element=element, out_element=wide, layouts=layout, **options
        )


#: Where something is missing, or there is but one.
EDGES = ((0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1), (1, 33, 129), (33, 1, 65), (0, 0, 0))


# --- backward ---


def backward_magnitude(desc: Any, x: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Σ|terms|; infinite where the product before alpha leaves its range."""
    alpha = 1.0 if x.get("alpha") is None else abs(x["alpha"])
    reach = torch.finfo(desc.element.compute.torch).max / 2
    found = {}
    if desc.wants_da:
        dc, b = factors(desc, x, "dc", "b")
        found["da"] = dc @ b.t()
    if desc.wants_db:
        a, dc = factors(desc, x, "a", "dc")
        found["db"] = a.t() @ dc
    found = {name: torch.where(t > reach, torch.inf, alpha * t) for name, t in found.items()}
    if desc.wants_dbias:
        found["dbias"] = x["dc"].sum(0)
    return found


#: Which of da, db and dbias are wanted.
SUBSETS = ((1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1))
#: Of dc and the factors; gradients lie as the factors do, but for the last.
BACKWARD_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"b": COLUMN, "db": COLUMN},
    {"a": COLUMN, "da": COLUMN},
    {"a": COLUMN, "b": COLUMN, "dc": ROW},
    {"dc": COLUMN, "a": ROW, "b": ROW, "da": ROW, "db": ROW},
    {"dc": LOOSE_COLUMN, "a": LOOSE_ROW, "b": LOOSE_COLUMN, "da": LOOSE_ROW, "db": COLUMN, "dbias": "strided"},
    dict.fromkeys(("dc", "a", "b", "da", "db", "dbias"), tp.Layout(alignment=8)),
    dict.fromkeys(("dc", "a", "b", "da", "db", "dbias"), "strided"),
)


def backward(m: int, n: int, k: int, element: str, subset: tuple[int, ...], **fields: Any) -> tp.GemmBackwardDescriptor:
    wants = {f"wants_{name}": bool(on) for name, on in zip(("da", "db", "dbias"), subset, strict=True)}
    bare = tp.GemmBackwardDescriptor(m=m, n=n, k=k, element=element, **wants)
    names = {o.name for o in bare.operands()}
    layouts = {name: layout for name, layout in fields.pop("layouts", {}).items() if name in names}
    return bare.replace(layouts=layouts, **fields)


def backward_grid(element: str, m: int, n: int, k: int) -> Iterator[tp.GemmBackwardDescriptor]:
    """Every layout, for all gradients and for subsets in turns."""
    for turn, layouts in enumerate(BACKWARD_LAYOUTS):
        wide = "f32" if element in ("f16", "bf16") and turn % 3 == 1 else None
        for subset in (SUBSETS[0], SUBSETS[turn % len(SUBSETS)]):
            yield backward(m, n, k, element, subset, out_element=wide, layouts=layouts)


def edges(op: str, element: str) -> list[tp.Descriptor]:
    """Where something is missing, or there is but one; of the backward every subset of gradients among them."""
    if op == "gemm_backward":
        found = [backward(*edge, element, SUBSETS[turn % 2]) for turn, edge in enumerate(EDGES)]
        return [*found, *(backward(5, 4, 3, element, subset) for subset in SUBSETS)]
    return [
        tp.GemmDescriptor(m=m, n=n, k=k, element=element, epilogue=epilogue, reads_c0=reads_c0)
        for m, n, k in EDGES
        for epilogue, reads_c0 in (("bias", True), ("identity", False))
    ]


def batches(element: str, m: int, n: int, k: int) -> list[tp.Descriptor]:
    found = list(batched_grid(element, 3, m, n, k))
    return [*found, *(found[1].replace(layouts={}, **{x: 0}) for x in ("batch", "m", "n", "k"))]
