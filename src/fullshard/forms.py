"""How the parameters of a group rest: by which layout they are divided, and which faces they show.

    RowForm     per row, a DTensor each                                        fully_shard, replicate
    FlatForm    flat, the parameters the user made, each over a flat piece     wrapper, use_orig_params=True
                flat, one `FlatParameter` for all                              wrapper, use_orig_params=False

A door chooses the form; the engine asks it and knows nothing else about doors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from .buffers import ShardBuffer
from .faces import (
    DTensorFace,
    ParallelPieceFace,
    ParamOwner,
    PieceFace,
    ShardedFace,
)
from .flat_parameter import FlatFace
from .layout import Layout, contiguous_strides, flat_layout, has_no_gaps, per_row_layout
from .param import FSDPParam


class Form(ABC):
    """How one group's parameters rest."""

    by_segment = False
    """Whether one face stands for all parameters of a segment."""

    @abstractmethod
    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """How to divide the parameters over so many ranks."""

    @abstractmethod
    def make_faces(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """Give every parameter its face, over what this rank holds of it; ``group`` is the group's name."""

    def homes(self, params: Sequence[FSDPParam], shards: ShardBuffer) -> dict[ShardedFace, Tensor]:
        """The memory that every face stands for."""
        return {param.face: local for param, local in zip(params, shards.locals, strict=True)}


class RowForm(Form):
    """Every parameter is divided along one of its dimensions, and is a DTensor."""

    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """See `Form`."""
        shapes, dims = [param.shape for param in params], [param.shard_dim for param in params]
        return per_row_layout(shapes, world=ranks, dims=dims)

    def make_faces(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `Form`."""
        for param, local in zip(params, locals_, strict=True):
            face = DTensorFace(
                param.name, param.owners, param.the_original, param.placement, local, group
            )
            param.rest_as(face)


class FlatForm(Form):
    """The parameters one after the other are one array, divided evenly; each keeps a face of its own.

    Frozen and trainable parameters are arrays of their own, so that only what has gradients is
    reduced; so are those of different dtypes.
    """

    def __init__(self, *, alignment: int) -> None:
        """Let every parameter begin at a multiple of ``alignment`` elements."""
        self._alignment = alignment

    def layout(self, params: Sequence[FSDPParam], ranks: int) -> Layout:
        """See `Form`."""
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

    def make_faces(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `Form`."""
        for param, slot, local in zip(params, layout.slots, locals_, strict=True):
            # What a single rank holds keeps its shape.
            shown = local.as_strided(slot.shape, slot.strides) if layout.world == 1 else local
            name, owners, original = param.name, param.owners, param.the_original
            param.rest_as(
                ParallelPieceFace(name, owners, original, param.placement, shown, group)
                if param.placement.parallel
                else PieceFace(name, owners, original, shown, group)
            )


class FlatParameterForm(FlatForm):
    """The same, but one `FlatParameter` stands for all."""

    by_segment = True

    def __init__(self, home: ParamOwner) -> None:
        """Register the `FlatParameter` at ``home``."""
        super().__init__(alignment=1)
        self._home = home

    def make_faces(
        self, params: Sequence[FSDPParam], locals_: Sequence[Tensor], layout: Layout, group: str
    ) -> None:
        """See `Form`."""
        assert len(layout.segments) == 1, "a FlatParameter is of one dtype, and frozen or not"
        piece = locals_[0].as_strided((layout.segments[0].piece_numel,), (1,), 0)
        members = [
            (param.name, param.owners, param.the_original, param.placement) for param in params
        ]
        face = FlatFace(self._home.name, self._home, members, piece, group)
        for param in params:
            param.rest_as(face)

    def homes(self, params: Sequence[FSDPParam], shards: ShardBuffer) -> dict[ShardedFace, Tensor]:
        """See `Form`."""
        return {params[0].face: shards.pieces[0]}
