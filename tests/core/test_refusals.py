"""Malformed input: each has a typed error that quotes it, shortened, and says what would do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from samples import SAMPLES

import triplan as tp
from triplan import functional
from triplan.backends.runtime.launch import Launch
from triplan.errors import InvalidProblem, LeafOverwritten, Unsupported, shown

GEMM, SOFTMAX = SAMPLES["gemm"], tp.SoftmaxDescriptor(input_shape=(2, 3), softmax_axis=1, element="f32")
HUGE = 10**5000  # Python prints integers of at most 4,300 digits
SURROGATE = "\ud800"  # no Unicode text
TARGETS = [*map(tp.Target.preset, ("a100", "h100", "h200")), tp.Target.cpu()]
VAST = tp.EmbeddingDescriptor(index_shape=(2, 3), num_embeddings=9, embedding_dim=2**40, element="f32")
NEVER, ONCE = {"y": {"x": 0.5}}, (("x", 1.0),)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"op": found}
    return found


def scaled(**fields: Any) -> tp.RmsNormDescriptor:
    return tp.RmsNormDescriptor(input_shape=(2, 3), element="f32", **fields)


def run(workspace: Any = None, **args: Any) -> None:
    x = torch.zeros(2, 3)
    tp.plan(SOFTMAX, target="cpu").run(tp.SoftmaxArgs(**{"x": x, "out": x.clone(), **args}), workspace)


LONG, WIDE, X, ROWS = "x" * 10**5, 10**4200, torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "unknown field": (lambda: GEMM.replace(mm=1), InvalidProblem, "mm = 1: no such field; the fields are op, "),
    "unknown requirement": (lambda: tp.plan(GEMM, determinstic=True), InvalidProblem, "the fields are deterministic, "),
    "1 for True": (lambda: [tp.plan(GEMM, target="cpu", deterministic=v) for v in (True, 1)], InvalidProblem, "= 1:"),
    "unknown target": (lambda: tp.plan(GEMM, target="h20"), InvalidProblem, "known are a100, cpu, h100, h200"),
    "target of a cache": (lambda: tp.PlanCache().get(GEMM, target=5), InvalidProblem, "preset 5 is unknown"),
    "preference": (lambda: tp.plan(GEMM, preference={"kernel": "x"}), InvalidProblem, "a PlanPreference is expected"),
    "tuning": (lambda: tp.plan(GEMM, tuning={}), InvalidProblem, "a TuningTable is expected"),
    "no descriptor": (lambda: tp.plan(None), InvalidProblem, "op None has no Plan"),
    "no descriptor, cached": (lambda: tp.PlanCache().get(None), InvalidProblem, "no descriptor"),
    "unknown kernel": (lambda: tp.plan(GEMM, target="h200", kernel="foo"), Unsupported, "gemm has no kernel 'foo': "),
    "unknown feature": (lambda: tp.plan(GEMM, exclude=("tma", "typo")), InvalidProblem, "['typo']: the features of"),
    "unknown operand": (lambda: GEMM.replace(layouts={"typo": "packed"}), InvalidProblem, "names 'typo'; the tensors"),
    "number for a name": (lambda: GEMM.replace(layouts={1: "strided", "a": "strided"}), InvalidProblem, "1 is no oper"),
    "object for a layout": (lambda: GEMM.replace(layouts={"a": object()}), InvalidProblem, "is no Layout"),
    "device": (lambda: tp.Target.of("foo"), InvalidProblem, "device 'foo'"),
    "null": (lambda: tp.parse_descriptor(None), InvalidProblem, "None is not JSON"),
    "dtype in a mapping": (
        lambda: tp.parse_descriptor({"op": "gemm", "element": torch.half}),
        InvalidProblem,
        "float16",
    ),
    "bytes in a mapping": (lambda: tp.parse_descriptor({"op": "gemm", "m": b"1"}), InvalidProblem, "b'1'"),
    "deep mapping": (lambda: tp.parse_descriptor(nested(10**5)), InvalidProblem, "is not JSON: maximum recursion"),
    "deep text": (lambda: tp.parse_descriptor("[" * 10**5), InvalidProblem, "is not JSON: maximum recursion"),
    "long text": (lambda: tp.parse_descriptor("x" * 10**5), InvalidProblem, "is not JSON"),
    "huge extent": (lambda: GEMM.replace(m=HUGE), InvalidProblem, "m = "),
    "huge axis": (lambda: SOFTMAX.replace(softmax_axis=HUGE), InvalidProblem, "softmax_axis = "),
    "huge workspace": (lambda: tp.plan(GEMM, max_workspace_bytes=HUGE), InvalidProblem, "max_workspace_bytes = "),
    "huge target": (lambda: TARGETS[0].replace(sm_count=HUGE), InvalidProblem, "sm_count = "),
    "target without multiprocessors": (lambda: TARGETS[0].replace(sm_count=0), InvalidProblem, "sm_count = 0"),
    "long element": (lambda: GEMM.replace(element="x" * 10**5), InvalidProblem, "xxx... is not an element"),
    "surrogate in a field": (lambda: GEMM.replace(**{SURROGATE: 1}), InvalidProblem, "valid string"),
    "surrogate in a key": (lambda: tp.PlanPreference(kernel=SURROGATE).key, InvalidProblem, "surrogates"),
    "eps True": (lambda: scaled(eps=True), InvalidProblem, "eps = True"),
    "eps text": (lambda: scaled(eps="1e-5"), InvalidProblem, "eps = '1e-5'"),
    "load without a GPU": (lambda: tp.plan(GEMM, target="h200").prepare("cpu"), Unsupported, "it needs a GPU"),
    "raw workspace": (lambda: run(torch.zeros(9)), InvalidProblem, "the workspace is Tensor; a Workspace is expected"),
    "uninitialized": (lambda: run(out=torch.nn.UninitializedParameter()), InvalidProblem, "out is an uninitialized"),
    "leaf": (lambda: run(out=torch.zeros(2, 3, requires_grad=True)), LeafOverwritten, "leaf that requires grad"),
    "huge grid, planned": (
        lambda: tp.plan(VAST, target="h200"),
        Unsupported,
        "rows_kernel: a grid of 6442450944",
    ),
    "huge grid": (lambda: Launch(run, 2**31, {}, {}), Unsupported, "2147483648 programs"),
    "problem twice": (lambda: tp.TuningTable(times=(("y", ONCE),) * 2), InvalidProblem, "problem 'y' twice"),
    "long field": (lambda: GEMM.replace(**{LONG: 1}), InvalidProblem, "xxx... = 1: no such field"),
    "many errors": (lambda: GEMM.replace(layouts=(1,) * 5000), InvalidProblem, "; and 4992 more"),
    "many axes": (lambda: SOFTMAX.replace(input_shape=(1,) * 5000), InvalidProblem, "...: rank 5000 is outside"),
    "axes twice": (lambda: tp.Layout.strided(zero_axes=(1,) * 5000), InvalidProblem, "...: must ascend"),
    "long device": (lambda: tp.Target.of(LONG), InvalidProblem, "xxx...: "),
    "long output": (lambda: tp.plan(GEMM).precision_guarantee(LONG), InvalidProblem, "none is 'xxx"),
    "long operand": (lambda: GEMM.operand(LONG), KeyError, "no operand"),
    "negative capacity": (lambda: tp.PlanCache(-WIDE), InvalidProblem, "000...: must be at least 1"),
    "wide dim": (lambda: functional.softmax(X, WIDE), IndexError, "000...)"),
    "wide row": (lambda: functional.rms_norm(X, (7,) * 9000), RuntimeError, "7..., but got input of size[2, 3]"),
    "wide padding": (lambda: functional.embedding(ROWS, X, padding_idx=WIDE), RuntimeError, "000... must be within"),
    "long mode": (lambda: functional.embedding_bag(ROWS, X, ROWS, mode=LONG), ValueError, "but got 'xxx"),
    "long reduce": (lambda: functional.scatter_reduce(X, 0, ROWS[:, None], X, LONG), RuntimeError, "but got 'xxx"),
    "long reduction": (lambda: functional.nll_loss(X, ROWS, reduction=LONG), ValueError, "xxx... is not a valid"),
    "long reduction of shares": (lambda: functional.cross_entropy(X, X, reduction=LONG), ValueError, "xxx... is not s"),
    "long kernel": (lambda: tp.plan(SOFTMAX, target="h200", kernel=LONG), Unsupported, "no kernel 'xxx"),
    "kernel twice": (lambda: tp.TuningTable(times=(("y", ONCE * 2),)), InvalidProblem, "kernel 'x' twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_typed_and_short_and_says_why(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_a_leaf_is_written_under_no_grad_and_refused_afterwards() -> None:
    """A run that was accepted under no_grad may not vouch for one that autograd records."""
    plan, leaf = tp.plan(SOFTMAX, target="cpu"), torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        plan.run(tp.SoftmaxArgs(x=torch.zeros(2, 3), out=leaf))
    with pytest.raises(RuntimeError, match="leaf"):
        plan.run(tp.SoftmaxArgs(x=torch.zeros(2, 3), out=leaf))


@pytest.mark.parametrize("promised", [{"stride_multiple": 2}, {"alignment": 4}], ids=str)
def test_tma_says_which_promise_is_missing(promised: dict[str, int]) -> None:
    layout = tp.Layout.strided(**{"unit_axis": 1, "alignment": 16, "stride_multiple": 8, **promised})
    desc = tp.GemmDescriptor(m=64, n=64, k=64, element="f16", layouts={"a": layout})
    (found,) = [c.reason for c in tp.plan(desc, target="h200").candidates if c.kernel == "wgmma"]
    assert {name for name in ("stride_multiple", "alignment") if name in found} == set(promised)


def test_equal_zeros_have_one_key() -> None:
    assert scaled(eps=-0.0).key == scaled(eps=0).key == scaled(eps=0.0).key


@pytest.mark.parametrize("op", SAMPLES)
def test_every_entry_takes_or_refuses_little_shared_memory(op: str) -> None:
    target = TARGETS[2].replace(shared_memory=1000)
    for entry in tp.TABLE.rows(SAMPLES[op].op):
        assert not entry.supports(SAMPLES[op], target) or entry.launches(SAMPLES[op], target) is not None


def test_values_that_cannot_be_printed_are_named() -> None:
    assert shown(HUGE) == "<int without a repr>"
    assert shown("x" * 300) == "'" + "x" * 196 + "..."


# --- random input ---


def variants(seed: int, count: int) -> Iterator[tp.Descriptor]:
    """Valid descriptors: samples with a few fields replaced by values that fields of that type may have."""
    draw = random.Random(seed)
    promises = [tp.Layout(), tp.Layout.strided(), tp.Layout.strided(unit_axis=0), tp.Layout(alignment=8)]
    extents = [0, 1, 2, 3, 7, 64, 65, 2**20, 2**31, 2**40]
    pools: dict[type, Callable[[], Any]] = {
        bool: lambda: draw.random() < 0.5,
        int: lambda: draw.choice([-1, *extents]),
        float: lambda: draw.choice([0.0, -0.0, 1e-5, 0.1, 1.0, 5e-324, 1e300]),
        tuple: lambda: tuple(draw.choice(extents) for _ in range(draw.randint(0, 5))),
        tp.ElementKind: lambda: draw.choice(list(tp.ElementKind)),
        tp.IndexElementKind: lambda: draw.choice(list(tp.IndexElementKind)),
    }
    samples = list(SAMPLES.values())
    while count:
        desc = draw.choice(samples)
        changes: dict[str, Any] = {}
        for name in draw.sample(sorted(type(desc).model_fields), draw.randint(1, 4)):
            if name == "layouts":
                changes[name] = {o.name: draw.choice(promises) for o in desc.operands() if draw.random() < 0.5}
            elif literals := get_args(type(desc).model_fields[name].annotation):
                changes[name] = draw.choice([*literals, None])
            elif type(getattr(desc, name)) in pools:
                changes[name] = pools[type(getattr(desc, name))]()
        try:
            samples.append(desc.replace(**changes))
        except InvalidProblem:
            continue
        yield samples[-1]
        count -= 1


def test_random_descriptors_are_read_back_and_no_two_share_a_key() -> None:
    """280,000 were tried once."""
    seen: dict[str, tuple[Any, ...]] = {}
    for i, desc in enumerate(variants(seed=0, count=6_000)):
        fields = tuple(getattr(desc, name) for name in type(desc).model_fields)
        again = tp.parse_descriptor(desc.to_json())
        assert type(again) is type(desc)
        assert tuple(getattr(again, name) for name in type(desc).model_fields) == fields
        assert seen.setdefault(desc.key, fields) == fields
        assert again.key == desc.key
        if i % 60 == 0:
            keys = {target.key: tp.plan(desc, target=target).key for target in TARGETS if takes(desc, target)}
            assert len(set(keys.values())) == len(keys)
    assert len(seen) > 4000


def takes(desc: tp.Descriptor, target: tp.Target) -> bool:
    try:
        return tp.plan(desc, target=target) is not None
    except Unsupported:
        return False


@pytest.mark.parametrize("kind", ["cache", "table"])
def test_a_damaged_file_is_refused_or_read(kind: str, tmp_path: Path) -> None:
    """Flipped bits, cuts, nesting: ``InvalidProblem``, and nothing is kept; or a report. 30,000 were tried once."""
    draw, path, cache = random.Random(0), tmp_path / "saved", tp.PlanCache()
    table = tp.TuningTable.of({tp.TuningTable.problem(GEMM.key, TARGETS[2]): {"tiles": 1.0, "wgmma": 2.0}})
    cache.get(GEMM, target="h200", tuning=table)
    cache.get(SOFTMAX, target="cpu")
    cache.save(path) if kind == "cache" else table.save(path)
    saved, refused = path.read_bytes(), 0
    for i in range(800):
        data = bytearray(saved if i % 4 else saved[: draw.randrange(len(saved))])
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(data) if i else b"[" * 10**5)
        fresh = tp.PlanCache()
        try:
            found = fresh.load(path) if kind == "cache" else tp.TuningTable.load(path)
        except InvalidProblem:
            refused += 1
            assert len(fresh) == 0
        else:
            assert kind == "table" or len(fresh) <= found.count("same") <= 2
    assert refused > 250
