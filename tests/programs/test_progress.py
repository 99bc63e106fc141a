"""What the user sees."""

import errno
import io
import itertools
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console
from rich.text import Text

from fullshard.programs.console.progress_line import LiveLine, PlainLine
from fullshard.programs.run_events import (
    BadStep,
    Checkpoint,
    End,
    Evaluation,
    Samples,
    Stall,
    Start,
    Step,
    Stopped,
    Watcher,
    line_of,
)
from fullshard.programs.train.earlier_starts import read_earlier_starts
from fullshard.programs.train.progress import showing_progress

FOLDER = Path("runs/[a]")

START = Start(
    world=2,
    device="cpu",
    parameters=250,
    unsharded_bytes=1000,
    rank_bytes=(502, 498),
    tokens_per_step=64,
    steps=40,
    model="a decoder of [2] layers",
    data="the folder [here]",
    left_out="hidden: [.git]",
    training_tokens=7_600_000,
    held_out_tokens=400_000,
    versions={},
    resumed_from=None,
)


def step(number: int, loss: float = 5.0) -> Step:
    return Step(
        step=number,
        loss=loss,
        grad_norm=0.7512,
        lr=3e-3,
        tokens=64 * number,
        step_s=0.5,
        memory_bytes=123_456_789,
    )


def follow_a_run(watch: Watcher) -> None:
    watch(START)
    watch(Evaluation(step=0, loss=5.5))
    for number in range(1, START.steps + 1):
        watch(step(number, {1: 8 * math.log(2), 40: 2 * math.log(2)}.get(number, 5.0)))
    old = ("checkpoints/step_00000020",)
    watch(Checkpoint(step=40, path="checkpoints/step_00000040", blocked_s=0.1, removed=old))
    watch(Evaluation(step=40, loss=1.5))
    watch(Samples(step=40, texts=("def [f]():\n\treturn \x1b[2J",)))
    watch(End(step=40, seconds=12.34))


def seen(*, terminal: bool) -> str:
    file = io.StringIO()
    with showing_progress(
        Console(file=file, force_terminal=terminal, width=120), FOLDER
    ) as progress:
        follow_a_run(progress)
        progress.print_last("Report  runs/[a]/report.html")
    return file.getvalue()


def test_a_pipe_gets_a_plain_line_for_each_tenth_of_the_run() -> None:
    output = seen(terminal=False)
    assert "\x1b" not in output and "\r" not in output
    lines = [line for line in output.splitlines() if line.startswith("step ") and "/40" in line]
    assert len(lines) == 11  # the first step, then every tenth
    parts = "128 tokens/s  mean loss 5.5452  118 MiB  lr 3.0e-03  norm 0.75"
    assert lines[0] == f"step  1/40  loss 5.5452  {parts}"
    # The loss of the step, as in the table, and the mean of the last steps.
    assert lines[-1].startswith("step 40/40  loss 1.3863  128 tokens/s  mean loss 4.6341")


def plain_lines(every: int | None, seconds_per_step: float, steps: int) -> list[str]:
    now = 0.0
    file = io.StringIO()
    line = PlainLine(Console(file=file, width=120), every, clock=lambda: now)
    line.begin(steps, 0, "step 0", [])
    for number in range(1, steps + 1):
        now += seconds_per_step
        line.show(number, f"step {number}", ["loss 1"])
    return file.getvalue().splitlines()


def shown_steps(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


def test_a_log_file_gets_a_line_at_least_every_minute() -> None:
    lines = plain_lines(None, 25.0, 100)
    numbers = shown_steps(lines)
    assert max(after - before for before, after in itertools.pairwise(numbers)) == 3
    assert {10, 50, 100} < set(numbers), "and one for each tenth"
    assert lines[1] == "step 4  loss 1  40:00 left" and lines[-1] == "step 100  loss 1"
    assert shown_steps(plain_lines(None, 0.1, 100)) == [1, *range(10, 101, 10)]


def test_a_log_file_gets_a_line_as_often_as_it_is_wanted() -> None:
    assert shown_steps(plain_lines(40, 0.1, 100)) == [1, 40, 80, 100]
    assert shown_steps(plain_lines(1000, 50.0, 6)) == [1, 3, 5, 6]


def test_a_terminal_gets_one_line_that_renews_itself() -> None:
    output = seen(terminal=True)
    assert "step 40/40" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor comes back"


STATUS = ("loss 3.989", "2,811 tokens/s", "386 MiB", "lr 3.5e-04", "norm 2.62")


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (110, "step 120/2000  BAR  " + "  ".join(STATUS) + "  1:02:40 left"),
        (80, "step 120/2000  loss 3.989  2,811 tokens/s  386 MiB  lr 3.5e-04  1:02:40 left"),
        (60, "step 120/2000  loss 3.989  2,811 tokens/s  1:02:40 left"),
        (40, "step 120/2000  loss 3.989  1:02:40 left"),
    ],
)
def test_a_narrow_terminal_loses_the_bar_first_and_never_the_remaining_time(
    width: int, expected: str
) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    now = 0.0
    line = LiveLine(console, clock=lambda: now)
    line.begin(2000, 100, "step 100/2000", ["evaluating"])
    line.show(101, "step 101/2000", STATUS)
    for number in range(102, 121):  # after a resume only its own steps tell how long a step takes
        now += 2.0
        line.show(number, f"step {number}/2000", STATUS)
    line.close()
    with console.capture() as shown:
        console.print(line)
    text = Text.from_ansi(shown.get()).plain
    assert re.sub("[\u2500-\u257f]+", "BAR", text).rstrip() == expected
    assert len(text.rstrip()) <= width


