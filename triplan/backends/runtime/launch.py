"""Launches as data: which kernel, over which grid, with which arguments, before any tensor exists.

An entry of the kernel table describes its launches once, from descriptor and target alone. The compiler, the launcher,
the interpreter and the tests all read that one description.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from triplan.errors import InvalidProblem, Unsupported
from triplan.sku import ArchSku, ElementKind, Target

#: Triton's names for pointer and scalar types.
TRITON_TYPE = {
    ElementKind.F16: "fp16",
    ElementKind.BF16: "bf16",
    ElementKind.F32: "fp32",
    ElementKind.F64: "fp64",
    ElementKind.I8: "i8",
    ElementKind.I16: "i16",
    ElementKind.I32: "i32",
    ElementKind.I64: "i64",
    ElementKind.U8: "u8",
    ElementKind.FP8E4M3: "fp8e4nv",
    ElementKind.FP8E5M2: "fp8e5",
}


@dataclass(frozen=True, slots=True)
class Ptr:
    """Address of an operand (or of tensor ``item`` of a list), read as ``element``. None if the operand is absent."""

    operand: str
    element: ElementKind
    alignment: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Address in the workspace, ``offset`` bytes from its start; in the storage of prepared indices if ``stored``."""

    offset: int
    element: ElementKind
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Counter:
    """Address of an i32 of the device's own, by which programs of one launch meet; see ``runtime/counters.py``.

    For when something is done, never for what: runs that overlap may share it.
    """


@dataclass(frozen=True, slots=True)
class Int:
    """An integer known when planning. ``divisibility`` (a power of two) is compiled in, the value is not.

    ``wide``: passed as i64 instead of i32.
    """

    value: int
    wide: bool = False
    divisibility: int = 1


@dataclass(frozen=True, slots=True)
class Float:
    """A number known when planning, passed as ``element``; its value is not compiled in."""

    value: float
    element: ElementKind


@dataclass(frozen=True, slots=True)
class Stride:
    """The stride of an operand's axis, in elements, read from the tensor at run time.

    ``divisibility`` (a power of two), which the operand's layout promises, is compiled in.
    """

    operand: str
    axis: int
    item: int | None = None
    divisibility: int = 1


@dataclass(frozen=True, slots=True)
class Scalar:
    """A host scalar of the Args, passed as ``element``; ``default`` if it is None."""

    operand: str
    element: ElementKind
    default: float | int


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor in the workspace: bytes from its start to the tensor, shape, and strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor of a whole operand, made on the host, for blocks of shape ``block``.

    The kernel sees Triton's tensor descriptor. The operand's layout must promise 16-byte alignment, unit stride along
    the last axis and other strides that are multiples of 16 bytes. If ``transposed``, the kernel sees the operand's
    transpose, which must have these properties instead. ``view``: it sees these axes of the operand instead, in this
    order, each as (axis, first, stop, step): from ``first`` on every ``step``-th position before ``stop`` (None: all).
    ``shared``: Gluon's layout of a block in shared memory; None in Triton's own language. ``copy``: it is a map of this
    copy of the operand. ``lies``: the operand has this shape and these strides instead of its own, as where its layout
    promises that several axes are one; ``view`` then names axes of that shape.
    """

    operand: str
    element: ElementKind
    block: tuple[int, ...]
    transposed: bool = False
    shared: Any = None
    view: tuple[tuple[int, int, int | None, int], ...] | None = None
    copy: Copy | None = None
    lies: tuple[tuple[int, ...], tuple[int, ...]] | None = None


#: One kernel argument. A tuple becomes a Triton tuple.
Arg = Ptr | Scratch | Counter | Int | Float | Stride | Scalar | TensorMap | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What one binary is compiled from. Equal sources share a binary, process-wide."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    #: By name; for an absent argument inside a tuple, by its path.
    constexprs: tuple[tuple[str | tuple[int, ...], Any], ...]
    attrs: tuple[tuple[tuple[int, ...], int], ...]
    num_warps: int
    num_stages: int
    overlaps: bool = False
    max_registers: int | None = None
    fuses: bool = True

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Raises ``InvalidProblem`` unless ``args`` and ``constexprs`` together name each argument of the kernel once.

    Attributes:
        grid: number of programs. One-dimensional: products of grid extents overflow in Triton's launcher.
        overlaps: it may begin while the previous launch still runs (programmatic dependent launch). The kernel waits
            for the previous launch to end before it touches memory.
        max_registers: registers per thread that ptxas may use; None or 0: it decides, and may spill a few to raise
            occupancy by one program. A low limit raises occupancy, a limit of 255 prevents those spills (threads of
            more than eight warps get fewer: a block has 65,536).
        fuses: whether a product and a sum may be one instruction, which rounds once; otherwise both round.
    """

    kernel: Any
    grid: int
    args: Mapping[str, Arg]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    overlaps: bool = False
    max_registers: int | None = None
    fuses: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.grid < 2**31:
            raise Unsupported(f"{self.kernel.__name__}: a grid of {self.grid} programs; CUDA takes 1 to 2**31 - 1")
        known, constant = _parameters(self.kernel)
        given = (*self.args, *self.constexprs)
        if len(given) != len(known) or known != set(given) or not constant.isdisjoint(self.args):
            self._refuse_arguments(given, constant)

    def _refuse_arguments(self, given: tuple[str, ...], constant: frozenset[str]) -> None:
        known = self.kernel.arg_names
        faults = [
            *(f"it has no argument {a!r} (it has {', '.join(known)})" for a in given if a not in known),
            *(f"it gets no {a!r}" for a in known if a not in given and a != "OVERLAPS"),
            *(f"it gets {a!r} in args and in constexprs" for a in self.args if a in self.constexprs),
            *(f"{a!r} is a constexpr, but stands in args" for a in self.args if a in constant),
        ]
        if faults:
            raise InvalidProblem(f"launch of {self.kernel.__name__}: {'; '.join(faults)}")

    def source(self) -> Source:
        """The part that determines the binary: types and promised divisibilities, not values."""
        signature: list[tuple[str, Any]] = []
        constexprs: dict[str | tuple[int, ...], Any] = dict(self.constexprs.items())
        attrs: list[tuple[tuple[int, ...], int]] = []
        for position, name in enumerate(self.kernel.arg_names):
            if name in constexprs:
                signature.append((name, "constexpr"))
                continue
            arg = self.args[name]
            if arg is None:
                constexprs[name] = None
            elif isinstance(arg, tuple):
                constexprs.update(dict.fromkeys(_absent(arg, (position,))))
            signature.append((name, _type(arg)))
            _collect_attrs(arg, (position,), attrs)
        return Source(
            self.kernel,
            tuple(signature),
            tuple(sorted(constexprs.items(), key=lambda item: (isinstance(item[0], tuple), item[0]))),
            tuple(attrs),
            self.num_warps,
            self.num_stages,
            self.overlaps,
            self.max_registers,
            self.fuses,
        )


