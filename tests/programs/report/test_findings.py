"""What is found in runs that were made to have it, and that nothing is found in those that do not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.findings import Call, Finding, Remedy, Setting
from fullshard.programs.report.run_files import Metrics, Run, read_run
from fullshard.programs.report.run_findings import find_in_training
from fullshard.programs.run_events import BadStep, Start, Step, parse_line
from fullshard.tracing.schema import PlannedFacts, parse_trace
from tests.helpers.run_folders import Machine, metrics_records, simulated_trace, write_metrics

CALM = Machine(layers=8, gather_us=100, reduce_us=50, optimizer_us=3000)
"""All but the first gather and the last reductions is hidden."""


def run_on(machine: Machine, **settings: object) -> Run:
    """A run of the trainer with these settings of its sharding."""
    traces = [
        parse_trace(simulated_trace(machine, rank, num_steps=2)) for rank in range(machine.world)
    ]
    return Run(name="made up", traces=tuple(traces), config={"sharding": settings})


def script_on(machine: Machine) -> Run:
    """The same steps of a program of the user's."""
    return replace(run_on(machine), config={})


def found_on(machine: Machine, **settings: object) -> list[Finding]:
    return diagnose(Analysis(run_on(machine, **settings)))


def only(findings: list[Finding], words: str) -> Finding:
    (finding,) = [finding for finding in findings if words in finding.title]
    return finding


def test_a_calm_run_is_told_so_and_nothing_else():
    (finding,) = found_on(CALM)
    assert finding.severity == "good"
    assert finding.title == "Communication is hidden: 0.3 % of the step is exposed"


def test_a_gather_that_a_deeper_prefetch_hides_is_named_with_the_remedy_for_the_program():
    machine = replace(CALM, slow_gathers={"layers.3": 3000})
    finding = only(found_on(machine), "layers.3")
    assert finding.title == (
        "`layers.3` waits 1.1 ms for its gather in forward: prefetch depth 2 would hide it"
    )
    assert "Its gather takes 3.1 ms; those of groups of its size take 100 \u00b5s." in finding.text
    assert "2 groups ahead instead of 1" in finding.text
    assert "11.4 MiB more memory" in finding.text
    assert [str(remedy) for remedy in finding.remedies] == [
        "Gather 2 groups ahead: `sharding.prefetch = 2`"
    ]
    (remedy,) = only(diagnose(Analysis(script_on(machine))), "layers.3").remedies
    assert remedy.settings == () and "set_modules_to_backward_prefetch" in str(remedy)


def test_a_wire_slower_than_compute_is_not_helped_by_prefetching():
    by_bytes = {"root": 4500.0}  # it has twice the bytes of a layer
    findings = found_on(replace(CALM, gather_us=4500, world=4, slow_gathers=by_bytes), prefetch=1)
    finding = only(findings, "The wire is the bottleneck")
    assert "No prefetch depth" in finding.text
    assert not any("prefetch" in str(remedy) for remedy in finding.remedies)
    assert any("sharding.replicas" in str(remedy) for remedy in finding.remedies)
    assert not any(
        "bf16" in str(remedy) for remedy in finding.remedies
    )  # gathers are in bf16 already
    odd = only(found_on(replace(CALM, gather_us=4500, world=3), prefetch=1), "The wire")
    assert not any("sharding.replicas" in str(remedy) for remedy in odd.remedies)


def test_the_first_gather_has_a_finding_of_its_own():
    finding = only(found_on(replace(CALM, slow_gathers={"root": 5000})), "The step begins")
    assert "5.1 ms" in finding.title and "`root`" in finding.title


def test_reductions_after_backward_are_told_but_not_with_fewer_bytes_if_these_take_no_time():
    """In this machine all reductions take the same time, also that of the root, which has twice the bytes."""
    finding = only(found_on(replace(CALM, reduce_us=1500)), "reductions")
    assert "3 ms" in finding.title
    assert not any(remedy.kind == "narrow wire" for remedy in finding.remedies)


def test_a_late_rank_is_named_and_its_waits_are_not_blamed_on_the_wire():
    findings = found_on(replace(CALM, late_rank=1, late_us=2500, world=3))
    assert "Rank 1 comes later" in findings[0].title
    assert [finding.title for finding in findings if "its gather" in finding.title] == []


