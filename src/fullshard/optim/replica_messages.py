"""Messages among replicas, each of which has updated, or keeps, its part of the same shards."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from fullshard.errors import ConfigurationError, LifecycleError, fault_paragraphs
from fullshard.optim.param_cuts import labels_of, listed
from fullshard.transport import collectives
from fullshard.transport.tags import Tag, tag

STATES = tag("optimizer: states of the replicas")

OVER_REPLICAS = "shard_over_replicas gathers shards over the replicas"
"""Beginning of the error where the process group cannot do that."""


class ReplicaMessage:
    """One all-gather over the replicas. Each sends its views; those of the others are written."""

    def __init__(self, views: Sequence[Sequence[Tensor]], group: ProcessGroup, own: int) -> None:
        """Send the views of replica ``own``, which is this one."""
        self._own = list(views[own])
        self._others = [view for index, each in enumerate(views) if index != own for view in each]
        self._sizes = [[view.numel() for view in each] for each in views]
        self._rank = own
        self._numel = max(map(sum, self._sizes))
        self._group = group
        self._flight: tuple[Tensor, Tensor, Work | None] | None = None

    def start(self, what: Tag) -> None:
        """Send this replica's views, as they are now on the current stream."""
        if not self._numel:
            return
        like = (self._own or self._others)[0]
        sent = like.new_empty(self._numel)
        if self._own:
            torch._foreach_copy_(self._split(sent, self._rank), self._own)
        received = like.new_empty(self._numel * len(self._sizes))
        work = collectives.all_gather(
            [received.view(torch.uint8)],
            [sent.view(torch.uint8)],
            self._group,
            what,
            async_op=True,
        )
        # Both are held until the current stream has waited for the gather: their memory is not reused before.
        self._flight = sent, received, work

    def _split(self, buffer: Tensor, index: int) -> list[Tensor]:
        sizes = self._sizes[index]
        return list(buffer.narrow(0, 0, sum(sizes)).split(sizes))

    def land(self) -> None:
        """Write the views that the other replicas have sent."""
        if self._flight is None:
            return
        _, received, work = self._flight
        if work is not None:
            work.wait()
        if self._others:
            parts = [
                part
                for index, buffer in enumerate(received.split(self._numel))
                if index != self._rank
                for part in self._split(buffer, index)
            ]
            torch._foreach_copy_(self._others, parts)
        self._flight = None


class GatheredParams:
    """Parameters whose shards replicas update in parts and gather together."""

    params: list[nn.Parameter]
    _messages: list[ReplicaMessage]

    @property
    def is_trained(self) -> bool:
        """Whether a step may change a parameter: the same on all replicas, whichever has no gradient."""
        return any(param.requires_grad or param.grad is not None for param in self.params)

    @functools.cached_property
    def _tag(self) -> Tag:
        """Asked for in a step, when parameters have their labels."""
        return tag(f"optimizer: updated shards of the replicas, {listed(labels_of(self.params))}")

    def start(self) -> None:
        """Send this replica's parts of the shards."""
        for message in self._messages:
            message.start(self._tag)

    def land(self) -> None:
        """Write the parts of the other replicas into the shards."""
        for message in self._messages:
            message.land()


def check_bucket(bucket_numel: int) -> None:
    """Refuse messages without elements."""
    if bucket_numel < 1:
        raise ConfigurationError(f"bucket_numel must be at least 1, got {bucket_numel}.")


def raise_differences(faults: Iterable[str]) -> None:
    """Raise an error if there are parameters whose states differ between replicas."""
    for paragraph in fault_paragraphs(
        faults,
        "Replicas keep parts of one optimizer state, so they must have updated the same parameters as often; these differ:",
        "Let all ranks take the same steps, with gradients of the same parameters.",
    ):
        raise LifecycleError(paragraph)
