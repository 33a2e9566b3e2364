"""Kernel ``ordered`` of cached_rotary: ``tiles``, after two launches that find the last token of each slot.

For where results must not depend on which of several writes comes last. The owners take 4 bytes a slot.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, extent_int, layout
from triplan.backends.triton.rotary import ordered_kernels as kernels, tiles
from triplan.descriptors import CachedRotaryDescriptor
from triplan.sku import Duplicates, ElementKind, PrecisionGuarantee, Support, Target

#: Tokens of a program that finds owners. Untuned.
BLOCK = 256


def guarantee(desc: CachedRotaryDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """As of ``tiles``; of tokens with the same slot, the last stays."""
    return tiles.promised(desc, True, Duplicates.LAST)


def applies(desc: CachedRotaryDescriptor, target: Target) -> Support:
    tokens = desc.q_shape[0] * desc.q_shape[1]
    if tokens >= I32_LIMIT:
        return Support.no(f"{tokens} tokens; it numbers fewer than {I32_LIMIT}")
    return tiles.applies(desc, target)


def rank(desc: CachedRotaryDescriptor, target: Target) -> float:
    return tiles.rank(desc, target) + 2 * LAUNCH_US


def workspace(desc: CachedRotaryDescriptor, target: Target) -> int:
    return desc.slots * ElementKind.I32.itemsize if _meet(desc) else 0


def _meet(desc: CachedRotaryDescriptor) -> bool:
    """Whether anything is written, so that two tokens may meet."""
    return bool(desc.slots and desc.k_heads and desc.q_shape[0] * desc.q_shape[1])


@kernel(
    op="cached_rotary",
    name="ordered",
    version=3,
    elements=("f16", "bf16", "f32", "f64"),
    index_elements=("i32", "i64"),
    guarantee=guarantee,
    supports=applies,
    rank=rank,
    workspace=workspace,
    numerics=tiles.numerics_of,
    layout=layout,
)
def ordered(desc: CachedRotaryDescriptor, target: Target) -> list[Launch]:
    if not _meet(desc):
        return tiles.tiles(desc, target)
    owners, (batch, sequence) = Scratch(0, ElementKind.I32), desc.q_shape[:2]
    args = {
        "slots": tiles.tensor(desc.operand("slots")),
        "owners": owners,
        "tokens": Int(batch * sequence),
        "sequence": Int(sequence),
        "slot_count": extent_int(desc.slots),
    }
    claim = Launch(kernels.owners_kernel, -(-batch * sequence // BLOCK), args, {"BLOCK": BLOCK})
    return [fill_launch(owners, desc.slots, -1), claim, *tiles.tiles(desc, target, owners)]
