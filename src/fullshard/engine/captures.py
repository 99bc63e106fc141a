"""Passes that are captured in a CUDA graph: the work at their beginning, and the refusals.

Users capture a step with `torch.cuda.graph`, which does not announce it. So every pass asks
(`FSDPCommContext.at_border`). A pass at the border of a capture does three things:

    check        refuse what cannot be captured before anything is issued, so that the capture stays valid
    streams      make them part of the capture: [Note: borders of a capture]
    parameters   what was gathered outside is gathered again inside, and the other way round: a graph must not read memory
                 that the next eager step frees, and an eager step must not read what only a replay writes.
                 Unsharded parameters are made again: autograd adds to a leaf's gradient on the stream where it first
                 saw the leaf, as long as a loss from then is alive, and that stream may not be part of a capture
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import UsageError
from fullshard.mesh.backends import backend_of
from fullshard.transport.streams import comm_contexts, is_capturing

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState
    from fullshard.engine.step import Step


def cross_border(step: Step, *, is_known: bool) -> None:
    """Begin a pass that is captured, or comes after a captured one; ``is_known`` if there was such a pass before.

    Raises:
        UsageError: the model cannot be captured, or not now.
    """
    if step.context.in_capture:
        _check_capturable(step, is_known=is_known)
    step.context.cross_border()


def begin_forward(step: Step, states: Iterable[FSDPState]) -> None:
    """Begin a forward of ``states`` that is captured, or comes after a captured pass: `cross_border`, and parameters."""
    cross_border(step, is_known=step.has_run)
    enters_or_leaves = step.context.enters_or_leaves
    for state in step.states if enters_or_leaves else states:
        if state.step is not step:
            continue  # it has gone to another root
        for group in state.groups:
            group.drop_gather()
            group.reshard()
            if enters_or_leaves:
                group.drop_unsharded_params()


def end_failed_pass() -> None:
    """Join all streams after an exception in a captured pass: CUDA cannot end a capture of streams that are not joined."""
    for context in comm_contexts():
        if context.in_capture and is_capturing():
            with contextlib.suppress(RuntimeError):  # an error of CUDA has spoilt the capture
                context.fork_and_join()


def _check_capturable(step: Step, *, is_known: bool) -> None:
    obstacles = obstacles_to_capture(group for state in step.states for group in state.groups)
    if obstacles:
        raise UsageError(
            "A step is captured in a CUDA graph only if the device can do all of it without the host. These cannot:\n  "
            + "\n  ".join(obstacles)
            + "\nRun the step without capture, or change them; see docs/graphs.md."
        )
    if not all(observer.capturable for observer in step.context.observers):
        raise UsageError(
            "A step cannot be captured in a CUDA graph while a trace is recorded: its events could not be read. Capture "
            "outside of fullshard's trace(), and trace an eager step."
        )
    if not is_known:
        raise UsageError(
            "The first forward and the first backward of a sharded model cannot be captured in a CUDA graph: ranks compare "
            "their models and connect, and memory is laid out. Run a step or two without capture before."
        )


def obstacles_to_capture(groups: Iterable[FSDPParamGroup]) -> list[str]:
    """Return the obstacles to a capture, each with the reason."""
    found: dict[str, None] = {}
    for group in groups:
        if group.routes.uploads:
            found[
                f"{group.name}: its shards are in host memory (CPU offload), and the host waits for them"
            ] = None
        info = group.mesh_info
        settings = group.reduction.settings
        for process_group in (
            info.shard_peers,
            info.replicate_process_group,
            settings.process_group,
        ):
            if process_group is None:
                continue
            backend = backend_of(process_group, group.device)
            if not backend.is_on_stream:
                found[
                    f"{group.name}: its collectives run on {backend.name}, and the host waits for them"
                ] = None
        for comm in (group.routes.custom, settings.custom):
            if comm is not None and not comm.capturable:
                found[
                    f"{group.name}: the comm object {type(comm).__name__} says that it cannot (capturable = False)"
                ] = None
    return list(found)
