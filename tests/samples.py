"""One descriptor an op, small enough for any backend, wide enough for the rows kernels; operands on a GPU; threads."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import triplan as tp

TYPES = tp.descriptor_types()
MATRIX = {"input_shape": (5, 32), "element": "f32"}
SOFTMAXES = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
NORMS = tuple(f"{name}_norm{suffix}" for name in ("rms", "layer", "l2") for suffix in ("", "_backward"))
LOSSES = ("cross_entropy_backward", "nll_loss", "nll_loss_backward")
PRODUCT = {"m": 5, "n": 32, "k": 9, "element": "f32"}
HEADS = {"batch": 1, "queries": 2, "keys": 3, "heads": 4, "key_heads": 2, "head_dim": 32, "element": "f32"}
EVERYTHING = {"epilogue": "bias", "reads_c0": True, "saves_pre": True}
READ = {"out_shape": (6, 32), "src_dim_size": 9, "element": "f32"}
WRITTEN = {"src_shape": (6, 32), "out_dim_size": 9, "element": "f32"}
TABLE = {"index_shape": (2, 3), "num_embeddings": 9, "embedding_dim": 32, "element": "f32"}
TURNED = {"q_shape": (2, 4, 3, 8), "k_heads": 2, "rotary_dim": 4, "element": "f32"}
FILTERED = {"batch": 2, "in_channels": 6, "height": 4, "width": 5, "out_channels": 6, "kernel": (3, 2), "groups": 2}
FILTERED |= {"stride": (1, 2), "padding": (1, 0, 0, 1), "element": "f32"}
POOLED = {"batch": 2, "channels": 6, "height": 4, "width": 5, "element": "f32"}
IMAGES = {"batch": 5, "channels": 6, "pixels": 7, "element": "f32"}
ORDERED = {"rows": 5, "n": 32, "element": "f32"}
LISTED = {"sizes": (5, 0, 33), "scaled": True, "element": "f32"}
#: Reductions, of each kind of accumulator one.
REDUCTIONS = ("sum", "amax", "max", "var", "vector_norm", "logsumexp", "aminmax", "var_mean")
#: Reductions of expressions: sums and extrema.
REDUCED_EXPRESSIONS = ("sum_expression", "amax_expression")
#: Pooling of windows of one size.
POOLS = ("max_pool2d", "max_pool2d_backward", "avg_pool2d", "avg_pool2d_backward")
#: Ops on images that have the size of the result.
SIZED = tuple(
    f"{name}2d{back}"
    for name in ("adaptive_avg_pool", "upsample_nearest", "upsample_bilinear")
    for back in ("", "_backward")
)
#: Copies, with what they do along the axes.
COPIES = {"copy": (), "roll": (0, 3), "tril": (1,), "pad": (0, 0, 2, 1)}

#: Operands of an expression.
a, b = tp.expr.operand("a"), tp.expr.operand("b")

SAMPLES: dict[str, tp.Descriptor] = {
    d.op: d
    for d in (
        *(TYPES[op](gather_dim=0, **READ) for op in ("gather", "gather_backward")),
        *(TYPES[op](select_dim=0, **READ) for op in ("index_select", "index_select_backward")),
        *(TYPES[op](scatter_dim=0, **WRITTEN) for op in ("scatter_add", "scatter")),
        *(
            tp.ScatterReduceDescriptor(op=op, scatter_dim=0, **{**WRITTEN, "element": "i32"})
            for op in tp.ScatterReduceDescriptor.ops()
        ),
        tp.IndexAddDescriptor(add_dim=0, **WRITTEN),
        tp.IndexPutDescriptor(out_shape=(5, 4, 32), index_shape=(6,), num_indices=1, element="f32"),
        *(TYPES[op](**TABLE) for op in ("embedding", "embedding_backward", "normed_embedding")),
        tp.GemmDescriptor(**PRODUCT, **EVERYTHING),
        tp.BatchedGemmDescriptor(batch=3, **PRODUCT, **EVERYTHING),
        tp.GemmBackwardDescriptor(**PRODUCT, wants_dbias=True),
        *(TYPES[op](softmax_axis=1, **MATRIX) for op in SOFTMAXES),
        *(TYPES[op](**MATRIX) for op in (*NORMS, "scale_gradient")),
        *(tp.ScanDescriptor(op=op, scan_axis=1, **MATRIX) for op in tp.ScanDescriptor.ops()),
        tp.CumprodBackwardDescriptor(scan_axis=1, **MATRIX),
        *(TYPES[op](**IMAGES) for op in ("batch_norm", "batch_norm_backward")),
        *(TYPES[op](groups=2, **IMAGES) for op in ("group_norm", "group_norm_backward")),
        *(TYPES[op](table_rows=9, positions=True, **TURNED) for op in ("rotary", "normed_rotary")),
        tp.CachedRotaryDescriptor(table_rows=9, positions=True, pages=3, page_size=4, v_dim=6, eps=1e-6, **TURNED),
        tp.CrossEntropyDescriptor(reduction="byte_mean", weight=True, label_smoothing=0.1, gradient=True, **MATRIX),
        *(TYPES[op](reduction="byte_mean", weight=True, **MATRIX) for op in LOSSES),
        tp.UnaryDescriptor(op="relu_squared", **MATRIX),
        tp.UnaryBackwardDescriptor(op="relu_squared_backward", **MATRIX),
        tp.BinaryDescriptor(op="swiglu", **MATRIX),
        tp.TernaryDescriptor(op="addcmul", z_shape=(5, 1), **MATRIX),
        tp.ExpressionDescriptor.of(a * tp.expr.sigmoid(a) + b, a=("f32", (5, 32)), b=("f32", (5, 1))),
        *(TYPES[op](op=op, amounts=by, **MATRIX) for op, by in COPIES.items()),
        *(TYPES[op](op=op, element="f32", input_shape=(5, 3), reduce_axes=(1,)) for op in REDUCTIONS),
        *(
            tp.ExpressionReductionDescriptor.of(
                op, a * tp.expr.sigmoid(a) + b, (1,), a=("f32", (5, 32)), b=("f32", (5, 32))
            )
            for op in REDUCED_EXPRESSIONS
        ),
        tp.FillDescriptor(element="f32", out_shape=(5, 32)),
        tp.ArangeDescriptor(element="f32", count=32),
        tp.JoinDescriptor(element="f32", rows=5, widths=(3, 0, 32)),
        tp.Conv2dDescriptor(has_bias=True, **FILTERED),
        *(TYPES[op](**FILTERED) for op in ("conv2d_backward_input", "conv2d_backward_weight")),
        *(TYPES[op](kernel=(3, 2), stride=(2, 1), padding=(1, 0), **POOLED) for op in POOLS),
        *(TYPES[op](out_size=(3, 2), **POOLED) for op in SIZED),
        *(
            tp.RandomDescriptor(op=op, out_shape=(5, 32), element="f32", state="device")
            for op in tp.RandomDescriptor.ops()
        ),
        tp.SampleDescriptor(element="f32", rows=5, vocabulary=32, top_k=True, top_p=True, min_p=True),
        *(TYPES[op](**ORDERED) for op in ("sort", "argsort")),
        *(TYPES[op](k=7, **ORDERED) for op in ("topk", "kthvalue")),
        tp.SearchSortedDescriptor(m=7, sorter=True, **ORDERED),
        *(TYPES[op](**HEADS) for op in ("attention", "attention_backward")),
        *(TYPES[op](**LISTED) for op in ("adam", "sgd", "lion")),
        tp.TotalNormDescriptor(sizes=LISTED["sizes"], element="f32"),
        tp.ClipDescriptor(op="clip_norm", sizes=LISTED["sizes"], element="f32"),
        tp.ListExpressionDescriptor.of(
            {"a": a * tp.expr.sigmoid(b) + b}, LISTED["sizes"], a=("f32", "list"), b=("f32", "list")
        ),
    )
}
#: The op of ``SAMPLES`` that stands for each op of a table family: they share a descriptor, and every kernel.
FIRST = {TYPES[op]: op for op in reversed(SAMPLES)}
REPRESENTED = {op: op if op in SAMPLES else FIRST[TYPES[op]] for op in TYPES if "::" not in op}


def family_of(op: str) -> str:
    """The family of ``op``: the module or folder of its descriptor."""
    return TYPES[op].__module__.removeprefix("triplan.descriptors.").partition(".")[0]


ACCUMULATING = (
    "gather_backward",
    "index_select_backward",
    "scatter_add",
    "index_add",
    "index_put",
    "embedding_backward",
)


def known(desc: tp.Descriptor, **fields: Any) -> dict[str, Any]:
    """Those of ``fields`` that ``desc`` has."""
    return {name: value for name, value in fields.items() if name in type(desc).model_fields}


#: Asserts that tensors, or sequences of them, are equal.
same = partial(torch.testing.assert_close, rtol=0, atol=0)
#: What the fixture ``constant`` gives: sets ``name`` of a module for one test.
SetConstant = Callable[[Any, str, Any], None]


def make_args(plan: tp.Plan, seed: int = 0) -> object:  # type: ignore[type-arg]
    """Random operands on the GPU, indices in range: small integers, whose sums no order can change."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values: dict[str, object] = {}
    for o in plan.descriptor.operands():
        if o.kind == "host_scalar":
            values[o.name] = 0.5 if o.element.is_floating_point else 2
            continue
        tensors = []
        for i in range(o.count):
            if o.index_extents:
                t = torch.randint(
                    0, o.index_extents[i], o.shape, generator=generator, device="cuda", dtype=o.element.torch
                )
            else:
                t = torch.randint(-9, 9, o.shape, generator=generator, device="cuda").to(o.element.torch)
            tensors.append(t)
        values[o.name] = tensors if o.kind == "tensor_list" else tensors[0]
    return plan.args_type(**values)


