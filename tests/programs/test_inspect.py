"""`fullshard inspect`: what it predicts is what a run then does."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import fullshard
from fullshard.errors import ConfigurationError
from fullshard.programs import cli
from fullshard.programs.inspect_tool.activations import kept_bytes
from fullshard.programs.inspect_tool.cost import ShardedPlan, measure
from fullshard.programs.inspect_tool.folded_groups import folded_name
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config, to_toml
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.optimizer import build_optimizer
from fullshard.programs.train.optimizer_cost import OptimizerCost
from fullshard.programs.train.sharded_model import build_model
from tests.helpers.fake import fake_world
from tests.helpers.groups import leave_group

WORLD = 4


def predict(*settings: str) -> ShardedPlan:
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
        ["sharding.api=fsdp1", "model.width=20", "model.heads=2", "compute.precision=bf16"],
    ],
)
def test_a_run_holds_and_sends_what_was_predicted(tmp_path: Path, settings: list[str]) -> None:
    plan = predict(*settings)
    sent, gathered = traced_step(tmp_path, settings)
    assert sent["gather"] == plan.traffic.gathers
    assert sent["reduce"] == plan.traffic.reductions
    assert sent["all-reduce"] == plan.traffic.all_reductions
    assert 0.97 * plan.rank.gathered <= gathered <= plan.rank.gathered


def test_parameters_at_rest_are_this_ranks_share() -> None:
    config = read_config(None, ["model.layers=2"])
    plan = predict("model.layers=2")
    with fake_world(WORLD):
        sharded = build_model(config, open_model(config), torch.device("cpu"))
        assert plan.rank.parameters == sharded.bytes_at_rest()
        assert plan.unsharded.parameters == sharded.unsharded.num_bytes
    assert plan.rank.optimizer == 2 * plan.rank.gradients == 2 * plan.rank.parameters


def test_replicas_share_the_state_and_not_the_averages() -> None:
    settings = ["sharding.replicas=2", "optimizer.ema=0.9"]
    usual = predict(*settings)
    plan = predict(*settings, "optimizer.shard_over_replicas=true")
    assert usual.rank.optimizer == 3 * usual.rank.parameters
    assert plan.rank.optimizer == 2 * plan.rank.parameters
    assert plan.unsharded == usual.unsharded
    assert (usual.traffic.updates, plan.traffic.updates) == (0, plan.rank.parameters // 2)


def test_muon_has_one_state_of_matrices_and_two_of_the_rest() -> None:
    settings = ["model.layers=2", "optimizer.name=muon"]
    config = read_config(None, settings)
    plan = predict(*settings)
    with fake_world(WORLD):
        model = build_model(config, open_model(config), torch.device("cpu"))
        optimizer = build_optimizer(config.optimizer, model)
        for param in model.module.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        measured = OptimizerCost(optimizer, torch.device("cpu")).state_bytes
    assert plan.rank.optimizer == pytest.approx(measured, rel=1e-3)
    assert plan.rank.optimizer < 1.5 * plan.rank.parameters
    assert plan.unsharded.optimizer == pytest.approx(WORLD * measured, rel=0.01)


def test_state_in_8_bits_is_about_2_bytes_an_element() -> None:
    plan = predict("optimizer.name=adamw8bit", "optimizer.ema=0.9")
    state = plan.rank.optimizer - plan.rank.parameters
    assert 2.03 < 4 * state / plan.rank.parameters < 2.06


def test_frozen_parameters_have_no_gradients_no_state_and_no_averages() -> None:
    usual = predict("model.layers=2")
    plan = predict("model.layers=2", "model.trainable=head.*", "optimizer.ema=0.9")
    (head,) = (p for n, p in open_model(RunConfig()).build().named_parameters() if "head" in n)
    assert plan.rank.parameters == usual.rank.parameters
    assert plan.unsharded.gradients == head.nbytes
    assert plan.rank.gradients == head.nbytes // WORLD
    assert plan.rank.optimizer == 3 * plan.rank.gradients
    assert plan.traffic.reductions < usual.traffic.reductions / 10
    assert plan.rank.activations is not None
    assert usual.rank.activations is not None
    assert plan.rank.activations < usual.rank.activations / 10
    assert "nothing is trained" in inspect(f"{__name__}:frozen", "--input", "2x3")


def frozen() -> nn.Module:
    return nn.Linear(3, 5).requires_grad_(False)


def test_rules_of_the_launcher_hold_for_callers_that_build_a_model_themselves() -> None:
    config = read_config(None, ["train.batch=15", "sharding.replicas=3"])
    config = replace(config, sharding=replace(config.sharding, prefetch=2, api="fsdp1"))
    problems = (*config.problems(), *config.world_problems(WORLD))
    assert len(problems) == 3
    with fake_world(WORLD), pytest.raises(ConfigurationError) as refusal:
        build_model(config, open_model(config), torch.device("cpu"))
    assert str(refusal.value).splitlines() == [problem.text for problem in problems]


# --- activations -------------------------------------------------------------------------------------------


def really_kept(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of a forward with values, but for parameters and buffers."""
    own = {param.data_ptr() for param in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for at, storage in kept.items() if at not in own)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps what the kernel of accelerators keeps."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.ones(*x.shape[:-1], 1))
        return torch.rms_norm(x, shape, weight, eps)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps_of_a_real_forward(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"compute.precision={precision}", "model.layers=2", "train.batch=4"]
    config = read_config(None, [*settings, "data.context=32"])
    source = open_model(config)
    model = source.build().to_empty(device="cpu")
    for param in model.parameters():
        param.data = param.data.bfloat16() if precision == "bf16" else param.data
    windows = torch.zeros(1, 33, dtype=torch.int64)
    with monkeypatch.context() as patch:
        patch.setattr(F, "rms_norm", FusedNorm.apply)
        expected = really_kept(model, lambda: window_losses(source, model, windows))
    if precision == "fp32":
        # The kernel that accelerators have for it leaves its output as the next layer wants it; the CPU's makes a copy.
        expected -= 2 * windows[:, 1:].numel() * 128 * 4
    random_states = 2 * (24 if precision == "bf16" else 16)
    found = predict(*settings, "data.context=32").rank.activations
    assert found == expected + random_states


