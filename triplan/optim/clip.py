"""Clipping of gradients, with torch's arguments."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from triplan.errors import InvalidProblem
from triplan.functional._sharding import is_dtensor
from triplan.functional.optim import TensorList, packed
from triplan.optim._shards import divided, join, local, sum_terms

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]

Tensors: TypeAlias = Tensor | Iterable[Tensor]
#: Types whose memory is what they say. Of others, only DTensors are known.
PLAIN = {Tensor, torch.nn.Parameter}


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is ``max_norm`` at most: torch.nn.utils.clip_grad_norm_.

    Gradients are f32, bf16 and f16, in any mixture. Returns the total norm before: f32 of shape (), on the device of
    the first gradient; 0 if there is none. Of DTensors it is the norm of the whole, a plain tensor that is the same on
    every rank; gradients of which ranks have terms of a sum are summed first. Sums are accumulated in f64 and in a
    fixed order, so that no square overflows and every run has the same bits. Nothing waits for the device unless
    ``error_if_nonfinite``. Where the norm is ``max_norm`` or less, gradients are not written. ``foreach`` is ignored.

    Raises ``RuntimeError`` for a norm that is not finite if ``error_if_nonfinite``, and for sparse gradients;
    ``InvalidProblem`` for other elements, for ``norm_type`` 0 (of DTensors, also for negative ones) and for gradients
    that share memory.
    """
    lists = lists_of(gradients(parameters))
    norms = _norms(lists, float(norm_type))
    found = _total(norms, norm_type, error_if_nonfinite)
    for own, norm in zip(lists, norms, strict=True):
        own.clip_(float(max_norm), norm)
    return found


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp gradients in place to [-``clip_value``, ``clip_value``]: torch.nn.utils.clip_grad_value_.

    Raises as ``clip_grad_norm_``.
    """
    for own in lists_of(gradients(parameters)):
        own.clip_(float(clip_value))


def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of all elements of ``tensors``: torch.nn.utils.get_total_norm. f32 of shape ().

    As that of ``clip_grad_norm_``, which says what is raised; ``InvalidProblem`` also for DTensors of which ranks have
    terms of a sum.
    """
    return _total(_norms(lists_of(_listed(tensors)), float(norm_type)), norm_type, error_if_nonfinite)


def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by ``max_norm / (total_norm + 1e-6)`` if that is below 1.

    As torch.nn.utils.clip_grads_with_norm_. Raises as ``clip_grad_norm_``.
    """
    total_norm = total_norm.full_tensor() if is_dtensor(total_norm) else total_norm  # type: ignore[attr-defined]
    for own in lists_of(gradients(parameters)):
        # A copy: plans take a norm in f64 that is aligned.
        own.clip_(float(max_norm), total_norm.detach().reshape(1).to(own.device, torch.float64, copy=True))


def _listed(tensors: Tensors) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    found = list(tensors)
    if not found and isinstance(tensors, types.GeneratorType):
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=4)
    return found


def gradients(parameters: Tensors) -> list[Tensor]:
    """Of ``parameters``. Where each rank has a term of a sum, as of a norm of divided sequences, the sum is taken."""
    found = [p for p in _listed(parameters) if p.grad is not None]
    for p in found:
        if type(p.grad) is not Tensor:
            sum_terms(p)
    return [p.grad for p in found if p.grad is not None]


class _Copies(TensorList):
    """A list of which some tensors are not contiguous: of those that are dense, views; of others, copies."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__([packed(t, t) for t in tensors])
        self._given = tensors

    def clip_(self, limit: float, norm: Tensor | None = None) -> None:
        super().clip_(limit, norm)
        self.written()

    def written(self) -> None:
        for t, own in zip(self._given, self.tensors, strict=True):
            if t.data_ptr() != own.data_ptr():
                order = sorted(range(t.dim()), key=lambda axis: (t.stride()[axis], t.shape[axis]), reverse=True)
                t.detach().permute(order).copy_(own)


def lists_of(tensors: Sequence[Tensor]) -> list[TensorList]:
    """Those of one device and element together, in the order in which the first of each comes.

    Few passes over all tensors, each in C: there may be thousands.
    """
    kinds: list[tuple[Any, ...]] = [()] * len(tensors)
    if set(map(type, tensors)) - PLAIN:
        odd = {type(t).__name__ for t in tensors if type(t) not in PLAIN and not is_dtensor(t)}
        if odd:
            raise InvalidProblem(f"clipping of {', '.join(sorted(odd))}: plain tensors and DTensors are expected")
        kinds, tensors = list(map(divided, tensors)), list(map(local, tensors))
    sparse = set(map(attrgetter("layout"), tensors)) - {torch.strided}
    if sparse:
        raise RuntimeError(f"clipping does not support sparse gradients: {', '.join(map(str, sparse))}")
    kinds = list(zip(kinds, map(attrgetter("device", "dtype"), tensors), strict=True))
    found = []
    for kind in dict.fromkeys(kinds):
        own = [t for t, k in zip(tensors, kinds, strict=True) if k == kind]
        plain = all(map(Tensor.is_contiguous, own)) and not any(map(attrgetter("requires_grad"), own))
        found.append(TensorList(own) if plain else _Copies(own))
        found[-1].divided = kind[0]
    return found


def _norms(lists: Sequence[TensorList], order: float) -> list[Tensor]:
    """For each list, on its device, the norm of all: f64, of one element."""
    norms = [own.norm(order) for own in lists]
    for own, norm in zip(lists, norms, strict=True):
        if own.divided:
            join(norm, order, own.divided)
    if len(norms) > 1:
        # The norm of norms, as exact as f64 is. It takes their places, which stay where they are from call to call.
        total = torch.linalg.vector_norm(torch.cat([norm.to(norms[0].device) for norm in norms]), order)
        for norm in norms:
            norm.copy_(total)
    return norms


def _total(norms: Sequence[Tensor], norm_type: float, checked: bool) -> Tensor:
    if not norms:
        return torch.tensor(0.0)
    if checked and not bool(norms[0].isfinite()):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return norms[0].view(()).to(torch.float32)
