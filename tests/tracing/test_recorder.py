"""The recorder matches the end of a collective with its beginning, whatever has become of earlier ones."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.tracing.recorder import TraceRecorder


class Group:
    name, held_bytes = "a group", 0


class Pending:
    """A work without a future, for which the host waits."""


def test_a_gather_that_was_given_up_takes_no_time_from_the_next_one() -> None:
    recorder, group = TraceRecorder(torch.device("cpu"), first_step=1, limit=100), Group()
    works: Any = (Pending(),)
    for _ in range(2):  # the host waits for the second one only
        recorder.issues("gather", group)
        recorder.calls("gather", group, 8)
        recorder.called("gather", group, works)
    recorder.waits("gather", group)
    recorder.waited("gather", group)
    given_up, used = recorder.collectives
    assert not given_up.ends and len(used.ends) == 1