def test_attention_inside_of_modules_of_torch_counts_as_fused() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).bfloat16()
    x = torch.zeros(2, 32, 16, dtype=torch.bfloat16)
    expected = really_kept(model, lambda: model(x))
    model, x = model.to("meta"), x.to("meta")
    kept = kept_bytes(model, [], lambda: model(x), dtype=None, recomputes=False)
    # Accelerators keep the statistics of norms in float32.
    assert kept == pytest.approx(expected, rel=0.03)


class Block(nn.Sequential):
    """Keeps its input, what is between its halves, and its output."""

    def __init__(self) -> None:
        halves = (nn.Linear(8, 8, bias=False), nn.Sigmoid()), (nn.Linear(8, 8), nn.Sigmoid())
        super().__init__(*halves[0], *halves[1])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Unbuildable(nn.Module):
    def __init__(self) -> None:
        raise ValueError("of no size")


def test_blocks_that_are_recomputed_keep_their_inputs_and_one_block_all() -> None:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(4, 8)
    unit = x.nbytes
    for recomputes, expected in ((False, 7), (True, 5)):
        arguments = {"dtype": None, "recomputes": recomputes}
        assert kept_bytes(model, [*model.layers], lambda: model(x), **arguments) == expected * unit


def test_a_model_of_the_user_is_shown_by_the_name_of_its_factory() -> None:
    name = f"{__name__}:Blocks"
    output = inspect(name, "--groups", "blocks", "--input", "4x8")
    assert f"Blocks of {name}" in output
    assert re.search(r"^layers\.0-2 \(3x\) +136 ", output, re.M)
    assert re.search(r"^activations +896 B +896 B$", output, re.M)
    output = inspect(name)
    assert "Activations are not in this memory: give the sizes" in output
    assert "forward raised RuntimeError without values: " in inspect(name, "--input", "4x7")


