"""Operators of torch: what their schemas say, and those that a device chooses by itself, for devices without values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.library
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Operator: TypeAlias = torch._ops.OpOverload
"""One overload of an operator, such as ``aten.add.Tensor``, as a dispatch mode gets it."""

ATTENTION_OPERATORS: frozenset[Operator] = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    )
)
"""Forms of `scaled_dot_product_attention` with fused kernels."""

ADDMM_WITH_ACTIVATION = "_addmm_activation"
"""The name of a product to which an activation function is fused."""

VALUE_OF: Operator = torch.ops.aten._local_scalar_dense.default
"""Asks for the value of a tensor, as ``item`` does."""

SET_STORAGE: Operator = torch.ops.aten.set_.source_Storage_storage_offset
"""Gives a tensor the memory of a storage, which no operation has made."""

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
    """Name without namespace and overload: ``add``."""
    arguments: tuple[Argument, ...]
    new_results: tuple[bool, ...]
    """Whether each result is neither a view of an argument nor an argument."""


@functools.cache
def signature_of(operator: Operator) -> Signature:
    """Return the facts of the operator's schema."""
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


class OperatorMode(TorchDispatchMode):
    """A dispatch mode: sees every operator that runs within its block. Nothing there is compiled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to ask the compiler takes seconds."""
        return False


@functools.cache
def takes_itself_apart(kind: type) -> bool:
    """Return whether tensors of a class, such as DTensor, see operations themselves, and then compute with plain tensors."""
    own: Any = getattr(kind, "__torch_dispatch__", None)
    return own is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def leaves_in(tree: Any) -> list[Any]:
    """Return the leaves of nested arguments or results."""
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def with_tensors(replaced: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested arguments or results with other tensors in the place of theirs."""
    return tree_map_only(Tensor, replaced, tree)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return the result of the flash kernel, also on the meta device; all widths must be equal and a multiple of 8."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output: Tensor = attend(query, key, value, dropout, is_causal, scale=scale)[0]
    return output


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return the result of the memory-efficient kernel, also on the meta device; the bias is of the size of the scores."""
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    output: Tensor = attend(query, key, value, bias, saves, dropout, is_causal, scale=scale)[0]
    return output
