"""Draws problems: sizes, elements, layouts and where indices point; without a GPU, the same for the same seed.

A family's module has

- ``draw(op, d)``: a descriptor of ``op``, packed, whose operands together have about ``d.bytes`` bytes;
- ``peers(desc)``: functions of the operands, by name, that compute what ``desc`` describes and return the results by
  operand;
- if an input follows from others, ``complete(desc, t)``, which writes it;
- if what follows is different at each position, ``FOLLOWING``: the names of such inputs, which are not expanded;
- if not every element of every operand must be moved, ``floor_us(desc)``: the least time on an H200;
- if torch asks cuDNN, ``SEARCHED_US``: the least time up to which cuDNN times its algorithms;
- if operands of four axes do not lie in memory as their shapes are written, ``ORDER``: their axes, outermost first.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import triplan as tp
from bench.gemm.run import ROOFS
from triplan.backends.fitted import family
from triplan.backends.triton.common.card import SECTOR
from triplan.descriptors import Layout, Operand, OperandKind, Role, packed_strides

T = TypeVar("T")
Tensors = dict[str, Any]
#: Computes a problem on its operands; returns the results by operand.
Peer = Callable[[Tensors], Tensors]

#: Bytes of all operands of a problem.
LEAST, MOST = 1 << 10, 4 << 30
#: Extents that models have: heads and their sizes, hidden sizes, widths of MLPs, vocabularies.
HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256)
HIDDEN = (768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 5376, 6144, 7168, 8192, 12288, 16384)
MLP = (4304, 8960, 9216, 10240, 11008, 13824, 14336, 17920, 18432, 18944, 20480, 21504, 27648, 28672, 29568, 36864)
VOCABULARIES = (32000, 50257, 50304, 65536, 128256, 152064, 262144)
MODELS = (*HEADS, *HIDDEN, *MLP, *VOCABULARIES)
#: Part of the extents that are a model's, where a call names such; and of those that may be below ``FEW``.
MODEL_PART, FEW_PART, FEW = 0.3, 0.1, 16
#: How often an element is drawn where others are too; models compute in the first three.
WEIGHTS = {"bf16": 4, "f16": 3, "f32": 3}
#: Part of the problems of which every operand is packed and aligned.
PACKED_PART = 0.6
#: How operands of two and more axes lie otherwise. ``padded``: rows with a gap behind; ``transposed``: the last two
#: axes; ``unaligned``: from the second element on; ``sliced``: every other element; ``expanded``: stride 0, of inputs.
Style = Literal["packed", "padded", "transposed", "unaligned", "sliced", "expanded"]
STYLES: dict[Style, int] = {"packed": 4, "padded": 4, "transposed": 4, "unaligned": 2, "sliced": 1, "expanded": 1}
#: Where indices point: anywhere; as words of a text; anywhere, ascending.
Pattern = Literal["uniform", "zipf", "sorted"]
PATTERNS: dict[Pattern, int] = {"uniform": 6, "zipf": 2, "sorted": 2}
#: Indices up to which they are drawn as words: of more, atomic operations on the first word would take seconds.
MOST_ZIPF = 1 << 20
#: Part of the problems that require determinism, of those for which an entry does not give it.
DETERMINISTIC_PART = 0.1


def is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def _power(n: int) -> int:
    return 1 << round(math.log2(n))


#: Kinds of extents: the one of each kind that is near ``n``.
KINDS: dict[str, Callable[[int], int]] = {
    "any": lambda n: n,
    "odd": lambda n: n | 1,
    "prime": lambda n: next(p for p in range(max(n, 2), 1, -1) if is_prime(p)),
    "power": _power,
    "below a power": lambda n: max(_power(n) - 1, 1),
    "above a power": lambda n: _power(n) + 1,
    "model": lambda n: min(MODELS, key=lambda m: abs(math.log(m / n))),
}


class Draw:
    """Draws the fields of one problem; the same for the same ``seed``."""

    def __init__(self, seed: str, most: int = MOST) -> None:
        self.random = random.Random(seed)
        #: Bytes of all operands together.
        self.bytes = round(self.near(LEAST, most))

    def near(self, low: float, high: float) -> float:
        """A log-uniform number."""
        return math.exp(self.random.uniform(math.log(low), math.log(high)))

    def extent(self, low: int, high: int, likely: Sequence[int] = ()) -> int:
        """A log-uniform extent in [low, high], moved to the nearest of a drawn kind; often one of ``likely``."""
        low = max(low, 1)
        high = max(high, low)
        fitting = [n for n in likely if low <= n <= high]
        if fitting and self.chance(MODEL_PART):
            return self.one_of(fitting)
        if low < FEW < high and not self.chance(FEW_PART):
            low = FEW
        n = min(max(round(self.near(low, high)), low), high)
        moved = KINDS[self.one_of(tuple(KINDS))](n)
        return moved if low <= moved <= high else n

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def one_of(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def weighed(self, choices: dict[T, int]) -> T:
        return self.random.choices(tuple(choices), tuple(choices.values()))[0]

    def element(self, op: str) -> tp.ElementKind:
        """One that some kernel of ``op`` takes."""
        known: list[tp.ElementKind] = sorted({e for entry in entries_of(op) for e in entry.elements})
        return self.weighed({e: WEIGHTS.get(e.value, 1) for e in known})

    def matrix(self, numel: int, low: int = 1, likely: Sequence[int] = HIDDEN) -> tuple[int, int]:
        """(rows, elements of a row, at least ``low``), together nearly ``numel``."""
        n = self.extent(min(low, numel), min(1 << 19, numel), likely)
        rows = max(numel // n, 1)
        return self.extent(rows * 4 // 5, rows), n

    def folded(self, rows: int) -> tuple[int, ...]:
        """``rows`` as one axis, or at times as two with nearly as many rows."""
        if rows < 4 or self.chance(0.7):
            return (rows,)
        batch = self.extent(2, rows // 2)
        return batch, rows // batch


def entries_of(op: str) -> list[Any]:
    """The kernels of ``op``, without the reference."""
    return [entry for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]


def described(op: str, **fields: Any) -> tp.Descriptor:
    """The descriptor of ``op`` with these fields."""
    cls: Any = tp.descriptor_types()[op]
    found: tp.Descriptor = cls(op=op, **fields)
    return found


# --- memory ---


@dataclass(frozen=True)
class Memory:
    """How a tensor lies in its memory: strides, and the first element's position."""

    style: Style
    strides: tuple[int, ...]
    offset: int = 0

    def layout(self, o: Operand) -> Layout:
        """The promise that a tensor in such memory keeps."""
        return Layout.of(o.shape, self.strides, (1 << 9) + self.offset * o.element.itemsize, o.element.itemsize)


