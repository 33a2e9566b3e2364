"""What the launcher relies on in Triton and torch, and that every argument arrives in its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import empty_kernel
from matrix import cover
from samples import SAMPLES, in_child

import triplan as tp
from bench.stub import launch_stubbed
from triplan.backends.runtime import compile as compiling, launcher, tma_maps
from triplan.backends.runtime.compile import compile_source
from triplan.backends.runtime.launch import (
    Float,
    Int,
    Launch,
    Ptr,
    Scalar,
    Scratch,
    Stride,
    TensorMap,
)
from triplan.backends.table import KernelRow
from triplan.sku import ArchSku, ElementKind

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")
H200 = tp.Target.preset("h200")
ADDRESSES = 10**6  # of operands, far from any other argument
WHOLE = 8  # launches of kernels that also compute, some in shared memory


@triton.jit
def copy_by_tma(source, target, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = [tl.program_id(0) * ROWS, 0]
    target.store(at, source.load(at))


def tma_launch(rows: int, element: ElementKind = ElementKind.F32) -> Launch:
    args = {name: TensorMap(name, element, (16, 32)) for name in ("source", "target")}
    return Launch(copy_by_tma, -(-rows // 16), args, {"ROWS": 16, "COLS": 32})


def launches() -> list[Launch]:
    """Kernels with every kind of argument: tuples, strides, scalars of each width, scratch, absent ones."""
    strided = {"src": "strided", "out": "strided", "values": "strided", "indices": "strided"}
    found: list[Launch] = []
    for op in SAMPLES:
        base = SAMPLES[op]
        if "element" in type(base).model_fields:
            base = base.replace(element="f16")
        names = {o.name for o in base.operands()}
        for desc in (base, base.replace(layouts={k: v for k, v in strided.items() if k in names})):
            for entry in tp.TABLE.rows(op):
                if entry.backend is tp.BackendKind.TRITON and entry.supports(desc, H200) and entry.build:
                    found += entry.launches(desc, H200)
    add = SAMPLES["index_add"].replace(element="f64")
    found += tp.plan(add, target=H200).launches
    early = [tp.plan(desc, target=H200, preference=tp.PlanPreference(kernel=entry)) for entry, desc in OVERLAPPING]
    found += [launch for plan in early for launch in plan.launches]
    # Tensor maps have tests of their own.
    return [x for x in found if not any(isinstance(a, TensorMap) for a in x.args.values())]


def kinds(arg: Any) -> Any:
    """What the launcher makes of an argument depends on: its kind, and the width of what is passed by value."""
    if isinstance(arg, tuple):
        return tuple(kinds(a) for a in arg)
    return type(arg), getattr(arg, "wide", None), arg.element if isinstance(arg, (Float, Scalar)) else None


def neighbours(launch: Launch) -> set[Hashable]:
    """Each two arguments that follow each other: what they are, and whether they are compiled in."""
    types = dict(launch.source().signature)
    args = [(kinds(launch.args.get(name)), types.get(name) == "constexpr") for name in launch.kernel.arg_names]
    return {(launch.overlaps, *pair) for pair in pairwise((None, *args, None))}


@pytest.fixture(scope="module")
def every() -> list[Launch]:
    """Few launches that have all kinds of arguments beside all kinds that follow them anywhere.

    An argument's place depends on those before it, not on the kernel: most have a kernel that does nothing. The
    parameters of each kernel are counted where all binaries are built, in ``contracts/binaries``.
    """
    found = launches()
    chosen = [found[i] for i in cover([neighbours(launch) for launch in found])]
    return chosen[:WHOLE] + [replace(launch, kernel=empty_kernel(launch.kernel)) for launch in chosen[WHOLE:]]


@pytest.fixture(scope="module")
def plain(every: list[Launch]) -> list[Launch]:
    """Those that torch's launcher knows: it starts none before the one ahead has ended."""
    return [launch for launch in every if not launch.overlaps]


class Recorder:
    """Stands for a launcher: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def launches_stubbed() -> Iterator[None]:
    """The driver, replaced."""
    with launch_stubbed(H200):
        yield


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch, launches_stubbed: None) -> Recorder:
    """torch's static launcher, replaced."""
    recorder = Recorder()
    monkeypatch.setattr(launcher, "_STATIC", recorder)
    return recorder


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch, launches_stubbed: None) -> Recorder:
    """Triton's launcher, replaced; torch has no static one."""
    recorder = Recorder()
    monkeypatch.setattr(launcher, "_STATIC", None)
    monkeypatch.setattr(type(triton.runtime.driver.active), "launcher_cls", lambda *args: recorder)
    return recorder


