"""Sampling: rows of a vocabulary, with each filter and without, packed and of any strides."""

from __future__ import annotations

from collections.abc import Iterator

import triplan as tp
from matrix import Build, Patterns, compiles, planned

#: Neighbouring logits are loaded at once.
VECTOR = r"ld\.global\.(cg\.)?v[24]"
#: What may differ between architectures.
INEXACT = r"\.approx\.f|div\.full"


def problems(op: str, entry: str) -> Iterator[tp.Descriptor]:
    for element in ("f16", "bf16", "f32"):
        desc = tp.SampleDescriptor(element=element, rows=64, vocabulary=128256)
        yield desc.replace(top_k=True, top_p=True, min_p=True)
    yield desc
    for rows in (1, 64):  # a program takes one chunk, or several
        yield desc.replace(rows=rows, top_p=True)
    yield desc.replace(vocabulary=1000, top_p=True, layouts={o.name: "strided" for o in desc.operands()})


def asks(desc: tp.SampleDescriptor, entry: str, name: str) -> Patterns:
    logits = desc.operand("logits")
    is_vector = logits.layout.packed and desc.vocabulary % 8 == 0
    # The two that take a token a thread load no vectors. Estimates may be inexact: what follows is checked.
    vector = (VECTOR,) if is_vector and name not in ("estimates_kernel", "masses_kernel") else ()
    return vector, () if name in ("levels_kernel", "chunks_kernel", "estimates_kernel") else (INEXACT,)


@compiles("sample")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op, entry), asks, proofs_spill=False)
