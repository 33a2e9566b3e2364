"""What the rows of all losses share: operands as kernel arguments, the sums over rows, and what may be said of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import TL, padded_bytes, values
from triplan.backends.triton.common.rows import Rows
from triplan.backends.triton.losses import shared_kernels as kernels
from triplan.descriptors.bad_indices import NO_BAD_INDEX
from triplan.sku import SUPPORTED, ElementKind, MathPrecision, PrecisionGuarantee, Support, Tolerance

ELEMENTS = ("f16", "bf16", "f32", "f64")
INDICES = ("i32", "i64")
#: Rows that one program adds up at least, in so many warps, and the most programs that do.
CHUNK, WARPS, PARTS = 8192, 32, 256
#: Classes' weights that are added up at a time.
CLASSES = 4096


@lru_cache(maxsize=4096)
def view(desc: Any) -> Rows:
    return Rows([o for o in desc.operands() if o.shape == desc.input_shape], desc.class_axis, in_order=True)


def is_mean(desc: Any) -> bool:
    return desc.reduction in ("mean", "byte_mean")


def smooths(desc: Any) -> bool:
    return getattr(desc, "label_smoothing", 0.0) != 0


def packed_tables(desc: Any) -> Support:
    """Whether all but logits and their gradients are promised packed."""
    for o in desc.operands():
        if o.shape != desc.input_shape and not o.layout.packed:
            return Support.no(f"{o.name} is not promised packed: what has one element a row or a class must be")
    return SUPPORTED


def layout(desc: Any) -> str:
    return "packed" if all(o.layout.packed for o in desc.operands()) else "strided"


# --- the workspace ---


def chunks(desc: Any) -> tuple[int, int]:
    """Programs that add up rows, and rows of each."""
    count = view(desc).count
    each = max(-(-count // (PARTS * CHUNK)), 1) * CHUNK
    return max(-(-count // each), 1), each


def _block(desc: Any) -> int:
    """Rows that a program adds up at a time: 32 bytes a thread."""
    found: int = CHUNK * 4 // desc.element.compute.itemsize
    return found


def scratch(desc: Any) -> tuple[dict[str, Scratch], int]:
    """Partial sums over rows, and the sum of the classes' weights; and the bytes of all."""
    compute: ElementKind = desc.element.compute
    each = padded_bytes(PARTS * compute.itemsize)
    sizes = {}
    if is_mean(desc):
        sizes["counts"] = each
    if desc.reduced and not desc.op.endswith("_backward"):
        sizes["sums"] = each
    if smooths(desc) and desc.weight:
        sizes["class_sum"] = padded_bytes(compute.itemsize)
    return placed(sizes, compute)


def placed(sizes: Mapping[str, int], element: ElementKind, start: int = 0) -> tuple[dict[str, Scratch], int]:
    """Arrays of so many bytes one after another, and where the last one ends."""
    found = {}
    for name, size in sizes.items():
        found[name] = Scratch(start, element)
        start += size
    return found, start


# --- launches ---


def arguments(desc: Any, rows: int) -> dict[str, Arg]:
    """Every argument that kernels of a loss may ask for, for programs of ``rows`` rows."""
    r = view(desc)
    args: dict[str, Arg] = dict.fromkeys(("x", "dx", "lse", "weight", "status", "counts", "sums", "class_sum", "loss"))
    args |= dict.fromkeys(("x_strides", "dx_strides"))
    args |= r.arguments(rows)
    args |= scratch(desc)[0]
    for o in desc.operands():
        args[o.name] = values(o)
        if o.shape == desc.input_shape:
            args[f"{o.name}_strides"] = r.strides(o)
    if getattr(desc, "in_place", False):
        args |= {"dx": args["x"], "dx_strides": args["x_strides"]}
    counts = args.get("bytes")
    args |= {"share": counts, "counted": counts if counts is not None else args["weight"]}
    parts, each = chunks(desc)
    args |= {"parts": Int(parts), "each": Int(each), "rows": Int(r.count, True), "ignore": Int(desc.ignore_index, True)}
    return args


def constants(desc: Any) -> dict[str, Any]:
    parts = chunks(desc)[0]
    return {
        "MEAN": is_mean(desc),
        "EACH": not desc.reduced,
        "SMOOTH": smooths(desc),
        "CLAMP": desc.out_of_bounds == "clamp",
        "COMPUTE": TL[desc.element.compute],
        "PARTS": 1 if parts == 1 else PARTS,
    }


