"""The compile matrix: which binaries are built without a GPU, and what each of them is held to.

A family joins by ``@compiles(*ops)`` over a function that yields ``Build``s of an entry, in a module of this package.
Of other ops the problems of the proofs are built.

Thousands of binaries follow. Those that are built cover them: every value of each parameter, and the extremes of what
registers depend on, instead of every combination. Of each kernel function:

- for each architecture a binary, and the largest tile; one of bf16 on sm80, which lacks most of its instructions;
- for one architecture or the other every element, every type of a parameter, with a promise of divisibility by 16 and
  with a weaker one, every value of a constant, and every number of warps and stages;
- every tile that no other exceeds, with the warps that share it; the largest of each set of widths of elements, and the
  largest area of each combination of functions. If registers spill, they spill in these.

Of each entry: a binary for each architecture, one of floating-point numbers and one of others. f16 and bf16 stand for
each other elsewhere. ``--matrix all`` builds all.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from cases import pinned
from proofs import FAMILIES
from samples import family_of

import triplan as tp
from triplan.backends.runtime.launch import Launch, Source

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
#: Contributions of the proofs' problems, as the proofs on a GPU have them.
COUNT = 5000
#: Additions of floating-point numbers in memory, in any spelling of PTX's ``atom`` and ``red`` (PTX ISA, "Parallel
#: Synchronization and Communication Instructions"), and compare-and-swap, by whose loops they are emulated.
FLOAT_ATOMIC = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*?(?:cas\b|(?=[\w.:]*\badd\b)[\w.:]*\bb?f(?:16|16x2|32|64)\b)")
#: The same without compare-and-swap, by whose loops extremes are found, too.
FLOAT_ADDITION = re.compile(FLOAT_ATOMIC.pattern.replace(r"cas\b|", ""))
#: Of a parameter's type: what it points to, or what its tensor map describes.
HELD = re.compile(r"(?:\*|tensordesc<)\w+")
FLOATING = re.compile(r"(?:\*|tensordesc<)(?:fp|bf)")
FLOATS = re.compile(r"b?f\d")
#: The shape of a tensor map's box, in its type.
BOX = re.compile(r"\[[^\]]*\]")
#: Registers hold either in the same space, and what they hold is computed in f32.
HALF = re.compile(r"\bb?fp?16\b")
#: Numbers that are no sizes: they select code, or follow from the element, as the largest value of a type does.
NO_SIZES = {
    "ACROSS",
    "ALONG",
    "BITS",
    "FINISH",
    "FLAGS",
    "IDENTITY",
    "INFINITY",
    "KIND",
    "MAP",
    "STATES",
    "STEPS",
    "VALUE",
}
VECTORS = r"\.v4\.b32|\.v2\.b64"


#: What PTX must have, and what it must not have.
Patterns = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Build:
    """The launches of one problem. ``asks(name)`` of a kernel: patterns that its PTX must have, and must not have."""

    desc: tp.Descriptor
    launches: tuple[Launch, ...]
    asks: Callable[[str], Patterns] = lambda name: ((), ())
    guarantee: tp.PrecisionGuarantee | None = None
    #: Whether registers may spill: so they do in rare problems, which no cost model was fitted to.
    may_spill: bool = False


@dataclass
class Binary:
    """One binary, all entries that launch it, and what their plans ask of it."""

    source: Source
    arch: str
    desc: tp.Descriptor
    entries: set[tuple[str, str]] = field(default_factory=set)
    deterministic: bool = False
    #: Whether all its plans promise the same result in any order, so that it may compare and swap.
    any_order: bool = True
    may_spill: bool = True
    has: set[str] = field(default_factory=set)
    lacks: set[str] = field(default_factory=set)
    #: (op, entry, element) of each plan that launches it.
    users: set[tuple[str, str, str]] = field(default_factory=set)
    #: Those of plans that sum in no fixed order.
    unordered: set[tuple[str, str, str]] = field(default_factory=set)

    @cached_property
    def elements(self) -> tuple[str, ...]:
        """What the kernel's operands in memory hold, without the shapes of tensor maps' boxes."""
        return tuple(found[0] for _, t in self.source.signature if (found := HELD.match(str(t))))

    @cached_property
    def element(self) -> str:
        """What the kernel's first operand holds."""
        return next(iter(self.elements), "")

    @cached_property
    def widths(self) -> frozenset[str]:
        """What the floating-point operands hold, or else the first: registers depend on how wide it is."""
        return frozenset(HALF.sub("half", t) for t in self.elements if FLOATING.match(t)) or frozenset({self.element})

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """The constants that are functions."""
        return tuple(v.__name__ for _, v in self.source.constexprs if hasattr(v, "__name__"))

    @cached_property
    def area(self) -> float:
        """Elements of a tile, by warp."""
        return prod(v for n, v in self.tile if n.startswith("BLOCK")) / self.source.num_warps

    @cached_property
    def numbers(self) -> tuple[tuple[str, int], ...]:
        """The constants that are numbers: sizes, and what selects code."""
        return tuple((n, v) for n, v in self.source.constexprs if isinstance(v, int) and v > 1)

    @cached_property
    def tile(self) -> tuple[tuple[str, int], ...]:
        """The constants that are sizes."""
        return tuple((n, v) for n, v in self.numbers if n not in NO_SIZES)

    @cached_property
    def work(self) -> float:
        """About how much code a thread has, and with it the time of compiling: the product of the sizes, by warp."""
        return prod(v for _, v in self.tile) / self.source.num_warps

    def facets(self, most: bool) -> set[Hashable]:
        """What building it shows; all that is to be shown of a family is the union over its binaries.

        Those of few binaries are one of each kernel, one of each that waits for the launch ahead, and of each
        architecture.
        """
        s = self.source
        found: set[Hashable] = {s.name, self.arch}
        if not self.may_spill:
            found.add((s.name, "spills"))
        if s.overlaps:
            found.add((s.name, "overlaps"))
        if most:
            found |= {self.element, *((*e, self.arch) for e in self.entries)}
            found |= {(op, entry, bool(FLOATS.match(of))) for op, entry, of in self.users}
            of_kernel = {self.arch, HALF.sub("half", self.element)}
            if self.arch == "sm80" and "bf16" in self.element:
                of_kernel.add("bf16 on sm80")
            found |= {(s.name, x) for x in of_kernel}
            for op, entry, of in self.unordered:
                found |= {(s.name, self.arch, op, entry), (s.name, self.arch, of)}
        if most and not self.may_spill:
            found |= {(s.name, x, "spills") for x in of_kernel}
            constants = ((n, _shown(v)) for n, v in s.constexprs)
            launch = (("warps", s.num_warps), ("stages", s.num_stages), ("registers", s.max_registers))
            parts = (*self.types, *((at, by >= 16) for at, by in s.attrs), *constants, *launch, ("pdl", s.overlaps))
            found |= {(s.name, "part", part) for part in parts}
        return found

    @property
    def types(self) -> Iterator[Hashable]:
        """What each parameter is, and each layout in shared memory, without the shapes of tensor maps' boxes."""
        for name, t in self.source.signature:
            wide = HALF.sub("half", str(t))
            yield name, (HELD.match(wide) or [wide])[0]
            if wide.startswith("tensordesc"):
                yield BOX.sub("", wide)

    def extremes(self) -> Iterator[tuple[Hashable, dict[str, float]]]:
        """Classes of binaries, and sizes: of each class those count whose sizes no other's exceed."""
        s = self.source
        yield (s.name, self.arch), {"work": self.work}
        yield (s.name, self.widths), {"work": self.work}
        yield (s.name, self.functions), {"area": self.area}
        yield (s.name, "tile"), {**dict(self.tile), "by warp": 1 / s.num_warps, "stages": s.num_stages}


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


