"""Attention, forward and backward: what select chooses, other kernels, and torch's flash and cuDNN backends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import triplan as tp
from bench import timing
from bench.report import Chart, Column, Report, Row, hardware_slug, slug, until_stopped
from bench.timing import Contestant

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("kernel", "kernel"),
    Column("device_us", "device us", ".1f"),
    Column("tflops", "TFLOP/s", ".0f"),
    Column("speed_vs_cudnn", "x cuDNN", ".3f"),
    Column("sustained_us", "sustained us", ".1f"),
    Column("sustained_vs_cudnn", "x cuDNN", ".3f"),
    Column("error", "error"),
    Column("note", "note"),
)
CHARTS = (
    Chart("tflops", "TFLOP/s"),
    Chart("speed_vs_cudnn", "speed, cuDNN = 1", 1.0),
    Chart("sustained_vs_cudnn", "speed without rests, cuDNN = 1", 1.0),
)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
#: Heads that are compared with float64, of the first sequence: more would not fit.
COMPARED = 2
#: Largest distance from float64, relative to the size of the result: some units of bf16's roundoff, 2^-8.
FAR = 0.01


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``length`` queries and keys, ``heads`` and ``key_heads`` of ``width`` elements."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int
    causal: bool
    backward: bool = False

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        what = ("causal" if self.causal else "full") + (" backward" if self.backward else "")
        return f"B{self.batch} H{heads} S{self.length} D{self.width} {what}"

    @property
    def flops(self) -> float:
        """Of two products, or five; half of them where a causal mask leaves half of the scores."""
        products = 5 if self.backward else 2
        return 2.0 * products * self.batch * self.heads * self.length**2 * self.width / (2 if self.causal else 1)


CASES = tuple(
    replace(case, backward=backward)
    for backward in (False, True)
    for case in (
        Case(4, 4096, 32, 32, 128, True),
        Case(4, 4096, 32, 8, 128, True),
        Case(4, 4096, 32, 32, 128, False),
        Case(1, 16384, 32, 32, 128, True),
        Case(4, 4096, 32, 32, 64, True),
        Case(4, 4096, 32, 32, 64, False),
        Case(4, 4096, 16, 16, 192, True),
        Case(4, 4096, 16, 16, 256, True),
        Case(4, 4096, 16, 16, 256, False),
    )
)


def cases(tiny: bool, wanted: str) -> list[Case]:
    """Those whose name contains ``wanted``; ``tiny`` shrinks them for a smoke test."""
    found = [case for case in CASES if wanted in case.name]
    return [replace(c, batch=1, length=32, heads=4, key_heads=c.key_heads // 8) for c in found] if tiny else found


Buffers = dict[str, Tensor]


def make(case: Case, dtype: torch.dtype, device: torch.device) -> Buffers:
    """Operands as plans take them; in memory, heads come before rows, as torch has them."""
    g = torch.Generator(device).manual_seed(0)

    def values(heads: int) -> Tensor:
        shape = (case.batch, heads, case.length, case.width)
        return torch.randn(shape, device=device, generator=g, dtype=torch.float32).to(dtype).transpose(1, 2)

    found = {"q": values(case.heads), "k": values(case.key_heads), "v": values(case.key_heads)}
    lse = torch.empty(case.batch, case.heads, case.length, device=device)
    found |= {"out": torch.empty_like(found["q"]), "lse": lse}
    if case.backward:
        args: Any = tp.AttentionArgs(found["q"], found["k"], found["v"], found["out"], found["lse"])
        forward(case, args, device).run(args)
        found |= {"dout": values(case.heads)}
        found |= {f"d{name}": torch.empty_like(found[name]) for name in "qkv"}
    return found


def forward(case: Case, args: tp.AttentionArgs, device: torch.device) -> tp.Plan[Any, Any]:
    return tp.plan(tp.AttentionDescriptor.from_args(args, causal=case.causal), target=tp.Target.of(device))


def plans(case: Case, x: Buffers, device: torch.device) -> dict[str, tuple[tp.Plan[Any, Any], Any]]:
    """What select chooses, first, and each other kernel, with the args of each."""
    make_args: Any = tp.AttentionBackwardArgs if case.backward else tp.AttentionArgs
    args = make_args(**x)
    cls: Any = tp.AttentionBackwardDescriptor if case.backward else tp.AttentionDescriptor
    desc, target = cls.from_args(args, causal=case.causal), tp.Target.of(device)
    found = {"triplan": (tp.plan(desc, target=target), args)}
    for entry in tp.TABLE.rows(desc.op):
        if entry.backend is tp.BackendKind.TRITON and entry.name != found["triplan"][0].sku().kernel:
            try:
                found[f"kernel {entry.name}"] = tp.plan(desc, target=target, kernel=entry.name), args
            except tp.Unsupported:
                continue
    return found


def peers(case: Case, x: Buffers) -> dict[str, Callable[[int], object]]:
    """torch's backends, on a GPU."""
    q, k, v = (x[name].transpose(1, 2).detach().requires_grad_(case.backward) for name in "qkv")

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads > case.key_heads)

    def backward(backend: SDPBackend) -> Callable[[int], object]:
        out, dout = call(backend), x["dout"].transpose(1, 2)
        return lambda i: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def both(backend: SDPBackend) -> Callable[[int], object]:
        return backward(backend) if case.backward else lambda i: call(backend)

    return {name: both(backend) for name, backend in BACKENDS.items() if q.is_cuda}


