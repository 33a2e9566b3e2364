"""Args with exactly one fault, each with the error that it must raise, and results that are wrong in one thing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from triplan.descriptors import Descriptor, Operand, OperandKind, Role
from triplan.errors import InvalidProblem, MisalignedOperand, TriplanError, WorkspaceTooSmall
from triplan.facade import Plan, Workspace
from triplan.sku import ElementKind, PrecisionGuarantee
from triplan.testing.args import PlacedArgs, args_for, poisoned
from triplan.testing.oracle import Outputs, bit_oracle, computed, moved_bits, oracle
from triplan.testing.placing import Region, allocate, draw_strides, place, reach

__all__ = ["Mutation", "WrongResult", "check_refusals", "mutations", "wrong_results"]


#: Elements of an operand that is made larger: beside an extent of 0, the others may be longer than memory.
MOST_ELEMENTS = 1 << 20


@dataclasses.dataclass
class Mutation:
    """Args with one fault.

    Attributes:
        rule: what is broken: ``dtype``, ``shape``, ``device``, ``promise``, ``alignment``, ``overlap``, ``missing``,
            ``extra``, ``count``, ``type``, ``scalar``, ``workspace``.
        operand: the operand that breaks it; the error's message names it.
        error: the class of the error that ``can_implement`` reports and ``run`` raises.
        placed: the args (``placed.args``), and all memory that must not change.
        scratch: for the rule ``workspace``, the workspace to run with, or None; other rules run with a right one.
    """

    rule: str
    operand: str
    error: type[TriplanError]
    placed: PlacedArgs
    scratch: Workspace | None = None

    def __repr__(self) -> str:
        return f"Mutation({self.rule} of {self.operand}: {self.error.__name__})"


def mutations(
    desc: Descriptor, device: torch.device | str = "cpu", seed: int = 0, workspace_bytes: int = 0
) -> Iterator[Mutation]:
    """Every mutation that applies to the operands of ``desc``.

    ``workspace_bytes``: the workspace size of the plan; 0 leaves out the rule ``workspace``.
    """
    base = args_for(desc, device, seed, indices="valid")

    def wrong(
        rule: str, name: str, value: Any, *regions: Region, error: type[TriplanError] = InvalidProblem
    ) -> Mutation:
        args = dataclasses.replace(base.args, **{name: value})
        memory = {**base.regions, **{f"{name} ({rule})": r for r in regions}}
        return Mutation(rule, name, error, PlacedArgs(desc, args, memory, base.device, base.generator))

    names = {o.name for o in desc.operands()}
    for field in dataclasses.fields(base.args):
        if field.name not in names:
            yield wrong("extra", field.name, torch.zeros(1, dtype=torch.int64, device=device))
    for o in desc.operands():
        if not o.optional:
            yield wrong("missing", o.name, None)
        if o.kind is OperandKind.HOST_SCALAR:
            for value in ("1", True, [1.0], *(() if o.element.is_floating_point else (1.0, 2**80))):
                yield wrong("scalar", o.name, value)
            continue
        if o.kind is OperandKind.TENSOR_LIST:
            items = list(getattr(base.args, o.name))
            yield wrong("count", o.name, items[:-1])
            yield wrong("count", o.name, [*items, items[0]])
            yield wrong("type", o.name, items[0])
        else:
            yield wrong("type", o.name, [getattr(base.args, o.name)])
        for rule, error, region in _tensors(o, base):
            yield wrong(rule, o.name, _listed(o, base, region.tensor), region, error=error)
    yield from _overlaps(desc, base, wrong)
    if workspace_bytes:
        yield from _workspaces(desc, base, workspace_bytes)


def check_refusals(plan: Plan[Any, Any], device: torch.device | str | None = None, seed: int = 0) -> int:
    """Check that ``plan`` refuses every mutation of its descriptor. Returns their number. Raises ``AssertionError``.

    ``can_implement`` must be falsy with the mutation's error, which names the operand; ``run`` must raise the same
    error, and no byte of any operand may change.
    """
    where = torch.device(plan.target.device_type if device is None else device)
    count = 0
    for m in mutations(plan.descriptor, where, seed, plan.workspace_size()):
        count += 1
        support = plan.can_implement(m.placed.args)
        if m.rule == "workspace":
            if not support:
                raise AssertionError(f"{m!r}: the args are right, but were refused: {support.reason}")
        elif support or type(support.error) is not m.error:
            raise AssertionError(f"{m!r}: can_implement said {support!r}")
        elif m.operand not in support.reason:
            raise AssertionError(f"{m!r}: the reason does not name {m.operand}: {support.reason}")
        raised: BaseException | None = None
        try:
            plan.run(m.placed.args, m.scratch if m.rule == "workspace" else m.placed.workspace(plan))
        except TriplanError as e:
            raised = e
        if type(raised) is not m.error:
            raise AssertionError(f"{m!r}: run raised {raised!r}")
        if support.error is not None and str(raised) != str(support.error):
            raise AssertionError(f"{m!r}: run said {raised}, can_implement {support.error}")
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        m.placed.assert_intact(outputs_may_change=False)
    return count


# --- one tensor at a time ---


def _listed(o: Operand, base: PlacedArgs, tensor: torch.Tensor) -> Any:
    """``tensor``, or for a list operand the list with ``tensor`` as its last item."""
    return [*getattr(base.args, o.name)[:-1], tensor] if o.kind is OperandKind.TENSOR_LIST else tensor


def _tensors(o: Operand, base: PlacedArgs) -> Iterator[tuple[str, type[TriplanError], Region]]:
    """Regions for ``o`` with one fault, each with the rule that it breaks and the error that it must raise."""
    g, device = base.generator, base.device

    def region(element: ElementKind, shape: tuple[int, ...], **how: Any) -> Region:
        content = poisoned(dataclasses.replace(o, element=element, shape=shape), 1)
        return place(o.name, content, element, o.layout, written=False, device=device, g=g, repeats=False, **how)

    other = ElementKind.I16 if o.element is not ElementKind.I16 else ElementKind.F16
    same_width = {ElementKind.F32: ElementKind.I32, ElementKind.I32: ElementKind.F32, ElementKind.F64: ElementKind.I64}
    wrong = same_width.get(o.element, {ElementKind.I64: ElementKind.F64}.get(o.element, other))
    if (o.layout.alignment or 1) >= wrong.itemsize or o.layout.alignment is None:
        yield "dtype", InvalidProblem, region(wrong, o.shape)
    for axis, n in enumerate(o.shape):
        longer = (*o.shape[:axis], n + 1, *o.shape[axis + 1 :])
        if math.prod(longer) <= max(2 * o.numel, MOST_ELEMENTS):
            yield "shape", InvalidProblem, region(o.element, longer)
        if n > 1:
            yield "shape", InvalidProblem, region(o.element, (*o.shape[:axis], n - 1, *o.shape[axis + 1 :]))
    yield "shape", InvalidProblem, region(o.element, (*o.shape, 1))
    away = region(o.element, o.shape)
    away.tensor = torch.empty_strided(o.shape, away.tensor.stride(), dtype=o.element.torch, device="meta")
    yield "device", InvalidProblem, away
    for strides in _broken_strides(o):
        yield "promise", InvalidProblem, region(o.element, o.shape, strides=strides)
    alignment = o.layout.alignment or o.element.itemsize
    if alignment > o.element.itemsize and o.numel:
        yield "alignment", MisalignedOperand, region(o.element, o.shape, off=o.element.itemsize)
        if alignment // 2 > o.element.itemsize:
            yield "alignment", MisalignedOperand, region(o.element, o.shape, off=alignment // 2)
    if o.is_written and not o.layout.packed:
        # Elements that share an address: two axes of the same stride, then an axis of stride 0.
        wide = [a for a, n in enumerate(o.shape) if n > 1]
        if wide and o.numel:
            same = [1] * len(o.shape)
            if len(wide) > 1:
                yield "overlap", InvalidProblem, region(o.element, o.shape, strides=same)
            if wide != [o.layout.unit_axis]:
                same[next(a for a in wide if a != o.layout.unit_axis)] = 0
                yield "overlap", InvalidProblem, region(o.element, o.shape, strides=same)


def _broken_strides(o: Operand) -> Iterator[tuple[int, ...]]:
    """Strides without overlap, each of which breaks one promise of ``o``."""
    if o.numel == 0:
        return
    wide = [a for a, n in enumerate(o.shape) if n > 1]

    def walk(order: list[int], first: int, zero: tuple[int, ...] = ()) -> tuple[int, ...]:
        found, step = [0] * len(o.shape), first
        for axis in order:
            if axis not in zero:
                found[axis], step = step, step * o.shape[axis]
        return tuple(found)

    outwards = list(reversed(range(len(o.shape))))
    layout = o.layout
    if layout.packed:
        if wide:
            yield walk(outwards, 2)  # a gap between elements
        if len(wide) > 1:
            yield walk(outwards[::-1], 1)  # transposed
            inner, *rest = walk(outwards, 1)[::-1]
            if o.shape[-1] > 1:
                yield (*(s + s // inner if s > 1 else s for s in rest[::-1]), inner)  # padded rows
        return
    if layout.order and wide:
        yield walk(list(layout.order[::-1]), 2)  # a gap between elements
        if len(wide) > 1:
            yield walk(list(layout.order), 1)
        return
    if layout.unit_axis in wide:
        yield walk(outwards, 2, layout.zero_axes)
    for axis in layout.zero_axes:
        if axis in wide:
            others = [a for a in outwards if a != layout.unit_axis]
            order = others if layout.unit_axis is None else [layout.unit_axis, *others]
            yield walk(order, 1, tuple(z for z in layout.zero_axes if z != axis))
    if layout.stride_multiple > 1:
        first = [] if layout.unit_axis is None else [layout.unit_axis]
        for axis in wide:
            if axis not in (*first, *layout.zero_axes):
                others = [a for a in outwards if a not in (*first, axis)]
                strides = list(walk([*first, *others, axis], 1, layout.zero_axes))
                # One more than a multiple, and larger than the extent of the other axes in memory.
                strides[axis] += 1 - strides[axis] % layout.stride_multiple + layout.stride_multiple
                yield tuple(strides)


# --- operands that share memory ---


def _overlaps(desc: Descriptor, base: PlacedArgs, wrong: Callable[..., Mutation]) -> Iterator[Mutation]:
    tensors = [o for o in desc.operands() if o.kind is not OperandKind.HOST_SCALAR and o.numel]
    for out in tensors:
        for other in tensors:
            if not out.is_written or other is out or other.name in out.over:
                continue
            shared, first, second = _shared(out, other, base)
            mutation = wrong("overlap", out.name, first, shared)
            listed = _listed(other, base, second)
            mutation.placed.args = dataclasses.replace(mutation.placed.args, **{other.name: listed})
            yield mutation


def _shared(out: Operand, other: Operand, base: PlacedArgs) -> tuple[Region, torch.Tensor, torch.Tensor]:
    """Both operands with their promised layouts, starting at the same byte."""
    g = base.generator
    alignment = max(o.layout.alignment or o.element.itemsize for o in (out, other))
    alignment = max(alignment, out.element.itemsize, other.element.itemsize)
    strides = [draw_strides(o.shape, o.layout, o.is_written, g) for o in (out, other)]
    size = max(reach(o.shape, s) * o.element.itemsize for o, s in zip((out, other), strides, strict=True))
    storage, start = allocate(size, ElementKind.U8, alignment, base.device, g)
    tensors = [
        storage.view(o.element.torch).as_strided(o.shape, s, start // o.element.itemsize)
        for o, s in zip((out, other), strides, strict=True)
    ]
    region = Region(f"{out.name} and {other.name}", storage, tensors[0], False, storage.cpu().clone())
    return region, tensors[0], tensors[1]


# --- workspace ---


def _workspaces(desc: Descriptor, base: PlacedArgs, size: int) -> Iterator[Mutation]:
    def raw(n: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.uint8, device=device)

    yield Mutation("workspace", "workspace", WorkspaceTooSmall, base)
    short = Workspace(raw(size - 1, base.device))
    yield Mutation("workspace", "workspace", WorkspaceTooSmall, base, short)
    yield Mutation("workspace", "workspace", InvalidProblem, base, Workspace(raw(size, "meta")))
    for o in desc.operands():
        if o.kind is OperandKind.HOST_SCALAR or o.numel == 0:
            continue
        # A workspace that starts at the operand's first byte.
        alignment = max(o.layout.alignment or o.element.itemsize, Workspace.ALIGNMENT)
        strides = draw_strides(o.shape, o.layout, o.is_written, base.generator)
        room = max(reach(o.shape, strides) * o.element.itemsize, size)
        storage, start = allocate(room, ElementKind.U8, alignment, base.device, base.generator)
        tensor = storage.view(o.element.torch).as_strided(o.shape, strides, start // o.element.itemsize)
        region = Region(f"{o.name} and workspace", storage, tensor, False, storage.cpu().clone())
        args = dataclasses.replace(base.args, **{o.name: _listed(o, base, tensor)})
        placed = PlacedArgs(desc, args, {**base.regions, "shared": region}, base.device, base.generator)
        yield Mutation("workspace", o.name, InvalidProblem, placed, Workspace(storage[start : start + size]))


# --- results ---

#: Significant bits of each element, and the element of as many bits or fewer that comes after it.
PRECISION = {ElementKind.F64: 53, ElementKind.F32: 24, ElementKind.F16: 11, ElementKind.BF16: 8}
COARSER = {ElementKind.F64: ElementKind.F32, ElementKind.F32: ElementKind.F16, ElementKind.F16: ElementKind.BF16}
#: Of the element after bf16, fp8e4m3.
LEAST_PRECISION = 4


@dataclasses.dataclass(frozen=True)
class WrongResult:
    """What a faulty kernel might write to ``output``: right but for one thing.

    Attributes:
        rule: ``missing``: one element of an input was taken for 0; judged by its effect on other positions, if it has
            any. ``neighbour``: one element has its neighbour's value. ``bits``: the result was rounded to fewer bits
            than its guarantee promises: one bit fewer if it is narrower than the accumulator, else as many as the next
            element has. ``coarse``: everything was computed in that element, or in the narrow result's own.
        operand: the input of which an element is missing, or the output.
        output: the output that is wrong.
        got: its value.
    """

    rule: str
    operand: str
    output: str
    got: torch.Tensor

    def __repr__(self) -> str:
        return f"WrongResult({self.rule} of {self.operand}: {self.output})"


def wrong_results(desc: Descriptor, args: Any, guarantees: Mapping[str, PrecisionGuarantee]) -> Iterator[WrongResult]:
    """Wrong results for CPU ``args``, each of which must lie outside the tolerance of ``guarantees``, or else this
    tolerance shows little. Few contributions (two, say) and values of kind ``unit`` make a sharp tolerance show it."""

    def rounded(outputs: Outputs) -> dict[str, torch.Tensor]:
        return {name: t.to(desc.operand(name).element.torch) for name, t in outputs.items()}

    moves = all(moved_bits(g) or not g.accumulator.is_floating_point for g in guarantees.values())
    compute = bit_oracle if moves and not any(g.tolerance.ctol for g in guarantees.values()) else oracle
    wide = compute(desc, args)
    right = rounded(wide)
    for operand, name, got in _missing(desc, args, right, lambda args: rounded(compute(desc, args))):
        yield WrongResult("missing", operand, name, got)
    for name, t in right.items():
        flat, other = t.flatten().clone(), t.flatten().roll(1)
        if len(differs := (flat != other).nonzero()):
            flat[differs[0]] = other[differs[0]]
            yield WrongResult("neighbour", name, name, flat.reshape(t.shape))
    for name, g in guarantees.items():
        element = desc.operand(name).element
        if moved_bits(g) or not element.is_floating_point:
            continue
        narrows = not g.accumulator.is_floating_point or g.accumulator.unit_roundoff < element.unit_roundoff
        after = COARSER.get(element)
        # One bit fewer, or two where terms are rounded to the element too, as attention's probabilities are.
        fewer = 2 if g.tolerance.ctol >= element.unit_roundoff else 1
        bits = PRECISION[element] - fewer if narrows else LEAST_PRECISION if after is None else PRECISION[after]
        less = {"bits": to_bits(wide[name], bits).to(element.torch)}
        if (within := element if narrows else after) is not None:
            less["coarse"] = rounded(computed(desc, args, within.torch))[name]
        for rule, got in less.items():
            if not torch.equal(got, right[name]):
                yield WrongResult(rule, name, name, got)


def _missing(
    desc: Descriptor, args: Any, right: Outputs, compute: Callable[[Any], Outputs]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(input, output, value) for each input and each output on which an element of it has an effect."""
    for o in desc.operands():
        if not o.is_tensor or o.index_extents or o.role is Role.OUTPUT:
            continue
        given = getattr(args, o.name)
        order = given.flatten().double().abs().argsort(descending=True, stable=True)

        def without(at: torch.Tensor, o: Operand = o, given: torch.Tensor = given) -> dict[str, torch.Tensor]:
            """The outputs that change if the elements ``at`` of ``o`` are 0."""
            less = given.flatten().index_fill(0, at, 0).reshape(given.shape)
            changed = compute(SimpleNamespace(**{**vars(args), o.name: less}))
            return {name: t for name, t in changed.items() if not torch.equal(t, right[name])}

        # The largest element that matters: the last of the shortest run of them that changes anything.
        first, last = 0, min(1, given.numel())
        while last < given.numel() and not without(order[:last]):
            first, last = last, min(4 * last, given.numel())
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if without(order[:middle]) else (middle, last)
        at = order[first:last]
        for name, t in without(at).items():
            own = t.flatten()
            if t.shape == given.shape:
                own = own.index_copy(0, at, right[name].flatten()[at])
            elsewhere = own.reshape(t.shape)
            yield o.name, name, t if torch.equal(elsewhere, right[name]) else elsewhere


def to_bits(t: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 values rounded to ``bits`` significant bits."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)