def test_the_summary_of_a_resumed_run_counts_the_whole_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    events = [
        *(START, Evaluation(step=0, loss=5.5), step(1, 8 * math.log(2))),
        *(BadStep(step=9, what="w", action="skip"), BadStep(step=13, what="w", action="skip")),
        *(step(13), replace(START, resumed_from=10), step(11)),
    ]
    times = [100, 101, 102, 103, 104, 110, 1000, 1005]  # killed after 10 s, and again after 5 s
    with metrics.open("w") as file, patch("fullshard.programs.run_events.time") as clock:
        for clock.time.return_value, event in zip(times, events, strict=True):
            file.write(line_of(event).decode())
    output = io.StringIO()
    with showing_progress(Console(file=output, width=120), FOLDER) as progress:
        progress.count_earlier(read_earlier_starts(metrics))
        progress(replace(START, resumed_from=10))
        progress(BadStep(step=13, what="w", action="skip"))
        progress(step(40, 2 * math.log(2)))
        progress(Evaluation(step=40, loss=1.5))
        progress(End(step=40, seconds=6.0))
    text = output.getvalue()
    assert "resumes after step 10" in text
    assert "Trained 40 steps on 2,560 tokens in 21.0 s, in 3 starts.\n" in text
    assert "This start: 30 steps on 1,920 tokens in 6.0 s.\n" in text
    assert "Skipped 2 of the steps: 9, 13.\n" in text
    assert "step 1 " in text and "held out, after step 0 " in text


def test_what_happens_besides_steps_gets_a_line_of_its_own() -> None:
    file = io.StringIO()
    with showing_progress(Console(file=file, width=120), FOLDER) as progress:
        progress(START)
        progress(step(1))
        progress(BadStep(step=9, what="loss is nan", action="skip"))
        progress(step(9, math.nan))
        progress(Stall(step=9, seconds=7.4, ranks=(1,), where="at data.py:3", report="all"))
        progress(Stopped(step=9, why="a signal"))
    # What comes after two spaces and a clock time is left of the run.
    assert re.sub("  [0-9:]+ left", "", file.getvalue()).splitlines()[-4:] == [
        "step 9: loss is nan; its update is skipped",
        "step  9/40  loss nan  128 tokens/s  mean loss 5.0000  118 MiB  lr 3.0e-03  norm 0.75",
        "step 9: others waited 7 s for rank 1 (at data.py:3)",
        "step 9: stopped by a signal",
    ]
    output = seen(terminal=False)
    assert "step 0: held-out loss 5.5000\n" in output
    place = "runs/[a]/checkpoints/step_000000"
    assert f"step 40: saved in {place}40; removed {place}20 (checkpoint.keep)\n" in output


def test_the_summary_says_what_was_trained_and_what_each_rank_held() -> None:
    output = seen(terminal=False)
    assert f"Folder  {Path.cwd()}/runs/[a]\n" in output
    assert "the folder [here]" in output and "a decoder of [2] layers" in output
    assert "        left out: hidden: [.git]\n" in output
    assert "def [f]():\n" in output and "return \\x1b[2J" in output
    assert "\nTrained 40 steps on 2,560 tokens in 12.3 s.\n" in output
    assert "\n250 parameters, sharded over 2 cpu ranks.\n" in output
    rows = [line.replace("|", " ").split() for line in output.translate({0x2502: "|"}).splitlines()]
    assert ["step", "1", "5.5452", "8.0000"] in rows
    assert ["step", "40", "1.3863", "2.0000"] in rows
    assert ["held", "out,", "after", "step", "40", "1.5000", "2.1640"] in rows
    assert ["rank", "0", "502", "B", "50.2%"] in rows
    assert ["rank", "1", "498", "B", "49.8%"] in rows
    assert ["unsharded", "model", "0.977", "KiB", "100.0%"] in rows
    assert output.splitlines()[-1] == "Report  runs/[a]/report.html"


def test_the_summary_names_steps_that_were_skipped() -> None:
    file = io.StringIO()
    with showing_progress(Console(file=file, width=120), FOLDER) as progress:
        progress(START)
        for number in range(1, 13):
            progress(step(number))
            progress(BadStep(step=number, what="rank 1: ValueError: no", action="skip"))
        progress(End(step=40, seconds=1.0))
    assert "Skipped 12 of the steps: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more.\n" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_that_leaves_does_not_end_the_run(terminal: bool) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        with showing_progress(
            Console(file=file, force_terminal=terminal, width=120), FOLDER
        ) as progress:
            progress(START)
            os.close(reading)
            follow_a_run(progress)
            progress.print_last("Report")
    # Closing it has written what was left in the buffer.


def test_a_disk_that_is_full_does_not_end_the_run() -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with showing_progress(Console(file=FullDisk()), FOLDER) as progress:
        follow_a_run(progress)


def test_an_error_gives_the_cursor_back() -> None:
    file = io.StringIO()
    try:
        with showing_progress(Console(file=file, force_terminal=True), FOLDER) as progress:
            progress(START)
            raise ValueError
    except ValueError:
        pass
    output = file.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