def distance(case: Case, x: Buffers) -> float:
    """Of the written results from float64, relative to their size: the largest of those of the first heads."""
    group = case.heads // case.key_heads
    q, k, v = (x[n][:1, :, : (1 if n != "q" else group) * COMPARED].transpose(1, 2).double() for n in "qkv")
    leaves = [t.detach().requires_grad_(case.backward) for t in (q, k, v)]
    s = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * case.width**-0.5
    if case.causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(s, -1) @ leaves[2].repeat_interleave(group, 1)
    wanted: dict[str, Tensor] = {"out": out}
    if case.backward:
        dout = x["dout"][:1, :, : group * COMPARED].transpose(1, 2).double()
        grads = torch.autograd.grad(out, leaves, dout)
        wanted = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    found = []
    for name, w in wanted.items():
        got = x[name][:1].transpose(1, 2)[:, : w.size(1)].double()
        found.append(float((got - w).norm() / w.norm().clamp(min=1e-300)))
    return max(math.inf if math.isnan(e) else e for e in found)


def run(
    iterations: int,
    warmup: int,
    device: torch.device,
    tiny: bool,
    wanted: str,
    progress: Callable[[str, int, int], None],
) -> Report:
    """Time every case whose name contains ``wanted``. ``tiny`` shrinks them: a smoke test whose figures say nothing."""
    listed, rows = cases(tiny, wanted), list[Row]()
    started = time.perf_counter()
    with until_stopped() as labels:
        for i, case in enumerate(listed):
            progress(case.name, i, len(listed))
            rows += case_rows(case, iterations, warmup, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    progress("done", len(listed), len(listed))
    settings = {"iterations": iterations, "warmup": warmup, "device": device.type, "tiny": tiny, "cases": wanted}
    settings["seconds"] = time.perf_counter() - started
    if device.type != "cuda":
        labels.append("CPU SMOKE TEST: reference backend, tiny sizes; no measurement of any kernel")
    stem = f"attention-{hardware_slug(device)}" + (f"-{slug(wanted)}" if wanted else "") + ("-smoke" if tiny else "")
    return Report(stem, "attention, bf16", "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def ran(plan: tp.Plan[Any, Any], args: Any, workspace: tp.Workspace, i: int) -> None:
    plan.run(args, workspace)


def case_rows(case: Case, iterations: int, warmup: int, device: torch.device) -> list[Row]:
    x = make(case, torch.bfloat16, device)
    contestants = [Contestant(name, call, 1) for name, call in peers(case, x).items()]
    about: dict[str, Row] = {c.name: {} for c in contestants}
    failed: list[Row] = []
    for name, (plan, args) in plans(case, x, device).items():
        if device.type == "cuda":
            plan.prepare(device)
        workspace = tp.Workspace.allocate(plan, device)
        for o in plan.descriptor.operands():
            if o.is_written:
                getattr(args, o.name).fill_(float("nan"))  # elements that are not written show
        plan.run(args, workspace)
        kernel = {"kernel": plan.sku().kernel, "workspace": plan.workspace_size()}
        if (error := distance(case, x)) > FAR:
            failed.append({"case": case.name, "contestant": name, **kernel, "error": f"{error} from float64"})
            continue
        about[name] = {**kernel, "distance": error}
        contestants.append(Contestant(name, partial(ran, plan, args, workspace), 1))
    times = dict(zip(about, timing.times(contestants, iterations, warmup, device, sustained=True), strict=True))
    base = times.get("cudnn")
    alone = None if base is None else base.sustained_us
    return [
        *(
            {
                "case": case.name,
                "contestant": name,
                "device_us": t.median_us,
                "device_us_p10": t.low_us,
                "device_us_p90": t.high_us,
                "tflops": case.flops / t.median_us / 1e6,
                "speed_vs_cudnn": None if base is None else t.speed_beside(base),
                "sustained_us": t.sustained_us,
                "sustained_vs_cudnn": None if alone is None or t.sustained_us is None else alone / t.sustained_us,
                "repeats": t.repeats,
                "note": t.not_captured,
                **about[name],
            }
            for name, t in times.items()
        ),
        *failed,
    ]
