"""Loss scaling for fp16 when each rank sees only a part of the gradients.

    scaler = ShardedGradScaler()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()

A gradient may overflow in the shard of one rank alone. Ranks therefore agree before a step: all of
them skip it and back off, or none. The rest is `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.comm import collectives
from fullshard.errors import LifecycleError, OptionTypeError

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch_border.OpenGradScaler):
    """A `torch.amp.GradScaler` that skips a step on all ranks when the gradients of one are not finite.

    Gradients may be plain tensors or DTensors, of any floating-point dtype, on the host or on an
    accelerator. `unscale_`, or else `step`, is collective: all ranks call it, also one that has no
    gradients.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Scale by ``init_scale`` at first.

        Args:
            device: Type of the device that computes.
            init_scale: The first scale.
            backoff_factor: What the scale is multiplied by after a skipped step.
            growth_factor: What the scale is multiplied by after ``growth_interval`` steps without a skipped one.
            growth_interval: How many steps that are.
            enabled: False makes `step` the optimizer's own and everything else do nothing.
            process_group: The ranks that skip together. None is the default group, looked up when it
                is needed, so that it may be initialised later.
        """
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        if process_group is not None and not isinstance(process_group, ProcessGroup):
            raise OptionTypeError(
                "process_group must be a ProcessGroup that this rank is in, or None for the default group; "
                f"got {process_group!r}."
            )
        self.process_group = process_group
        self._compute_device = device

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or all in nested lists, tuples and iterables, by the scale; dtypes stay."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            items = [self.scale(item) for item in outputs]
            # A named tuple takes its fields one by one.
            return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping)):
            return map(self.scale, outputs)
        raise OptionTypeError(
            "Only tensors and lists, tuples or other iterables of tensors can be scaled, got "
            f"{type(outputs).__name__}. Scale what backward() is called on, which is usually the loss."
        )

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, factor: Tensor, found_inf: Tensor
    ) -> None:
        """Multiply this rank's gradients by ``factor``; ``found_inf`` becomes 1 if those of any rank are not finite."""
        group = self._group()
        for (device, _), gradients in _gradients_by_kind(optimizer).items():
            found_here = found_inf.to(device)
            torch_border.unscale_and_check(gradients, factor.to(device), found_here)
            found_inf.copy_(found_here)
        carried = found_inf
        if (
            collectives.backend_of(group, found_inf.device) == "nothing"
        ):  # NCCL, and a loss on the host
            carried = found_inf.to(self._compute_device)
        collectives.all_reduce(carried, group, ReduceOp.MAX)
        found_inf.copy_(carried)

    def _group(self) -> ProcessGroup:
        group = dist.group.WORLD if self.process_group is None else self.process_group
        if group is None:
            raise LifecycleError(
                "Ranks agree on skipping a step over a process group, and there is no default one. "
                "Call init_process_group() before unscale_() and step()."
            )
        return group


def _gradients_by_kind(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What this rank holds of an optimizer's gradients, by device and dtype."""
    kinds = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                held = _held_of(param.grad)
                kinds[held.device, held.dtype].append(held)
    return kinds


def _held_of(gradient: Tensor) -> Tensor:
    # Of DTensors the local tensors, which torch unscales together with plain ones; DTensors it does not.
    if isinstance(gradient, DTensor):
        gradient = torch_border.local_of(gradient)
    elif gradient.is_sparse:
        gradient = torch_border.sparse_values(gradient)
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
