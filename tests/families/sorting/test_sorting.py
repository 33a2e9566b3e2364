"""Sorting: torch's results, ties and special values, dtypes, layouts, gradients, refusals; each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import compiles, pinned, places, required
from proofs import target
from samples import SetConstant, same

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.triton.sorting import filtered, radix, rows as rows_entry, searching, turned
from triplan.testing import check_plan

Tensor = torch.Tensor
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "scalar": lambda x: x[0, 0, 0],
    "one element": lambda x: x[:, :, :1],
    "no rows": lambda x: x[:0],
    "nine axes": lambda x: x[(None,) * 6],
}
#: Each of these twice, in an order that is not sorted.
SPECIAL = (0.0, -0.0, float("nan"), 1.0, -float("inf"), float("inf"), -2.0) * 2


def drawn(*shape: int) -> Tensor:
    """Integers with ties."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).double()


def stable(x: Tensor, dim: int, descending: bool = False) -> tuple[Tensor, Tensor]:
    """torch's stable sort, of NumPy's order on the CPU."""
    values, indices = torch.sort(x, dim=dim, descending=descending, stable=True)
    return values, indices


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_axis(layout: str) -> None:
    x = LAYOUTS[layout](drawn(4, 5, 6))
    for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
        n = x.shape[dim] if x.dim() else 1
        for descending in (False, True):
            values, indices = stable(x, dim, descending)
            same(tuple(F.sort(x, dim, descending)), (values, indices))
            same(F.argsort(x, dim, descending), indices)
            for k in {0, min(n, 1), n // 2, n} if x.dim() else {1}:
                first = (values, indices) if x.dim() == 0 else [t.narrow(dim, 0, k) for t in (values, indices)]
                same(tuple(F.topk(x, k, dim, descending)), tuple(first))
        if n:
            found, at = F.kthvalue(x, (n + 1) // 2, dim, keepdim=True)
            values, indices = stable(x, dim)
            where = (n + 1) // 2 - 1
            same(
                (found, at),
                (values, indices) if x.dim() == 0 else tuple(t.narrow(dim, where, 1) for t in (values, indices)),
            )
            same(F.kthvalue(x, (n + 1) // 2, dim).values, torch.kthvalue(x, (n + 1) // 2, dim).values)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_dtypes(dtype: torch.dtype) -> None:
    x = drawn(3, 50).abs().to(dtype)
    same(tuple(F.sort(x, 1, True)), stable(x, 1, True))
    same(F.topk(x, 9).values, torch.topk(x.to(torch.uint8) if dtype is torch.bool else x, 9).values.to(dtype))
    same(F.kthvalue(x, 30).values, stable(x, 1).__getitem__(0)[:, 29])
    if dtype is not torch.bool:
        row = x[0].sort().values
        same(F.searchsorted(row, x, right=True), torch.searchsorted(row, x, right=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_largest_and_zeros_are_equal(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=dtype)
    for descending in (False, True):
        values, indices = F.sort(x, 0, descending)
        same(indices, stable(x.double(), 0, descending)[1])
        assert torch.equal(values.signbit()[~values.isnan()], x[indices].signbit()[~values.isnan()])
    assert F.sort(x).indices.tolist() == [4, 11, 6, 13, 0, 1, 7, 8, 3, 10, 5, 12, 2, 9]
    assert F.topk(x, 3).indices.tolist() == [2, 9, 5]


def test_more_rows_than_32_bits_count() -> None:
    """``onesweep`` has several lines of counts for each row: it refuses what its kernel cannot number."""
    h200 = tp.Target.sm90a()
    (launch,) = required(tp.SortDescriptor(rows=2**31 + 5, n=1, element="bf16"), "rows", h200).launches
    assert dict(launch.source().signature)["rows"] == "i64"
    desc = tp.SortDescriptor(rows=2**30, n=9, element="bf16")
    assert pinned(desc, "onesweep", h200) is None
    assert pinned(desc.replace(rows=2**30 - 1), "onesweep", h200)


@pytest.mark.parametrize("k", [0, 1])
def test_a_tensor_without_axes_is_its_own_largest_element(k: int) -> None:
    """As in torch, whatever k."""
    x = torch.tensor(3.0, requires_grad=True)
    values, indices = F.topk(x, k)
    same((values.detach(), indices), torch.topk(x.detach(), k))
    values.backward()
    assert x.grad == 1


def test_more_than_the_kernels_take() -> None:
    x = drawn(2, 3000)
    same(tuple(F.topk(x, 1500)), tuple(t[:, :1500] for t in stable(x, 1, True)))


@pytest.mark.parametrize("right", [False, True])
def test_searchsorted(right: bool) -> None:
    rows, x = drawn(3, 4, 20), drawn(3, 4, 7)
    ascending, sorter = stable(rows, -1)
    expected = torch.searchsorted(ascending, x, right=right)
    same(F.searchsorted(ascending, x, right=right), expected)
    same(F.searchsorted(rows, x, side="right" if right else "left", sorter=sorter), expected)
    same(F.searchsorted(ascending, x, right=right, out_int32=True), expected.int())
    same(F.searchsorted(ascending[0, 0], 3, right=right), torch.searchsorted(ascending[0, 0], 3, right=right))
    same(F.searchsorted(ascending[0, 0], x, right=right), torch.searchsorted(ascending[0, 0], x, right=right))
    same(F.searchsorted(ascending[..., :0], x), torch.zeros_like(expected))


RUNS: dict[str, tuple[Tensor, int | None]] = {
    "whole": (drawn(3, 40) // 6, None),
    "transposed": ((drawn(3, 40) // 6).T, None),
    "NaN and zeros": (torch.tensor([float("nan"), float("nan"), 0.0, -0.0, 1.0]), None),
    "bool": (drawn(50) > 0, None),
    "bytes": ((drawn(50) // 6).to(torch.uint8), None),
    "scalar": (torch.tensor(3.0), None),
    "empty": (torch.zeros(0, 3), None),
    "rows": (drawn(4, 3).repeat_interleave(torch.tensor([1, 3, 2, 1]), 0), 0),
    "columns": (drawn(3, 4).repeat_interleave(2, 1), -1),
    "one row": (drawn(1, 3), 0),
    "no rows": (torch.zeros(0, 3), 0),
    "rows with NaN": (torch.tensor([[1.0, float("nan")]] * 3), 0),
    "elements along an axis": (torch.tensor([1, 1, 2]), 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_unique_consecutive(name: str) -> None:
    x, dim = RUNS[name]
    for inverse in (False, True):
        for counts in (False, True):
            expected = torch.unique_consecutive(x, return_inverse=inverse, return_counts=counts, dim=dim)
            found = F.unique_consecutive(x, inverse, counts, dim)
            assert isinstance(found, tuple) == isinstance(expected, tuple)
            for got, wanted in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, expected)), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_gradient_of_unique_consecutive() -> None:
    x = torch.tensor([1.0, 1.0, 2.0, 1.0], requires_grad=True)
    (found,) = torch.autograd.grad((F.unique_consecutive(x) ** 2).sum(), x)
    assert found.tolist() == [2, 0, 4, 2]


def test_out() -> None:
    x = drawn(3, 9)
    pair = (torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=torch.int64))
    found = F.topk(x, 2, out=pair)
    assert found.values is pair[0]
    same(tuple(found), tuple(t[:, :2] for t in stable(x, 1, True)))
    at = torch.empty(0, dtype=torch.int64)
    assert F.argsort(x, out=at) is at
    same(at, stable(x, 1)[1])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["sort", "topk", "kthvalue"])
def test_gradients(name: str, dim: int) -> None:
    x = torch.randperm(30, generator=torch.Generator().manual_seed(0)).double().reshape(5, 6).requires_grad_()
    args: tuple[Any, ...] = {"sort": (dim, True), "topk": (3, dim), "kthvalue": (3, dim)}[name]

    def of(module: Any) -> Tensor:
        values = getattr(module, name)(x, *args).values
        (g,) = torch.autograd.grad((values**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.sum(), x)
        return torch.stack([g, second])

    torch.testing.assert_close(of(F), of(torch))


@pytest.mark.parametrize(
    ("name", "args"),
    [("topk", (2, 1, True)), ("kthvalue", (2, 0, False)), ("sort", (True, 0)), ("argsort", (False, 1))],
)
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    x = drawn(3, 4).requires_grad_(name != "argsort")
    torch.library.opcheck(getattr(torch.ops.triplan, name).default, (x, *args))


def test_opcheck_of_searchsorted() -> None:
    torch.library.opcheck(torch.ops.triplan.searchsorted.default, (drawn(9), drawn(3, 4), None, False, True))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: F.sort(drawn(3), 1), IndexError),
        (lambda: F.topk(drawn(3), 4), RuntimeError),
        (lambda: F.topk(drawn(3), -1), RuntimeError),
        (lambda: F.kthvalue(drawn(3), 0), RuntimeError),
        (lambda: F.kthvalue(drawn(2, 0), 1), IndexError),
        (lambda: F.sort(drawn(3).to(torch.complex64)), RuntimeError),
        (lambda: F.searchsorted(drawn(3), drawn(3).float()), RuntimeError),
        (lambda: F.searchsorted(drawn(2, 3), drawn(3, 3)), RuntimeError),
        (lambda: F.searchsorted(drawn(3).to("meta"), drawn(3)), RuntimeError),
        (lambda: F.searchsorted(drawn(3), drawn(3), sorter=drawn(3).long().to("meta")), RuntimeError),
        (lambda: F.searchsorted(drawn(2, 3), 1.0), RuntimeError),
        (lambda: F.searchsorted(drawn(3), drawn(3), side="left", right=True), RuntimeError),
        (lambda: F.unique_consecutive(torch.zeros(3, 0), dim=0), RuntimeError),
        (lambda: F.unique_consecutive(torch.zeros(0, 3), dim=1), RuntimeError),
        (lambda: F.unique_consecutive(torch.tensor(3.0), dim=0), IndexError),
        (lambda: F.unique_consecutive(drawn(3), dim=1), IndexError),
        (lambda: F.unique_consecutive(drawn(3).to(torch.complex64)), RuntimeError),
        (lambda: tp.TopKDescriptor(element="f32", rows=2, n=3, k=4), tp.errors.InvalidProblem),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize(("where", "kernel"), places("rows", "radix"))
def test_sorts(where: str, kernel: str | None, layout: str, constant: SetConstant) -> None:
    """Rows of several tiles, of each width of a key, in both orders, with NaN of any bits. (The proofs are packed.)"""
    constant(radix, "TILE", 32)
    cases = [(tp.SortDescriptor, "bf16", False), (tp.ArgsortDescriptor, "u8", True), (tp.SortDescriptor, "f32", True)]
    cases += [(tp.SortDescriptor, "f64", False)]
    for cls, element, descending in cases if layout == "packed" else cases[:2]:
        desc = cls(element=element, rows=3, n=70, descending=descending)  # type: ignore[attr-defined]
        desc = desc.replace(layouts={o.name: layout for o in desc.operands()})
        assert check_plan(required(desc, kernel, target(where)), runs=1).compared


TURNED = tp.Layout.strided(unit_axis=0)


@pytest.mark.parametrize(("rows", "n"), [(70, 41), (33, 3)])
@pytest.mark.parametrize(
    ("where", "kernel"),
    [
        pytest.param(where, kernel, marks=getattr(pytest.mark, where))
        for where, kernel in (("interpret", "radix"), ("gpu", "radix"), ("gpu", "block"), ("gpu", "onesweep"))
    ],
)
def test_results_across_rows_are_copies(where: str, kernel: str, rows: int, n: int, constant: SetConstant) -> None:
    """Of elements of each size, both results or one of them, in one tile and in several; and x."""
    constant(turned, "WRITTEN_PER_US", 1e-3)
    constant(turned, "READ_PER_US", 1e-3)
    cases = [("u8", ("values", "indices")), ("bf16", ("x", "values")), ("f64", ("values", "indices", "x"))]
    descs: list[tp.Descriptor] = [
        tp.SortDescriptor(element=element, rows=rows, n=n, layouts=dict.fromkeys(names, TURNED))
        for element, names in cases
    ]
    descs += [tp.ArgsortDescriptor(element="f32", rows=rows, n=n, descending=True, layouts={"indices": TURNED})]
    if kernel != "radix":
        layouts = dict.fromkeys(("values", "indices"), TURNED)
        descs += [tp.TopKDescriptor(element="i16", rows=rows, n=n, k=n - 1, layouts=layouts)]
    for desc in descs:
        plan = required(desc, kernel, target(where))
        copies = [launch for launch in plan.launches if launch.kernel.__name__ == "matrix_copy_kernel"]
        assert len(copies) == len(dict(desc.layouts))
        assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(
    ("where", "kernel"),
    [
        pytest.param(where, kernel, marks=getattr(pytest.mark, where))
        for where, kernel in (
            *((where, kernel) for where in ("interpret", "gpu") for kernel in ("looped", "filtered")),
            ("gpu", "filtered_sort"),
        )
    ],
)
def test_selections_read_copies_of_rows_that_lie_across(where: str, kernel: str, constant: SetConstant) -> None:
    """In one stage and in two; with the results of topk as copies, and not."""
    constant(turned, "WRITTEN_PER_US", 1e-3)
    constant(turned, "READ_PER_US", 1e-3)
    constant(filtered, "SPAN", 600)
    constant(filtered, "PROGRAMS", 1)
    for element, n in (("i8", 90), ("f64", 1300)):
        for names in (("x",), ("x", "values", "indices")):
            descs: list[tp.Descriptor] = [tp.TopKDescriptor(element=element, rows=33, n=n, k=7)]
            if kernel != "filtered_sort":
                descs += [tp.KthValueDescriptor(element=element, rows=33, n=n, k=7)]
            for desc in descs:
                given = [o.name for o in desc.operands() if o.name in names and len(o.shape) == 2]
                plan = required(desc.replace(layouts=dict.fromkeys(given, TURNED)), kernel, target(where))
                copies = [launch for launch in plan.launches if launch.kernel.__name__ == "matrix_copy_kernel"]
                assert len(copies) == len(given)
                assert check_plan(plan, runs=1).compared


def test_many_results_across_rows_are_copies() -> None:
    """Of few, or of results whose rows share sectors, the copies would take longer than they save."""

    def launches(rows: int, *names: str) -> int:
        desc = tp.SortDescriptor(element="i8", rows=rows, n=4096, layouts=dict.fromkeys(names, TURNED))
        return len(required(desc, "block", tp.Target.preset("h200")).launches)

    assert launches(2699) == 1
    assert launches(2699, "values") == launches(2699, "indices") == 2
    assert launches(2699, "values", "indices") == 3
    assert launches(20, "values", "indices") == 1
    assert launches(31, "values") == 1


@pytest.mark.parametrize(
    ("element", "kernel", "copies"), [("i8", "looped", 1), ("f64", "looped", 1), ("f64", "filtered", 0)]
)
def test_rows_that_are_read_often_are_copied(element: str, kernel: str, copies: int) -> None:
    desc = tp.KthValueDescriptor(element=element, rows=44579, n=5376, k=512, layouts={"x": TURNED})
    assert len(required(desc, kernel, tp.Target.preset("h200")).launches) == 1 + copies


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize(
    ("kernel", "n"), [("onesweep", 70), ("onesweep", 3 * 4096 + 7), ("block", 37), ("block", 4096)]
)
def test_sorts_in_shared_memory(kernel: str, n: int, layout: str) -> None:
    """One tile and several, of each width of a key, in both orders, with NaN of any bits."""
    for element in ("bf16", "u8", "f32", "i64", "f64"):
        descs: list[tp.Descriptor] = [
            tp.SortDescriptor(element=element, rows=3, n=n),
            tp.ArgsortDescriptor(element=element, rows=3, n=n, descending=True),
            tp.TopKDescriptor(element=element, rows=3, n=n, k=n // 2),
            tp.KthValueDescriptor(element=element, rows=3, n=n, k=n // 2),
        ]
        for desc in descs:
            desc = desc.replace(layouts={o.name: layout for o in desc.operands()})
            assert check_plan(required(desc, kernel, tp.Target.current()), runs=1).compared


#: Rows whose digits are all alike, few, in order, or random.
DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": lambda i: i * 0,
    "two": lambda i: i % 7 // 6,
    "ascending": lambda i: i,
    "descending": lambda i: -i,
    "high digits": lambda i: i % 251 << 22,
    "random": lambda i: i * 2654435761 % 1000003,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("kernel", "rows", "n"), [("onesweep", 1, 1 << 22), ("onesweep", 40, 32768), ("block", 999, 1024)]
)
def test_many_tiles(kernel: str, rows: int, n: int, name: str) -> None:
    """Tiles that wait for the counts of others, or that few or all of the counts are in; the same bits each time."""
    x = DISTRIBUTIONS[name](torch.arange(rows * n, device="cuda")).reshape(rows, n).to(torch.int32)
    expected = torch.sort(x, stable=True)
    plan = required(tp.SortDescriptor(element="i32", rows=rows, n=n), kernel, tp.Target.current())
    workspace = tp.Workspace.allocate(plan, device="cuda")
    for _ in range(3):
        args = tp.SortedArgs(x=x, values=torch.empty_like(x), indices=torch.empty_like(x, dtype=torch.int64))
        plan.run(args, workspace=workspace)
        same((args.values, args.indices), tuple(expected))


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize(("where", "kernel"), places("looped", "filtered", "rows"))
def test_selections(where: str, kernel: str | None, layout: str) -> None:
    """Rows of several blocks, of each width of a key; more winners than are ranked at a time."""
    n = 130 if kernel == "rows" else 2100
    for element in ("bf16", "i8", "f32", "f64"):
        descs: list[tp.Descriptor] = [
            tp.TopKDescriptor(element=element, rows=2, n=n, k=n // 16),
            tp.KthValueDescriptor(element=element, rows=2, n=n, k=n // 16),
        ]
        if kernel != "filtered":
            descs += [
                tp.TopKDescriptor(element=element, rows=2, n=90, k=90, largest=False),
                tp.KthValueDescriptor(element=element, rows=2, n=n, k=n - 100),
            ]
        if kernel == "filtered":
            descs += [tp.KthValueDescriptor(element=element, rows=2, n=n, k=500)]
        for desc in descs:
            strided = desc.replace(layouts={o.name: layout for o in desc.operands()})
            assert check_plan(required(strided, kernel, target(where)), runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("looped", "filtered"))
def test_many_ties(where: str, kernel: str | None) -> None:
    """Of equal elements those with the lowest positions are taken."""
    x = torch.ones(2, 3000)
    x[:, ::7] = 2
    for largest in (True, False):
        desc = tp.TopKDescriptor(element="f32", rows=2, n=3000, k=375 if kernel == "filtered" else 500, largest=largest)
        assert check_plan(required(desc, kernel, target(where)), runs=1, given={"x": x}).compared
    for k in (1, 500, 2571, 2572, 3000) if kernel != "filtered" else (1, 375):
        kth = tp.KthValueDescriptor(element="f32", rows=2, n=3000, k=k)
        assert check_plan(required(kth, kernel, target(where)), runs=1, given={"x": x}).compared


@pytest.mark.parametrize(("where", "kernel"), places("looped"))
@pytest.mark.parametrize("element", ["f64", "i64"])
def test_digits_are_read_until_they_tell(where: str, kernel: str | None, element: str) -> None:
    """Rows that differ in the first digit, in one in the middle, in the last one, and with each number twice."""
    n = 3000
    at = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(tp.ElementKind(element).torch)
    x = torch.stack([at * 2.0**50 - 2.0**61, at * 2.0**16, at, at // 2]).to(at.dtype)
    for k in (1, 700, n - 1, n):
        kth = tp.KthValueDescriptor(element=element, rows=4, n=n, k=k)
        assert check_plan(required(kth, kernel, target(where)), runs=1, given={"x": x}).compared
    for k, largest in ((5, True), (100, False)):
        topk = tp.TopKDescriptor(element=element, rows=4, n=n, k=k, largest=largest)
        assert check_plan(required(topk, kernel, target(where)), runs=1, given={"x": x}).compared


@pytest.mark.parametrize("element", ["i32", "i64", "i8", "bool"])
@pytest.mark.parametrize(("where", "kernel"), places("filtered"))
def test_bisections_between_any_two_keys(where: str, kernel: str | None, element: str, constant: SetConstant) -> None:
    """The whole range of an element, whose width no signed integer holds; one value; two that are neighbours."""
    constant(filtered, "MOST_RANKED", 4)
    dtype = tp.ElementKind(element).torch
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    x = torch.full((4, 300), low, dtype=dtype)
    x[0, ::2] = high
    x[1] = high
    x[2, 7::9] = 1
    x[3] = torch.randint(low, high, (300,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (1, 4, 5, 40):
        for desc in (
            tp.TopKDescriptor(element=element, rows=4, n=300, k=k),
            tp.TopKDescriptor(element=element, rows=4, n=300, k=k, largest=False),
            tp.KthValueDescriptor(element=element, rows=4, n=300, k=k),
        ):
            assert check_plan(required(desc, kernel, target(where)), runs=1, given={"x": x}).compared


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("k", [1, 200, 1000])
def test_filtered_then_sorted(k: int, layout: str, constant: SetConstant) -> None:
    """Of one part and several, of each width of a key, with ties and NaN of any bits."""
    for span in (filtered.SPAN, 512):
        constant(filtered, "SPAN", span)
        for element in ("bf16", "u8", "f32", "i64", "f64"):
            desc = tp.TopKDescriptor(element=element, rows=3, n=20_000, k=k)
            desc = desc.replace(layouts={o.name: layout for o in desc.operands()})
            plan = required(desc, "filtered_sort", tp.Target.current())
            assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("filtered"))
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("ranked", [0, 96])
def test_filtered_by_groups(where: str, kernel: str | None, parts: int, ranked: int, constant: SetConstant) -> None:
    """What is taken lies in one group of columns, in all of them, in one part, or at the end of the last one; a second
    bisection finds it, some of it at a time, or it is ranked."""
    constant(filtered, "MOST_RANKED", ranked)
    constant(filtered, "SPAN", 600 if parts > 1 else 1 << 20)
    constant(filtered, "PROGRAMS", 15)
    constant(filtered, "GROUPS_WANTED", 64)
    n, k = 2000, 8
    x = torch.zeros(7, n)
    x[0, 5::64] = torch.arange(len(x[0, 5::64])).float()  # one group holds all; with ties of zero for the others
    x[1] = torch.arange(n)
    x[2] = -torch.arange(n)
    x[3, n - 3 :] = 1
    g = torch.Generator().manual_seed(0)
    x[4, 700:720] = torch.randperm(20, generator=g).float() - 10
    x[5, 5::64] = -1 - torch.arange(len(x[5, 5::64])).float() // 2  # more than a second bisection holds
    for group in range(9):  # several of equal elements in a group, of which some are wanted, and one that precedes them
        x[6, 65 * group : 640 : 64] = -1
    x[6, 5 + 9 * 64] = -2
    for largest in (True, False):
        desc = tp.TopKDescriptor(element="f32", rows=7, n=n, k=k, largest=largest)
        plan = required(desc, kernel, target(where))
        assert kernel is None or len(plan.launches) == min(parts, 2)
        assert check_plan(plan, runs=1, given={"x": x}).compared
    kth = tp.KthValueDescriptor(element="f32", rows=7, n=n, k=k)
    assert check_plan(required(kth, kernel, target(where)), runs=1, given={"x": x}).compared


def test_one_long_row_is_read_by_all_multiprocessors() -> None:
    """Of (1, 2**24): parts of which each gives its first 64; then the first of these."""
    desc = tp.TopKDescriptor(element="f32", rows=1, n=2**24, k=64)
    first, second = filtered.stages(desc, tp.Target.sm90a())
    assert tp.plan(desc, target=tp.Target.sm90a()).sku().kernel == "filtered"
    assert (first.parts, second.n, second.parts) == (264, 264 * 64, 1)


def test_long_rows_are_sorted_by_their_digits() -> None:
    """Of (1, 2**24): zeros, counts and their sums, four digits; two buffers, and a count of each digit in each tile."""
    plan = tp.plan(tp.SortDescriptor(element="f32", rows=1, n=2**24), target=tp.Target.sm90a())
    assert plan.sku().kernel == "onesweep"
    assert len(plan.launches) == 3 + 4
    counts = 4 * 4 * 256 * (1 + 2**24 // 4096)
    assert plan.workspace_size() == 2 * 8 * 2**24 + counts + 4 * 16


@compiles
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_shared_memory_that_ptx_declares_is_counted(target: str) -> None:
    """Eight warps' counters of 256 digits, and 4096 words of 8 bytes; Triton's own scans take a few bytes more."""
    plan = tp.plan(tp.SortDescriptor(element="f32", rows=9, n=4096), target=target)
    (found,) = plan.compile()
    assert plan.sku().kernel == "block"
    assert 8 * 256 * 4 + 4096 * 8 < found.shared_bytes < 8 * 256 * 4 + 4096 * 8 + 512
    (found,) = tp.plan(tp.SortDescriptor(element="f32", rows=3, n=16), kernel="rows", target=target).compile()
    assert found.shared_bytes == 0


@pytest.mark.parametrize(
    ("op", "element", "rows", "n", "k", "kernel"),
    [
        ("kthvalue", "bf16", 1, 249, 79, "rows"),
        ("topk", "f16", 16, 5376, 291, "filtered_sort"),
        ("kthvalue", "f32", 95359, 4096, 512, "filtered"),
        ("topk", "bool", 17999699, 96, 63, "block"),
        ("topk", "bf16", 1318883, 225, 128, "block"),
        ("topk", "i64", 51, 64, 31, "block"),
    ],
)
def test_choices_of_selections(op: str, element: str, rows: int, n: int, k: int, kernel: str) -> None:
    """By ``bench/results``: steps take long between warps; blocks of pairs, too; long threads leave few programs; what
    is ordered and what is stored overlap."""
    desc = tp.descriptor_types()[op](element=element, rows=rows, n=n, k=k)
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


def test_rows_of_thousands_are_sorted_by_one_program() -> None:
    plan = tp.plan(tp.SortDescriptor(element="f32", rows=65536, n=1024), target=tp.Target.sm90a())
    assert plan.sku().kernel == "block"
    assert (len(plan.launches), plan.workspace_size()) == (1, 0)


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
)
@pytest.mark.parametrize("levels", [0, 1, 4])
def test_bisections_compare_with_what_torchs_do(levels: int, where: str, constant: SetConstant) -> None:
    """In registers, in a loop and last; NaN behind the others, where the result depends on what is compared; operands
    that are contiguous along rows, of whole tiles and not; short rows, several of which a program takes."""
    constant(searching, "LEVELS", levels)
    x = drawn(21, 150)
    x[:, 7] = float("nan")
    for n in (1, 2, 3, 4, 15, 30, 31):
        sequence = drawn(21, n).sort(1).values
        sequence[:, n - n // 3 :] = float("nan")
        for m, names in ((40, ("x",)), (40, ("out",)), (40, ("x", "out")), (150, ()), (11, ()), (1, ("x",))):
            layouts = dict.fromkeys(names, TURNED)
            desc = tp.SearchSortedDescriptor(element="f64", rows=21, n=n, m=m, right=n % 2 == 0, layouts=layouts)
            assert searching.rows_of(desc) == (16 if m == 40 else 1)
            assert searching.taken_of(desc) == {40: 0, 150: 0, 11: 2, 1: 32}[m]
            given = {"sequence": sequence, "x": x[:, :m]}
            assert check_plan(tp.plan(desc, target=target(where)), runs=1, given=given).compared


@pytest.mark.parametrize(
    ("element", "rows", "n", "m", "turned", "warps", "levels"),
    [
        ("f32", 40000, 128, 1024, False, 8, 3),
        ("f64", 40000, 128, 1024, False, 8, 2),  # a third step takes more than 32 registers
        ("f32", 40000, 128, 1024, True, 16, 2),
        ("f32", 4096, 3000, 8192, False, 32, 2),
        ("f32", 40000, 128, 128, False, 2, 2),
        ("f32", 64, 128, 1024, False, 16, 2),
        ("f32", 40000, 1, 32, False, 8, 1),
        ("f16", 1000000, 20, 17, False, 8, 2),  # several rows
    ],
)
def test_threads_search_for_several_elements_of_many(
    element: tp.ElementKind, rows: int, n: int, m: int, turned: bool, warps: int, levels: int
) -> None:
    layouts = {"out": tp.Layout.strided(unit_axis=0)} if turned else {}
    desc = tp.SearchSortedDescriptor(element=element, rows=rows, n=n, m=m, layouts=layouts)
    assert (searching.warps_of(desc), searching.levels_of(desc)) == (warps, levels)


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=getattr(pytest.mark, where)) for where in ("interpret", "gpu")]
)
@pytest.mark.parametrize(
    ("element", "rows", "n", "layouts", "split"),
    [
        ("i16", 9, 48, {}, 1),
        ("i16", 9, 44, {}, 2),
        ("f16", 9, 43, {}, 8),
        ("f16", 9, 48, {"x": tp.Layout.strided(unit_axis=0)}, 8),
        ("f32", 17, 24, {}, 2),
        ("i64", 17, 26, {}, 4),
        ("f64", 17, 21, {}, 8),
        ("u8", 1, 100, {}, 1),  # threads of four elements, and of a half
        ("u8", 1, 11, {}, 1),
        ("f16", 70, 1, {}, 1),  # threads of whole rows
        ("i64", 70, 2, {}, 1),
        ("f64", 70, 3, {}, 4),
        ("f32", 70, 4, {"x": tp.Layout.strided(unit_axis=0)}, 4),
        ("bf16", 40, 7, {}, 8),
    ],
)
def test_threads_sort_several_vectors_of_rows(
    element: tp.ElementKind, rows: int, n: int, layouts: dict[str, tp.Layout], split: int, where: str
) -> None:
    x = drawn(rows, n).to(tp.ElementKind(element).torch)
    for desc in (
        tp.SortDescriptor(element=element, rows=rows, n=n, descending=True, layouts=layouts),
        tp.KthValueDescriptor(element=element, rows=rows, n=n, k=max(n // 2, 1), layouts=layouts),
    ):
        assert rows_entry.split_of(desc) == split
        assert check_plan(required(desc, "rows", target(where)), runs=1, given={"x": x}).compared