class Cubes(nn.Module):
    """No dimension is divided evenly by many ranks, and one of a stack of experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.empty(10, 10, 10))
        self.experts = nn.Parameter(torch.empty(8, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_the_cause_of_padding_is_named_where_there_is_much() -> None:
    output = inspect(f"{__name__}:Cubes", "--world", "64")
    assert re.search(r"^root +33,768 .* 15\.99%$", output, re.M)
    assert "padded by more than a quarter" not in output
    output = inspect(f"{__name__}:Cubes", "--world", "512")
    assert "experts of shape (8, 64, 64) has 64 rows along dimension 1 for 512 ranks" in output
    assert "Shard over fewer ranks, as with a 2-D mesh" in output


def test_names_that_count_up_are_folded() -> None:
    assert folded_name(["a.0.x", "a.1.x", "a.2.x"]) == "a.0-2.x"
    assert folded_name(["m.1.e.7", "m.1.e.8"]) == "m.1.e.7-8"
    for names in (["a.0", "a.2"], ["a.0", "b.1"], ["a.0.0", "a.1.1"], ["a", "a"]):
        assert folded_name(names) is None


# --- what is shown -----------------------------------------------------------------------------------------


def test_groups_totals_memory_and_traffic_are_shown() -> None:
    output = inspect("small", "--world", "8", "--precision", "bf16")
    assert "decoder of 6 layers x 384, 6 heads\n" in output
    assert "10,818,432 parameters in 57 tensors" in output
    row = r"^blocks\.0-5 \(6x\) +1,770,240 +3\.38 MiB +864 KiB +0\.00%$"
    assert re.search(row, output, re.M), "equal layers are one line"
    assert re.search(r"^all 7 groups +10,818,432 +20\.6 MiB +5\.16 MiB +0\.00%$", output, re.M)
    assert re.search(r"^optimizer state \(adamw\) +10\.3 MiB +82\.5 MiB$", output, re.M)
    assert re.search(r"^activations +[1-9][0-9.]+ MiB +[1-9][0-9.]+ MiB$", output, re.M)
    assert output.index("\nmemory ") < output.index("\ngroup "), "memory comes first"
    assert "of 2 windows of 128 tokens at a time on each rank" in output
    assert re.search(r"^gathers, received +35\.8 MiB$", output, re.M)
    assert "compute in bfloat16, gradients in float32" in output


def test_a_large_model_on_many_ranks_takes_no_memory() -> None:
    output = inspect("large", "--world", "1024", "--replicas", "4", "--groups", "plan")
    assert "1,024 ranks: 4 replicas of 256" in output
    assert "all-reductions, sent" in output


def test_what_one_rank_computes_with_is_the_whole_though_nothing_is_gathered() -> None:
    output = inspect("tiny", "--world", "1")
    assert re.search(r"^all 5 groups +918,656 +3\.5 MiB +3\.5 MiB +0\.00%$", output, re.M)
    assert re.search(r"^gathered parameters, at most +0 B +0 B$", output, re.M)


def test_a_run_is_shown_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(read_config(None, ["model.layers=3", "run.ranks=2", "sharding.api=fsdp1"])))  # fmt: skip
    output = inspect(str(file))
    (tmp_path / "config.toml").write_text(file.read_text())
    assert inspect(str(tmp_path)) == output, "the folder of a run stands for its file"
    assert "decoder of 3 layers" in output and "2 ranks" in output
    assert re.search(r"^all 4 groups .* 0\.00%$", output, re.M), "the wrapper cuts evenly"


def test_a_model_of_transformers_is_shown_by_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    content["max_position_embeddings"] = 64  # fewer than the windows of a run have by default
    (tmp_path / "config.json").write_text(json.dumps(content))
    output = inspect(str(tmp_path), "--world", "3")
    assert re.search(r"^model\.layers\.0-1 \(2x\) ", output, re.M)
    assert re.search(r"^activations +[1-9]", output, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huge",), "huge is none of them"),
        ((f"{__name__}:Unbuildable",), "It raised ValueError: of no size"),
        ((f"{__name__}:dict",), "must be a callable without arguments"),
        (("builtins:dict",), "it returned dict. Name a function"),
        (("tiny", "--input", "8 x 4"), "such as 8x1024:int64"),
        (("torch.nn:Identity", "--groups", "blocks"), "Identity of torch.nn:Identity has none"),
        (("tiny", "--replicas", "3"), "8 / 3 leaves 2"),
        (("tiny", "--world", "100000000"), "at most 1,000,000 ranks; got 100,000,000"),
        (("tiny", "--set", "run.ranks=1000001"), "at most 1,000,000 ranks; got 1,000,001"),
        (("tiny", "--precision", "fp8"), "compute.precision must be one of fp32, bf16"),
        (("tiny", "--set", "model.width=100", "--set", "model.heads=3"), "model.width"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in inspect(*arguments, code=2)
