"""Operations that a virtual device has seen before, and what their results look like.

torch computes the sizes of results on the meta device in Python, which takes longer than all else of a recording. A step
repeats the same few hundred operations many thousand times, and a search repeats them in every plan. So an operation
runs once for each kind of arguments. After that, tensors like its results are made, or what it writes to is returned.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage

from fullshard import torch_border
from fullshard.torch_border import Operator

META = torch.device("meta")


class KnownOperation:
    """Facts about an operation with certain arguments."""

    __slots__ = ("__weakref__", "is_of_host", "is_single", "outputs")

    def __init__(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        leaves, given = torch_border.leaves_in(result), torch_border.leaves_in((args, kwargs))
        tensors, inputs = (
            [each for each in found if isinstance(each, Tensor)] for found in (leaves, given)
        )
        self.is_of_host = not any(tensor.is_meta for tensor in (*tensors, *inputs))
        """No tensor is on the device."""
        self.outputs: list[tuple[Any, ...]] | None = None
        """Size, strides and dtype of each result; empty if the result is what is written to. None if it must run again."""
        self.is_single = isinstance(result, Tensor)
        if self.is_of_host or len(tensors) != len(leaves):
            return
        signature = torch_border.signature_of(operator)
        writes = any(argument.is_written for argument in signature.arguments)
        there = {*map(torch_border.storage_id, inputs)}
        # Some results share the memory of arguments, though their schema does not say so.
        is_new = all(
            each.is_meta and torch_border.storage_id(each) not in there for each in tensors
        )
        if not writes and all(signature.new_results) and is_new:
            self.outputs = [(each.shape, each.stride(), each.dtype) for each in tensors]
        elif writes and (not signature.new_results or result is args[0]):
            self.outputs = []

    def result(self, args: tuple[Any, ...]) -> Any:
        """Return a result like that of the first time."""
        assert self.outputs is not None, "asked only then"
        if not self.outputs:
            return args[0] if self.is_single else None
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device=META)
            for size, stride, dtype in self.outputs
        ]
        return made[0] if self.is_single else tuple(made)


_KNOWN: dict[Hashable, KnownOperation] = {}
"""Known operations, by operator and all of its arguments that results depend on."""


def run_known(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[KnownOperation, Any]:
    """Return the facts about an operation, and its result; it runs if they are not known."""
    key = (operator, _facts(args), _facts(kwargs.items()) if kwargs else None)
    known = _KNOWN.get(key)
    if known is None:
        result = operator(*args, **kwargs)
        known = _KNOWN[key] = KnownOperation(operator, args, kwargs, result)
        return known, result
    if known.outputs is None:
        return known, operator(*args, **kwargs)
    return known, known.result(args)


def _facts(values: Any) -> Hashable:
    """Return all of some arguments that the sizes of results can depend on."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, (tuple, list)):
            found.append(_facts(value))
        elif isinstance(value, (torch.Generator, UntypedStorage)):
            found.append(id(value))
        else:
            # With its type: 2, 2.0 and True are equal to Python, but decide about the dtype of a result.
            found.append((type(value), value))
    return cast(Hashable, tuple(found))
