"""`EMA` averages elementwise what each rank holds, on both APIs, and travels in checkpoints to other numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    StateDictType,
    checkpoint,
    fully_shard,
)
from fullshard.errors import CheckpointError
from fullshard.optim import EMA
from tests.helpers.checkpointed import ODD, Setting, train
from tests.helpers.compare import assert_equal
from tests.helpers.groups import alone
from tests.helpers.models import make_decoder, tokens_for
from tests.helpers.training import all_whole

SMALL = replace(ODD, depth=1)
APIS = ("functional", "wrapper", "flat")
DECAY, WARMUP = 0.6, 1.0
DECAYS = (1 / 2, 0.6, 0.6)
"""Of the first updates: the first two would be 1/2 and 2/3 without the limit."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters by name, on every rank."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return all_whole(model.state_dict())


def trained(setting: Setting) -> tuple[Any, Any, EMA, dict[str, Tensor]]:
    """A model, its optimizer and its EMA after a few steps, and what the averages must be."""
    model, optimizer = setting.build()
    ema = EMA(model, decay=DECAY, warmup=WARMUP)
    expected = weights_of(model)
    for step, decay in enumerate(DECAYS):
        train(model, optimizer, range(step, step + 1))
        ema.update()
        now = weights_of(model)
        expected = {name: expected[name].lerp(now[name], 1 - decay) for name in now}
    return model, optimizer, ema, expected


def average_and_save(folder: Path) -> None:
    for api in APIS:
        model, optimizer, ema, expected = trained(Setting(api=api, model=SMALL))
        before, batch = weights_of(model), tokens_for(9, 2)
        with torch.no_grad():
            trained_loss = model(batch)
            if api == "functional":
                model.unshard()  # what was gathered must not be used
            with ema.averaged():
                loss = model(batch)
            torch.testing.assert_close(model(batch), trained_loss, rtol=0.0, atol=0.0)
        with ema.averaged():
            assert_equal(weights_of(model), expected)
            with pytest.raises(LifecycleError, match=r"update was called within EMA.averaged"):
                ema.update()
            with pytest.raises(LifecycleError, match=r"Within EMA.averaged the model has"):
                checkpoint.save(folder / "never", model, optimizer, ema=ema)
        reference = make_decoder(SMALL)
        reference.load_state_dict(expected, strict=True)
        torch.testing.assert_close(loss, reference(batch))
        assert_equal(weights_of(model), before)
        with pytest.raises(ZeroDivisionError), ema.averaged():
            1 / 0  # noqa: B018
        assert_equal(weights_of(model), before)
        checkpoint.async_save(folder / api, model, optimizer, ema=ema).wait()
        if dist.get_rank() == 0:
            torch.save(expected, folder / f"{api}.pt")


def load_and_go_on(folder: Path) -> None:
    for number, api in enumerate(APIS):
        written = APIS[number - 1]
        model, optimizer = Setting(api=api, model=SMALL).build(seed=5)
        ema = EMA(model, decay=DECAY, warmup=WARMUP)
        with pytest.raises(CheckpointError, match="but no EMA was passed"):
            checkpoint.load(folder / written, model, optimizer)
        checkpoint.load(folder / written, model, optimizer, ema=ema)
        assert ema.updates == len(DECAYS)
        with ema.averaged():
            assert_equal(weights_of(model), torch.load(folder / f"{written}.pt"))
        other = EMA(model)
        other.load_state_dict(ema.state_dict())
        with other.averaged():
            assert_equal(weights_of(model), torch.load(folder / f"{written}.pt"))
        checkpoint.load(folder / written, model, without_optimizer=True)


def test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks(
    world: Any, tmp_path: Path
) -> None:
    world(2).run(average_and_save, tmp_path)
    world(3).run(load_and_go_on, tmp_path)
    world(1).run(load_and_go_on, tmp_path)


def test_averages_of_16_bits_are_kept_in_32_and_tensors_stay_sharded() -> None:
    with alone():
        model = nn.Linear(4, 4).to(torch.bfloat16)
        model.bias.requires_grad_(False)  # frozen: it has no average
        fully_shard(model)
        model.weight.data.fill_(1.0)
        ema = EMA(model, decay=0.999)
        model.weight.data.fill_(2.0)
        for _ in range(3):
            ema.update()
        [average] = ema.averages.values()
        assert isinstance(average, DTensor) and average.dtype == torch.float32
        expected = torch.full((4, 4), 2 - 0.999**3)
        torch.testing.assert_close(average.to_local(), expected)
        with ema.averaged():
            assert torch.equal(model.weight.to_local(), expected.bfloat16())
        ema.reset()
        assert ema.updates == 0 and torch.equal(average.to_local(), torch.full((4, 4), 2.0))


def test_mistakes_are_named_with_their_remedy() -> None:
    with alone():
        model = nn.Sequential(nn.Linear(2, 2))
        early = EMA(model)
        fully_shard(model)
        with pytest.raises(LifecycleError, match=r"(?s)0.bias\n  0.weight\nBuild the EMA after"):
            early.update()
        for sharded in (
            model,
            FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
        ):
            with pytest.raises(RuntimeError, match=r"use fullshard.optim.EMA\(model\)"):
                AveragedModel(sharded)
        ema = EMA(model)
        with pytest.raises(
            ConfigurationError, match=r"(?s)0.bias: not in the state.*head: not averaged"
        ):
            ema.load_state_dict({"updates": 1, "averages": {"head": torch.zeros(2)}})
        for options in ({"decay": 1.0}, {"decay": -0.1}, {"warmup": -1.0}):
            with pytest.raises(ConfigurationError, match="must be"):
                EMA(model, **options)