def test_a_replay_that_does_not_fit_promises_nothing():
    """The trace is of depth 1, the configuration says 3: the waits do not come out."""
    machine = replace(CALM, slow_gathers={"layers.3": 3000})
    finding = only(found_on(machine, prefetch=3), "layers.3")
    assert "nothing is predicted" in finding.text
    assert not any("sharding.prefetch" in str(remedy) for remedy in finding.remedies)


def test_what_the_configuration_has_already_is_no_remedy():
    run = run_on(replace(CALM, optimizer_us=60_000))
    assert only(diagnose(Analysis(run)), "outside").remedies
    config = {"sharding": {}, "optimizer": {"flat": True}}
    assert not only(diagnose(Analysis(replace(run, config=config))), "outside").remedies


def test_a_remedy_says_what_it_takes():
    both = (Setting("sharding", "prefetch", 2), Setting("sharding", "api", "fsdp2"))
    remedy = Remedy(kind="deeper prefetch", text="Deeper", settings=both)
    assert str(remedy) == 'Deeper: `sharding.prefetch = 2` with `sharding.api = "fsdp2"`'
    fixed = Remedy(kind="clip", text="Clip", settings=(Setting("train", "clip", 1.0),))
    assert str(fixed) == "Clip: `train.clip = 1.0`, in a new run"
    call = Call("fully_shard", ("reshard_after_forward=True",))
    assert str(Remedy(kind="keep gathered", text="Keep", call=call)) == (
        "Keep: in every call of `fully_shard`: `reshard_after_forward=True`"
    )
    assert str(Remedy(kind="look", text="Look at the data")) == "Look at the data"


def test_a_deeper_prefetch_comes_with_the_api_that_has_it():
    machine = replace(CALM, slow_gathers={"layers.3": 3000})
    remedies = only(found_on(machine, prefetch=1, api="fsdp1"), "layers.3").remedies
    assert str(remedies[0]) == (
        'Gather 2 groups ahead: `sharding.prefetch = 2` with `sharding.api = "fsdp2"`'
    )


def test_many_small_groups_that_wait_are_to_be_merged():
    small = replace(CALM, layer_numel=1000, gather_us=2500, slow_gathers={"root": -2400})
    run = run_on(small)
    assert not any("latency" in each.title for each in diagnose(Analysis(run))), "no plan is known"
    (first, *others) = run.traces

    def found_with(*planned: PlannedFacts) -> list[Finding]:
        traces = (replace(first, planned=planned), *others)
        return diagnose(Analysis(replace(run, traces=traces)))

    root, rest = (PlannedFacts(modules=(m,), gathered_bytes=10_000) for m in ("", "layers.0"))
    finding = only(found_with(root, rest), "latency")
    assert finding.title.startswith("9 of 9 groups")
    assert "the plan for this model has 2 groups, 2 of them small" in str(finding.remedies[0])
    as_many = found_with(root, *[rest] * 8)
    assert not any("latency" in each.title for each in as_many), "the plan is no better"


def test_one_slow_gather_is_not_blamed_on_small_groups():
    small = replace(CALM, layer_numel=1000, slow_gathers={"layers.3": 9000})
    findings = found_on(small)
    assert "`layers.3` waits" in findings[0].title
    assert not any("latency" in finding.title for finding in findings)


def test_padding_is_told_with_the_group_that_has_most():
    finding = only(found_on(replace(CALM, padding=0.25)), "padding")
    assert finding.title.startswith("20 %")
    assert "`root`: 1.5 M of 7.5 M elements" in finding.text


def test_parameters_that_are_all_gathered_at_once_are_told():
    finding = only(found_on(replace(CALM, layers=2)), "gathered at the same time")
    assert finding.title.startswith("100 %")


def test_time_outside_of_the_model_is_told():
    finding = only(found_on(replace(CALM, optimizer_us=60_000)), "outside")
    assert "60 ms" in finding.text
    assert "optimizer.flat" in str(finding.remedies[0])


def test_what_costs_most_comes_first():
    findings = found_on(
        replace(CALM, reduce_us=1500, slow_gathers={"layers.3": 9000}, padding=0.25)
    )
    costs = [finding.cost_share for finding in findings]
    assert costs == sorted(costs, reverse=True)
    assert "layers.3" in findings[0].title


# --- of the whole run ------------------------------------------------------------------------------------


