"""Models of transformers as what a run trains: built, filled, trained, exported, and loaded again.

Only the ranks import transformers, which takes seconds, and once for all that is here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import ModelSource, open_model
from fullshard.programs.train.tokenizer import Bytes
from fullshard.programs.train.transformers_model import parameters_on_meta, starting_weights
from fullshard.programs.train.weights import fill
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.model_sources import (
    export,
    sharded,
    unsharded,
    wrapped,
    wrapped_with_original_params,
)
from tests.helpers.runs import records, run, write_text

TOKENS = torch.arange(48).view(2, 24) * 7 % 64

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
"""The head is the embedding, and layers initialise parameters of their parts."""


def folder_of(tmp_path: Path, configuration: dict[str, Any]) -> Path:
    folder = tmp_path / str(configuration["model_type"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    return folder


def source_of(folder: Path, **section: Any) -> ModelSource:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return open_model(
        RunConfig(model=ModelSection(huggingface=folder, **section), data=DataSection(context=64))
    )


FILES = [
    "config.json",
    "fullshard_export.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]

ENTRIES = (sharded, wrapped, wrapped_with_original_params)


def trained(source: ModelSource, model: nn.Module) -> nn.Module:
    """One step, on the same batch on all ranks: their mean is what one process has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scores = source.scores(model, TOKENS[:, :-1])
    F.cross_entropy(scores.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


@torch.no_grad()
def scores_of(source: ModelSource, model: nn.Module) -> Tensor:
    return source.scores(model.eval(), TOKENS).clone()


def there_and_back(folder: Path, exports: Path) -> list[str]:
    """Fill, train and export through every entry; the same as without sharding."""
    from transformers import AutoModelForCausalLM

    source = source_of(folder)
    alone = unsharded(source)
    source.fill(alone, seed=0)
    begin = scores_of(source, alone)
    trained(source, alone)
    end = scores_of(source, alone)
    assert not torch.allclose(begin, end)
    for entry in ENTRIES:
        model = entry(source)
        source.fill(model, seed=0)
        assert_equal(scores_of(source, model.train()), begin)
        trained(source, model.train())
        assert_close(scores_of(source, model), end, rtol=1e-4, atol=1e-5)
        exported = exports / entry.__name__
        export(source, model, exported)
        again = AutoModelForCausalLM.from_pretrained(exported)
        assert_equal(scores_of(source, again), scores_of(source, model))

        pretrained = source_of(exported, pretrained=True)
        resumed = entry(pretrained)
        pretrained.fill(resumed, seed=1)
        assert_equal(scores_of(pretrained, resumed), scores_of(source, model))
    return sorted(path.name for path in exported.iterdir())


@pytest.mark.parametrize("configuration", [LLAMA, GPT2], ids=lambda each: each["model_type"])
def test_any_door_starts_trains_and_exports_what_one_process_does(
    world: Any, tmp_path: Path, configuration: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, configuration)
    Bytes().save_pretrained(folder)
    (folder / "notes.txt").write_text("neither the model's nor the tokenizer's")
    for files in world(2).run(there_and_back, folder, tmp_path / "exports"):
        assert files == FILES


def run_and_load(settings: list[str]) -> tuple[list[float], list[str]]:
    """A run of some steps, and what transformers makes of what it leaves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ["HF_HUB_OFFLINE"] = "1"
    config = read_config(None, settings)
    run(config)
    folder = config.run.folder / "model"
    model, tokenizer = (
        loader.from_pretrained(folder) for loader in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert tokenizer.decode(tokenizer.encode("def ")) == "def "
    tokens = torch.tensor([tokenizer.encode("for x in range(x):\n    ")])
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    losses = [record["loss"] for record in records(config, "evaluation")]
    (texts,) = (record["texts"] for record in records(config, "samples"))
    assert texts[0].startswith("def ")
    return [*losses, loss], sorted(path.name for path in folder.iterdir())


def test_a_tiny_llama_is_trained_through_both_doors_and_transformers_loads_it(
    world: Any, tmp_path: Path
) -> None:
    llama = folder_of(tmp_path, {**LLAMA, "vocab_size": 256})
    Bytes().save_pretrained(llama)
    settings = [
        *(f"model.huggingface={llama}", f"data.path={write_text(tmp_path)}", "data.context=16"),
        *("train.steps=12", "train.batch=8", "optimizer.lr=0.01", "checkpoint.export=true"),
        *(
            "run.device=cpu",
            "samples.prompt=def ",
            "samples.tokens=8",
            "log.report=false",
            "trace.steps=0",
        ),
    ]
    found = []
    for api in ("fsdp2", "fsdp1"):
        own = [f"sharding.api={api}", f"run.folder={tmp_path / api}"]
        first, second = world(2).run(run_and_load, [*settings, *own])
        assert first == second
        (begin, end, exported), files = first
        assert end < begin - 1 and exported < begin - 1
        assert files == FILES
        found.append([begin, end, exported])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def as_it_is_built(folder: Path) -> None:
    """Parameters on meta and in float32, buffers real; drawn once, the model's own way."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = source_of(folder)
    model = source.build()
    assert {(each.device.type, each.dtype) for each in model.parameters()} == {
        ("meta", torch.float32)
    }
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    assert_equal(dict(model.named_buffers()), dict(reference.named_buffers()))
    blocks = source.blocks(model)
    assert [type(block).__name__ for block in blocks] in (
        ["LlamaDecoderLayer"] * 2,
        ["GPT2Block"] * 2,
    )

    drawn: list[str] = []
    weights = starting_weights(model, blocks, seed=0)
    draw = weights._draw

    def noted(name: str) -> Any:
        drawn.append(name)
        return draw(name)

    weights._draw = noted
    before = torch.get_rng_state()
    filled = unsharded(source)
    fill(filled, weights)
    assert_equal(torch.get_rng_state(), before)
    outside = [
        name for name, _ in model.named_parameters() if ".0." not in name and ".1." not in name
    ]
    assert len(drawn) == len(set(drawn)) <= len(outside) + 2

    for (name, tensor), (_, own) in zip(
        filled.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert tensor.std().item() == pytest.approx(own.std().item(), rel=0.25), name
        assert tensor.mean().item() == pytest.approx(own.mean().item(), abs=0.01), name
    first, second = (dict(block.named_parameters()) for block in source.blocks(filled))
    matrices = [name for name, each in first.items() if each.ndim == 2]
    assert matrices and not any(torch.equal(first[name], second[name]) for name in matrices)


def what_transformers_does_not_understand(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"causal language model .* has a ViTConfig"):
        source_of(folder_of(tmp_path, {"model_type": "vit"}))
    odd = {**LLAMA, "num_attention_heads": 7, "head_dim": "seven"}
    with pytest.raises(ConfigurationError, match=r"(?s)model\.huggingface.*llama"):
        source_of(folder_of(tmp_path / "odd", odd)).build()
    with pytest.raises(ConfigurationError, match=r"(?s)config\.json of a model.*nobody"):
        source_of(folder_of(tmp_path, {"model_type": "nobody's"}))


def test_models_are_built_without_memory_and_drawn_their_own_way(
    world: Any, tmp_path: Path
) -> None:
    for configuration in (LLAMA, GPT2):
        world(1).run(as_it_is_built, folder_of(tmp_path, configuration))
    world(1).run(what_transformers_does_not_understand, tmp_path)


class Forgetful(nn.Module):
    """Says of one parameter how it starts, and of the other not."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(2, 2, bias=False)
        self.unknown = nn.LayerNorm(2, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.zero_()


def test_a_parameter_that_nobody_initialises_is_named() -> None:
    with parameters_on_meta():
        skeleton = Forgetful()
    assert all(each.is_meta for each in skeleton.parameters())
    model = Forgetful()
    with pytest.raises(ConfigurationError, match=r"Forgetful does not initialise unknown\.weight"):
        fill(model, starting_weights(skeleton, [], seed=0))
