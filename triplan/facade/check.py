"""Whether args fit a plan: count, type, dtype, shape, device, promises, overlap. Reads no tensor's contents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from types import NoneType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from triplan.descriptors import Descriptor, Operand, OperandKind
from triplan.errors import (
    InvalidProblem,
    LeafOverwritten,
    MisalignedOperand,
    TriplanError,
    Unsupported,
    WorkspaceTooSmall,
    shown,
)
from triplan.facade.workspace import Workspace
from triplan.sku import SUPPORTED, Support, Target

Named = tuple[str, Operand, torch.Tensor]


def check_args(desc: Descriptor, target: Target, args_type: type[Any], args: Any) -> Support:
    """Truthy if ``args`` are what ``desc`` describes, on a device of ``target``; else the reason and its error."""
    try:
        if not isinstance(args, args_type):
            raise InvalidProblem(f"{desc.op}: args are {type(args).__name__}; {args_type.__name__} is expected")
        operands = {o.name: o for o in desc.operands()}
        for field in fields(args):
            if field.name not in operands and getattr(args, field.name) is not None:
                raise InvalidProblem(f"{desc.op}: {field.name} was passed, but this descriptor has no such operand")
        tensors = list(_tensors(desc, args))
        for name, operand, tensor in tensors:
            _check_tensor(desc.op, name, operand, tensor)
        _check_devices(desc.op, target, tensors)
        for name, operand, tensor in tensors:
            _check_promises(desc.op, name, operand, tensor)
        _check_overlap(desc.op, tensors)
    except TriplanError as e:
        return Support.no(e)
    return SUPPORTED


def check_operand(desc: Descriptor, target: Target, operand: Operand, value: Any) -> list[torch.Tensor]:
    """The tensors of one operand, checked without the others. Raises what ``check_args`` reports of them."""
    listed = operand.kind is OperandKind.TENSOR_LIST
    if listed and (not isinstance(value, (list, tuple)) or len(value) != operand.count):
        raise InvalidProblem(f"{desc.op}: {operand.name} is not a sequence of {operand.count} tensors")
    items = list(value) if listed else [value]
    named = [(operand.name, operand, _as_tensor(desc.op, operand.name, operand, item)) for item in items]
    for name, o, tensor in named:
        _check_tensor(desc.op, name, o, tensor)
    _check_devices(desc.op, target, named)
    for name, o, tensor in named:
        _check_promises(desc.op, name, o, tensor)
    return [tensor for _, _, tensor in named]


def named_tensors(desc: Descriptor, args: Any) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of ``args`` with its operand's name."""
    found = []
    for o in desc.operands():
        value = getattr(args, o.name)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                found.append((o.name, tensor))
    return found


