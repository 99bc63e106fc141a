"""Optimizers that work on plain shard memory instead of one DTensor after the other.

    optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-4)

To its users it is an optimizer of the sharded parameters, as any. Inside, an optimizer of the user's
class updates `shard_runs.Run`s. Between steps, users may ask for the state, and it is shown for each
parameter; whoever has looked at it may also have changed it, so the next step reads it back:

    step, load_state_dict    state lies in the inner optimizer, a tensor per run     <- arrange
    state, state_dict        ... is shown per parameter: views of the same memory    <- show
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.optim.fused_shards import (
    FusedShard,
    kind_of_gradient,
    kind_of_state,
    plan_fused_shards,
)

__all__ = ["ShardedOptimizer"]

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""torch's optimizers that update each element from its own gradient and state, whatever their options."""

_OWN = ("params", "param_names")
"""Entries of a parameter group that are not the same outside and inside."""


class ShardedOptimizer(torch_border.DelegatingOptimizer):
    """An optimizer of sharded parameters that updates their memory in as few pieces as possible.

    Use it where you would use ``optimizer_class`` itself, with its options. Hyper-parameters are in
    `param_groups`, for schedulers and for you; `state` and state dicts are those of ``optimizer_class`` over
    the same parameters, and either loads the other's.

    Parameters of one group of `fully_shard` (or of a wrapper with ``use_orig_params=True``) are updated together
    if they are neighbours there, in the same parameter group here, and have gradients in the same steps.
    Parameters that are not sharded are allowed.
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        params: Iterable[Any],
        *,
        elementwise: bool = False,
        **options: Any,
    ) -> None:
        """Optimize sharded parameters.

        Args:
            optimizer_class: Makes the updates: SGD, Adam, AdamW or another of torch's that treat each element
                for itself.
            params: As for any optimizer: parameters, named parameters, or groups of them.
            elementwise: Promises that an ``optimizer_class`` which is not torch's does so, too: that an element's
                update depends on this element, its gradient and its state only, and that besides numbers its
                state is of tensors like the parameter.
            options: Go to ``optimizer_class``.
        """
        _check_class(optimizer_class, elementwise)
        self._runs: list[FusedShard] = []
        self._complete = False
        _check_options(options)
        super().__init__(params, {})
        self.inner = optimizer_class(self._arranged(), **options)
        self.defaults = self.inner.defaults
        self._complete = True
        self._is_shown = False  # some make their state now
        self._after_inner()

    # --- arranging --------------------------------------------------------------------------------

    def _arranged(self) -> list[dict[str, Any]]:
        """Plan the runs of the parameters as they are now, and return the inner optimizer's groups.

        Two for each outer one: plain tensors, and DTensors that are in no run. Operators on lists of
        tensors, which optimizers use for all of a group, do not mix them.
        """
        state = self.state
        kinds = {
            param: (
                index,
                kind_of_gradient(param),
                kind_of_state(param, state[param] if param in state else None),
            )
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        self._runs = plan_fused_shards(kinds)
        self._arranged_ids = self._ids()
        run_of = {param: run for run in self._runs for param in run.params}
        groups = []
        for outer in self.param_groups:
            tensors = dict.fromkeys(
                run_of[param].tensor if param in run_of else param for param in outer["params"]
            )
            for of_dtensors in (False, True):
                params = [t for t in tensors if isinstance(t, DTensor) is of_dtensors]
                groups.append({**_options(outer), "params": params})
        return groups

    @torch.no_grad()
    def _arrange(self) -> None:
        """Let the inner optimizer go on with the state that is shown, over the memory there is."""
        state: dict[Any, Any] = dict(self.state)
        self.inner.param_groups = self._arranged()
        inner_state: defaultdict[Any, Any] = defaultdict(dict)
        for run in self._runs:
            states = [state.pop(param) for param in run.params if param in state]
            if states:
                inner_state[run.tensor] = run.state_of_run(states)
        inner_state.update(state)  # of parameters by themselves, and what belongs to no parameter
        self.inner.state = inner_state
        self._is_shown = False

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:
        """Per parameter, what the optimizer knows of it: sharded as the parameter is, and no copy.

        Writing to tensors takes effect at once, everything else with the next step.
        """
        if not self._is_shown:
            self._show()
        return self._shown

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        self._shown = state
        self._is_shown = True

    def _show(self) -> None:
        inner = dict(self.inner.state)
        states: dict[Any, Any] = {}
        for run in self._runs:
            if run.tensor in inner:
                states.update(
                    zip(run.params, run.states_of_params(inner.pop(run.tensor)), strict=True)
                )
        states.update(inner)
        self._shown.clear()
        for group in self.param_groups:  # in the order in which other optimizers have it
            for param in group["params"]:
                if param in states:
                    self._shown[param] = states.pop(param)
        self._shown.update(states)
        self._is_shown = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For `load_state_dict`."""
        self.param_groups = state["param_groups"]
        self.state = state["state"]
        self._arrange()
        # The class may know how to read what older versions of it have written.
        self.inner.__setstate__(
            {"state": self.inner.state, "param_groups": self.inner.param_groups}
        )
        self._after_inner()

    def __getstate__(self) -> NoReturn:
        raise LifecycleError(
            "A ShardedOptimizer cannot be copied or pickled: it belongs to the memory of its parameters. Make another one "
            "and use state_dict and load_state_dict."
        )

    # --- steps ------------------------------------------------------------------------------------

    @torch_border.opaque_to_compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; ``closure``, if given, computes these first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Users may also write to the groups' lists of parameters.
        as_arranged = not self._is_shown and self._arranged_ids == self._ids()
        if not as_arranged or not self._take_gradients():
            self._arrange()
            taken = self._take_gradients()
            assert taken, "runs are of parameters with gradients of one kind, where they lie"
        self._before_inner()
        try:
            self.step_inner()
        finally:
            self._after_inner()
        return loss

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _take_gradients(self) -> bool:
        return all(run.take_gradients() for run in self._runs)

    def _before_inner(self) -> None:
        for index, inner in enumerate(self.inner.param_groups):
            inner.update(_options(self.param_groups[index // 2]))

    def _after_inner(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups[::2], strict=True):
            outer.update(_options(inner))
        updated = [run for run in self._runs if run.has_gradient]
        # Writing to runs is writing to their parameters, which operators do not know, and not all count.
        torch.autograd.graph.increment_version([param for run in updated for param in run.params])
        for run in updated:
            run.drop_gradient()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own."""
        _check_options(param_group)
        super().add_param_group(param_group)
        if self._complete:
            self._arrange()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN}


def _check_class(optimizer_class: type[optim.Optimizer], elementwise: bool) -> None:
    if elementwise or optimizer_class in ELEMENTWISE:
        return
    known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    raise ConfigurationError(
        "ShardedOptimizer updates many parameters as one tensor, so each element's update must depend on this element "
        f"only. That is known of torch's {known}, not of {optimizer_class!r}. If it is true of this class, promise it "
        "with elementwise=True; else use the class itself, on parameters that are whole (docs/optimizers.md)."
    )


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("differentiable"):
        raise ConfigurationError(
            "ShardedOptimizer writes to the memory of the parameters, which autograd does not see, so differentiable must "
            "be False. Use the optimizer itself on model.parameters()."
        )
