"""Forward and backward of whole models: patched by ``triplan.nn``, by torch, under torch.compile, and Liger's patches.

Models are those of the transformers library and of torchvision, of random parameters; a model whose library is not
installed is left out. All compute the same model on the same batch, eagerly but for torch.compile's.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import triplan.nn
from bench import timing
from bench.report import Chart, Column, Report, Row, hardware_slug, until_stopped
from bench.timing import Contestant

COLUMNS = (
    Column("case", "case"),
    Column("contestant", "by"),
    Column("device_us", "us", ".0f"),
    Column("gib", "GiB of a step", ".1f"),
    Column("speed_vs_compile", "x compile", ".3f"),
    Column("error", "error"),
    Column("note", "note"),
)
CHARTS = (Chart("device_us", "us"), Chart("speed_vs_compile", "speed, torch.compile = 1", 1.0))
#: Largest distance of a loss or of a gradient's norm from torch's, relative. Both round to bf16 (2^-8) all the way.
FAR = 0.02
LAYERS = 4


@dataclass(frozen=True)
class Model:
    """``make(tiny)`` returns a model in bf16 and its batch; ``loss`` what is differentiated."""

    name: str
    library: str
    make: Callable[[bool], tuple[nn.Module, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]


def _llama(tiny: bool) -> tuple[nn.Module, Tensor]:
    """Layers of Llama 3's 8B, without embedding and head; 4 sequences of 4,096."""
    t = import_module("transformers")
    width, inner, heads, keys = (64, 96, 4, 2) if tiny else (4096, 14336, 32, 8)
    config = t.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    g = torch.Generator().manual_seed(0)
    return t.LlamaModel(config).bfloat16(), torch.randn(
        *((2, 16) if tiny else (4, 4096)), width, generator=g
    ).bfloat16()


def _llama_loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(inputs_embeds=x).last_hidden_state
    return found.float().square().mean()


def _resnet(tiny: bool) -> tuple[nn.Module, Tensor]:
    """224 x 224 pixels, 256 images, channels last."""
    t, g = import_module("torchvision"), torch.Generator().manual_seed(0)
    model: nn.Module = t.models.resnet50(num_classes=1000).bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(*((2, 3, 32, 32) if tiny else (256, 3, 224, 224)), generator=g).bfloat16()
    return model, x.to(memory_format=torch.channels_last)


def _resnet_loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found.float().square().mean()


MODELS = (
    Model(f"Llama 8B, {LAYERS} layers, 4 x 4096", "transformers", _llama, _llama_loss),
    Model("ResNet-50, 256 images", "torchvision", _resnet, _resnet_loss),
)


def _patched(model: nn.Module) -> nn.Module:
    triplan.nn.patch(model)
    return model


def _by_liger(model: nn.Module) -> Callable[..., Any]:
    """Liger replaces names of the model's Python module too: here only while its own model runs."""
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    # The model has no head, so Liger's forward of a model with one is not for it.
    apply = import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
    apply(model=model, fused_linear_cross_entropy=False)
    replaced = {name: new for name, new in vars(module).items() if before.get(name) is not new}
    vars(module).update(before)

    def call(*args: Any, **kwargs: Any) -> Any:
        with patch.multiple(module, **replaced):
            return model(*args, **kwargs)

    return call


#: By contestant: what is done to the model.
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": lambda model: model,
    "torch.compile": torch.compile,
    "triplan": _patched,
    "liger": _by_liger,
}


def _ways(model: Model, tiny: bool) -> list[str]:
    ways = ["torch", "triplan"] if tiny else ["torch", "torch.compile", "triplan"]
    return [*ways, "liger"] if find_spec("liger_kernel") and model.library == "transformers" and not tiny else ways


def _step(model: nn.Module, called: Any, loss: Callable[[Any, Tensor], Tensor], x: Tensor, i: int) -> Tensor:
    for p in model.parameters():
        p.grad = None
    found = loss(called, x)
    found.backward()  # type: ignore[no-untyped-call]
    return found.detach()


def run(
    iterations: int, warmup: int, device: torch.device, tiny: bool, progress: Callable[[str, int, int], None]
) -> Report:
    """Time every model whose library is installed. ``tiny`` shrinks them: a smoke test whose figures say nothing."""
    rows, started = list[Row](), time.perf_counter()
    listed = [m for m in MODELS if find_spec(m.library)]
    with until_stopped() as labels:
        for i, model in enumerate(listed):
            progress(model.name, i, len(listed))
            rows += model_rows(model, iterations, warmup, device, tiny)
    progress("done", len(listed), len(listed))
    settings = {"iterations": iterations, "warmup": warmup, "device": device.type, "tiny": tiny}
    settings["seconds"] = time.perf_counter() - started
    if device.type != "cuda":
        labels.append("CPU SMOKE TEST: reference backend, tiny sizes; no measurement of any kernel")
    stem = f"models-{hardware_slug(device)}" + ("-smoke" if tiny else "")
    return Report(stem, "forward and backward of models, bf16", "; ".join(labels), COLUMNS, CHARTS, settings, rows)


def _found(step: Callable[[int], Tensor], model: nn.Module) -> tuple[float, float]:
    """The loss, and the norm of all gradients."""
    loss = step(0)
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return float(loss), float(torch.stack(norms).norm())


def model_rows(model: Model, iterations: int, warmup: int, device: torch.device, tiny: bool) -> list[Row]:
    contestants, about, failed, wanted = list[Contestant](), dict[str, Row](), list[Row](), (0.0, 0.0)
    for name in _ways(model, tiny):
        torch.manual_seed(0)
        made, x = model.make(tiny)
        made, x = made.to(device), x.to(device)
        step = partial(_step, made, WAYS[name](made), model.loss, x)
        try:
            found = _found(step, made)
        except (RuntimeError, TypeError, ValueError, AttributeError) as problem:  # a peer's: the others are timed still
            failed.append({"case": model.name, "contestant": name, "error": f"{type(problem).__name__}: {problem}"})
            continue
        wanted = found if name == "torch" else wanted
        if not all(abs(a - b) <= FAR * abs(b) for a, b in zip(found, wanted, strict=True)):
            failed.append({"case": model.name, "contestant": name, "error": f"loss and norm {found}, torch's {wanted}"})
            continue
        about[name] = {"loss": found[0], "norm": found[1], "gib": _peak(step, device)}
        contestants.append(Contestant(name, step, 1))
    by = partial(timing.device_times, capture=False) if device.type == "cuda" else timing.wall_times
    found_times = dict(zip(about, by(contestants, iterations, warmup), strict=True))
    base = found_times.get("torch.compile")
    rows: list[Row] = [
        {
            "case": model.name,
            "contestant": name,
            "device_us": t.median_us,
            "device_us_p10": t.low_us,
            "device_us_p90": t.high_us,
            "speed_vs_compile": None if base is None else t.speed_beside(base),
            "repeats": t.repeats,
            **about[name],
        }
        for name, t in found_times.items()
    ]
    contestants.clear()
    gc.collect()  # models are cycles
    return rows + failed


def _peak(step: Callable[[int], Tensor], device: torch.device) -> float | None:
    """GiB of the device that a step has at most, beyond what other contestants' models keep."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step(0)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30
