"""Ranks that die under torchrun: the run ends with the losses of one that nothing happened to.

FULLSHARD_KILLS says how many ranks are killed in the run, 1 by default.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from fullshard.programs.run_events import Start, Step, Stopped, read_events
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import to_toml
from tests.helpers.ranks import World
from tests.helpers.runs import in_folder, last_losses, records, run, tiny

NUM_KILLS = int(os.environ.get("FULLSHARD_KILLS", "1"))
NUM_STEPS = 12 + 8 * NUM_KILLS
START_S = 100.0
"""How long ranks may take to start and come to a step."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_S + START_S * NUM_KILLS)]


class Launch:
    """A run under torchrun."""

    def __init__(self, config: RunConfig, output: Path, *, python: str, max_restarts: int) -> None:
        self._file = output.with_suffix(".toml")
        self._file.write_text(to_toml(config))
        self.config = config
        self._output = output.open("w")
        self.process = subprocess.Popen(
            [
                *(python, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "--max-restarts", str(max_restarts)),
                *("--monitor-interval", "0.05", "-m", "fullshard", "train", str(self._file)),
            ],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHON_EXEC": python,  # by which torchrun starts them
            },
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait_for_step(self, step: int) -> None:
        """Return as soon as a step was written since the last start."""
        self._wait(lambda: self._last_step() >= step, f"step {step}")

    def wait_for_starts(self, number: int) -> None:
        """Return as soon as the ranks were started so many times."""
        self._wait(lambda: len(records(self.config, "start")) >= number, f"start {number}")

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_there():
            assert self.process.poll() is None, f"ended before {what}"
            assert time.monotonic() < deadline, f"still before {what}"
            time.sleep(0.005)

    def _last_step(self) -> int:
        step = 0
        for event in read_events(self.config.run.folder / "metrics.jsonl"):
            if isinstance(event, Start | Stopped):
                step = 0
            elif isinstance(event, Step):
                step = event.step
        return step

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, and return when its process has ended."""
        for process in self._processes():
            if process.environ().get("RANK") == str(rank):
                process.send_signal(number)
                deadline = time.monotonic() + START_S
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    assert time.monotonic() < deadline, f"rank {rank} goes on after {number.name}"
                    time.sleep(0.005)
                return
        raise AssertionError(f"there is no rank {rank}")

    def _processes(self) -> list[psutil.Process]:
        """torchrun and its ranks: they have the file among their arguments.

        Processes of the preloaded Python do not, and end with these.
        """
        found = psutil.process_iter(["cmdline"])
        return [each for each in found if str(self._file) in (each.info["cmdline"] or ())]

    def end(self) -> int:
        """Wait until it ends by itself, and return the exit code."""
        return self.process.wait(START_S)

    def close(self) -> None:
        """End it, if it has not ended."""
        for process in self._processes():
            process.kill()
        self.process.wait()
        self._output.close()


@contextmanager
def launched(
    config: RunConfig, output: Path, *, python: str, max_restarts: int = 0
) -> Iterator[Launch]:
    launch = Launch(config, output, python=python, max_restarts=max_restarts)
    try:
        yield launch
    except BaseException:
        launch.close()
        print(output.read_text())
        raise
    finally:
        launch.close()


def test_a_run_whose_ranks_are_killed_and_stopped_is_the_run_that_was_left_alone(
    world: Callable[[int], World], tmp_path: Path, preloaded_python: str
) -> None:
    config = tiny(tmp_path, f"train.steps={NUM_STEPS}", "checkpoint.every=2", "run.ranks=2")
    undisturbed = in_folder(config, tmp_path / "undisturbed")
    world(2).run(run, undisturbed)

    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown if the test fails
    draw = random.Random(seed)
    *kills, stop, last_stop = sorted(draw.sample(range(4, NUM_STEPS - 3), NUM_KILLS + 2))
    start = partial(launched, config, python=preloaded_python)
    with start(tmp_path / "first.log", max_restarts=NUM_KILLS + 1) as launch:
        for number, step in enumerate(kills, 1):
            launch.wait_for_step(step)
            launch.signal_rank(draw.randrange(2), signal.SIGKILL)
            launch.wait_for_starts(number + 1)
        launch.wait_for_step(stop)
        launch.signal_rank(draw.randrange(2), signal.SIGTERM)
        launch.wait_for_step(last_stop)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end() != 0
    resumed = [record["resumed_from"] for record in records(config, "start")]
    stopped = [record["step"] for record in records(config, "stopped")]
    assert len(resumed) == 1 + NUM_KILLS + 1
    assert len(stopped) == 2, "all ranks agreed to stop, and saved"
    assert resumed[-1] == stopped[0]
    assert not records(config, "end")
    with start(tmp_path / "second.log") as launch:
        assert launch.end() == 0
    assert records(config, "start")[-1]["resumed_from"] == stopped[1]
    assert len(records(config, "end")) == 1
    assert last_losses(config) == last_losses(undisturbed)
