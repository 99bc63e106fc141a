"""A plan on the terminal: the groups, what a rank holds, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from fullshard.errors import size_text
from fullshard.programs.console.tables import (
    counted,
    print_facts,
    print_line,
    print_table,
)
from fullshard.programs.inspect_tool.cost import ShardedPlan
from fullshard.tracing.schema import GroupFacts


def print_plan(console: Console, plan: ShardedPlan) -> None:
    """Print all of a plan."""
    print_facts(console, list(_facts(plan)))
    rows = [*map(_group_row, plan.groups), _total_row(plan)]
    whole, part = "whole, to compute", "per rank, at rest"
    columns = ["group", "modules", "tensors", "elements", whole, part, "padding"]
    print_table(console, columns, rows, num_texts=1)
    print_table(console, ["memory", "per rank", "unsharded"], list(_memory_rows(plan)), num_texts=1)
    traffic = plan.traffic
    rows = [
        ("gathers, received", size_text(traffic.gathers)),
        ("reductions, sent", size_text(traffic.reductions)),
    ]
    if plan.replicas > 1:
        rows.append(("all-reductions, sent", size_text(traffic.all_reductions)))
    print_table(console, ["wire, per rank and step", "bytes"], rows, num_texts=1)
    if plan.is_wrapped:
        print_line(
            console,
            "\nThese are groups of fully_shard; the wrapper has the same, and cuts each as one flat piece per rank.",
        )
    print_line(
        console,
        "\nActivations, reduction buffers and what libraries allocate come on top of this memory.",
    )


def _facts(plan: ShardedPlan) -> Iterator[tuple[str, str]]:
    elements = sum(group.numel for group in plan.groups)
    yield "Model", f"{plan.description}, {elements:,} parameters"
    ranks = counted(plan.world, "rank")
    if plan.replicas > 1:
        yield "Ranks", f"{ranks}: {plan.replicas} replicas of {plan.world // plan.replicas}"
    else:
        yield "Ranks", ranks
    first = plan.groups[0]
    wire = f", gradients in {first.reduce_dtype}, on the wire in {first.wire_dtype}"
    yield "Dtypes", f"at rest {first.param_dtype}, compute in {first.compute_dtype}{wire}"


def _group_row(group: GroupFacts) -> tuple[str, ...]:
    return (
        group.name,
        f"{len(group.modules)}",
        f"{group.parameters:,}",
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
        f"{counted(len(groups), 'group')}",
        f"{sum(len(group.modules) for group in groups)}",
        f"{sum(group.parameters for group in groups):,}",
        f"{numel:,}",
        size_text(sum(map(_whole_bytes, groups))),
        size_text(sum(group.shard_bytes for group in groups)),
        _padding(numel, sum(group.padded_numel for group in groups)),
    )


def _padding(numel: int, padded_numel: int) -> str:
    return f"{(padded_numel - numel) / numel:.2%}"


def _memory_rows(plan: ShardedPlan) -> Iterator[tuple[str, str, str]]:
    for name, label in (
        ("parameters", "parameters"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer state (Adam)"),
        ("gathered", "gathered parameters, at most"),
        ("total", "together"),
    ):
        yield label, size_text(getattr(plan.rank, name)), size_text(getattr(plan.unsharded, name))
