"""Configurations as files: what is written is read again, and what is wrong is told all at once."""

import dataclasses
import math
import tomllib
import typing
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
from hypothesis import example, given, settings, strategies as st

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import (
    ModelSection,
    Problem,
    RunConfig,
    RunSection,
    SamplesSection,
    TrainSection,
)
from fullshard.programs.train.config_fields import config_sections
from fullshard.programs.train.config_file import differences, read_config, to_toml
from fullshard.programs.train.limits import Limits

# --- configurations of any kind ----------------------------------------------------------------------------


def values_of(hint: Any, limits: Limits = Limits(0)) -> st.SearchStrategy[Any]:  # noqa: B008
    """Any value a type allows, whether or not it goes with the other fields."""
    if get_origin(hint) is typing.Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.tuples(*map(values_of, get_args(hint)))
    if get_origin(hint) is typing.Annotated:
        return values_of(*get_args(hint))
    if NoneType in get_args(hint):
        return st.one_of(*map(values_of, get_args(hint)))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(limits.low, 2**63 - 1),
        float: st.floats(
            limits.low,
            None if limits.high == math.inf else limits.high,
            exclude_min=limits.open_low,
            exclude_max=limits.open_high,
            allow_infinity=False,
        ),
        str: st.text(),
        Path: st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
        .map(Path)
        .filter(lambda path: ":/" not in str(path)),
    }
    return plain[hint]


