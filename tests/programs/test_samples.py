"""Text that a model writes: the same on every rank, and every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig, SamplesSection
from fullshard.programs.train.model_source import ModelSource, open_model
from fullshard.programs.train.samples import write_samples
from fullshard.programs.train.tokenizer import Bytes, Numbers
from tests.helpers.model_sources import CPU, sharded, unsharded

CONTEXT = 16
SOURCE: Any = open_model(
    RunConfig(model=ModelSection(layers=2, width=32, heads=2), data=DataSection(context=CONTEXT))
)


def filled(build: Callable[[ModelSource], nn.Module] = unsharded) -> nn.Module:
    model = build(SOURCE)
    SOURCE.fill(model, seed=0)
    return model


def written(
    model: nn.Module, seed: int = 0, opening: Sequence[int] = (), **section: Any
) -> list[str]:
    return write_samples(
        model,
        SOURCE,
        Bytes(),
        SamplesSection(**{"prompt": "def ", **section}),
        opening=opening,
        seed=seed,
        context=CONTEXT,
        device=CPU,
    )


def on_a_rank() -> tuple[list[str], list[str], list[str]]:
    model = filled(sharded)
    long = "a prompt that is longer than the context"
    return (
        written(model, count=3, tokens=24),
        written(model, prompt=long, tokens=5),
        written(model, seed=1, count=3, tokens=24),
    )


def test_ranks_write_what_one_process_writes(world: Any) -> None:
    model = filled()
    modes = []
    model.register_forward_pre_hook(lambda model, args: modes.append(model.training))
    first = written(model.train(), count=3, tokens=24)
    assert modes == [False] * 24 and model.training
    assert first == written(model, count=3, tokens=24)
    assert len({*first}) == 3
    assert all(text.startswith("def ") for text in first)
    for texts, after_long, other_seed in world(2).run(on_a_rank):
        assert texts == first
        assert after_long[0].startswith("a prompt that is longer than the context")
        assert other_seed != first


@torch.no_grad()
def test_temperature_0_takes_the_likeliest_token_of_the_last_context() -> None:
    model = filled()
    tokens = list(b"def ")
    for _ in range(40):
        scores = model(torch.tensor([tokens[-CONTEXT:]]))
        tokens.append(int(scores[0, -1].argmax()))
    assert written(model, count=1, tokens=40, temperature=0.0) == [Bytes().decode(tokens)]


def test_no_prompt_and_no_samples_are_fine() -> None:
    model = filled()
    assert written(model, count=0) == []
    assert written(model, prompt="", tokens=3)[0].startswith("\n")
    assert written(model, prompt=None, tokens=3, opening=b"Es war")[0].startswith("Es war")
    assert written(model, prompt=None, tokens=3)[0].startswith("\n")
    assert written(model, tokens=0) == ["def "]


def test_a_model_that_has_diverged_writes_something() -> None:
    model = filled()
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(torch.nan)
    assert written(model, tokens=4)[0].startswith("def ")


def test_a_prompt_the_model_does_not_know_is_refused() -> None:
    model = filled()
    section = SamplesSection(prompt="3 500 700")
    with pytest.raises(ConfigurationError, match=r"vocabulary of 256.* has 500, 700\."):
        write_samples(model, SOURCE, Numbers(), section, opening=(), seed=0, context=8, device=CPU)