def memory(o: Operand, style: Style, gap: int = 8, order: Sequence[int] = ()) -> Memory:
    """Where ``o`` lies; packed if it has too few axes for ``style``. ``order``: its axes in memory, outermost first."""
    if order:
        turned = memory(dataclasses.replace(o, shape=tuple(o.shape[a] for a in order)), style, gap)
        found = [turned.strides[order.index(a)] for a in range(len(order))]
        return dataclasses.replace(turned, strides=tuple(found))
    shape, strides = o.shape, packed_strides(o.shape)
    if style == "unaligned" and o.numel:
        return Memory(style, strides, 1)
    if style == "sliced" and shape:
        return Memory(style, tuple(2 * s for s in strides))
    if len(shape) < 2:
        return Memory("packed", strides)
    *lead, m, n = range(len(shape))
    if style == "padded":
        found, step = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            found[axis] = step
            step = step * shape[axis] + (gap if axis == n else 0)
        return Memory(style, tuple(found))
    if style == "transposed":
        swapped = packed_strides([*(shape[a] for a in lead), shape[n], shape[m]])
        return Memory(style, (*swapped[:-2], swapped[-1], swapped[-2]))
    if style == "expanded" and not o.is_written and shape[0] > 1:
        return Memory(style, (0, *packed_strides(shape)[1:]))
    return Memory("packed", strides)


# --- a problem ---