def launch(
    which: Any,
    grid: int,
    args: Mapping[str, Arg],
    constexprs: Mapping[str, Any],
    warps: int,
    stages: int = 3,
    max_registers: int = 0,
) -> Launch:
    """A launch with those of ``args`` and ``constexprs`` that the kernel has."""
    names = set(which.arg_names)
    return Launch(
        which,
        grid,
        {k: v for k, v in args.items() if k in names},
        {k: v for k, v in constexprs.items() if k in names},
        warps,
        stages,
        max_registers=max_registers,
    )


def before(desc: Any, count: bool) -> list[Launch]:
    """What comes first: the status is reset, and what gradients need of targets and weights alone is added up."""
    args, constexprs, found = arguments(desc, 1), constants(desc), []
    if desc.out_of_bounds == "error":
        found.append(fill_launch(Ptr("status", ElementKind.I64, 8), 1, NO_BAD_INDEX))
    if not view(desc).count:
        return found
    if count and is_mean(desc):
        found.append(
            launch(kernels.loss_count_kernel, chunks(desc)[0], args, {**constexprs, "BLOCK": _block(desc)}, WARPS)
        )
    if "class_sum" in scratch(desc)[0]:
        renamed = {**args, "total": args["class_sum"]}
        found.append(launch(kernels.class_sum_kernel, 1, renamed, {**constexprs, "BLOCK": CLASSES}, 16))
    return found


def after(desc: Any, counted: bool) -> list[Launch]:
    """What comes last: the losses of all rows become one. ``counted``: whether ``before`` counted."""
    if not desc.reduced:
        return []
    args, constexprs = arguments(desc, 1), {**constants(desc), "BLOCK": _block(desc)}
    constexprs["COUNT"] = is_mean(desc) and not (counted and view(desc).count)
    parts = chunks(desc)[0]
    if parts == 1:
        return [launch(kernels.loss_sum_kernel, 1, args, constexprs, WARPS)]
    return [
        launch(kernels.loss_sum_kernel, parts, {**args, "loss": None}, constexprs, WARPS),
        launch(kernels.loss_finish_kernel, 1, args, constexprs, 4),
    ]


def sums_us(desc: Any) -> float:
    """Cost of what comes first and last."""
    return LAUNCH_US * (2 + is_mean(desc) + smooths(desc)) + view(desc).count * 16 / 3.0e6


# --- what may be said ---


@lru_cache(maxsize=1024)
def guarantee(
    element: ElementKind, compute: ElementKind, relative: float, absolute: float, batch: bool, order: bool
) -> PrecisionGuarantee:
    """``relative`` and ``absolute``: roundings in the compute element, of the result and of its terms."""
    u, final = compute.unit_roundoff, element.unit_roundoff
    info, small = torch.finfo(element.torch), torch.finfo(compute.torch)
    return PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=batch,
        order_invariant=order,
        tolerance=Tolerance(
            rtol=math.expm1(relative * u) + (final if compute is not element else 0.0),
            ctol=math.expm1(absolute * u) * (1 + final),
            # Approximate exponentials and products flush subnormals.
            underflow=float(info.smallest_normal * info.eps + (relative + absolute) * small.smallest_normal),
        ),
    )


def over_rows(desc: Any) -> int:
    """Roundings of a sum over all rows, and of what it is divided by."""
    per_thread = chunks(desc)[1] // (32 * WARPS)
    return 2 * (per_thread + 16 + PARTS // 32) if desc.reduced else 0


def over_classes(desc: Any) -> int:
    """Roundings of the sum of the classes' weights, where there is one."""
    return view(desc).n // CLASSES + CLASSES // 512 + 16 if smooths(desc) and desc.weight else 0


def counts_exactly(desc: Any) -> bool:
    """Whether what a gradient is divided by is the same in any order of rows: a number of them that f32 holds."""
    return not is_mean(desc) or (desc.reduction == "mean" and not desc.weight and view(desc).count < 2**24)


def status_guarantee(desc: Any) -> dict[str, PrecisionGuarantee]:
    return {"status": PrecisionGuarantee.exact(ElementKind.I64)} if desc.out_of_bounds == "error" else {}
