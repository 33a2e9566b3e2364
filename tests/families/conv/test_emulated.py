"""Hopper's kernels of convolution, whose logic is emulated without a GPU: boxes, borders, strides, taps, parts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from cases import H200
from cases.gluon import emulate

import triplan as tp
from triplan import testing
from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.triton.conv import wgmma, wgmma_division, wgmma_tiles
from triplan.sku.facts import forget_facts

#: So few programs that each has several tiles.
FEW = tp.Target(arch=H200.arch, sm_count=3, shared_memory=H200.shared_memory)
#: Images, channels, height, width, filters, rows and columns of a filter; then what a convolution has besides.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "same": ((2, 72, 13, 11, 136, 3, 3), {"padding": (1, 1, 1, 1), "has_bias": True}),
    "pointwise": ((3, 136, 9, 8, 72, 1, 1), {}),
    "strided": ((2, 64, 15, 18, 64, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2)}),
    "strided_pointwise": ((2, 64, 15, 18, 72, 1, 1), {"stride": (2, 1)}),
    "dilated": ((2, 64, 17, 16, 64, 3, 2), {"padding": (2, 2, 1, 1), "dilation": (2, 2)}),
    "wide": ((1, 72, 6, 70, 264, 1, 5), {"padding": (0, 0, 2, 2)}),
    "strided_wide": ((2, 72, 13, 37, 72, 1, 5), {"padding": (1, 0, 2, 2), "stride": (2, 2)}),
    "square": ((2, 64, 13, 18, 128, 3, 3), {"padding": (1, 1, 1, 1), "has_bias": True}),
    "few": ((2, 32, 13, 18, 24, 3, 2), {"padding": (1, 1, 0, 1), "has_bias": True}),
    "few_to_many": ((2, 24, 9, 18, 72, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2)}),
}
OPS = ("conv2d", "conv2d_backward_input", "conv2d_backward_weight")


def drawn(desc: tp.Descriptor) -> dict[str, Any]:
    """Small integers, whose sums are exact, with channels last; outputs are NaN."""
    g = torch.Generator().manual_seed(0)
    found = {}
    for o in desc.operands():
        t = torch.randint(-2, 3, o.shape, generator=g).to(o.element.torch)
        t = torch.full_like(t, torch.nan) if o.is_written else t
        found[o.name] = t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    return found


def problem(op: str, sizes: tuple[int, ...], options: dict[str, Any], element: str = "bf16") -> Any:
    """Channels last, with strides that are multiples of 8 if the channels are."""
    batch, channels, height, width, filters, *kernel = sizes
    cls: Any = tp.descriptor_types()[op]
    named = {"batch": batch, "in_channels": channels, "height": height, "width": width, "out_channels": filters}
    options = {k: v for k, v in options.items() if k in cls.model_fields}
    math = {"math": "tf32"} if element == "f32" else {}
    desc = cls(element=element, kernel=tuple(kernel), **named, **options, **math)

    def last(o: tp.Operand) -> tp.Layout:
        return tp.Layout.strided(alignment=16, unit_axis=1, stride_multiple=1 if o.shape[1] % 8 else 8)

    return desc.replace(layouts={o.name: last(o) for o in desc.operands() if len(o.shape) == 4})


def agrees(desc: Any, x: dict[str, Any]) -> None:
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    given = {n: t.double() for n, t in x.items() if not desc.operand(n).is_written}
    for output, wanted in compute(desc, given).items():
        assert torch.equal(x[output], wanted.to(x[output].dtype)), output


def folded(launch: Launch, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """Adds the pieces of each tile, in another language."""
    at, own = launch.args["parts"], launch.constexprs
    n: dict[str, int] = {name: arg.value for name, arg in launch.args.items() if isinstance(arg, Int)}
    assert isinstance(at, Scratch)
    k, c, r, s = x["dweight"].shape
    rows, columns = own["FILTERS"], own["COLUMNS"]
    slots = workspace[at.offset :].view(torch.float32)
    high, wide = n["tiles_filters"], n["tiles"] // n["tiles_filters"]
    found = torch.zeros(high, rows * 64, wide, columns * 64)
    tiles, shares, lanes = n["tiles"], n["shares"], n["lanes"]
    pieces = [(lane * tiles + tile, tile) for lane in range(lanes) for tile in range(tiles)][:shares]
    length, left = len(range(lanes - 1, n["boxes"], lanes)), lanes * tiles - shares
    begins = [share * left * length // shares for share in range(shares + 1)]
    for share, (begin, end) in enumerate(itertools.pairwise(begins)):
        for lane in range(left):
            if max(begin, lane * length) < min(end, (lane + 1) * length):
                pieces.append((shares + share + lane, tiles - left + lane))
    for slot, tile in pieces:
        size = rows * columns * 64 * 64
        piece = slots[slot * size :][:size].view(rows, columns, 8, 8, 8, 8)
        found[tile % high, :, tile // high] += piece.permute(0, 2, 4, 1, 3, 5).reshape(rows * 64, columns * 64)
    found = found.view(high * rows * 64, -1)[:k, : n["taps"] * n["blocks"] * 64]  # tiles may end behind the last tap
    found = found.view(k, n["taps"], -1)[..., : n["reduced"]]
    x["dweight"].copy_(found.reshape(k, r, s, -1).permute(0, 3, 1, 2)[:, :c])


def added(launch: Launch, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """Adds the parts of (filter, tap row, tap column, channel), in another language."""
    at, count = launch.args["parts"], launch.args["count"]
    assert isinstance(at, Scratch)
    assert isinstance(count, Int)
    filters, channels, *taps = x["dweight"].shape
    parts = workspace[at.offset :].view(torch.float32)[: count.value * x["dweight"].numel()]
    x["dweight"].copy_(parts.view(count.value, filters, *taps, channels).sum(0).permute(0, 3, 1, 2))


def copied(launch: Launch, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """Copies an operand with padding, in another language."""
    args: dict[str, Any] = launch.args
    rows, columns, read = (args[name].value for name in ("rows", "columns", "source_columns"))
    images = launch.grid // (args["tiles_channels"].value * args["tiles_columns"].value * rows)

    element = x[args["source" if isinstance(args["out"], Scratch) else "out"].operand].dtype

    def side(name: str, strides: str, channels: int, columns: int) -> torch.Tensor:
        at = args[name]
        t = workspace[at.offset :].view(element) if isinstance(at, Scratch) else x[at.operand]
        steps = [1 if s is None else s.value if isinstance(s, Int) else t.stride(s.axis) for s in args[strides]]
        return t.as_strided((images, channels, rows, columns), steps)

    source = side("source", "source_strides", args["source_channels"].value, read)
    out, left = side("out", "out_strides", args["channels"].value, columns), args["left"].value if args["left"] else 0
    channels, width = min(source.shape[1], out.shape[1]), min(source.shape[3], columns - left)
    out.zero_()
    out[:, :channels, :, left : left + width] = source[:, :channels, :, :width]


def interleaved(launch: Launch, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """Copies the weight into filters of all remainders, in another language."""
    n: dict[str, int] = {name: arg.value for name, arg in launch.args.items() if isinstance(arg, Int)}
    weight = x["weight"]
    filters, channels, *kernel = weight.shape
    out = workspace[launch.args["out"].offset :].view(weight.dtype)[: n["elements"]]  # type: ignore[union-attr]
    out = out.view(-1, n["taps_rows"], n["taps_columns"], filters).zero_()
    for a, b, u, v in itertools.product(*map(range, (n["stride_rows"], n["stride_columns"], *out.shape[1:3]))):
        r = Fraction(a + n["above"] - (u + n["first_row"]) * n["stride_rows"], n["dilation_rows"])
        s = Fraction(b + n["left"] - (v + n["first_column"]) * n["stride_columns"], n["dilation_columns"])
        if r in range(kernel[0]) and s in range(kernel[1]):
            first = (a * n["stride_columns"] + b) * channels
            out[first : first + channels, u, v] = weight[:, :, int(r), int(s)].T


def separated(launch: Launch, x: dict[str, Any], workspace: torch.Tensor) -> None:
    """Copies features into the pixels of their remainders, in another language."""
    args: dict[str, Any] = launch.args
    images, channels, rows, columns = x["dx"].shape
    high, wide = args["stride_rows"].value, args["stride_columns"].value
    sizes = (images, -(-rows // high), -(-columns // wide), high, wide, channels)
    steps = (*(1 if s is None else s.value for s in args["source_strides"]), wide * channels, channels, 1)
    source = workspace[args["source"].offset :].view(x["dx"].dtype).as_strided(sizes, steps)
    pixels = source.permute(0, 5, 1, 3, 2, 4).reshape(images, channels, sizes[1] * high, sizes[2] * wide)
    x["dx"].copy_(pixels[:, :, :rows, :columns])


def check_emulated(kernel: str, desc: Any) -> None:
    """The launches of a kernel, of which those in Gluon are emulated, give what the reference gives."""
    plan: tp.Plan[Any, Any] = tp.plan(desc, target=FEW, kernel=kernel)
    x = drawn(desc)
    workspace = torch.full((plan.workspace_size(),), 255, dtype=torch.uint8)
    for launch in plan.launches:
        if launch.kernel.is_gluon():
            emulate(launch, x, workspace)
        elif "count" in launch.args:
            added(launch, x, workspace)
        elif "parts" in launch.args:
            folded(launch, x, workspace)
        elif "taps_rows" in launch.args:
            interleaved(launch, x, workspace)
        elif "dx" in launch.args:
            separated(launch, x, workspace)
        else:
            copied(launch, x, workspace)
    agrees(desc, x)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_convolutions(name: str, op: str) -> None:
    check_emulated("wgmma", problem(op, *CASES[name]))


def only_tiles(monkeypatch: pytest.MonkeyPatch, *tiles: tuple[int, int], rows: tuple[Any, ...] = ()) -> None:
    """Of these pixels of a box and features, and of these ``rows`` that taps share."""
    forget_facts()
    for constant, value in {"TILES": tiles, "NARROW_TILES": (), "FEW_TILES": (), "ROW_TILES": rows}.items():
        monkeypatch.setattr(wgmma_tiles, constant, value)


@pytest.mark.parametrize(("boxes", "features"), [(4, 32), (4, 64), (2, 128)])
@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("name", ["same", "dilated", "few"])
def test_shared_rows(name: str, op: str, boxes: int, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles whose taps of a column share the rows that they read."""
    only_tiles(monkeypatch, rows=((boxes, features),))
    monkeypatch.setattr(wgmma_tiles, "ROW_FEATURES", math.inf)
    monkeypatch.setattr(wgmma_tiles, "LEAST_STAGES", 1)
    try:
        for element in ("bf16", "f32") if op == "conv2d" else ("bf16",):
            check_emulated("wgmma", problem(op, *CASES[name], element=element))
    finally:
        forget_facts()