@dataclass(frozen=True)
class Case:
    """A drawn problem.

    Attributes:
        number: which draw of the seed it is.
        desc: the problem, with the promises that ``memory`` keeps.
        memory: by operand.
        pattern: where indices point.
        deterministic: whether determinism is required, of peers too.
    """

    number: int
    desc: tp.Descriptor
    memory: dict[str, Memory]
    pattern: Pattern = "uniform"
    deterministic: bool = False

    @property
    def name(self) -> str:
        skipped = {"op", "schema_version", "layouts"}
        fields = {k: v for k, v in self.desc.model_dump(mode="json", exclude_defaults=True).items() if k not in skipped}
        said = [str(fields.pop("element", "")), *(f"{k}={_short(v)}" for k, v in fields.items())]
        said += [f"{name}:{m.style}" for name, m in self.memory.items() if m.style != "packed"]
        indexed = any(o.index_extents for o in self.desc.operands())
        said += [self.pattern] if indexed and self.pattern != "uniform" else []
        said += ["deterministic"] if self.deterministic else []
        return " ".join([f"{self.number:03}", self.desc.op, *said])

    @property
    def bytes(self) -> int:
        """Of all operands, without repeats along axes of stride 0."""
        return sum(_nbytes(o) for o in self.desc.operands() if o.is_tensor)

    @property
    def floor_us(self) -> float:
        """The least time on an H200."""
        found = getattr(family_of(self.desc.op), "floor_us", streamed_us)(self.desc)
        return float(found)

    @property
    def preference(self) -> tp.PlanPreference:
        return tp.PlanPreference(deterministic=self.deterministic)


