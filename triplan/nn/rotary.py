"""Rotary position embedding with the published ways to stretch it over longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from triplan import functional

__all__ = ["RotaryEmbedding"]

Tensor = torch.Tensor


def _unscaled(dim: int, base: float) -> Tensor:
    """base ** (-2 * i / dim) for each pair i, in f64."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _ntk(dim: int, base: float, factor: float) -> Tensor:
    """NTK-aware: the base grows so that the last frequency is divided by ``factor``, the first stays (bloc97, 2023)."""
    return _unscaled(dim, base * factor ** (dim / (dim - 2)))


def _yarn(dim: int, base: float, factor: float, original: float, fast: float, slow: float) -> Tensor:
    """Peng et al., "YaRN", 2023, section 3.2: pairs that turn more than ``fast`` times in the original context keep
    their frequency, those below ``slow`` turns are divided by ``factor``, and between them it is a linear ramp over the
    pairs."""
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    return _unscaled(dim, base) * (1 - divided + divided / factor)


def _llama3(dim: int, base: float, factor: float, original: float, fast: float, slow: float) -> Tensor:
    """Llama 3.1's: as YaRN, but the ramp is linear in the turns within the original context."""
    frequencies = _unscaled(dim, base)
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _frequencies(dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """(inv_freq in f64, the factor of cos and sin)."""
    given = dict(scaling)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("rope_theta", None)
    factor = float(given.pop("factor", 1.0))
    attention = 1.0
    if kind in ("yarn", "llama3"):
        original = float(given.pop("original_max_position_embeddings"))
    if kind == "default":
        found = _unscaled(dim, base)
    elif kind == "linear":
        found = _unscaled(dim, base) / factor
    elif kind == "ntk":
        found = _ntk(dim, base, factor)
    elif kind == "yarn":
        found = _yarn(dim, base, factor, original, given.pop("beta_fast", 32), given.pop("beta_slow", 1))
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        named = given.pop("attention_factor", None)
        attention = usual if named is None else float(named)
    elif kind == "llama3":
        found = _llama3(dim, base, factor, original, given.pop("high_freq_factor"), given.pop("low_freq_factor"))
    else:
        raise ValueError(f"rope_type = {kind!r}: must be default, linear, ntk, yarn or llama3")
    if given:
        raise ValueError(f"scaling of rope_type {kind!r} does not take {', '.join(given)}")
    return found, attention


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by their positions, with angles computed in the kernel (``functional.rotary``).

    ``dim``: elements of a head that are rotated; ``base``: of the frequencies ``base ** (-2 * i / dim)``. ``scaling``
    is a mapping as in published configurations: ``rope_type`` "default", "linear", "ntk" (NTK-aware), "yarn" or
    "llama3", and its numbers: ``factor``, ``original_max_position_embeddings``, ``beta_fast`` and ``beta_slow``,
    ``attention_factor``, ``low_freq_factor`` and ``high_freq_factor``. ``pairs`` and ``seq_dim`` are those of
    ``functional.rotary``.

    The frequencies are computed in f64 and rounded to f32 once; the buffer ``inv_freq`` is no part of the state, and
    stays f32 when the module is converted. (f64 tensors are rotated by these frequencies, in f64.)
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        *,
        pairs: Literal["half", "interleaved"] = "half",
        seq_dim: int = -2,
        device: Any = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim = {dim}: must be even and at least 2")
        if seq_dim not in (-2, -3):
            raise ValueError(f"seq_dim = {seq_dim}: must be -2 or -3")
        self.dim, self.base, self.scaling = dim, base, dict(scaling or {})
        self.pairs, self.seq_dim = pairs, seq_dim
        found, self.scale = _frequencies(dim, base, self.scaling)
        self.register_buffer("inv_freq", found.to(device, torch.float32), persistent=False)

    def _apply(self, fn: Any, *given: Any, **options: Any) -> RotaryEmbedding:
        exact = self.inv_freq
        super()._apply(fn, *given, **options)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:  # half() would round the frequencies
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    @overload
    def forward(self, q: Tensor, k: None = None, positions: Tensor | None = None) -> Tensor: ...

    @overload
    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, q: Tensor, k: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q, or (q, k), rotated. ``positions`` are i32 or i64 of shape (sequence,) or (batch, sequence); by default 0,
        1, 2, ..."""
        frequencies = self.inv_freq.double() if q.dtype == torch.float64 else self.inv_freq
        how: dict[str, Any] = {"scale": self.scale, "pairs": self.pairs, "seq_dim": self.seq_dim}
        found: Tensor | tuple[Tensor, Tensor] = functional.rotary(
            q, k, None, None, positions, inv_freq=frequencies, **how
        )
        return found

    def extra_repr(self) -> str:
        scaling = f", scaling={self.scaling}" if self.scaling else ""
        return f"{self.dim}, base={self.base}{scaling}, pairs={self.pairs!r}, seq_dim={self.seq_dim}"
