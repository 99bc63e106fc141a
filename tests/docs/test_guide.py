"""The programs of docs/guide.md run, print what the guide shows, and communicate what it says."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.transport import collectives
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Coalesced
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.page_programs import DOCS, blocks, check_output, execute
from tests.helpers.training import gradients, weights

pytestmark = pytest.mark.slow

GUIDE = DOCS / "guide.md"
STEPS = 10


class Program(NamedTuple):
    code: str
    ranks: int
    output: str
    """What the guide says it prints."""


class Outcome(NamedTuple):
    output: str
    losses: list[float]
    weights: dict[str, Tensor]
    collectives: Counter[tuple[str, int, int]]
    """How often which collective ran over how many ranks on how many bytes."""
    norms: list[float]
    """Where the program clips over meshes: see `norms_over_meshes`."""


# --- reading the guide -------------------------------------------------------------------------------


def programs(text: str) -> dict[str, Program]:
    """The guide's programs by name."""
    codes = {}
    for code in blocks(text, "python"):
        name = re.match(r"# (\w+)\.py\n", code)
        assert name, f"a program of the guide does not begin with its name: {code[:60]!r}"
        codes[name[1]] = code
    found = {"common": Program(codes.pop("common"), 0, "")}
    for block in blocks(text, "text"):
        command, output = block.split("\n", 1)
        words = shlex.split(command)
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "torchrun" in words else 1
        name_ = words[-1].removesuffix(".py")
        found[name_] = Program(codes.pop(name_), ranks, output)
    assert not codes, f"the guide does not say what these print: {sorted(codes)}"
    return found


PROGRAMS = programs(GUIDE.read_text())


# --- running it on ranks -----------------------------------------------------------------------------


@contextlib.contextmanager
def recorded_collectives() -> Iterator[Counter[tuple[str, int, int]]]:
    seen: Counter[tuple[str, int, int]] = Counter()

    def record(name: str, group: dist.ProcessGroup, tensors: Iterable[Tensor]) -> None:
        seen[name, group.size(), sum(tensor.nbytes for tensor in tensors)] += 1

    gather, scatter, reduce = Coalesced.gather, Coalesced.reduce, collectives.all_reduce

    def all_gather(transport: Any, outputs: Any, *args: Any, **options: Any) -> Any:
        record("all_gather", transport.group, outputs)
        return gather(transport, outputs, *args, **options)

    def reduce_scatter(
        transport: Any, outputs: Any, inputs: Any, *args: Any, **options: Any
    ) -> Any:
        record("reduce_scatter", transport.group, inputs)
        return scatter(transport, outputs, inputs, *args, **options)

    def all_reduce(tensor: Tensor, group: Any, op: Any, tag: Tag) -> None:
        record("all_reduce", group, [tensor])
        reduce(tensor, group, op, tag)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Coalesced, "gather", all_gather)
        monkeypatch.setattr(Coalesced, "reduce", reduce_scatter)
        monkeypatch.setattr(collectives, "all_reduce", all_reduce)
        yield seen


def run(common: str, code: str, folder: str) -> Outcome:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), recorded_collectives() as collectives:
        names = execute(common, code, folder)
    norms = norms_over_meshes(names) if "parallelize_module" in names else []
    found = weights(names["model"])
    return Outcome(output.getvalue(), names["losses"], found, collectives, norms)


def norms_over_meshes(names: dict[str, Any]) -> list[float]:
    """The norm that the program computes for another step, that after clipping to half, and the right one."""

    def right_norm() -> float:
        return (
            torch.stack([grad.norm() for grad in gradients(names["model"]).values()]).norm().item()
        )

    model, device = names["model"], names["device"]
    names["loss_of"](model, *names["batch"](0, device, names["part"], names["parts"])).backward()
    expected = right_norm()
    with pytest.raises(
        RuntimeError, match="same mesh"
    ):  # if this works one day, the guide gets shorter
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = names["clip_grad_norm_"](model, max_norm=0.5 * expected)
    return [norm.item(), right_norm(), expected]


