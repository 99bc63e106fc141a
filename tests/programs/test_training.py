"""The training loop on real ranks: the same run, however it is spread."""

import io
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigurationError
from fullshard.optim import AdamW8bit, ShardedOptimizer
from fullshard.programs.train.config import RunConfig, ScheduleSection
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.optimizer import (
    build_optimizer,
    learning_rate,
    set_learning_rate,
)
from fullshard.programs.train.result import TrainResult
from fullshard.programs.train.sharded_model import build_model
from tests.helpers.fake import fake_world
from tests.helpers.ranks import World
from tests.helpers.runs import records, run, run_each, tiny

MakeWorld = Callable[[int], World]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


STEPS = 4
"""Of runs that are compared with one another."""


def short(folder: Path, *settings: str) -> RunConfig:
    return tiny(folder, f"train.steps={STEPS}", *settings)


@pytest.fixture(scope="module")
def one_rank(world: MakeWorld, folder: Path) -> TrainResult:
    """The run that all others are compared with."""
    [result] = world(1).run(run, short(folder / "one"))
    return result


SPREADS: dict[int, list[tuple[str, ...]]] = {
    1: [("train.accumulate=4", "compute.graph=true")],
    2: [
        ("train.accumulate=2", "sharding.api=fsdp1", "compute.checkpoint_activations=blocks"),
        ("train.accumulate=2", "optimizer.flat=false", "sharding.prefetch=3"),
        ("sharding.api=fsdp1", "sharding.reshard_after_forward=false"),
        ("sharding.groups=plan", "sharding.prefetch=2", "sharding.reshard_after_forward=false"),
        ("compute.fuse_gradients=true", "train.accumulate=2"),
        ("compute.fuse_gradients=true", "sharding.api=fsdp1", "sharding.groups=plan"),
        ("sharding.groups=plan", "sharding.api=fsdp1", "optimizer.flat=false"),
        ("compute.checkpoint_activations=selective",),
        ("compute.compile=blocks", "compute.checkpoint_activations=blocks"),
        ("sharding.replicas=2",),
    ],
    4: [
        (),
        ("sharding.replicas=2", "train.accumulate=2"),
        ("sharding.replicas=2", "sharding.api=fsdp1", "optimizer.shard_over_replicas=true"),
    ],
}
"""Settings, by how many ranks there are."""


@pytest.mark.parametrize("size", SPREADS)
def test_losses_do_not_depend_on_how_a_run_is_spread(
    world: MakeWorld, tmp_path: Path, one_rank: TrainResult, size: int
) -> None:
    configs = [short(tmp_path / str(n), *each) for n, each in enumerate(SPREADS[size])]
    for results in world(size).run(run_each, configs):
        for settings, result in zip(SPREADS[size], results, strict=True):
            assert result.losses == pytest.approx(one_rank.losses, rel=1e-4), settings
            assert result.evaluations == pytest.approx(one_rank.evaluations, rel=1e-4), settings
            assert result.tokens == one_rank.tokens == STEPS * 8 * 16
    if size == 4:
        state = [records(config, "step")[-1]["optimizer_bytes"] for config in configs]
        assert state[1] == pytest.approx(2 * state[0], rel=0.05), "two replicas of all state"
        assert state[2] == pytest.approx(state[0], rel=0.05), "divided over the replicas"


def fused_of(config: RunConfig) -> dict[str, str]:
    """Why gradients are not fused, by the names of weights."""
    source = open_model(config)
    model = build_model(config, source, torch.device("cpu"))
    source.fill(model.module, seed=0)
    model.module(torch.zeros(1, 4, dtype=torch.int64))
    return model.module.fused_gradients()


