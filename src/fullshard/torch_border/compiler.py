"""Marks for torch's compiler: functions that it leaves alone, and parameters that it sees one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.meta_utils import MetaTensorDescriber

F = TypeVar("F", bound=Callable[..., Any])

_frames: Any = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def opaque_to_compiler(function: F) -> F:
    """Mark a function: the compiler breaks its graph there, and compiles neither the function nor what it calls.

    The interpreter asks for the mark before it runs a frame, so a call takes as long as without it. A hook of a module
    must be the function itself or a method, no partial: then the compiler sees the mark, leaves the hooks to the
    interpreter, and compiles the module's forward as one graph.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIPPED)
    cast(Any, function)._torchdynamo_disable = True
    return function


def show_alone(is_shown_alone: Callable[[Tensor], object]) -> None:
    """Show the compiler tensors for which the function holds as if each had a storage of its own.

    Parameters of a group are views of one storage that do not overlap. The compiler sees only that they share it, and
    refuses `torch.cond` and its relatives over several of them.
    """
    describe: Any = MetaTensorDescriber.describe_tensor

    @functools.wraps(describe)
    def described(self: MetaTensorDescriber, tensor: Tensor, **options: Any) -> Any:
        found = describe(self, tensor, **options)
        if found.storage is None or not is_shown_alone(tensor):
            return found
        number = self.get_storage_id(cast(Any, tensor))  # which no storage has
        return replace(found, storage=replace(found.storage, id=number))

    cast(Any, MetaTensorDescriber).describe_tensor = described