@pytest.fixture
def outcomes_of(world, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a program of the guide; returns what it did, by rank."""

    def outcomes(name: str, folder: Path | None = None) -> list[Outcome]:
        program = PROGRAMS[name]
        place = str(folder or tmp_path_factory.mktemp(name))
        return world(program.ranks).run(run, PROGRAMS["common"].code, program.code, place)

    return outcomes


_OF_ONE_PROCESS: list[Outcome] = []


@pytest.fixture
def of_one_process(outcomes_of) -> Outcome:
    """What the program for one process did; it is run once per session."""
    if not _OF_ONE_PROCESS:
        _OF_ONE_PROCESS.extend(outcomes_of("step_a"))
    return _OF_ONE_PROCESS[0]


SINGLE = [name for name in PROGRAMS if name != "common" and not name.startswith("step_e")]
SAME_TRAINING = ["step_b", "step_d", "step_f", "step_f_parts", "step_g", "step_h", "step_j"]


def test_training_goes_on_from_the_checkpoints_of_the_guide(outcomes_of, tmp_path: Path) -> None:
    saved, *_ = outcomes_of("step_e", tmp_path)
    loaded, *_ = outcomes_of("step_e_load", tmp_path)
    check_output(PROGRAMS["step_e"].output, saved.output)
    check_output(PROGRAMS["step_e_load"].output, loaded.output)
    assert saved.losses[-1] < 0.1 * saved.losses[0]
    assert loaded.losses == saved.losses[5:]
    assert loaded.output.split()[-1] == f"{saved.losses[5]:.3f}"
    alone = execute(PROGRAMS["common"].code, "from common import *", str(tmp_path))
    model = alone["Model"]()
    model.load_state_dict(torch.load(tmp_path / "whole.pt"))
    with torch.no_grad():
        loss = alone["loss_of"](model, *alone["batch"](5, "cpu"))
    assert loss.item() == pytest.approx(saved.losses[5], rel=1e-5)


BLOCK, REST, NORM = 132_864, 33_024, 8
COMMUNICATED: dict[str, dict[tuple[str, int, int], int]] = {
    "step_b": {
        ("all_gather", 2, BLOCK): 8,
        ("all_gather", 2, REST): 1,
        ("reduce_scatter", 2, BLOCK): 4,
        ("reduce_scatter", 2, REST): 1,
    },
    "step_c": {
        ("all_gather", 2, BLOCK // 2): 16,
        ("all_gather", 2, REST // 2): 2,
        ("reduce_scatter", 2, BLOCK): 4,
        ("reduce_scatter", 2, REST): 1,
        ("all_reduce", 2, NORM): 1,
    },
    "step_f": {
        ("all_gather", 2, BLOCK): 8,
        ("all_gather", 2, REST): 1,
        ("reduce_scatter", 2, BLOCK): 4,
        ("reduce_scatter", 2, REST): 1,
        ("all_reduce", 2, BLOCK // 2): 4,
        ("all_reduce", 2, REST // 2): 1,
    },
    "step_f_parts": {
        ("all_gather", 4, BLOCK): 4,
        ("all_gather", 4, REST): 1,
        ("all_gather", 2, BLOCK): 4,
        ("reduce_scatter", 4, BLOCK): 4,
        ("reduce_scatter", 4, REST): 1,
    },
    "step_g": {
        ("all_gather", 2, 66_816): 8,
        ("all_gather", 2, REST): 1,
        ("reduce_scatter", 2, 66_816): 4,
        ("reduce_scatter", 2, REST): 1,
        ("all_reduce", 2, NORM): 3,  # what is sharded; what is also tensor-parallel, over both axes
    },
}
COMMUNICATED["step_d"] = COMMUNICATED["step_j"] = COMMUNICATED["step_b"]


# All that the guide says of a program is one test: others could run on another worker, and run the program again.
@pytest.mark.parametrize("name", SINGLE)
def test_a_program_does_what_the_guide_says(
    outcomes_of, of_one_process: Outcome, name: str
) -> None:
    outcome, *others = [of_one_process] if name == "step_a" else outcomes_of(name)
    check_output(PROGRAMS[name].output, outcome.output)
    assert len(outcome.losses) == STEPS
    assert outcome.losses[-1] < 0.1 * outcome.losses[0]
    for other in others:
        assert other.losses == outcome.losses
        assert_equal(other.weights, outcome.weights)
    if name in SAME_TRAINING:
        assert outcome.losses == pytest.approx(of_one_process.losses, rel=1e-3, abs=1e-5)
        assert_close(outcome.weights, of_one_process.weights, rtol=1e-2, atol=1e-3)
    if name in COMMUNICATED:
        per_step = {
            kind: times / STEPS
            for kind, times in outcome.collectives.items()
            if kind[:2] != ("all_reduce", 1)  # over replicas that are not there
        }
        assert per_step == COMMUNICATED[name]
    if name == "step_g":  # clips over several meshes
        norm, clipped, expected = outcome.norms
        assert norm == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(0.5 * expected, rel=1e-3)
