"""The example programs run, and do what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples import fsdp1_training, int8_gather
from examples.int8_gather import Outcome, train
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.evaluation import held_out_loss
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import FULLSHARD, TORCH


def int8_and_plain() -> tuple[Outcome, Outcome]:
    """With less data in a step than the example takes."""
    usual = RunConfig()
    smaller = replace(usual, train=replace(usual.train, batch=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_gather, "RunConfig", lambda: smaller)
        patch.setattr(int8_gather, "held_out_loss", few_windows)
        return train(int8=True, steps=3), train(int8=False, steps=3)


def few_windows(*args: Any, **options: Any) -> float:
    return held_out_loss(*args, **options | {"limit": 16})


def test_int8_gathers_send_less_and_learn_as_much(world) -> None:
    for int8, plain in world(2).run(int8_and_plain):
        assert int8.bytes_per_step < 0.3 * plain.bytes_per_step
        assert abs(int8.held_out - plain.held_out) < 0.02
        assert plain.held_out < 5  # from 5.5


SMALLER = ("MICROBATCHES, BATCH = 2, 8", "MICROBATCHES, BATCH = 2, 2")


def main_of(api: str) -> Any:
    """The main function of the FSDP1 script; for torch, with its imports changed as it says."""
    file = Path(fsdp1_training.__file__)
    source = file.read_text()
    if api == TORCH:
        source = source.replace("\nfrom fullshard", "\nfrom torch.distributed.fsdp")
        # For GPUs only: torch refuses the one on a CPU, and with the other ends in a segmentation fault.
        source = source.replace("sync_module_states=True", "sync_module_states=False")
        source = source.replace("offload_to_cpu=True", "offload_to_cpu=False")
    source = source.replace(*SMALLER)
    names: dict[str, Any] = {"__name__": f"{api}_version", "__file__": str(file)}
    exec(compile(source, f"{api}_version.py", "exec"), names)
    return names["main"]


def begin_and_go_on(folder: Path) -> dict[str, list[float]]:
    """Losses of both libraries, from the beginning and from the checkpoint of either."""
    losses = {
        f"{api} from 0": main_of(api)(["--steps", "2", "--checkpoint", str(folder / api)])
        for api in (FULLSHARD, TORCH)
    }
    for saved in (FULLSHARD, TORCH):
        for api in (FULLSHARD, TORCH):
            path = folder / f"{saved} {api}"
            if not path.exists():
                path.write_bytes((folder / saved).read_bytes())
            losses[f"{api} from {saved}'s"] = main_of(api)(
                ["--steps", "4", "--checkpoint", str(path)]
            )
    losses["all of it"] = main_of(FULLSHARD)(["--steps", "4", "--checkpoint", str(folder / "4")])
    return losses


def test_the_fsdp1_script_is_torch_s_but_for_its_imports(world, tmp_path: Path) -> None:
    for losses in world(2).run(begin_and_go_on, tmp_path):
        assert_close(losses[f"{FULLSHARD} from 0"], losses[f"{TORCH} from 0"], rtol=1e-4, atol=0)
        for saved in (FULLSHARD, TORCH):
            for api in (FULLSHARD, TORCH):
                last = losses[f"{api} from {saved}'s"]
                assert_close(last, losses["all of it"][2:], rtol=2e-3, atol=0)
        assert losses["all of it"][-1] < losses["all of it"][0] - 0.5
        assert_equal(losses["all of it"][2:], losses[f"{FULLSHARD} from {FULLSHARD}'s"])
