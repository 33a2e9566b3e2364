"""Kernel ``converted``: copies operands from channels first to channels last, and runs ``tiles`` on the copies.

Weights of FMAs are copied with features last: threads then read them from different banks of shared memory.

``entries`` makes such a kernel of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.conv import copies, shared
from triplan.backends.triton.conv.copies import Padded
from triplan.backends.triton.conv.tile_shapes import along_features, by_fma
from triplan.backends.triton.conv.tiles import TILED
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Fields that the channels of copied inputs are.
FIELDS = {"x": "in_channels", "dout": "out_channels"}


def entries(
    inner: Any,
    name: str,
    wanted: Callable[[Conv2dProblem], dict[Operand, int]],
    whole: bool,
    filled: Callable[[Conv2dProblem], dict[str, int]] = lambda _: {},
    **entry: Any,
) -> None:
    """Register ``inner``, a kernel of this family, over copies of what is ``wanted``; its bits are those of ``inner``.

    ``inner``: its module, or ``Tiles``. ``wanted``: operands and the axes of their channels. dweight is left out: it is
    small, and written by the fold as it lies. ``whole``: ``inner`` writes whole vectors of channels. ``filled``: the
    channels of copies that have more than their operands, if all operands with that axis are copied.
    """

    @fact
    def copied(desc: Conv2dProblem) -> tuple[Padded, ...]:
        moved = {o: axis for o, axis in wanted(desc).items() if o.name != "dweight" and o.numel}
        return copies.plain(moved, channels=filled(desc))

    def on_copies(desc: Conv2dProblem, extents: dict[str, int]) -> Conv2dProblem:
        """``desc`` with the layouts of the copies and other extents. An order is of an operand that keeps its own: it
        leaves out axes of one element, of which the copies may have more."""
        bare = desc.replace(layouts={}, **extents)
        layouts = {**dict(desc.layouts), **{c.operand.name: c.layout for c in copied(desc)}}
        kept = {name for name in layouts if bare.operand(name).shape == desc.operand(name).shape}
        return bare.replace(layouts={n: own if n in kept else own.replace(order=()) for n, own in layouts.items()})

    @fact
    def inner_of(desc: Conv2dProblem) -> Conv2dProblem:
        """The problem of the copies."""
        fields = copies.whole(desc, copied(desc)) if whole and desc.groups == 1 else {}
        if not shared.of_weight(desc):  # which has the gradients of its own channels alone
            fields |= {FIELDS[name]: n for name, n in filled(desc).items() if name in FIELDS}
        return on_copies(desc, fields)

    def estimated(desc: Conv2dProblem) -> Conv2dProblem:
        """The problem of the copies, with all channels that these have."""
        if not shared.of_weight(desc) or desc.groups > 1:
            return inner_of(desc)
        return on_copies(desc, {FIELDS[c.operand.name]: c.channels for c in copied(desc)})

    def supports(desc: Conv2dProblem, target: Target) -> Support:
        if not copied(desc):
            return Support.no("no operand gains from a copy")
        return copies.counted(copied(desc)) and inner.supports(inner_of(desc), target)

    def rank(desc: Conv2dProblem, target: Target) -> float:
        """Estimated microseconds."""
        return inner.rank(estimated(desc), target) + copies.rank(copied(desc), not shared.of_weight(desc))  # type: ignore[no-any-return]

    def workspace(desc: Conv2dProblem, target: Target) -> int:
        return copied(desc)[-1].end + inner.workspace(inner_of(desc), target)  # type: ignore[no-any-return]

    def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
        """Pixels of copies are summed in other pieces than those that lie as rows of a matrix."""
        return inner.guarantee(inner_of(desc) if shared.of_weight(desc) else desc)  # type: ignore[no-any-return]

    def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
        main = (inner.build_weight if shared.of_weight(desc) else inner.build)(inner_of(desc), target)
        if whole and desc.groups == 1:
            main = copies.with_features(main, desc.out_channels)
        found = copied(desc)
        return copies.around(found, main, {c.operand.name: c.tensor for c in found}, found[-1].end) if main else []

    shared.register(
        build,
        build,
        name=name,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        numerics=inner.numerics,
        **entry,
    )


def _gaining(desc: Conv2dProblem) -> dict[Operand, int]:
    """Operands with channels first; of FMAs also weights, whose features then are adjacent."""
    found = {o: 1 for o in shared.channels_apart(desc) if o.layout.packed}
    if by_fma(desc) and desc.groups == 1 and not along_features(desc):
        found[desc.operand("weight")] = int(shared.of_input(desc))
    return found


# As tiles, whose bits it has.
entries(TILED, "converted", _gaining, whole=False, priority=1, weight={"version": 4})