def test_gradients_are_fused_where_it_is_wanted(world: MakeWorld, tmp_path: Path) -> None:
    for api in ("fsdp2", "fsdp1"):
        for settings, is_fused in (
            ("compute.fuse_gradients=true", True),
            ("compute.graph=true", False),
        ):
            config = tiny(tmp_path, f"sharding.api={api}", settings)
            for reasons in world(2).run(fused_of, config):
                blocks = [reason for name, reason in reasons.items() if "blocks." in name]
                assert blocks.count("") == len(blocks) > 10 if is_fused else not blocks


def test_captured_steps_fuse_gradients_unless_told_otherwise() -> None:
    def fuses(device: str, *settings: str) -> bool:
        return read_config(None, settings).compute.fuses_gradients(device)

    assert fuses("cuda", "compute.graph=true")
    assert not fuses("cpu", "compute.graph=true") and not fuses("cuda")
    assert not fuses("cuda", "compute.graph=true", "compute.fuse_gradients=false")
    assert fuses("cuda", "compute.fuse_gradients=true")


def test_training_lowers_the_loss_and_writes_down_what_it_did(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(
        tmp_path, "evaluation.every=4", "checkpoint.every=4", "samples.count=2", "samples.tokens=5"
    )
    first, second = world(2).run(run, config)
    assert first.losses == second.losses
    assert first.losses[6] < first.losses[1] - 0.5
    assert first.evaluations[6] < first.evaluations[0] - 0.5
    assert list(first.evaluations) == [0, 4, 6]
    [start] = records(config, "start")
    assert sum(start["rank_bytes"]) == start["unsharded_bytes"] == 4 * start["parameters"]
    assert start["rank_bytes"][0] < 0.6 * start["unsharded_bytes"]
    assert (start["world"], start["steps"], start["resumed_from"]) == (2, 6, None)
    assert start["tokens_per_step"] == 8 * 16
    steps = records(config, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["loss"] for step in steps] == list(first.losses.values())
    assert [step["tokens"] for step in steps] == [128 * n for n in range(1, 7)]
    state = [step["optimizer_bytes"] for step in steps]
    assert all(1.9 < nbytes / start["rank_bytes"][0] < 2.1 for nbytes in state)
    assert all(0 < step["optimizer_s"] < step["step_s"] for step in steps)
    assert all(step["grad_norm"] > 0 and step["step_s"] > 0 for step in steps)
    assert [(r["step"], r["loss"]) for r in records(config, "evaluation")] == list(
        first.evaluations.items()
    )
    saved = {record["step"]: record["path"] for record in records(config, "checkpoint")}
    assert saved == {4: "checkpoints/step_00000004", 6: "checkpoints/step_00000006"}
    assert all((config.run.folder / path / "manifest.json").exists() for path in saved.values())
    [samples] = records(config, "samples")
    assert samples["texts"] == first.samples == second.samples
    assert len(first.samples) == 2
    [end] = records(config, "end")
    assert end["step"] == 6 and end["seconds"] > 0


def test_the_wanted_steps_are_traced_on_the_wanted_ranks(
    world: MakeWorld, tmp_path: Path, one_rank: TrainResult
) -> None:
    for api in ("fsdp2", "fsdp1"):
        config = short(
            tmp_path / api,
            *(f"sharding.api={api}", "trace.start=2", "trace.steps=2", "trace.ranks=1"),
            *("train.accumulate=2", "evaluation.every=1", "checkpoint.every=1"),
        )
        result, _ = world(2).run(run, config)
        assert result.losses == pytest.approx(one_rank.losses, rel=1e-4)
        [file] = (config.run.folder / "trace").iterdir()
        spans = json.loads(file.read_text())["traceEvents"]
        assert file.name == "rank_00000.json"
        assert [each["name"] for each in spans if each.get("cat") == "step"] == ["step 2", "step 3"]
        reduced = [each["args"]["step"] for each in spans if each.get("cat") == "reduce"]
        assert sorted(reduced) == [2] * 3 + [3] * 3, "once a step and group, not for every part"
        forwards = [each["args"]["step"] for each in spans if each["name"] == "forward blocks.0"]
        assert sorted(forwards) == [2] * 2 + [3] * 2, "those of the evaluation are not among them"


def test_a_run_ends_with_the_path_of_its_report(world: MakeWorld, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    config = tiny(tmp_path, "train.steps=2", "log.report=true")
    [(result, lines)] = world(1).run(run_and_look, config)
    assert result.report == config.run.folder / "report.html"
    assert result.report.exists()
    assert lines[-1] == f"Report  {result.report}"
    [(again, lines)] = world(1).run(run_and_look, config)
    assert again.was_finished and again.report == result.report
    assert lines == [f"The run in {config.run.folder} is finished.", f"Report  {result.report}"]


def test_without_plotly_a_run_ends_as_well_and_says_so(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=2", "log.report=true")
    [(result, lines)] = world(1).run(run_and_look, config, without="plotly")
    assert result.report is None and len(result.losses) == 2
    assert lines[-1].startswith("There is no report: A report needs plotly")


def run_and_look(config: RunConfig, without: str = "") -> tuple[TrainResult, list[str]]:
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        if without:
            for name in [
                each for each in sys.modules if each.startswith("fullshard.programs.report.")
            ]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, without, None)
        result = run(config, shown=shown)
    return result, shown.getvalue().splitlines()


def test_other_dtypes_stay_close_to_float32(
    world: MakeWorld, tmp_path: Path, one_rank: TrainResult
) -> None:
    configs = [
        short(tmp_path / api / setting, f"sharding.api={api}", f"compute.{setting}=bf16")
        for api in ("fsdp2", "fsdp1")
        for setting in ("precision", "wire")
    ]
    results, _ = world(2).run(run_each, configs)
    for result in results:
        assert result.losses != one_rank.losses
        assert result.losses == pytest.approx(one_rank.losses, rel=0.05)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad", "muon", "adamw8bit"])
def test_optimizers_update_the_same_through_both_apis(
    world: MakeWorld, tmp_path: Path, one_rank: TrainResult, optimizer: str
) -> None:
    configs = [
        short(
            tmp_path / (api + flat),
            *(f"sharding.api={api}", f"optimizer.flat={flat}", f"optimizer.name={optimizer}"),
        )
        for api, flat in (("fsdp2", "true"), ("fsdp2", "false"), ("fsdp1", "true"))
    ]
    results, _ = world(2).run(run_each, configs)
    first, *others = [result.losses for result in results]
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)
    assert first != one_rank.losses
    assert first[STEPS] < first[1]
    if optimizer == "adamw8bit":
        for config in configs:
            [start], *_, step = records(config, "start"), *records(config, "step")
            # AdamW has 2. So small a model has more edges of blocks than blocks.
            assert 0.5 < step["optimizer_bytes"] / start["rank_bytes"][0] < 1.6


def test_hidden_matrices_of_muon_may_have_a_learning_rate_of_their_own() -> None:
    config = read_config(None, ["model.layers=2", "optimizer.name=muon", "optimizer.muon_lr=8"])
    with fake_world(2):
        model = build_model(config, open_model(config), torch.device("cpu"))
        optimizer = build_optimizer(config.optimizer, model)
    set_learning_rate(optimizer, 1e-3)
    rates = {
        parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]
    }
    found = {name: rates[parameter] for name, parameter in model.module.named_parameters()}
    hidden = {name for name, rate in found.items() if rate == pytest.approx(8e-3)}
    assert len(hidden) == 2 * 7
    assert all(name.startswith("blocks.") for name in hidden)
    assert all(found[name] == pytest.approx(1e-3) for name in found.keys() - hidden)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_replicas_divide_the_state_of_an_optimizer_if_the_run_asks_for_it(
    name: str, asked: bool
) -> None:
    settings = [f"optimizer.name={name}", f"optimizer.shard_over_replicas={str(asked).lower()}"]
    config = read_config(None, ["model.layers=1", "sharding.replicas=2", *settings])
    with fake_world(4):
        model = build_model(config, open_model(config), torch.device("cpu"))
        optimizer = build_optimizer(config.optimizer, model)
        assert isinstance(optimizer, AdamW8bit | ShardedOptimizer)
        assert optimizer.shards_over_replicas is asked


