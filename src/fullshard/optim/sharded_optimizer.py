"""An optimizer that updates plain shard memory instead of one DTensor after the other.

    optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-4)

To its users it is an ordinary optimizer of the sharded parameters. Inside, an optimizer of the user's class updates
`FusedShard`s. The state is in one of two forms:

    fused       in the inner optimizer, one tensor per fused shard: what `step` needs
    per param   in `state`, views of the same memory: what users and `state_dict` see

Asking for `state` splits it. A user may have changed it then, so the next step fuses it again.

With ``shard_over_replicas`` the inner optimizer has `ReplicaPart`s in the place of fused shards, and asking for `state`
gathers it over the replicas. A step:

    1. update   bucket k, the part of this replica     bucket k - 1 is on its way
    2. gather   bucket k over the replicas
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError, LifecycleError, UsageError
from fullshard.optim.fused_shards import (
    FusedShard,
    check_shards,
    kind_of_gradient,
    kind_of_state,
    plan_fused_shards,
)
from fullshard.optim.replica_messages import check_bucket
from fullshard.optim.replica_parts import Bucket, ReplicaPart, ReplicaParts
from fullshard.transport.streams import is_capturing

__all__ = ["ShardedOptimizer"]

_OWN = ("params", "param_names")
"""Entries of a parameter group that differ between this optimizer and the inner one."""


class ShardedOptimizer(torch_border.DelegatingOptimizer):
    """An optimizer of sharded parameters that updates their memory in as few tensors as possible.

    Use it in the place of ``optimizer_class``, with its options. Hyper-parameters are in `param_groups`, as schedulers
    expect. `state` and state dicts are those of ``optimizer_class`` over the same parameters: each loads the other's.

    Parameters of one group of `fully_shard`, or of a wrapper with ``use_orig_params=True``, are updated together if
    they are neighbours there, are in the same parameter group here and have gradients in the same steps. Parameters
    that are not sharded are allowed.
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        params: Iterable[Any],
        *,
        elementwise: bool = False,
        shard_over_replicas: bool = False,
        bucket_numel: int = 1 << 24,
        **options: Any,
    ) -> None:
        """Optimize sharded parameters.

        Args:
            optimizer_class: The class that computes updates: SGD, Adam, AdamW or another one of torch's that treats
                each element for itself.
            params: Parameters, named parameters or groups of them, as for any optimizer.
            elementwise: A promise about an ``optimizer_class`` that is not torch's: an element's update depends on this
                element, its gradient and its state only, and states are numbers or tensors like the parameter.
            shard_over_replicas: Whether replicas (of HSDP, or `replicate`) divide the state among them. Each updates its
                part of the shards, and gets the other parts from the others. Reading `state`, `state_dict` and
                `add_param_group` are collective then. Parameters without replicas are updated as usual.
            bucket_numel: With ``shard_over_replicas``, how many elements of a shard are gathered in one message.
            options: Options of ``optimizer_class``.
        """
        _check_class(optimizer_class, elementwise)
        check_bucket(bucket_numel)
        self._fused_shards: list[FusedShard | ReplicaPart] = []
        self._bucket_numel = bucket_numel if shard_over_replicas else None
        self._replicas: ReplicaParts | None = None
        self._turns: list[tuple[Bucket | None, list[list[Tensor]]]] = []
        self._complete = False
        _check_options(options)
        super().__init__(params, {})
        check_shards(self._group_numbers())
        self.inner = optimizer_class(self._plan_groups({}), **options)
        self.defaults = self.inner.defaults
        self._complete = True
        self._is_split = False  # some classes build their state in the constructor
        self._after_inner()

    # --- fusing -----------------------------------------------------------------------------------

    def _plan_groups(self, state: Mapping[Any, Any]) -> list[dict[str, Any]]:
        """Plan the fused shards of the parameters as they are now, and return the inner optimizer's groups.

        Each group has two inner ones: plain tensors, and DTensors that are in no fused shard. Optimizers use operators
        on lists of tensors for all of a group, and these operators do not mix the two.
        """
        numbers = self._group_numbers()
        if self._bucket_numel is not None and not self._parts_fit(numbers):
            planned = ReplicaParts(numbers, self._bucket_numel)
            self._replicas = planned if planned.buckets else None
        in_parts = set() if self._replicas is None else self._replicas.params
        kinds = {
            param: (index, kind_of_gradient(param), kind_of_state(param, state.get(param)))
            for param, index in numbers.items()
            if param not in in_parts
        }
        self._fused_shards = [*self._parts, *plan_fused_shards(kinds)]
        self._planned_ids = self._ids()
        shard_of = {param: fused for fused in self._fused_shards for param in fused.params}
        groups = []
        for outer in self.param_groups:
            tensors = dict.fromkeys(
                shard_of[param].tensor if param in shard_of else param
                for param in outer["params"]
                if param in shard_of or param not in in_parts  # other replicas may own all of it
            )
            for of_dtensors in (False, True):
                params = [t for t in tensors if isinstance(t, DTensor) is of_dtensors]
                groups.append({**_options(outer), "params": params})
        self._turns = [] if self._replicas is None else _turns(groups, self._replicas.buckets)
        return groups

    def _group_numbers(self) -> dict[nn.Parameter, int]:
        return {
            param: index
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
        }

    def _parts_fit(self, numbers: Mapping[nn.Parameter, int]) -> bool:
        return self._replicas is not None and self._replicas.fits(numbers)

    @torch.no_grad()
    def _fuse(self) -> None:
        """Give the inner optimizer the state per parameter, fused over the shard memory as it is now."""
        if is_capturing():
            raise UsageError(
                "The first step of a ShardedOptimizer, and the first one after its state was read or its groups were changed, "
                "cannot be captured in a CUDA graph: its tensors are laid out anew. Run a step without capture before."
            )
        check_shards(self._group_numbers())
        kept: dict[Any, Any] = {}
        if not self._is_split and self._parts_fit(self._group_numbers()):
            # No replica needs another one for this: gradients decide about it, and they may differ between ranks.
            state, own = self._split_inner()
            kept = {
                part.tensor: own[part.params[0]] for part in self._parts if part.params[0] in own
            }
        else:
            state = dict(self.state)
        before = {
            tuple(map(id, each.params)): self.inner.state.get(each.tensor)
            for each in self._fused_shards
        }
        self.inner.param_groups = self._plan_groups(state)
        inner_state: defaultdict[Any, Any] = defaultdict(dict)
        for fused in self._fused_shards:
            states = [state.pop(param) for param in fused.params if param in state]
            if states:
                inner_state[fused.tensor] = _in_place(
                    fused.fuse_states(states), before.get(tuple(map(id, fused.params)))
                )
        if self._replicas is not None:
            for param in self._replicas.params:
                state.pop(param, None)  # other replicas own all of it
            self._per_param.clear()  # not views, but memory of all replicas' parts
        # The remaining states belong to parameters in no fused shard, or to no parameter.
        inner_state.update(state)
        inner_state.update(kept)
        self.inner.state = inner_state
        self._is_split = False

    @property
    def _parts(self) -> list[ReplicaPart]:
        return [] if self._replicas is None else self._replicas.parts

    def fuse_state(self) -> None:
        """Take over the user's changes of `state`: an ordinary step would do it, but a replayed graph does not."""
        if self._is_split:
            self._fuse()

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of each parameter, sharded as the parameter is, without a copy.

        Writing to its tensors takes effect at once, every other change with the next step. With ``shard_over_replicas``
        it is a copy that is gathered over the replicas, so all of them must read it; it takes the memory of the usual
        state until the next step or `state_dict`, and all changes take effect with the next step.
        """
        if not self._is_split:
            self._split()
        return self._per_param

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        self._per_param = state
        self._is_split = True

    def _split_inner(self) -> tuple[dict[Any, Any], dict[nn.Parameter, Any]]:
        """Return the inner optimizer's state: views by parameter, and the states of this replica's parts."""
        inner = dict(self.inner.state)
        states: dict[Any, Any] = {}
        own: dict[nn.Parameter, Any] = {}
        for fused in self._fused_shards:
            if fused.tensor not in inner:
                continue
            state = inner.pop(fused.tensor)
            if isinstance(fused, ReplicaPart):
                own[fused.params[0]] = state
            else:
                states.update(zip(fused.params, fused.split_state(state), strict=True))
        return {**states, **inner}, own

    def _split(self) -> None:
        """Fill `state` with views of the inner optimizer's state, or with what replicas gather of it."""
        states, own = self._split_inner()
        if self._replicas is not None:
            states.update(self._replicas.whole_states(own))
        self._per_param.clear()
        for group in self.param_groups:  # in the order of other optimizers
            for param in group["params"]:
                if param in states:
                    self._per_param[param] = states.pop(param)
        self._per_param.update(states)
        self._is_split = True

    @property
    def shards_over_replicas(self) -> bool:
        """Whether replicas divide the state of some parameters among them, and so gather shards in `step`."""
        return self._replicas is not None

    def states_to_save(self) -> Mapping[Any, Any]:
        """Return the content of `state`. With ``shard_over_replicas`` it is gathered into host memory. Collective then."""
        if self._replicas is None or self._is_split:
            return self.state
        states, own = self._split_inner()
        return {**states, **self._replicas.whole_states(own, on_host=True)}

    def replace_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Let parameters have these states, and no others. Elements may be in host memory with ``shard_over_replicas``."""
        before = self._per_param if self._is_split else self._split_inner()[0]
        params = self._group_numbers()
        foreign = {key: value for key, value in before.items() if key not in params}
        self._per_param.clear()
        self._per_param.update({**foreign, **states})
        self._is_split = True
        self._fuse()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, which is that of the usual optimizer. With ``shard_over_replicas`` collective."""
        found = super().state_dict()
        if self._replicas is not None:
            self.fuse_state()  # releases what was gathered
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` has loaded."""
        self.param_groups = state["param_groups"]
        self.state = state["state"]
        self._fuse()
        # The class may convert what its older versions have written.
        self.inner.__setstate__(
            {"state": self.inner.state, "param_groups": self.inner.param_groups}
        )
        self._after_inner()

    def __getstate__(self) -> NoReturn:
        raise LifecycleError(
            "A ShardedOptimizer cannot be copied or pickled, because it updates the memory of its parameters. Build another "
            "one, and use state_dict and load_state_dict."
        )

    # --- steps ------------------------------------------------------------------------------------

    @torch_border.opaque_to_compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; call ``closure`` first, if given, to compute them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Users may also change the groups' lists of parameters.
        as_planned = (
            not self._is_split
            and self._planned_ids == self._ids()
            and (self._replicas is None or self._replicas.is_in_place())
        )
        if not as_planned or not self._take_gradients():
            self._fuse()
            taken = self._take_gradients()
            assert taken, "a new plan fuses only parameters whose gradients fit together"
        self._before_inner()
        try:
            if self._replicas is None:
                self.step_inner()
            else:
                self._step_over_replicas()
        finally:
            self._after_inner()
        return loss

    def _step_over_replicas(self) -> None:
        """Update this replica's parts bucket by bucket, and gather each while the next one is updated.

        All replicas gather the same buckets in the same order, also if one has no gradients in it.
        """
        groups = self.inner.param_groups
        # Other classes may count their steps, so they take one.
        in_turns = type(self.inner) in torch_border.ELEMENTWISE
        if not in_turns:
            self.step_inner()
        on_its_way: Bucket | None = None
        written: list[nn.Parameter] = []
        try:
            for bucket, params in self._turns:
                if bucket is not None and not bucket.is_trained:
                    continue
                if in_turns:
                    self._step_some(groups, params)
                if bucket is not None:
                    bucket.start()
                    written += bucket.params
                if on_its_way is not None:
                    on_its_way.land()
                on_its_way = bucket
            if on_its_way is not None:
                on_its_way.land()
        finally:
            self.inner.param_groups = groups
        torch.autograd.graph.increment_version(written)

    def _step_some(self, groups: Sequence[dict[str, Any]], params: Sequence[list[Tensor]]) -> None:
        """Let the inner optimizer update some tensors, given for each of its groups."""
        self.inner.param_groups = [
            {**group, "params": some} for group, some in zip(groups, params, strict=True) if some
        ]
        if self.inner.param_groups:
            self.step_inner()

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _take_gradients(self) -> bool:
        return all(fused.take_gradients() for fused in self._fused_shards)

    def _before_inner(self) -> None:
        """Give the inner optimizer the hyper-parameters that users may have changed."""
        for index, inner in enumerate(self.inner.param_groups):
            inner.update(_options(self.param_groups[index // 2]))

    def _after_inner(self) -> None:
        """Take back hyper-parameters, and count the writes to parameters."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups[::2], strict=True):
            outer.update(_options(inner))
        updated = [fused for fused in self._fused_shards if fused.has_gradient]
        # Autograd does not know that writes to a fused shard are writes to its parameters, and fused kernels do not
        # count their writes at all.
        torch.autograd.graph.increment_version(
            [param for fused in updated for param in fused.params]
        )
        for fused in updated:
            fused.drop_gradient()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options."""
        _check_options(param_group)
        super().add_param_group(param_group)
        if self._complete:
            self._fuse()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group without its parameters."""
    return {key: value for key, value in group.items() if key not in _OWN}


def _turns(
    groups: Sequence[Mapping[str, Any]], buckets: Sequence[Bucket]
) -> list[tuple[Bucket | None, list[list[Tensor]]]]:
    """Return tensors in the order of updates: those of no bucket by group, then those of each bucket.

    So torch's refusals, as of a sparse gradient of a parameter that is not sharded, come before the first gather.
    """
    number_of = {
        id(part.tensor): number for number, each in enumerate(buckets, 1) for part in each.parts
    }
    turns: list[tuple[Bucket | None, list[list[Tensor]]]] = [
        (bucket, [[] for _ in groups]) for bucket in (None, *buckets)
    ]
    for index, group in enumerate(groups):
        for tensor in group["params"]:
            turns[number_of.get(id(tensor), 0)][1][index].append(tensor)
    return turns


def _in_place(state: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state with its numbers where those ``before`` are: a captured CUDA graph counts its steps there."""
    for key, value in state.items():
        old = None if before is None else before.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and not (old.ndim or value.ndim):
            if (old.dtype, old.device) == (value.dtype, value.device):
                state[key] = old.copy_(value)
    return state


def _check_class(optimizer_class: type[optim.Optimizer], elementwise: bool) -> None:
    if elementwise or optimizer_class in torch_border.ELEMENTWISE:
        return
    if getattr(optimizer_class, "takes_pieces", False):
        raise ConfigurationError(
            f"{optimizer_class.__name__} updates shards by itself, and not each element for itself. Use it without "
            "ShardedOptimizer; AdamW8bit has its own shard_over_replicas=True."
        )
    known = ", ".join(sorted(each.__name__ for each in torch_border.ELEMENTWISE))
    raise ConfigurationError(
        "ShardedOptimizer updates many parameters as one tensor, so each element's update must depend on this element "
        f"only. This is known of torch's {known}, but not of {optimizer_class!r}. If it is true of this class, pass "
        "elementwise=True. Otherwise use the class itself, on parameters that are not sharded (docs/optimizers.md)."
    )


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("differentiable"):
        raise ConfigurationError(
            "ShardedOptimizer takes no differentiable=True, because autograd does not see its writes to the memory of the "
            "parameters. Use the optimizer itself on model.parameters()."
        )
