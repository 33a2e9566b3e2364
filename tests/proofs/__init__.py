"""What the proofs of guarantees are made of: places to run, problems by op, and the claims of the kernel table.

A family of ops joins by ``@joins(op)`` over a function that builds a ``Problem``, in a module of this package. Its
kernels, and those that are added later, are then held to every word of their guarantees by ``tests/contracts``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from cases import pinned
from torch import Tensor

import triplan as tp
from triplan.sku import interpreting
from triplan.testing.check import listed_by_turns
from triplan.testing.values import draw as draw_values

#: Where an entry runs: references on the CPU, Triton kernels in the interpreter and on the GPU.
MARKS: dict[str, Any] = {"cpu": (), "interpret": pytest.mark.interpret, "gpu": pytest.mark.gpu}
#: Contributions of a problem: a few in the interpreter, where each step costs milliseconds; elsewhere so many that a
#: segment passes every block and every kernel's bound on what it sums in one piece.
COUNT = {"cpu": 600, "interpret": 16, "gpu": 5000}
#: Contributions of problems from whose plans tests are collected.
SMALL = 24
RUNS = {"cpu": 3, "interpret": 2, "gpu": 50}
#: The interpreter is slow; bits of other elements pass through the same lines of the kernels.
INTERPRETED = frozenset({"f32", "bf16", "i64"})

#: What a problem's operands hold. ``cancelling``: wide exponents, and an opposite to each contribution, so that exact
#: sums vanish and what remains is the rounding of one order of adding: any other order shows, in f16 results as well.
#: The others are for tolerances: exponents over the whole range; subnormals; values near the largest; one value.
Kind = Literal["cancelling", "wide", "subnormal", "huge", "equal"]
ADVERSARIAL: tuple[Kind, ...] = ("cancelling", "huge", "wide", "subnormal", "equal")
KINDS = {"cpu": ADVERSARIAL, "interpret": ADVERSARIAL[:1], "gpu": ADVERSARIAL}

Values = Mapping[str, Any]
Outputs = Mapping[str, Tensor]
Pick = Callable[[Outputs], Tensor]
Holds = Callable[[tp.PrecisionGuarantee], bool]


class Problem(ABC):
    """A descriptor and CPU values for its inputs and in-outs, by operand.

    Subclasses say which bits must not change when the batch or the order of contributions does.
    """

    desc: tp.Descriptor
    values: Values

    @cached_property
    def first(self) -> dict[str, Outputs]:
        """What the first run of each plan wrote."""
        return {}

    @abstractmethod
    def parts(self) -> Iterator[Variant]:
        """Less of the batch, at other places, for plans of other sizes; one part is a row or segment alone."""

    @abstractmethod
    def reordered(self) -> Variant:
        """The same contributions (where nothing meets: the same batch) in another order."""


class Drawn(Problem):
    """A problem whose values are drawn when they are first asked for: many problems are only planned or compiled."""

    def __init__(self, desc: tp.Descriptor, draw: Callable[[], Values]) -> None:
        self.desc, self._draw = desc, draw

    @cached_property
    def values(self) -> Values:  # type: ignore[override]
        return self._draw()


@dataclass(frozen=True)
class Variant:
    """Another problem: ``own`` of its outputs must have the bits of ``whole`` of the original's."""

    problem: Problem
    own: Pick
    whole: Pick


@dataclass(frozen=True)
class Family:
    """How problems of an op are built: ``make(n, element, kind, **option)`` for each of ``options``."""

    make: Callable[..., Problem]
    options: tuple[dict[str, Any], ...]


FAMILIES: dict[str, Family] = {}


def joins(op: str, *options: dict[str, Any]) -> Callable[[Callable[..., Problem]], Callable[..., Problem]]:
    """Register how problems of ``op`` are built; ``options`` are descriptor fields that its entries tell apart."""

    def register(make: Callable[..., Problem]) -> Callable[..., Problem]:
        FAMILIES[op] = Family(make, options or ({},))
        return make

    return register


# --- claims ---


def target(where: str) -> tp.Target:
    """What entries run on; without a GPU an H200 stands for it, so that tests are collected alike everywhere."""
    if where == "gpu":
        return tp.Target.current() if torch.cuda.is_available() else tp.Target.preset("h200")
    return tp.Target.cpu(interpret=where == "interpret")


