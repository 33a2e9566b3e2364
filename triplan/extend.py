"""What the author of an op or a kernel needs, besides the names of ``triplan`` itself (``docs/extending.md``).

- Launches as data: ``Launch`` and its arguments: ``Ptr``, ``Stride``, ``Scalar`` and ``TensorMap``, read from operands;
  ``Int`` and ``Float``, known when planning; ``Scratch``, in the workspace.
- Fields of descriptors: ``Element``, ``Shape``, ``Extent`` and their marks, which validation and test strategies read;
  ``field(default=...)`` for the default of a field that converts its input; ``PlannedBy``.
- Entries of the kernel table: ``Configuration``, ``Preparation``; of a reference, ``CheckRules``.
- Functional calls: ``Op`` registers one with torch.library and autograd; ``run`` plans and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triplan.backends.runtime.launch import (
    Arg as Arg,
    Float as Float,
    Int as Int,
    Launch as Launch,
    Ptr as Ptr,
    Scalar as Scalar,
    Scratch as Scratch,
    Stride as Stride,
    TensorMap as TensorMap,
    power_of_two_in as power_of_two_in,
)
from triplan.backends.table import (
    CheckRules as CheckRules,
    Configuration as Configuration,
    Preparation as Preparation,
)
from triplan.descriptors import (
    AxesField as AxesField,
    AxisField as AxisField,
    Extent as Extent,
    ExtentField as ExtentField,
    IndexValueField as IndexValueField,
    OutOfBounds as OutOfBounds,
    Shape as Shape,
    ShapeField as ShapeField,
    is_packed as is_packed,
    packed_strides as packed_strides,
)
from triplan.descriptors.base import PlannedBy as PlannedBy
from triplan.errors import InvalidProblem, shown
from triplan.functional import _ops
from triplan.functional._plans import run as run
from triplan.functional._replay.recording import setting as setting
from triplan.functional._replay.replay import replayed as replayed
from triplan.sku import (
    GPU_ARCHS as GPU_ARCHS,
    Element as Element,
    IndexElement as IndexElement,
    OptionalElement as OptionalElement,
    field as field,
)

__all__ = [
    "GPU_ARCHS",
    "Arg",
    "AxesField",
    "AxisField",
    "CheckRules",
    "Configuration",
    "Element",
    "Extent",
    "ExtentField",
    "Float",
    "IndexElement",
    "IndexValueField",
    "Int",
    "Launch",
    "Op",
    "OptionalElement",
    "OutOfBounds",
    "PlannedBy",
    "Preparation",
    "Ptr",
    "Scalar",
    "Scratch",
    "Shape",
    "ShapeField",
    "Stride",
    "TensorMap",
    "field",
    "is_packed",
    "packed_strides",
    "power_of_two_in",
    "replayed",
    "run",
    "setting",
]


def __dir__() -> list[str]:
    return __all__


class Op(_ops.Op):
    """A functional call of one result, registered with torch.library, with autograd, ``out=`` and perhaps in place.

    ``op(*args)`` calls it, ``op.into(out, *args)`` with torch's ``out=``, ``op.in_place(target, *args)`` in place. The
    overloads ``yours::name``, ``yours::name_out`` and, with ``update``, ``yours::name_`` stand in ``torch.ops`` with
    fake kernels, so that ``torch.compile`` keeps them in its graphs.
    """

    def __init__(
        self,
        name: str,
        parameters: str,
        *,
        shape: Callable[..., Sequence[int]],
        fill: Callable[..., object] | None = None,
        update: Callable[..., object] | None = None,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., tuple[Any, ...]],
    ) -> None:
        """Register the op. Raises ``InvalidProblem`` if ``name`` has no namespace.

        Args:
            name: ``"yours::name"``.
            parameters: the arguments in torch's schema language; the first is a Tensor, whose dtype and device the
                result has.
            shape: validates the arguments and returns the result's shape. It runs on fake tensors too.
            fill: ``fill(out, *args)`` writes the result.
            update: instead of ``fill``: ``update(out, *args[1:])`` changes a copy of the first argument.
            setup: ``setup(ctx, inputs, output)``, as ``torch.autograd.Function.setup_context``.
            backward: ``backward(ctx, grad)``: one gradient, or None, for each argument.
        """
        namespace, _, bare = name.rpartition("::")
        if not (namespace.isidentifier() and bare.isidentifier()):
            raise InvalidProblem(f"Op: name = {shown(name)}: must be 'namespace::name', with a namespace of yours")
        super().__init__(
            name, parameters, axes=None, shape=shape, fill=fill, update=update, setup=setup, backward=backward
        )
