"""The rowwise bench's cases: what is computed, by whom, how many bytes it must move, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
from triplan.backends.runtime.compile import compile_source
from triplan.backends.triton import norms, softmax
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import Entry

SHAPES = ((4096, 4096), (8192, 8192), (8192, 32768), (65536, 256), (16, 262144))
OPS = ("softmax", "log_softmax", "rms_norm", "layer_norm")
EPS = 1e-5
#: Rows at either end that are compared with float64.
COMPARED = 32


@dataclass(frozen=True)
class Case:
    op: str
    rows: int
    n: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.op} {self.rows}x{self.n} {tp.ElementKind.of(self.dtype)}"

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def is_norm(self) -> bool:
        return "norm" in self.op

    @property
    def bytes(self) -> int:
        """The fewest bytes: each element of the operands of whole rows is read or written once."""
        return (3 if self.backward else 2) * self.rows * self.n * self.dtype.itemsize


def cases(tiny: bool = False) -> list[Case]:
    """Every row of the bench; ``tiny`` shrinks them all for a smoke test."""
    found = [
        Case(op, max(rows >> 12, 2) if tiny else rows, max(n >> 7, 2) if tiny else n, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for op in (*OPS, *(f"{op}_backward" for op in OPS))
        for rows, n in SHAPES
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Buffers:
    """One set of operands, by the names of the plan's."""

    tensors: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        return self.tensors[name]


def make(case: Case, device: torch.device, generator: torch.Generator) -> Buffers:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    whole, compute = (case.rows, case.n), torch.float32
    found = {"dout": values(*whole)} if case.backward else {}
    if not case.is_norm:
        x = values(*whole)
        if case.backward:
            y = functional.softmax(x.float(), -1) if case.op == "softmax_backward" else functional.log_softmax(x, -1)
            return Buffers({**found, "out": y.to(case.dtype), "dx": torch.empty_like(x)})
        return Buffers({"x": x, "out": torch.empty_like(x)})
    found |= {"x": values(*whole), "weight": values(case.n)}
    centred = case.op.startswith("layer")
    if case.backward:
        mean = torch.zeros(case.rows, dtype=compute, device=device)
        found |= {"mean": mean} if centred else {}
        found |= {"rstd": torch.ones(case.rows, dtype=compute, device=device), "dx": values(*whole)}
        found |= {"dweight": values(case.n), **({"dbias": values(case.n)} if centred else {})}
        return Buffers(found)
    for name in ("mean", "rstd") if centred else ("rstd",):
        found[name] = torch.empty(case.rows, dtype=compute, device=device)
    found |= {"bias": values(case.n)} if centred else {}
    return Buffers({**found, "out": values(*whole)})


def descriptor(case: Case) -> tp.Descriptor:
    cls: Any = tp.descriptor_types()[case.op]
    options = {"eps": EPS, "softmax_axis": 1}
    chosen = {name: value for name, value in options.items() if name in cls.model_fields}
    found: tp.Descriptor = cls(input_shape=(case.rows, case.n), element=case.dtype, **chosen)
    return found


def plan_args(case: Case, b: Buffers) -> Any:
    return tp.plan_type(case.op).args_type(**b.tensors)


# --- torch ---


def torch_function(case: Case, device: torch.device) -> Callable[[Buffers], Any] | None:
    """torch's own kernels; None where this torch has none."""
    n, aten = case.n, torch.ops.aten
    if case.op == "softmax":
        return lambda b: torch.softmax(b.x, -1)
    if case.op == "log_softmax":
        return lambda b: torch.log_softmax(b.x, -1)
    if case.op == "rms_norm":
        return lambda b: functional.rms_norm(b.x, (n,), b.weight, EPS)
    if case.op == "layer_norm":
        return lambda b: functional.layer_norm(b.x, (n,), b.weight, b.bias, EPS)
    if case.op == "softmax_backward":
        return lambda b: aten._softmax_backward_data(b.dout, b.out, 1, case.dtype)
    if case.op == "log_softmax_backward":
        return lambda b: aten._log_softmax_backward_data(b.dout, b.out, 1, case.dtype)
    if case.op == "layer_norm_backward":
        return lambda b: aten.native_layer_norm_backward(
            b.dout, b.x, [n], b.mean[:, None], b.rstd[:, None], b.weight, b.weight, [True, True, True]
        )
    key = "CUDA" if device.type == "cuda" else "CPU"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm_backward", key):
        return None
    fused = aten._fused_rms_norm_backward
    return lambda b: fused(b.dout, b.x, [n], b.rstd[:, None], b.weight, [True, True])


