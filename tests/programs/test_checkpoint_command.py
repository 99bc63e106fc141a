"""`fullshard checkpoint` as users run it: what is said, and which exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

from fullshard.checkpoint.sources.conversion import FORMATS, write
from fullshard.checkpoint.sources.formats import open_source
from fullshard.errors import size_text
from fullshard.programs import cli
from fullshard.programs.checkpoint_tool import contents, output
from tests.helpers.checkpoints import plain_source


def run(*arguments: Any) -> Result:
    result = CliRunner().invoke(cli.build_app(), ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint in all formats, and a later one."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for name in ("first", "second"):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        source = plain_source(model, optimizer, {"step": name})
        write(source, folder / name, to="fullshard", files=2)
    for each in FORMATS:
        write(open_source(folder / "first"), folder / each, to=each)
    return folder


def test_inspect_lists_tensors_and_totals(made: Path) -> None:
    result = run("inspect", made / "first")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any("by 2 ranks, fullshard" in line for line in lines)
    assert "Model       32 elements in 4 tensors, 128 B" in lines
    totals = "64 elements in 8 tensors, 256 B; 1 group of 4 parameters"
    assert f"Optimizer   torch.optim.AdamW, {totals}" in lines
    assert 'Extra       {"step": "first"}' in lines
    rows = [line.split() for line in lines]
    assert ["0.weight", "float32", "5", "x", "3", "60", "B", "2"] in rows
    assert "1.bias/exp_avg " not in result.stdout and "and 3 more (--all lists them)" in lines
    rows = [line.split() for line in run("inspect", made / "first", "--all").stdout.splitlines()]
    assert ["1.bias/exp_avg", "float32", "2", "8", "B", "2"] in rows


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_are_where_inspect_says(made: Path, name: str) -> None:
    path = made / ("first" if name == "fullshard" else name)
    found = json.loads(run("inspect", path, "--json", "--pieces").stdout)
    weight = found["tensors"]["model/0.weight"]
    places = weight["places"]
    assert len(places) == weight["pieces"] == (2 if name == "fullshard" else 1)
    expected = torch.empty(5, 3)
    open_source(path).read("model/0.weight", _whole(expected), expected)
    for place in places:
        if place["offset"] is None:
            assert name == "torch"
            continue
        data = (path / place["file"]).read_bytes()
        data = data[place["offset"] : place["offset"] + place["nbytes"]]
        (start, _), (rows, _) = place["start"], place["shape"]
        part = expected[start : start + rows].contiguous().numpy().tobytes()
        assert part in data if name == "dcp" else part == data
    text = run("inspect", path, "--pieces").stdout
    assert "[0:3, 0:3]" in text if name == "fullshard" else "[0:5, 0:3]" in text


def _whole(tensor: torch.Tensor) -> Any:
    from fullshard.layout.blocks import whole

    return whole(tensor.shape)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_tables_fit_a_terminal(made: Path, width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    source = open_source(made / "first")
    output.print_contents(console, contents.describe(source, pieces=False))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("0.weight ") and "5 x 3" in line for line in lines)
    assert any(line.startswith("0.weight/exp_avg") for line in lines), "names are never cut"


def test_verify_says_that_all_is_well(made: Path) -> None:
    for name in FORMATS:
        result = run("verify", made / name)
        assert result.exit_code == 0, result.output
        well = name in ("fullshard", "dcp")
        assert ("All is well" if well else "no checksums") in result.stdout.splitlines()[0]
        assert "B/s" in result.stdout


def test_a_run_stands_for_its_newest_checkpoint(made: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (tmp_path / "config.toml").touch()
    assert "has no complete checkpoint yet" in run("verify", tmp_path).stderr
    for number, name in enumerate(("first", "second"), 1):
        write(open_source(made / name), checkpoints / f"step_{number}", to="fullshard")
    for path in (tmp_path, checkpoints):
        assert f"\n{checkpoints / 'step_2'} was read in " in run("verify", path).stdout
        assert f"Checkpoint  {checkpoints / 'step_2'}\n" in run("inspect", path).stdout
        assert run("diff", path, made / "second").stdout.startswith("Equal: 12 tensors")


@pytest.mark.parametrize("name", ["fullshard", "dcp"])
def test_verify_names_every_fault(made: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "damaged"
    write(open_source(made / "first"), path, to=name)
    (file,) = (each for each in path.rglob("*") if each.suffix in (".safetensors", ".distcp"))
    data = bytearray(file.read_bytes())
    source = open_source(path)
    value = torch.empty(5, 3)
    source.read("model/0.weight", _whole(value), value)
    data[data.index(value.numpy().tobytes())] ^= 0x80
    file.write_bytes(data)
    result = run("verify", path)
    assert result.exit_code == 1
    assert file.name in result.stderr
    assert "model/0.weight" in result.stderr
    assert result.stderr.startswith("Damaged: 1 fault in ")
    file.unlink()
    result = run("verify", path)
    assert result.exit_code == 1
    assert file.name in result.stderr
    assert "Traceback" not in result.output


def test_convert_and_diff(made: Path, tmp_path: Path) -> None:
    result = run("convert", made / "first", tmp_path / "dcp", "--to", "dcp")
    assert result.exit_code == 0, result.output
    assert f"Wrote {tmp_path / 'dcp'}" in result.stdout
    result = run("diff", made / "first", tmp_path / "dcp")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "Equal: 12 tensors and all else."
    result = run("diff", made / "second", tmp_path / "dcp")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "optimizer.state.0.weight.step and 3 more: tensor(2.) and tensor(1.)" in lines
    assert "extra.step: 'second' and 'first'" in lines
    row = next(line.split() for line in lines if line.startswith("model/0.weight "))
    assert row[1:3] == ["15", "100.0%"]
    assert lines[0] == "Different: 0 of 12 tensors in both are equal; 5 other values differ."
    assert lines[-1] == "and 7 more (--all lists them)"
    everything = run("diff", made / "second", tmp_path / "dcp", "--all").stdout
    assert "optimizer/1.bias/exp_avg_sq " in everything and "more (" not in everything


def test_convert_tells_the_size_of_what_it_wrote_and_that_weights_alone_are_not_a_model(
    made: Path, tmp_path: Path
) -> None:
    for name in ("huggingface", "torch"):
        result = run("convert", made / "first", tmp_path / name, "--to", name)
        assert result.exit_code == 0, result.output
        path = tmp_path / name
        file = path if path.is_file() else path / "model.safetensors"
        assert f"({size_text(file.stat().st_size)} in " in result.stdout
        assert ("fullshard export" in result.stdout) == (name == "huggingface")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    write(open_source(made / "first"), checkpoint, to="fullshard")
    (tmp_path / "run" / "config.toml").write_text("")
    for path in (checkpoint, tmp_path / "run"):
        result = run("convert", path, tmp_path / "new", "--to", "huggingface")
        assert result.exit_code == 2
        assert f"fullshard export {path} --to {tmp_path / 'new'}" in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


def test_trouble_is_one_message_and_exit_code_2(made: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for arguments, message in [
        (("inspect", tmp_path), "A checkpoint must be a file of torch.save, or a folder with"),
        (("inspect", tmp_path / "notes.txt"), "No code in it was run"),
        (("inspect", tmp_path / "nowhere"), "does not exist"),
        (("convert", made / "dcp", tmp_path, "--to", "dcp"), "must be converted to a new path"),
        (("convert", made / "dcp", tmp_path / "x", "--to", "zip"), "one of fullshard, huggingface"),
        (("diff", made / "dcp", tmp_path), "A checkpoint must be a file of torch.save"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert "Traceback" not in result.output
        text = result.stderr.replace("\u2502", " ")  # a box, which breaks lines
        assert message in " ".join(text.split()), arguments


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from fullshard.programs.cli import build_app\n"
        "try: build_app()(['checkpoint', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for verb in ("inspect", "verify", "convert", "diff"):
        assert verb in result.stdout
