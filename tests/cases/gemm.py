"""Matrix products for the tests: layouts, epilogues, extents that are no multiple of anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triplan as tp
from cases import CPU, repeats, required
from triplan.backends.triton.gemm import separate_wgmma, wgmma_cut
from triplan.testing import check_plan, check_refusals

INTERPRETED = ("tiles", "tiles_invariant")
BACKWARD_INTERPRETED = ("separate", "tiles_invariant")
HOPPER = ("wgmma", "wgmma_tiles")
#: The entries of both ops for halves and floats.
ENTRIES = {"gemm": (*INTERPRETED, "split_k", *HOPPER), "gemm_backward": (*BACKWARD_INTERPRETED, "wgmma")}

#: Of ``separate_wgmma``, the way in which every product has tiles that are cut.
CUT_WAYS = tuple(way for way in separate_wgmma.WAYS if way.build is wgmma_cut.wgmma_cut)

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


def tiles_in_order(desc: Any, cut: Any) -> list[tuple[Any, int, int]]:
    """The (index of the product, first row, first column) of each tile, in the order in which they are computed: some
    rows of tiles at a time, column by column."""
    ring = cut.tile
    rows, columns = range(0, desc.m, ring.m), range(0, desc.n, ring.n)
    groups = [rows[i : i + ring.group] for i in range(0, len(rows), ring.group)]
    products = range(math.prod(desc.lead)) if desc.lead else (...,)
    return [(p, row, column) for p in products for group in groups for column in columns for row in group]


def check(plan: tp.Plan[Any, Any], seed: int) -> int:
    """The number of elements that were compared with the oracle, of a product or of its backward."""
    return check_plan(plan, seed=seed, runs=repeats(plan)).compared


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
    of = tp.TABLE.reference(desc.op).checks.terms
    assert of is not None
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