def operands(launch: Launch) -> tuple[Any, dict[tuple[str, int | None], int]]:
    """Args whose strides are all different, and a place for each address and scalar that ``launch`` asks for."""
    names: dict[tuple[str, int | None], int] = {}
    values: dict[str, Any] = {}

    def visit(arg: Any) -> None:
        if isinstance(arg, tuple):
            for a in arg:
                visit(a)
        elif isinstance(arg, (Ptr, Scalar, Stride)):
            item = getattr(arg, "item", None)
            tensor = SimpleNamespace(stride=partial(add, 7000 + 10 * len(values)))
            if isinstance(arg, Scalar):
                names.setdefault((arg.operand, None), len(names))
            elif item is None:
                values.setdefault(arg.operand, tensor)
            else:
                items = values.setdefault(arg.operand, [])
                while len(items) <= item:
                    items.append(tensor)
            if isinstance(arg, Ptr):
                names.setdefault((arg.operand, arg.item), len(names))

    for arg in launch.args.values():
        visit(arg)
    names[launcher.WORKSPACE] = len(names)
    return SimpleNamespace(**values), names


def expected(launch: Launch, args: Any, places: dict[tuple[str, int | None], int], arg: Any) -> Any:
    """What one argument of ``launch`` must become, told from its specification alone."""
    if isinstance(arg, tuple):
        return tuple(expected(launch, args, places, a) for a in arg)
    if isinstance(arg, (Int, Float)):
        return arg.value
    if isinstance(arg, Scratch):
        return ADDRESSES + places[launcher.WORKSPACE] + arg.offset
    if isinstance(arg, Ptr):
        return ADDRESSES + places[(arg.operand, arg.item)]
    if isinstance(arg, Scalar):
        return ADDRESSES + places[(arg.operand, None)]
    if isinstance(arg, Stride):
        tensor = getattr(args, arg.operand)
        return (tensor if arg.item is None else tensor[arg.item]).stride(arg.axis)
    return None


@dataclass
class Loaded:
    """A kernel with its template, values for the places of a call, and what each argument must become."""

    compiled: Any
    template: launcher.Template
    values: tuple[int, ...]
    wanted: list[Any]

    @classmethod
    def of(cls, launch: Launch) -> Loaded:
        args, places = operands(launch)
        (kernel,) = launcher.load([launch], H200.arch, 0)
        wanted = [expected(launch, args, places, launch.args.get(name)) for name in launch.kernel.arg_names]
        values = tuple(ADDRESSES + i for i in range(len(places)))
        return cls(kernel.compiled, kernel.template(args, places), values, wanted)

    def launch(self, stream: int) -> None:
        launcher.launch([self.template.fill(self.values)], stream)


