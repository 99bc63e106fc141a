"""A plan on the terminal: what a rank holds, the groups, and what a rank sends."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from fullshard.errors import size_text
from fullshard.programs.console.tables import (
    counted,
    print_facts,
    print_prose,
    print_table,
)
from fullshard.programs.inspect_tool.cost import ShardedPlan
from fullshard.programs.inspect_tool.folded_groups import FoldedGroups, fold
from fullshard.tracing.schema import GroupFacts


def print_plan(console: Console, plan: ShardedPlan) -> None:
    """Print all of a plan, memory first."""
    print_facts(console, list(_facts(plan)))
    print_table(console, ["memory", "per rank", "unsharded"], list(_memory_rows(plan)), num_texts=1)
    rows = [*map(_group_row, fold(plan.groups)), _total_row(plan)]
    columns = ["group", "elements", "gathered", "per rank", "padding"]
    print_table(console, columns, rows, num_texts=1)
    traffic = plan.traffic
    rows = [
        ("gathers, received", size_text(traffic.gathers)),
        ("reductions, sent", size_text(traffic.reductions)),
    ]
    if plan.replicas > 1:
        rows.append(("all-reductions, sent", size_text(traffic.all_reductions)))
    if traffic.updates:
        rows.append(("updates of other replicas, received", size_text(traffic.updates)))
    print_table(console, ["between ranks, per rank and step", "bytes"], rows, num_texts=1)
    for note in _notes(plan):
        print_prose(console, f"\n{note}")


def _notes(plan: ShardedPlan) -> Iterator[str]:
    if plan.rank.activations is None:
        yield f"Activations are not in this memory: {plan.about_activations}."
    else:
        yield (
            f"Activations are what forward keeps for backward, of {plan.about_activations} at a time on each rank; attention "
            "and norms count as fused."
        )
    if plan.padding is not None:
        yield plan.padding
    yield "Reduction buffers, temporary tensors and what libraries allocate come on top of this memory."


def _facts(plan: ShardedPlan) -> Iterator[tuple[str, str]]:
    elements = sum(group.numel for group in plan.groups)
    tensors = sum(group.parameters for group in plan.groups)
    yield "Model", plan.description
    yield "Size", f"{elements:,} parameters in {counted(tensors, 'tensor')}"
    ranks = counted(plan.world, "rank")
    if plan.replicas > 1:
        yield "Ranks", f"{ranks}: {plan.replicas} replicas of {plan.world // plan.replicas}"
    else:
        yield "Ranks", ranks
    first = next((group for group in plan.groups if group.wire_dtype), plan.groups[0])
    wire = f"gradients in {first.reduce_dtype}, sent in {first.wire_dtype}"
    trained = wire if first.wire_dtype else "nothing is trained"
    yield "Dtypes", f"at rest {first.param_dtype}, compute in {first.compute_dtype}, {trained}"


def _memory_rows(plan: ShardedPlan) -> Iterator[tuple[str, str, str]]:
    rows = [
        ("parameters", "parameters"),
        ("gradients", "gradients"),
        ("optimizer", f"optimizer state ({plan.optimizer})"),
        ("gathered", "gathered parameters, at most"),
        ("activations", "activations"),
        ("total", "together"),
    ]
    for name, label in rows:
        both = getattr(plan.rank, name), getattr(plan.unsharded, name)
        if None not in both:
            yield label, size_text(both[0]), size_text(both[1])


def _group_row(folded: FoldedGroups) -> tuple[str, ...]:
    """Return a row with the sizes of one of the groups."""
    group = folded.first
    return (
        folded.name,
        f"{group.numel:,}",
        size_text(_whole_bytes(group)),
        size_text(group.shard_bytes),
        _padding(group.numel, group.padded_numel),
    )


def _whole_bytes(group: GroupFacts) -> int:
    """Return the bytes that compute uses. A rank that holds all of a group gathers nothing and computes with its shard."""
    return group.gathered_bytes or group.shard_bytes


def _total_row(plan: ShardedPlan) -> tuple[str, ...]:
    groups = plan.groups
    numel = sum(group.numel for group in groups)
    return (
        f"all {counted(len(groups), 'group')}",
        f"{numel:,}",
        size_text(sum(map(_whole_bytes, groups))),
        size_text(sum(group.shard_bytes for group in groups)),
        _padding(numel, sum(group.padded_numel for group in groups)),
    )


def _padding(numel: int, padded_numel: int) -> str:
    return f"{(padded_numel - numel) / numel:.2%}"
