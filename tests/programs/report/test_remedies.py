"""Every remedy that the report can give, applied to a run that causes its finding: it runs, and less of it is found.

Runs are of the trainer, or of a program as a user writes it. Where times matter, they are in a time that the test makes
(`virtual_time`): a wire and a machine of known speed, and ranks of a world without others, whose collectives move nothing. Where
values matter, one real rank trains. Nothing else is made up, except for what no CPU has: memory that runs out is an exception above
so many bytes of activations. Remedies that say where to look are applied by taking the cause away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import fullshard.optim
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    plan_groups,
)
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.findings import Call, Finding, Remedy
from fullshard.programs.report.reference import FINDINGS, markdown
from fullshard.programs.report.remedies import REMEDIES
from fullshard.programs.report.run_files import read_run
from fullshard.programs.train import loop
from fullshard.programs.train.resume import Checkpoints
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.stop import BadStepError
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers import runs
from tests.helpers.fake import fake_world
from tests.helpers.models import Block, ModelOptions
from tests.helpers.runs import Incident, tiny
from tests.helpers.virtual_time import Speeds, virtual_time

PAGE = Path(__file__).parents[3] / "docs" / "report.md"
VOCABULARY = 64
SLOW_WIRE = Speeds(ns_per_byte=400)
QUICK = Speeds()
LATENCY = Speeds(latency_us=3000)


# --- programs of the user's -----------------------------------------------------------------------


class Net(nn.Module):
    """A decoder whose embedding and head are as large as its blocks."""

    def __init__(self, *, depth: int, hidden: int, is_tied: bool) -> None:
        super().__init__()
        options = ModelOptions(width=16, hidden=hidden)
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(depth))
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program that shards a model over 4 ranks by itself."""

    depth: int = 4
    hidden: int = 32
    is_tied: bool = False
    speeds: Speeds = SLOW_WIRE
    is_wrapped: bool = False
    merged: int = 1
    """So many blocks are given to one call of `fully_shard`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of all calls."""
    code: tuple[Call, ...] = ()
    """Of remedies."""
    rows: int = 2
    reads_us: float = 0
    """How long reading a batch takes."""
    has_optimizer: bool = False

    def with_remedy(self, remedy: Remedy) -> Script:
        """The same program with a remedy."""
        if remedy.kind == "look":
            return replace(self, speeds=replace(self.speeds, slow_rank=None))
        if remedy.kind == "larger batch":
            return replace(self, rows=2 * self.rows)
        assert remedy.call is not None and not remedy.settings, "a program gets code"
        return replace(self, code=(*self.code, remedy.call))

    def at(self, place: str) -> list[str]:
        """The code of remedies that belongs to a place."""
        return [code for call in self.code if call.place == place for code in call.code]


NAMES: dict[str, Any] = {
    "MixedPrecision": MixedPrecision,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "ShardingStrategy": ShardingStrategy,
    "fullshard": fullshard,
    "fully_shard": fully_shard,
    "init_device_mesh": init_device_mesh,
    "plan_groups": plan_groups,
    "torch": torch,
}
"""What a program has imported that follows a remedy."""


