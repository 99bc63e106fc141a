"""Around backward passes of any model: names of sharded parameters among their inputs, their errors, their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullshard import torch_border
from fullshard.engine import captures, fused_linear, second_order
from fullshard.engine.known_groups import group_without_memory, groups_of
from fullshard.errors import LifecycleError
from fullshard.storage.sharded_params import group_of
from fullshard.transport.monitor import monitor
from fullshard.transport.streams import comm_contexts


def run_backward(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a backward pass of any model with autograd's own ``run``; sharded parameters are seen to.

    The inputs are looked at before the pass since nothing on a tensor tells them in time: parameters that are
    not in the graph make autograd execute no node, so no other hook of ours would run.
    """
    if any(torch_border.inputs_of_backward(args)):
        args = torch_border.with_inputs_of_backward(
            args, functools.partial(_graph_inputs, bool(options.get("accumulate_grad")))
        )
        run = functools.partial(fused_linear.without_fusing, run)
    if any(context.has_graph for context in comm_contexts()):
        run = functools.partial(torch_border.on_calling_thread, run)
    try:
        gradients = run(*args, **options)
    except BaseException as error:
        monitor().exception_left(error)
        captures.end_failed_pass()
        if not isinstance(error, RuntimeError):
            raise
        told = _needed_too_late(torch_border.version_found(error))
        if told is None:
            raise
        raise told from error
    if second_order.ADDED_AT_END:
        second_order.watch_results(gradients or ())
    return gradients


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


def _needed_too_late(version: int | None) -> LifecycleError | None:
    """Explain an error about a saved tensor that is at ``version``, if it is a parameter without memory."""
    group = None if version is None else group_without_memory(version)
    if group is None:
        return None
    return LifecycleError(
        f"Backward needs the parameters of {group.name!r}, whose memory has been freed: it reached this module through "
        "a tensor that is neither an input nor an output of it. Return such a tensor from the module's "
        "forward instead of keeping it elsewhere, or call unshard() on the module before backward."
    )
