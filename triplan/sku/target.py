"""Target: the device that a plan is for. Pure data, so planning needs no GPU."""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from triplan.errors import InvalidProblem, Unsupported, shown
from triplan.sku.kinds import ArchSku
from triplan.sku.model import FrozenModel

__all__ = ["Target"]


TargetName = Literal["a100", "h100", "h200", "cpu"]


class Target(FrozenModel):
    """Architecture, number of multiprocessors (of a GPU at least 1), and bytes of shared memory per block. ``name`` is
    only displayed."""

    display_only: ClassVar[frozenset[str]] = frozenset({"name"})

    arch: ArchSku
    sm_count: Annotated[int, Field(ge=0, lt=2**31)]
    shared_memory: Annotated[int, Field(ge=0, lt=2**31)]
    interpret: bool = False
    name: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.is_gpu and self.sm_count == 0:
            raise ValueError("sm_count = 0: a GPU has multiprocessors")
        return self

    @property
    def is_gpu(self) -> bool:
        return self.arch is not ArchSku.CPU

    @property
    def device_type(self) -> str:
        """``"cuda"`` or ``"cpu"``: the device type of this target's operands."""
        return "cuda" if self.is_gpu else "cpu"

    @staticmethod
    def preset(name: str) -> Target:
        """A known card: ``"a100"``, ``"h100"`` (SXM) or ``"h200"``; or ``"cpu"``. Raises ``InvalidProblem``."""
        if not isinstance(name, str) or name not in _PRESETS:
            raise InvalidProblem(f"Target preset {shown(name)} is unknown; known are {', '.join(sorted(_PRESETS))}")
        return _PRESETS[name]

    @staticmethod
    def given(target: Target | TargetName | None) -> Target:
        """``target``, the preset of that name, or for None ``current()``. Raises ``InvalidProblem``."""
        if target is None:
            return Target.current()
        return target if isinstance(target, Target) else Target.preset(target)

    @staticmethod
    def sm80() -> Target:
        """The a100 preset."""
        return _PRESETS["a100"]

    @staticmethod
    def sm90a() -> Target:
        """The h200 preset."""
        return _PRESETS["h200"]

    @staticmethod
    def cpu(interpret: bool = False) -> Target:
        """The CPU: the reference backend; with ``interpret``, the Triton kernels in Triton's interpreter."""
        return _CPU_INTERPRET if interpret else _CPU

    @staticmethod
    def of(device: torch.device | str | int) -> Target:
        """The target of a torch device. Raises ``Unsupported`` for one that no kernel is built for."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as e:
            raise InvalidProblem(f"device {shown(device)}: {e!s:.200}") from None
        if device.type == "cpu":
            return Target.cpu(interpret=interpreting())
        if device.type != "cuda":
            raise Unsupported(f"no target for device {device}; cuda and cpu are supported")
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)

    @staticmethod
    def current() -> Target:
        """torch's current GPU; without one, the CPU; under ``TRITON_INTERPRET=1``, the interpreter."""
        if _gpu_present():
            return _of_cuda(torch.cuda.current_device())
        return Target.cpu(interpret=interpreting())


@cache
def _gpu_present() -> bool:
    return not interpreting() and torch.cuda.is_available()


@cache
def interpreting() -> bool:
    """Whether ``TRITON_INTERPRET=1`` is set. Read once: Triton reads it when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@cache
def _of_cuda(index: int) -> Target:
    props = torch.cuda.get_device_properties(index)
    if props.major == 8:
        arch = ArchSku.SM80
    elif (props.major, props.minor) == (9, 0):
        arch = ArchSku.SM90A
    else:
        raise Unsupported(
            f"{props.name} has compute capability {props.major}.{props.minor}; kernels are built for 8.x and 9.0"
        )
    return Target(
        arch=arch,
        sm_count=props.multi_processor_count,
        shared_memory=getattr(props, "shared_memory_per_block_optin"),  # noqa: B009 (missing from torch's stubs)
        name=props.name,
    )


_CPU = Target(arch=ArchSku.CPU, sm_count=0, shared_memory=0, name="cpu")
_CPU_INTERPRET = Target(arch=ArchSku.CPU, sm_count=1, shared_memory=0, interpret=True, name="cpu (interpreter)")
_PRESETS = {
    "cpu": _CPU,
    "a100": Target(arch=ArchSku.SM80, sm_count=108, shared_memory=166912, name="a100"),
    "h100": Target(arch=ArchSku.SM90A, sm_count=132, shared_memory=232448, name="h100"),
    "h200": Target(arch=ArchSku.SM90A, sm_count=132, shared_memory=232448, name="h200"),
}
