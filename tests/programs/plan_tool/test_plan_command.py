"""`fullshard plan`: what it prints, for whom, and what it refuses."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fullshard.programs import cli, report
from fullshard.programs.named_models.published import published_folder
from fullshard.programs.plan_tool import calibration_run, command, parallel_plans, planning
from fullshard.programs.plan_tool.answers import (
    MEMORY,
    About,
    limit_text,
    memory_rows,
    seconds_text,
    validation_text,
    verdict,
)
from fullshard.programs.plan_tool.changes import changed
from fullshard.programs.plan_tool.output import print_planned, print_verdict
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import MemoryKind
from fullshard.programs.plan_tool.question import Question, read_machine, read_question
from fullshard.programs.plan_tool.validation import (
    HOST_BAND,
    MEASURED_HERE,
    Band,
    band_of,
    bands_of,
)
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model

SMALL = ("model.layers=2", "model.width=64", "model.heads=2", "data.context=16")


def plan(*words: str, small: bool = True) -> Result:
    settings = [each for setting in SMALL for each in ("--set", setting)] if small else []
    return CliRunner().invoke(cli.build_app(), ["plan", *words, *settings], terminal_width=200)


def question(
    *settings: str, gpus: int = 16, gpu: str = "h100", network: str | None = None
) -> Question:
    machine = read_machine(gpu, None, network)
    return read_question("tiny", gpus, machine, [*SMALL, *settings])


@pytest.fixture(scope="module")
def step() -> PlannedStep:
    """A small step on 16 GPUs."""
    asked = question()
    return planned(asked, open_model(asked.config))


def with_capacity(step: PlannedStep, gib: float) -> PlannedStep:
    memory = replace(step.machine.memory, capacity_gib=gib, outside_gib=0.0)
    return replace(step, machine=replace(step.machine, memory=memory))


def with_idle(step: PlannedStep, **idle: float) -> PlannedStep:
    playback: Any = replace(step.playback, seconds=1.0, idle=idle)
    return replace(step, playback=playback)


def test_the_verdict_comes_first_and_everything_asked_for_is_printed() -> None:
    result = plan(
        *("tiny", "--gpus", "16", "--gpu", "h100", "--batch", "64", "--explain", "--no-search"),
        *("--set", "compute.graph=true"),
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("It fits: ")
    for word in (
        " it: ",
        "per GPU",
        "in all",
        "optimizer state",
        "allocator",
        "allocated in backward",
        "64 windows of 16 tokens; 4 per GPU",
        "allocated in backward, \u00b1",
        " reserved, \u00b1",
        "MFU",
        "1 billion tokens",
        "GPU hours",
        "Not validated",
        "is planned as one without",
        "peak_tflops = ",
        "NVIDIA data sheet, dense",
    ):
        assert word in result.output, word


def test_shards_in_host_memory_are_told_with_their_memory_their_time_and_what_is_assumed() -> None:
    result = plan(
        *("tiny", "--gpus", "16", "--gpu", "h100", "--no-search", "--explain"),
        *("--set", "sharding.offload=true"),
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for words in (
        "Shards, gradients and optimizer state take ",
        " of a host: 8 x ",
        "shards in host memory",
        "host memory for a GPU bytes parameters, sharded",
        "waits for the update in host memory",
        "[offload], band",
        "to_device_gb_s = 55",
        "devices_per_link = 2",
    ):
        assert words in text, words


def test_a_host_without_enough_memory_is_told_by_how_much(step: PlannedStep) -> None:
    memory = replace(step.memory, host_allocated=step.machine.host_memory_bytes)
    short = replace(step, memory=memory)
    assert not short.fits
    said = verdict(short, Band(None, "others"))
    assert said.startswith("It does not fit: 13 TiB of host memory are missing.")


def test_short_options_are_settings_and_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []
    monkeypatch.setattr(command, "_answer", lambda _, question, *__, **___: asked.append(question))
    result = plan("tiny", "--gpu", "h100", "--compile", "--seq", "24", "--batch", "32")
    assert result.exit_code == 0, result.output
    config = asked[0].config
    found = config.compute.compile, config.data.context, config.train.batch, config.model.layers
    assert found == ("blocks", 24, 32, 2)


def test_a_run_s_file_says_ranks_and_batch(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nranks = 4\n[train]\nbatch = 12\naccumulate = 3\n[model]\nsize = "tiny"\n'
    )
    asked = read_question(str(file), None, load_profile("h100"), SMALL)
    assert asked.world == 4 and asked.config.train.batch == 12
    assert read_question(str(file), 2, load_profile("h100"), SMALL).world == 2


def test_without_a_batch_every_gpu_gets_one_window_for_each_microbatch() -> None:
    assert question("train.accumulate=3").config.train.batch == 48


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_is_not_overrun(step: PlannedStep, width: int) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    about = About(
        description="a decoder with a long description of its many layers",
        parameters=123456,
        chosen="compute in bf16; windows of 16 tokens; 512 windows at a time",
        price=2.5,
    )
    print_verdict(console, step, about.parameters)
    print_planned(console, step, about)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > 30


def test_a_model_that_does_not_fit_is_told_by_how_much(step: PlannedStep) -> None:
    grown = replace(step, memory=replace(step.memory, reserved=3 << 30))
    band = Band(0.1, "runs")
    assert verdict(with_capacity(grown, 4.0), band).endswith("; 1 GiB stay free.")
    assert verdict(with_capacity(grown, 2.5), band).startswith(
        "It does not fit: 512 MiB are missing. It needs 3 GiB, and torch can use 2.5 GiB of "
    )
    just = verdict(with_capacity(grown, 3.125), band)
    assert just.startswith("It fits, but only just: 3 GiB of the 3.12 GiB ")
    assert just.endswith("128 MiB stay free, and the plan may be off by 307 MiB.")
    nearly = verdict(with_capacity(grown, 2.875), band)
    assert nearly.endswith(" The plan may be off by 307 MiB.")


def test_memory_has_a_band_where_it_was_measured_and_none_where_it_is_assumed(
    step: PlannedStep,
) -> None:
    on_h200 = replace(step, machine=load_profile("h200"))
    compiled = changed(step.config, {"compute.compile": "blocks"})
    bands = [
        band_of(each, "reserved", 1_000_000_000)
        for each in (on_h200, step, replace(on_h200, config=compiled))
    ]
    assert [each.basis for each in bands] == ["runs", "others", "others"]
    assert bands[0].relative == bands[1].relative and bands[1].relative
    assert str(bands[2]) == "error not known"


def test_experts_and_waits_for_the_host_are_not_called_validated(step: PlannedStep) -> None:
    parameters = 8_000_000_000
    plain = with_idle(step, gather=0.3)
    assert band_of(plain, "time", parameters).is_validated
    routed = replace(plain, has_experts=True)
    bands = bands_of(routed, parameters)
    assert not bands["time"].is_validated
    said = validation_text(routed, bands)
    assert said is not None and "as if all experts got equally many" in said
    waiting = with_idle(step, host=0.3)
    band = band_of(waiting, "time", parameters)
    assert band.relative == HOST_BAND and str(band) == "\u00b1 43 % as it waits for the host"
    said = validation_text(waiting, bands_of(waiting, parameters))
    assert said is not None and "up to 43 % too slow" in said and "plan calibrate" in said
    here = replace(waiting, machine=replace(waiting.machine, name=MEASURED_HERE))
    assert band_of(here, "time", parameters).basis == "profile"


def test_the_memory_of_all_kinds_adds_up_to_what_is_reserved(step: PlannedStep) -> None:
    assert set(MEMORY) == set(get_args(MemoryKind))
    assert sum(nbytes for _, nbytes in memory_rows(step)) == step.memory.reserved


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        ({"gather": 0.02, "host": 0.01}, "Compute limits it: it is busy for 970 ms of 1 s, and waits 20 ms for gathers and 10 ms for the host."),
        ({"gather": 0.2, "host": 0.1}, "Exposed gathers limit it: in a step of 1 s, compute waits 200 ms for gathers and 100 ms for the host."),
        ({"gather": 0.3, "host": 0.2, "reduction": 0.1}, "Exposed gathers limit it: in a step of 1 s, compute waits 300 ms for gathers, 200 ms for the host and 100 ms for reductions."),
        ({"reduction": 0.2}, "Exposed reductions limit it: in a step of 1 s, compute waits 200 ms for reductions."),
        ({"host": 0.5, "gather": 0.1}, "The host limits it: in a step of 1 s, compute waits 500 ms for the host and 100 ms for gathers."),
        ({"host": 0.001}, "Compute limits it: it is busy for 999 ms of 1 s, and hardly waits."),
        ({}, "Compute limits it: it is busy for 1 s of 1 s, and never waits."),
    ],
)  # fmt: skip
def test_what_limits_a_step_is_one_sentence(
    step: PlannedStep, idle: dict[str, float], said: str
) -> None:
    assert limit_text(with_idle(step, **idle)) == said


def test_times_have_three_digits() -> None:
    assert list(map(seconds_text, (1234.5, 12.345, 0.0123, 4.2e-5))) == [
        "1,234 s",
        "12.3 s",
        "12.3 ms",
        "42 us",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing", "--gpu", "h100"), "or a run or its TOML file; nothing is none of them"),
        (("math:floor", "--gpu", "h100"), "fullshard inspect takes any module:function"),
        (("tiny", "--gpu", "h1000"), "There is no profile of a GPU named 'h1000'. Did you mean h100?"),
        (("tiny", "--gpu", ""), "There is no profile of a GPU named ''"),
        (("tiny", "--gpu", "h100", "--html", "no/page.html"), "no/page.html cannot be written: there is no folder no."),
        (("tiny", "--gpu", "h100", "--toml", "no/run.toml"), "no/run.toml cannot be written: there is no folder no."),
        (("tiny", "--gpu", "h100", "--toml", "."), ". cannot be written: it is a folder."),
        (("tiny", "--gpu", "h100", "--html", "/"), "/ cannot be written: it is a folder."),
        (("tiny", "--gpu", "h100", "--html", "a.x", "--toml", "./a.x"), "--toml and --html both name a.x. Name two files."),
        (("tiny",), "A plan needs to know the GPU"),
        (("tiny", "--gpu", "h100", "--profile", "x.toml"), "A plan needs to know the GPU"),
        (("tiny", "--profile", "none.toml"), "There is no file none.toml"),
        (("tiny", "--gpu", "h100", "--network", "fast"), "--network takes the Gbit/s of a GPU"),
        (("tiny", "--gpu", "h100", "--network", "9" * 400), "--network takes the Gbit/s of a GPU"),
        (("tiny", "--gpu", "h100", "--batch", "3"), "train.batch must be divisible"),
        (("tiny", "--gpu", "h100", "--gpus", "6", "--set", "sharding.replicas=4"), "must be divisible by sharding.replicas"),
        (("tiny", "--gpu", "h100", "--set", "sharding.replicas=8", "--set", "compute.wire=bf16"), "they average whole gradients"),
        (("tiny", "--gpu", "h100", "--set", "model.widht=3"), "model.widht: there is no such field"),
        (("tiny", "--gpu", "h100", "--no-search", "--set", "sharding.offload=true", "--set", "optimizer.name=muon"), "such a run cannot be planned"),
        (("tiny", "--gpu", "cpu"), "Plans are of GPUs; CPU ranks are for tests. Plan the GPUs on which the model will train"),
        (("tiny", "--gpu", "h100", "--tokens", "many"), "--tokens takes a number of tokens such as 15T, 300B or 2e9"),
        (("tiny", "--gpu", "h100", "--tokens", "0"), "--tokens takes a number of tokens"),
        (("llama-3-8b", "--gpu", "h100"), "Did you mean llama3-8b?"),
        (("tiny", "--gpu", "h100", "--gpus", "2000000"), "at most 1,000,000 GPUs"),
    ],
)  # fmt: skip
def test_an_impossible_question_is_one_message(words: tuple[str, ...], said: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.startswith("Error: ") and "Traceback" not in result.output


def test_a_folder_to_which_nothing_may_be_written_is_refused_before_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the system is asked for nobody.
    monkeypatch.setattr(command.os, "access", lambda *_: False)
    monkeypatch.setattr(command, "_answer", lambda *_, **__: pytest.fail("it was planned"))
    result = plan("tiny", "--gpu", "h100", "--toml", str(tmp_path / "a.toml"))
    assert result.exit_code == 2
    assert f"nothing may be written to {tmp_path}" in "".join(result.output.splitlines())


def test_a_page_without_its_libraries_is_refused_before_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    monkeypatch.setattr(command, "_answer", lambda *_, **__: pytest.fail("it was planned"))
    result = plan("tiny", "--gpu", "h100", "--html", str(tmp_path / "plan.html"))
    assert result.exit_code == 2
    assert "A page needs plotly and jinja2; plotly is not installed." in result.output


def test_a_model_that_needs_values_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> PlannedStep:
        raise NotImplementedError("nonzero needs values\nand more")

    monkeypatch.setattr(planning, "plan_microbatches", fail)
    result = plan("tiny", "--gpu", "h100")
    assert result.exit_code == 2
    assert "raised NotImplementedError there: nonzero needs values." in result.output


def test_the_network_can_be_given_for_a_gpu_or_a_host() -> None:
    assert read_machine("h100", None, "100").network.gbit_per_device == 100
    assert read_machine("h100", None, "1600/host").network.gbit_per_device == 200


def test_calibration_writes_a_profile_that_plans_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "this.toml"
    machine = replace(load_profile("h100"), name=MEASURED_HERE)
    monkeypatch.setattr(calibration_run, "calibrated", lambda **_: machine)
    result = plan("calibrate", "--quick", "--output", str(file), small=False)
    assert result.exit_code == 0, result.output
    assert load_profile(file) == machine
    result = plan("tiny", "--profile", str(file), "--gpus", "2", "--no-search")
    assert result.exit_code == 0 and "It fits" in result.output
    missing = plan("calibrate", "--output", str(tmp_path / "no" / "x.toml"), "--quick", small=False)
    assert missing.exit_code == 2 and "cannot be written" in missing.output


def test_what_does_not_fit_is_followed_by_where_and_how_it_fits(
    step: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = with_capacity(step, 0.5)

    def estimate(config: RunConfig, world: int, *_: object) -> PlannedStep:
        shares = world if config.sharding.replicas == 1 else 8
        reserved = (20 << 30) // shares
        held: Any = {"parameters": reserved}
        memory = replace(step.memory, reserved=reserved, at_peak=held)
        return replace(small, config=config, world=world, memory=memory)

    monkeypatch.setattr(
        planning, "plan_microbatches", lambda config, world, *_, **__: estimate(config, world)
    )
    monkeypatch.setattr(planning, "estimate_step", estimate)
    monkeypatch.setattr(parallel_plans, "_is_safe_to_fork", lambda: False)
    monkeypatch.setattr(command, "read_machine", lambda *_: small.machine)
    output = plan("tiny", "--gpus", "16", "--gpu", "h100").output
    text = " ".join(output.split())
    assert text.startswith("It does not fit: 768 MiB are missing.")
    assert "parameters, gradients and optimizer state alone take 1.25 GiB of each GPU." in text
    # 40 GPUs have exactly enough.
    assert "Smallest number of GPUs that fits: 40, with one window of 16 tokens on each" in text
    places = [text.index(words) for words in ("Smallest number", "alone take", "As asked, ", "MFU")]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama3-8b", ["llama3-8b (llama of transformers), 8,030,261,248 parameters", "(the most that the model takes)"]),
        ("mixtral-8x7b", ["46,702,792,704 parameters", "(of at most 32,768 that the model takes)", "all experts got equally many", "selective recomputation, as it would not fit with less"]),
    ],
)  # fmt: skip
def test_a_published_model_is_planned_as_it_would_be_trained(model: str, said: list[str]) -> None:
    pytest.importorskip("transformers")
    length = ("--tokens", "15T", "--price", "2.5")
    result = plan(model, "--gpus", "64", "--gpu", "h100", "--no-search", *length, small=False)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("It fits: ")
    common = ["64 windows of 8,192 tokens; 1 per GPU", "compute in bf16; windows of 8,192 tokens"]
    for words in (*common, *said, " days for 15 trillion tokens, ", " at 2.5 a GPU hour"):
        assert words in result.output, words


@pytest.mark.slow
def test_a_file_for_a_published_model_says_that_it_has_no_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "best.toml"
    words = ("gpt2", "--gpus", "8", "--gpu", "h100", "--no-search", "--toml", str(file))
    assert plan(*words, small=False).exit_code == 0
    assert "no weights and no tokenizer" in " ".join(file.read_text().split()).replace("# ", "")
    config = read_config(file)
    assert config.model.huggingface == published_folder("gpt2")
    assert config.data.context == 1024 and config.compute.precision == "bf16"


def test_help_names_the_model_and_calibrate() -> None:
    assert "calibrate" in plan("--help", small=False).output
    assert "--quick" in plan("calibrate", "--help", small=False).output


def test_a_search_prints_its_findings_and_writes_a_file_for_the_trainer(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    result = plan("tiny", "--gpus", "16", "--gpu", "h100", "--network", "5", "--toml", str(file))
    assert result.exit_code == 0, result.output
    assert "Better configurations for the same batch:" in result.output
    assert "x tokens/s; " in result.output
    assert "Not tried: context, expert and tensor parallelism" in result.output
    config = read_config(file)
    assert config.sharding.replicas == 2 or not config.sharding.reshard_after_forward
    config.check(16)


FORKABLE = """
import sys
from fullshard.programs import cli
sys.argv = ["fullshard", "plan", "tiny", "--gpu", "none"]
try:
    cli.main()
except SystemExit:
    pass
import numpy, torch
from fullshard.programs.plan_tool.parallel_plans import _is_safe_to_fork
torch.ones(1000, 1000).sort()  # in several threads, where they are allowed
print("forkable:", _is_safe_to_fork())
"""


@pytest.mark.slow
def test_the_command_starts_no_threads_that_would_forbid_plans_on_several_cores() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    ran = subprocess.run(
        [sys.executable, "-c", FORKABLE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "forkable: True" in ran.stdout, ran.stdout + ran.stderr
