"""The built-in decoder as what a run trains: sizes, apis, and its way to transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import MixedPrecisionPolicy
from fullshard.programs.train.built_in import empty_decoder, llama_name
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.decoder_shape import SIZES, decoder_shape
from fullshard.programs.train.model_source import open_model
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.model_sources import export, sharded, unsharded, wrapped

CONFIG = RunConfig(model=ModelSection(layers=2, width=20, heads=2), data=DataSection(context=32))
TOKENS = torch.arange(60).view(2, 30) * 5 % 256


def test_sizes_are_what_they_are_said_to_be() -> None:
    expected = {"tiny": 0.92e6, "small": 11e6, "medium": 85e6, "large": 1.2e9}
    for size, shape in SIZES.items():
        model = empty_decoder(shape)
        numel = sum(parameter.numel() for parameter in model.parameters())
        assert numel == pytest.approx(expected[size], rel=0.05)
        assert shape.hidden % 64 == 0


def test_what_is_given_replaces_what_a_size_says() -> None:
    shape = decoder_shape(ModelSection(size="small", width=96, heads=2), 300)
    assert (shape.layers, shape.width, shape.heads, shape.vocabulary) == (6, 96, 2, 300)


def test_every_weight_has_a_name_of_its_own_in_a_llama() -> None:
    names = [llama_name(name) for name, _ in empty_decoder(SIZES["tiny"]).named_parameters()]
    assert len(set(names)) == len(names)
    assert "model.layers.3.self_attn.q_proj.weight" in names


@torch.no_grad()
def exported(folder: Path) -> Tensor | None:
    """Export through both APIs; return the scores, on the first rank."""
    source = open_model(CONFIG)
    alone = unsharded(source)
    source.fill(alone, seed=3)
    expected = source.scores(alone, TOKENS)
    for api in (sharded, wrapped):
        model = api(source)
        source.fill(model, seed=3)
        assert_equal(source.scores(model, TOKENS), expected)
        export(source, model, folder / api.__name__)
    return expected if dist.get_rank() == 0 else None


@torch.no_grad()
def loaded_by_transformers(folder: Path, expected: Tensor) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ["HF_HUB_OFFLINE"] = "1"
    for api in (sharded, wrapped):
        llama = AutoModelForCausalLM.from_pretrained(folder / api.__name__)
        assert type(llama).__name__ == "LlamaForCausalLM"
        assert_close(llama(TOKENS).logits, expected, rtol=1e-4, atol=1e-6)
        tokenizer = AutoTokenizer.from_pretrained(folder / api.__name__)
        text = "def é(x):\n\t  return 1\u20ac \0"
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_either_api_exports_a_llama_that_transformers_loads(world: Any, tmp_path: Path) -> None:
    expected, _ = world(2).run(exported, tmp_path)
    world(1).run(loaded_by_transformers, tmp_path, expected)  # importing it takes seconds on a rank


def bf16_scores() -> tuple[Tensor, Tensor]:
    source = open_model(CONFIG)
    scores = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = sharded(source, policy)
        source.fill(model, seed=0)
        scores.append(source.scores(model, TOKENS).detach())
    return scores[0], scores[1]


def test_computing_in_bf16_gives_nearly_the_same_scores(world: Any) -> None:
    [(full, rounded)] = world(1).run(bf16_scores)
    assert rounded.dtype == torch.bfloat16
    assert (full - rounded.float()).abs().max() < 0.02 * full.abs().max()