Builds = Callable[[str, str, tp.Target], Iterator[Build]]
JOINED: dict[str, Builds] = {}


def compiles(*ops: str) -> Callable[[Builds], Builds]:
    """Register what is built of each entry of ``ops``: a function of op, entry and target."""

    def register(builds: Builds) -> Builds:
        JOINED.update(dict.fromkeys(ops, builds))
        return builds

    return register


def proved(op: str, entry: str) -> Iterator[tp.Descriptor]:
    """The problems of the proofs: every floating-point element and option that the entry takes."""
    (found,) = (e for e in tp.TABLE.rows(op) if e.name == entry)
    for element in sorted(e for e in found.elements if e.is_floating_point):
        yield from _proved(op, element)


@cache
def _proved(op: str, element: tp.ElementKind) -> tuple[tp.Descriptor, ...]:
    return tuple(FAMILIES[op].make(COUNT, element, "equal", **option).desc for option in FAMILIES[op].options)


def entries() -> list[tuple[str, str, str]]:
    """(op, entry, arch) of all that the kernel table can launch on a GPU."""
    return [
        (op, entry.name, arch)
        for op in sorted(JOINED, key=lambda op: (family_of(op), op))  # a process plans the problems of few families
        for entry in tp.TABLE.rows(op)
        if entry.backend is tp.BackendKind.TRITON
        for arch in TARGETS
        if arch in entry.archs
    ]


