"""The snippets of docs/how_do_i.md run on two ranks, print what the page shows, and do what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import checkpoint, fully_shard
from tests.helpers.compare import assert_equal
from tests.helpers.page_programs import DOCS, blocks, check_output, execute
from tests.helpers.training import weights

pytestmark = pytest.mark.slow


class Answer(NamedTuple):
    snippets: list[str]
    """In the order of the page; each sees the names of those before it."""
    output: str


def answers(page: str) -> dict[str, Answer]:
    """The answers with code, by the question's first words; those for PEFT are apart."""
    found = {}
    for section in re.split(r"^## \.\.\. ", page, flags=re.MULTILINE)[1:]:
        question = " ".join(section.split("\n", 1)[0].split()[:3]).strip("?,")
        snippets = blocks(section, "python")
        peft = [code for code in snippets if "import peft" in code or "from peft" in code]
        found[question] = Answer(
            [code for code in snippets if code not in peft], "".join(blocks(section, "text"))
        )
        if peft:
            found["use PEFT"] = Answer(peft, "")
    return {question: answer for question, answer in found.items() if answer.snippets}


ANSWERS = answers((DOCS / "how_do_i.md").read_text())
COMMON = blocks((DOCS / "guide.md").read_text(), "python")[0]


# --- on the ranks --------------------------------------------------------------------------------


def given(folder: str) -> dict[str, Any]:
    """The names that the page says a snippet finds."""
    common = execute(COMMON, "from common import *", folder)
    device, rank, ranks = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = common["Model"]()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return {
        "Model": common["Model"],
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": [common["batch"](step, device, rank, ranks) for step in range(2)],
        "loss_of": common["loss_of"],
        "device": device,
        "rank": rank,
    }


def ask(questions: list[str], folder: str) -> dict[str, str]:
    """Run the snippets of the answers, and check what they did; returns what each printed on this rank."""
    printed = {}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for question in questions:
        names, output = given(folder), io.StringIO()
        before = weights(names["model"])
        with contextlib.redirect_stdout(output):
            for snippet in ANSWERS[question].snippets:
                names.update(execute(COMMON, snippet, folder, names))
        printed[question] = output.getvalue()
        dist.barrier()  # files of rank 0 are there
        CHECKS[question](names, Path(folder), before)
    return printed


Names = dict[str, Any]
Weights = dict[str, Tensor]


def the_model_trains(names: Names, folder: Path, before: Weights) -> None:
    names["loss_of"](names["model"], *names["batches"][0]).backward()
    assert all(isinstance(param, DTensor) for param in names["model"].parameters())


def both_traces_have_the_same_times(names: Names, folder: Path, before: Weights) -> None:
    events = json.loads((folder / f"both_{names['rank']}.json").read_text())["traceEvents"]
    (step,) = [each for each in events if each.get("name") == "step 1"]
    computed = min(each["ts"] for each in events if each.get("name") == "aten::linear")
    # Clocks that are not aligned are days apart; a crowded machine can be late by seconds.
    assert abs(computed - step["ts"]) < 60e6


def the_file_has_the_adapters_only(names: Names, folder: Path, before: Weights) -> None:
    model = names["model"]
    adapter = torch.load(folder / "adapter.pt")
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert set(adapter) == trained and len(trained) == 2 * len(model.blocks)
    now = weights(model)
    assert_equal(adapter, {name: now[name] for name in trained})
    assert all(now[name].any() for name in trained)  # b was zero, and has been trained
    with torch.no_grad():
        for param in names["trained"]:
            param.zero_()
    execute(COMMON, ANSWERS["use LoRA, and"].snippets[1], str(folder), names)
    assert_equal(weights(model), now)


def the_folder_has_the_adapters_only(names: Names, folder: Path, before: Weights) -> None:
    from safetensors.torch import load_file

    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    now = weights(names["model"])
    assert len(saved) == 2 * 4
    for name, tensor in saved.items():
        assert_equal(tensor, now[name.replace(".weight", ".default.weight")])


def averages_are_between_old_and_new_weights(names: Names, folder: Path, before: Weights) -> None:
    now, name = weights(names["model"]), "head.weight"
    with names["ema"].averaged():
        averaged = weights(names["model"])
    for left, middle, right in zip(before[name], averaged[name], now[name], strict=True):
        assert not torch.equal(left, middle) and not torch.equal(middle, right)
    assert names["ema"].updates == 2
    assert names["averaged"] != names["loss_of"](names["model"], *names["batches"][0]).item()
    fresh = names["EMA"](names["model"], decay=0.9)
    checkpoint.load(folder / "runs/ema/step-2", names["model"], names["optimizer"], ema=fresh)
    with fresh.averaged():
        assert_equal(weights(names["model"]), averaged)


def the_file_has_all_weights(names: Names, folder: Path, before: Weights) -> None:
    assert_equal(torch.load(folder / "weights.pt"), before)


def the_loss_is_that_of_all_batches(names: Names, folder: Path, before: Weights) -> None:
    alone, common = names["Model"](), execute(COMMON, "from common import *", str(folder))
    alone.load_state_dict(before)
    losses = [common["loss_of"](alone, *common["batch"](step, "cpu")) for step in range(2)]
    assert names["evaluation"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert names["model"].training


def machines_are_replicas(names: Names, folder: Path, before: Weights) -> None:
    the_model_trains(names, folder, before)
    param = next(names["model"].parameters())
    assert param.device_mesh.shape == (1, 2) and param.device_mesh.mesh_dim_names == (
        "replicate",
        "shard",
    )


def training_went_on_twice(names: Names, folder: Path, before: Weights) -> None:
    assert_equal(weights(names["after"]), weights(names["model"]))
    steps = [state["step"].item() for state in names["its_optimizer"].state.values()]
    assert steps and set(steps) == {2.0}


CHECKS: dict[str, Callable[[Names, Path, Weights], None]] = {
    "choose groups": the_model_trains,
    "debug a hang": the_model_trains,
    "profile with torch's": both_traces_have_the_same_times,
    "use LoRA, and": the_file_has_the_adapters_only,
    "use PEFT": the_folder_has_the_adapters_only,
    "keep an average": averages_are_between_old_and_new_weights,
    "save the whole": the_file_has_all_weights,
    "evaluate": the_loss_is_that_of_all_batches,
    "run on several": machines_are_replicas,
    "go from FSDP2": training_went_on_twice,
}


# All in one run: starting each would cost more than the snippets do.
def test_every_answer_runs_and_does_what_the_page_says(world, tmp_path: Path) -> None:
    assert set(CHECKS) == set(ANSWERS), "a question without a check, or a check without a question"
    questions = [question for question in ANSWERS if question != "use PEFT"]
    printed, _ = world(2).run(ask, questions, str(tmp_path))
    for question in questions:
        # The ranks have run other models before.
        check_output(ANSWERS[question].output, re.sub(r" \(model \d+\)", "", printed[question]))


def test_the_answer_for_peft_saves_adapters_that_peft_knows(world, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is in the environment of `make test-clients` only")
    world(2).run(ask, ["use PEFT"], str(tmp_path))
