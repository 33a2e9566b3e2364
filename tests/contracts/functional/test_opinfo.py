"""torch's own samples of every op that ``triplan.functional`` has by torch's name.

A sample is right, or refused with a reason that ``refusals.txt`` lists with its count; anything else fails. The file
holds what is left to do: it may only shrink. ``op_db`` is imported within the tests: that takes four seconds.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases.functional import DEVICES
from torch._subclasses.fake_tensor import FakeTensorMode

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.functional._watching import tensors_in

Tensor = torch.Tensor
REFUSALS = Path(__file__).with_name("refusals.txt")
#: The torch whose samples the file counts.
LISTED = "2.13."
#: Functions that torch does not have, or of which it has no samples.
OTHERS = {"cached_rotary", "embedding_rms_norm", "gather_with_grad", "l2_norm", "relu_squared", "rotary"}
OTHERS |= {"vector_norm"}
#: A function whose samples want no stable order of torch: tests/families/sorting compares it with that.
OTHERS |= {"argsort"}
OTHERS |= {"adjust_logits", "speculative_sample", "token_log_probs"}
OTHERS |= {
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "expression",
    "geglu",
    "reglu",
    "softcap_tanh",
    "swiglu",
}
OTHERS |= {"cast", "copy", "fill", "zero"}
#: Functions that draw: their results are no sample's. tests/families/random compares what is certain.
OTHERS |= {"bernoulli", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential", "normal", "rand", "rand_like"}
OTHERS |= {"randint", "randint_like", "randn", "randn_like", "random", "trunc_normal", "uniform", "sample"}
NAMES = sorted({name.removesuffix("_") for name in F.__all__} - OTHERS)
#: Sums of so many terms that they cancel: their error is measured against the sum of magnitudes.
PRODUCTS = {"addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm"}
#: Of so many samples one is taken: torch has hundreds of each dtype, all pairs of a few options. Those that are taken
#: have each value of each option.
EVERY = {"linear_cross_entropy": 3, "max_pool1d": 37, "max_pool2d": 157, "searchsorted": 7, "unique_consecutive": 7}
#: Ops for which torch's own tests state a tolerance.
AMPLIFIED = {"scaled_dot_product_attention"}
#: What a refusal may be. Anything else, KernelInternal too, is a fault.
REFUSED = (NotImplementedError, TypeError, ValueError, IndexError, RuntimeError)
#: Refusals that differ in these only are counted together.
GENERAL = {r"\{.*": "DESCRIPTOR", r"torch\.\w+": "DTYPE", r"\[[\d, ]*\]": "SHAPE", r"-?\d+(\.\d+)?": "N"}


def variants(name: str) -> Iterator[Any]:
    """torch's OpInfos of a function; those of a plain test of its own (triton_optimized) have no autograd."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = [op for op in op_db if op.name.removeprefix("nn.functional.") == name]
    found = [op for op in named if op.supports_autograd] or named
    if not found and not hasattr(torch, name) and not hasattr(torch.nn.functional, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert found, f"torch has no samples of {name}: add it to OTHERS"
    yield from found


def mapped(sample: Any, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample's arguments with ``change`` applied to their tensors."""
    of = sample.transform(lambda t: change(t) if isinstance(t, Tensor) else t)
    return (of.input, *of.args), of.kwargs


def wide(value: Any) -> Any:
    """A floating-point tensor in float64, anything else unchanged."""
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def first(result: Any) -> Tensor:
    """The result, or the first of several: the others are compared in the family's tests."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def alone(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def close(
    got: Any, expected: Any, dtype: torch.dtype | None = None, terms: Tensor | None = None, stated: Any = None
) -> None:
    """Equal within torch's tolerances of ``dtype``, the result's, for elements that sum ``terms`` in magnitude.

    ``stated``: the (atol, rtol) that torch's tests of the op have in place of those.
    """
    assert got.dtype == (dtype or expected.dtype)
    rtol, atol = torch.testing._comparison.default_tolerances(got)
    if stated is not None:
        atol, rtol = stated
    values = (t if terms is None else t / terms for t in (got.cpu(), expected.cpu().to(got.dtype)))
    torch.testing.assert_close(*values, rtol=rtol, atol=atol, equal_nan=True)


def stated(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own tolerance for an op whose exponentials amplify the errors of a product; or that of rounded logits,
    whose loss is off by at most twice as much as any of them."""
    if op.name == "nn.functional.linear_cross_entropy":
        logits = wide(args[0]) @ wide(args[1]).flatten(0, -2).mT
        losses = args[0][..., 0].numel() if kwargs.get("reduction") == "sum" else 1
        rtol, atol = torch.testing._comparison.default_tolerances(dtype)
        return atol + losses * torch.finfo(dtype).eps * float(logits.abs().max()), rtol
    if op.name.removeprefix("nn.functional.") not in AMPLIFIED:
        return None
    if dtype.itemsize == 2:
        # Probabilities, whose sum is 1, are rounded to the element before they multiply the values.
        rtol, atol = torch.testing._comparison.default_tolerances(dtype)
        return atol + torch.finfo(dtype).eps / 2 * float(args[2].abs().max()), rtol
    (found,) = (d for d in op.decorators if (d.cls_name, d.test_name) == ("TestCommon", None))
    return found.decorators[0].d.get(dtype)


def gradients(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> list[Tensor | None]:
    leaves = [t for t in tensors_in((*args, *kwargs.values())) if t.requires_grad]
    weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype, device=result.device)
    return list(torch.autograd.grad(result, leaves, weights.reshape(result.shape), allow_unused=True))


class Samples:
    """Compares every sample of an op, and counts what is refused."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        call = getattr(F, name)
        # torch's samples of embeddings have the table first, those of where the condition second.
        swapped = name.startswith("embedding") or name == "where"
        self.ours = (lambda x, i, *a, **k: call(i, x, *a, **k)) if swapped else lambda *a, **k: first(call(*a, **k))
        self.in_place = getattr(F, f"{name}_", None)
        self.refused: Counter[str] = Counter()

    def attempt(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except tp.errors.KernelInternal:
            raise
        except REFUSED as e:
            reason = str(e).splitlines()[0]
            for pattern, general in GENERAL.items():
                reason = re.sub(pattern, general, reason)
            self.refused[f"{self.name}: {what}: {type(e).__name__}: {reason}"] += 1

    def compare(self, op: Any, dtype: torch.dtype) -> None:
        recorded = dtype == torch.float64
        samples = op.sample_inputs("cpu", dtype, requires_grad=recorded)
        for sample in islice(samples, 0, None, EVERY.get(self.name, 1)):
            args, kwargs = mapped(sample, alone)  # max_norm changes the table
            whole = op(*args, **kwargs)
            expected = own = first(whole)
            if kwargs.get("dropout_p"):
                self.drawn(sample, own)
                continue
            terms = None
            if own.is_floating_point():
                # The table of an embedding has been scaled by now, and rounded. torch's options fix an accumulator.
                kept = {k: v for k, v in kwargs.items() if k not in ("max_norm", "options")}
                args, kwargs = tuple(map(wide, args)), {k: wide(v) for k, v in kept.items()}
                expected = first(op(*args, **kwargs))
                if self.name in PRODUCTS:
                    terms = op(*(a.abs() if isinstance(a, Tensor) else a for a in args), **kwargs).clamp(min=1)
            self.result(sample, expected, own.dtype, terms, stated(op, dtype, args, kwargs))
            if recorded and own.requires_grad and op.supports_autograd:
                self.gradient(op, sample)
            if dtype in (torch.float64, torch.int64):
                if isinstance(whole, Tensor):
                    self.writing(op, sample, expected, own.dtype)
                self.noncontiguous(op, sample)
            if dtype == torch.float32:
                self.fake(sample, own)

    def on_device(self, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return mapped(sample, lambda t: t.detach().to(self.device).requires_grad_(t.requires_grad))

    def result(self, sample: Any, expected: Tensor, dtype: torch.dtype, terms: Tensor | None, within: Any) -> None:
        args, kwargs = self.on_device(sample)
        self.attempt("result", lambda: close(self.ours(*args, **kwargs), expected, dtype, terms, within))

    def drawn(self, sample: Any, like: Tensor) -> None:
        """Of a sample that draws, shape and dtype are certain; the family's tests compare the rest."""
        args, kwargs = self.on_device(sample)

        def check() -> None:
            got = self.ours(*args, **kwargs)
            assert (got.shape, got.dtype) == (like.shape, like.dtype)

        self.attempt("result", check)

    def gradient(self, op: Any, sample: Any) -> None:
        (args, kwargs), (mine, my) = mapped(sample, alone), self.on_device(sample)
        theirs = gradients(args, kwargs, first(op(*args, **kwargs)))

        def check() -> None:
            for got, expected in zip(gradients(mine, my, self.ours(*mine, **my)), theirs, strict=True):
                if got is None or expected is None:  # torch has None where a result does not depend on an input
                    assert all(g is None or not g.any() for g in (got, expected))
                else:
                    close(got, expected)

        self.attempt("gradient", check)

    def writing(self, op: Any, sample: Any, expected: Tensor, dtype: torch.dtype) -> None:
        """``out=``, resized, and in place."""
        args, kwargs = mapped(sample, lambda t: t.detach().clone().to(self.device))
        if op.supports_out:
            out = torch.empty(0, dtype=dtype, device=self.device)

            def check() -> None:
                assert self.ours(*args, **kwargs, out=out) is out
                close(out, expected, dtype)

            self.attempt("out=", check)
        if self.in_place is not None and (expected.shape, dtype) == (args[0].shape, args[0].dtype):

            def update() -> None:
                assert self.in_place(*args, **kwargs) is args[0]
                close(args[0], expected, dtype)

            self.attempt("in place", update)

    def noncontiguous(self, op: Any, sample: Any) -> None:
        other = sample.noncontiguous()
        expected = first(op(other.input, *other.args, **other.kwargs))
        args, kwargs = mapped(other, lambda t: t.detach().to(self.device))
        self.attempt("noncontiguous", lambda: close(self.ours(*args, **kwargs), expected.detach()))

    def fake(self, sample: Any, expected: Tensor) -> None:
        """Shape and dtype under fake tensors, as torch.compile needs them."""
        mode = FakeTensorMode()
        args, kwargs = mapped(sample, lambda t: mode.from_tensor(t.detach().to(self.device)))

        def check() -> None:
            with mode:
                got = self.ours(*args, **kwargs)
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)

        self.attempt("fake", check)


def listed() -> dict[str, int]:
    found = {}
    for line in REFUSALS.read_text().splitlines():
        count, _, what = line.partition(" ")
        found[what] = int(count)
    return found


def seed_the_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@pytest.fixture
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for its own test in the stack, for 50 ms, twice each time that it is asked for samples. For each
    sample it seeds the generators of all devices, and prints the stack for each kind of device that is not there."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None, raising=False)
    monkeypatch.setattr(common_utils, "set_rng_seed", seed_the_cpu)


@pytest.mark.usefixtures("deterministic", "hastened")
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # torch's samples are not warnings' subject
def test_samples(name: str, device_type: str) -> None:
    torch.manual_seed(0)  # torch draws the values
    samples = Samples(name, device_type)
    for op in variants(name):
        for dtype in sorted(op.dtypes, key=str):
            if not dtype.is_complex:
                samples.compare(op, dtype)
    expected = {what: n for what, n in listed().items() if what.startswith(f"{name}: ")}
    if not torch.__version__.startswith(LISTED):  # other versions draw fewer samples, so no more refusals than listed
        expected = {what: min(n, samples.refused[what]) for what, n in expected.items() if samples.refused[what]}
    assert samples.refused == expected, "refusals.txt lists other refusals:\n" + "\n".join(
        f"{n} {what}" for what, n in sorted(samples.refused.items())
    )


def test_refusals_are_of_known_ops() -> None:
    assert {what.partition(":")[0] for what in listed()} <= set(NAMES)
