"""Every function and module of triplan beside torch's, in small calls, whose time is the host's.

``python -m bench host`` times them; tests compare their results and gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as tf

Tensor = torch.Tensor
#: (rows, width, dtype) of the calls: so small that the device is rarely slower than the host.
SIZES = ((64, 256, torch.bfloat16), (8, 64, torch.float32))

#: Functions of numbers alone, of modules, or whose result's size depends on values: these are not replayed.
WITHOUT_TENSORS = (
    "arange",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "unique_consecutive",
    "zeros",
    "nn.Patched",
    "nn.patch",
    "nn.unpatch",
)
#: Functions that differ in a number, an op or an axis from one that is not here.
ALIKE = (
    *("bernoulli_", "dropout2d", "dropout3d", "exponential_", "nn.Dropout1d", "nn.Dropout2d", "nn.Dropout3d", "normal"),
    *("randint_like", "randn_like", "random_", "trunc_normal_", "uniform_"),
)
#: Drops nothing, in the way that other probabilities are.
RARE = 1e-12
#: Elements of a head that is rotated.
ROTATED = 32


def _fused(x: Any, y: Any, bias: Any) -> Any:
    """An expression of one's own."""
    return importlib.import_module("triplan").expr.silu(x + bias) * y


def _product(x: Any, y: Any) -> Any:
    return x * y


