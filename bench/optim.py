"""Steps of optimizers and clipping over a model's parameters, against torch's fused and foreach ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan.optim as ours
from bench import timing
from bench.report import Chart, Column, Report, Row, hardware_slug, until_stopped
from bench.timing import Contestant

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "contestant"),
    Column("device_us", "us", ".1f"),
    Column("gb_s", "GB/s", ".0f"),
    Column("host_us", "host us", ".1f"),
    Column("of_torch", "x torch", ".2f"),
    Column("note", "note"),
)
CHARTS = (Chart("device_us", "device time of a step"),)


def gpt2() -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 124M."""
    d, block = 768, []
    for _ in range(12):
        block += [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *block, (d,), (d,)]


def llama() -> list[tuple[int, ...]]:
    """The 291 parameters of Llama 3 8B's layers, of half the width: 2.0 B numbers."""
    d, kv, up, block = 2048, 512, 5632, []
    for _ in range(32):
        block += [(d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (up, d), (up, d), (d, up)]
    return [(128256, d), *block, (d,), (128256, d)]


#: Shapes of the parameters.
MODELS: dict[str, list[tuple[int, ...]]] = {
    "12 x 4096^2": [(4096, 4096)] * 12,
    "GPT-2 124M": gpt2(),
    "5000 x 1000": [(1000,)] * 5000,
    "skewed": [(1 << 27,), *((17,) for _ in range(400))],
}
TINY = {"tiny": [(7, 5), (3,), (), (0,), (130,)]}
#: By name: ours, torch's, their arguments, and bytes read and written per byte of f32 parameter.
STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], int]] = {
    "AdamW": (ours.AdamW, torch.optim.AdamW, {"lr": 1e-3}, 7),
    "SGD with momentum": (ours.SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 5),
}
#: Models whose parameters are bf16, and whose masters and states are f32.
NARROW: dict[str, list[tuple[int, ...]]] = {"Llama 2 B": llama()}
MASTERED = "AdamW of bf16 with f32 masters"
#: Matrices that Muon orthogonalizes, in bf16.
MATRICES: dict[str, list[tuple[int, ...]]] = {
    "24 x 4096^2": [(4096, 4096)] * 24,
    "24 x 4096 x 11008": [(4096, 11008)] * 24,
}
TINY_MATRICES: dict[str, list[tuple[int, ...]]] = {"tiny": [(8, 16)] * 2}
#: Microseconds of a step whose host time is not measured.
LONG_US = 2e4
#: Tensors from which on a step takes the host milliseconds: one is timed at a time.
MANY = 1000
#: By name: the limit of the norm, and bytes read and written per byte of f32 gradient. By 0, each call scales.
CLIPS: dict[str, tuple[float, int]] = {
    "clip_grad_norm_": (0.0, 3),
    "clip_grad_norm_ below the limit": (math.inf, 1),
}