def test_clipping_bounds_the_update_and_not_the_norm_that_is_told(
    world: MakeWorld, tmp_path: Path
) -> None:
    configs = {
        clip: tiny(tmp_path / clip, f"train.clip={clip}", "train.steps=2", "optimizer.name=sgd")
        for clip in ("0", "1e-3")
    }
    world(2).run(run_each, list(configs.values()))
    norms = {
        clip: [record["grad_norm"] for record in records(config, "step")]
        for clip, config in configs.items()
    }
    assert norms["0"][0] == norms["1e-3"][0] > 0.1
    assert norms["0"][1] != norms["1e-3"][1]


def test_a_batch_that_ranks_cannot_share_is_refused_on_all(
    world: MakeWorld, tmp_path: Path
) -> None:
    outcomes = world(3).outcomes(run, short(tmp_path))
    assert all(isinstance(each, ConfigurationError) for each in outcomes)
    assert len({str(each) for each in outcomes}) == 1
    assert "ranks * train.accumulate: 8 / (3 * 1) leaves 2" in str(outcomes[0])


def test_another_run_in_the_same_folder_is_refused_on_all_ranks(
    world: MakeWorld, tmp_path: Path
) -> None:
    world(2).run(run, tiny(tmp_path, "train.steps=1"))
    outcomes = world(2).outcomes(run, tiny(tmp_path, "train.steps=1", "optimizer.lr=0.02"))
    assert all(isinstance(each, ConfigurationError) for each in outcomes)
    assert all("optimizer.lr was 0.01, and is 0.02 now" in str(each) for each in outcomes)


