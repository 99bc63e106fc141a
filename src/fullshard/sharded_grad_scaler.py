"""Loss scaling for fp16 where each rank has only a shard of the gradients.

    scaler = ShardedGradScaler()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()

A gradient may overflow in the shard of one rank only. So ranks agree before a step: all of them skip it and reduce the
scale, or none. The rest is `torch.amp.GradScaler`.
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
from fullshard.divergence import monitor
from fullshard.errors import LifecycleError, OptionTypeError
from fullshard.mesh.backends import NOTHING, backend_of
from fullshard.transport import collectives
from fullshard.transport.tags import tag

__all__ = ["ShardedGradScaler"]

_FOUND_INF = tag("loss scaler: is a gradient infinite?")


class ShardedGradScaler(torch_border.OpenGradScaler):
    """A `torch.amp.GradScaler` that skips a step on all ranks when the gradients of one are not finite.

    Gradients may be plain tensors or DTensors, of any floating-point dtype, on the host or on an accelerator. `unscale_` is
    collective, and so is `step` if `unscale_` was not called: all ranks call it, also a rank without gradients.
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
            device: The type of the compute device.
            init_scale: The first scale.
            backoff_factor: The factor of the scale after a skipped step.
            growth_factor: The factor of the scale after ``growth_interval`` steps in a row that were not skipped.
            growth_interval: The number of these steps.
            enabled: With False, `step` only calls the optimizer's and everything else does nothing.
            process_group: The ranks that skip together. None is the default group, which may be initialised later.
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
                "process_group must be a ProcessGroup that this rank is in, or None for the default group, got "
                f"{process_group!r}. Leave it out for the default group."
            )
        self.process_group = process_group
        self._compute_device = device

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or all tensors in nested iterables, by the scale; dtypes stay."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            items = [self.scale(item) for item in outputs]
            # The class of a named tuple takes its fields as separate arguments.
            return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping)):
            return map(self.scale, outputs)
        raise OptionTypeError(
            f"scale takes a tensor or an iterable of tensors, got {type(outputs).__name__}. Pass the tensor that backward() is "
            "called on, usually the loss."
        )

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, factor: Tensor, found_inf: Tensor
    ) -> None:
        """Multiply this rank's gradients by ``factor``; set ``found_inf`` to 1 if those of any rank are not finite."""
        monitor.install()
        group = self._group()
        for (device, _), gradients in _gradients_by_kind(optimizer).items():
            found_here = found_inf.to(device)
            torch_border.unscale_and_check(gradients, factor.to(device), found_here)
            found_inf.copy_(found_here)
        carried = found_inf
        if backend_of(group, found_inf.device) is NOTHING:
            # The loss is on the host, and NCCL does not communicate host memory.
            carried = found_inf.to(self._compute_device)
        collectives.all_reduce(carried, group, ReduceOp.MAX, _FOUND_INF)
        found_inf.copy_(carried)

    def _group(self) -> ProcessGroup:
        """Return the process group of the ranks that skip together."""
        group = dist.group.WORLD if self.process_group is None else self.process_group
        if group is None:
            raise LifecycleError(
                "Ranks need a process group to agree on skipping a step, but there is no default one. Call "
                "init_process_group() before unscale_() and step()."
            )
        return group


def _gradients_by_kind(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the local tensors of an optimizer's gradients, by device and dtype."""
    kinds = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                local = _local_gradient(param.grad)
                kinds[local.device, local.dtype].append(local)
    return kinds


def _local_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as one real, dense tensor that torch can unscale together with others."""
    if isinstance(gradient, DTensor):
        gradient = torch_border.local_of(gradient)
    elif gradient.is_sparse:
        gradient = torch_border.sparse_values(gradient)
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
