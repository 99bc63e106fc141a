"""Models of runs as folders that transformers loads: at the end of a run, of a finished one, of any step."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from fullshard.checkpoint.sources.conversion import write
from fullshard.checkpoint.sources.formats import open_source
from fullshard.errors import CheckpointError, size_text
from fullshard.layout.blocks import whole
from fullshard.programs import cli
from fullshard.programs.train import launch
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import to_toml
from fullshard.programs.train.exported_model import MARK, read_mark
from tests.helpers.runs import records, run, tiny, tiny_settings


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps))


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(cli.build_app(), list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def said(result: Result) -> str:
    return " ".join(result.output.split())


def shown_by(config: RunConfig) -> str:
    shown = io.StringIO()
    run(config, shown=shown)
    return " ".join(shown.getvalue().split())


def finished_then_extended(config: RunConfig, exporting: RunConfig) -> None:
    model = config.run.folder / "model"
    run(with_steps(config, 2))
    assert not model.exists()

    assert "after step 2" in shown_by(with_steps(exporting, 2)), "a finished run is exported"
    (model / "notes.md").write_text("a user's")
    weights = (model / "model.safetensors").read_bytes()
    before = (model / MARK).stat()
    assert "after step 2" in shown_by(with_steps(exporting, 2))
    assert (model / MARK).stat().st_ino == before.st_ino, "it is not written again"

    old = read_mark(model)
    assert old is not None
    replace(old, files=(*old.files, "model-2.safetensors")).write(model)
    (model / "model-2.safetensors").write_text("of a larger model")
    assert "after step 4" in shown_by(with_steps(exporting, 4)), "an extended one is, too"
    assert not (model / "model-2.safetensors").exists(), "it was of the earlier export"
    mark = read_mark(model)
    assert mark is not None and (mark.step, mark.checkpoint) == (4, "step_00000004")
    assert (model / "notes.md").read_text() == "a user's"
    assert (model / "model.safetensors").read_bytes() != weights
    assert not list(config.run.folder.glob(".model*")), "nothing is left of the exchange"

    # What goes wrong when all steps are done: the run is complete all the same.
    (model / MARK).unlink()
    reporting = replace(with_steps(exporting, 6), log=replace(config.log, report=True))
    with (
        patch("fullshard.programs.report.write_report") as write_report,
        pytest.raises(CheckpointError, match=r"trained and saved, but .* not exported.*Move it"),
    ):
        run(reporting)
    write_report.assert_called_once()
    assert [each["step"] for each in records(config, "end")] == [2, 4, 6]


def test_an_export_replaces_the_earlier_one_and_a_finished_run_is_exported(
    world: Any, tmp_path: Path
) -> None:
    configs = (tiny(tmp_path), tiny(tmp_path, "checkpoint.export=true"))
    world(1).run(finished_then_extended, *configs)


def damaged_after_export(config: RunConfig) -> list[str]:
    """What is said when an export that is damaged in some way is asked for again; it is then as it was."""
    model = config.run.folder / "model"
    run(config)
    good = {path.name: path.read_bytes() for path in model.iterdir()}
    weights = bytearray(good["model.safetensors"])
    weights[-5] ^= 4
    damages: dict[str, Callable[[], object]] = {
        "a bit": lambda: (model / "model.safetensors").write_bytes(weights),
        "cut": lambda: os.truncate(model / "model.safetensors", 900),
        "gone": (model / "model.safetensors").unlink,
        "another's": lambda: save_file({"a": torch.ones(3)}, model / "model.safetensors"),
        "no configuration": (model / "config.json").unlink,
    }
    said_of = []
    for damage in damages.values():
        damage()
        with pytest.warns(UserWarning, match="is exported again") as warned:
            assert "after step 2" in shown_by(config)
        said_of += [str(each.message) for each in warned]
        assert {path.name: path.read_bytes() for path in model.iterdir()} == good
    # Files beside the weights are the user's to change.
    (model / "config.json").write_text("{}")
    shown_by(config)
    assert (model / "config.json").read_text() == "{}"
    # An export of an earlier version has no checksums.
    mark = read_mark(model)
    assert mark is not None and mark.weights.keys() == {"model.safetensors"}
    replace(mark, weights={}).write(model)
    shown_by(config)
    assert read_mark(model) == mark
    return said_of


def test_an_export_is_up_to_date_only_if_it_is_whole(world: Any, tmp_path: Path) -> None:
    config = tiny(tmp_path, "checkpoint.export=true", "train.steps=2")
    [said_of] = world(1).run(damaged_after_export, config)
    bit, cut, gone, other, configuration = said_of
    assert "CRC-32 differs" in bit and "model.safetensors" in bit
    assert "it has 900 bytes" in cut and "model.safetensors is missing" in gone
    assert "were written" in other and "config.json is missing" in configuration


def test_a_folder_that_an_export_must_not_replace_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launch", None)
    config = tiny(tmp_path)
    (config.run.folder / "model").mkdir(parents=True)
    (config.run.folder / "config.toml").write_text(to_toml(config))
    (config.run.folder / "model" / "model.safetensors").write_text("somebody's work")
    settings = tiny_settings(tmp_path, "checkpoint.export=true")
    result = invoke("train", *(word for each in settings for word in ("--set", each)))
    assert result.exit_code == 2
    assert "has other files" in said(result) and "checkpoint.export" in said(result)


# --- fullshard export ----------------------------------------------------------------------------------------


def exported_by_command(config: RunConfig) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = config.run.folder
    run(config)
    assert config.data.path is not None
    config.data.path.unlink()  # the tokenizer is known without the data
    result = invoke("export", folder)
    assert result.exit_code == 0, result.output
    assert "step_00000006 after step 6" in said(result)
    size = sum(file.stat().st_size for file in (folder / "model").iterdir() if file.name != MARK)
    assert size_text(size) in said(result)
    assert invoke("export", folder, "--step", 4, "--to", folder / "four").exit_code == 0
    for name, step in (("model", 6), ("four", 4)):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        stored = open_source(folder / "checkpoints" / f"step_{step:08d}")
        info = stored.tensors["model/head.weight"]
        weight = torch.empty(info.shape)
        stored.read("model/head.weight", whole(info.shape), weight)
        assert torch.equal(model.lm_head.weight, weight)
        assert AutoTokenizer.from_pretrained(folder / name).encode("def") == list(b"def")

    # A checkpoint of the run, again; then one that is not of a run, with the configuration of the model.
    checkpoint = folder / "checkpoints" / "step_00000004"
    assert invoke("export", checkpoint).exit_code == 0
    assert (mark := read_mark(folder / "model")) is not None and mark.step == 4
    other, target = folder.parent / "other", folder.parent / "target"
    write(open_source(folder / "four"), other, to="fullshard")
    result = invoke("export", other, "--to", target)
    assert result.exit_code == 2 and "--config-from" in said(result)
    result = invoke("export", other, "--config-from", folder / "four")
    assert result.exit_code == 2 and "--to" in said(result)
    result = invoke("export", other, "--config-from", folder / "four", "--to", target)
    assert result.exit_code == 0, result.output
    again = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(again.lm_head.weight, weight)

    # What is refused: other names, a step that is not there, a folder with other files.
    result = invoke("export", checkpoint, "--config-from", folder / "four", "--to", target)
    assert result.exit_code == 2
    assert "unknown: embed.weight" in said(result) and "missing: model.embed" in said(result)
    result = invoke("export", folder, "--step", 5)
    assert result.exit_code == 2 and "those of: 4, 6" in said(result)
    result = invoke("export", folder, "--to", folder.parent)
    assert result.exit_code == 2 and "has other files" in said(result)


def test_a_run_a_step_and_any_checkpoint_become_folders_that_transformers_loads(
    world: Any, tmp_path: Path
) -> None:
    world(1).run(exported_by_command, tiny(tmp_path, "checkpoint.every=4"))
