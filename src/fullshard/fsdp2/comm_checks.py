"""Checks of choices of comm objects and staging memory that exclude each other."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.state import FSDPState
from fullshard.errors import ConfigurationError
from fullshard.transport.comm_objects import (
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    SymmetricAllGather,
    SymmetricReduceScatter,
)

_STAGED_BY: dict[str, tuple[type, ...]] = {
    "set_allocate_memory_from_process_group_for_comm": (
        ProcessGroupAllGather,
        ProcessGroupReduceScatter,
    ),
    "set_symm_mem_for_comm": (
        SymmetricAllGather,
        SymmetricReduceScatter,
    ),
}
"""Classes of the comm objects that each method makes. All other comm objects are the user's."""


def check_comms_can_be_chosen(state: FSDPState, label: str, method: str) -> None:
    """Refuse a second choice of where collectives are staged: by another method, or by the user's comm objects."""
    if any(group.mesh_info.shard_process_group is None for group in state.groups):
        raise ConfigurationError(
            f"{method} changes all-gathers and reduce-scatters, but this {label} is replicated and has none. Leave the "
            "call out."
        )
    present = [
        comm
        for group in state.groups
        for comm in (group.routes.custom, group.reduction.settings.custom)
        if comm is not None
    ]
    for other, classes in _STAGED_BY.items():
        if other != method and any(isinstance(comm, classes) for comm in present):
            back = f", or call {other}(False) before" if "allocate" in other else ""
            raise ConfigurationError(
                f"{method} and {other} exclude each other, because both choose where collectives are staged. {other} was "
                f"called on this {label}. Leave one of them out{back}."
            )
    if method in _STAGED_BY:
        users = [
            type(comm).__name__ for comm in present if not isinstance(comm, _STAGED_BY[method])
        ]
        if users:
            raise ConfigurationError(
                f"{method} cannot choose where the collectives of comm objects are staged, but this {label} has "
                f"{' and '.join(sorted(users))}. Leave out the call, or set_custom_all_gather and "
                "set_custom_reduce_scatter."
            )


def check_reduce_scatters(state: FSDPState, label: str, method: str) -> None:
    """Refuse a change of reduce-scatters for a group that has none: with a ``wire_dtype`` gradients are exchanged."""
    dtypes = {group.mp_policy.wire_dtype for group in state.groups} - {None}
    if dtypes:
        raise ConfigurationError(
            f"{method} changes the reduce-scatter of a module's group, but this {label} has none: with "
            f"wire_dtype={dtypes.pop()} ranks exchange gradients and the receiver sums them. Leave out the call, or "
            "wire_dtype in the module's mp_policy."
        )


def reduces_in_symmetric_memory(state: FSDPState) -> bool:
    """Return whether the reduce-scatters of a state are staged in symmetric memory."""
    return any(
        isinstance(group.reduction.settings.custom, SymmetricReduceScatter)
        for group in state.groups
    )


def check_one_input_buffer(symmetric: Sequence[FSDPState], max_input_buffers: int) -> None:
    """Refuse several inputs in flight for these states: each would take symmetric memory, which is never freed."""
    if symmetric and max_input_buffers > 1:
        names = [state.name or type(state.modules[0]).__name__ for state in symmetric]
        raise ConfigurationError(
            "Modules that reduce in symmetric memory must have one reduce-scatter input buffer, got "
            f"max_input_buffers={max_input_buffers} for {', '.join(names)}. Keep it at 1, or leave out their "
            "set_force_sum_reduction_for_comms before set_symm_mem_for_comm, so that only gathers are in symmetric memory."
        )
