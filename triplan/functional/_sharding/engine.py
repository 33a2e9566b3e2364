"""From an op's axes to the ways in which ranks can divide it, for the dispatcher of torch's DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from triplan.functional._sharding.axes import Axes


class _Tensor(NamedTuple):
    """The letters of each axis, None where it cannot be divided, and those that it is a sum over."""

    axes: tuple[str | None, ...]
    sums: frozenset[str]


def _split(text: str) -> tuple[str, str]:
    axes, _, sums = text.strip().partition("+")
    return axes, sums


def _letters(axes: str, rank: int) -> tuple[str | None, ...]:
    """One letter an axis. Those of ``*`` have numbers, counted from the right; a tensor of fewer axes has the last."""
    before, star, after = axes.partition("*")
    if not star:
        found: list[str | None] = [None if c == "." else c for c in axes]
        return tuple(found[len(found) - rank :]) if rank < len(found) else tuple(found)
    count = rank - len(before) - len(after)
    middle = [str(count - 1 - i) for i in range(max(count, 0))]
    found = [None if c == "." else c for c in (*before, *middle, *after)]
    return tuple(found)


def ways(pattern: str, shapes: Sequence[Sequence[int] | None], ranks: int) -> list[tuple[list[Any], list[Any]]]:
    """The placements of (results, tensors) of one axis of the mesh, one for each letter.

    ``shapes`` are those of the op's tensor arguments, None for one that is absent. Axes of one letter may differ in
    extent (heads of queries and of keys) if all ``ranks`` divide them evenly; an axis of extent 1 broadcasts.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    from triplan.functional._sharding.sums import Sum

    given, _, made = pattern.partition("->")
    texts = [_split(t) for t in given.split(",")]
    assert len(texts) == len(shapes), pattern
    inputs: list[_Tensor | None] = []
    extents: dict[str, set[int]] = {}
    for (axes, sums), shape in zip(texts, shapes, strict=True):
        if shape is None:
            inputs.append(None)
            continue
        letters = _letters(axes, len(shape))
        assert len(letters) == len(shape), f"{pattern}: {axes} is not {list(shape)}"
        inputs.append(_Tensor(letters, frozenset(sums)))
        for letter, n in zip(letters, shape, strict=True):
            if letter is not None:
                extents.setdefault(letter, set()).add(n)
    numbers = sorted(letter for letter in extents if letter.isdigit())
    results = []
    for axes, sums in map(_split, made.split(",")):
        rank = len(axes) if "*" not in axes else len(axes) - 1 + len(numbers)
        results.append(_Tensor(_letters(axes, rank), frozenset(sums.replace("*", "")) | _all(sums, numbers)))
    found: list[tuple[list[Any], list[Any]]] = []
    for letter, sizes in extents.items():
        sizes = sizes - {1}
        if not sizes or (len(sizes) > 1 and any(n % ranks for n in sizes)):
            continue

        def place(t: _Tensor, shape: Sequence[int] | None = None, letter: str = letter) -> Any:
            if letter in t.axes:
                at = t.axes.index(letter)
                return Replicate() if shape is not None and shape[at] == 1 else Shard(at)
            return (Sum() if shape is not None else Partial()) if letter in t.sums else Replicate()

        tensors = [place(t, s) for t, s in zip(inputs, shapes, strict=True) if t is not None]
        found.append(([place(t) for t in results], tensors))
    return found


def _all(sums: str, numbers: Sequence[str]) -> frozenset[str]:
    return frozenset(numbers) if "*" in sums else frozenset()


# --- registration ---


def _strategy(axes: Axes, schema: Any) -> Any:
    """What DTensor asks: the placements of tensors that the op takes, each with those of its results."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    arguments = schema.op._schema.arguments
    args = [a.strategies[0].output_spec if isinstance(a, OpStrategy) else a for a in schema.args_schema]
    args += [a.default_value for a in arguments[len(args) :]]
    results, given = len(schema.op._schema.returns), schema.args_strategy
    found: list[tuple[list[Any], list[Any]]] = [([Replicate()] * results, [Replicate()] * len(given))]
    pattern = axes(*args) if callable(axes) else axes
    if pattern:
        tensors = [args[i] for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
        found += ways(pattern, [None if t is None else tuple(t.shape) for t in tensors], given[0].mesh.size())
    each = [[*made, *taken] for made, taken in found]
    return expand_to_full_mesh_op_strategy(given[0].mesh, schema, each, input_index=results)


def register(overload: Any, axes: Axes) -> None:
    """Let DTensors reach ``overload``, a registered op."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    # (torch's register_sharding would take the strategy of one call for others that differ in an axis or a flag.)
    how = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(overload, partial(_strategy, axes), how)
