"""What both entries of reductions share: what each op accumulates, how its operand lies, tiles and guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Float, Int, Ptr, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import I32_LIMIT, RANKS, TL, ceil_power, divisor, layout
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.strides import Along, known_strides, row_tile, stride_arg
from triplan.backends.triton.reductions import shared_kernels as do
from triplan.descriptors import ExtremumDescriptor, Operand, ReduceDescriptor
from triplan.descriptors.reductions import OF_FLOATS, ReductionProblem
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

BOOL, I8, I32, I64, F32 = (ElementKind(name) for name in ("bool", "i8", "i32", "i64", "f32"))
FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "bool")
#: Triton's types of what is computed and of results.
TYPES = {**TL, ElementKind.F16: tl.float16, ElementKind.BF16: tl.bfloat16, ElementKind.U8: tl.uint8, BOOL: tl.int8}
OPS = (*ReduceDescriptor.ops(), *ExtremumDescriptor.ops())
#: Without fused products and sums (``fuses=False``): two lanes that merge the same accumulators must round alike, as
#: both write the result to one address of shared memory.
WARPS = 4
#: Bytes of x that a program holds at a time, for each of its threads; half of that with two accumulators. On an H200,
#: of 32, 64 and 128 in 2 to 16 warps, the best or within 3 % of it for rows and columns of 8192 to 16384 elements; the
#: second for columns of which not every row begins at a multiple of 16 bytes.
THREAD_BYTES, ODD_THREAD_BYTES = 32, 64
#: Tiles that one program reduces of a line at most, and programs that share a line from which on they take more.
CHUNK_TILES, MOST_CHUNKS = 8, 4096
#: Bytes of neighbouring lines that a program reduces, where x is contiguous across them: where they begin at multiples
#: of 16 bytes, where they do not, and of few elements each (then what is reduced of a line is in one thread). On an
#: H200, of 256 to 4096 for 8192 x 8192 and about 16384 x 16384.
ACROSS_BYTES, ODD_ACROSS_BYTES, FEW_ACROSS_BYTES = 256, 1024, 2048
#: Elements of a line up to which they are few. Untuned.
FEW = 32
#: Neighbouring lines from which on they are reduced side by side. Untuned.
FEWEST_ACROSS = 8
#: Lines of a program at most, where each has an address of its own: with 1024 of them registers spill.
MOST_LINES = 512
#: Programs that keep an H200 busy; with fewer, lines that lie side by side are divided. Untuned.
BUSY = 1024
#: Blocks of a chunk at least, where lines lie side by side. Untuned.
FEWEST_BLOCKS = 4


class Kind(NamedTuple):
    """What the kernels accumulate of each element, what of that, and what they make of the result."""

    accumulates: tl.constexpr
    maps: tl.constexpr = do.PLAIN
    finish: tl.constexpr = do.KEEP


KINDS = {
    "sum": Kind(do.SUM),
    "mean": Kind(do.SUM, finish=do.MEAN),
    "prod": Kind(do.PRODUCT),
    "amax": Kind(do.MAX),
    "amin": Kind(do.MIN),
    "max": Kind(do.ARGMAX),
    "min": Kind(do.ARGMIN),
    "argmax": Kind(do.ARGMAX, finish=do.POSITION),
    "argmin": Kind(do.ARGMIN, finish=do.POSITION),
    "any": Kind(do.MAX, do.NONZERO),
    "all": Kind(do.MIN, do.NONZERO),
    "count_nonzero": Kind(do.SUM, do.NONZERO),
    "var": Kind(do.MOMENTS, finish=do.VARIANCE),
    "std": Kind(do.MOMENTS, finish=do.DEVIATION),
    "logsumexp": Kind(do.EXPONENTIALS, finish=do.LOGARITHM),
}
#: vector_norm, by its order.
NORMS = {1: Kind(do.SUM, do.ABSOLUTE), 2: Kind(do.SUM, do.SQUARE, do.ROOT)}
OTHER_NORM = Kind(do.SUM, do.POWER, do.INVERSE_POWER)
#: Kinds with two accumulators.
PAIRS = (do.ARGMAX, do.ARGMIN, do.MOMENTS, do.EXPONENTIALS)
POSITIONS = (do.ARGMAX, do.ARGMIN)


class Dim(NamedTuple):
    """A dimension: its extent and its strides in x and, of a kept one, in the results."""

    size: int
    x: int | Along
    out: int | Along = 0
    indices: int | Along = 0


class Plan:
    """How one problem is reduced.

    Attributes:
        kept, reduced: dimensions, innermost last; adjacent ones are merged where strides allow it.
        across: the dimension along which x is contiguous, if that is a kept one; it is not among ``kept`` then.
        lanes, n: results, and elements of each.
        unit: whether the elements of a line are contiguous.
        tile: lines and elements of them that a program holds.
        chunk, chunks: elements that a program reduces of a line at most, and how many programs share a line.
    """

    def __init__(self, desc: ReductionProblem) -> None:
        self.desc = desc
        self.kind = NORMS.get(int(desc.order), OTHER_NORM) if desc.op == "vector_norm" else KINDS[desc.op]
        if desc.op == "vector_norm" and desc.order != int(desc.order):
            self.kind = OTHER_NORM
        self.compute = self._compute()
        x = desc.operand("x")
        of_x = known_strides(x, len(x.shape))
        results = [known_strides(o, len(o.shape)) for o in desc.operands()[1:]]
        of_results = dict(zip(desc.kept_axes, zip(*results, strict=True), strict=True))
        self.reduced = _merged([Dim(x.shape[a], of_x[a]) for a in desc.reduce_axes if x.shape[a] != 1])
        kept = _merged([Dim(x.shape[a], of_x[a], *of_results[a]) for a in desc.kept_axes if x.shape[a] != 1])
        self.lanes, self.n = math.prod(d.size for d in kept), desc.reduced
        self.unit = len(self.reduced) == 1 and self.reduced[0].x == 1
        beside = [d for d in kept if d.x == 1 and d.size >= FEWEST_ACROSS]
        self.across = beside[0] if beside and not self.unit else None
        self.kept = [d for d in kept if d is not self.across]
        if self.across is None and not self.kept and self.unit:
            # A lone line has the divisibility that neighbours would have: it decides a load's width.
            self.kept = [Dim(1, self._distance(), 1, int(desc.op in ("max", "min")))]
        self.tile = self._tile()
        self.chunk, self.chunks = self._chunks()

    def _distance(self) -> int:
        """A number that divides the distance between contiguous lines, in elements."""
        x = self.desc.operand("x")
        return self.n if x.layout.packed else x.layout.stride_multiple

    def _compute(self) -> ElementKind:
        desc, element = self.desc, self.desc.element
        if element.is_floating_point and self.kind.maps is not do.NONZERO:
            return ElementKind.F64 if ElementKind.F64 in (element, desc.result) else F32
        if self.kind.accumulates in (do.SUM, do.PRODUCT) or (element is I64 and self.kind.maps is not do.NONZERO):
            return I64
        return I32

    def _tile(self) -> Tile:
        x = self.desc.operand("x")
        distances = [x.layout.stride_multiple if isinstance(d.x, Along) else d.x for d in (*self.kept, *self.reduced)]
        odd = self.across is not None and any(d * x.element.itemsize % 16 for d in distances) and self.n > FEW
        size = 32 * WARPS * (ODD_THREAD_BYTES if odd else THREAD_BYTES) // max(x.element.itemsize, 2)
        if self.kind.accumulates in PAIRS or self.compute.itemsize > 4:
            size = max(size // 2, 32 * WARPS * 16 // x.element.itemsize)  # a load of each thread
        if self.across is None:
            block = min(ceil_power(max(self.n, 1)), size)
            return Tile(min(size // block, MOST_LINES), block, WARPS)
        most = (FEW_ACROSS_BYTES if self.n <= FEW else ODD_ACROSS_BYTES if odd else ACROSS_BYTES) // x.element.itemsize
        _, rows = row_tile(most, most, self.across.size)
        return Tile(rows, min(ceil_power(max(self.n, 1)), max(size // rows, 1)), WARPS)

    def _chunks(self) -> tuple[int, int]:
        chunk = self.tile.block * max(CHUNK_TILES, -(-self.n // (self.tile.block * MOST_CHUNKS)))
        if self.across is not None:
            most = max(self.n // (self.tile.block * FEWEST_BLOCKS), 1)
            wanted = min(max(BUSY // max(self.groups(), 1), 1), most)
            chunk = -(-self.n // (wanted * self.tile.block)) * self.tile.block
        elif self.tile.rows > 1:
            chunk = self.tile.block
        return max(chunk, 1), max(-(-self.n // max(chunk, 1)), 1)

    def groups(self) -> int:
        """Programs, for each chunk."""
        if self.across is None:
            return -(-self.lanes // self.tile.rows)
        return -(-self.across.size // self.tile.rows) * (self.lanes // self.across.size)

    # --- arguments ---

    @property
    def wide(self) -> bool:
        return max(self.lanes, self.n) >= I32_LIMIT

    def _dims(self, dims: list[Dim]) -> tuple[Arg, ...]:
        """Innermost first, padded to a length of RANKS."""
        found = [*reversed(dims)]
        width = next(r for r in RANKS if r >= len(found))
        found += [Dim(1, 0)] * (width - len(found))
        return tuple((divisor(d.size, self.wide), *self._strides(d)) for d in found)

    def _strides(self, d: Dim) -> tuple[Arg, ...]:
        """In x, out and indices."""
        x, out, *indices = self.desc.operands()
        strides = zip((x, out, indices[0] if indices else out), (d.x, d.out, d.indices), strict=True)
        return tuple(stride_arg(o, s) for o, s in strides)

    def pointer(self, name: str) -> Ptr | None:
        o = next((o for o in self.desc.operands() if o.name == name), None)
        return None if o is None else Ptr(name, I8 if o.element is BOOL else o.element, o.alignment)

    def arguments(self) -> dict[str, Arg]:
        """What both kernels take; ``kept`` has every kept dimension for the second."""
        across = [] if self.across is None else [self.across]
        along = None
        if self.across is not None:
            size = Int(self.across.size, self.wide, power_of_two_in(self.across.size))
            along = (size, *self._strides(self.across))
        divisible = power_of_two_in(self.n) if self.unit else 1
        number = F32 if self.compute is not ElementKind.F64 else self.compute
        return {
            "out": self.pointer("out"),
            "indices": self.pointer("indices"),
            "kept": self._dims(self.kept),
            "all_kept": self._dims([*self.kept, *across]),
            "along": along,
            "reduced": self._dims(self.reduced),
            "lanes": Int(self.lanes, self.wide),
            "outer": Int(self.lanes // max(self.across.size, 1) if self.across else self.lanes, self.wide),
            "n": Int(self.n, self.wide, divisible),
            "chunk": Int(self.chunk, self.wide, power_of_two_in(self.chunk)),
            "chunks": Int(self.chunks),
            "correction": Float(self.desc.correction, number),
            "order": Float(self.desc.order, number),
        }

    def constants(self, tile: Tile) -> dict[str, Any]:
        kind = self.kind.accumulates
        identity: float | int = {do.SUM: 0, do.PRODUCT: 1, do.MOMENTS: 0}.get(kind, 0)
        if kind in (do.MAX, do.ARGMAX, do.MIN, do.ARGMIN, do.EXPONENTIALS):
            low = kind in (do.MAX, do.ARGMAX, do.EXPONENTIALS)
            if self.compute.is_floating_point:
                identity = -math.inf if low else math.inf
            elif self.kind.maps is do.NONZERO:
                identity = 0 if low else 1
            else:
                bits = 8 * self.compute.itemsize - 1
                identity = -(2**bits) if low else 2**bits - 1
        return {
            "KIND": kind.value,
            "MAP": self.kind.maps.value,
            "FINISH": self.kind.finish.value,
            "IDENTITY": identity,
            "COMPUTE": TYPES[self.compute],
            "RESULT": TYPES[self.desc.result],
            "ACROSS": self.across is not None,
            "UNIT": self.unit,
            "VECTOR": self._vector(tile.block),
            "POINT_TYPE": tl.int64 if self.wide else tl.int32,
            "ROWS": tile.rows,
            "BLOCK": tile.block,
        }

    def _vector(self, block: int) -> int:
        """Elements of a load where lines have several dimensions, the innermost contiguous."""
        *outer, inner = self.reduced or [Dim(1, 0)]
        if self.unit or self.across is not None or inner.x != 1:
            return 1
        x = self.desc.operand("x")
        multiples = [x.layout.stride_multiple if isinstance(d.x, Along) else power_of_two_in(d.x) for d in outer]
        return min(16 // x.element.itemsize, block, power_of_two_in(inner.size), *multiples)

    # --- what is promised ---

    def invariant(self) -> bool:
        """Batch-invariant: the tile, and the width of loads, follow from the length and layout of a line alone."""
        return self.unit and not self.desc.operand("x").layout.zero_axes

    def merging(self) -> Tile:
        """Lines and chunks of them that a program of the second launch merges at a time."""
        size = 32 * WARPS * THREAD_BYTES // max(self.compute.itemsize, 4)
        block = min(ceil_power(self.chunks), size)
        return Tile(size // block, block, WARPS)

    def depth(self) -> float:
        """Roundings on the path of a term of a sum."""
        within = self.tile.additions(min(self.chunk, max(self.n, 1)))
        return within + (self.merging().additions(self.chunks) + 2 if self.chunks > 1 else 0)

    def numerics(self, entry: str) -> str | None:
        if not self.invariant():
            return None
        desc = self.desc
        promised = f"{min(desc.operand('x').alignment, 16)}.{min(power_of_two_in(self._distance()), 16)}"
        found = f"reductions.{entry}.{desc.op}.{desc.element}.{desc.result}.v2"
        found += f".{self.tile.text}.{self.chunk}.{promised}"
        if desc.op == "vector_norm":
            found += f".{desc.order!r}"
        return f"{found}.{desc.correction!r}" if desc.op in ("var", "std") else found

    def us(self) -> float:
        return LAUNCH_US + self.desc.operand("x").nbytes / BYTES_PER_US


def _merged(dims: list[Dim]) -> list[Dim]:
    found: list[Dim] = []
    for d in dims:
        outer = found[-1] if found else None
        if outer is not None and all(
            isinstance(s, int) and isinstance(t, int) and s == t * d.size for s, t in zip(outer[1:], d[1:], strict=True)
        ):
            found[-1] = Dim(outer.size * d.size, *d[1:])
        else:
            found.append(d)
    return found


plan_of: Callable[[Any], Plan] = fact(Plan)


def additions(desc: ReductionProblem) -> float:
    return plan_of(desc).depth()


def guarantee(desc: ReductionProblem) -> Mapping[str, PrecisionGuarantee]:
    """One rounding for each addition on the path of a term, and some for what is done before and after.

    Of a variance (Chan, Golub and LeVeque, 1983): the mean of each accumulator is rounded four times an element, the
    squares are relative to those. Of a logsumexp: each step rescales a sum of exponentials, whose arguments are exact
    to a rounding.
    """
    found = plan_of(desc)
    out, n, depth = desc.result, desc.reduced, found.depth()
    batch = found.invariant()
    if desc.op not in ("sum", "prod", *OF_FLOATS) or not out.is_floating_point:
        return {o.name: exactly(desc, o, batch) for o in desc.operands() if o.is_written}
    compute, lost, power = found.compute, 0.0, 0.0
    if desc.order not in (1, 2):
        # A power is as many roundoffs off as its logarithm has units: at most the largest exponent of 2, and back.
        power = (256 if compute is F32 else 2200) * (1 + 1 / desc.order)
    relative, per_term = {
        "prod": (n, 1),
        "var": (depth + 8, 8 * depth + 32),
        "std": (depth + 8, 8 * depth + 32),
        "vector_norm": (8 + (depth + 8) / desc.order + power, 0),
        "logsumexp": (2, 6 * depth + 16),
    }.get(desc.op, (3, depth))
    if desc.op == "vector_norm":
        lost = (max(n, 1) * bounds.smallest_normal(compute)) ** (1 / desc.order)
    if desc.op == "std":
        # Squares that underflow, and a variance that the root flushes.
        lost = math.sqrt(
            bounds.smallest_normal(compute) * (1 + n / (n - desc.correction if n > desc.correction else 1))
        )
    return bounds.of_outputs(
        desc, bounds.rounded(out, compute, relative, per_term, flushes=4 * depth, lost=lost, batch=batch)
    )


def exactly(desc: ReductionProblem, o: Operand, batch: bool) -> PrecisionGuarantee:
    """Of a result that is one of the elements, a count, or a sum modulo 2**64. No order changes it; positions it does.

    An extremum is equal to the reference's, but of several zeros or NaN it may be another.
    """
    order = o.name == "out" and desc.op not in ("argmax", "argmin")
    if not o.element.is_floating_point:
        return bounds.guarantee(o.element, bounds.EXACT, math_precision=MathPrecision.EXACT, batch=batch, order=order)
    return bounds.guarantee(o.element.compute, bounds.EXACT, batch=batch, order=order)


def reductions(
    name: str,
    supports: Callable[[Any, Target], Support],
    rank: Callable[[Any, Target], float],
    workspace: Any = None,
    priority: int = 0,
) -> Callable[[Any], Any]:
    """Register the decorated function, which builds the launches, as the entry ``name`` of every reduction."""

    def register(build: Any) -> Any:
        for op in OPS:
            kernel(
                op=op,
                name=name,
                elements=FLOATS if op in OF_FLOATS else (*FLOATS, *INTEGERS),
                guarantee=guarantee,
                supports=supports,
                rank=rank,
                numerics=lambda desc: plan_of(desc).numerics(name),
                priority=priority,
                layout=layout,
                **({} if workspace is None else {"workspace": workspace}),
            )(build)
        return build

    return register
