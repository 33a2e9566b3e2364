"""Launches as data: which kernel, over which grid, with which arguments, before any tensor exists.

A row of the kernel table describes its work once, from descriptor and target alone; the compiler, the launcher, the
interpreter and the tests all read that one description.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    """Address of an operand (or of one tensor of a list), read as ``element``. None where an optional is absent."""

    operand: str
    element: ElementKind
    alignment: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Address within the workspace, ``offset`` bytes from its start; or, if ``stored``, within prepared indices."""

    offset: int
    element: ElementKind
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Int:
    """An integer known when planning. ``divisibility`` (a power of two) is compiled in, the value is not."""

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
    """The stride of an operand's axis, in elements, read off the tensor at run time.

    ``divisibility`` (a power of two), as its layout promises it, is compiled in.
    """

    operand: str
    axis: int
    item: int | None = None
    divisibility: int = 1


@dataclass(frozen=True, slots=True)
class Scalar:
    """A host scalar among the Args, passed as ``element``; ``default`` where it is None."""

    operand: str
    element: ElementKind
    default: float | int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor of a whole operand, made on the host, for blocks of shape ``block``.

    The kernel sees Triton's tensor descriptor. The operand must be promised 16-byte aligned, with a unit-stride last
    axis and other strides that are multiples of 16 bytes; or, if ``transposed``, its transpose must, which is then what
    the kernel sees. ``shared`` is Gluon's layout of a block in shared memory; None in Triton's own language.
    """

    operand: str
    element: ElementKind
    block: tuple[int, ...]
    transposed: bool = False
    shared: Any = None


#: One kernel argument; tuples become Triton tuples.
Arg = Ptr | Scratch | Int | Float | Stride | Scalar | TensorMap | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What one binary is compiled from: equal sources share it, process-wide."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    #: By name; by path, where an absent argument stands within a tuple.
    constexprs: tuple[tuple[str | tuple[int, ...], Any], ...]
    attrs: tuple[tuple[tuple[int, ...], int], ...]
    num_warps: int
    num_stages: int
    overlaps: bool = False
    max_registers: int | None = None

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. ``grid`` is one-dimensional: products of grid extents overflow in Triton's launcher.

    ``overlaps``: it may begin while the launch ahead of it still runs (programmatic dependent launch); the kernel waits
    for that one's end before it touches memory.
    ``max_registers``: of a thread. With fewer, more programs are resident; where nothing is said, ptxas may spill a few
    to fit one more.
    """

    kernel: Any
    grid: int
    args: Mapping[str, Arg]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    overlaps: bool = False
    max_registers: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.grid < 2**31:
            raise ValueError(f"grid of {self.grid} programs; CUDA takes 1 to 2**31 - 1")

    def source(self) -> Source:
        """The part that decides the binary: types and promises, not values."""
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
        )


def overlapping(launches: Iterable[Launch], target: Target) -> tuple[Launch, ...]:
    """``launches`` for ``target``: kernels in Triton's language are told, by OVERLAPS, whether they must wait for the
    launch ahead, as on Hopper alone they may."""
    found = []
    for launch in launches:
        if "OVERLAPS" in launch.kernel.arg_names:
            overlaps = launch.overlaps and target.arch is ArchSku.SM90A
            launch = replace(launch, overlaps=overlaps, constexprs={**launch.constexprs, "OVERLAPS": overlaps})
        found.append(launch)
    return tuple(found)


def _type(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple(_type(a) for a in arg)
    if isinstance(arg, (Ptr, Scratch)):
        return "*" + TRITON_TYPE[arg.element]
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
    """Where None stands within a tuple."""
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
    # Scratch offsets are multiples of 16 within a workspace of at least that alignment.
    divisibility = {Ptr: "alignment", Int: "divisibility", Stride: "divisibility"}.get(type(arg))
    value = 16 if isinstance(arg, Scratch) else min(getattr(arg, divisibility), 16) if divisibility else 1
    if value > 1:
        out.append((path, value))


def power_of_two_in(value: int, limit: int = 16) -> int:
    """The largest power of two, at most ``limit``, that divides ``value``."""
    return min(value & -value, limit) if value else limit
