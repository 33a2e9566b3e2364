"""Philox4x32-10 in plain torch, in 64-bit integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["MASK", "philox", "product"]

#: Philox4x32-10: factors of a round, and what each round adds to the key (Salmon et al., "Parallel Random Numbers: As
#: Easy as 1, 2, 3", 2011).
FACTORS, STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
MASK = 2**32 - 1


def product(a: Tensor, b: Any) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers, from partial products below 2**63."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox(counter: list[Tensor], key: tuple[Any, Any]) -> list[Tensor]:
    """Four 32-bit words, as int64, from a counter of four 32-bit words and a key of two (numbers or tensors)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = product(c0, FACTORS[0]), product(c2, FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + STEPS[0]) & MASK, (k1 + STEPS[1]) & MASK
    return [c0, c1, c2, c3]
