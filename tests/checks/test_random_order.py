"""Random programs leave no access unordered: those of `test_random_programs`, on the virtual device."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.checks.stream_check import StreamCheck
from tests.promises import test_random_programs as programs
from tests.promises.test_random_programs import Pair

META = torch.device("meta")
NUM_PROGRAMS = 40


class PairOnMeta(Pair):
    """The same without values: of the two models, only the order of what the sharded one does is of interest."""

    def _inputs(self, requires_grad: bool) -> list[Tensor]:
        return [
            each.detach().to(META).requires_grad_(requires_grad) for each in super()._inputs(False)
        ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3000, 3000 + NUM_PROGRAMS))
def test_a_random_program_leaves_no_access_unordered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, draw_model = programs.init_device_mesh, programs.draw_model

    def on_meta(*args: Any, **options: Any) -> nn.Module:
        return draw_model(*args, **options).to(META)

    monkeypatch.setattr(programs, "init_device_mesh", lambda _, shape: mesh("meta", shape))
    monkeypatch.setattr(programs, "draw_model", on_meta)
    monkeypatch.setattr(programs, "assert_close", lambda *_, **__: None)
    monkeypatch.setattr(programs, "_whole", lambda tensor: tensor)
    monkeypatch.setattr(programs, "Pair", PairOnMeta)
    with StreamCheck(Random(seed).choice([1, 2, 3, 8]), raises=False) as check:
        programs.run(seed, monkeypatch, fuse_gradients=seed % 2 == 1)
    assert check.accesses > 100
    assert not check.races, check.text
