"""Gradients that a backward without synchronisation left: they wait, whole, for a backward that reduces.

    add           keep a backward's gradients, or add them to those that wait
    take          all that wait, to be reduced
    clear, drop   zero_grad was called for some parameters; or a step has failed

They are in the reduce dtype, or the dtype they came in if that is the same, and only the compute stream
touches their memory.

[Note: who sees unreduced gradients]
Parameters that rest as pieces (`PlainShardedParam`) show them in `.grad`, whole, as torch's FSDP1 does. So `.grad`
is the truth, and what users do to it counts: clear it, clip it, step with it where nothing is sharded. A
reduced gradient that was in `.grad` before is put aside, and comes back with the next reduction, unless
`.grad` was cleared; where nothing is sharded, it is one more gradient to average.

Of DTensors, `.grad` shows reduced gradients only, as in torch's FSDP2. Clearing what is None leaves no
trace, so `zero_grad` of optimizers and of modules is observed (`process_hooks`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fullshard.plan.layout import Layout
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import PlainShardedParam


class UnreducedGradients:
    """What waits of one group's gradients."""

    def __init__(self, params: Sequence[FSDPParam], layout: Layout) -> None:
        """Of parameters that have faces by the time there are gradients; ``layout`` is of all of them."""
        self._params = params
        self._layout = layout
        self._hidden: dict[int, Tensor] = {}
        """By index of the parameter, what `.grad` does not show."""
        self._shown: dict[PlainShardedParam, tuple[int, ...]] = {}
        """Faces whose `.grad` is unreduced, or was until somebody cleared it; and the parameters they stand for."""

    def __bool__(self) -> bool:
        return bool(self._hidden or self._shown)

    @property
    def nbytes(self) -> int:
        """Bytes of what waits."""
        found = (sharded_param.param.grad for sharded_param in self._shown)
        return sum(t.nbytes for t in (*self._hidden.values(), *found) if t is not None)

    def sharded_names(self, wanted: Collection[int] | None = None) -> list[str]:
        """Names of sharded parameters whose `.grad` is an unreduced gradient of the whole; the same on all ranks.

        Of all, or of those whose ids are ``wanted``.
        """
        return [
            sharded_param.name
            for sharded_param in self._shown
            if self._layout.world > 1
            and (wanted is None or id(sharded_param.param) in wanted)
            and sharded_param.unreduced is not None
        ]

    # --- add --------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, gradients: dict[int, Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Keep whole gradients, by index of the parameter, in ``dtypes``; those that wait are added to."""
        if not gradients:
            return
        if not isinstance(self._params[0].sharded_param, PlainShardedParam):
            _add_to(self._hidden, gradients, dtypes)
            return
        for sharded_param, members in self._members_of(gradients):
            theirs = {index: gradients[index] for index in members if index in gradients}
            waiting = self._read(sharded_param, members) if sharded_param in self._shown else {}
            if waiting:
                _add_to(waiting, theirs, dtypes)
            else:
                sharded_param.show_unreduced(self._whole(sharded_param, members, theirs, dtypes))
                self._shown[sharded_param] = members

    def _members_of(
        self, gradients: dict[int, Tensor]
    ) -> list[tuple[PlainShardedParam, tuple[int, ...]]]:
        """Faces of parameters that have gradients, each with all parameters it stands for."""
        members: dict[PlainShardedParam, list[int]] = {}
        for index, param in enumerate(self._params):
            assert isinstance(param.sharded_param, PlainShardedParam), (
                "the faces of a group are of one kind"
            )
            members.setdefault(param.sharded_param, []).append(index)
        return [
            (sharded_param, tuple(theirs))
            for sharded_param, theirs in members.items()
            if any(index in gradients for index in theirs)
        ]

    def _whole(
        self,
        sharded_param: PlainShardedParam,
        members: Sequence[int],
        gradients: dict[int, Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> Tensor:
        """One gradient for a face that shows none yet; zero where parameters have none."""
        if not sharded_param.stands_for_several:
            whole = _in_dtype(gradients, dtypes)[members[0]]
        else:
            example = next(iter(gradients.values()))
            whole = example.new_zeros(self._numel(members), dtype=dtypes[members[0]])
            _copy(self._cut(whole, members), gradients)
        before = sharded_param.param.grad
        if self._layout.world == 1 and before is not None:
            # The same on all ranks, as is its average. Adding takes the wider of the dtypes.
            whole = before.to(whole.device) + whole
            sharded_param.clear_gradient(set_to_none=True)
        return whole

    def _numel(self, members: Sequence[int]) -> int:
        last = self._layout.slots[members[-1]]
        return last.start + last.numel

    def _cut(self, whole: Tensor, members: Sequence[int]) -> dict[int, Tensor]:
        """The parts of a gradient that belong to the parameters a face stands for."""
        slots, begin = self._layout.slots, whole.storage_offset()
        return {
            index: whole.as_strided(
                slots[index].shape, slots[index].strides, begin + slots[index].start
            )
            for index in members
        }

    def _read(self, sharded_param: PlainShardedParam, members: Sequence[int]) -> dict[int, Tensor]:
        """What a face shows, by parameter; nothing if it was cleared, or something else was assigned."""
        whole = sharded_param.unreduced
        if whole is None:
            return {}
        return (
            self._cut(whole, members) if sharded_param.stands_for_several else {members[0]: whole}
        )

    # --- take -------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """All that wait, with ``gradients`` added; nothing waits any longer, and `.grad` shows what is reduced."""
        if not self:
            return gradients
        waiting, self._hidden = self._hidden, {}
        for sharded_param, members in self._shown.items():
            waiting.update(self._read(sharded_param, members))
            sharded_param.show_reduced()
        self._shown.clear()
        dtypes = {index: gradient.dtype for index, gradient in gradients.items()}
        _add_to(waiting, gradients, dtypes)
        return waiting

    # --- clear and drop ---------------------------------------------------------------------------

    def clear(self, indices: Sequence[int]) -> None:
        """Somebody has cleared the gradients of these parameters; `.grad` he has cleared himself."""
        for index in indices:
            self._hidden.pop(index, None)
            sharded_param = self._params[index].sharded_param
            if isinstance(sharded_param, PlainShardedParam):
                sharded_param.forget_reduced()

    def drop(self) -> None:
        """Forget all that waits; reduced gradients stay."""
        self._hidden.clear()
        for sharded_param in self._shown:
            sharded_param.show_reduced()
        self._shown.clear()


def _add_to(
    waiting: dict[int, Tensor],
    gradients: dict[int, Tensor],
    dtypes: Sequence[torch.dtype] | dict[int, torch.dtype],
) -> None:
    """Add gradients to those that wait; keep others, in ``dtypes``."""
    again = [index for index in gradients if index in waiting]
    if again:
        torch._foreach_add_([waiting[i] for i in again], [gradients[i] for i in again])
    if len(again) < len(gradients):
        first = {i: each for i, each in gradients.items() if i not in waiting}
        waiting.update(_in_dtype(first, dtypes))


def _in_dtype(
    gradients: dict[int, Tensor], dtypes: Sequence[torch.dtype] | dict[int, torch.dtype]
) -> dict[int, Tensor]:
    """Gradients in ``dtypes``: themselves, if autograd has let go of them, or copies."""
    cast = {i: g for i, g in gradients.items() if g.dtype != dtypes[i] or g.requires_grad}
    if not cast:
        return gradients
    copies = {
        index: torch.empty_like(g, dtype=dtypes[index], requires_grad=False)
        for index, g in cast.items()
    }
    _copy(copies, cast)
    return {**gradients, **copies}


def _copy(targets: dict[int, Tensor], sources: dict[int, Tensor]) -> None:
    torch._foreach_copy_([targets[index] for index in sources], list(sources.values()))
