"""Functions beside torch's own, with the leaves that they are differentiated by: rows, losses, products, indexing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import triplan.functional as F  # noqa: N812
from cases.functional import FIXED, fixed, integers, laid_out, on_copies

Function = Callable[..., torch.Tensor]

# --- softmax and norms ---

ROWS = (
    "softmax",
    "softmax across",
    "log_softmax",
    "rms_norm",
    "rms_norm bare",
    "rms_norm added",
    "layer_norm",
    "layer_norm bias",
    "layer_norm added",
    "l2_norm",
    "l2_norm across",
    "cumsum",
    "cumsum across",
    "cumprod",
    "cumprod across",
)


def rows(
    name: str, device: str, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 4, 6)
) -> tuple[Function, Function, list[torch.Tensor]]:
    """Ours, torch's, and their arguments, which want gradients."""
    g = torch.Generator().manual_seed(0)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64).to(dtype).to(device).requires_grad_()

    x, n = tensor(*shape), shape[-1]
    op, _, how = name.partition(" ")
    scans = op.startswith("cum")
    ours, theirs = getattr(F, op), getattr(torch if scans else functional, "normalize" if op == "l2_norm" else op)
    if scans or op.endswith("softmax") or op == "l2_norm":
        dim = 1 if how == "across" else -1
        return (lambda x: ours(x, dim)), (lambda x: theirs(x, dim=dim)), [x]
    if how == "added":
        # Both results enter, so that both have gradients.
        def joined(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            out, summed = ours(x, (n,), w, eps=1e-3, weight_offset=1, residual=r)
            return out * summed

        def apart(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            # What is normalised is the sum before it is rounded, computed as ours is.
            wide = torch.promote_types(x.dtype, torch.float32)
            summed, one = x.to(wide) + r.to(wide), w.to(wide) + 1
            return theirs(summed, (n,), one, eps=1e-3).to(x.dtype) * summed.to(x.dtype)

        return joined, apart, [x, tensor(n), tensor(*shape)]
    if name == "rms_norm":
        return (lambda x, w: ours(x, (n,), w)), (lambda x, w: theirs(x, (n,), w)), [x, tensor(n)]
    if name == "rms_norm bare":
        return (lambda x: ours(x, shape[1:])), (lambda x: theirs(x, shape[1:])), [x]
    if name == "layer_norm":
        given = [x, tensor(*shape[1:]), tensor(*shape[1:])]
        ours_of, theirs_of = ((lambda x, w, b, f=f: f(x, shape[1:], w, b, 1e-3)) for f in (ours, theirs))
        return ours_of, theirs_of, given
    # torch's has no second derivative without a weight.
    return (lambda x, b: ours(x, (n,), None, b)), (lambda x, b: theirs(x, (n,), b * 0 + 1, b)), [x, tensor(n)]


# --- losses ---

LOSSES = [f"{op} {how}" for op in ("cross_entropy", "nll_loss") for how in ("mean", "sum", "none", "byte_mean")]


def loss_problem(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets of which some are ignored (0), weights and bytes of the classes."""
    g = torch.Generator().manual_seed(0)
    classes = shape[1] if len(shape) > 1 else shape[0]
    x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).to(device).requires_grad_()
    target = torch.randint(0, classes, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=g)
    weight, counts = (torch.rand(classes, generator=g, dtype=torch.float64) + 0.1 for _ in range(2))
    return x, target.to(device), weight.to(dtype).to(device), counts.to(dtype).to(device)


def losses(
    name: str, device: str, shape: tuple[int, ...] = (4, 5), smoothing: float = 0.1, weighted: bool = True
) -> tuple[Function, Function]:
    """Ours and torch's, of logits of ``shape``; torch has no byte_mean, which is written out."""
    op, reduction = name.split()[:2]
    _, target, weight, counts = loss_problem(shape, torch.float32, device)
    options: dict[str, Any] = {"ignore_index": 0, **({"label_smoothing": smoothing} if op == "cross_entropy" else {})}

    def ours(x: torch.Tensor) -> torch.Tensor:
        table = counts if reduction == "byte_mean" else None
        return getattr(F, op)(x, target, weight if weighted else None, reduction=reduction, bytes=table, **options)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        how = "none" if reduction == "byte_mean" else reduction
        loss = getattr(functional, op)(x, target, weight.to(x.dtype) if weighted else None, reduction=how, **options)
        share = counts.to(x.dtype)[target] * (target != 0)
        return (loss * share).sum() / share.sum() if reduction == "byte_mean" else loss

    return ours, theirs


# --- products ---

Product = tuple[Function, Function, tuple[torch.Tensor, ...], dict[str, Any]]


def products(device: str, dtype: torch.dtype = torch.float64, how: str = "packed") -> dict[str, Product]:
    """(ours, torch's, tensors, keywords) by name."""

    def x(*shape: int, seed: int) -> torch.Tensor:
        return laid_out(integers(shape, dtype, device, seed), how)

    a, b, w, bias = x(5, 16, seed=1), x(16, 24, seed=2), x(24, 16, seed=3), x(24, seed=4)
    torch_linear = torch.nn.functional.linear
    return {
        "mm": (F.mm, torch.mm, (a, b), {}),
        "mm_empty": (F.mm, torch.mm, (x(5, 0, seed=1), x(0, 3, seed=2)), {}),
        "bmm": (F.bmm, torch.bmm, (x(3, 5, 16, seed=1), x(3, 16, 24, seed=2)), {}),
        "bmm_empty": (F.bmm, torch.bmm, (x(3, 5, 0, seed=1), x(3, 0, 2, seed=2)), {}),
        "addmm": (F.addmm, torch.addmm, (x(5, 24, seed=5), a, b), {"beta": 2, "alpha": -3}),
        "addmm_row": (F.addmm, torch.addmm, (bias, a, b), {}),
        "addmm_row_scaled": (F.addmm, torch.addmm, (bias, a, b), {"beta": 2, "alpha": -1}),
        "addmm_column": (F.addmm, torch.addmm, (x(5, 1, seed=6), a, b), {"beta": 0.5}),
        "addmm_scalar": (F.addmm, torch.addmm, (x(1, seed=7), a, b), {}),
        "addmm_beta_zero": (F.addmm, torch.addmm, (torch.full_like(bias, torch.nan), a, b), {"beta": 0}),
        "linear": (F.linear, torch_linear, (a, w, bias), {}),
        "linear_no_bias": (F.linear, torch_linear, (a, w), {}),
        "linear_scalar_bias": (F.linear, torch_linear, (a, w, x(seed=4)), {}),
        "linear_batch": (F.linear, torch_linear, (x(2, 3, 16, seed=8), w, bias), {}),
        "linear_vector": (F.linear, torch_linear, (x(16, seed=9), w, bias), {}),
        "linear_empty": (F.linear, torch_linear, (x(0, 16, seed=8), w, bias), {}),
        "matmul": (F.matmul, torch.matmul, (x(2, 3, 16, seed=8), x(2, 16, 8, seed=2)), {}),
        "matmul_broadcast": (F.matmul, torch.matmul, (x(6, 1, 2, 4, seed=1), x(5, 4, 3, seed=2)), {}),
        "matmul_vector": (F.matmul, torch.matmul, (x(16, seed=9), x(16, seed=4)), {}),
    }


# --- copies and convolutions ---


def _convolved(conv2d: Function) -> Function:
    """Of an image without a batch, filtered by one that is made of the other tensor, with a bias."""
    return lambda x, y: conv2d(x, y[None, :, :2, :2], y[0, 0, :1], (1, 2), 1)


def _normalised(batch_norm: Function) -> Function:
    """Of a batch whose statistics are its own, and whose weight and bias are of the other tensor."""
    return lambda x, y: batch_norm(x, None, None, y[0, :, 0], y[1, :, 1], True)


#: Ours and torch's, of two tensors of one shape.
PAIRS: dict[str, tuple[Function, Function]] = {
    "cat": (lambda x, y: F.cat([x, y], 1), lambda x, y: torch.cat([x, y], 1)),
    "pad": (lambda x, y: F.pad(x, (1, -1), value=2.0) * y, lambda x, y: functional.pad(x, (1, -1), value=2.0) * y),
    "tril": (lambda x, y: F.tril(x, 1) * y, lambda x, y: x.tril(1) * y),
    "copy_": (lambda x, y: F.copy_(x * y, y), lambda x, y: (x * y).copy_(y)),
    "max_pool2d": (lambda x, y: F.max_pool2d(x * y, 2, 1, 1), lambda x, y: functional.max_pool2d(x * y, 2, 1, 1)),
    "avg_pool2d": (lambda x, y: F.avg_pool2d(x * y, 2, 1, 1), lambda x, y: functional.avg_pool2d(x * y, 2, 1, 1)),
    "adaptive_avg_pool2d": (
        lambda x, y: F.adaptive_avg_pool2d(x * y, (2, 3)),
        lambda x, y: functional.adaptive_avg_pool2d(x * y, (2, 3)),
    ),
    "interpolate": (
        lambda x, y: F.interpolate((x * y)[None], (5, 3), mode="bilinear"),
        lambda x, y: functional.interpolate((x * y)[None], (5, 3), mode="bilinear"),
    ),
    "upsample_nearest": (
        lambda x, y: F.upsample_nearest((x * y)[None], (5, 3)),
        lambda x, y: functional.interpolate((x * y)[None], (5, 3)),
    ),
    "conv2d": (_convolved(F.conv2d), _convolved(functional.conv2d)),
    "batch_norm": (_normalised(F.batch_norm), _normalised(functional.batch_norm)),
    "batch_norm_relu": (
        lambda x, y: F.batch_norm_relu(x, None, None, y[0, :, 0], y[1, :, 1], True, residual=y),
        lambda x, y: torch.relu(_normalised(functional.batch_norm)(x, y) + y),
    ),
    "group_norm": (
        lambda x, y: F.group_norm(x, 1, y[0, :, 0], y[-1, :, 1]),
        lambda x, y: functional.layer_norm(x, x.shape[1:]) * y[0, :, :1] + y[-1, :, 1:2],
    ),
    "sort": (lambda x, y: F.sort(x * y, 1, True).values * y, lambda x, y: torch.sort(x * y, 1, True).values * y),
    "topk": (lambda x, y: F.topk(x * y, 2).values, lambda x, y: torch.topk(x * y, 2).values),
    "kthvalue": (lambda x, y: F.kthvalue(x * y, 2, 1).values, lambda x, y: torch.kthvalue(x * y, 2, 1).values),
    "masked_fill": (lambda x, y: F.masked_fill(x, y > 0, 2.0) * y, lambda x, y: x.masked_fill(y > 0, 2.0) * y),
}

# --- one call of each ---

#: (shape, smoothing, weighted) of a loss, by the third word of its name.
SHAPES: dict[str, tuple[tuple[int, ...], float, bool]] = {
    "": ((4, 5), 0.1, True),
    "vector": ((3,), 0.0, False),
    "deep": ((2, 3, 2), 0.2, True),
    "smooth": ((2, 3, 1, 2), 1.0, False),
}
SHAPED = [f"{name} {shape}" for name in LOSSES[:3] for shape in SHAPES if shape]
PRODUCTS = ("mm", "bmm", "addmm", "addmm_row", "addmm_column", "linear", "linear_batch", "linear_no_bias")
PRODUCTS += ("matmul_broadcast",)
NAMES = (*FIXED, *ROWS, *LOSSES, *PRODUCTS, *PAIRS)


def derivable(
    name: str, device: str, shape: tuple[int, ...] = (2, 3, 4)
) -> tuple[Function, Function, list[torch.Tensor]]:
    """Ours, torch's, and small leaves of f64, of ``shape`` where the function has rows."""
    if name in FIXED:
        call = fixed(device)[name]
        return on_copies(call, call.ours), on_copies(call, call.theirs), call.copies(requires_grad=True)
    if name in ROWS:
        return rows(name, device, shape=shape)
    if name in PAIRS:
        g = torch.Generator().manual_seed(0)
        drawn = (torch.randn(shape, generator=g, dtype=torch.float64).to(device).requires_grad_() for _ in range(2))
        return *PAIRS[name], [*drawn]
    if name in PRODUCTS:
        ours, theirs, tensors, keywords = products(device)[name]
        leaves = [t[tuple(slice(3) for _ in t.shape)].detach().clone().requires_grad_() for t in tensors]
        return partial(ours, **keywords), partial(theirs, **keywords), leaves
    of, *options = SHAPES[(*name.split(), "")[2]]
    return *losses(name, device, of, *options), [loss_problem(of, torch.float64, device)[0]]