def sharded(script: Script) -> Any:
    model: Any = Net(depth=script.depth, hidden=script.hidden, is_tied=script.is_tied)
    names = {**NAMES, "model": model}
    place = "wrapper" if script.is_wrapped else "fully_shard"
    options = {**script.options, **eval(f"dict({', '.join(script.at(place))})", names)}
    if script.is_wrapped:
        return FullyShardedDataParallel(
            model, **{"auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
        )
    if script.at("instead"):
        return eval(script.at("instead")[0], names)
    for first in range(0, len(model.blocks), script.merged):
        fully_shard([*model.blocks[first : first + script.merged]], **options)
    for code in script.at("before"):
        eval(code, names)
    fully_shard(model, **options)
    for i in range(len(model.blocks)):
        for code in script.at("layer"):
            eval(code, {"layers": [*model.blocks], "i": i})
    return model


def run_script(script: Script, folder: Path) -> None:
    """Take two steps, of which the second is recorded; on two ranks if these differ."""
    for rank in (0,) if script.speeds.slow_rank is None else (0, 1):
        with fake_world(4, rank):
            take_steps(script, folder)


def take_steps(script: Script, folder: Path) -> None:
    tokens = torch.zeros(script.rows, 8, dtype=torch.int64)
    model = sharded(script)
    (code,) = script.at("optimizer") or ["torch.optim.AdamW(model.parameters(), foreach=False)"]
    optimizer = eval(code, {**NAMES, "model": model}) if script.has_optimizer else None
    recording: Any = contextlib.nullcontext()
    with virtual_time(script.speeds) as clock:
        for _ in range(2):
            with recording:
                for code in script.at("batch"):
                    eval(code, {"model": model})
                clock.ns += round(1000 * script.reads_us)
                model(tokens).backward()
                if optimizer is not None:
                    optimizer.step()
                if isinstance(recording, fullshard.Recording):
                    recording.step()
            recording = fullshard.trace(model, folder)


# --- runs of the trainer --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run of the trainer."""

    settings: tuple[str, ...] = ()
    ranks: int = 2
    """Where times matter."""
    speeds: Speeds | None = None
    """None: a real rank trains, and only its metrics are looked at."""
    incidents: tuple[Incident, ...] = ()
    becomes_slower: bool | None = None
    """None: times are real, and may be those of a machine that does much else."""
    activation_bytes: int | None = None
    """Memory runs out above these."""

    def with_remedy(self, remedy: Remedy) -> Training:
        """The same run with a remedy, or without its cause."""
        if remedy.kind == "look":
            return replace(self, incidents=(), becomes_slower=False)
        assert remedy.settings and remedy.call is None, "a run of the trainer gets settings"
        return replace(self, settings=(*self.settings, *map(str, remedy.settings)))


TRACED = (
    *("train.steps=2", "trace.start=2", "trace.steps=1"),
    'train.on_bad_step="ignore"',  # values are not true in a world without others
)


def run_training(training: Training, folder: Path) -> None:
    assert training.speeds is not None
    config = tiny(folder, "evaluation.windows=1", *TRACED, *training.settings)
    with (
        fake_world(training.ranks),
        virtual_time(training.speeds),
        patch.multiple(Checkpoints, save=Mock(), finish=Mock()),  # they need the other ranks
    ):
        runs.run(config)


def train(trainings: list[tuple[Training, Path]]) -> None:
    """Run them on this rank, one after the other, and look at their metrics only."""
    for training, folder in trainings:
        config = tiny(folder, "evaluation.windows=1", *training.settings)
        with contextlib.ExitStack() as stack:
            if training.becomes_slower is not None:
                clock = Clock(slows=training.becomes_slower)
                stack.enter_context(patch.object(loop, "time", clock))
            if training.activation_bytes is not None:
                stack.enter_context(limited_memory(training.activation_bytes))
            stack.enter_context(contextlib.suppress(BadStepError))
            runs.run(config, *training.incidents)


class Clock:
    """In the place of the module `time`: looks at the clock are equally far apart, or each takes longer than the one before."""

    def __init__(self, *, slows: bool) -> None:
        self._slows = slows
        self._now = self._looks = 0.0

    def perf_counter(self) -> float:
        self._looks += 1
        self._now += self._looks if self._slows else 1
        return self._now


@contextlib.contextmanager
def limited_memory(activation_bytes: int) -> Iterator[None]:
    """Raise as CUDA does when a forward keeps more activations than these."""

    class Limited(runs.EventfulSource):
        def scores(self, model: nn.Module, tokens: Tensor) -> Tensor:
            kept = 0

            def keep(tensor: Tensor) -> Tensor:
                nonlocal kept
                kept += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                scores: Tensor = self._source.scores(model, tokens)
            if kept > activation_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {kept} bytes of activations")
            return scores

    open_model = runs.open_model
    with patch.object(runs, "open_model", lambda config: Limited(open_model(config), ())):
        yield


# --- the table ------------------------------------------------------------------------------------

Pairs = set[tuple[str, str]]
"""Findings and remedies, by kind."""


def pairs(**remedies: str) -> Pairs:
    """Kinds of remedies, by kinds of findings: separated by commas."""
    return {
        (finding.replace("_", " "), remedy.strip())
        for finding, kinds in remedies.items()
        for remedy in kinds.split(",")
    }


DEEP = ("model.layers=10", "model.width=4")
DIVERGING = (
    *('optimizer.name="sgd"', "optimizer.lr=9", "optimizer.momentum=0", "train.clip=0"),
    *('schedule.kind="constant"', "schedule.warmup=12", "train.steps=12"),
)
CAUSES: dict[str, tuple[Script | Training, Pairs]] = {
    "script, slow wire": (
        Script(reads_us=300),
        pairs(
            first_gather="plan, unshard early",
            gathers="larger batch, half of the bytes, keep gathered, replicas",
            reductions="narrow wire, plan, larger batch",
        ),
    ),
    "script, tied": (Script(is_tied=True), set()),
    "script, wrapper": (
        Script(is_wrapped=True),
        pairs(
            first_gather="plan",
            gathers="half of the bytes, keep gathered, replicas",
            reductions="narrow wire",
        ),
    ),
    "script, one slow gather": (
        Script(speeds=Speeds(slow_groups={"blocks.2": 200})),
        pairs(gathers="deeper prefetch"),
    ),
    "script, latency": (Script(depth=8, speeds=LATENCY), pairs(small_groups="plan")),
    "script, padding": (
        Script(hidden=5, speeds=QUICK),
        pairs(padding="replicas, balanced placement"),
    ),
    "script, kept": (
        Script(speeds=QUICK, options={"reshard_after_forward": False}),
        pairs(gathered_at_once="release after forward"),
    ),
    "script, wrapper, kept": (
        Script(
            speeds=QUICK,
            is_wrapped=True,
            options={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        ),
        pairs(gathered_at_once="release after forward"),
    ),
    "script, large groups": (
        Script(merged=2, speeds=QUICK),
        pairs(gathered_at_once="smaller groups"),
    ),
    "script, optimizer": (
        Script(has_optimizer=True, speeds=Speeds(op_us=50)),
        pairs(outside="flat optimizer"),
    ),
    "script, late rank": (Script(speeds=Speeds(slow_rank=1)), pairs(late_rank="look")),
    "trainer, slow wire": (
        Training(speeds=SLOW_WIRE),
        pairs(
            first_gather="plan",
            gathers="larger batch, half of the bytes, keep gathered",
            reductions="narrow wire",
            gathered_at_once="smaller groups",
        ),
    ),
    "trainer, wrapper": (
        Training(settings=('sharding.api="fsdp1"', "train.accumulate=2"), speeds=SLOW_WIRE),
        pairs(first_gather="plan", gathers="larger batch"),
    ),
    "trainer, padding": (
        Training(ranks=8, settings=("model.width=12", "model.layers=8"), speeds=QUICK),
        pairs(padding="replicas, cut regardless of rows"),
    ),
    "trainer, one slow gather": (
        Training(settings=("model.layers=4",), speeds=Speeds(slow_groups={"blocks.2": 2000})),
        pairs(gathers="deeper prefetch"),
    ),
    "trainer, latency": (
        Training(settings=(*DEEP, 'sharding.api="fsdp1"'), speeds=LATENCY),
        pairs(small_groups="plan"),
    ),
    "trainer, kept": (
        Training(settings=("sharding.reshard_after_forward=false", "model.layers=4"), speeds=QUICK),
        pairs(gathered_at_once="release after forward"),
    ),
    "trainer, large groups": (
        Training(settings=(*DEEP, 'sharding.groups="plan"', "sharding.prefetch=5"), speeds=QUICK),
        pairs(gathered_at_once="smaller groups"),
    ),
    "trainer, optimizer": (
        Training(
            settings=("optimizer.flat=false", 'optimizer.name="adagrad"'), speeds=Speeds(op_us=300)
        ),
        pairs(outside="flat optimizer"),
    ),
    "trainer, one bad step": (
        Training(
            settings=('train.on_bad_step="ignore"',), incidents=(Incident("nan", 3, rank=None),)
        ),
        pairs(bad_steps="skip bad steps, look"),
    ),
    "trainer, diverges": (
        Training(settings=(*DIVERGING, 'train.on_bad_step="ignore"')),
        pairs(bad_steps="lower rate, clip"),
    ),
    "trainer, memory": (
        Training(
            settings=('train.on_error="skip"', "train.steps=2"),
            activation_bytes=500_000,
        ),
        pairs(failed_steps="smaller microbatches, recompute"),
    ),
    "trainer, error": (
        Training(
            settings=('train.on_error="skip"', "train.steps=2"),
            incidents=(Incident("error", 2, rank=None),),
        ),
        pairs(failed_steps="look"),
    ),
    "trainer, incidents": (
        Training(
            settings=("train.steps=27", "optimizer.lr=1e-4"),
            incidents=(Incident("stall", 3, rank=None), Incident("large", 27, rank=None)),
            becomes_slower=True,
        ),
        pairs(stalls="look", loss_jumps="look", slower="look"),
    ),
}


def found(
    programs: dict[str, Script | Training], folder: Path, world: Any
) -> dict[str, list[Finding]]:
    """Run all programs, equal ones once, and return what is found about each."""
    distinct: list[Script | Training] = []
    for each in programs.values():
        if each not in distinct:
            distinct.append(each)
    trainings = []
    for number, program in enumerate(distinct):
        if isinstance(program, Script):
            run_script(program, folder / str(number))
        elif program.speeds is None:
            trainings.append((program, folder / str(number)))
        else:
            run_training(program, folder / str(number))
    if trainings:
        world(1).run(train, trainings)
    inside = ["" if isinstance(each, Script) else "run" for each in distinct]
    findings = [
        diagnose(Analysis(read_run(folder / str(number) / name)))
        for number, name in enumerate(inside)
    ]
    return {name: findings[distinct.index(each)] for name, each in programs.items()}


def amount(findings: list[Finding], kind: str) -> float:
    return sum(finding.amount for finding in findings if finding.kind == kind)


@pytest.mark.timeout(400)  # some forty runs, on a machine that does much else
@pytest.mark.parametrize("kind", [Script, Training])
def test_every_remedy_helps_the_run_that_it_is_given_to(kind, world, tmp_path: Path) -> None:
    causes = {name: each for name, (each, _) in CAUSES.items() if isinstance(each, kind)}
    before = found(causes, tmp_path / "before", world)
    given = {
        f"{name}: {finding.kind}: {remedy}": (name, finding.kind, remedy)
        for name, findings in before.items()
        for finding in findings
        for remedy in finding.remedies
        if (finding.kind, remedy.kind) in CAUSES[name][1]
    }
    expected = {(name, *pair) for name in causes for pair in CAUSES[name][1]}
    assert {(name, about, remedy.kind) for name, about, remedy in given.values()} == expected
    mended = {label: causes[name].with_remedy(remedy) for label, (name, _, remedy) in given.items()}
    after = found(mended, tmp_path / "after", world)
    left = {
        label: (amount(before[name], about), amount(after[label], about))
        for label, (name, about, _) in given.items()
    }
    assert {label: change for label, change in left.items() if change[1] >= change[0]} == {}
    if kind is Script:
        tied = {remedy.kind for finding in before["script, tied"] for remedy in finding.remedies}
        assert tied and "plan" not in tied, "the head has the embedding's weight"
        return
    folders = {name: tmp_path / "before" / str(number) for number, name in enumerate(causes)}
    needs_new_run = {
        label: is_refused(folders[name], mended[label])
        for label, (name, _, remedy) in given.items()
        if remedy.settings
    }
    assert needs_new_run == {label: ", in a new run" in label for label in needs_new_run}


def is_refused(folder: Path, training: Training) -> bool:
    """Whether the run in a folder cannot go on with these settings."""
    traced = () if training.speeds is None else TRACED
    config = tiny(folder, "evaluation.windows=1", *traced, *training.settings)
    try:
        RunFolder(config.run.folder).check(config)
    except ConfigurationError:
        return True
    return False


def test_every_pair_of_finding_and_remedy_has_a_cause_and_is_on_the_page() -> None:
    listed = {(kind, remedy) for kind, each in FINDINGS.items() for remedy in each.remedies}
    assert {pair for _, wanted in CAUSES.values() for pair in wanted} == listed
    assert {remedy for _, remedy in listed} == {*REMEDIES}
    assert markdown() in PAGE.read_text()
