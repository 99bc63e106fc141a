"""Runs that are interrupted, or whose steps go wrong: nothing is lost, and all ranks do the same."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs.train.config import RunConfig, TrainSection
from fullshard.programs.train.config_file import to_toml
from fullshard.programs.train.loop import advice_after_bad_step
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.stop import BadStepError, StoppedBySignalError
from tests.helpers.ranks import World
from tests.helpers.runs import Incident, in_folder, last_losses, records, run, run_each, tiny

MakeWorld = Callable[[int], World]

# --- going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (
            *("sharding.api=fsdp1", "sharding.groups=plan"),
            *("sharding.replicas=2", "optimizer.shard_over_replicas=true"),
        ),
        (
            *("optimizer.name=adagrad", "optimizer.flat=false"),
            *("train.accumulate=2", "compute.checkpoint_activations=blocks"),
        ),
        ("optimizer.name=sgd", "compute.precision=bf16", "sharding.api=fsdp1"),
        ("optimizer.name=muon", "sharding.groups=plan"),
        (
            *("optimizer.name=adamw8bit", "sharding.groups=plan"),
            *("sharding.replicas=2", "optimizer.shard_over_replicas=true"),
        ),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_to_the_last_bit(
    world: MakeWorld, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    config = tiny(tmp_path, "checkpoint.every=2", "train.steps=5", *settings)
    parts = config.train.accumulate
    undisturbed = in_folder(config, tmp_path / "undisturbed")
    dropout = Incident("dropout", call=1, until=100, rank=None)
    world(2).run(run, undisturbed, dropout)
    for outcome in world(2).outcomes(run, config, dropout, Incident("SIGTERM", call=3 * parts)):
        assert isinstance(outcome, StoppedBySignalError)
        assert "by a signal after step 3 of 5" in str(outcome) and "step_00000003" in str(outcome)
    assert records(config, "stopped")[0]["step"] == 3
    for result in world(2).run(run, config, dropout):
        assert list(result.losses) == [4, 5]
    assert records(config, "start")[1]["resumed_from"] == 3
    assert last_losses(config) == last_losses(undisturbed)
    assert records(config, "evaluation") and (
        [(r["step"], r["loss"]) for r in records(config, "evaluation")]
        == [(r["step"], r["loss"]) for r in records(undisturbed, "evaluation")]
    )


def test_a_run_that_died_goes_on_from_its_last_checkpoint(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "checkpoint.every=2", "train.steps=4")
    undisturbed = in_folder(config, tmp_path / "undisturbed")
    world(2).run(run, undisturbed)
    for outcome in world(2).outcomes(run, config, Incident("error", call=4, rank=None)):
        assert str(outcome) == "died"
    assert list(last_losses(config)) == [1, 2, 3]
    # As a kill leaves it: a line cut short, and a save that never ended.
    with (config.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    unfinished = config.run.folder / "checkpoints" / "step_00000004" / "data-0123456789ab"
    unfinished.mkdir(parents=True)
    (unfinished / "rank-00000.safetensors").write_bytes(b"half of it")
    for result in world(2).run(run, config):
        assert list(result.losses) == [3, 4]
    assert last_losses(config) == last_losses(undisturbed)


def test_a_run_does_not_go_on_with_the_state_of_another_optimizer(
    world: MakeWorld, tmp_path: Path
) -> None:
    """Also if its configuration was edited, so that it does not say so."""
    world(2).run(run, tiny(tmp_path, "train.steps=1"))
    edited = tiny(tmp_path, "train.steps=2", "optimizer.name=sgd")
    (edited.run.folder / "config.toml").write_text(to_toml(edited))
    for outcome in world(2).outcomes(run, edited):
        assert isinstance(outcome, CheckpointError)
        assert "saved from torch.optim.AdamW, and this is torch.optim.SGD" in str(outcome)


def test_more_steps_go_on_where_fewer_ended_also_on_other_ranks_and_apis(
    world: MakeWorld, tmp_path: Path
) -> None:
    wrapper, replicas = ("sharding.api=fsdp1", "train.accumulate=2"), "sharding.replicas=2"
    divided = "optimizer.shard_over_replicas=true"
    others = {
        "adamw": (*wrapper, replicas, divided),
        "muon": (*wrapper, replicas),
        "adamw8bit": (replicas, divided),
    }

    def configs(steps: int, folder: str, *, elsewhere: bool = False) -> list[RunConfig]:
        return [
            tiny(
                tmp_path / folder / name,
                *("schedule.kind=constant", "schedule.warmup=0", f"train.steps={steps}"),
                *(f"optimizer.name={name}", *(settings if elsewhere else ())),
            )
            for name, settings in others.items()
        ]

    world(2).run(run_each, [*configs(4, "undisturbed"), *configs(2, "moved")])
    moved = configs(4, "moved", elsewhere=True)
    world(4).run(run_each, moved)
    for config, undisturbed in zip(moved, configs(4, "undisturbed"), strict=True):
        assert last_losses(config) == pytest.approx(last_losses(undisturbed), rel=1e-4)
        assert checkpoint.latest(config.run.folder / "checkpoints") is not None
        assert list(last_losses(config)) == [1, 2, 3, 4]
        held = [records(each, "step")[-1]["optimizer_bytes"] for each in (config, undisturbed)]
        # Shards are as large as on two ranks: only replicas that divide their state have less. In 8 bits, so small a model
        # has more of its edges of blocks than of state.
        divides = config.optimizer.shard_over_replicas and config.optimizer.name == "adamw"
        assert (held[0] < 0.7 * held[1]) is divides


def test_a_finished_run_is_left_alone(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=1")
    world(2).run(run, config)
    before = (config.run.folder / "metrics.jsonl").read_bytes()
    for result in world(2).run(run, config):
        assert result.was_finished and not result.losses
    assert (config.run.folder / "metrics.jsonl").read_bytes() == before


def test_a_fresh_run_moves_the_old_one_aside_once_nothing_stands_against_it(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "train.steps=1")
    world(2).run(run, config)
    before = (config.run.folder / "metrics.jsonl").read_bytes()
    for outcome in world(2).outcomes(run, tiny(tmp_path, "model.vocabulary=10"), fresh=True):
        assert isinstance(outcome, ConfigurationError)
    assert (config.run.folder / "metrics.jsonl").read_bytes() == before
    for result in world(2).run(run, tiny(tmp_path, "train.steps=1", "optimizer.lr=1"), fresh=True):
        assert list(result.losses) == [1]
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_bytes() == before


def test_a_request_in_the_last_step_is_no_reason_to_stop(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=3")
    for result in world(2).run(run, config, Incident("SIGTERM", call=3)):
        assert list(result.losses) == [1, 2, 3]
    assert records(config, "end") and not records(config, "stopped")


def test_old_checkpoints_are_removed_also_those_of_before_a_restart(
    world: MakeWorld, tmp_path: Path
) -> None:
    for steps in (2, 4):
        config = tiny(tmp_path, f"train.steps={steps}", "checkpoint.every=1", "checkpoint.keep=2")
        world(2).run(run, config)
    left = sorted(path.name for path in (config.run.folder / "checkpoints").iterdir())
    assert left == ["step_00000003", "step_00000004"]
    written = records(config, "checkpoint")
    assert [record["step"] for record in written] == [1, 2, 3, 4]
    removed = [record["removed"] for record in written]
    assert removed == [(), (), ("checkpoints/step_00000001",), ("checkpoints/step_00000002",)]


def test_a_checkpoint_that_cannot_be_written_is_the_same_error_on_all(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "checkpoint.every=2", "train.steps=3")
    taken = config.run.folder / "checkpoints" / "step_00000002"
    taken.mkdir(parents=True)
    (taken / "a file of somebody else").touch()
    RunFolder(config.run.folder).config.write_text(to_toml(config))
    outcomes = world(2).outcomes(run, config)
    assert all(isinstance(each, CheckpointError) for each in outcomes)
    assert len({str(each) for each in outcomes}) == 1
    assert "step_00000002" in str(outcomes[0]) and "Choose another folder" in str(outcomes[0])


# --- bad steps ---------------------------------------------------------------------------------------

NAN = Incident("nan", call=3)
"""On one rank, in its third step."""


def test_a_bad_step_stops_the_run_on_all_ranks_and_leaves_the_checkpoint_from_before(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "checkpoint.every=1", "train.steps=4")
    outcomes = world(2).outcomes(run, config, NAN)
    for outcome in outcomes:
        assert isinstance(outcome, BadStepError)
        assert str(outcome).startswith("Step 3 was bad: loss is nan. Its update was not made")
        assert 'with train.on_bad_step = "skip" resumes from the last checkpoint' in str(outcome)
        assert "step_00000002" in str(outcome)
    newest = checkpoint.latest(config.run.folder / "checkpoints")
    assert newest is not None and newest.name == "step_00000002"
    [trouble] = records(config, "trouble")
    assert (trouble["step"], trouble["what"], trouble["action"]) == (3, "loss is nan", "stop")
    assert math.isnan(records(config, "step")[-1]["loss"])
    assert not records(config, "end")
    skipping = tiny(tmp_path, "checkpoint.every=1", "train.steps=4", "train.on_bad_step=skip")
    for result in world(2).run(run, skipping, Incident("nan", call=1)):
        assert list(result.losses) == [3, 4], "the same run goes on past the bad step"


def test_what_may_help_after_a_bad_step_is_what_the_run_does_not_have_yet() -> None:
    stopping = advice_after_bad_step(TrainSection(max_norm=5.0), Path("step_2"), is_finite=True)
    assert 'with train.on_bad_step = "skip" or a higher train.max_norm resumes' in stopping
    assert "from the last checkpoint, step_2." in stopping and "a lower train.clip" in stopping
    skipping = advice_after_bad_step(
        TrainSection(on_bad_step="skip", clip=0.0), None, is_finite=False
    )
    assert "with a larger train.max_bad_steps resumes from the start: there is no" in skipping
    assert "lower train.clip" not in skipping and "max_norm" not in skipping


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_skipped_step_changes_neither_weights_nor_optimizer(
    world: MakeWorld, tmp_path: Path, api: str
) -> None:
    settings = ("train.on_bad_step=skip", f"sharding.api={api}", "checkpoint.every=1")
    config = tiny(tmp_path, "train.steps=4", "checkpoint.keep=4", *settings)
    first, second = world(2).run(run, config, NAN)
    assert math.isnan(first.losses[3]) and math.isnan(second.losses[3])
    assert math.isfinite(first.losses[4])
    before, after, later = world(1).run(what_is_saved, config, (2, 3, 4))[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in before)
    [trouble] = records(config, "trouble")
    assert trouble["action"] == "skip"


def what_is_saved(config: RunConfig, steps: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """The checkpoints of these steps, each as one rank has it after loading it."""
    from fullshard.programs.train.optimizer import build_optimizer
    from fullshard.programs.train.sharded_model import build_model

    model = build_model(config, open_model(config), torch.device("cpu"))
    optimizer = build_optimizer(config.optimizer, model)
    found = []
    for step in steps:
        path = config.run.folder / "checkpoints" / f"step_{step:08d}"
        checkpoint.load(path, model.module, optimizer)
        saved = {name: local(param) for name, param in model.module.named_parameters()}
        for number, state in enumerate(optimizer.state.values()):
            saved |= {f"{number} {key}": local(value) for key, value in state.items()}
        found.append(saved)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return whole.detach().clone()


def test_too_many_bad_steps_in_a_row_stop_the_run_also_across_a_resume(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "train.on_bad_step=skip", "train.max_bad_steps=3")
    bad = Incident("nan", call=2, until=9)
    for outcome in world(2).outcomes(run, config, bad, Incident("SIGTERM", call=3)):
        assert isinstance(outcome, StoppedBySignalError)
    for outcome in world(2).outcomes(run, config, Incident("nan", call=1)):
        assert isinstance(outcome, BadStepError)
        assert "Step 4 was bad: loss is nan, and 3 steps in a row were" in str(outcome)
    assert [r["action"] for r in records(config, "trouble")] == ["skip", "skip", "stop"]


def run_without_warnings(*arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return run(*arguments)


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_step_that_fails_on_one_rank_is_skipped_by_all(
    world: MakeWorld, tmp_path: Path, api: str
) -> None:
    settings = (
        f"sharding.api={api}",
        "train.accumulate=2",
        "train.steps=5",
        "checkpoint.every=1",
    )
    config = tiny(tmp_path, "train.on_error=skip", "checkpoint.keep=5", *settings)
    # The second microbatch of step 3, and the first one of step 5 on all ranks.
    errors = Incident("error", call=6), Incident("error", call=9, rank=None)
    results = world(2).run(run_without_warnings, config, *errors)
    for result in results:
        assert [step for step, loss in result.losses.items() if math.isnan(loss)] == [3, 5]
    before, after, later = world(1).run(what_is_saved, config, (2, 3, 4))[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in before)
    one, all_ranks = records(config, "trouble")
    assert (one["step"], one["what"], one["action"]) == (3, "rank 1: RuntimeError: died", "skip")
    assert "in happen" in one["traceback"]
    assert (all_ranks["step"], all_ranks["what"]) == (5, "rank 0: RuntimeError: died")


def test_too_many_failed_steps_in_a_row_stop_the_run(world: MakeWorld, tmp_path: Path) -> None:
    settings = ("train.on_error=skip", "train.on_bad_step=skip", "train.max_bad_steps=3")
    config = tiny(tmp_path, *settings)
    incidents = Incident("error", call=2, until=3), Incident("nan", call=4)
    for outcome in world(2).outcomes(run, config, *incidents):
        assert isinstance(outcome, BadStepError)
        assert "Step 4 was bad: loss is nan, and 3 steps in a row were" in str(outcome)
    config = tiny(tmp_path / "other", "train.on_error=skip", "train.max_bad_steps=2")
    for outcome in world(2).outcomes(run, config, Incident("error", call=2, until=3)):
        assert isinstance(outcome, BadStepError)
        assert "Step 3 was bad: rank 1: RuntimeError: died, and 2 steps in a row" in str(outcome)
        assert "a larger train.accumulate" in str(outcome)


def test_an_ignored_step_and_slow_ranks_are_told(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.on_bad_step=ignore", "train.steps=4")
    for result in world(2).run(run, config, NAN, Incident("stall", call=2, until=3, rank=None)):
        assert math.isnan(result.losses[4]), "the weights are no numbers any more"
    assert [(r["step"], r["action"]) for r in records(config, "trouble")] == [
        (3, "ignore"),
        (4, "ignore"),
    ]
    told = [r for r in records(config, "stall") if r["report"] == "all of it"]
    assert [(r["step"], r["ranks"], r["where"]) for r in told] == [
        (2, (1,), "at data.py:3"),
        (3, (1,), "at data.py:3"),
    ]
    assert min(r["seconds"] for r in told) >= 7.0


def test_a_norm_above_the_limit_is_bad(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.max_norm=1e3", "train.on_bad_step=skip", "train.steps=4")
    for result in world(2).run(run, config, Incident("large", call=3)):
        assert all(map(math.isfinite, result.losses.values()))
    [trouble] = records(config, "trouble")
    assert trouble["step"] == 3
    assert trouble["what"].startswith("norm of the gradients is ")
    assert trouble["what"].endswith(", above train.max_norm 1000")