def formula(case: Case) -> Callable[..., Any]:
    """What torch.compile is given, over the tensors of ``inputs``."""

    def softmax_backward(dout: Tensor, out: Tensor) -> Tensor:
        dy, y = dout.float(), out.float()
        if case.op.startswith("log_"):
            return (dy - y.exp() * dy.sum(-1, keepdim=True)).to(out.dtype)
        return (y * (dy - (dy * y).sum(-1, keepdim=True))).to(out.dtype)

    def norm_backward(dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, *mean: Tensor) -> Any:
        v, dy = x.float(), dout.float()
        hat = (v - mean[0][:, None] if mean else v) * rstd[:, None]
        g = dy * weight.float()
        d = g - hat * (g * hat).mean(-1, keepdim=True)
        d = d - g.mean(-1, keepdim=True) if mean else d
        dx = (d * rstd[:, None]).to(x.dtype)
        dweight = (dy * hat).sum(0).to(x.dtype)
        return (dx, dweight, dy.sum(0).to(x.dtype)) if mean else (dx, dweight)

    if case.op == "softmax":
        return lambda x: torch.softmax(x, -1)
    if case.op == "log_softmax":
        return lambda x: torch.log_softmax(x, -1)
    if case.op in ("softmax_backward", "log_softmax_backward"):
        return softmax_backward
    if case.op == "rms_norm":
        return lambda x, weight: functional.rms_norm(x, (case.n,), weight, EPS)
    if case.op == "layer_norm":
        return lambda x, weight, bias: functional.layer_norm(x, (case.n,), weight, bias, EPS)
    return norm_backward


def inputs(case: Case, b: Buffers) -> list[Tensor]:
    if case.backward:
        names = ("dout", "x", "rstd", "weight", "mean") if case.is_norm else ("dout", "out")
        return [b.tensors[name] for name in names if name in b.tensors]
    return [b.tensors[name] for name in ("x", "weight", "bias") if name in b.tensors]


# --- what is right ---


def mismatch(case: Case, b: Buffers) -> str:
    """What in the outputs of ``b`` is wrong by more than a few roundings; empty if nothing is.

    The first and the last rows are compared with float64, and gradients of parameters with all rows.
    """
    rows = sorted({*range(min(COMPARED, case.rows)), *range(max(case.rows - COMPARED, 0), case.rows)})
    at = torch.tensor(rows, device=next(iter(b.tensors.values())).device)
    of_columns = ("weight", "bias", "dweight", "dbias")
    wide = {name: (t if name in of_columns else t[at]).double() for name, t in b.tensors.items()}
    if not case.is_norm:
        if not case.backward:
            wanted = {"out": getattr(torch, case.op)(wide["x"], -1)}
        elif case.op == "softmax_backward":
            dy, y = wide["dout"], wide["out"]
            wanted = {"dx": y * (dy - (dy * y).sum(1, keepdim=True))}
        else:
            wanted = {"dx": wide["dout"] - wide["out"].exp() * wide["dout"].sum(1, keepdim=True)}
    elif not case.backward:
        v = wide["x"] - wide["x"].mean(1, keepdim=True) if "mean" in wide else wide["x"]
        y = v / (v.square().mean(1, keepdim=True) + EPS).sqrt() * wide["weight"]
        wanted = {"out": y + wide["bias"] if "bias" in wide else y}
    else:
        dy, g, hat = wide["dout"], wide["dout"] * wide["weight"], wide["x"] * wide["rstd"][:, None]
        d = g - hat * (g * hat).mean(1, keepdim=True)
        wanted = {"dx": (d - g.mean(1, keepdim=True) if "mean" in wide else d) * wide["rstd"][:, None]}
        if case.rows * case.n <= 1 << 27:
            wanted["dweight"] = (b.dout.double() * b.x.double()).sum(0)  # statistics are 0 and 1
            if "dbias" in wide:
                wanted["dbias"] = b.dout.double().sum(0)
    for name, ref in wanted.items():
        got = wide[name]
        allowed = 4 * (torch.finfo(case.dtype).eps + 1e-6) * (ref.abs() + ref.square().mean().sqrt())
        bad = ~((got - ref).abs() <= allowed)  # NaN is bad
        if bool(bad.any()):
            return f"wrong: {int(bad.sum())} of {bad.numel()} compared elements of {name}"
    return ""