@cache
def _parameters(kernel: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a kernel's arguments, and those that are declared ``tl.constexpr`` (unknown in the interpreter)."""
    constants = (p.name for p in getattr(kernel, "params", ()) if p.is_constexpr)
    return frozenset(kernel.arg_names), frozenset(constants)


def overlapping(launches: Iterable[Launch], target: Target) -> tuple[Launch, ...]:
    """``launches`` for ``target``, with OVERLAPS set for the kernels in Triton's language that have this parameter.

    It says whether the kernel must wait for the previous launch. Only Hopper can overlap launches.
    """
    found = []
    for launch in launches:
        if "OVERLAPS" in launch.kernel.arg_names:
            overlaps = launch.overlaps and target.arch is ArchSku.SM90A
            launch = replace(launch, overlaps=overlaps, constexprs={**launch.constexprs, "OVERLAPS": overlaps})
        found.append(launch)
    return tuple(found)


def undeclared(launch: Launch, operands: Collection[str]) -> Iterator[tuple[str, str]]:
    """(argument of the kernel, operand) for each value that is read from an operand not among ``operands``."""
    for name, arg in launch.args.items():
        for leaf in _leaves(arg) if isinstance(arg, tuple) else (arg,):
            operand = getattr(leaf, "operand", None)
            if operand is not None and operand not in operands:
                yield name, operand


def _leaves(arg: tuple[Arg, ...]) -> Iterator[Arg]:
    for a in arg:
        yield from _leaves(a) if isinstance(a, tuple) else (a,)


def _type(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple(_type(a) for a in arg)
    if isinstance(arg, (Ptr, Scratch)):
        return "*" + TRITON_TYPE[arg.element]
    if isinstance(arg, Counter):
        return "*i32"
    if isinstance(arg, Int):
        return "i64" if arg.wide else "i32"
    if isinstance(arg, Stride):
        return "i64"
    if isinstance(arg, (Scalar, Float)):
        return TRITON_TYPE[arg.element]
    if isinstance(arg, TensorMap):
        block = f"{TRITON_TYPE[arg.element]}{list(arg.block)}".replace(" ", "")
        return f"tensordesc<{block}>" if arg.shared is None else f"tensordesc<{block},{arg.shared!r}>"
    return "constexpr"


def _absent(arg: tuple[Arg, ...], path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The paths of None inside a tuple."""
    for i, a in enumerate(arg):
        if a is None:
            yield (*path, i)
        elif isinstance(a, tuple):
            yield from _absent(a, (*path, i))


def _collect_attrs(arg: Arg, path: tuple[int, ...], out: list[tuple[tuple[int, ...], int]]) -> None:
    if isinstance(arg, tuple):
        for i, a in enumerate(arg):
            _collect_attrs(a, (*path, i), out)
        return
    # Scratch offsets are multiples of 16, in a workspace with at least that alignment.
    divisibility = {Ptr: "alignment", Int: "divisibility", Stride: "divisibility"}.get(type(arg))
    value = 16 if isinstance(arg, Scratch) else min(getattr(arg, divisibility), 16) if divisibility else 1
    if value > 1:
        out.append((path, value))


def power_of_two_in(value: int, limit: int = 16) -> int:
    """The largest power of two that divides ``value``, at most ``limit``."""
    return min(value & -value, limit) if value else limit