def cases(
    where: str, op: str, entry: tp.KernelRow, n: int, kind: Kind = "cancelling"
) -> Iterator[tuple[Problem, tp.Plan[Any, Any]]]:
    """A problem and its plan for each element and option that the entry takes: ``n`` contributions, or a tenth of that
    where the entry is for small problems, or 48 (wgmma adds up 16 products at once, in no order), 8 or 2; 512 where it
    cuts what is longer. Elements and options take turns in the interpreter, which is slow, and where references, which
    have met every pair of them with cancelling values, meet others."""
    fewer = [e for e in entry.elements if where == "interpret" and e in INTERPRETED]
    elements, options = sorted(fewer or entry.elements), range(len(FAMILIES[op].options))
    pairs = list(product(elements, options))
    if where == "interpret" or (where == "cpu" and kind != "cancelling"):
        turns = range(max(len(elements), len(options)))
        pairs = [(elements[i % len(elements)], options[i % len(options)]) for i in turns]
    for element, option in pairs:
        for count in (n, max(n // 20, 4) * 2, 48, 8, 2, 512):
            made = _small if n == SMALL else _shared if kind == "cancelling" else _made
            problem = made(op, count, element, kind, option)
            plan = pinned(problem.desc, entry.name, target(where))
            if plan is not None:
                yield problem, plan
                break


def _made(op: str, count: int, element: tp.ElementKind, kind: Kind, option: int) -> Problem:
    return FAMILIES[op].make(count, element, kind, **FAMILIES[op].options[option])


#: Problems that are only planned, of each entry and place: they and what is known of them are shared.
_small = cache(_made)


@lru_cache(maxsize=1)
def _latest(op: str) -> Callable[..., Problem]:
    return cache(partial(_made, op))


def _shared(op: str, *of: Any) -> Problem:
    """``_made``, with the values and first runs of the other tests of an op, which come one after the other."""
    return _latest(op)(*of)


@cache
def guarantees_of(where: str, op: str, entry: tp.KernelRow) -> tuple[tp.PrecisionGuarantee, ...]:
    """Those of the plans of small problems."""
    return tuple(plan.precision_guarantee() for _, plan in cases(where, op, entry, SMALL))


def places(entry: tp.KernelRow) -> tuple[str, ...]:
    if entry.backend is tp.BackendKind.REFERENCE:
        return ("cpu",)
    return ("interpret", "gpu") if entry.interpretable else ("gpu",)


def claims(holds: Holds, only: tuple[str, ...] = tuple(MARKS)) -> list[Any]:
    """(where, op, entry) as parameters: every entry of the kernel table for one of whose elements ``holds`` is true.

    A process that interprets runs no others, and does not plan their problems.
    """
    if interpreting():
        only = tuple(where for where in only if where == "interpret")
    return [
        pytest.param(where, op, entry.name, marks=MARKS[where], id=f"{where}-{op}-{entry.name}")
        for op in sorted(FAMILIES)
        for entry in tp.TABLE.rows(op)
        for where in places(entry)
        if where in only and any(map(holds, guarantees_of(where, op, entry)))
    ]


def claimed(
    where: str, op: str, entry: str, holds: Holds, kind: Kind = "cancelling"
) -> Iterator[tuple[Problem, tp.Plan[Any, Any]]]:
    """The problems of an entry, and their plans, whose guarantee ``holds``; fails if there is none."""
    (found,) = (e for e in tp.TABLE.rows(op) if e.name == entry)
    held = 0
    for problem, plan in cases(where, op, found, COUNT[where], kind):
        if holds(plan.precision_guarantee()):
            yield problem, plan
            held += 1
    assert held > 0


# --- running ---


def bits(t: Tensor) -> Tensor:
    # (A view asks for a last stride of 1, even where that axis has one element.)
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def digest_bytes(outputs: Outputs) -> bytes:
    return b"".join(bits(outputs[name]).numpy().tobytes() for name in sorted(outputs))


class _Busy:
    """A second stream that keeps the GPU at other work, so that blocks of what is tested start at other times."""

    def __init__(self) -> None:
        self.stream, self.a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.a @ self.a


def repeated(plan: tp.Plan[Any, Any], values: Values, runs: range) -> Iterator[dict[str, Tensor]]:
    """``runs`` on the same inputs: outputs where they are, good until the next.

    Outputs and workspace hold other rubbish every time; on a GPU other work runs beside all but run 0.
    """
    device = plan.target.device_type
    fields: dict[str, Any] = {}
    for o in plan.descriptor.operands():
        if o.kind == "host_scalar":
            fields[o.name] = values.get(o.name)
        elif o.kind == "tensor_list":
            fields[o.name] = [t.to(device, copy=True) for t in values[o.name]]
        elif o.role == "output":
            last = torch.channels_last if len(o.shape) == 4 and o.layout.unit_axis == 1 else torch.contiguous_format
            fields[o.name] = torch.empty(o.shape, dtype=o.element.torch, device=device, memory_format=last)
        else:
            fields[o.name] = values[o.name].to(device, copy=True)
    args, workspace = plan.args_type(**fields), tp.Workspace.allocate(plan)
    written = {o.name: fields[o.name] for o in plan.descriptor.operands() if o.is_written}
    start = {name: t.clone() for name, t in written.items() if name in values}
    busy = _Busy() if device == "cuda" and any(runs) else None
    for run in runs:
        workspace.tensor.fill_((0xA5, 0xFF, 0x00, 0x3C)[run % 4])
        for name, t in written.items():
            if name in start:
                t.copy_(start[name])
            else:
                dense = t if t.is_contiguous() else t.movedim(1, -1)
                bits(dense).fill_((0x5A, 0xFF, 0x01)[run % 3] if t.dtype is not torch.bool else run % 2)
        if busy is not None and run:
            busy()
        plan.run(listed_by_turns(plan, args, run), workspace)
        yield written


def run(plan: tp.Plan[Any, Any], values: Values) -> dict[str, Tensor]:
    """What one run writes, on the CPU."""
    (outputs,) = repeated(plan, values, range(1))
    return {name: t.cpu() for name, t in outputs.items()}


#: What ``first_run`` has found in the interpreter, by plan.
_FIRST: dict[str, Outputs] = {}


def first_run(plan: tp.Plan[Any, Any], problem: Problem) -> Outputs:
    """What one run of a problem of ``cases`` writes. On the CPU one run serves all tests."""
    if plan.target.device_type == "cuda":
        return run(plan, problem.values)
    # One kind of values is interpreted, so that the plan tells the problem.
    found = _FIRST if plan.target.interpret else problem.first
    if plan.key not in found:
        found[plan.key] = run(plan, problem.values)
    return found[plan.key]


def as_args(problem: Problem) -> Any:
    """The problem's values as an oracle reads them."""
    given = {o.name: problem.values.get(o.name) for o in problem.desc.operands()}
    return SimpleNamespace(**given)


def draw(shape: tuple[int, ...], element: tp.ElementKind, kind: Kind, terms: int, g: torch.Generator) -> Tensor:
    """CPU values of a kind, up to ``terms`` of which are summed. Cancelling is the business of the problem's make."""
    if not element.is_floating_point:
        high = 2 if element == "bool" else 2**31 - 1
        return torch.randint(0, high, shape, generator=g).to(element.torch)
    info = torch.finfo(element.torch)
    if kind == "wide":
        return draw_values(shape, element, "wide", terms, g)
    unit = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "subnormal":
        return (unit * info.smallest_normal / 2).to(element.torch)
    if kind == "huge":
        # Sums in f64 would leave the range of the oracle as well, which has no wider element.
        top = info.max / (4 * terms) if element == "f64" else info.max
        return ((unit.sign() * (0.25 + 0.7 * torch.rand(shape, generator=g, dtype=torch.float64))) * top).to(
            element.torch
        )
    if kind == "equal":
        return torch.full(shape, 0.1, dtype=torch.float64).to(element.torch)
    low, high = (-10, 9) if element == "f16" else (-20, 20)
    return (unit * 2.0 ** torch.randint(low, high, shape, generator=g)).to(element.torch)


def follows(desc: tp.Descriptor, values: Values) -> Values:
    """The inputs that follow from the others ``values``."""
    rules = tp.TABLE.reference(desc.op).checks
    return {} if rules.inputs is None else rules.inputs(desc, values)


# Last, as they import what stands above.
for _module in sorted(Path(__file__).parent.glob("[!_]*.py")):
    importlib.import_module(f"proofs.{_module.stem}")