def sections_of(section: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return st.builds(section, **{name: values_of(hint) for name, hint in hints.items()})


def without_conflicts(config: RunConfig) -> RunConfig:
    """Leave sections out that do not go together, until no others need them."""
    conflicts = {about.partition(".")[0] for each in config.problems() for about in each.about}
    if not conflicts:
        return config
    defaults = RunConfig()
    return without_conflicts(
        dataclasses.replace(config, **{name: getattr(defaults, name) for name in conflicts})
    )


CONFIGS = st.builds(
    RunConfig,
    **{name: sections_of(section) for name, section in typing.get_type_hints(RunConfig).items()},
).map(without_conflicts)


@settings(max_examples=50)
@given(CONFIGS)
@example(
    RunConfig(samples=SamplesSection(prompt="\"\\ \\n\n\r\n\t\0\x7f\x85\u2028 # ''' é \U0001f600"))
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, config: RunConfig
) -> None:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_config(file) == config
    assert differences(config, read_config(file)) == []


def test_the_file_says_every_field_and_what_it_means() -> None:
    text = to_toml(RunConfig())
    written = tomllib.loads(text)
    flowing = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for section in config_sections().values():
        assert section.text in flowing
        for field in section.fields.values():
            assert field.text in flowing
            assert (field.name in written[section.name]) == (field.default is not None)
    assert "# ranks is not set" in text
    assert max(map(len, text.splitlines())) <= 100


# --- what was said, and where ------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_settings_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, '[train]\nsteps = 5\nbatch = 6\n[data]\npath = "here"\n')
    config = read_config(file, ["train.steps=7", "train.steps=8", "data.path="])
    assert config == RunConfig(train=TrainSection(steps=8, batch=6))


@pytest.mark.parametrize(("entry", "api"), [("wrapper", "fsdp1"), ("fully_shard", "fsdp2")])
def test_files_and_settings_with_the_old_name_of_a_field_are_read(
    tmp_path: Path, entry: str, api: str
) -> None:
    file = write(tmp_path, f'[sharding]\ndoor = "{entry}"\n')
    other = "fsdp2" if api == "fsdp1" else "fsdp1"
    for config in (read_config(file), read_config(None, [f"sharding.door={entry}"])):
        assert config.sharding.api == api
        assert f'\napi = "{api}"\n' in to_toml(config) and "door" not in to_toml(config)
    assert read_config(file, [f"sharding.api={other}"]).sharding.api == other
    with pytest.raises(ConfigurationError, match=r"sharding\.api must be one of fsdp2, fsdp1;"):
        read_config(None, ["sharding.door=front"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("samples.prompt=def f():", "def f():"),
        ("samples.prompt=5", "5"),
        ("samples.prompt=", None),
        ('samples.prompt=""', ""),
        ('samples.prompt="two\\nlines"', "two\nlines"),
        ("samples.prompt=1\n[train]\nsteps = 0", "1\n[train]\nsteps = 0"),
        ("samples.prompt=a=b", "a=b"),
        ("run.folder=runs/one", Path("runs/one")),
        ("run.folder=2026", Path("2026")),
        ("data.path=", None),
        ("optimizer.lr=1", 1.0),
        ("optimizer.betas=[0.5, 0]", (0.5, 0.0)),
        ("sharding.api=fsdp1", "fsdp1"),
        ("log.report=false", False),
    ],
)
def test_a_setting_is_toml_where_that_works_and_else_a_text(setting: str, value: object) -> None:
    section, name = setting.partition("=")[0].split(".")
    found = getattr(getattr(read_config(None, [setting]), section), name)
    assert found == value
    assert type(found) is type(value) or isinstance(found, Path)


# --- what is wrong -----------------------------------------------------------------------------------------


def refusal(file: Path | None, *wanted: str, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_config(file, wanted, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stepz=3", "train.stepz: there is no such field (--set). Did you mean train.steps?"),
        ("train.lr=3", "Did you mean optimizer.lr?"),
        ("trian.steps=3", "Did you mean train.steps?"),
        ("steps=3", "Did you mean train.steps or trace.steps?"),
        ("train.steps", "--set takes section.field=value, got 'train.steps'."),
        ("train=3", "train is a section; --set takes section.field=value, got 'train=3'."),
        ("=3", "--set takes section.field=value, got '=3'."),
        ("train.steps=0", "train.steps must be a whole number, at least 1; --set says 0."),
        ("train.steps=many", 'a whole number, at least 1; --set says "many".'),
        ("train.steps=true", "a whole number, at least 1; --set says true."),
        ("train.steps=1.5", "a whole number, at least 1; --set says 1.5."),
        ("train.steps=", "train.steps must be a whole number, at least 1; --set says nothing."),
        ("optimizer.lr=nan", "optimizer.lr must be a finite number, above 0; --set says nan."),
        ("optimizer.lr=inf", "a finite number, above 0; --set says inf."),
        ("optimizer.lr=1" + "0" * 400, "a finite number, above 0"),
        ("optimizer.betas=[0.9]", "an array of 2, each a finite number, at least 0 and below 1"),
        ("optimizer.betas=[0.9, 1]", "--set says [0.9, 1]."),
        (
            "data.held_out=1",
            "data.held_out must be a finite number, above 0 and below 1; --set says 1.",
        ),
        (
            "run.timeout=1e300",
            "run.timeout must be a finite number, above 0 and at most 604800; --set",
        ),
        ("data.path=a\0b", "data.path must be a path, or left out"),
        ("data.path=\udcff", "data.path must be a path, or left out"),
        ("run.device=gpu", 'run.device must be one of auto, cpu, cuda; --set says "gpu".'),
        ("log.report=no", 'log.report must be true or false; --set says "no".'),
        (
            "run.ranks=2020-01-01",
            "run.ranks must be a whole number, at least 1, or left out; --set",
        ),
        ("model.pretrained=true", "model.pretrained needs a folder with weights"),
        ("data.kind=array", 'data.kind = "array" needs an array to read.'),
    ],
)
def test_what_is_wrong_with_a_setting_is_told(setting: str, message: str) -> None:
    found = refusal(None, setting)
    assert message in found
    assert "The configuration has a problem; nothing was started." in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = \n", "is not TOML: Invalid value (at line 2, column 9)."),
        ("[trian]\nsteps = 3", "a section of that name, and there is none. Did you mean train?"),
        (
            "steps = 3",
            "a field outside of a section of that name, and there is none. Did you mean train.steps or",
        ),
        ("train = 3", "train is a section; "),
        ("[train.steps]\nx = 3", "train.steps must be a whole number, at least 1; "),
        ("[train]\nbatch = [[1]]", "says [[1]]."),
        ("[[train]]\nsteps = 1", "train is a section; "),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    found = refusal(file)
    assert message in found
    assert str(file) in found


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert read_config(tmp_path / "run.toml").train.steps == 3


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    assert "There is no file" in refusal(tmp_path / "none.toml")
    assert "is a folder, not a TOML file." in refusal(tmp_path)
    (tmp_path / "config.toml").touch()
    assert f"described by {tmp_path / 'config.toml'}." in refusal(tmp_path)
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert "is not TOML" in refusal(tmp_path / "config.toml")


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    file = write(tmp_path, "[train]\nsteps = 0\nbach = 3\n[model]\npretrained = true\n")
    lines = refusal(
        file,
        "optimizer.lr=-1",
        checks=[lambda config: config.world_problems(3), lambda config: [Problem((), "No file.")]],
    ).splitlines()
    assert lines[0] == "The configuration has 6 problems; nothing was started."
    for line, begin in zip(
        lines[1:-1],
        (
            "train.steps",
            "train.bach",
            "optimizer.lr",
            "model.pretrained",
            "train.batch",
            "No file.",
        ),
        strict=True,
    ):
        assert line.startswith(f"  - {begin}")


def test_what_may_only_follow_from_a_refused_value_is_not_told() -> None:
    assert "divisible" in refusal(None, checks=[lambda config: config.world_problems(3)])
    found = refusal(None, "train.batch=x", checks=[lambda config: config.world_problems(3)])
    assert "divisible" not in found
    found = refusal(None, "model.size=x", checks=[lambda config: [Problem(("model",), "Follows.")]])
    assert "Follows." not in found


# --- what concerns several fields --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            ["model.huggingface=x", "model.width=8", "model.heads=2"],
            "model.width, model.heads shape the built-in",
        ),
        (
            ["model.huggingface=x", "model.pretrained=true", "model.weights=y"],
            "both say which weights to start from",
        ),
        (["checkpoint.only_trainable=true"], "leaves frozen parameters out, and all are trained"),
        (
            ["optimizer.muon_lr=8"],
            "optimizer.muon_lr is for muon only, and optimizer.name is adamw",
        ),
        (["evaluation.ema=true"], "evaluation.ema needs averages"),
        (["checkpoint.export_ema=true"], "checkpoint.export_ema needs averages"),
        (["sharding.offload=true", "run.device=cpu"], "sharding.offload needs CUDA"),
        (["sharding.offload=true", "sharding.api=fsdp1"], "for fsdp2 only"),
        (["sharding.prefetch=2", "sharding.api=fsdp1"], "fsdp1 gathers 1 group ahead"),
        (
            ["optimizer.shard_over_replicas=true", "optimizer.name=muon"],
            "updates each element for itself",
        ),
        (
            ["optimizer.shard_over_replicas=true", "optimizer.flat=false"],
            "that optimizer.flat chooses",
        ),
        (["compute.graph=true", "sharding.offload=true"], "in which the host does not wait"),
        (["compute.graph=true", "train.on_error=skip"], "leave a step at every collective"),
    ],
)
def test_fields_that_do_not_go_together_are_named(wanted: list[str], message: str) -> None:
    assert message in refusal(None, *wanted)


