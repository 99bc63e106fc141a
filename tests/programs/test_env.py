"""`fullshard env`: what a report of a problem needs, also from an installation that lacks what the report is about."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from typer.testing import CliRunner

import fullshard
from fullshard.programs import cli
from fullshard.programs.env_tool.environment import PREFIXES, environment_facts


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def facts() -> dict[str, str]:
    """The facts by label; settings below the first one are left out."""
    return {label: text for label, text in environment_facts() if label}


def tool(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in the place of the driver's tool."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_versions_and_settings_are_printed_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FULLSHARD_WATCHDOG", "off")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hidden")
    monkeypatch.setenv("TORCH_PROXY", "http://me:hidden@proxy")
    monkeypatch.setenv("UNRELATED", "hidden")
    result = CliRunner().invoke(cli.build_app(), ["env"])
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["fullshard", fullshard.__version__]
    assert lines[2].split()[:2] == ["torch", torch.__version__]
    assert "typer " in result.stdout or "fullshard itself is not installed" in result.stdout
    assert "mypy" not in result.stdout and "hidden" not in result.stdout
    assert [line.removeprefix("settings").strip() for line in lines[-4:]] == [
        "FULLSHARD_WATCHDOG=off",
        "OMP_WAIT_POLICY=PASSIVE",
        "TORCH_HUB_TOKEN is set, and not shown",
        "TORCH_PROXY is set, and not shown",
    ]


def test_the_extra_is_not_needed_and_no_setting_is_of_fullshard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in cli.CLI_LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["fullshard", "env"])
    for stream in ("stdout", "stderr"):  # the command replaces them
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert not leaving.value.code
    assert capsys.readouterr().out.splitlines()[-1].split() == ["settings", "none"]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as without:
        without.setattr(distributed, "is_available", lambda: False)
        assert facts()["backends"] == "none: this torch is built without torch.distributed"
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = facts()
    assert found["torch"].startswith("not known: ModuleNotFoundError")
    assert found["GPUs"] == "not known: there is no nvidia-smi"
    assert found["CPU"].endswith("of memory")


def test_gpus_are_counted_and_a_failure_of_the_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = "echo 'NVIDIA H200, 143771 MiB, 570.86.15'"
    tool(tmp_path, f"{row}; {row}", monkeypatch)
    assert facts()["GPUs"] == "2 x NVIDIA H200, 143771 MiB, driver 570.86.15"
    tool(tmp_path, "echo no driver; exit 9", monkeypatch)
    assert facts()["GPUs"] == "not known: nvidia-smi says no driver"


def test_the_backends_are_those_of_torch() -> None:
    backends = facts()["backends"]
    assert ("gloo" in backends) == distributed.is_gloo_available()
    assert ("NCCL" in backends) == distributed.is_nccl_available()
