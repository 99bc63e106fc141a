"""What the user sees."""

import io
import math

from rich.console import Console

from fullshard.train.progress import showing_progress
from fullshard.train.result import RunFacts, StepReport, TrainResult, Watcher

FACTS = RunFacts(
    parameters=250,
    ranks=2,
    device="cpu",
    source="the folder [here]",
    training_bytes=7_600_000,
    held_out_bytes=400_000,
    steps=40,
    tokens_per_step=64,
)
RESULT = TrainResult(
    facts=FACTS,
    losses=(8 * math.log(2), *[3.0] * 38, 2 * math.log(2)),
    held_out_before=5.5,
    held_out_after=1.5,
    tokens=2560,
    seconds=12.34,
    unsharded_bytes=1000,
    rank_bytes=(502, 498),
)


def follow_a_run(watcher: Watcher) -> None:
    watcher.begin(FACTS)
    for step in range(1, FACTS.steps + 1):
        watcher.step(
            StepReport(
                step=step, loss=5.0, tokens=64 * step, seconds=0.5 * step, memory_bytes=123_456_789
            )
        )
    watcher.end(RESULT)


def seen(*, terminal: bool) -> str:
    file = io.StringIO()
    with showing_progress(Console(file=file, force_terminal=terminal, width=100)) as watcher:
        follow_a_run(watcher)
    return file.getvalue()


def test_a_pipe_gets_a_plain_line_for_each_tenth_of_the_run() -> None:
    output = seen(terminal=False)
    assert "\x1b" not in output and "\r" not in output
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 11  # the first step, then every tenth
    assert lines[0] == "step  1/40  loss 5.000  128 tokens/s  123.5 MB"
    assert lines[-1] == "step 40/40  loss 5.000  128 tokens/s  123.5 MB"


def test_a_terminal_gets_one_line_that_renews_itself() -> None:
    output = seen(terminal=True)
    assert "step 40/40" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor comes back"


def test_the_summary_says_what_was_trained_and_what_each_rank_held() -> None:
    output = seen(terminal=False)
    assert "the folder [here]" in output
    assert "Trained 250 parameters on 2,560 tokens in 12.3 s, sharded over 2 cpu ranks." in output
    rows = [line.replace("|", " ").split() for line in output.translate({0x2502: "|"}).splitlines()]
    assert ["first", "step", "5.5452", "8.0000"] in rows
    assert ["last", "step", "1.3863", "2.0000"] in rows
    assert ["held", "out,", "after", "1.5000", "2.1640"] in rows
    assert ["rank", "0", "502", "50.2%"] in rows
    assert ["rank", "1", "498", "49.8%"] in rows
    assert ["unsharded", "model", "1,000", "100.0%"] in rows


def test_an_error_gives_the_cursor_back() -> None:
    file = io.StringIO()
    try:
        with showing_progress(Console(file=file, force_terminal=True)) as watcher:
            watcher.begin(FACTS)
            raise ValueError
    except ValueError:
        pass
    output = file.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
