"""Names and values from files reach terminals and pages without what these would obey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fullshard.checkpoint.sources.dcp import write_dcp
from fullshard.checkpoint.sources.torch_files import write_torch_file
from fullshard.programs.cli import build_app
from fullshard.programs.console.safe_text import safe_line, safe_text
from fullshard.programs.console.tables import print_facts, print_line, print_table
from fullshard.report import write_report
from tests.helpers.checkpoints import MemorySource
from tests.helpers.run_folders import Machine, metrics_records, simulated_trace, write_metrics

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\x00\x7f"
"""Sets the title, clears the screen, turns the line around."""


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


def test_what_is_harmless_stays_and_the_rest_can_be_told_apart() -> None:
    assert safe_text("blocks.0.weight: \u00fc\n\t\u4e16") == "blocks.0.weight: \u00fc\n\t\u4e16"
    assert safe_text("a\x1b[2J\u202e\U000e0001\ud800") == "a\\x1b[2J\\u202e\\U000e0001\\ud800"
    assert safe_line("a\nb\tc\x00") == "a\\nb\\tc\\x00"


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_lines_are_harmless(terminal: bool) -> None:
    console = Console(force_terminal=terminal, color_system=None, record=True, width=200)
    print_line(console, EVIL)
    print_facts(console, [("Name", EVIL)])
    print_table(console, ["name", "size"], [(f"{EVIL}\nforged", "1")], num_texts=1)
    output = console.export_text(styles=False)
    assert is_harmless(output) and "\nforged" not in output


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(build_app(), list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def test_names_in_checkpoints_are_shown_harmlessly(tmp_path: Path) -> None:
    name = f"model/{EVIL}"
    source = MemorySource({name: torch.ones(2)}, {f"tied{EVIL}": EVIL}, extra={EVIL: EVIL})
    other = MemorySource({name: torch.zeros(2), f"{name}2": torch.ones(1)}, extra={EVIL: 1})
    write_dcp(source, tmp_path / "dcp")
    write_torch_file(source, tmp_path / "a.pt")
    write_torch_file(other, tmp_path / "b.pt")
    run("checkpoint", "convert", tmp_path / "a.pt", tmp_path / "ours", "--to", "fullshard")
    for output in (
        run("checkpoint", "inspect", tmp_path / "dcp", "--pieces"),
        run("checkpoint", "inspect", tmp_path / "ours", "--pieces"),
        run("checkpoint", "inspect", tmp_path / "ours", "--json"),
        run("checkpoint", "diff", tmp_path / "a.pt", tmp_path / "b.pt"),
    ):
        assert is_harmless(output) and "owned" in output
    (file,) = tmp_path.glob("ours/data-*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    output = run("checkpoint", "verify", tmp_path / "ours")
    assert is_harmless(output) and "owned" in output and "Damaged" in output


def test_errors_with_names_from_files_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {EVIL: "model.safetensors"}})
    )
    header = json.dumps({f"x{EVIL}": {"dtype": EVIL}}, ensure_ascii=False).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    output = run("checkpoint", "inspect", tmp_path)
    assert is_harmless(output) and "Error" in output
    config = tmp_path / "run.toml"
    config.write_text('[train]\n"a\\u001b[2J" = 1\nsteps = "\\u001b[2J"\n')
    output = run("train", config)
    assert is_harmless(output) and "train.a" in output


def test_pages_about_hostile_runs_are_written(tmp_path: Path) -> None:
    """Texts that cannot be encoded, numbers of hundreds of digits, numbers for lists, nesting without end."""
    records: list[Any] = metrics_records(12)
    records[0] |= {
        "model": f"{EVIL}\ud800",
        "data": [[1]],
        "device": {"a": 1},
        "versions": {EVIL: []},
    }
    records[0] |= {"rank_bytes": [10**400], "world": 10**400, "steps": 1e308, "parameters": -1e308}
    records[3] |= {"loss": 10**400, "step_s": 1e308, "tokens": 1e300, "lr": 1e-320}
    records[4] |= {"loss": 1.7e308, "step_s": 1e-308, "grad_norm": -1.7e308, "memory_bytes": 1e308}
    records += [
        {"kind": "trouble", "step": 5, "what": EVIL, "action": {}},
        {"kind": "samples", "step": 12, "texts": ["\ud800\x1b", {"a": 1}]},
        {"kind": "samples", "step": 11, "texts": 5},
        {"kind": "step", "step": 10**400},
        {"kind": "step", "step": 1e300},
        {"kind": "stopped", "step": 3, "why": 10**300},
    ]
    write_metrics(tmp_path, records)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"kind":' * 100_000 + "\n")
    (tmp_path / "config.toml").write_text(
        f'[data]\nx = 0x{"f" * 5000}\ny = "\\u001b"\nz = {"[" * 60}{"]" * 60}\n'
    )
    trace = simulated_trace(Machine(layers=1, world=1))
    trace["traceEvents"][8] |= {"ts": 10**400, "dur": 1e308}
    trace["traceEvents"] += [
        {"ph": "X", "cat": "step", "ts": 1e308, "dur": 1e308, "args": {"step": 1e308}}
    ]
    (tmp_path / "rank_00000.json").write_text(json.dumps(trace).replace("layers.0", "\\u001b]0;x"))
    for number, text in enumerate(("[" * 100_000, '{"fullshard": {"format": 1, "groups": 5}}')):
        (tmp_path / f"rank_0000{number + 1}.json").write_text(text)
    events = {"fullshard": {"format": 1}, "traceEvents": 7}
    (tmp_path / "rank_00003.json").write_text(json.dumps(events))
    text = write_report(tmp_path).read_text()
    page = text[text.index("<body>") : text.index("<script type=")]
    assert is_harmless(page) and "rank_00001.json is left out" in page
    assert "metrics.jsonl: 4 of " in page
