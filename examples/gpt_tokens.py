"""Text as tokens for examples/gpt.py: bytes, and the pieces of the text that are most frequent in it."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Tokens that stand for single bytes; the others stand for pieces of text.
BYTES = 256
#: A word or a number with the space before it, a run of signs, a run of white space.
PIECE = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+")


def read_text(path: Path | None) -> bytes:
    """The file, or all modules of the standard library in the order of their paths."""
    if path is not None:
        return path.read_bytes()
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and "dist-packages" not in p.parts)
    return b"\n".join(p.read_bytes() for p in found)


@dataclass(frozen=True)
class Tokens:
    """A text as tokens: bytes, and the pieces (words, signs, spaces) that are most frequent in it.

    ``ids`` (tokens,) i32; ``pieces``: those of the tokens from BYTES on. A piece that has no token is spelt in bytes.
    """

    ids: Tensor
    pieces: list[bytes]

    @classmethod
    def of(cls, text: bytes, vocabulary: int) -> Tokens:
        pieces = PIECE.findall(text)
        counts = Counter(pieces)
        # Equally frequent ones in the order of their bytes: the vocabulary depends on the text alone.
        known = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p], p))[: max(vocabulary - BYTES, 0)]
        number = {piece: (i,) for i, piece in enumerate(known, BYTES)}
        spelt = {piece: number.get(piece) or tuple(piece) for piece in counts}
        return cls(torch.tensor([i for piece in pieces for i in spelt[piece]], dtype=torch.int32), known)

    @classmethod
    def cached(cls, text: bytes, vocabulary: int, folder: Path) -> Tokens:
        """Read from ``folder`` if they were made of this text for this vocabulary; otherwise made and kept there."""
        path = folder / f"tokens-{vocabulary}-{hashlib.sha256(text).hexdigest()[:16]}.pt"
        if path.exists():
            kept = torch.load(path, weights_only=True)
            return cls(kept["ids"], kept["pieces"])
        made = cls.of(text, vocabulary)
        save({"ids": made.ids, "pieces": made.pieces}, path)
        return made

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(bytes([i]) if i < BYTES else self.pieces[i - BYTES] for i in ids)

    def batch(self, step: int, seed: int, rows: int, length: int) -> Tensor:
        """``rows`` windows of ``length + 1`` tokens (i64), at places that depend on the seed and the step alone."""
        g = torch.Generator().manual_seed((seed << 32) + step)
        at = torch.randint(len(self.ids) - length, (rows, 1), generator=g)
        return self.ids[at + torch.arange(length + 1)].long()


def save(state: dict[str, Any], path: Path) -> None:
    """To a file of another name, then renamed: whenever this is interrupted, ``path`` is whole, old or new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