def found_in(losses: list[float], times: list[float] | None = None, *bad: BadStep):
    steps = tuple(
        Step(
            step=i + 1,
            loss=loss,
            grad_norm=1.0,
            lr=1.0,
            tokens=0,
            step_s=times[i] if times else math.nan,
            memory_bytes=0,
        )
        for i, loss in enumerate(losses)
    )
    return diagnose(Analysis(Run(name="made up", metrics=Metrics(steps=steps, bad_steps=bad))))


def test_a_jump_of_the_loss_is_told_with_its_step():
    losses = [3.0 + 0.02 * (-1) ** i for i in range(60)]
    assert found_in(losses) == []
    losses[40] = 4.5
    (finding,) = found_in(losses)
    assert "jumps to 4.5 at step 41" in finding.title


def test_bad_steps_come_first():
    bad = BadStep(step=9, what="loss is nan", action="skip")
    findings = found_in([1.0] * 100, [0.1] * 50 + [0.2] * 50, bad)
    assert findings[0].title == "1 bad step: step 9, loss is nan; action: skip"
    assert findings[0].severity == "bad"


def test_ranks_that_let_others_wait_are_told_with_how_long_how_often_and_where():
    lines = [
        {"kind": "stall", "step": 4, "seconds": 6.0, "ranks": [1], "where": "at a.py:1", "report": "a"},
        {"kind": "stall", "step": 4, "seconds": 30.0, "ranks": [1], "where": "at b.py:2", "report": "b"},
        {"kind": "stall", "step": 9, "seconds": 8.0, "ranks": [0, 3], "where": "at c.py:3", "report": "c"},
        {"kind": "stall", "step": 9, "report": "without ranks"},
    ]  # fmt: skip
    with TemporaryDirectory() as folder:
        steps = [
            record | ({"step_s": 10.0} if "step_s" in record else {})
            for record in metrics_records(9)
        ]
        write_metrics(Path(folder), [*steps, *lines])
        run = read_run(Path(folder))
    first, second = find_in_training(run)
    assert first.title == "Rank 1 kept others waiting 2 times, 36 s in all"
    assert "The longest wait took 30 s and ended in step 4" in first.text
    assert "at b.py:2" in first.text and first.remedies
    assert second.title == "Ranks 0, 3 kept others waiting once, for 8 s"
    assert (first.cost_share, second.cost_share) == (36 / 90, 8 / 90)
    marks = [mark.text for mark in run.metrics.marks if mark.kind == "stall"]
    assert "others waited 8 s for ranks 0, 3" in marks and len(marks) == 3


@pytest.mark.parametrize(("last", "is_told"), [(0.105, False), (0.12, True)])
def test_a_run_that_becomes_slower_is_told(last: float, is_told: bool):
    findings = found_in([1.0] * 100, [3.0] * 5 + [0.1] * 50 + [last] * 45)
    assert ["The run becomes slower: 100 ms a step at first, 120 ms at the end"] * is_told == [
        finding.title for finding in findings
    ]


def start_with(rank_bytes: tuple[int, ...]) -> Start:
    record = metrics_records(3)[0]
    start = parse_line(json.dumps({**record, "rank_bytes": rank_bytes}))
    assert isinstance(start, Start)
    return start


def uneven(rank_bytes: tuple[int, ...], **settings: object) -> list[Finding]:
    metrics = Metrics(starts=(start_with(rank_bytes),))
    run = Run(name="made up", metrics=metrics, config={"sharding": settings})
    return [each for each in diagnose(Analysis(run)) if each.kind == "uneven shards"]


def test_uneven_shards_are_found_without_a_trace():
    [finding] = uneven((300, 100, 100, 100), api="fsdp2")
    assert finding.title == "Shards are uneven: the largest is 2 times the mean"
    assert "rank 0 holds 300 B, the mean is 150 B" in finding.text
    assert '`sharding.api = "fsdp1"`' in finding.text
    [flat] = uneven((300, 100, 300, 100), api="fsdp1")
    assert "ranks 0, 2 hold" in flat.text and "fsdp1" not in flat.text
    assert not uneven((105, 100, 100, 100)) and not uneven((300,)) and not uneven(())


def test_a_trace_names_the_cause_of_uneven_shards():
    run = run_on(replace(CALM, padding=0.5))
    run = replace(run, metrics=Metrics(starts=(start_with((3, 1)),)))
    kinds = [finding.kind for finding in diagnose(Analysis(run))]
    assert "padding" in kinds and "uneven shards" not in kinds
