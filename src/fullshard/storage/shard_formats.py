"""The shard format of a group: by which layout its parameters are cut, and what its sharded parameters are.

    RowFormat             per row, a DTensor each                                         fully_shard, replicate
    FlatFormat            flat, the parameters the user made, each over a flat piece      wrapper, use_orig_params=True
    FlatParameterFormat   flat, one `FlatParameter` for all                               wrapper, use_orig_params=False

An API chooses the format; the engine asks it and knows nothing else about APIs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from fullshard.layout.segments import (
    Layout,
    contiguous_strides,
    flat_layout,
    has_no_gaps,
    per_row_layout,
)
from fullshard.storage.flat_parameter import FlatShardedParam
from fullshard.storage.param import FSDPParam
from fullshard.storage.shard_buffer import ShardBuffer
from fullshard.storage.sharded_params import (
    DTensorShardedParam,
    OrigParamShard,
    ParallelOrigParamShard,
    ParamModuleInfo,
    ShardedParam,
)


class ShardFormat(ABC):
    """The sharding of one group's parameters."""

    by_segment = False
    """Whether one sharded parameter is for all parameters of a segment."""

    @abstractmethod
    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """Return how to divide the parameters over so many ranks."""

    @abstractmethod
    def make_sharded_params(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """Make the sharded parameters, over what this rank holds of each; ``group`` is the group's name."""

    def shard_views(
        self, params: Sequence[FSDPParam], shards: ShardBuffer
    ) -> dict[ShardedParam, Tensor]:
        """Return the memory in the buffer that every sharded parameter is over."""
        return {
            param.sharded_param: local for param, local in zip(params, shards.locals, strict=True)
        }


class RowFormat(ShardFormat):
    """Every parameter is divided along one of its dimensions, and is a DTensor."""

    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """See `ShardFormat`."""
        shapes, dims = [param.shape for param in params], [param.shard_dim for param in params]
        return per_row_layout(shapes, world=ranks, dims=dims)

    def make_sharded_params(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `ShardFormat`."""
        for param, local in zip(params, locals_, strict=True):
            sharded_param = DTensorShardedParam(
                param.name, param.owners, param.the_original, param.placement, local, group
            )
            param.set_sharded_param(sharded_param)


class FlatFormat(ShardFormat):
    """The parameters one after the other are one array, divided evenly; each has a sharded parameter of its own.

    Frozen and trainable parameters are arrays of their own, so that only what has gradients is
    reduced; so are those of different dtypes.
    """

    def __init__(self, *, alignment: int) -> None:
        """Let every parameter begin at a multiple of ``alignment`` elements."""
        self._alignment = alignment

    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """See `ShardFormat`."""
        return flat_layout(
            [param.shape for param in params],
            world=ranks,
            kinds=[(param.dtype, param.trainable) for param in params],
            multiple=self._alignment,
            strides=[
                param.strides
                if has_no_gaps(param.shape, param.strides)
                else contiguous_strides(param.shape)
                for param in params
            ],
        )

    def make_sharded_params(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `ShardFormat`."""
        for param, slot, local in zip(params, layout.slots, locals_, strict=True):
            # The shard of a single rank keeps its shape.
            shaped = local.as_strided(slot.shape, slot.strides) if layout.world == 1 else local
            name, owners, original = param.name, param.owners, param.the_original
            param.set_sharded_param(
                ParallelOrigParamShard(name, owners, original, param.placement, shaped, group)
                if param.placement.parallel
                else OrigParamShard(name, owners, original, shaped, group)
            )


class FlatParameterFormat(FlatFormat):
    """The same, but one `FlatParameter` is for all of them."""

    by_segment = True

    def __init__(self, owner: ParamModuleInfo) -> None:
        """Register the `FlatParameter` at ``owner``."""
        super().__init__(alignment=1)
        self._owner = owner

    def make_sharded_params(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `ShardFormat`."""
        assert len(layout.segments) == 1, "a FlatParameter is of one dtype, and frozen or not"
        piece = locals_[0].as_strided((layout.segments[0].piece_numel,), (1,), 0)
        members = [
            (param.name, param.owners, param.the_original, param.placement) for param in params
        ]
        sharded_param = FlatShardedParam(self._owner.name, self._owner, members, piece, group)
        for param in params:
            param.set_sharded_param(sharded_param)

    def shard_views(
        self, params: Sequence[FSDPParam], shards: ShardBuffer
    ) -> dict[ShardedParam, Tensor]:
        """See `ShardFormat`."""
        return {params[0].sharded_param: shards.pieces[0]}