def run(
    iterations: int, warmup: int, device: torch.device, tiny: bool, progress: Callable[[str, int, int], None]
) -> Report:
    """Time a step of each optimizer, and clipping, over each model."""
    started = time.perf_counter()
    rows: list[Row] = []
    cases = [(name, *model) for model in (TINY if tiny else MODELS).items() for name in (*STEPS, *CLIPS)]
    cases += [(MASTERED, *model) for model in (TINY if tiny else NARROW).items()]
    cases += [("Muon", *model) for model in (TINY_MATRICES if tiny else MATRICES).items()]
    with until_stopped() as labels:
        for done, (name, model, shapes) in enumerate(cases):
            progress(f"{name}, {model}", done, len(cases))
            rows += case_rows(name, model, shapes, iterations, warmup, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    settings = {"iterations": iterations, "warmup": warmup, "device": device.type, "tiny": tiny}
    settings["seconds"] = time.perf_counter() - started
    if device.type != "cuda":
        labels.append("CPU SMOKE TEST: reference backend, tiny sizes; no measurement of any kernel")
    stem = f"optim-{hardware_slug(device)}{'-smoke' if tiny else ''}"
    title = "steps of optimizers, f32 unless said; of Muon, bf16"
    return Report(stem, title, "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def case_rows(
    name: str, model: str, shapes: Sequence[tuple[int, ...]], iterations: int, warmup: int, device: torch.device
) -> list[Row]:
    special = {"Muon": muon, MASTERED: mastered}
    if name in special:
        makers, moved = special[name](device)
    else:
        makers, moved = steps(name, device) if name in STEPS else clips(name)
    dtype = torch.bfloat16 if name in special else torch.float32
    nbytes = moved * sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    found: list[Row] = []
    for contestant, maker in makers.items():  # one after another: states of large models do not fit side by side
        params = [torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        one = Contestant(contestant, partial(_call, maker(params)), 1)
        timed = timing.times([one], iterations, warmup, device)[0]
        device_us = timed.median_us
        # A long step fills the queue of launches, and the host then waits for the device.
        calls = one.calls(10 if len(shapes) < MANY else 1)
        host_us = timing.host_times([calls])[0].median_us if device_us < LONG_US else None
        found.append(
            {
                "case": f"{name}, {model}",
                "contestant": contestant,
                "device_us": device_us,
                "gb_s": nbytes / device_us / 1e3,
                "host_us": host_us,
                "note": timed.not_captured,
            }
        )
    times = [float(str(row["device_us"])) for row in found]
    return [{**found[0], "of_torch": min(times[1:]) / times[0]}, *found[1:]]


def _call(call: Callable[[], Any], i: int) -> None:
    call()


#: What one contestant does with given parameters, by its name.
Makers = dict[str, Callable[[list[Tensor]], Callable[[], Any]]]


def steps(name: str, device: torch.device) -> tuple[Makers, int]:
    make, peer, options, moved = STEPS[name]
    theirs = {**options, "capturable": True} if peer is torch.optim.AdamW and device.type == "cuda" else options
    makers: Makers = {
        "triplan": lambda ps: make(ps, **options).step,
        "torch foreach": lambda ps: peer(ps, foreach=True, **theirs).step,
        "torch fused": lambda ps: peer(ps, fused=True, **theirs).step,
    }
    return makers, moved


def mastered(device: torch.device) -> tuple[Makers, int]:
    """Torch's has no masters: gradients are copied to f32, and what was updated in f32 is copied back."""
    options: dict[str, Any] = {"lr": 1e-3}
    theirs = {**options, "capturable": True} if device.type == "cuda" else options

    def torchs(ps: list[Tensor], **kind: Any) -> Callable[[], Any]:
        masters = [p.detach().float().requires_grad_() for p in ps]
        wide = [torch.empty_like(master) for master in masters]
        for master, grad in zip(masters, wide, strict=True):
            master.grad = grad
        optimizer = torch.optim.AdamW(masters, **theirs, **kind)

        @torch.no_grad()
        def step() -> None:
            torch._foreach_copy_(wide, [p.grad for p in ps if p.grad is not None])
            optimizer.step()
            torch._foreach_copy_(ps, masters)

        return step

    makers: Makers = {
        "triplan": lambda ps: ours.AdamW(ps, master_weights=True, **options).step,
        "torch foreach": lambda ps: torchs(ps, foreach=True),
        "torch fused": lambda ps: torchs(ps, fused=True),
    }
    return makers, 14


def muon(device: torch.device) -> tuple[Makers, int]:
    """Bytes are those of a step that computes nothing."""
    makers: Makers = {
        "triplan": lambda ps: ours.Muon(ps).step,
        "torch": lambda ps: torch.optim.Muon(ps).step,
    }
    if device.type == "cuda":
        makers["torch.compile"] = compiled_muon
    return makers, 5


def compiled_muon(params: list[Tensor]) -> Callable[[], Any]:
    """torch's step with its Newton-Schulz steps compiled, as the published code has it."""
    from torch.optim import _muon

    module: Any = _muon
    name = "_zeropower_via_newtonschulz"
    step: Callable[[], Any] = torch.optim.Muon(params).step
    plain = getattr(module, name)
    compiled = torch.compile(plain)

    def call() -> None:
        setattr(module, name, compiled)
        try:
            step()
        finally:
            setattr(module, name, plain)

    return call


def clips(name: str) -> tuple[Makers, int]:
    limit, moved = CLIPS[name]
    makers: Makers = {
        "triplan": lambda ps: partial(ours.clip_grad_norm_, ps, limit),
        "torch foreach": lambda ps: partial(torch.nn.utils.clip_grad_norm_, ps, limit, foreach=True),
    }
    return makers, moved
