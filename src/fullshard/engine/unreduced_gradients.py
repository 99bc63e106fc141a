"""Gradients of one group that wait for a later reduction; used only where gradients are accumulated.

    add           keep a backward's unsharded gradients, or add them to those that wait
    take          return all that wait, to be reduced
    partial       reduce-scatter outputs that are not summed over replicas yet
    clear, drop   zero_grad was called for some parameters; or a step has failed
    set_active_fraction   gradients of more or fewer ranks count from now on

Unsharded gradients that `.grad` does not show are in the reduce dtype, as in torch's FSDP2. Those that it shows are in the
dtype they came in, the compute dtype, as in torch's FSDP1. Only the compute stream touches their memory. Partial sums are
the reduction's: only the stream of the all-reduce touches them.

[Note: who sees unreduced gradients]
Parameters that rest as plain tensors (`PlainShardedParam`) show them in `.grad`, unsharded, as torch's FSDP1 does. So
`.grad` is the truth, and what users do to it counts: clear it, clip it, step with it where nothing is sharded. A
reduced gradient that was in `.grad` before is put aside, and comes back with the next reduction, unless
`.grad` was cleared; where nothing is sharded, it is one more gradient to average.

Of DTensors, `.grad` shows reduced gradients only, as in torch's FSDP2. Clearing what is None leaves no
trace, so `zero_grad` of optimizers and of modules is observed (`process_hooks`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from fullshard.layout.segments import Layout
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import PlainShardedParam
from fullshard.transport.streams import FSDPCommContext


class UnreducedGradients:
    """One group's gradients that wait for a later reduction; lives as long as the group."""

    def __init__(self, params: Sequence[FSDPParam], layout: Layout) -> None:
        """Begin with none.

        Args:
            params: The group's parameters, which are sharded by the time there are gradients.
            layout: The layout of all of them.
        """
        self._params = params
        self._layout = layout
        self._context: FSDPCommContext
        self._hidden: dict[int, Tensor] = {}
        """Gradients that `.grad` does not show, by index of the parameter."""
        self._shown: dict[PlainShardedParam, tuple[int, ...]] = {}
        """Sharded parameters whose `.grad` is unreduced, or was until it was cleared, each with the indices of
        the parameters it stands for."""
        self.held = False
        """Whether unsharded gradients wait; a plain attribute, since every backward asks."""
        self.partial: dict[int, Tensor] = {}
        """This rank's reduce-scatter outputs that wait to be summed over replicas, by index of the parameter."""
        self._active_fraction = 1.0
        """Divisor of the next reduction besides the number of ranks: see `ReduceSettings`."""

    def connect(self, context: FSDPCommContext) -> None:
        """Join a model's streams."""
        self._context = context

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded gradients that wait."""
        found = (sharded_param.param.grad for sharded_param in self._shown)
        return sum(t.nbytes for t in (*self._hidden.values(), *found) if t is not None)

    def sharded_names(self, wanted: Collection[int] | None = None) -> list[str]:
        """Return names of sharded parameters whose `.grad` is an unreduced, unsharded gradient; equal on all ranks.

        Of all sharded parameters, or of those whose ids are ``wanted``.
        """
        return [
            sharded_param.name
            for sharded_param in self._shown
            if self._layout.world > 1
            and (wanted is None or id(sharded_param.param) in wanted)
            and sharded_param.unreduced is not None
        ]

    def changed(self) -> None:
        """Note whether gradients wait now; called after every change."""
        self.held = bool(self._hidden or self._shown)
        if self.held or self.partial:
            _WAITING[id(self)] = self
        else:
            _WAITING.pop(id(self), None)
        if self._context.observer is not None:
            self._context.observer.memory_of_reductions(self, self.nbytes)

    # --- add --------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, gradients: dict[int, Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Keep unsharded gradients, by index of the parameter, in ``dtypes`` unless `.grad` shows them; add to those that wait."""
        if not gradients:
            return
        if not isinstance(self._params[0].sharded_param, PlainShardedParam):
            _add_to(self._hidden, gradients, dtypes)
        else:
            self._add_shown(gradients)
        self.changed()

    def place_for(self, index: int, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """Return memory for a parameter's gradient, and whether it has one, to which others are to be added.

        None for a parameter whose `.grad` will show the gradient. The caller fills new memory at once, on the compute
        stream.
        """
        if isinstance(self._params[index].sharded_param, PlainShardedParam):
            return None
        place = self._hidden.get(index)
        if place is not None:
            return place, True
        param = self._params[index]
        assert param.unsharded_param is not None, "it has a gradient"
        place = torch.empty(param.shape, dtype=dtype, device=param.unsharded_param.device)
        self._hidden[index] = place
        self.changed()
        return place, False

    def waits(self, index: int) -> bool:
        """Return whether a gradient of a parameter waits that `.grad` does not show."""
        return index in self._hidden

    def _add_shown(self, gradients: dict[int, Tensor]) -> None:
        for sharded_param, members in self._members_of(gradients):
            theirs = {index: gradients[index] for index in members if index in gradients}
            waiting = self._read(sharded_param, members) if sharded_param in self._shown else {}
            if waiting:
                # These are `.grad` itself, or views of it, so adding to them changes what users see. Parameters
                # without a gradient so far have zeros there.
                _add_to(waiting, theirs)
            else:
                unsharded = self._unsharded(sharded_param, members, theirs)
                sharded_param.show_unreduced(unsharded)
                self._shown[sharded_param] = members

    def _members_of(
        self, gradients: dict[int, Tensor]
    ) -> list[tuple[PlainShardedParam, tuple[int, ...]]]:
        """Return sharded parameters that have gradients, each with the indices of those it stands for."""
        members: dict[PlainShardedParam, list[int]] = {}
        for index, param in enumerate(self._params):
            assert isinstance(param.sharded_param, PlainShardedParam), (
                "the sharded parameters of a group are of one kind"
            )
            members.setdefault(param.sharded_param, []).append(index)
        return [
            (sharded_param, tuple(theirs))
            for sharded_param, theirs in members.items()
            if any(index in gradients for index in theirs)
        ]

    def _unsharded(
        self,
        sharded_param: PlainShardedParam,
        members: Sequence[int],
        gradients: dict[int, Tensor],
    ) -> Tensor:
        """Return one gradient for a sharded parameter that shows none yet; zero where parameters have none."""
        if not sharded_param.stands_for_several:
            unsharded = _in_dtype(gradients, _dtypes_of(gradients))[members[0]]
        else:
            unsharded = next(iter(gradients.values())).new_zeros(self._numel(members))
            _copy(self._views(unsharded, members), gradients)
        before = sharded_param.param.grad
        if self._layout.world == 1 and before is not None:
            # The reduced gradient is equal on all ranks, so it is its own average and may be averaged
            # once more with the sum. Adding takes the wider of the dtypes. It counts on all ranks, active or not.
            before = before.to(unsharded.device)
            unsharded = unsharded.add(before, alpha=self._active_fraction)
            sharded_param.clear_gradient(set_to_none=True)
        return unsharded

    def _numel(self, members: Sequence[int]) -> int:
        last = self._layout.slots[members[-1]]
        return last.start + last.numel

    def _views(self, unsharded: Tensor, members: Sequence[int]) -> dict[int, Tensor]:
        """Return views of a gradient for the parameters that a sharded parameter stands for."""
        slots, begin = self._layout.slots, unsharded.storage_offset()
        return {
            index: unsharded.as_strided(
                slots[index].shape, slots[index].strides, begin + slots[index].start
            )
            for index in members
        }

    def _read(self, sharded_param: PlainShardedParam, members: Sequence[int]) -> dict[int, Tensor]:
        """Return the gradients that `.grad` shows, by parameter; none if it was cleared, or something else was assigned."""
        unsharded = sharded_param.unreduced
        if unsharded is None:
            return {}
        if not sharded_param.stands_for_several:
            return {members[0]: unsharded}
        return self._views(unsharded, members)

    # --- partial sums ------------------------------------------------------------------------------

    def keep_partial(self, params: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Keep reduce-scatter outputs, or add them to those that wait; on the stream of the all-reduce."""
        for param, local in zip(params, sums, strict=True):
            if param in self.partial:
                self.partial[param].add_(local)
            else:
                self.partial[param] = local
        self.changed()

    def add_partial_to(self, params: Sequence[int], sums: Sequence[Tensor]) -> list[Tensor]:
        """Add those that wait to reduce-scatter outputs, on the stream of the all-reduce, and return them: it reads them."""
        found = [(self.partial.pop(i, None), local) for i, local in zip(params, sums, strict=True)]
        for kept, local in found:
            if kept is not None:
                local.add_(kept)
        return [kept for kept, _ in found if kept is not None]

    # --- other ranks count --------------------------------------------------------------------------

    @torch.no_grad()
    def set_active_fraction(self, fraction: float) -> None:
        """Scale the gradients that wait, since the next reduction divides by ``fraction`` of the ranks; between backwards."""
        ratio, self._active_fraction = fraction / self._active_fraction, fraction
        if ratio == 1:
            return
        waiting = list(self._hidden.values())
        for sharded_param in self._shown:
            if sharded_param.unreduced is not None:
                waiting.append(sharded_param.unreduced)
        if waiting:
            torch._foreach_mul_(waiting, ratio)
        if self.partial:
            with self._context.all_reduce:  # whose stream alone touches them
                torch._foreach_mul_(list(self.partial.values()), ratio)

    # --- take -------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return all that wait, with ``gradients`` added; none wait afterwards, and `.grad` shows reduced gradients."""
        waiting, self._hidden = self._hidden, {}
        for sharded_param, members in self._shown.items():
            waiting.update(self._read(sharded_param, members))
            sharded_param.show_reduced()
        self._shown.clear()
        # A parameter that has no gradient from before is not cast here, but when the reduce buffer is filled.
        _add_to(waiting, gradients)
        self.changed()
        return waiting

    # --- clear and drop ---------------------------------------------------------------------------

    def clear(self, cleared: Collection[int]) -> None:
        """Forget waiting gradients of parameters whose gradients were cleared; ``cleared`` has the parameters' ids.

        For those that `.grad` shows, the code that cleared it has done the rest.
        """
        indices = [
            index
            for index, param in enumerate(self._params)
            if id(param.sharded_param.param) in cleared or id(param.unsharded_param) in cleared
        ]
        for index in indices:
            self._hidden.pop(index, None)
            sharded_param = self._params[index].sharded_param
            if isinstance(sharded_param, PlainShardedParam):
                sharded_param.forget_reduced()
            if index in self.partial:
                # A reduction in flight may be adding to it on another stream.
                self._context.keep_until_joined(self.partial.pop(index))
        if indices:
            self.changed()

    def drop(self) -> None:
        """Forget all that waits, when no reduction is in flight; reduced gradients stay."""
        self._hidden.clear()
        for sharded_param in self._shown:
            sharded_param.show_reduced()
        self._shown.clear()
        self.partial.clear()
        self.changed()


_WAITING: weakref.WeakValueDictionary[int, UnreducedGradients] = weakref.WeakValueDictionary()
"""All instances that are not empty, by their ids; usually none. Other threads may add theirs at any time."""


def _waiting() -> list[UnreducedGradients]:
    found = (reference() for reference in _WAITING.valuerefs())
    return [waiting for waiting in found if waiting is not None]


def gradients_were_cleared(params: Callable[[], Iterable[Tensor]]) -> None:
    """Forget waiting gradients of parameters: ``zero_grad`` was called for them."""
    if _WAITING:
        cleared = {id(param) for param in params()}
        for waiting in _waiting():
            waiting.clear(cleared)


def not_to_be_updated(params: Callable[[], Iterable[Tensor]]) -> list[str]:
    """Return names of parameters that no optimizer can update now: see `UnreducedGradients.sharded_names`."""
    if not _WAITING:
        return []
    wanted = {id(param) for param in params()}
    return [name for waiting in _waiting() for name in waiting.sharded_names(wanted)]


def _add_to(
    waiting: dict[int, Tensor],
    gradients: dict[int, Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Add gradients to those that wait; keep others, in ``dtypes`` or as they are."""
    again = [index for index in gradients if index in waiting]
    if again:
        torch._foreach_add_([waiting[i] for i in again], [gradients[i] for i in again])
    if len(again) < len(gradients):
        first = {i: each for i, each in gradients.items() if i not in waiting}
        waiting.update(_in_dtype(first, dtypes or _dtypes_of(first)))


def _dtypes_of(gradients: dict[int, Tensor]) -> dict[int, torch.dtype]:
    return {index: gradient.dtype for index, gradient in gradients.items()}


def _in_dtype(
    gradients: dict[int, Tensor], dtypes: Sequence[torch.dtype] | dict[int, torch.dtype]
) -> dict[int, Tensor]:
    """Return gradients in ``dtypes``: themselves, if they are and autograd does not use them, or copies."""
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