def test_only_matrices_are_decayed(world: MakeWorld, tmp_path: Path) -> None:
    for api in ("fsdp2", "fsdp1"):
        for decayed, plain in world(2).run(decayed_names, tiny(tmp_path, f"sharding.api={api}")):
            assert {name.rpartition(".")[0].split(".")[-1] for name in plain} == {
                "norm",
                "attention_norm",
                "feed_forward_norm",
            }
            assert "embed.weight" in decayed and len(decayed) == 2 + 2 * 7


def decayed_names(config: RunConfig) -> tuple[list[str], list[str]]:
    from fullshard.layout.names import clean_name
    from fullshard.programs.train.model_source import open_model
    from fullshard.programs.train.sharded_model import build_model

    model = build_model(config, open_model(config), torch.device("cpu"))
    names = {parameter: clean_name(name) for name, parameter in model.module.named_parameters()}
    matrices, others = model.parameters()
    is_functional = config.sharding.api == "fsdp2"
    assert all(isinstance(each, DTensor) is is_functional for each in matrices)
    return [names[each] for each in matrices], [names[each] for each in others]


def rates(steps: int, **schedule: object) -> list[float]:
    section = ScheduleSection(**schedule)
    return [learning_rate(step, highest=1.0, steps=steps, section=section) for step in range(steps)]


def test_the_learning_rate_warms_up_then_falls() -> None:
    cosine = rates(100)
    assert cosine[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert cosine[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(cosine[10:]))
    assert 0.1 < cosine[-1] < 0.11
    linear = rates(100, kind="linear", warmup=20.0, last=0.5)
    assert linear[19] == linear[20] == 1.0
    assert linear[60] == pytest.approx(0.75)
    assert rates(5, kind="constant", warmup=0.0) == [1.0] * 5


def test_any_step_has_a_learning_rate() -> None:
    assert rates(1) == [1.0]
    assert rates(3, warmup=10.0) == pytest.approx([0.1, 0.2, 0.3])
    beyond = learning_rate(50, highest=1.0, steps=10, section=ScheduleSection())
    assert beyond == pytest.approx(0.1)
