"""Rows of about 2**31 elements and more: all addresses are within the operands, and the last elements are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from addresses import touched_by

import triplan as tp

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
TARGET = tp.Target.cpu(interpret=True)
#: Passed in 64 bits; and just below the limit, in 32 bits, as are a loop's counters.
LENGTHS = (2**31 + 8, 2**31 - 2**16 - 8)


def strided(desc: tp.ScaleGradientDescriptor) -> tp.ScaleGradientDescriptor:
    return desc.replace(layouts={"dx": "strided"})


#: Problems with rows of ``n`` elements. Twenty rows have partial sums of the gradients of weight and bias.
PROBLEMS: dict[str, Callable[[int], tp.Descriptor]] = {
    "rms_norm": lambda n: tp.RmsNormDescriptor(input_shape=(2, n), element="f16"),
    "layer_norm": lambda n: tp.LayerNormDescriptor(input_shape=(2, n), element="f32"),
    "rms_norm_backward": lambda n: tp.RmsNormBackwardDescriptor(input_shape=(2, n), element="f16"),
    "rms_norm_backward, rows": lambda n: tp.RmsNormBackwardDescriptor(input_shape=(20, n), element="f16"),
    "layer_norm_backward": lambda n: tp.LayerNormBackwardDescriptor(input_shape=(20, n), element="f64"),
    "l2_norm_backward": lambda n: tp.L2NormBackwardDescriptor(input_shape=(2, n), element="f16"),
    "softmax": lambda n: tp.SoftmaxDescriptor(input_shape=(2, n), softmax_axis=1, element="f16"),
    "softmax of columns": lambda n: tp.SoftmaxDescriptor(input_shape=(2, n), softmax_axis=0, element="f16"),
    "softmax_backward": lambda n: tp.SoftmaxBackwardDescriptor(input_shape=(2, n), softmax_axis=1, element="f16"),
    "cross_entropy": lambda n: tp.CrossEntropyDescriptor(
        input_shape=(2, n), element="f16", weight=True, label_smoothing=0.1, gradient=True
    ),
    "cross_entropy_backward": lambda n: tp.CrossEntropyBackwardDescriptor(
        input_shape=(2, n), element="f16", weight=True, label_smoothing=0.1
    ),
    "nll_loss": lambda n: tp.NllLossDescriptor(input_shape=(2, n), element="f16", weight=True),
    "nll_loss_backward": lambda n: tp.NllLossBackwardDescriptor(input_shape=(2, n), element="f16"),
    "scale_gradient": lambda n: strided(tp.ScaleGradientDescriptor(input_shape=(2, n), element="f16")),
    "index_select": lambda n: tp.IndexSelectDescriptor(
        out_shape=(2, n), select_dim=0, src_dim_size=3, element="f16", index_element="i32"
    ),
    "gather": lambda n: tp.GatherDescriptor(out_shape=(2, n), gather_dim=0, src_dim_size=3, element="f16"),
    "gather along": lambda n: tp.GatherDescriptor(out_shape=(2, n), gather_dim=1, src_dim_size=n, element="f16"),
    "index_add": lambda n: tp.IndexAddDescriptor(src_shape=(2, n), add_dim=0, out_dim_size=3, element="f64"),
    "scatter_add": lambda n: tp.ScatterAddDescriptor(src_shape=(2, n), scatter_dim=0, out_dim_size=3, element="f32"),
    "gemm m": lambda n: tp.GemmDescriptor(m=n, n=16, k=16, element="f16"),
    "gemm n": lambda n: tp.GemmDescriptor(m=16, n=n, k=16, element="f16"),
    "gemm k": lambda n: tp.GemmDescriptor(m=16, n=16, k=n, element="f16"),
    "gemm_backward": lambda n: tp.GemmBackwardDescriptor(m=16, n=n, k=16, element="f16"),
}
#: Kernels that keep a counter of blocks themselves, in 64 bits, and would be interpreted turn by turn.
SKIPPED = {"scale_gradient_kernel"}


#: Ops whose last program does not write the last elements: it loops over others, or indices, which are 0, say where to.
ELSEWHERE = {"scale_gradient", "index_add", "scatter_add"}


def check(desc: tp.Descriptor) -> None:
    """The first, two middle and the last program of every launch of every kernel that takes ``desc``."""
    kernels = [entry.name for entry in tp.TABLE.rows(desc.op) if entry.backend is tp.BackendKind.TRITON]
    sizes = {o.name: o.nbytes for o in desc.operands() if o.is_written}
    taken = 0
    for kernel in kernels:
        try:
            plan = tp.plan(desc, preference=tp.PlanPreference(kernel=kernel, deterministic=False), target=TARGET)
        except tp.Unsupported:
            continue
        reached = dict.fromkeys(sizes, 0)
        for launch in plan.launches:
            if launch.kernel.__name__ in SKIPPED:
                break
            for program in {0, max(launch.grid // 2 - 1, 0), launch.grid // 2, launch.grid - 1}:
                touched = touched_by(desc, launch, program, plan.workspace_size())
                reached = {name: max(end, touched.get(name, 0)) for name, end in reached.items()}
        else:
            taken += 1
            assert desc.op in ELSEWHERE or reached == sizes, kernel
    assert taken


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_programs_stay_inside(name: str, n: int) -> None:
    check(PROBLEMS[name](n))


def test_a_loop_over_nearly_all_programs_of_a_grid_stays_inside() -> None:
    """Its counter passes 2**31 after the last turn."""
    check(strided(tp.ScaleGradientDescriptor(input_shape=(2**31 - 2, 4096), element="f16")))
