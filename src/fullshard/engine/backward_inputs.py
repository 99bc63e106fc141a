"""Sharded parameters among the named inputs of a backward pass, and parameters that a pass needs too late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fullshard import torch_border
from fullshard.engine.known_groups import group_without_memory, groups_of
from fullshard.errors import LifecycleError
from fullshard.storage.sharded_params import group_of

PASSES_WITH_INPUTS: set[object] = set()
"""Backward passes with named inputs that run now, in any thread. They alone know which gradients they want."""


def with_unsharded(
    run: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and arguments of a pass with named inputs: unsharded parameters take the place of sharded ones.

    The inputs are looked at before the pass since nothing on a tensor tells them in time: parameters that are
    not in the graph make autograd execute no node, so no other hook of ours would run.
    """
    translate = functools.partial(_graph_inputs, bool(options.get("accumulate_grad")))
    args = torch_border.with_inputs_of_backward(args, translate)
    return functools.partial(_run, run), args


def _run(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    this_pass = object()
    PASSES_WITH_INPUTS.add(this_pass)
    try:
        return run(*args, **options)
    finally:
        PASSES_WITH_INPUTS.discard(this_pass)


def _graph_inputs(accumulated: bool, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a backward pass with unsharded parameters in the place of sharded ones."""
    sharded = {id(each): each for each in inputs if isinstance(each, Tensor) and group_of(each)}
    leaves: dict[int, list[Tensor]] = {key: [] for key in sharded}
    names = []
    for group in groups_of(sharded.values()):
        for param in group.params:
            if id(param.sharded_param.param) in leaves:
                names.append(param.name)
                if param.unsharded_param is not None:
                    leaves[id(param.sharded_param.param)].append(param.unsharded_param)
    if not names:
        return inputs
    if not accumulated:
        raise LifecycleError(
            "torch.autograd.grad returns gradients without reducing them over ranks, so it cannot return those of sharded "
            f"parameters: {names}. Call backward(), with inputs=... for some parameters only, and read their .grad."
        )
    found = (leaves.get(id(each), [each]) for each in inputs)
    return tuple(leaf for together in found for leaf in together)


def needed_too_late(error: BaseException) -> LifecycleError | None:
    """Explain an error of autograd about a saved tensor, if that is a parameter without memory."""
    version = torch_border.version_found(error) if isinstance(error, RuntimeError) else None
    group = None if version is None else group_without_memory(version)
    if group is None:
        return None
    return LifecycleError(
        f"Backward needs the parameters of {group.name!r}, whose memory has been freed: it reached this module through "
        "a tensor that is neither an input nor an output of it. Return such a tensor from the module's "
        "forward instead of keeping it elsewhere, or call unshard() on the module before backward."
    )