def spoil(b: Buffers) -> None:
    """NaN into all outputs: what is not written shows. (``out`` is an input where there is a ``dx``.)"""
    for name in ("dx", "dweight", "dbias") if "dx" in b.tensors else ("out", "mean", "rstd"):
        if name in b.tensors:
            b.tensors[name].fill_(float("nan"))


# --- a sweep of tiles ---


def with_tile(entry: Entry[Any], name: str, tile: Tile, **options: Any) -> Entry[Any]:
    """``entry`` under another name, with another tile and with ``options`` of its launches."""
    found = copy(entry)
    main = partial(type(entry).main, found, **options)
    vars(found).update(name=name, tile=lambda desc: tile, main=main)
    return found


def swept(case: Case) -> Iterator[Entry[Any]]:
    """Entries that could stand in ``case``."""
    family: Any = norms if case.is_norm else softmax
    block = ceil_power(case.n)
    held = family.rows.MOST_BACKWARD if case.backward else family.rows.MOST_FORWARD
    least, most = (4096, 8192) if case.backward else (1024, 4096)  # elements of several rows
    for rows in (1, 2, 4, 8, 16, 32):
        if not least <= rows * block <= max(most, block) or block > 2 * held:
            continue
        for warps in (1, 2, 4, 8, 16, 32):
            tile, each = Tile(rows, block, warps), rows * block // (32 * warps)
            if not 8 <= each <= (16 if case.backward else 128 if block >= 32768 else 32):
                continue
            for how, options in _fetching(case, tile):
                yield with_tile(family.rows.ROWS, f"rows {rows}x{block} w{warps}{how}", tile, **options)
    for block in (2048, 4096, 8192):
        for warps in (8, 16, 32):
            if not case.n >= 16384 or not 4 <= block // (32 * warps) <= 16:
                continue
            for unroll in (1, 2, 4, 8):
                if block * unroll > case.n:
                    continue
                name = f"looped {block} w{warps} u{unroll}"
                yield with_tile(family.looped.LOOPED, name, Tile(1, block, warps), unroll=unroll)


def _fetching(case: Case, tile: Tile) -> Iterator[tuple[str, dict[str, Any]]]:
    """How rows are fetched and held: how far ahead, in how many bits."""
    if case.backward and case.is_norm:
        for stages in (1, 3, 4):
            yield f" s{stages}", {"stages": stages}
        return
    if tile.block < 32768 or tile.warps > 16:
        yield "", {}
    elif not (case.backward or case.is_norm):
        yield " narrow", {"narrow": True}
        if tile.warps == 16:
            yield "", {"narrow": False}


def compile_share(case: Case, target: tp.Target, first: int, step: int) -> None:
    """Compile each ``step``-th swept kernel of ``case`` into Triton's cache on disk."""
    with registered(case) as names:
        for name in names[first::step]:
            plan = tp.plan(descriptor(case), preference=tp.PlanPreference(kernel=name), target=target)
            for launch in plan.launches:
                compile_source(launch.source(), target.arch)


@contextmanager
def registered(case: Case) -> Iterator[list[str]]:
    """The swept entries of ``case`` in the kernel table, for as long as this lasts: their names."""
    with in_table(case.op, swept(case)) as names:
        yield names


@contextmanager
def in_table(op: str, entries: Iterable[Entry[Any]]) -> Iterator[list[str]]:
    """``entries`` in the kernel table, for as long as this lasts: their names."""
    names: list[str] = []
    try:
        for entry in entries:
            entry.register(op)
            names.append(entry.name)
        yield names
    finally:
        for name in names:
            tp.TABLE.unregister(op, name)
