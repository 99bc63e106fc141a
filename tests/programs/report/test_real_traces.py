"""From the engine to the finding: what was made to be slow is found, where it was made to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.run_files import read_run
from fullshard.programs.report.timeline import mean_waits
from fullshard.tracing import recorder
from tests.helpers.fake import fake_world
from tests.helpers.models import make_decoder, tokens_for
from tests.helpers.traces import HostClock, SlowAllGather
from tests.helpers.training import FULLSHARD, Run, shard

PAUSE_S = 0.1


def test_a_gather_with_a_sleep_in_it_is_found_at_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HostClock()
    monkeypatch.setattr(recorder, "host_ns", clock)
    with fake_world(4):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        model.blocks[1].set_custom_all_gather(SlowAllGather(clock, PAUSE_S))
        model(tokens_for(0, 2)).backward()
        with fullshard.trace(model, tmp_path) as recording:
            for _ in range(2):
                model(tokens_for(0, 2)).backward()
                recording.step()
    analysis = Analysis(read_run(tmp_path))
    first, second, third, *_ = mean_waits(analysis.steps)
    assert {(wait.group, wait.phase, wait.awaited) for wait in (first, second)} == {
        ("blocks.1", "forward", "gather"),
        ("blocks.1", "backward", "gather"),
    }
    assert third.mean_us < 0.2 * second.mean_us
    (finding,) = [each for each in diagnose(analysis) if "`blocks.1` waits" in each.title]
    assert "for its gather" in finding.title
    assert finding.cost_share > 0.2
    for step in analysis.steps:
        assert 1.5 * PAUSE_S * 1e6 < step.exposed_us < step.duration_us
        total = step.compute_us("forward", "backward", "outside") + step.exposed_us
        assert abs(total - step.duration_us) < 0.01 * step.duration_us
