"""Strips that replicas update in parts: each keeps the 8-bit state of its part only.

With HSDP every replica holds the same strips. A strip is cut where a row or a fragment begins, so each of these has one owner:

    strip       | fragment | row | row | row | fragment |      2 replicas
    replica 0   | fragment | row | row |
    replica 1                          | row | fragment |

Rows and fragments are the same as without the cut. Only the owner of a fragment takes part in finding the scale of a shared
block, and the maximum over all ranks is the same. So the bits are those of replicas that update everything. The cut depends on
parameters alone, so all replicas gather the same buckets in the same order, whichever has no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fullshard.mesh.axes import DataParallelAxes
from fullshard.optim.param_cuts import check_backend
from fullshard.optim.replica_messages import OVER_REPLICAS, GatheredParams, ReplicaMessage

Segment = tuple[int, Tensor]
"""A range of a strip: its first element, counted in the whole strip, and a tensor with one value for each element."""


@dataclass(frozen=True, slots=True)
class ReplicaCut:
    """The division of a strip among replicas."""

    group: ProcessGroup
    rank: int
    ends: tuple[int, ...]
    """Replica n has the elements from the end of the replica before it to its own."""

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Each replica's first element, and the one after its last."""
        return list(pairwise((0, *self.ends)))


def replica_cut(strip: Tensor, starts: Tensor, axes: DataParallelAxes | None) -> ReplicaCut | None:
    """Cut a strip into about equal parts; None if it has no replicas. All replicas find the same.

    Args:
        strip: Its memory.
        starts: The first elements of its rows and fragments.
        axes: The ranks that hold it.
    """
    replicas = None if axes is None else axes.replicate_process_group
    if axes is None or replicas is None or axes.replicate_mesh_size == 1 or not strip.numel():
        return None
    check_backend(replicas, strip.device, OVER_REPLICAS)
    size, numel = axes.replicate_mesh_size, strip.numel()
    ends = []
    for part in range(1, size):
        later = starts[starts >= numel * part // size]
        ends.append(int(later.min()) if len(later) else numel)
    return ReplicaCut(replicas, axes.replicate_mesh_rank, (*ends, numel))


class ReplicaBucket(GatheredParams):
    """Strips that are gathered together."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        memories: Sequence[Tensor],
        cuts: Sequence[ReplicaCut],
        bucket_numel: int,
    ) -> None:
        """Prepare messages of about ``bucket_numel`` elements over strips of one dtype, which have ``params``."""
        self.params = list(params)
        self._cuts = cuts
        self._limit = max(bucket_numel // len(cuts[0].ends), 1)
        self._messages = list(self.messages([[(0, memory)] for memory in memories]))

    @property
    def group(self) -> ProcessGroup:
        """The replicas."""
        return self._cuts[0].group

    def messages(self, strips: Sequence[Sequence[Segment]]) -> Iterator[ReplicaMessage]:
        """Yield messages over segments of each strip: every replica sends its part of them."""
        longest = max(end - begin for cut in self._cuts for begin, end in cut.windows)
        for first in range(0, longest, self._limit):
            views: list[list[Tensor]] = [[] for _ in self._cuts[0].ends]
            for cut, segments in zip(self._cuts, strips, strict=True):
                for of_replica, (begin, end) in zip(views, cut.windows, strict=True):
                    start = begin + first
                    of_replica += _parts(segments, start, min(start + self._limit, end))
            yield ReplicaMessage(views, self.group, self._cuts[0].rank)


def _parts(segments: Sequence[Segment], begin: int, end: int) -> Iterator[Tensor]:
    """Yield the parts of segments between the elements ``begin`` and ``end`` of their strip."""
    for start, tensor in segments:
        first, last = max(begin - start, 0), min(end - start, tensor.numel())
        if first < last:
            yield tensor[first:last]
