"""A mode that asks for the cost of every operation."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.programs.plan_tool.op_costs import is_listed, kernel_of
from fullshard.programs.plan_tool.program import Kernel
from fullshard.torch_border import Operator


class WatchedKernels(TorchDispatchMode):
    """Notes the kernel of every operation, and operators that nobody thought of."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.unlisted: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to ask the compiler takes seconds

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_listed(func):
            self.unlisted.add(str(func))
        if kernel := kernel_of(func, args, kwargs or {}, result):
            self.kernels.append(kernel)
        return result
