"""What a product's activation was given, saved for the backward."""

from __future__ import annotations

import pytest
import torch
from cases import CPU, H200, required
from cases.gemm import COLUMN, HOPPER, check_on_the_cpu, compared
from proofs import MARKS, target

import triplan as tp

ENTRIES = [
    *(("interpret", *pair) for pair in (("tiles", "bf16"), ("split_k", "f32"), ("integer_tiles", "i8"))),
    *(("gpu", entry, element) for entry in ("split_k", "tiles", "tiles_invariant") for element in ("f16", "f32")),
    ("gpu", "integer_tiles", "i8"),
]
SIZES = {"interpret": ((5, 35, 20),), "gpu": ((17, 35, 70), (136, 264, 200))}
BATCHED_COLUMN = tp.Layout.strided(unit_axis=1)


def problems(element: str, m: int, n: int, k: int) -> list[tp.Descriptor]:
    """Packed, transposed and of any strides; one product and several."""
    last, out = ("relu", "i32") if element == "i8" else ("gelu", element)
    wide = "f32" if element in ("f16", "bf16") else None
    one = tp.GemmDescriptor(m=m, n=n, k=k, element=element, epilogue=f"bias_{last}", saves_pre=True)
    several = tp.BatchedGemmDescriptor(batch=2, m=m, n=n, k=k, element=element, epilogue="relu", saves_pre=True)
    assert one.operand("pre").element == out
    return [
        one,
        one.replace(layouts={"pre": COLUMN}, reads_c0=True),
        one.replace(layouts=dict.fromkeys(("a", "b", "c", "pre"), "strided"), out_element=wide),
        several,
        several.replace(layouts={"pre": BATCHED_COLUMN}),
        one.replace(m=0),
        one.replace(k=0),
    ]


@pytest.mark.parametrize("element", ["bf16", "f64", "i8"])
def test_the_cpu_backend_saves_it(element: str) -> None:
    check_on_the_cpu(problems(element, 17, 35, 20))


def test_it_is_what_the_activation_is_given() -> None:
    a, b, bias = torch.randn(3, 4).double(), torch.randn(4, 5).double(), torch.randn(5).double()
    c, pre = torch.empty(3, 5).double(), torch.empty(3, 5).double()
    args = tp.GemmArgs(a=a, b=b, c=c, bias=bias, pre=pre)
    desc = tp.GemmDescriptor.from_args(args, epilogue="bias_silu")
    assert desc.saves_pre
    tp.plan(desc, target=CPU).run(args)
    torch.testing.assert_close(pre, a @ b + bias)
    torch.testing.assert_close(c, torch.nn.functional.silu(pre))


def test_entries_that_write_nothing_else_say_so() -> None:
    desc = tp.GemmDescriptor(m=64, n=64, k=64, element="f16", epilogue="bias_relu", saves_pre=True)
    plan = tp.plan(desc, target=H200)
    refused = {c.kernel: c.reason for c in plan.candidates if c.cost_us is None}
    assert all("pre" in refused[entry] for entry in HOPPER)
    assert plan.precision_guarantee("pre") == plan.precision_guarantee("c")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("where", "entry", "element"), [pytest.param(*found, marks=MARKS[found[0]]) for found in ENTRIES]
)
def test_every_layout(where: str, entry: str, element: str) -> None:
    for sizes in SIZES[where]:
        assert compared(problems(element, *sizes), lambda desc: required(desc, entry, target(where))) > 0
