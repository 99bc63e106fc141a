"""The first forward of a model: which states it has, and which of them is the root."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fullshard import torch_border
from fullshard.engine import process_hooks
from fullshard.engine.feature_events import MODEL_CONNECTED
from fullshard.engine.ownership import names_in_common
from fullshard.engine.root_model import RootModel
from fullshard.engine.state import FSDPState, named_states, state_of
from fullshard.engine.step import Step
from fullshard.errors import LifecycleError, UsageError
from fullshard.layout.names import clean_name
from fullshard.storage.param import has_all_gather_extension
from fullshard.transport.streams import FSDPCommContext


def lazy_init(state: FSDPState) -> Step:
    """Make ``state`` the root of a model: find all states below it and connect them.

    At the first forward, since only then it is known which call of `fully_shard` was the outermost.
    """
    if len(state.modules) != 1:
        raise UsageError(
            "The outermost module must be sharded on its own; it was given to fully_shard in a list of "
            f"{len(state.modules)}. Call fully_shard on the module that contains them, too."
        )
    states = {
        found: ", ".join(of_modules) for found, of_modules in named_states(state.modules[0]).items()
    }
    below = [
        name
        for found, name in states.items()
        if found is not state and found.options.manual_finalization
    ]
    if below:
        raise LifecycleError(
            "set_manual_backward_finalization(True) is for the root module, but it was called on modules below it: "
            f"{below}. Call it with False on these, and on the module whose forward you call."
        )
    former = _former_steps(states)
    paths = {module: clean_name(name) for name, module in state.modules[0].named_modules()}
    for found in states:
        for group in found.groups:
            for sharded_param in group.sharded_params:
                sharded_param.set_name(paths)
            for param in group.params:
                param.set_path(paths)
            # Not one the user has unsharded before, or has summoned.
            if group.expects_sharded_params:
                group.repack()
            for param in group.params:
                if has_all_gather_extension(param.sharded_param.local):
                    for owner in param.owners:
                        torch_border.show_state(owner.module, partial(_reshards, found))
    _check_ready(states)
    context = state.shared_context or (
        former[0].context if former else FSDPCommContext(state.device)
    )
    model = RootModel(state, tuple(states))
    step = Step(model, context)
    for other in former:
        other.hand_over(states)
    in_common: dict[FSDPState | None, list[str]] = {}
    for module, name in names_in_common(state.modules[0], [s.ignored for s in states]).items():
        in_common.setdefault(state_of(module), []).append(name)
    for found, name in states.items():
        if found.options.auto_reshard:  # the root is needed again at once in backward
            found.options.reshard_after_forward = found is not state
        found.step = step
        found.set_name(name or "root", ", ".join(in_common.get(found, ())) or "root")
    model.connect(context)
    for join in MODEL_CONNECTED:
        join(step)
    process_hooks.install()
    return step


def _former_steps(states: dict[FSDPState, str]) -> list[Step]:
    """Return the steps that states have run in before, as a root of their own or below another."""
    former = list(dict.fromkeys(each.step for each in states if each.step is not None))
    running = [name for each, name in states.items() if each.step in former and each.step.busy]
    if running:
        raise LifecycleError(
            "A sharded module can get a new outermost module only between steps, but these are part of a model whose "
            f"forward or backward is running: {running}. Call the new outermost module outside of it. (After a failed step, run a "
            "forward of that model first, or call its reset_iter_state().)"
        )
    return former


def _check_ready(states: Iterable[FSDPState]) -> None:
    """Refuse parameters that have no memory yet, or are on another device."""
    misplaced = [
        fault
        for state in states
        for group in state.groups
        if not group.full_params_installed
        for fault in group.shards.misplaced()
    ]
    if misplaced:
        device = next(group.shard_device for state in states for group in state.groups)
        raise UsageError(
            f"Parameters must be on {device} at the first forward:\n  "
            + "\n  ".join(misplaced)
            + "\nMaterialise a model built on the meta device with model.to_empty(device=...) and initialise "
            "it; move others with model.to(device)."
        )


def _reshards(state: FSDPState) -> bool:
    return bool(state.options.reshard_after_forward)