def _fused_by_torch(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return tf.silu(x + bias) * y


@dataclass(frozen=True)
class Draw:
    """Draws arguments: matrices of ``m`` rows of ``n`` elements, and what goes with them."""

    m: int
    n: int
    dtype: torch.dtype
    device: torch.device

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def x(self) -> Tensor:
        """A new matrix at each access."""
        return self.values(self.m, self.n)

    def positions(self, *shape: int, of: int) -> Tensor:
        """Positions below ``of``, which may repeat."""
        return torch.randint(of, shape, device=self.device)

    def distinct(self, *shape: int) -> Tensor:
        """Positions below the extent of the first axis. None repeats along it."""
        return torch.rand(*shape, device=self.device).argsort(0)


#: Reductions whose gradients are measured too.
DIFFERENTIABLE = ("sum", "mean", "prod", "amax", "amin", "var", "std", "logsumexp")


@dataclass(frozen=True)
class Call:
    """One call of a function of triplan's and of torch's.

    Attributes:
        ours, theirs: the functions, or modules.
        args: the arguments of both.
        grads: positions of the arguments that get a gradient; none if the function writes in place.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    args: tuple[Any, ...]
    grads: tuple[int, ...] = ()

    def given(self, recording: bool) -> tuple[Any, ...]:
        """The arguments; if ``recording``, new leaves that require a gradient in place of those in ``grads``."""
        return tuple(
            a.detach().clone().requires_grad_() if recording and i in self.grads else a for i, a in enumerate(self.args)
        )


def angles(d: Draw) -> tuple[Tensor, Tensor]:
    """cos and sin of ``d.n`` positions, in f32."""
    frequencies = 10000.0 ** (-torch.arange(0, ROTATED, 2, device=d.device).double() / ROTATED)
    angle = torch.arange(d.n, device=d.device).float()[:, None] * frequencies.float()
    return angle.cos(), angle.sin()


def embedded(index: Tensor, weight: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table: their norm, and they."""
    found = tf.embedding(index, weight)
    return tf.rms_norm(found, norm_weight.shape, norm_weight, 1e-5), found


def _batch_norm_relu(x: Tensor, *given: Any) -> Tensor:
    """``given``: the arguments of torch's batch_norm, and what is added."""
    return tf.relu(tf.batch_norm(x, *given[:-1]) + given[-1])


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of several results, as one of the first."""
    return lambda *args: function(*args)[0]


class Written(torch.nn.Module):
    """A module as users write it: ``function`` of the inputs, then of the parameters."""

    def __init__(self, function: Callable[..., Any], *parameters: str) -> None:
        super().__init__()
        self.function = function
        for name in parameters:
            self.register_parameter(name, torch.nn.Parameter(torch.empty(0)))

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.parameters())


def _head(width: int, classes: int) -> torch.nn.Module:
    """A last layer and its loss as users write it."""
    head: Any = torch.nn.Module()
    head.linear = torch.nn.Linear(width, classes, bias=False)
    head.forward = lambda x, target: tf.cross_entropy(head.linear(x), target)
    return head  # type: ignore[no-any-return]


def with_given(module: torch.nn.Module, *parameters: str, inputs: int = 1) -> Callable[..., Any]:
    """The module as a function of its inputs, then of its parameters, so that these can be leaves of a call."""
    return lambda *given: torch.func.functional_call(
        module, dict(zip(parameters, given[inputs:], strict=True)), given[:inputs]
    )


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention of (batch, length, heads, width)."""
    return tf.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _adjusted(x: Tensor, bias: Tensor, counts: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(allowed, x + bias - 0.25 * counts, -torch.inf)


def _speculative(draft: Tensor, probs: Tensor) -> Tensor:
    """Tokens of a draft that was certain, as they are usually accepted."""
    places = torch.arange(draft.shape[1] + 1, device=draft.device)
    chances = probs[:, :-1].gather(2, draft[..., None])[..., 0]
    count = (torch.rand_like(chances) < chances).long().cumprod(1).sum(1, keepdim=True)
    known = tf.pad(draft, (0, 1))
    left = probs.gather(1, count[..., None].expand(-1, 1, probs.shape[2]))[:, 0]
    missed = (count < draft.shape[1]) * left.gather(1, known.gather(1, count))
    last = left.scatter_add(1, known.gather(1, count), -missed).multinomial(1)
    return torch.where(places < count, known, torch.where(places == count, last, -1))


def calls(d: Draw) -> dict[str, Call]:
    """Every function and module, by name."""
    ours: Any = importlib.import_module("triplan.functional")
    modules: Any = importlib.import_module("triplan.nn")
    turned: Any = importlib.import_module("bench.rotary")
    x, w, b, square = d.x, d.values(d.n), d.values(d.n), d.values(d.n, d.n)
    target, rows = d.positions(d.m, of=d.n), d.positions(d.m, of=d.m)
    wide, once = d.positions(d.m, d.n, of=d.m), d.distinct(d.m, d.n)
    matrix, shape = d.values(d.n, d.m), (d.n,)
    vector, mask, bag = d.distinct(d.m), d.positions(d.m, d.n, of=2).bool(), d.positions(4, d.m // 2, of=d.m)
    first, second, whole = d.values(4, d.m, d.n), d.values(4, d.n, d.m), d.values(4, d.m, d.m)
    heads, paged = d.values(d.m, d.n, ROTATED), d.values(d.n, 2, d.m, ROTATED)
    turning = (heads, heads + 1, -heads, paged, paged.clone(), d.distinct(2 * d.n)[: d.n])
    variances = d.values(d.n).abs() + 1
    untied = d.distinct(d.n, d.m).T.contiguous().to(d.dtype)  # torch takes any of equal elements
    certain = d.positions(d.m, 4, of=d.n)

    def lengths() -> Tensor:
        return d.values(2, d.m, 4, 16)

    starts = torch.arange(0, 3 * d.m, d.m, dtype=torch.int32, device=d.device)
    found: dict[str, Call] = {
        "relu_squared": Call(ours.relu_squared, lambda x: tf.relu(x).square(), (x,), (0,)),
        "attention": Call(lambda *t: ours.attention(*t)[0], _attention, (lengths(), lengths(), lengths()), (0, 1, 2)),
        "attention_qkvpacked": Call(
            lambda t: ours.attention_qkvpacked(t)[0],
            lambda t: _attention(*t.unflatten(2, (3, 4)).unbind(2)),
            (d.values(2, d.m, 12, 16),),
            (0,),
        ),
        "attention_varlen": Call(
            lambda *t: ours.attention_varlen(*(x.flatten(0, 1) for x in t), *(starts,) * 2)[0],
            lambda *t: _attention(*t).flatten(0, 1),
            (lengths(), lengths(), lengths()),
            (0, 1, 2),
        ),
        "scaled_dot_product_attention": Call(
            ours.scaled_dot_product_attention,
            tf.scaled_dot_product_attention,
            (lengths(), lengths(), lengths()),
            (0, 1, 2),
        ),
        "add": Call(ours.add, torch.add, (x, d.x), (0, 1)),
        "add_": Call(ours.add_, Tensor.add_, (d.x, b)),
        "where": Call(ours.where, torch.where, (mask, x, 0.5), (1,)),
        "exp": Call(ours.exp, torch.exp, (x,), (0,)),
        "clamp": Call(ours.clamp, torch.clamp, (x, -0.5, 0.5), (0,)),
        "gelu": Call(ours.gelu, tf.gelu, (x,), (0,)),
        "expression": Call(partial(ours.expression, _fused), _fused_by_torch, (x, d.x, b), (0, 1, 2)),
        "swiglu": Call(ours.swiglu, lambda x, y: tf.silu(x) * y, (x, d.x), (0, 1)),
        "nn.LeakyReLU": Call(modules.LeakyReLU(0.2), torch.nn.LeakyReLU(0.2), (x,), (0,)),
        "softmax": Call(ours.softmax, torch.softmax, (x, -1), (0,)),
        "log_softmax": Call(ours.log_softmax, torch.log_softmax, (x, -1), (0,)),
        "cumsum": Call(ours.cumsum, torch.cumsum, (x, -1), (0,)),
        **{
            name: Call(getattr(ours, name), getattr(torch, name), (x, -1), (0,) if name in DIFFERENTIABLE else ())
            for name in (*DIFFERENTIABLE, "argmax", "argmin", "any", "all")
        },
        **{
            name: Call(_first(getattr(ours, name)), _first(getattr(torch, name)), (x, -1))
            for name in ("max", "min", "var_mean", "std_mean")
        },
        **{
            name: Call(_first(getattr(ours, name)), _first(getattr(torch, name)), (untied, *args), (0,))
            for name, args in {"topk": (4,), "kthvalue": (4,), "sort": ()}.items()
        },
        "argsort": Call(ours.argsort, lambda x: torch.argsort(x, stable=True), (x,)),
        "searchsorted": Call(ours.searchsorted, torch.searchsorted, (d.x[0].sort().values, d.x)),
        "aminmax": Call(_first(ours.aminmax), _first(torch.aminmax), (x,)),
        "count_nonzero": Call(ours.count_nonzero, torch.count_nonzero, (x, -1)),
        "vector_norm": Call(ours.vector_norm, torch.linalg.vector_norm, (x, 2, -1), (0,)),
        "sample": Call(lambda x: ours.sample(x, temperature=0.0, seed=1), lambda x: x.argmax(1), (x,)),
        "adjust_logits": Call(
            lambda x, y, z, k: ours.adjust_logits(x, bias=y, counts=z, frequency_penalty=0.25, allowed=k),
            _adjusted,
            (x, b, d.positions(d.m, d.n, of=3), mask),
            (0, 1),
        ),
        "token_log_probs": Call(
            ours.token_log_probs, lambda x, t: tf.log_softmax(x, 1).gather(1, t[:, None])[:, 0], (x, target), (0,)
        ),
        "speculative_sample": Call(
            lambda *t: ours.speculative_sample(t[0], None, t[1], seed=1)[0],
            _speculative,
            (certain[:, :-1].contiguous(), tf.one_hot(certain, d.n).float()),
        ),
        "cumprod": Call(ours.cumprod, torch.cumprod, (x, -1), (0,)),
        "layer_norm": Call(ours.layer_norm, tf.layer_norm, (x, shape, w, b), (0, 2, 3)),
        "rms_norm": Call(ours.rms_norm, tf.rms_norm, (x, shape, w, 1e-5), (0, 2)),
        "l2_norm": Call(lambda x: ours.l2_norm(x), lambda x: tf.normalize(x, dim=-1), (x,), (0,)),
        "cross_entropy": Call(ours.cross_entropy, tf.cross_entropy, (x, target), (0,)),
        "linear_cross_entropy": Call(
            ours.linear_cross_entropy,
            lambda x, weight, target: tf.cross_entropy(
                tf.linear(x, weight), target
            ),  # so does torch's own, which is new
            (x, d.x, d.positions(d.m, of=d.m)),
            (0, 1),
        ),
        "nll_loss": Call(ours.nll_loss, tf.nll_loss, (x, target), (0,)),
        **{
            name: Call(getattr(ours, name), getattr(tf, name), (x, d.x), (0, 1))
            for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        },
        "reduce_expression": Call(
            lambda x, y: ours.reduce_expression("sum", _product, x, y, dim=1),
            lambda x, y: (x * y).sum(1),
            (x, d.x),
            (0, 1),
        ),
        "mm": Call(ours.mm, torch.mm, (x, square), (0, 1)),
        "bmm": Call(ours.bmm, torch.bmm, (d.values(4, d.m, d.n), d.values(4, d.n, d.m)), (0, 1)),
        "matmul": Call(ours.matmul, torch.matmul, (d.values(4, d.m, d.n), matrix), (0, 1)),
        "addmm": Call(ours.addmm, torch.addmm, (b, x, square), (0, 1, 2)),
        "linear": Call(ours.linear, tf.linear, (x, square, b), (0, 1, 2)),
        "conv1d": Call(ours.conv1d, tf.conv1d, (d.values(2, 16, d.n), d.values(16, 16, 3)), (0, 1)),
        "conv2d": Call(ours.conv2d, tf.conv2d, (d.values(2, 8, d.m, 8), d.values(8, 8, 3, 3), d.values(8)), (0, 1, 2)),
        "max_pool1d": Call(ours.max_pool1d, tf.max_pool1d, (d.values(2, 16, d.m), 2), (0,)),
        "avg_pool1d": Call(ours.avg_pool1d, tf.avg_pool1d, (d.values(2, 16, d.m), 2), (0,)),
        "adaptive_avg_pool1d": Call(ours.adaptive_avg_pool1d, tf.adaptive_avg_pool1d, (d.values(2, 16, d.m), 2), (0,)),
        "max_pool2d": Call(ours.max_pool2d, tf.max_pool2d, (d.values(2, 8, d.m, 8), 2), (0,)),
        "avg_pool2d": Call(ours.avg_pool2d, tf.avg_pool2d, (d.values(2, 8, d.m, 8), 2), (0,)),
        "adaptive_avg_pool2d": Call(
            ours.adaptive_avg_pool2d, tf.adaptive_avg_pool2d, (d.values(2, 8, d.m, 8), 1), (0,)
        ),
        "interpolate": Call(ours.interpolate, tf.interpolate, (d.values(2, 8, d.m, 8), None, 2.0, "bilinear"), (0,)),
        "upsample_nearest": Call(ours.upsample_nearest, tf.interpolate, (d.values(2, 8, d.m, 8), None, 2.0), (0,)),
        "upsample_bilinear": Call(
            ours.upsample_bilinear,
            lambda x, size, scale: tf.interpolate(x, size, scale, "bilinear", True),
            (d.values(2, 8, d.m, 8), None, 2.0),
            (0,),
        ),
        "group_norm": Call(
            ours.group_norm, tf.group_norm, (d.values(d.m, 16, 8), 4, d.values(16), d.values(16)), (0, 2)
        ),
        "batch_norm": Call(ours.batch_norm, tf.batch_norm, (x, d.values(d.n), variances, w, b), (0, 3, 4)),
        "batch_norm_relu": Call(
            # Without the half, sums of whole numbers lie at the kink of relu, but for a rounding.
            ours.batch_norm_relu,
            _batch_norm_relu,
            (x, None, None, w, b, True, 0.1, 1e-5, d.x + 0.5),
            (0, 3, 4, 8),
        ),
        "embedding_rms_norm": Call(
            lambda *a: ours.embedding_rms_norm(*a)[0], lambda *a: embedded(*a)[0], (rows, x, w), (1, 2)
        ),
        "rotary": Call(ours.rotary, turned.rotated, (heads, None, *angles(d)), (0,)),
        "cached_rotary": Call(ours.cached_rotary, turned.cached, (*turning, *angles(d))),
        "gather": Call(ours.gather, torch.gather, (x, 0, wide), (0,)),
        "scatter": Call(ours.scatter, torch.scatter, (x, 0, once, d.x), (0, 3)),
        "scatter_add": Call(ours.scatter_add, torch.scatter_add, (x, 0, wide, d.x), (0, 3)),
        "scatter_add_": Call(ours.scatter_add_, Tensor.scatter_add_, (d.x, 0, wide, d.x)),
        "index_select": Call(ours.index_select, torch.index_select, (x, 0, rows), (0,)),
        "index_add": Call(ours.index_add, torch.index_add, (x, 0, rows, d.x), (0, 3)),
        "index_add_": Call(ours.index_add_, Tensor.index_add_, (d.x, 0, rows, d.x)),
        "addbmm": Call(ours.addbmm, torch.addbmm, (whole[0], first, second), (0, 1, 2)),
        "baddbmm": Call(ours.baddbmm, torch.baddbmm, (whole, first, second), (0, 1, 2)),
        "normalize": Call(ours.normalize, tf.normalize, (x, 2.0, -1), (0,)),
        "gather_with_grad": Call(ours.gather_with_grad, torch.gather, (x, 0, wide), (0,)),
        "take_along_dim": Call(ours.take_along_dim, torch.take_along_dim, (x, wide, 0), (0,)),
        "index_copy": Call(ours.index_copy, torch.index_copy, (x, 0, vector, d.x), (0, 3)),
        "index_copy_": Call(ours.index_copy_, Tensor.index_copy_, (d.x, 0, vector, d.x)),
        "index_fill": Call(ours.index_fill, torch.index_fill, (x, 0, vector, 2.5), (0,)),
        "index_fill_": Call(ours.index_fill_, Tensor.index_fill_, (d.x, 0, vector, 2.5)),
        "masked_scatter": Call(ours.masked_scatter, torch.masked_scatter, (x, mask, d.x), (0, 2)),
        "masked_scatter_": Call(ours.masked_scatter_, Tensor.masked_scatter_, (d.x, mask, d.x)),
        "scatter_": Call(ours.scatter_, Tensor.scatter_, (d.x, 0, once, d.x)),
        "scatter_reduce": Call(ours.scatter_reduce, torch.scatter_reduce, (x, 0, wide, d.x, "amax"), (0, 3)),
        "scatter_reduce_": Call(ours.scatter_reduce_, Tensor.scatter_reduce_, (d.x, 0, wide, d.x, "amax")),
        "index_put_": Call(ours.index_put_, Tensor.index_put_, (d.x, (vector,), d.x)),
        "embedding_bag": Call(ours.embedding_bag, tf.embedding_bag, (bag, x), (1,)),
        "index_put": Call(ours.index_put, torch.index_put, (x, (d.distinct(d.m),), d.x), (0, 2)),
        "embedding": Call(ours.embedding, tf.embedding, (rows, x), (1,)),
        "cast": Call(ours.cast, Tensor.to, (x, torch.float16), (0,)),
        "cat": Call(lambda *t: ours.cat(t, 1), lambda *t: torch.cat(t, 1), (x, d.x), (0, 1)),
        "clone": Call(ours.clone, torch.clone, (x,), (0,)),
        "contiguous": Call(lambda x: ours.contiguous(x.t()), lambda x: x.t().contiguous(), (x,), (0,)),
        "copy_": Call(ours.copy_, Tensor.copy_, (d.x, b)),
        "expand_copy": Call(ours.expand_copy, torch.expand_copy, (b, (d.m, d.n)), (0,)),
        "fill_": Call(ours.fill_, Tensor.fill_, (d.x, 2.5)),
        "flip": Call(ours.flip, torch.flip, (x, (1,)), (0,)),
        "full_like": Call(ours.full_like, torch.full_like, (x, 2.5)),
        "masked_fill": Call(ours.masked_fill, torch.masked_fill, (x, mask, 2.5), (0,)),
        "masked_fill_": Call(ours.masked_fill_, Tensor.masked_fill_, (d.x, mask, 2.5)),
        "tile": Call(ours.tile, torch.tile, (x, (2, 3)), (0,)),
        "ones_like": Call(ours.ones_like, torch.ones_like, (x,)),
        "pad": Call(ours.pad, tf.pad, (x, (1, 2)), (0,)),
        "permute_copy": Call(ours.permute_copy, torch.permute_copy, (x, (1, 0)), (0,)),
        "roll": Call(ours.roll, torch.roll, (x, 1, 1), (0,)),
        "stack": Call(lambda *t: ours.stack(t), lambda *t: torch.stack(t), (x, d.x), (0, 1)),
        "t_copy": Call(ours.t_copy, torch.t_copy, (x,), (0,)),
        "transpose_copy": Call(ours.transpose_copy, torch.transpose_copy, (x, 0, 1), (0,)),
        "tril": Call(ours.tril, torch.tril, (x,), (0,)),
        "tril_": Call(ours.tril_, Tensor.tril_, (d.x,)),
        "triu": Call(ours.triu, torch.triu, (x, 1), (0,)),
        "triu_": Call(ours.triu_, Tensor.triu_, (d.x, 1)),
        # Of random numbers those that are certain, as tests compare them.
        "bernoulli": Call(ours.bernoulli, torch.bernoulli, (mask.to(d.dtype),)),
        "bernoulli_": Call(ours.bernoulli_, Tensor.bernoulli_, (d.x, 1.0)),
        "exponential_": Call(lambda x: ours.exponential_(x).mul_(0), lambda x: x.exponential_().mul_(0), (d.x,)),
        "normal": Call(ours.normal, torch.normal, (x, 0.0)),
        "normal_": Call(ours.normal_, Tensor.normal_, (d.x, 2.0, 0.0)),
        "rand_like": Call(lambda x: ours.rand_like(x).mul_(0), lambda x: torch.rand_like(x).mul_(0), (x,)),
        "randn_like": Call(lambda x: ours.randn_like(x).mul_(0), lambda x: torch.randn_like(x).mul_(0), (x,)),
        "randint_like": Call(ours.randint_like, torch.randint_like, (x, 5, 6)),
        "random_": Call(ours.random_, Tensor.random_, (d.x, 5, 6)),
        "trunc_normal_": Call(ours.trunc_normal_, torch.nn.init.trunc_normal_, (d.x, 0.0, 1.0, 2.0, 2.0)),
        "uniform_": Call(ours.uniform_, Tensor.uniform_, (d.x, 2.0, 2.0)),
        "dropout": Call(ours.dropout, tf.dropout, (x, RARE), (0,)),
        "dropout1d": Call(ours.dropout1d, tf.dropout1d, (first, RARE), (0,)),
        "dropout2d": Call(ours.dropout2d, tf.dropout2d, (first[None], RARE), (0,)),
        "dropout3d": Call(ours.dropout3d, tf.dropout3d, (first[None, None], RARE), (0,)),
        "zero_": Call(ours.zero_, Tensor.zero_, (d.x,)),
        "zeros_like": Call(ours.zeros_like, torch.zeros_like, (x,)),
    }
    for name in ("LayerNorm", "RMSNorm"):
        mine, its = (getattr(m, name)(d.n).to(d.device, d.dtype) for m in (modules, torch.nn))
        found[f"nn.{name}"] = Call(mine, its, (x,), (0,))
    with_parameters: dict[str, tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...]]] = {
        "Conv1d": ((16, 16, 3), (d.values(2, 16, d.n),), (0,)),
        "Conv2d": ((16, 16, 3), (d.values(2, 16, d.m, 8),), (0,)),
        "Linear": ((16, 32), (d.values(d.m, 16),), (0,)),
    }
    for name, (sizes, given, grads) in with_parameters.items():
        mine, its = (getattr(m, name)(*sizes).to(d.device, d.dtype) for m in (modules, torch.nn))
        its.load_state_dict(mine.state_dict())
        found[f"nn.{name}"] = Call(mine, its, given, grads)
    found["nn.Flatten"] = Call(modules.Flatten(), torch.nn.Flatten(), (whole.transpose(0, 1),), (0,))
    for name in ("LogSoftmax", "Softmax"):
        found[f"nn.{name}"] = Call(getattr(modules, name)(-1), getattr(torch.nn, name)(-1), (x,), (0,))
    mine, its = (m.GroupNorm(4, 16, device=d.device, dtype=d.dtype) for m in (modules, torch.nn))
    found["nn.GroupNorm"] = Call(mine, its, (d.values(4, 16, d.m),), (0,))
    for name, sides in {"BatchNorm1d": (), "BatchNorm2d": (2, 2), "BatchNorm3d": (2, 2, 1)}.items():
        # (torch.func.vmap takes no training that updates running statistics.)
        options = {"track_running_stats": name != "BatchNorm2d", "device": d.device, "dtype": d.dtype}
        mine, its = (getattr(m, name)(16, **options).train(name == "BatchNorm2d") for m in (modules, torch.nn))
        found[f"nn.{name}"] = Call(mine, its, (d.values(4, 16, *sides),), (0,))
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool"):
        for axes, sides in ((1, (d.m,)), (2, (d.m, 8))):
            mine, its = (getattr(m, f"{name}{axes}d")(2) for m in (modules, torch.nn))
            found[f"nn.{name}{axes}d"] = Call(mine, its, (d.values(2, 8, *sides),), (0,))
    for name, how in {"Upsample": {"mode": "bilinear"}, "UpsamplingNearest2d": {}, "UpsamplingBilinear2d": {}}.items():
        mine, its = (getattr(m, name)(scale_factor=2, **how) for m in (modules, torch.nn))
        found[f"nn.{name}"] = Call(mine, its, (d.values(2, 8, d.m, 8),), (0,))
    mine, its = (m.MultiheadAttention(32, 2).to(d.device, d.dtype) for m in (modules, torch.nn))
    its.load_state_dict(mine.state_dict())
    mine, its = (partial(lambda module, x: module(x, x, x, need_weights=False)[0], m) for m in (mine, its))
    found["nn.MultiheadAttention"] = Call(mine, its, (d.values(d.m, 4, 32),), (0,))
    adapted = partial(modules.transformers_attention, torch.nn.Module(), attention_mask=None, is_causal=False)
    found["nn.transformers_attention"] = Call(
        lambda *t: adapted(*t)[0],
        lambda *t: tf.scaled_dot_product_attention(*t).transpose(1, 2),
        (lengths(), lengths(), lengths()),
        (0, 1, 2),
    )
    for name, width in {"ConstantPad": 1.5, "ZeroPad": None}.items():
        for axes in (1, 2, 3):
            given = ((1, 2) * axes, *(() if width is None else (width,)))
            mine, its = (getattr(m, f"{name}{axes}d")(*given) for m in (modules, torch.nn))
            found[f"nn.{name}{axes}d"] = Call(mine, its, (d.values(2, 3, 4, d.m, d.n),), (0,))
    for name, t in {"": x, "1d": first, "2d": first[None], "3d": first[None, None]}.items():
        mine, its = (getattr(m, f"Dropout{name}")(RARE) for m in (modules, torch.nn))
        found[f"nn.Dropout{name}"] = Call(mine, its, (t,), (0,))

    # Parameters are given by torch.func.functional_call to our module and to one of torch, so that both cost the same.
    for name in ("Embedding", "EmbeddingBag"):
        mine, its = (with_given(getattr(m, name)(d.m, d.n), "weight") for m in (modules, torch.nn))
        found[f"nn.{name}"] = Call(mine, its, (rows if name == "Embedding" else bag, x), (1,))
    pair = (modules.FusedEmbeddingRMSNorm(d.m, d.n), Written(embedded, "weight", "norm_weight"))
    mine, its = (_first(with_given(module, "weight", "norm_weight")) for module in pair)
    found["nn.FusedEmbeddingRMSNorm"] = Call(mine, its, (rows, x, w), (1, 2))
    turn = modules.RotaryEmbedding(ROTATED, device=d.device)
    found["nn.RotaryEmbedding"] = Call(turn, lambda x: turned.rotated(x, None, *angles(d)), (heads,), (0,))
    ends = (modules.LinearCrossEntropyLoss(d.n, d.m), _head(d.n, d.m))
    mine, its = (with_given(end, "linear.weight", inputs=2) for end in ends)
    found["nn.LinearCrossEntropyLoss"] = Call(mine, its, (x, rows, d.x), (0, 2))
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"):
        found[f"nn.{name}"] = Call(getattr(modules, name)(), getattr(torch.nn, name)(), (x, d.x), (0,))
    found["nn.NLLLoss"] = Call(modules.NLLLoss(), torch.nn.NLLLoss(), (x, target), (0,))
    found["nn.CrossEntropyLoss"] = Call(modules.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(), (x, target), (0,))
    return found
