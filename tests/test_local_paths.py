"""URLs are refused wherever a path is taken: otherwise `s3://bucket/run` is a folder here, and a run ends up in it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch.distributed as dist
import typer
from torch import nn
from typer.testing import CliRunner

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint.sources import conversion, dcp, formats, huggingface, torch_files
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.files import local_path
from fullshard.programs import cli
from fullshard.programs.given_path import existing_path, given_path
from fullshard.programs.plan_tool import profile_file
from fullshard.programs.train.config_fields import config_sections
from fullshard.programs.train.config_file import read_config
from tests.helpers.ranks import World

SOURCES = Path(fullshard.__file__).parent
URL = "s3://bucket/run"
IS_URL = r"A path must be one of this machine; s3:/{1,2}bucket/run is a URL\."


class CloudPath(os.PathLike[str]):
    """As packages have them: its path is that of a cached copy."""

    def __fspath__(self) -> str:
        return "/tmp/cache/run"

    def __str__(self) -> str:
        return URL


# --- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        URL,
        Path(URL),
        CloudPath(),
        "./s3://bucket/run",
        "S3://bucket",
        "gs://",
        "hf://org/model",
        "https://host/file.bin",
        "abfss://container@account/run",
        "simplecache::s3://bucket/run",
    ],
    ids=str,
)
def test_what_has_a_scheme_is_refused(path: str | os.PathLike[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"is a URL.*give a folder of this machine"):
        local_path(path)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/run", "/data/run"),
        ("file:/data/run", "/data/run"),
        ("FILE://host/data/a%20run", "/data/a run"),
    ],
)
def test_of_the_url_of_a_file_the_path_is_the_remedy(url: str, path: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Give the path alone: {path}\\."):
        local_path(url)


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "run", "a/b", "/a", "~/run", "a:b", "run:1/step", "12:30:/x", "C:/data", "c:\\data"),
        *("file:x", "s3", "s3:", "a//b", "a/s3://b", "/s3:/bucket", "//host/x", "../s3:x", "-o:/x"),
    ],
)  # fmt: skip
def test_other_names_with_colons_and_slashes_are_paths(path: str) -> None:
    assert local_path(path) == local_path(Path(path)) == Path(path)


def test_the_remedy_for_a_folder_with_such_a_name_works(tmp_path: Path) -> None:
    model, folder = nn.Linear(2, 2), tmp_path / "s3:" / "bucket"
    checkpoint.save(folder / "a", model)
    assert checkpoint.latest(folder) == folder / "a"
    checkpoint.load(folder / "a", model)


# --- the library -------------------------------------------------------------------------------------------

MODULES = (
    *("fullshard", "fullshard.checkpoint", "fullshard.optim", "fullshard.report"),
    *("fullshard.wrap", "fullshard.mesh", "fullshard.api"),
)
"""Modules whose names are public."""
READERS: list[Callable[..., Any]] = [
    conversion.convert,
    conversion.write,
    dcp.DcpCheckpoint,
    formats.open_source,
    formats.use_source,
    huggingface.HuggingFaceFolder,
    huggingface.write_huggingface,
    profile_file.load_profile,
    torch_files.TorchFile,
    torch_files.write_torch_file,
]
"""Not public, but with paths that users give to programs."""
WRITERS = (conversion.write, huggingface.write_huggingface, torch_files.write_torch_file)
"""Those whose source is open."""
RESULTS = (checkpoint.Loaded, checkpoint.Saved, fullshard.Recording, checkpoint.Base.record)
"""What other functions make or call, with paths that were checked before."""


def takes_path(annotation: object) -> bool:
    return re.search(r"\bPath(Like)?\b", str(annotation)) is not None


def callables() -> Iterator[Callable[..., Any]]:
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            methods: dict[str, Any] = dict(vars(found)) if inspect.isclass(found) else {}
            is_ours = getattr(found, "__module__", "").startswith("fullshard")
            public = [each for name, each in methods.items() if is_ours and name[0] != "_"]
            yield from (each for each in (found, *public) if callable(each))
    yield from READERS


def entries() -> dict[str, tuple[Callable[..., Any], str]]:
    """Every parameter that is a path: of which function, and its name."""
    found = {}
    for each in callables():
        try:
            parameters = inspect.signature(each).parameters.values()
        except (TypeError, ValueError):
            continue
        for parameter in parameters:
            if takes_path(parameter.annotation) and each not in RESULTS:
                found[f"{each.__qualname__}({parameter.name})"] = (each, parameter.name)
    return found


ENTRIES = entries()


def test_all_of_them_are_found() -> None:
    assert {
        *("save(path)", "async_save(path)", "load(path)", "load(base)", "latest(folder)"),
        *("base_of(path)", "save_huggingface(folder)", "load_huggingface(folder)", "Base(path)"),
        *("trace(folder)", "write_report(run)", "write_report(output)", "convert(target)"),
    } <= ENTRIES.keys()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_function_that_takes_a_path_refuses_a_url(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, tested = ENTRIES[entry]
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    checkpoint.save("good", model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    others = {"model": model, "path": "good", "folder": "good", "run": "run", "target": "new"}
    others |= {"source": "good", "digest": "", "content": "", "save": "", "to": "dcp", "use": str}
    if function in WRITERS:
        others["source"] = formats.open_source("good")
    arguments = {
        name: URL if name == tested else others[name]
        for name, each in inspect.signature(function).parameters.items()
        if name == tested or each.default is each.empty
    }
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(ConfigurationError, match=IS_URL):
        function(**arguments)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_folders_of_tokenizers_and_the_like_are_paths_too(tmp_path: Path) -> None:
    for config_from in (URL, [Path(URL)]):
        with pytest.raises(ConfigurationError, match=IS_URL):
            checkpoint.save_huggingface(tmp_path / "new", nn.Linear(2, 2), config_from=config_from)


def save_where_one_rank_has_a_url(folder: str) -> list[str]:
    said = []
    model = nn.Linear(2, 2)
    for call in (checkpoint.save, checkpoint.async_save, checkpoint.save_huggingface):
        with pytest.raises((CheckpointError, ConfigurationError)) as error:
            call(URL if dist.get_rank() == 1 else folder, model)
        said.append(str(error.value))
    return said


def test_a_url_on_one_rank_is_the_same_error_on_all(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    one, other = world(2).run(save_where_one_rank_has_a_url, str(tmp_path / "new"))
    assert one == other and all(text.startswith("rank 1: A path must be") for text in one)
    assert not list(tmp_path.iterdir())


def paths_made_elsewhere(source: str) -> list[str]:
    """Lines of functions that make a path of what a user gave by themselves."""
    faults = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        every = (*function.args.args, *function.args.kwonlyargs)
        given = {each.arg for each in every if "PathLike" in ast.unparse(each.annotation or each)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("Path", "os", "open"):  # fmt: skip
                words = [each.id for each in node.args if isinstance(each, ast.Name)]
                faults += [f"{function.name}:{node.lineno}" for word in words if word in given]
    return faults


def test_a_path_of_a_user_becomes_a_path_in_one_place() -> None:
    found = {
        str(path.relative_to(SOURCES)): faults
        for path in SOURCES.rglob("*.py")
        if (faults := paths_made_elsewhere(path.read_text()))
    }
    # `local_path` itself; and an empty argument of a command line.
    assert {name: len(faults) for name, faults in found.items()} == {
        "files.py": 2,
        "programs/given_path.py": 1,
    }
    wrong = "def f(path: str | os.PathLike[str]):\n    return Path(path), os.path.abspath(path)"
    assert paths_made_elsewhere(wrong) == ["f:2", "f:2"]
    right = wrong.replace("(path)", "(local_path(path))")
    assert not paths_made_elsewhere(right)


# --- programs ----------------------------------------------------------------------------------------------


def commands(app: typer.Typer, *names: str) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for each in app.registered_commands:
        assert each.callback is not None
        yield (*names, each.name or each.callback.__name__), each.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        name = group.name or group.typer_instance.registered_callback.callback.__name__  # type: ignore[union-attr]
        yield from commands(group.typer_instance, *names, name)


def test_every_path_of_the_command_line_has_the_parser_that_refuses_urls() -> None:
    found = []
    for names, callback in commands(cli.build_app()):
        for name, hint in get_type_hints(callback, include_extras=True).items():
            kind, *info = get_args(hint) or (hint,)
            if Path in (kind, *get_args(kind)):
                found.append((*names, name))
                assert info and info[0].parser in (given_path, existing_path), (names, name)
    assert len(found) > 15 and ("train", "folder") in found


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--folder", URL],
        ["train", "--set", f"run.folder={URL}"],
        ["train", f"{URL}/run.toml"],
        ["evaluate", URL],
        ["export", URL],
        ["report", URL],
        ["inspect", URL],
        ["plan", URL, "--gpu", "h100"],
        ["plan", "tiny", "--gpu", f"{URL}.toml"],
        ["plan", "tiny", "--profile", f"{URL}.toml"],
        ["plan", "calibrate", "--quick", "-o", URL],
        ["checkpoint", "verify", URL],
    ],
    ids=" ".join,
)
def test_every_program_refuses_a_url(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    done = CliRunner().invoke(cli.build_app(), arguments, env={"COLUMNS": "400"})
    words = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "is a URL" in words, done.output
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_empty_path_of_the_command_line_is_refused() -> None:
    done = CliRunner().invoke(cli.build_app(), ["train", "--folder", ""])
    assert done.exit_code == 2 and "A path must not be empty" in done.output


PATH_FIELDS = [
    field.full_name
    for section in config_sections().values()
    for field in section.fields.values()
    if Path in get_args(hint := get_type_hints(section.build)[field.name]) or hint is Path
]


@pytest.mark.parametrize("name", PATH_FIELDS)
def test_every_path_of_a_configuration_refuses_a_url(name: str, tmp_path: Path) -> None:
    section, _, field = name.partition(".")
    file = tmp_path / "run.toml"
    file.write_text(f'[{section}]\n{field} = "{URL}"\n')
    for read in (lambda: read_config(None, [f"{name}={URL}"]), lambda: read_config(file)):
        with pytest.raises(ConfigurationError, match=rf"{name}: {IS_URL}"):
            read()


def test_the_fields_are_found() -> None:
    assert {"run.folder", "data.path", "model.weights", "data.tokenizer"} <= set(PATH_FIELDS)
