"""What the page says of the settings for speed: which are on, and what the others would bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.run_files import Run, read_run
from fullshard.programs.report.speed_settings import speed_settings
from fullshard.programs.report.timeline import group_bytes
from fullshard.programs.report.units import size
from fullshard.tracing.schema import PlannedFacts
from tests.helpers.run_folders import Machine, write_run


def of(run: Run, **settings: object) -> dict[str, tuple[str, str]]:
    """The rows by setting; `section__field` changes the configuration."""
    config = {name: dict(fields) for name, fields in run.config.items()}
    for name, value in settings.items():
        section, _, field = name.partition("__")
        config.setdefault(section, {})[field] = value
    table = speed_settings(Analysis(replace(run, config=config)))
    assert table is not None
    return {setting: (state, text) for setting, state, text in table.rows}


def test_it_says_what_is_on_and_what_the_rest_would_bring(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, Machine(device="cuda")))
    assert run.metrics.start is not None
    start = replace(run.metrics.start, device="cuda")
    run = replace(run, metrics=replace(run.metrics, starts=(start,)))
    plain = of(run)
    assert plain["compute.graph"][0] == "off" and "waits for the host" in plain["compute.graph"][1]
    assert plain["compute.fuse_gradients"][0] == "off"
    sent = size(sum(group_bytes(Analysis(run).steps, "reduce").values()))
    assert plain["compute.wire"] == (
        "fp32",
        f"Gradients are {sent} a step and rank; `bf16` would halve that. They are rounded once, and summed in float32.",
    )
    captured = of(run, compute__graph=True)
    assert captured["compute.graph"][0] == captured["compute.fuse_gradients"][0] == "on"
    refused = of(run, compute__graph=True, compute__fuse_gradients=False)
    assert refused["compute.fuse_gradients"][0] == "off"
    narrow = of(run, compute__wire="bf16")["compute.wire"]
    assert narrow[0] == "bf16" and "halve" not in narrow[1]


def test_it_compares_the_groups_with_the_plan_and_counts_the_state_of_replicas(
    tmp_path: Path,
) -> None:
    run = read_run(write_run(tmp_path, Machine()))
    assert "fewer collectives" in of(run)["sharding.groups"][1]
    planned = tuple(PlannedFacts(modules=(name,), gathered_bytes=1) for name in ("", "layers"))
    traces = tuple(replace(trace, planned=planned) for trace in run.traces)
    groups = len(Analysis(run).groups)
    assert f"2 groups of {groups}" in of(replace(run, traces=traces))["sharding.groups"][1]
    same = tuple(planned[0] for _ in range(groups))
    traces = tuple(replace(trace, planned=same) for trace in run.traces)
    assert "as many groups" in of(replace(run, traces=traces))["sharding.groups"][1]

    assert "no replicas" in of(run)["optimizer.shard_over_replicas"][1]
    steps = tuple(replace(step, optimizer_bytes=8 << 20) for step in run.metrics.steps)
    run = replace(run, metrics=replace(run.metrics, steps=steps))
    state, text = of(run, sharding__replicas=4)["optimizer.shard_over_replicas"]
    assert state == "off" and "2 MiB a rank instead of 8 MiB" in text
    assert of(run, sharding__replicas=4, optimizer__shard_over_replicas=True)[
        "optimizer.shard_over_replicas"
    ] == ("on", "Each of 4 replicas keeps a part of the optimizer's state.")


def test_programs_of_users_have_no_settings(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, Machine()))
    assert speed_settings(Analysis(replace(run, config={}))) is None