def _short(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return f"[{len(value)}]" if any(isinstance(v, list) for v in value) else "x".join(map(str, value))


def _nbytes(o: Operand) -> int:
    repeated = math.prod(o.shape[a] for a in o.layout.zero_axes)
    return o.nbytes * o.count // max(repeated, 1)


def streamed_us(desc: tp.Descriptor) -> float:
    """Each element is read or written once, of in-outs read and written."""
    moved = sum(_nbytes(o) * (2 if o.role is Role.IN_OUT else 1) for o in desc.operands() if o.is_tensor)
    return moved / (ROOFS[0] * 1e6)


def _families() -> dict[str, str]:
    """The family of each op of the library."""
    return {op: name for op, cls in tp.descriptor_types().items() if (name := family(cls))}


FAMILIES = tuple(sorted(set(_families().values())))


@cache
def family_of(op: str) -> ModuleType:
    """The module of this bench for the family of ``op``."""
    return import_module(f"bench.anywhere.{_families()[op]}")


def ops_of(family: str) -> list[str]:
    """The ops of ``family``."""
    return [op for op, own in _families().items() if own == family]


def op_of(family: str, seed: int, number: int) -> str:
    """The op of problem ``number`` of a seed."""
    ops = ops_of(family)
    random.Random(f"{family} {seed}").shuffle(ops)
    return ops[number % len(ops)]


def case(family: str, seed: int, number: int, target: tp.Target, most: int = MOST) -> Case:
    """Problem ``number`` of a seed. Every op has its turn; a problem that no kernel takes is drawn again."""
    op = op_of(family, seed, number)
    for attempt in range(50):
        d = Draw(f"{op} {seed} {number} {attempt}", most)
        desc: tp.Descriptor = family_of(op).draw(op, d)
        if any(0 in o.shape for o in desc.operands()):
            continue
        packed = d.chance(PACKED_PART)
        gap, order = d.one_of((1, 8, 64)), getattr(family_of(op), "ORDER", ())
        following = getattr(family_of(op), "FOLLOWING", ())
        # Only what can be large lies in other ways: a view of a few elements is rarely a user's.
        lying = {
            o.name: memory(o, "packed" if packed else d.weighed(STYLES), gap, order if len(o.shape) == 4 else ())
            for o in desc.operands()
            if o.kind is OperandKind.TENSOR and (packed or len(o.shape) > 1)
        }
        for o in desc.operands():
            # One lse of several batch entries, say, is none that the forward op wrote: torch's gradients are others.
            if o.name in following and o.name in lying and lying[o.name].style == "expanded":
                lying[o.name] = memory(o, "packed")
        layouts = {o.name: lying[o.name].layout(o) for o in desc.operands() if o.name in lying}
        desc = desc.replace(layouts=layouts)
        indices = max((o.numel for o in desc.operands() if o.index_extents), default=0)
        pattern = d.weighed(PATTERNS if indices <= MOST_ZIPF else {**PATTERNS, "zipf": 0})
        strict = d.chance(DETERMINISTIC_PART)
        try:
            plan = tp.plan(desc, preference=tp.PlanPreference(deterministic=strict), target=target)
        except tp.Unsupported:
            continue
        matters = any("not deterministic" in c.reason for c in plan.candidates)
        return Case(number, desc, lying, pattern, strict and matters)
    raise RuntimeError(f"50 draws of {op} have no problem that a kernel takes")


# --- operands ---


def placed(peer: Peer) -> Peer:
    """``peer``, for ops of which torch allocates the results.

    It copies them to ours, as torch's functions with ``out=`` would, where ours have their axes in another order, gaps
    between elements, or runs of elements shorter than a sector and no longer than the gaps behind them.
    """

    def call(t: Tensors) -> Tensors:
        found = peer(t)
        return {
            name: value if _lies(value) == _lies(t[name]) else t[name].copy_(value) for name, value in found.items()
        }

    return call


def _lies(t: Tensor) -> tuple[list[int], int, bool]:
    """What ``placed`` compares: the axes of several elements, by their strides; the smallest stride; short runs."""
    axes = sorted((a for a in range(t.dim()) if t.shape[a] > 1), key=t.stride)
    run = 1  # elements without a gap
    for axis in axes:
        if t.stride(axis) != run:
            return axes, t.stride(axes[0]), t.stride(axis) >= 2 * run and run * t.element_size() < SECTOR
        run *= t.shape[axis]
    return axes, 1, False


def tensors(case: Case, device: torch.device, g: torch.Generator) -> Tensors:
    """Random operands in their memory. Optional scalars are absent."""
    found: Tensors = {}
    for o in case.desc.operands():
        if o.kind is OperandKind.HOST_SCALAR:
            found[o.name] = None if o.optional else 1
            continue
        made = [_tensor(case, o, extent, device, g) for extent in (o.index_extents or (0,) * o.count)]
        found[o.name] = made if o.kind is OperandKind.TENSOR_LIST else made[0]
    complete: Callable[[tp.Descriptor, Tensors], None] | None = getattr(family_of(case.desc.op), "complete", None)
    if complete is not None:
        complete(case.desc, found)
    return found


def _tensor(case: Case, o: Operand, extent: int, device: torch.device, g: torch.Generator) -> Tensor:
    lies = case.memory.get(o.name, Memory("packed", packed_strides(o.shape)))
    room = lies.offset + 1 + sum((n - 1) * s for n, s in zip(o.shape, lies.strides, strict=True))
    dtype = o.element.torch
    if o.index_extents:
        flat = torch.empty(room, dtype=dtype, device=device)
        found = flat.as_strided(o.shape, lies.strides, lies.offset)
        drawn = torch.rand(o.shape, device=device, generator=g)
        if case.pattern == "zipf":  # position k with a probability of about 1 / (k + 1)
            drawn = (drawn * math.log(extent + 1)).exp_().sub_(1).div_(extent)
        elif case.pattern == "sorted":
            drawn = drawn.sort(max((a for a in range(len(o.shape)) if a not in o.batch_axes), default=-1)).values
        at = drawn.mul_(extent).long().clamp_(max=extent - 1).to(dtype)
        for axis in o.layout.zero_axes:
            at, found = at.narrow(axis, 0, 1), found.narrow(axis, 0, 1)
        found.copy_(at)
    elif o.element.is_floating_point:
        flat = torch.randn(room, dtype=dtype, device=device, generator=g)
    else:
        low, high = (0, 2) if dtype == torch.bool else (1, 4)  # integers are divided by, too
        flat = torch.randint(low, high, (room,), device=device, generator=g, dtype=dtype)
    return flat.as_strided(o.shape, lies.strides, lies.offset)
