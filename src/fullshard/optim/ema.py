"""An exponential moving average (EMA) of sharded parameters.

    ema = EMA(model, decay=0.999)
    ...
    optimizer.step()
    ema.update()
    ...
    with ema.averaged():
        evaluate(model)

Every rank averages the elements that it holds: a copy of its shards, updated elementwise. So ranks do not communicate, and
an average is sharded as its parameter is. Only `averaged` writes to parameters. It first brings the model to rest, because
an unsharded parameter that was kept would not show the averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.known_groups import groups_of
from fullshard.errors import ConfigurationError, LifecycleError, UsageError, fault_paragraphs
from fullshard.features.at_rest import bring_to_rest
from fullshard.layout.names import clean_name
from fullshard.optim.fused_shards import like_param
from fullshard.transport.streams import is_capturing

__all__ = ["EMA"]


class EMA:
    """An exponential moving average of a model's trainable parameters.

    The averages of parameters in 16 bits are in float32: in 16 bits small changes would be rounded away.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999, warmup: float = 0.0) -> None:
        """Begin with the parameters as they are now.

        Args:
            model: Sharded by `fully_shard` or `FullyShardedDataParallel`, or not at all. Shard it first.
            decay: Share of the old average that an update keeps; at least 0 and below 1.
            warmup: Slows the growth of the decay: update n, counted from 0, keeps at most ``(1 + n) / (1 + n + warmup)``. So
                early averages forget the initial parameters. 0 for none.
        """
        if not 0 <= decay < 1:
            raise ConfigurationError(f"decay must be at least 0 and below 1, got {decay}.")
        if not 0 <= warmup < float("inf"):
            raise ConfigurationError(f"warmup must be a finite number, at least 0, got {warmup}.")
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        """Number of calls of `update`."""
        self.is_swapped = False
        """Whether the model has the averages in place of its parameters, within `averaged`."""
        self._model = model
        self._before_write: list[Callable[[], None]] = []
        bring_to_rest(model, "EMA")
        self._params = self._trainable()
        self._is_checked = False
        self._locals = {
            name: torch.empty_like(local, dtype=torch.promote_types(local.dtype, torch.float32))
            for name, local in zip(self._params, self._shards(), strict=True)
        }
        self.reset()

    def _trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by their names without wrappers."""
        return {
            clean_name(name): param
            for name, param in self._model.named_parameters()
            if param.requires_grad
        }

    def _shards(self) -> list[Tensor]:
        """Return this rank's part of each parameter."""
        return [
            torch_border.local_of(param) if isinstance(param, DTensor) else param.detach()
            for param in self._params.values()
        ]

    def _check_params(self) -> None:
        """Raise unless the averaged parameters are those of the model."""
        now = self._trainable()
        faults = [
            name for name in self._params | now if self._params.get(name) is not now.get(name)
        ]
        for paragraph in fault_paragraphs(
            faults,
            "An EMA must have the parameters that are on the modules and are trained. These were replaced, or frozen or "
            "unfrozen, after it was built: by sharding, by an assignment, or by load_state_dict(assign=True):",
            "Build the EMA after that.",
        ):
            raise LifecycleError(paragraph)
        self._is_checked = True

    # --- updates ----------------------------------------------------------------------------------

    @property
    def current_decay(self) -> float:
        """Share of the old average that the next update keeps."""
        return min(self.decay, (1 + self.updates) / (1 + self.updates + self.warmup))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters. Call it after each step of the optimizer, on all ranks."""
        if self.is_swapped:
            raise LifecycleError("EMA.update was called within EMA.averaged. Call it outside.")
        if is_capturing():
            raise UsageError(
                "EMA.update counts its calls on the host, so it cannot be captured in a CUDA graph. Call it after the "
                "captured step."
            )
        if not self._is_checked:  # once: it walks over all modules
            self._check_params()
        self._announce_write()
        averages = list(self._locals.values())
        # Operators on lists take pairs of one dtype.
        shards = [
            shard if shard.dtype == average.dtype else shard.to(average.dtype)
            for shard, average in zip(self._shards(), averages, strict=True)
        ]
        torch._foreach_lerp_(averages, shards, 1 - self.current_decay)
        self.updates += 1

    @torch.no_grad()
    def reset(self) -> None:
        """Begin anew with the parameters as they are now, for instance after loading weights."""
        torch._foreach_copy_(list(self._locals.values()), self._shards())
        self.updates = 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averages in place of its parameters within the block: to evaluate, to export.

        The parameters are kept meanwhile, which takes the memory of this rank's shards once more. All ranks enter it.
        """
        if self.is_swapped:
            raise LifecycleError("EMA.averaged is active already. Leave it first.")
        bring_to_rest(self._model, "EMA.averaged")
        self._check_params()
        kept = [shard.clone() for shard in self._shards()]
        self._write(list(self._locals.values()))
        self.is_swapped = True
        try:
            yield
        finally:
            # Not `bring_to_rest`: after an exception the model may not be at rest, and must get its parameters back.
            for group in groups_of(self._params.values()):
                group.reshard()
            self._write(kept)
            self.is_swapped = False

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        """Write to the parameters. Whatever was gathered of them must have been given back."""
        self._announce_write()
        torch._foreach_copy_(self._shards(), values)
        # Autograd does not know that writes to a local tensor are writes to its DTensor.
        torch.autograd.graph.increment_version(list(self._params.values()))

    def call_before_write(self, call: Callable[[], None]) -> None:
        """Call a function once, before parameters or averages are written to: copies of them may be under way."""
        self._before_write.append(call)

    def _announce_write(self) -> None:
        while self._before_write:
            self._before_write.pop()()

    # --- state ------------------------------------------------------------------------------------

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name, each sharded as its parameter is, without a copy."""
        return {name: like_param(param, self._locals[name]) for name, param in self._params.items()}

    def averages_by_param(self) -> dict[nn.Parameter, Tensor]:
        """Return the averages by parameter, for checkpoints."""
        return {param: like_param(param, self._locals[n]) for n, param in self._params.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates, without a copy.

        With `fully_shard` the averages are DTensors, which `torch.distributed.checkpoint` saves and loads on any number of
        ranks. With the wrapper they are this rank's shards; `fullshard.checkpoint.save(..., ema=ema)` is for both.
        """
        return {"updates": self.updates, "averages": self.averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned, on the same number of ranks.

        Raises:
            ConfigurationError: names, shapes or meshes differ; all are named, and nothing was loaded.
        """
        own, loaded = self.averages, dict(state["averages"])
        faults = [
            *(f"{name}: not in the state" for name in own if name not in loaded),
            *(f"{name}: not averaged here" for name in loaded if name not in own),
            *(
                f"{name}: {_described(loaded[name])}, not {_described(average)}"
                for name, average in own.items()
                if name in loaded and _kind(loaded[name]) != _kind(average)
            ),
        ]
        for paragraph in fault_paragraphs(
            faults,
            "A state of an EMA must have the names, shapes and meshes of its averages; these differ:",
            "Build the model that was averaged, on as many ranks. On another number of ranks use fullshard.checkpoint.",
        ):
            raise ConfigurationError(paragraph)
        self._announce_write()
        for name, average in self._locals.items():
            value = loaded[name]
            average.copy_(torch_border.local_of(value) if isinstance(value, DTensor) else value)
        self.updates = int(state["updates"])


def _kind(value: Tensor) -> tuple[Any, ...]:
    """Return a key that must be equal for one tensor to be copied into another."""
    if isinstance(value, DTensor):
        return (tuple(value.shape), value.device_mesh, value.placements)
    return (tuple(value.shape),)


def _described(value: Tensor) -> str:
    if isinstance(value, DTensor):
        return f"a DTensor of shape {tuple(value.shape)} with {value.placements}"
    return f"a tensor of shape {tuple(value.shape)}"
