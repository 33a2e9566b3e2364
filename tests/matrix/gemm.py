"""Matrix products: every layout, epilogue and arithmetic; every tile and ring, those that no cost chooses today too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from cases.gemm import COLUMN, ELEMENTS, LOOSE_COLUMN, LOOSE_ROW, backward, batched_grid

import triplan as tp
from matrix import Build, Patterns, compiles, planned
from triplan.backends.runtime.launch import Launch, overlapping
from triplan.backends.triton.gemm import fma, mma, split_k, tiles, wgmma, wgmma_backward, wgmma_cut, wgmma_tiles
from triplan.backends.triton.gemm.cuts import Cut
from triplan.backends.triton.gemm.rings import lower, rings_of
from triplan.backends.triton.gemm.tile_shapes import tiles_of

HOPPER = ("wgmma", "wgmma_tiles")
#: A few rows by a large matrix: what ``split_k`` is for.
DECODE = tp.GemmDescriptor(m=16, n=4096, k=4096, element="bf16", epilogue="bias", layouts={"b": COLUMN})


def products(element: str) -> Iterator[tp.Descriptor]:
    base = tp.GemmDescriptor(m=4096, n=4096, k=4096, element=element)
    found: list[tp.Descriptor] = [
        base.replace(layouts={"b": COLUMN}, epilogue="bias"),
        base.replace(epilogue="bias_gelu"),
        base.replace(layouts={"a": COLUMN}, epilogue="silu"),
        base.replace(layouts={"a": COLUMN, "b": COLUMN}),
        base.replace(m=4099, n=1003, k=77, reads_c0=True, layouts=dict.fromkeys(("a", "b", "c", "c0"), "strided")),
        base.replace(m=16),
        base.replace(m=64, n=14336, epilogue="bias_relu"),
        *batched_grid(element, 64, 1024, 1024, 128),
    ]
    if element in ("f16", "bf16"):
        found.append(base.replace(out_element="f32", epilogue="bias"))
        found.append(tp.BatchedGemmDescriptor(batch=4, m=4096, n=4096, k=4096, element=element, symmetric=True))
        found.append(found[-1].replace(reads_c0=True))
        odd = base.replace(m=2049, n=2047, k=4095, epilogue="bias")
        found += [odd, odd.replace(layouts={"a": LOOSE_COLUMN, "b": "strided", "c": COLUMN}, reads_c0=True)]
        found.append(tp.BatchedGemmDescriptor(batch=24, m=118, n=9514, k=1025, element=element, epilogue="silu"))
    if element == "f32":
        found += [d.replace(math="tf32") for d in found]
        three = base.replace(math="tf32x3", epilogue="bias_gelu")
        found += [three, three.replace(layouts={"b": COLUMN}), three.replace(m=16, reads_c0=True)]
    if element in ("f16", "f32"):  # what the activation is given is saved
        saved = base.replace(epilogue="bias_silu", saves_pre=True)
        found.append(saved.replace(layouts={"b": COLUMN}))
        found.append(saved.replace(epilogue="bias_gelu", m=64, layouts={"pre": LOOSE_COLUMN}))
    yield from found


def vectors() -> Iterator[tp.Descriptor]:
    """Lines that end at multiples of 16 bytes, and not of 16 elements."""
    for element, end in (("f16", 1000), ("f32", 1004)):
        yield tp.GemmDescriptor(m=512, n=end, k=end, element=element)


def one_by_one(entry: str) -> Iterator[tp.Descriptor]:
    """Elements that are read one by one, as lines end or begin anywhere."""
    if entry == "tiles_invariant":  # one tile for every number of rows: k or B are the same for all of them
        base = tp.GemmDescriptor(m=64, n=8, k=4096, element="f16", out_element="f32", epilogue="silu")
        yield base.replace(layouts={"a": LOOSE_ROW, "b": LOOSE_COLUMN})
        yield base.replace(k=4095)
        yield base.replace(n=1001, layouts={"b": LOOSE_ROW})
        return
    odd = tp.GemmDescriptor(m=100, n=1001, k=4096, element="bf16", out_element="f32", epilogue="bias_silu")
    yield odd.replace(layouts={"a": COLUMN, "b": LOOSE_ROW, "c": COLUMN}, reads_c0=True)
    yield odd.replace(n=8, layouts={"b": LOOSE_COLUMN, "c": LOOSE_ROW})
    yield odd.replace(m=1, n=8, k=1000, layouts={"a": COLUMN})
    yield odd.replace(m=2048, n=72, k=1001, element="f32", out_element=None, math="tf32", saves_pre=True)
    along = tp.GemmDescriptor(m=32, n=27341, k=513, element="f16", layouts={"b": LOOSE_COLUMN})
    yield from (along, along.replace(m=64))
    yield tp.GemmDescriptor(m=2048, n=8, k=64, element="f64", epilogue="bias", layouts={"c": COLUMN})
    few = tp.GemmDescriptor(m=4263, n=19, k=170, element="f32", math="tf32x3", epilogue="bias", layouts={"c": COLUMN})
    yield from (few, few.replace(m=43, n=9, k=45934, epilogue="identity", layouts={"a": LOOSE_COLUMN}))


def thin(element: str) -> Iterator[tp.Descriptor]:
    """One row, one column or a short k."""
    base = tp.GemmDescriptor(m=1, n=4096, k=4096, element=element)
    column, strided = base.replace(m=23629, n=1, k=11253), dict.fromkeys(("a", "b", "c"), "strided")
    for desc in (base, column):
        yield desc.replace(epilogue="bias_gelu")
        yield desc.replace(layouts={"a": LOOSE_COLUMN, "b": COLUMN}, epilogue="silu")
        yield desc.replace(layouts=strided, reads_c0=True)
    for batch, k in ((1, 5120), (61, 768), (512, 65)):
        yield tp.BatchedGemmDescriptor(batch=batch, m=1, n=1, k=k, element=element)
    yield tp.BatchedGemmDescriptor(batch=100, m=33, n=1, k=150, element=element, epilogue="bias_silu")
    for k in (1, 2, 3, 8, 13):
        yield base.replace(m=1001, k=k, epilogue="bias_gelu")
        yield base.replace(m=5376, n=3, k=k, layouts={"c": COLUMN}, reads_c0=True)
        yield base.replace(m=77, k=k, layouts=strided, reads_c0=True, epilogue="bias_gelu")


def integers(op: str) -> Iterator[tp.Descriptor]:
    if op == "gemm":
        base = tp.GemmDescriptor(m=16, n=4096, k=4096, element="i8", layouts={"b": COLUMN})
        yield from (base, base.replace(m=4096, epilogue="bias_relu"), base.replace(m=4096, layouts={}))
        return
    several = tp.BatchedGemmDescriptor(batch=3, m=2048, n=1001, k=1000, element="i8", epilogue="bias")
    a, b = tp.Layout.strided(unit_axis=2), tp.Layout.strided(unit_axis=1)
    yield several.replace(layouts={"a": a, "b": b, "c": b})
    yield several.replace(layouts={"a": a, "b": "strided", "c": a})


def gradients(element: str) -> Iterator[tp.Descriptor]:
    wide = "f32" if element in ("f16", "bf16") else None
    both = partial(backward, 4096, 4096, 4096, element, (1, 1, 1))
    found: list[Any] = [
        both(),
        both(layouts={"b": COLUMN, "db": COLUMN}),
        both(layouts={"a": COLUMN, "b": COLUMN}, out_element=wide),
        both(layouts={"dc": COLUMN}),
        backward(8192, 1024, 4096, element, (0, 1, 1)),
        backward(1024, 1024, 512, element, (1, 0, 0)),
        backward(64, 1001, 1024, element, (1, 0, 0)),
        backward(4099, 1003, 77, element, (1, 1, 1), layouts=dict.fromkeys(("dc", "a", "b", "da", "db"), "strided")),
        backward(64, 4096, 4096, element, (1, 1, 1)),
        backward(1601, 16384, 1, element, (1, 1, 1)),
        backward(1, 2699, 4096, element, (1, 1, 1)),
        backward(3072, 1, 1233, element, (1, 1, 1), layouts={"dc": LOOSE_COLUMN}),
    ]
    if element in ("f16", "bf16"):
        found.append(backward(1600, 17749, 12437, element, (1, 1, 1)))
        found.append(backward(2560, 4096, 2560, element, (1, 0, 0), layouts={"b": COLUMN}))
    if element == "f64":
        found.append(backward(2048, 8193, 5517, element, (0, 1, 0)))
    if element == "f32":
        found += [d.replace(math=math) for d, math in zip(found[:2], ("tf32", "tf32x3"), strict=True)]
        found += [backward(4099, 1024, n, element, (1, 1, 0), math="tf32") for n in (31, 127)]
    yield from found


def problems(op: str, entry: str) -> Iterator[tp.Descriptor]:
    if op == "gemm_backward":
        yield from (d for element in ELEMENTS for d in gradients(element))
    else:
        yield from (d for element in ELEMENTS for d in (*products(element), *thin(element)) if d.op == op)
        yield from integers(op)
        if (op, entry) == ("batched_gemm", "outer"):
            yield from (tp.BatchedGemmDescriptor(batch=4, m=512, n=512, k=4, element=e) for e in ELEMENTS)
        if op == "gemm":
            yield from (*vectors(), *one_by_one(entry))


def asks(desc: Any, entry: str, name: str) -> Patterns:
    """Tensor cores, and how they are fed."""
    if name in (
        "pieces_kernel",
        "parts_kernel",
        "column_sums_kernel",
        "gemv_kernel",
        "gemv_pieces_kernel",
        "outer_kernel",
        "matrix_copy_kernel",
    ):
        return (), ()
    if name.startswith("wgmma"):
        # Between the initialisation of the last barrier and what follows it, TMA is told.
        fence = r"mbarrier\.init[^;]*;(?:(?!mbarrier\.init|griddepcontrol)[\s\S])*fence\.proxy\.async\.shared"
        return (r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor", fence), ()
    has: list[str] = []
    lacks: tuple[str, ...] = ()
    if desc.element == "i8":
        has.append(r"\.s32\.s8\.s8")
    elif desc.multiplicands is tp.MathPrecision.TF32X3:
        has.append(r"tf32\.tf32")
    elif desc.element != "f64" and desc.multiplicands != tp.MathPrecision.F32:
        has.append(r"wgmma\.mma_async|mma\.sync")
        if (
            desc.op == "gemm"
            and desc.layouts == ()
            and min(desc.m, desc.n, desc.k) > 64
            and desc.n % 16 == desc.k % 16 == 0
        ):
            has.append(r"cp\.async\.cg")
    if name == "mma_kernel":
        return (r"mma\.sync\.aligned\.m16n8k8\S*\.tf32", r"cp\.async\.c[ag]"), (r"wgmma", r"ld\.global")
    if name == "fma_kernel":
        return (r"fma\.rn\.f32", r"cp\.async\.c[ag]"), (r"mma",)
    if desc in tuple(vectors()):
        has, lacks = [*has, r"cp\.async\.cg\.shared\.global"], (r"cp\.async\.ca", r"ld\.global\.b16")
    return tuple(has), lacks


def others(op: str, entry: str, target: tp.Target) -> Iterator[tuple[tp.Descriptor, Iterable[Launch]]]:
    """Each tile and ring of an entry, with the epilogues and layouts that need the most registers."""
    base = tp.GemmDescriptor(m=4096, n=4096, k=4096, element="f16", epilogue="bias_silu", layouts={"b": COLUMN})
    heavy = (base, base.replace(epilogue="bias_gelu"), base.replace(out_element="f32"), base.replace(reads_c0=True))
    if (op, entry) == ("gemm", "tiles"):
        for desc in heavy:
            for tile in tiles_of(desc, target):
                yield desc, overlapping(tiles.launches(desc, tile), target)
    elif op == "gemm" and entry in HOPPER:
        for desc in heavy:
            for ring in rings_of(desc, target, entry == "wgmma"):
                specialised = ring.specialised
                yield desc, wgmma.launches(desc, ring, target) if specialised else wgmma_tiles.launches(desc, ring)
    elif (op, entry) == ("gemm", "wgmma_cut"):
        few = tuple(desc.replace(m=2560, n=2560) for desc in heavy)  # few tiles are cut, into many parts
        for desc in (*heavy, *few):
            for cut in wgmma_cut.cuts_of(desc, target):
                yield desc, overlapping(wgmma_cut.launches(desc, cut, target), target)
    elif (op, entry) == ("batched_gemm", "wgmma"):
        half = tp.BatchedGemmDescriptor(batch=4, m=4096, n=4096, k=4096, element="bf16", symmetric=True)
        for desc in (half, half.replace(reads_c0=True)):
            for ring in rings_of(desc, target, True):
                if lower(desc, ring):
                    yield desc, wgmma.launches(desc, ring, target)
    elif (op, entry) == ("gemm", "fma"):
        wide = base.replace(element="f32", layouts={})
        odd = wide.replace(m=4097, n=4099, k=4101)
        turned = [d.replace(layouts={"a": LOOSE_COLUMN, "c": COLUMN}) for d in (wide, odd)]
        turned += [d.replace(epilogue="identity", layouts={"a": COLUMN, "c": COLUMN}) for d in (wide, odd)]
        few, many = wide.replace(n=21, layouts={"a": LOOSE_COLUMN}), wide.replace(n=12288)
        rows = wide.replace(n=32, k=4101)
        narrow = (few, few.replace(n=32, layouts={"a": COLUMN}), rows, rows.replace(n=21))
        # A bias: the product is not computed as its transpose.
        low = [
            d.replace(m=32, epilogue="bias_silu") for d in (wide, odd, turned[0], odd.replace(layouts={"b": COLUMN}))
        ]
        for desc in (wide, odd, many, *turned, *narrow, *low):
            for division in fma.divisions_of(desc, target):
                if isinstance(division, Cut) or division.pieces <= 2:
                    yield desc, overlapping(fma.launches(desc, division), target)
    elif (op, entry) == ("gemm", "mma"):
        for layouts, odd in (({"a": COLUMN}, 0), ({"a": LOOSE_COLUMN, "b": LOOSE_ROW}, 0), ({"a": COLUMN}, 1)):
            weights = tp.GemmDescriptor(m=768, n=1024 + odd, k=4096, element="f32", math="tf32", layouts=layouts)
            yield weights, overlapping(mma.launches(weights, mma.cheapest(weights, target)), target)
    elif (op, entry) == ("gemm", "split_k"):
        for split in split_k.splits_of(DECODE, target):
            yield DECODE, overlapping(split_k.launches(DECODE, split), target)
    elif (op, entry) == ("gemm_backward", "wgmma"):
        square = partial(backward, 1032, 1032, 1032, "f16", (1, 1, 1))
        for desc in (
            square(),
            square(layouts={"dc": COLUMN, "b": COLUMN}),
            square(layouts={"a": COLUMN, "b": COLUMN, "db": COLUMN}, out_element="f32"),
        ):
            for ring in wgmma_backward.rings_of(desc, target):
                for parts in (1, 2):
                    sums = wgmma_backward.sums_of(desc, ring, target, parts)
                    yield desc, [wgmma_backward.pair_launch(desc, ring, target, sums, parts)]


@compiles("gemm", "batched_gemm", "gemm_backward")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    yield from planned(op, entry, target, problems(op, entry), asks)
    for desc, launches in others(op, entry, target):
        yield Build(desc, tuple(launches), partial(asks, desc, entry))