def check_memory(
    op: str,
    what: str,
    memory: Workspace | None,
    needed: int,
    device: torch.device,
    others: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Check that ``memory`` has ``needed`` bytes on ``device`` and shares none with ``others``.

    ``what`` names it in errors: ``WorkspaceTooSmall`` or ``InvalidProblem``.
    """
    if not isinstance(memory, (Workspace, NoneType)):
        raise InvalidProblem(f"{op}: {what} is {type(memory).__name__}; a Workspace is expected: Workspace(tensor)")
    if needed == 0:
        return
    got = 0 if memory is None else memory.nbytes
    if memory is None or got < needed:
        make = "Workspace.allocate(plan)" if what == "the workspace" else "Workspace.from_tensor(tensor)"
        raise WorkspaceTooSmall(f"{op} needs {needed} bytes of {what[4:]}, got {got}; {make} makes one", needed, got)
    if memory.device != device:
        raise InvalidProblem(f"{op}: {what} is on {memory.device}, the operands on {device}")
    _ = memory.address  # raises if the memory is gone
    start, end = span(memory.tensor)
    for name, tensor in others:
        if start < span(tensor)[1] and tensor.data_ptr() < end:  # contiguous: it has no gaps for others to lie in
            raise InvalidProblem(f"{op}: {what} shares memory with {name}")


def _tensors(desc: Descriptor, args: Any) -> Iterator[Named]:
    """Every tensor with its operand. Checks scalars and the lengths of lists."""
    for o in desc.operands():
        value = getattr(args, o.name)
        if value is None:
            if not o.optional:
                raise InvalidProblem(f"{desc.op}: {o.name} is missing; {_wanted(o)} is expected")
        elif o.kind is OperandKind.HOST_SCALAR:
            _check_scalar(desc.op, o, value)
        elif o.kind is OperandKind.TENSOR_LIST:
            if not isinstance(value, (list, tuple)) or len(value) != o.count:
                got = f"{len(value)} tensors" if isinstance(value, (list, tuple)) else type(value).__name__
                raise InvalidProblem(f"{desc.op}: {o.name} is {got}; a sequence of {o.count} is expected")
            for i, tensor in enumerate(value):
                yield f"{o.name}[{i}]", o, _as_tensor(desc.op, f"{o.name}[{i}]", o, tensor)
        else:
            yield o.name, o, _as_tensor(desc.op, o.name, o, value)


def _wanted(o: Operand) -> str:
    return f"{o.element} of shape {o.shape}"


def _as_tensor(op: str, name: str, o: Operand, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidProblem(f"{op}: {name} is {type(value).__name__}; a tensor, {_wanted(o)}, is expected")
    if is_lazy(value):
        raise InvalidProblem(f"{op}: {name} is an uninitialized parameter: it has no shape; {_wanted(o)} is expected")
    return value


def _check_scalar(op: str, o: Operand, value: Any) -> None:
    floating = o.element.is_floating_point
    if isinstance(value, bool) or not isinstance(value, (int, float) if floating else int):
        raise InvalidProblem(f"{op}: {o.name} = {shown(value)}; a Python {'number' if floating else 'int'} is expected")
    if floating:
        largest = torch.finfo(o.element.torch).max
        if abs(value) > largest and abs(value) != float("inf"):
            raise InvalidProblem(f"{op}: {o.name} = {shown(value)} is beyond {largest}, the largest {o.element}")
    else:
        info = torch.iinfo(o.element.torch)
        if not info.min <= value <= info.max:
            raise InvalidProblem(f"{op}: {o.name} = {shown(value)} does not fit {o.element}")


def _check_tensor(op: str, name: str, o: Operand, t: torch.Tensor) -> None:
    if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_neg():
        raise InvalidProblem(
            f"{op}: {name} is a {t.layout} tensor, nested, quantized or a lazy view; plain strided memory is expected"
        )
    if t.dtype is not o.element.torch:
        raise InvalidProblem(f"{op}: {name} has dtype {t.dtype}; {o.element.torch} ({o.element}) is expected")
    if tuple(t.shape) != o.shape:
        raise InvalidProblem(f"{op}: {name} has shape {tuple(t.shape)}; {o.shape} is expected")


def _check_devices(op: str, target: Target, tensors: list[Named]) -> None:
    first, _, one = tensors[0]
    for name, _, t in tensors:
        if t.device != one.device:
            raise InvalidProblem(f"{op}: {name} is on {t.device}, but {first} on {one.device}; one device is expected")
    if one.device.type != target.device_type:
        raise InvalidProblem(f"{op}: {first} is on {one.device}; the plan is for {target.arch} ({target.device_type})")
    if target.is_gpu and (found := Target.of(one.device).arch) is not target.arch:
        raise Unsupported(f"{op}: {one.device} is {found}; the plan was selected for {target.arch}")


def check_storage(op: str, name: str, t: torch.Tensor) -> None:
    """Raise ``InvalidProblem`` if ``t`` has elements but no memory."""
    # The address of a view into freed storage is its offset.
    if t.numel() and t.data_ptr() == t.storage_offset() * t.element_size():
        raise InvalidProblem(f"{op}: {name} has no memory: its storage was freed, or it is a fake tensor")


def _check_promises(op: str, name: str, o: Operand, t: torch.Tensor) -> None:
    if reason := o.layout.broken_by(t.shape, t.stride()):
        raise InvalidProblem(f"{op}: {name} has {reason}; pass such a tensor or promise another layout")
    check_storage(op, name, t)
    if t.numel() and t.data_ptr() % o.alignment:
        raise MisalignedOperand(
            f"{op}: {name} is at {t.data_ptr():#x}, which is not a multiple of the promised {o.alignment} bytes; "
            f"promise Layout(alignment={o.element.itemsize}) for it, or copy it"
        )


def _check_overlap(op: str, tensors: list[Named]) -> None:
    for name, operand, t in tensors:
        if not operand.is_written:
            continue
        if torch.is_grad_enabled() and t.requires_grad and t.is_leaf:
            raise LeafOverwritten(
                f"{op}: {name} is a leaf that requires grad, and it is written; run under torch.no_grad(), or pass "
                f"{name}.detach()"
            )
        if not is_injective(t):
            raise InvalidProblem(
                f"{op}: {name} has strides {tuple(t.stride())} over {tuple(t.shape)}; its elements overlap, "
                "and it is written"
            )
        for other_name, _, other in tensors:
            if (other is t and other_name == name) or (other_name in operand.over and is_same(t, other)):
                continue
            if may_overlap(t, other):
                raise InvalidProblem(f"{op}: {name} shares memory with {other_name}, and it is written")


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` and ``b``, of equal shape and dtype, have the same elements at the same addresses."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def is_injective(t: torch.Tensor) -> bool:
    """Whether no two elements of ``t`` share an address. False too where the strides alone do not show it."""
    if t.is_contiguous() or t.numel() <= 1:
        return True
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses that ``t`` spans: of its first byte, and after its last."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    last = sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True))
    return start, start + (last + 1) * t.element_size()


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False only if ``a`` and ``b`` certainly share no byte."""
    (a0, a1), (b0, b1) = span(a), span(b)
    if a1 <= b0 or b1 <= a0:
        return False
    return not _separate_boxes(a, b)


def _separate_boxes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` and ``b`` are disjoint boxes of one larger tensor, such as two column slices."""
    if a.element_size() != b.element_size() or a.dim() != b.dim():
        return False
    axes = sorted((-s, d) for d, s in enumerate(a.stride()) if a.shape[d] > 1 or b.shape[d] > 1)
    if any(a.stride(d) != b.stride(d) or s == 0 for s, d in axes):
        return False
    delta, remainder = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if remainder:
        return False
    if axes and delta % math.gcd(*(s for s, _ in axes)):
        return True  # no steps lead from an element of one to an element of the other: single columns
    low, high = (a, b) if delta >= 0 else (b, a)
    delta = abs(delta)
    separate, room = False, None
    for s, d in axes:
        stride = -s
        if room is not None and room < max(low.shape[d], high.shape[d]) * stride:
            return False  # rows run into each other: not boxes of one tensor
        steps, delta = divmod(delta, stride)
        if room is not None and (steps + high.shape[d]) * stride > room:
            return False
        separate = separate or steps >= low.shape[d]
        room = stride
    return separate and delta == 0