def outputs(plan: tp.Plan, args: object) -> list[torch.Tensor]:  # type: ignore[type-arg]
    return [getattr(args, o.name) for o in plan.descriptor.operands() if o.is_written]


def refill(plan: tp.Plan, args: object, fresh: object) -> None:  # type: ignore[type-arg]
    """Copies the tensors of ``fresh`` into those of ``args``."""
    for o in plan.descriptor.operands():
        new, old = getattr(fresh, o.name), getattr(args, o.name)
        if o.kind == "tensor":
            old.copy_(new)
        elif o.kind == "tensor_list":
            for x, y in zip(old, new, strict=True):
                x.copy_(y)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(0)`` ... ``work(count - 1)`` at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(k: int) -> None:
        try:
            work(k)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_child(work: Callable[[], object], seconds: float = 30) -> None:
    """Run ``work`` in a forked process; fail if it raises, or takes longer than ``seconds``."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0  # -9 if it was killed


def in_ranks(work: Callable[..., object], args: tuple[Any, ...], count: int) -> None:
    """Run ``work(rank, *args)`` in so many processes, and raise what one of them raised.

    They fork off a process that has imported what they need, which would take each of them seconds. It has computed
    nothing, so that it has no threads. Where there is a GPU each starts anew: a child cannot use its parent's driver.
    """
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "triplan.nn", "triplan.optim"]
    )
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    torch.multiprocessing.start_processes(work, args, count, start_method=method)