def flat(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [v for item in value for v in flat(item)]
    return [] if value is None else [value]


def test_every_kind_of_argument_is_there(plain: list[Launch]) -> None:
    arguments = [arg for launch in plain for arg in launch.args.values()]
    kinds = {type(a) for arg in arguments for a in (arg if isinstance(arg, tuple) else (arg,))} - {tuple}
    assert kinds == {Ptr, Scratch, Int, Float, Stride, Scalar, type(None)}


def test_a_kernel_with_other_parameters_is_refused(plain: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_STATIC", Recorder())
    compiled = compile_source(plain[0].source(), H200.arch)
    ptx = compiled.asm["ptx"].replace(".param .u64", ".param .u64 a,\n\t.param .u64", 1)
    fake = SimpleNamespace(metadata=compiled.metadata, src=compiled.src, asm={"ptx": ptx}, name="changed")
    with pytest.raises(tp.KernelInternal, match=r"has \d+ parameters"):
        launcher.static_types(fake)


def test_the_static_launcher_gets_every_argument(plain: list[Launch], static: Recorder) -> None:
    for launch in plain:
        loaded = Loaded.of(launch)
        loaded.launch(77)
        launcher.launch([loaded.template.fill(loaded.values)], 78)
        for call, stream in zip(static.calls[-2:], (77, 78), strict=True):
            function, x, y, z, warps, shared, types, arguments, on = call
            assert (function, x, y, z, on) == (1, launch.grid, 1, 1, stream)
            assert (warps, shared) == (launch.num_warps, loaded.compiled.metadata.shared)
            assert arguments == (*flat(tuple(loaded.wanted)), None, None)
            assert len(types) == len(arguments)
    assert any(Loaded.of(launch).compiled.metadata.shared for launch in plain[:WHOLE])


@pytest.mark.parametrize("few", [1, 3, 8, 100])
@pytest.mark.parametrize("launcher_of", ["static", "by_triton"])
def test_a_replay_writes_out_every_argument(
    plain: list[Launch], launcher_of: str, few: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(launcher_of)
    monkeypatch.setattr(launcher, "_FEW_CONSTANTS", few)
    joined = 0
    for launch in plain:
        loaded = Loaded.of(launch)
        if not loaded.template.computed:
            places = [f"v[{i}]" for i in range(len(loaded.values))]
            source, constants = loaded.template.source(places, "k")
            assert eval(source, {**constants, "v": loaded.values}) == loaded.template.arguments(loaded.values)
            joined += "+" in source
    assert bool(joined) == (few < 100)


@pytest.mark.parametrize(("alpha", "passed"), [(None, 1), (2.5, 2.5), (-3, -3)])
def test_a_scalar_that_stays_is_part_of_the_launch(static: Recorder, alpha: float | None, passed: float) -> None:
    """One that has no place among a call's changing values: replays of functional calls hold such."""
    desc = tp.IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32")
    plan = tp.plan(desc, preference=tp.PlanPreference(kernel="atomic_rows", deterministic=False), target=H200)
    args = tp.IndexAddArgs(index=torch.arange(6), src=torch.ones(6, 32), out=torch.zeros(9, 32), alpha=alpha)
    places: dict[tuple[str, int | None], int] = {("index", None): 0, ("src", None): 1, ("out", None): 2}
    values = (ADDRESSES, ADDRESSES + 1, ADDRESSES + 2)
    launcher.launch([template.fill(values) for template in plan.templates(args, None, places)], 5)
    ((launch,),) = (plan.launches,)
    flattened = [leaf for n in launch.kernel.arg_names for leaf in flat((launch.args.get(n),))]
    (at,) = [i for i, leaf in enumerate(flattened) if isinstance(leaf, Scalar)]
    ((*_, arguments, _),) = static.calls
    assert arguments[at] == passed


def test_tritons_launcher_gets_every_argument(every: list[Launch], by_triton: Recorder) -> None:
    for launch in every:
        loaded = Loaded.of(launch)
        loaded.launch(77)
        x, y, z, stream, function, packed, about, enter, leave, *arguments = by_triton.calls[-1]
        assert (x, y, z, stream, function) == (launch.grid, 1, 1, 77, 1)
        assert packed == loaded.compiled.packed_metadata
        assert about is enter is leave is None
        assert arguments == loaded.wanted


@pytest.mark.parametrize("overlaps", [False, True])
def test_hooks_hear_of_launches_where_a_profiler_installed_some(
    every: list[Launch], static: Recorder, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    run = Recorder()
    monkeypatch.setattr(type(triton.runtime.driver.active), "launcher_cls", lambda *args: run)
    launch = next(launch for launch in every if launch.overlaps is overlaps)
    loaded, hook = Loaded.of(launch), triton.knobs.runtime.launch_enter_hook

    def heard(metadata: Any) -> None: ...

    hook.add(heard)
    try:
        loaded.launch(5)
    finally:
        hook.remove(heard)
    assert not static.calls
    ((x, _, _, stream, _, _, about, enter, _, *arguments),) = run.calls
    assert (x, stream, enter) == (launch.grid, 5, hook)
    assert about.get()["name"] == loaded.compiled.name
    assert arguments == loaded.wanted
    loaded.launch(5)
    if overlaps:
        assert run.calls[1][6:9] == (None, None, None)
    assert (len(run.calls), len(static.calls)) == ((2, 0) if overlaps else (1, 1))


@pytest.mark.parametrize("bound", [False, True])
def test_a_failed_launch_is_an_internal_error(
    plain: list[Launch], static: Recorder, monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("CUDA driver error: invalid argument")

    monkeypatch.setattr(launcher, "_STATIC", failing)
    loaded = Loaded.of(plain[0])
    call = partial(launcher.launch, [loaded.template.fill(loaded.values)]) if bound else loaded.launch
    with pytest.raises(tp.KernelInternal, match=r"launch of \w+ failed: CUDA driver error"):
        call(0)


# --- launches that begin before the one ahead has ended ---


OVERLAPPING: list[tuple[str, tp.Descriptor]] = [
    ("split_k", tp.GemmDescriptor(m=16, n=4096, k=4096, element="f16")),
    *(
        ("split", tp.descriptor_types()[op](input_shape=(16, 262_144), element="bf16"))
        for op in ("layer_norm", "layer_norm_backward", "rms_norm", "l2_norm_backward")
    ),
]


@pytest.mark.parametrize(("entry", "desc"), OVERLAPPING)
def test_launches_of_hopper_alone_overlap(entry: str, desc: tp.Descriptor) -> None:
    """That their kernels wait before they touch memory is shown where all binaries are built."""
    for target in (H200, tp.Target.sm80()):
        plan = tp.plan(desc, target=target, preference=tp.PlanPreference(kernel=entry))
        assert plan.launches
        assert {launch.overlaps for launch in plan.launches} == {target is H200}


@pytest.mark.parametrize(("owner", "name"), [(compiling, "_compile"), (KernelRow, "launches")])
def test_fork_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """No lock that the other thread holds, of ours or of functools, may stay locked in the child."""
    original, reached, forked = getattr(owner, name), threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        if threading.current_thread() is thread:
            reached.set()
            forked.wait()
        return original(*args) if owner is KernelRow else "binary"

    def compile_all(op: str) -> None:
        assert [compile_source(launch.source(), H200.arch) for launch in tp.plan(SAMPLES[op], target=H200).launches]

    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(compiling, "_compile", lambda *args: "binary")
    monkeypatch.setattr(owner, name, held)
    thread = threading.Thread(target=compile_all, args=("gather",))
    thread.start()
    reached.wait()
    try:
        in_child(lambda: compile_all("index_select"), 10)
    finally:
        forked.set()
        thread.join()


# --- tensor maps ---


def test_tensor_maps_need_tritons_launcher_and_compile_to_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_STATIC", Recorder())
    compiled = compile_source(tma_launch(64).source(), ArchSku.SM90A)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert len(compiled.metadata.tensordesc_meta) == 2
    assert launcher.static_types(compiled) is None


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptors that reach the driver; a map is a new object, and the shape."""
    found: list[Any] = []

    def encode(descriptor: Any, meta: Any) -> list[Any]:
        found.append(SimpleNamespace(at=descriptor.base.data_ptr(), shape=descriptor.shape, strides=descriptor.strides))
        return [object(), *descriptor.shape]

    monkeypatch.setattr(tma_maps, "ENCODED", True)
    monkeypatch.setattr(tma_maps.driver, "make_tensordesc_arg", encode)
    return found


def test_a_map_is_encoded_once_for_an_address(encoded: list[Any]) -> None:
    spec = TensorMap("source", ElementKind.F32, (16, 32))
    maps = tma_maps.Maps(spec, torch.empty(64, 32), None)
    first, other = maps(4096), maps(8192)
    assert [maps(4096), maps(8192)] == [first, other]
    assert first[0] is not other[0]
    # The same address under another shape is another map.
    assert tma_maps.Maps(spec, torch.empty(48, 32), None)(4096)[1] == 48
    assert [(x.at, x.shape) for x in encoded] == [(4096, [64, 32]), (8192, [64, 32]), (4096, [48, 32])]
    for address in range(0, 16 * 1000, 16):
        maps(address)
    assert len(maps._by_address) <= tma_maps._MAX_MAPS


def test_maps_of_transposes_and_of_axes_of_one(encoded: list[Any]) -> None:
    """The transpose's shape; for an axis of one, whose stride is never used, a stride that the driver takes."""
    column_major = torch.empty(40, 24).t()  # (24, 40), unit stride down its columns
    spec = TensorMap("b", ElementKind.F32, (16, 32), transposed=True)
    tma_maps.Maps(spec, column_major, None)(4096)
    plain = TensorMap("a", ElementKind.F32, (16, 32))
    tma_maps.Maps(plain, torch.empty(1, 40).as_strided((1, 40), (3, 1)), None)(4096)
    tma_maps.Maps(plain, torch.empty(512).as_strided((64, 1), (8, 5)), None)(4096)
    batch = TensorMap("b", ElementKind.F32, (1, 16, 32), transposed=True)
    tma_maps.Maps(batch, torch.empty(40, 24).t().expand(5, 24, 40), None)(4096)  # one matrix for all of a batch
    tma_maps.Maps(batch, torch.empty(5, 40, 24).mT, None)(4096)
    assert [(x.shape, x.strides) for x in encoded] == [
        ([40, 24], [24, 1]),
        ([1, 40], [48, 1]),
        ([64, 1], [8, 1]),
        ([1, 40, 24], [32, 24, 1]),
        ([5, 40, 24], [960, 24, 1]),
    ]


def test_maps_of_axes_that_are_one(encoded: list[Any]) -> None:
    """Channels last: the pixels of all images as one row, and of these a group of the channels."""
    x = torch.empty(3, 16, 5, 7).to(memory_format=torch.channels_last)
    view = ((0, 0, None, 1), (2, 0, None, 1), (3, 0, None, 1), (1, 8, 16, 1))
    spec = TensorMap("x", ElementKind.F32, (1, 1, 64, 8), view=view, lies=((1, 16, 1, 105), (1680, 1, 1680, 16)))
    tma_maps.Maps(spec, x, None)(4096)
    assert [(m.at, m.shape, m.strides[2:]) for m in encoded] == [(4096 + 8 * 4, [1, 1, 105, 8], [16, 1])]


def test_a_gluon_kernel_is_compiled_as_one() -> None:
    desc = tp.GemmDescriptor(m=256, n=256, k=256, element="f16")
    plan = tp.plan(desc, preference=tp.PlanPreference(kernel="wgmma"), target=H200)
    (launch,) = plan.launches
    types = dict(launch.source().signature)
    assert types["a"].startswith("tensordesc<fp16[64,64],NVMMASharedLayout(")
    compiled = compile_source(launch.source(), ArchSku.SM90A)
    assert len(compiled.metadata.tensordesc_meta) == 3
    assert compiled.metadata.num_warps == 12  # four that multiply, four more, one that loads, rounded up to fours
    assert "setmaxnreg" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("profiled", [False, True])
def test_maps_follow_the_operands(monkeypatch: pytest.MonkeyPatch, profiled: bool) -> None:
    """Addresses that come back under another shape, and a shape that comes back at another address."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs TMA: compute capability 9.0 or later")
    count = [0]
    encode = tma_maps.driver.make_tensordesc_arg

    def counting(*args: Any) -> Any:
        count[0] += 1
        return encode(*args)

    monkeypatch.setattr(tma_maps.driver, "make_tensordesc_arg", counting)
    heard: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    if profiled:
        hook.add(heard.append)
    try:
        places: dict[tuple[str, int | None], int] = {("source", None): 0, ("target", None): 1}
        buffers = [torch.randn(96 * 32, device="cuda") for _ in range(3)]
        for rows in (96, 41, 64):
            (kernel,) = launcher.load([tma_launch(rows)], ArchSku.SM90A, torch.cuda.current_device())
            views = [b[: rows * 32].view(rows, 32) for b in buffers]
            template = kernel.template(SimpleNamespace(source=views[0], target=views[1]), places)
            for i, j in ((0, 1), (0, 2), (1, 2), (0, 1), (0, 2), (1, 2)):
                views[i].normal_()
                before = buffers[j].clone()
                stream = torch.cuda.current_stream().cuda_stream
                launcher.launch([template.fill((views[i].data_ptr(), views[j].data_ptr()))], stream)
                assert torch.equal(views[i], views[j])
                assert torch.equal(before[rows * 32 :], buffers[j][rows * 32 :])
    finally:
        if profiled:
            hook.remove(heard.append)
    assert len(heard) == (18 if profiled else 0)
    if tma_maps.ENCODED:
        assert count[0] == 3 * 4  # addresses 0 and 1 as a source, 1 and 2 as a target, under each shape


@pytest.mark.gpu
def test_torch_has_the_static_launcher_here() -> None:
    """Without it every launch costs more; this says so rather than letting a bench show it."""
    plan = tp.plan(SAMPLES["gather"])
    (kernel,) = launcher.load(plan.launches, plan.target.arch, torch.cuda.current_device())
    assert launcher._STATIC is not None
    assert launcher.static_types(kernel.compiled) is not None
