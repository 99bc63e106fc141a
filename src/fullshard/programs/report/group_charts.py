"""Charts that compare steps with steps, and groups with groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import plotly.graph_objects as go

from fullshard.errors import size_unit
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table, figure, plain
from fullshard.programs.report.timeline import StepTimes, group_bytes
from fullshard.programs.report.units import count, duration, share, size
from fullshard.tracing.schema import COLLECTIVES, GroupFacts

MAX_STEP_ROWS = 48
"""More steps than this are only in the table."""

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "outside": "loss, optimizer, other",
    "wait": "waits (exposed communication)",
}


def comparing_charts(analysis: Analysis) -> Iterator[Chart]:
    """Yield where the time of each step went, and the waits and bytes of each group."""
    if analysis.steps:
        yield _breakdown(analysis)
        yield _by_group(analysis)


def _breakdown(analysis: Analysis) -> Chart:
    steps = analysis.steps[:MAX_STEP_ROWS]
    names = [f"rank {step.rank}, step {step.step}" for step in steps]
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for step in steps:
        for part, values in parts.items():
            values.append(step.exposed_us if part == "wait" else step.compute_us(part))
    traces = [
        go.Bar(
            name=PARTS[part],
            orientation="h",
            y=names,
            x=[us / 1e3 for us in values],
            marker={"color": f"var(--{part})"},
            text=[share(step.exposed_share) for step in steps] if part == "wait" else None,
            textposition="outside",
            cliponaxis=False,
            hovertext=[
                f"<b>{PARTS[part]}</b><br>{duration(us)}, {share(us / step.duration_us)} of {name}"
                for us, step, name in zip(values, steps, names, strict=True)
            ],
            hoverinfo="text",
        )
        for part, values in parts.items()
    ]
    more = len(analysis.steps) - len(steps)
    return Chart(
        name="breakdown",
        title="Where the time went",
        caption="Each recorded step of each rank. The percentage is exposed communication: the part of the step in "
        "which compute waited for gathers and reductions."
        + (f" The first {len(steps)} of {len(analysis.steps)} steps are drawn." if more else ""),
        views={
            "": figure(
                traces,
                height=96 + 26 * len(steps),
                barmode="stack",
                bargap=0.25,
                hovermode="closest",
                xaxis={
                    "title": {"text": "ms"},
                    "range": [0, 1.12 * max(step.duration_us for step in steps) / 1e3],
                },
                yaxis={"autorange": "reversed", "fixedrange": True, "type": "category"},
            )
        },
        numbers=_step_table(analysis.steps),
    )


def _step_table(steps: list[StepTimes]) -> Table:
    lanes = {
        kind: name for kind, name in COLLECTIVES.items() if any(step.of(kind) for step in steps)
    }
    rows = []
    for step in steps:
        times = [step.lane(kind) for kind in lanes]
        rows.append(
            [
                f"rank {step.rank}, step {step.step}",
                duration(step.duration_us),
                duration(step.compute_us("forward", "backward")),
                duration(step.compute_us("outside")),
                f"{duration(step.exposed_us)} ({share(step.exposed_share)})",
                *(
                    f"{duration(lane.wire_us)}, "
                    f"{share(lane.hidden_us / lane.wire_us if lane.wire_us else 1.0)} hidden, {size(lane.nbytes)}"
                    for lane in times
                ),
                duration(step.idle_wire_us),
            ]
        )
    headings = ["Step", "Duration", "Forward and backward", "Other", "Exposed"]
    return Table(headings=[*headings, *lanes.values(), "Idle wire"], rows=rows)


def _by_group(analysis: Analysis) -> Chart:
    names = list(analysis.groups) or sorted(
        {span.group for step in analysis.steps for span in step.spans if span.group}
    )
    x = [plain(name) for name in names]
    traces = []
    for (phase, awaited), (label, color) in {
        ("forward", "gather"): ("waits for gather, forward", "wait"),
        ("backward", "gather"): ("waits for gather, backward", "wait-backward"),
        ("backward", "reduction"): ("waits for reduction", "wait-reduction"),
    }.items():
        by_name = {
            wait.group: wait.mean_us
            for wait in analysis.waits
            if (wait.phase, wait.awaited) == (phase, awaited)
        }
        if by_name:
            traces.append(_group_bars(names, x, by_name, label, color, "y", 1e3))
    sent = {kind: group_bytes(analysis.steps, kind) for kind in COLLECTIVES}
    most = max((sum(each.get(name, 0.0) for each in sent.values()) for name in names), default=0.0)
    unit, bytes_in_unit = size_unit(most)
    for kind, by_name in sent.items():
        if by_name:
            label = COLLECTIVES[kind]
            traces.append(_group_bars(names, x, by_name, label, kind, "y2", bytes_in_unit))
    return Chart(
        name="groups",
        title="Waits and bytes by group",
        caption="Above, how long compute waited for each group in a step; below, the bytes that one rank communicated "
        "for the group. Means over the recorded steps and ranks, groups in order of forward.",
        views={
            "": figure(
                traces,
                height=420,
                barmode="stack",
                bargap=0.25,
                hovermode="closest",
                xaxis={"type": "category", "anchor": "y2"},
                yaxis={"title": {"text": "ms"}, "domain": [0.54, 1], "rangemode": "tozero"},
                yaxis2={
                    "title": {"text": unit},
                    "domain": [0, 0.46],
                    "rangemode": "tozero",
                },
            )
        },
        numbers=_longest_by_group(analysis, names),
    )


def _group_bars(
    names: list[str],
    x: list[str],
    by_name: Mapping[str, float],
    label: str,
    color: str,
    yaxis: str,
    unit: float,
) -> go.Bar:
    values = [by_name.get(name, 0.0) for name in names]
    show = duration if yaxis == "y" else size
    return go.Bar(
        name=label,
        x=x,
        y=[value / unit for value in values],
        yaxis=yaxis,
        marker={"color": f"var(--{color})"},
        hovertext=[
            f"<b>{name}</b><br>{label}: {show(value)}"
            for name, value in zip(x, values, strict=True)
        ],
        hoverinfo="text",
    )


def _longest_by_group(analysis: Analysis, names: list[str]) -> Table:
    waits: dict[str, float] = {}
    for wait in analysis.waits:
        waits[wait.group] = waits.get(wait.group, 0.0) + wait.mean_us
    lanes = {kind: group_bytes(analysis.steps, kind) for kind in COLLECTIVES}
    lanes = {kind: by_name for kind, by_name in lanes.items() if by_name}
    return Table(
        headings=["Group", "Waits per step", *(COLLECTIVES[kind] for kind in lanes)],
        rows=[
            [
                name,
                duration(waits.get(name, 0.0)),
                *(size(by_name.get(name, 0.0)) for by_name in lanes.values()),
            ]
            for name in names
        ],
    )


def group_table(groups: Mapping[str, GroupFacts]) -> Table:
    """Return sizes, dtypes and padding of each group."""
    headings = ["Group", "Dtypes", "Tensors", "Elements", "Padding", "Shard", "Gathered"]
    headings += ["Per gather", "Per reduction", "Ranks"]
    rows: list[list[str]] = []
    keys: list[list[float | str]] = []
    for index, group in enumerate(groups.values()):
        ranks = f"{group.world}" + (f" x {group.replicas}" if group.replicas > 1 else "")
        rows.append(
            [
                group.name,
                dtypes(group),
                str(group.parameters),
                count(group.numel),
                share(group.padding_share),
                size(group.shard_bytes),
                size(group.gathered_bytes),
                size(group.gather_bytes),
                size(group.reduce_bytes),
                ranks,
            ]
        )
        keys.append(
            [
                index,
                dtypes(group),
                group.parameters,
                group.numel,
                group.padding_share,
                group.shard_bytes,
                group.gathered_bytes,
                group.gather_bytes,
                group.reduce_bytes,
                group.world * group.replicas,
            ]
        )
    return Table(headings=headings, rows=rows, num_text=2, keys=keys)


def dtypes(group: GroupFacts) -> str:
    """Return the dtypes of parameters, compute and gradients on the wire, without repetitions."""
    named = [group.param_dtype, group.compute_dtype, group.wire_dtype or group.reduce_dtype]
    return " / ".join(dict.fromkeys(name for name in named if name))
