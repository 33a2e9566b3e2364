"""Checkpoints of ``gpt.py``: parameters and states, whole and by name, so that other ranks can go on from them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt_ranks import RefusedError, divided, of_heads, of_kinds, ranks, whole
from gpt_tokens import save
from torch import Tensor

#: Options that say how ranks divide the model.
DIVISION = ("ranks", "tp")


def names(training: Any) -> list[str]:
    """Of the parameters, in the optimizer's order."""
    found = {p: name for name, p in training.model.named_parameters()}
    return [found[p] for group in training.optimizer.param_groups for p in group["params"]]


def ordered(training: Any, name: str, t: Tensor, order: Callable[[Tensor, int], Tensor]) -> Tensor:
    """``t``, of a parameter or its state, with the rows of heads in ``order`` if ranks divide the layers."""
    block = training.model.blocks[0]
    rows = 3 * block.qkv.in_features
    return order(t, block.heads) if block.by_heads and ".qkv." in name and t.shape[:1] == (rows,) else t


def save_checkpoint(training: Any, path: Path) -> None:
    """What it says does not depend on how ranks divide the model."""
    state: Any = whole({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()["state"]})
    if ranks()[0]:
        return

    def plain(name: str, t: Tensor) -> Tensor:
        return ordered(training, name, t, of_kinds)

    states = {name: state["optimizer"][i] for i, name in enumerate(names(training)) if i in state["optimizer"]}
    found = {
        "model": {name: plain(name, t) for name, t in state["model"].items()},
        "optimizer": {name: {key: plain(name, t) for key, t in own.items()} for name, own in states.items()},
    }
    found |= {name: getattr(training, name) for name in ("fixed", "step", "losses", "norms")}
    save(found, path)


def load_checkpoint(training: Any, path: Path, other_ranks: bool) -> None:
    """Go on from a checkpoint. Refuses one of other options, with ``other_ranks`` than those of ``DIVISION``."""
    if not path.exists():
        raise RefusedError(f"--resume: there is no {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise RefusedError(f"--resume: {path} is no checkpoint: {e}") from None
    kept = state.get("fixed") if isinstance(state, dict) else None
    if kept is None:
        raise RefusedError(f"--resume: {path} is no checkpoint of this script")
    other = {name: value for name, value in training.fixed.items() if kept.get(name) != value}
    if other_ranks:
        other = {name: value for name, value in other.items() if name not in DIVISION}
    if other:
        text = "; ".join(f"{name} {kept.get(name)}, now {value}" for name, value in other.items())
        hint = "" if other.keys() - set(DIVISION) else " (--other-ranks takes it, but other bits will follow)"
        raise RefusedError(f"--resume: {path} was written with other options: {text}{hint}")

    if not state["optimizer"].keys() <= set(names(training)):  # it numbers the states
        raise RefusedError(f"--resume: {path} is a checkpoint of an older version of this script")

    def mine(name: str, t: Tensor, like: Tensor) -> Tensor:
        return divided(ordered(training, name, t, of_heads), like)

    own = training.model.state_dict()
    training.model.load_state_dict({name: mine(name, t, own[name]) for name, t in state["model"].items()})
    optimizer, states = training.optimizer, state["optimizer"]
    places = [p for group in optimizer.param_groups for p in group["params"]]
    numbered = enumerate(zip(names(training), places, strict=True))
    loaded = {
        i: {key: mine(name, t, p) for key, t in states[name].items()} for i, (name, p) in numbered if name in states
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr  # that of the device, not a copy
    training.step, training.losses, training.norms = state["step"], state["losses"], state["norms"]
