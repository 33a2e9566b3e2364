"""Seeds and offsets from a ``torch.Generator``, and the registered ops that draw with them.

A call advances the generator. On a GPU its state is read on the host, which waits for nothing. Where that would freeze
what is drawn (while a CUDA graph is captured, and in compiled code), and on the CPU, torch draws a seed and an offset
into a tensor; draws of a capture share it. Element i of a result depends on seed, offset and ``first + i`` alone
(docs/random.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from triplan.backends.runtime.launcher import is_capturing
from triplan.descriptors.random import INTEGERS, PARAMETERS
from triplan.facade import RandomPlan
from triplan.facade.bound import current_device
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.recording import drawn, is_plain, recording, setting
from triplan.functional._seeds import captured_state, device_state, is_captured

Tensor = torch.Tensor
Number = bool | int | float
#: (a tensor of both or None, seed, offset): what a call draws with. ``offset`` is added to a tensor's.
State = tuple[Tensor | None, int, int]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: Descriptors have this many axes at most.
MAX_RANK = 8
#: What a call adds to a generator's offset, which torch requires to be a multiple of 4.
_STEP = 4
_advancing = threading.Lock()


def _advance(generator: torch.Generator) -> tuple[int, int]:
    """The seed and the offset of the next call, as i64.

    The offset gets its highest bit set. torch's kernels have the number of a thread in these words of the counter,
    which never reaches that bit: no number of theirs comes again in ours.
    """
    with _advancing:
        offset = generator.get_offset()
        generator.set_offset(offset + _STEP)
    return (generator.initial_seed() + 2**63) % 2**64 - 2**63, offset - 2**63


def _is_alone(t: Tensor) -> bool:
    """Whether calls of ``t`` draw on a GPU, and nobody watches."""
    return t.is_cuda and is_plain(t)


def next_state(t: Tensor, generator: torch.Generator | None) -> State:
    """What a call that writes a tensor like ``t`` draws with. The generator moves on."""
    if _is_alone(t):
        of = torch.cuda.default_generators[t.get_device()] if generator is None else generator
        if of.device.type != "cuda":
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{of.device.type}'")
        # The replay of a call asks for the current device alone: it refuses tensors of another one.
        if setting(is_capturing) or ((index := t.get_device()) != current_device() and is_captured(index)):
            if (record := recording()) is not None:
                record.is_repeatable = False  # what is drawn with depends on what the capture has drawn
            state, offset = captured_state(t, of)
            return state, 0, offset
        seed, offset = drawn(partial(_advance, of))
        return None, seed, offset
    return device_state(t, generator), 0, 0


# --- registered ops ---


def run_plan(
    op: str,
    operands: dict[str, Tensor],
    state: State,
    first: int,
    numbers: dict[str, Number],
    whole: Sequence[int] | None = None,
) -> None:
    """The plan of ``op``, on views of few axes; or of a block of a tensor of the shape ``whole``."""
    of, seed, offset = state
    tensors = [operands[name] for name in ("x", "out") if name in operands]
    options: dict[str, Any] = {}
    if whole is not None:
        options["global_shape"] = tuple(whole)
    elif all(t.is_contiguous() for t in tensors):
        operands = {name: t.view(-1) for name, t in operands.items()}
    elif tensors[0].dim() > MAX_RANK:
        out = operands["out"]
        packed = {name: t.contiguous() for name, t in operands.items()}
        run_plan(op, packed, state, first, numbers)
        out.copy_(packed["out"])
        return
    scalars: dict[str, Any] = dict(numbers)
    if of is None:
        scalars |= {"seed": seed, "offset": offset}
    else:
        operands["state"] = of
        scalars["offset"] = offset
    if first:
        scalars["first"] = first
    run(RandomPlan, operands, scalars=scalars, op=op, **options)


def require_floats(name: str, t: Tensor) -> None:
    if t.dtype not in _FLOATS:
        raise NotImplementedError(f"{name}(): {t.dtype} is not supported, only f16, bf16, f32 and f64")


def _fill(
    out: Tensor,
    state: Tensor | None,
    seed: int,
    offset: int,
    op: str,
    numbers: Any,
    first: int,
    whole: Sequence[int] | None = None,
) -> None:
    run_plan(op, {"out": out}, (state, seed, offset), first, dict(zip(PARAMETERS[op], numbers, strict=True)), whole)


def fillable(target: Tensor, state: Tensor | None, seed: int, offset: int, op: str, *how: Any) -> Sequence[int]:
    if op not in INTEGERS:
        require_floats(op, target)
    elif target.dtype not in (*_FLOATS, *_INTEGERS):
        raise NotImplementedError(f"{op}(): {target.dtype} is not supported")
    return target.shape


filled = Op(
    "random",
    "Tensor target, Tensor? state, int seed, int offset, str op, Scalar[] parameters, SymInt first, "
    "SymInt[]? whole=None",
    axes=None,  # draws by the number of an element among all
    shape=fillable,
    update=_fill,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (torch.zeros_like(g), *(None,) * 7),
)


def _choose(
    out: Tensor,
    x: Tensor,
    state: Tensor | None,
    seed: int,
    offset: int,
    first: int,
    whole: Sequence[int] | None = None,
) -> None:
    run_plan("bernoulli", {"x": x, "out": out}, (state, seed, offset), first, {}, whole)


def _choosable(x: Tensor, *how: Any) -> Sequence[int]:
    require_floats("bernoulli", x)
    return x.shape


chosen = Op(
    "bernoulli",
    "Tensor x, Tensor? state, int seed, int offset, SymInt first, SymInt[]? whole=None",
    axes=None,  # draws by the number of an element among all
    shape=_choosable,
    fill=_choose,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (torch.zeros_like(g), *(None,) * 5),
)
