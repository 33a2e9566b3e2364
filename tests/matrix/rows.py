"""Softmax and norms: short rows, rows that fill registers, long ones, and rows side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases.rows import OPS, build, strided

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

SIZES = ((4096, 256), (4096, 100), (4096, 4096), (4096, 8192), (512, 16384), (512, 32768), (16, 262144))
#: Rows that are adjacent in memory.
CROSSED = tp.Layout.strided(unit_axis=0)
#: Long rows of which each element is loaded by itself.
ODD = ((512, 30001), (512, 50257))
#: Rows that begin between two vectors, of few and of many threads.
BETWEEN = ((4096, 31), (4096, 33), (4096, 511), (4096, 4099), (512, 8193))
#: Adjacent rows whose partial results are merged in a launch of their own.
MERGED = (64, 100_000)


def problems(op: str) -> Iterator[tp.Descriptor]:
    yield from (build(op, size, -1, element) for size in (*SIZES, *ODD) for element in ("bf16", "f32"))
    yield from (build(op, size, -1, "f64") for size in SIZES[2:5])
    yield from (build(op, size, -1, "bf16") for size in BETWEEN)
    yield from (build(op, (4096, n), -1, "f64") for n in (31, 257, 511))
    yield build(op, (8, 1030), -1, "bf16")  # one program
    yield from (build(op, (8, n, 4096), 1, element) for n, element in ((8, "bf16"), (16, "f32"), (16, "f64")))
    yield strided(build(op, (64, 1024), -1, "bf16"))
    among = strided(build(op, (512, 6, 32), -1, "bf16"))
    whole = [o.name for o in among.operands() if o.shape == (512, 6, 32)]
    yield among.replace(layouts={**dict(among.layouts), whole[-1]: tp.Layout.strided(unit_axis=1)})
    yield build(op, (64, 100, 304), 1, "bf16")
    for size in ((2**14, 200), (2**14, 1000), MERGED):
        for element in ("bf16", "f32", "f64"):
            desc = build(op, size, -1, element)
            whole = [o.name for o in desc.operands() if o.shape == size]
            yield desc.replace(layouts={whole[-1]: CROSSED})
            yield desc.replace(layouts=dict.fromkeys(whole, CROSSED))
    if op.startswith(("rms", "layer")):
        yield build(op, (512, 12287), -1, "bf16", residual=True)  # forward, parts come one by one
        for n in (511, 768):
            yield build(op, (4096, n), -1, "f32", residual=True, branch_element="bf16", branch_gradient=True)


def asks(desc: Any, entry: str, name: str) -> Patterns:
    # Rows that lie side by side are split into columns, whose elements have gaps.
    columns = entry == "split" and len(desc.input_shape) == 3
    packed = not columns and all(o.layout.packed for o in desc.operands()) and desc.input_shape[-1] % 16 == 0
    # Where lanes that hold one row's sum write it to one address, each must have rounded it alike.
    lacks = (r"\bfma\.",) if entry == "split" and name == "norm_parameters_kernel" else ()
    return ((VECTORS,) if packed and "fold" not in name else (), lacks)


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op), asks)