@cache
def binaries(of: str, arch: str) -> tuple[Binary, ...]:
    """All binaries of a family."""
    found: dict[Source, Binary] = {}
    for op, entry, _ in (e for e in entries() if family_of(e[0]) == of and e[2] == arch):
        for build in JOINED[op](op, entry, TARGETS[arch]):
            for launch in build.launches:
                source = launch.source()
                binary = found.setdefault(source, Binary(source, arch, build.desc))
                has, lacks = build.asks(source.name)
                binary.may_spill &= build.may_spill
                binary.has.update(has)
                binary.lacks.update(lacks)
                binary.entries.add((op, entry))
                user, g = (op, entry, str(getattr(build.desc, "element", ""))), build.guarantee
                binary.users.add(user)
                binary.any_order &= g is not None and g.order_invariant
                if g is not None and g.deterministic:
                    binary.deterministic |= bool(FLOATING.search(binary.element))
                elif g is not None and g.duplicates is tp.Duplicates.SUM:
                    binary.unordered.add(user)
    return tuple(found.values())


Size = Literal["few", "cover", "all"]


@cache
def _picked(of: str, size: Size) -> tuple[Binary, ...]:
    every = [b for arch in TARGETS for b in binaries(of, arch)]
    if size != "all":
        # Of those that show as much, the one that compiles fastest; of equal ones for either architecture, either.
        every.sort(key=lambda b: (b.work, (crc32(b.source.name.encode()) & 1) != (b.arch == "sm90a")))
        facets = [b.facets(size == "cover") for b in every]
        for own, extreme in zip(facets, extremes(every if size == "cover" else ()), strict=False):
            own |= extreme
        every = [every[i] for i in cover(facets)]
    return tuple(every)


def extremes(every: Sequence[Binary]) -> list[set[Hashable]]:
    """For each binary the classes in which it is among the largest, with its sizes."""
    sizes: defaultdict[Hashable, set[frozenset[tuple[str, float]]]] = defaultdict(set)
    own = [[(c, frozenset(of.items())) for c, of in b.extremes()] if not b.may_spill else [] for b in every]
    for c, of in chain.from_iterable(own):
        sizes[c].add(of)
    largest = {(c, of) for c, found in sizes.items() for of in found if not any(_exceeds(o, of) for o in found)}
    return [largest.intersection(classes) for classes in own]


def _exceeds(a: frozenset[tuple[str, float]], b: frozenset[tuple[str, float]]) -> bool:
    """Whether a tile is larger along some axis, and smaller along none. (Constants of 1 are no sizes.)"""
    along = dict(a)
    return a != b and all(along.get(n, 1) >= size for n, size in b)


def picked(of: str, arch: str, size: Size) -> tuple[Binary, ...]:
    """Those binaries of a family that are built for an architecture."""
    return tuple(b for b in _picked(of, size) if b.arch == arch)


def chosen(op: str, entry: str, arch: str, size: Size) -> list[Binary]:
    """What is built for an entry: binaries that no entry before it launches, or one that it shares."""
    shared = [b for b in picked(family_of(op), arch, size) if (op, entry) in b.entries]
    return [b for b in shared if min(b.entries) == (op, entry)] or shared[:1]


def cover(facets: Sequence[set[Hashable]]) -> list[int]:
    """Few indices whose sets have all elements: again and again the one with most of what is left, first of equals.

    An element counts the more, the fewer sets have it: those without alternatives are taken first, and bring much of
    what others would be taken for. Of the compile matrix this finds within 1 % of as few as there are.
    """
    # Integers, so that a sum does not depend on a set's order: each process of a run must choose the same.
    weights = {x: 2**40 // count for x, count in Counter(chain.from_iterable(facets)).items()}
    left = set(weights)
    heap = [(-sum(weights[x] for x in own), i) for i, own in enumerate(facets)]
    heapify(heap)
    found = []
    while left:
        most, i = heap[0]
        gain = sum(weights[x] for x in facets[i] & left)
        if gain and gain < -most:
            heapreplace(heap, (-gain, i))  # some of its facets have been shown since
            continue
        heappop(heap)
        if gain:
            found.append(i)
            left -= facets[i]
    return found


def planned(
    op: str,
    entry: str,
    target: tp.Target,
    problems: Iterable[tp.Descriptor] = (),
    asks: Callable[[Any, str, str], Patterns] = lambda desc, entry, name: ((), ()),
    proofs_spill: bool = True,
) -> Iterator[Build]:
    """What is built of ``problems``, and of those of the proofs, in which registers may spill if ``proofs_spill``."""
    proofs = dict.fromkeys(proved(op, entry))
    for desc in (*problems, *proofs):
        if plan := pinned(desc, entry, target):
            may_spill = proofs_spill and desc in proofs
            yield Build(desc, plan.launches, partial(asks, desc, entry), plan.precision_guarantee(), may_spill)


# Last, as they import what stands above.
for _module in sorted(Path(__file__).parent.glob("[!_]*.py")):
    importlib.import_module(f"matrix.{_module.stem}")
JOINED = {**dict.fromkeys(FAMILIES, partial(planned, proofs_spill=False)), **JOINED}
