"""What torch says about one of its operators: the names of arguments, what is written, what is a view."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Operator: TypeAlias = torch._ops.OpOverload
"""One overload of an operator, such as ``aten.add.Tensor``: what a dispatch mode is given."""

without_function_modes = torch._C.DisableTorchFunction
"""A context in which a question to a tensor, such as its size, does not go through ``__torch_function__`` first."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operator."""

    name: str
    default: Any
    is_written: bool
    """Whether the operator changes it in place."""
    is_out: bool
    """Whether it is only a place for a result."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and results of an operator."""

    namespace: str
    name: str
    """Without namespace and overload: ``add``."""
    arguments: tuple[Argument, ...]
    new_results: tuple[bool, ...]
    """For each result, whether it is neither a view of an argument nor an argument."""


@functools.cache
def signature_of(operator: Operator) -> Signature:
    """Return what the operator's schema says."""
    schema = operator._schema
    namespace, name = schema.name.split("::")
    arguments = tuple(
        Argument(
            name=each.name,
            default=each.default_value,
            is_written=each.alias_info is not None and each.alias_info.is_write,
            is_out=each.is_out,
        )
        for each in schema.arguments
    )
    fresh = tuple(each.alias_info is None for each in schema.returns)
    return Signature(namespace, name, arguments, fresh)