@pytest.mark.parametrize(
    ("wanted", "world", "message"),
    [
        (
            ["train.batch=16"],
            3,
            "16 / (3 * 1) leaves 1. 15 or 18 would do as train.batch, or 1, 2 or 4 as the number",
        ),
        (
            ["train.batch=4", "train.accumulate=3"],
            2,
            "4 / (2 * 3) leaves 4. 6 would do as train.batch.",
        ),
        (["sharding.replicas=3"], 4, "4 / 3 leaves 1. 1, 2 or 4 would do as sharding.replicas."),
        ([f"train.batch={10**18}"], 7, "would do as train.batch"),
        ([f"train.batch={10**30}"], 7, f"{10**30}, more than 64 bits hold"),
    ],
)
def test_batches_and_replicas_that_do_not_divide_name_those_that_do(
    wanted: list[str], world: int, message: str
) -> None:
    assert message in refusal(None, *wanted, checks=[lambda config: config.world_problems(world)])


# --- a run that goes on ------------------------------------------------------------------------------------


def test_only_what_decides_the_trajectory_differs() -> None:
    old = RunConfig()
    new = RunConfig(
        run=RunSection(ranks=4, seed=1, folder=Path("elsewhere")),
        train=TrainSection(steps=10),
        model=ModelSection(layers=3),
        samples=SamplesSection(prompt="x"),
    )
    found = [(each.field, each.old, each.new) for each in differences(old, new)]
    assert found == [("run.seed", "0", "1"), ("model.layers", "not set", "3")]


def test_a_quoted_text_is_a_text_without_its_quotes_also_where_it_is_refused() -> None:
    for quoted in ('""', "''"):
        with pytest.raises(ConfigurationError, match=r"run\.folder must be a path; --set says "):
            read_config(None, [f"run.folder={quoted}"])
    with pytest.raises(ConfigurationError, match=r"train\.steps must be a whole number"):
        read_config(None, ['train.steps="3"'])
    config = read_config(None, ['run.folder="a b"', 'samples.prompt="x"', "data.path=2024-01-01"])
    assert (config.run.folder, config.data.path) == (Path("a b"), Path("2024-01-01"))
    assert config.samples.prompt == "x"
    assert read_config(None, ['samples.prompt=""']).samples.prompt == ""
    assert read_config(None, ['samples.prompt="a" + "b']).samples.prompt == '"a" + "b'
