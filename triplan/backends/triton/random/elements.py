"""Kernel ``elements``: blocks of larger tensors; each element evaluates Philox itself."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.random import elements_kernels as kernels
from triplan.backends.triton.random.entries import arguments, constants, cost, entry, fits, geometry, strides
from triplan.descriptors import RandomDescriptor, packed_strides
from triplan.sku import Support, Target

#: Elements per program of 4 warps. Untuned.
BLOCK = 512


def applies(desc: RandomDescriptor, target: Target) -> Support:
    return fits(desc, -(-desc.operand("out").numel // BLOCK))


@entry("elements", applies, lambda desc, target: cost(desc, desc.operand("out").numel))
def elements(desc: RandomDescriptor, target: Target) -> list[Launch]:
    out = desc.operand("out")
    if out.numel == 0:
        return []
    whole = packed_strides(desc.out_shape if desc.global_shape is None else desc.global_shape)
    args = {**arguments(desc), **geometry(desc), "index_strides": strides([Int(s, True) for s in whole])}
    made = {**constants(desc), "BLOCK": BLOCK}
    return [Launch(kernels.elements_kernel, -(-out.numel // BLOCK), args, made, num_warps=4, fuses=False)]
