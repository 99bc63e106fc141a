"""`fullshard inspect`: what it foretells is what a run then does."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fullshard
from fullshard.errors import ConfigurationError
from fullshard.programs import cli
from fullshard.programs.inspect_tool.cost import ShardedPlan, measure
from fullshard.programs.train.config_file import read_config, to_toml
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.sharded_model import build_model
from tests.helpers.fake import fake_world
from tests.helpers.groups import leave_group

WORLD = 4


def foretell(*settings: str) -> ShardedPlan:
    plan = measure(read_config(None, settings), WORLD)
    leave_group()
    return plan


def inspect(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.build_app(), ["inspect", *arguments])
    if code == 0:
        leave_group()
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


# --- what a run does ---------------------------------------------------------------------------------------


def traced_step(folder: Path, settings: list[str]) -> tuple[Counter[str], int]:
    """Bytes by kind of collective, and the most that was gathered at a time, of a step as rank 0 does it."""
    config = read_config(None, settings)
    source = open_model(config)
    with fake_world(WORLD):
        module = build_model(config, source, torch.device("cpu")).module
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        source.scores(module, tokens).sum().backward()  # from which the order is known
        with fullshard.trace(module, folder, first_step=2) as recording:
            source.scores(module, tokens).sum().backward()
            recording.step()
    [file] = folder.iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    sent: Counter[str] = Counter()
    for event in events:
        sent[event.get("cat", "")] += event.get("args", {}).get("bytes", 0)
    gathered = [event["args"]["gathered"] for event in events if event["ph"] == "C"]
    return sent, max(gathered)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["compute.precision=bf16", "sharding.replicas=2"],
        ["sharding.reshard_after_forward=false", "compute.wire=bf16"],
        ["sharding.prefetch=2", "model.width=20", "model.heads=2"],
    ],
)
def test_a_run_holds_and_sends_what_was_foretold(tmp_path: Path, settings: list[str]) -> None:
    plan = foretell(*settings)
    sent, gathered = traced_step(tmp_path, settings)
    assert sent["gather"] == plan.traffic.gathers
    assert sent["reduce"] == plan.traffic.reductions
    assert sent["all-reduce"] == plan.traffic.all_reductions
    assert 0.97 * plan.rank.gathered <= gathered <= plan.rank.gathered


def test_parameters_at_rest_are_this_ranks_share() -> None:
    config = read_config(None, ["model.layers=2"])
    plan = foretell("model.layers=2")
    with fake_world(WORLD):
        sharded = build_model(config, open_model(config), torch.device("cpu"))
        assert plan.rank.parameters == sharded.bytes_at_rest()
        assert plan.unsharded.parameters == sharded.unsharded.num_bytes
    assert plan.rank.optimizer == 2 * plan.rank.gradients == 2 * plan.rank.parameters


def test_rules_of_the_launcher_hold_for_callers_that_build_a_model_themselves() -> None:
    config = read_config(None, ["train.batch=15", "sharding.replicas=3"])
    config = replace(config, sharding=replace(config.sharding, prefetch=2, door="wrapper"))
    problems = (*config.problems(), *config.world_problems(WORLD))
    assert len(problems) == 3
    with fake_world(WORLD), pytest.raises(ConfigurationError) as refusal:
        build_model(config, open_model(config), torch.device("cpu"))
    assert str(refusal.value).splitlines() == [problem.text for problem in problems]


# --- what is shown -----------------------------------------------------------------------------------------


def test_groups_totals_memory_and_traffic_are_shown() -> None:
    output = inspect("small", "--world", "8", "--precision", "bf16")
    assert "decoder of 6 layers x 384, 6 heads, 10,818,432 parameters" in output
    assert "whole, to compute  per rank, at rest" in output
    assert re.search(r"^blocks\.5 +1 +9 +1,770,240 +3\.38 MiB +864 KiB +0\.00%$", output, re.M)
    assert re.search(r"^7 groups +7 +57 +10,818,432 +20\.6 MiB +5\.16 MiB +0\.00%$", output, re.M)
    assert re.search(r"^optimizer state \(Adam\) +10\.3 MiB +82\.5 MiB$", output, re.M)
    assert re.search(r"^gathers, received +35\.8 MiB$", output, re.M)
    assert "compute in bfloat16, gradients in float32" in output


def test_a_large_model_on_many_ranks_takes_no_memory() -> None:
    output = inspect("large", "--world", "1024", "--replicas", "4", "--groups", "plan")
    assert "1,024 ranks: 4 replicas of 256" in output
    assert "all-reductions, sent" in output


def test_what_one_rank_computes_with_is_the_whole_though_nothing_is_gathered() -> None:
    output = inspect("tiny", "--world", "1")
    assert re.search(r"^5 groups +5 +39 +918,656 +3\.5 MiB +3\.5 MiB +0\.00%$", output, re.M)
    assert re.search(r"^gathered parameters, at most +0 B +0 B$", output, re.M)


def test_a_run_is_shown_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(read_config(None, ["model.layers=3", "run.ranks=2", "sharding.door=wrapper"])))  # fmt: skip
    output = inspect(str(file))
    assert "decoder of 3 layers" in output and "2 ranks" in output
    assert "the wrapper has the same" in output


def test_a_model_of_transformers_is_shown_by_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    content["max_position_embeddings"] = 64  # fewer than the windows of a run have by default
    (tmp_path / "config.json").write_text(json.dumps(content))
    output = inspect(str(tmp_path), "--world", "3")
    assert re.search(r"^model\.layers\.1 ", output, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huge",), "huge is none of them"),
        (("tiny", "--replicas", "3"), "8 / 3 leaves 2"),
        (("tiny", "--world", "100000000"), "at most 1,000,000 ranks; got 100,000,000"),
        (("tiny", "--set", "run.ranks=1000001"), "at most 1,000,000 ranks; got 1,000,001"),
        (("tiny", "--precision", "fp8"), "compute.precision must be one of fp32, bf16"),
        (("tiny", "--set", "model.width=100", "--set", "model.heads=3"), "model.width"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in inspect(*arguments, code=2)