@pytest.mark.parametrize("name", ["dilated", "wide"])
@pytest.mark.parametrize("op", OPS[:2])
def test_last_waves(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles have fewer features, and launches of their own."""
    only_tiles(monkeypatch, (64, 256))
    monkeypatch.setattr(wgmma_tiles, "TAIL_US", -1e9)
    desc = problem(op, *CASES[name])
    try:
        assert len(tp.plan(desc, target=FEW, kernel="wgmma").launches) == 2 * wgmma_tiles.launches_of(desc)
        check_emulated("wgmma", desc)
    finally:
        forget_facts()


@pytest.mark.parametrize("box", [(1, 8, 16), (1, 1, 128), (8, 4, 4)])
@pytest.mark.parametrize("op", OPS[:2])
def test_swapped_factors(op: str, box: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are rows of the product, pixels its columns, and results are stored in halves of boxes."""
    only_tiles(monkeypatch, (128, 128))
    monkeypatch.setattr(wgmma_tiles, "_best_box", lambda *_: box)
    desc = problem(op, *CASES["square"])
    try:
        launch, *_ = tp.plan(desc, target=FEW, kernel="wgmma").launches
        out: Any = launch.args["out"]
        assert (launch.constexprs["SWAPPED"], math.prod(out.block[:3])) == (True, 64)
        check_emulated("wgmma", desc)
    finally:
        forget_facts()


@pytest.mark.parametrize("tile", [(64, 256), (128, 128)])
@pytest.mark.parametrize("op", OPS[:2])
def test_tiles_of_a_step(op: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They end before all parts of the tile before could be stored."""
    only_tiles(monkeypatch, tile)
    try:
        check_emulated("wgmma", problem(op, (3, 64, 15, 18, 64, 1, 1), {}))
    finally:
        forget_facts()


@pytest.mark.parametrize("op", OPS[:2])
def test_few_steps(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are stored during the next products only if each launch has enough of them."""
    only_tiles(monkeypatch, (128, 128))
    desc = problem(op, (2, 64, 9, 10, 192, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2)})
    try:
        held = {launch.constexprs["HOLDS"] for launch in tp.plan(desc, target=FEW, kernel="wgmma").launches}
        assert held == {op == "conv2d"}  # 9 steps; launches of the gradient have 3 to 12
        check_emulated("wgmma", desc)
    finally:
        forget_facts()


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("name", ["same", "dilated", "few", "square"])
@pytest.mark.parametrize("op", OPS[:2])
def test_tiles_change_no_bits(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether taps share rows, the boxes and features of a tile, and whether features are rows of the product."""
    desc, results = problem(op, *CASES[name]), []
    args = testing.args_for(desc, "cuda").args
    output = getattr(args, next(o.name for o in desc.operands() if o.is_written))
    monkeypatch.setattr(wgmma_tiles, "ROW_FEATURES", math.inf)
    monkeypatch.setattr(wgmma_tiles, "LEAST_STAGES", 2)  # those of large boxes
    try:
        shared_rows = [((), [size]) for size in ((4, 64), (4, 32), (2, 64))]
        for tiles, rows in (([(64, 256)], []), ([(128, 128)], []), *shared_rows):
            only_tiles(monkeypatch, *tiles, rows=tuple(rows))
            plan: tp.Plan[Any, Any] = tp.plan(desc, target=tp.Target.current(), kernel="wgmma")
            output.fill_(math.nan)
            plan.run(args, tp.Workspace.allocate(plan, "cuda"))
            results.append(output.clone())
    finally:
        forget_facts()
    assert not results[0].isnan().any()
    assert all(torch.equal(found, results[0]) for found in results[1:])


@pytest.mark.parametrize("shares", [4, 5, 7, 11])
@pytest.mark.parametrize("name", ["same", "strided", "wide"])
def test_shares(name: str, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that have lanes of tiles, and parts of others."""
    candidates = wgmma_division.candidates

    def only(*sizes: int) -> list[wgmma_division.Division]:
        return [replace(candidates(*sizes)[0], shares=shares)]

    forget_facts()
    monkeypatch.setattr(wgmma_division, "candidates", only)
    try:
        check_emulated("wgmma", problem(OPS[2], *CASES[name]))
    finally:
        forget_facts()


@pytest.mark.parametrize("columns", [2, 4, 8])
@pytest.mark.parametrize("channels", [136, 512])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_taps_of_a_tile(kernel: tuple[int, int], channels: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strides a tile has the channels under one tap, or those under several, in few columns or in many."""
    forget_facts()
    monkeypatch.setattr(wgmma, "WEIGHT_TILES", ((1, columns),))
    options = {"padding": (1, 1, 2, 2), "stride": (2, 2), "dilation": (1, 3)}
    try:
        check_emulated("wgmma", problem(OPS[2], (3, channels, 9, 11, 64, *kernel), options))
    finally:
        forget_facts()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_convolutions_of_tf32(name: str, op: str) -> None:
    """The gradient of x reads a copy of the weight."""
    kernel = "converted_wgmma" if op == "conv2d_backward_input" else "wgmma"
    check_emulated(kernel, problem(op, *CASES[name], element="f32"))


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("op", "groups"), [*((op, 1) for op in OPS), *((op, 2) for op in OPS[:2])])
@pytest.mark.parametrize("batch", [1, 3])
def test_pixels_as_rows_of_a_matrix(op: str, batch: int, groups: int, element: str) -> None:
    """Boxes pass from one image to the next where memory does, and end behind the last one."""
    desc = problem(op, (batch, 136 * groups, 9, 7, 72 * groups, 1, 1), {"groups": groups, "has_bias": True}, element)
    order = tp.Layout.strided(alignment=16, order=(0, 2, 3, 1)[batch == 1 :], stride_multiple=8)
    images = {o.name for o in desc.operands() if len(o.shape) == 4} - {"weight", "dweight"}
    desc = desc.replace(layouts={**dict(desc.layouts), **dict.fromkeys(images, order)})
    kernel = "converted_wgmma" if element == "f32" and op == OPS[1] else "wgmma"
    launch = next(x for x in tp.plan(desc, target=FEW, kernel=kernel).launches if x.kernel.is_gluon())
    image: Any = launch.args["dout" if op == OPS[2] else "out"]
    assert image.block[:2] == (1, 1)
    check_emulated(kernel, desc)


#: As ``CASES``, of groups whose channels and filters end within a block: what another group has must not be read.
GROUPED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "two": ((2, 144, 6, 5, 176, 3, 3), {"padding": (2, 2, 2, 2), "dilation": (2, 2), "groups": 2, "has_bias": True}),
    "strided": ((2, 144, 9, 10, 128, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2), "groups": 2, "has_bias": True}),
    "pointwise": ((2, 288, 5, 6, 192, 1, 1), {"groups": 3}),
    "rows": ((2, 128, 20, 17, 128, 3, 3), {"padding": (1, 1, 1, 1), "groups": 2, "has_bias": True}),
}


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("name", GROUPED)
def test_groups(name: str, op: str, element: str) -> None:
    copied = element == "f32" and op == "conv2d_backward_input"
    check_emulated("converted_wgmma" if copied else "wgmma", problem(op, *GROUPED[name], element=element))


@pytest.mark.parametrize("op", OPS[:2])
def test_groups_meet_no_infinity_of_others(op: str) -> None:
    desc = problem(op, *GROUPED["two"])
    plan: tp.Plan[Any, Any] = tp.plan(desc, target=FEW, kernel="wgmma")
    x = drawn(desc)
    x["dout" if op == "conv2d_backward_input" else "x"][:, -1] = math.inf  # of the last group
    for launch in plan.launches:
        emulate(launch, x, torch.empty(0, dtype=torch.uint8))
    result = x["dx" if op == "conv2d_backward_input" else "out"]
    assert result[:, : result.shape[1] // 2].isfinite().all()


@pytest.mark.parametrize("op", OPS[:2])
def test_groups_that_maps_cannot_divide(op: str) -> None:
    """A group of 68 channels begins at no multiple of 16 bytes; each of many groups would have a launch."""
    for channels, groups, reason in ((136, 2, "68 .* in a group"), (1024, 16, "up to 8"), (64, 2, "64 or more")):
        with pytest.raises(tp.Unsupported, match=reason):
            tp.plan(problem(op, (2, channels, 5, 6, channels, 1, 1), {"groups": groups}), target=FEW, kernel="wgmma")


#: As ``CASES``, of channels and filters that TMA does not move.
RAGGED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ragged": ((2, 67, 9, 7, 131, 3, 2), {"padding": (1, 1, 0, 1), "has_bias": True}),
    "channels": ((2, 71, 9, 7, 64, 1, 1), {}),
    "filters": ((3, 64, 15, 18, 13, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2), "has_bias": True}),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", RAGGED)
def test_copies(name: str, op: str) -> None:
    for element in ("bf16", "f32"):
        check_emulated("converted_wgmma", problem(op, *RAGGED[name], element=element))


#: As ``CASES``, of channels that TMA moves, but whose blocks are not whole.
PARTIAL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "narrow": ((2, 24, 9, 11, 40, 3, 2), {"padding": (1, 1, 0, 1), "has_bias": True}),
    "wide": ((2, 72, 9, 11, 168, 2, 3), {"padding": (0, 1, 1, 1), "stride": (2, 1)}),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize("name", PARTIAL)
def test_copies_of_whole_blocks(name: str, element: str, op: str) -> None:
    check_emulated("converted_wgmma", problem(op, *PARTIAL[name], element=element))


#: As ``CASES``, of few channels and strides.
FEW_CHANNELS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rgb": ((2, 3, 15, 18, 72, 7, 7), {"padding": (3, 3, 3, 3), "stride": (2, 2)}),
    "unequal": ((3, 5, 11, 14, 64, 2, 3), {"padding": (0, 1, 2, 0), "stride": (3, 1), "dilation": (1, 2)}),
}


@pytest.mark.parametrize("name", FEW_CHANNELS)
def test_remainders_at_once(name: str) -> None:
    check_emulated("interleaved", problem("conv2d_backward_input", *FEW_CHANNELS[name]))


#: As ``CASES``, of few channels: windows of several strides, and rows of a copy that end in padding or before x does.
NARROW: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rgb": ((2, 3, 15, 18, 72, 7, 7), {"padding": (3, 3, 3, 3), "stride": (2, 2), "has_bias": True}),
    "grey": ((3, 1, 12, 10, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
    "unequal": ((2, 5, 11, 14, 64, 2, 5), {"padding": (0, 1, 2, 0), "stride": (1, 3), "dilation": (2, 1)}),
    "pointwise": ((2, 12, 7, 9, 8, 1, 1), {"stride": (2, 4)}),
    "long": ((1, 20, 9, 9, 64, 3, 5), {"padding": (1, 1, 2, 2)}),
    "ragged": ((2, 3, 9, 9, 67, 3, 3), {"padding": (1, 1, 1, 1), "has_bias": True}),
}


@pytest.mark.parametrize("op", ["conv2d", "conv2d_backward_weight"])
@pytest.mark.parametrize("name", NARROW)
def test_windows(name: str, op: str) -> None:
    check_emulated("windowed", problem(op, *NARROW[name]))


#: As ``CASES``: images, rows and columns that fill no block, or several; the widest band, and no padding.
DEPTHWISE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "same": ((3, 32, 9, 10, 32, 7, 7), {"padding": (3, 3, 3, 3)}),
    "few_taps": ((2, 64, 5, 9, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
    "unequal": ((17, 32, 6, 19, 32, 2, 9), {"padding": (1, 0, 0, 5)}),
    "row": ((2, 32, 1, 18, 32, 1, 4), {"padding": (0, 0, 3, 0)}),
    "pieces": ((2, 32, 21, 8, 32, 5, 5), {}),
}


@pytest.mark.parametrize("name", DEPTHWISE)
def test_bands(name: str) -> None:
    sizes, options = DEPTHWISE[name]
    check_emulated("banded", problem(OPS[2], sizes, {"groups": sizes[1], **options}))


def test_bands_meet_no_infinity_that_taps_do_not() -> None:
    """The zeros around dout are not multiplied by infinities of x; the padding of x is multiplied by those of dout."""
    sizes, options = DEPTHWISE["same"]
    desc = problem(OPS[2], sizes, {"groups": sizes[1], **options})
    plan: tp.Plan[Any, Any] = tp.plan(desc, target=FEW, kernel="banded")
    x = drawn(desc)
    for channel, (name, row, column) in enumerate(itertools.product(("x", "dout"), (0, 4, 8), (0, 5, 9))):
        x[name][1, channel, row, column] = math.inf
    workspace = torch.full((plan.workspace_size(),), 255, dtype=torch.uint8)
    emulate(plan.launches[0], x, workspace)
    added(plan.launches[1], x, workspace)
    compute = tp.TABLE.reference(desc.op).compute
    assert compute is not None
    wanted = compute(desc, {name: x[name].double() for name in ("x", "dout")})["dweight"]
    assert 0 < wanted.isfinite().sum() < wanted.numel()
    assert torch.equal(x["dweight"].isfinite(), wanted.isfinite())
