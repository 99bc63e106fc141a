"""Folders of Hugging Face models without transformers: what is read, refused and written, by one process and by ranks.

`test_transformers` has transformers write and read them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullshard import CheckpointError, ConfigurationError, FullyShardedDataParallel, fully_shard
from fullshard.checkpoint.folders import replacement
from fullshard.checkpoint.source import TensorInfo
from fullshard.checkpoint.sources import huggingface
from fullshard.checkpoint.sources.huggingface import (
    HuggingFaceFolder,
    load_huggingface,
    save_huggingface,
    write_huggingface,
)
from fullshard.checkpoint.sources.torch_files import TorchFile
from fullshard.layout.blocks import Block, whole
from tests.helpers.compare import assert_equal
from tests.helpers.failing_files import FailingFiles, Nth

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weights() -> dict[str, Tensor]:
    """44, 24, 4 and 5 bytes."""
    return {
        "embed": torch.linspace(-1, 1, 22).bfloat16().view(11, 2),
        "inner": torch.arange(6.0).view(2, 3),
        "scale": torch.tensor(0.5),
        "seen": torch.tensor([True, False, True, True, False]),
    }


def folder_of(files: dict[str, dict[str, Tensor]], path: Path) -> Path:
    path.mkdir()
    for name, content in files.items():
        save_file(content, path / name)
    if files and list(files) != [ONE]:
        where = {weight: name for name, content in files.items() for weight in content}
        write_index(path, where)
    return path


def write_index(path: Path, where: Any) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def two_files(path: Path) -> Path:
    all_weights = weights()
    first = {name: all_weights.pop(name) for name in ("embed", "scale")}
    return folder_of({"a.safetensors": first, "b.safetensors": all_weights}, path)


def read_all(source: Any) -> dict[str, Tensor]:
    found = {}
    for key, info in source.tensors.items():
        found[key.removeprefix("model/")] = out = torch.empty(info.shape, dtype=info.dtype)
        source.read(key, whole(info.shape), out)
    return found


# --- reading ---------------------------------------------------------------------------------------------


def test_one_file_and_several_are_read_alike(tmp_path: Path) -> None:
    one = HuggingFaceFolder(folder_of({ONE: weights()}, tmp_path / "one"))
    several = HuggingFaceFolder(two_files(tmp_path / "several"))
    for source in (one, several):
        assert source.tensors["model/embed"] == TensorInfo(torch.bfloat16, (11, 2))
        assert (source.tied, source.optimizer, source.extra) == ({}, None, None)
        assert source.verify([("model/embed", whole((11, 2)))]) == []
    expected = weights()
    assert_equal(read_all(one), expected)
    assert_equal(read_all(several), expected)

    strided = torch.zeros(2, 2).t()
    several.read("model/inner", Block((0, 1), (2, 2)), strided)
    assert_equal(strided, expected["inner"][:, 1:])
    several.close()


def test_one_file_goes_before_an_index_as_with_transformers(tmp_path: Path) -> None:
    path = two_files(tmp_path / "both")
    save_file({"other": torch.ones(2)}, path / ONE)
    assert list(HuggingFaceFolder(path).tensors) == ["model/other"]


def test_files_may_be_links_as_in_caches(tmp_path: Path) -> None:
    path = two_files(tmp_path / "model")
    (tmp_path / "blobs").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (path / name).rename(tmp_path / "blobs" / name)
        (path / name).symlink_to(Path("..", "blobs", name))
    assert len(read_all(HuggingFaceFolder(path))) == 4


def test_weights_are_renamed_or_left_out(tmp_path: Path) -> None:
    path = two_files(tmp_path / "model")
    source = HuggingFaceFolder(path, lambda name: None if name == "seen" else f"net.{name}")
    assert sorted(source.tensors) == ["model/net.embed", "model/net.inner", "model/net.scale"]
    assert_equal(read_all(source)["net.inner"], weights()["inner"])
    with pytest.raises(
        ConfigurationError, match=r"scale and embed become x, scale and inner become x"
    ):
        HuggingFaceFolder(path, lambda name: "x")


def lose_a_file(path: Path) -> None:
    (path / "a.safetensors").unlink()


def cut_a_file_short(path: Path) -> None:
    file = path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def say(where: Any) -> Any:
    def change(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        write_index(path, {**index["weight_map"], **where})

    return change


def forget(path: Path) -> None:
    where = json.loads((path / INDEX).read_text())["weight_map"]
    del where["seen"]
    write_index(path, where)


def only_pickles(path: Path) -> None:
    for each in path.iterdir():
        each.unlink()
    (path / "pytorch_model.bin").touch()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lose_a_file, [r"a\.safetensors cannot be used.*No such file"]),
        (cut_a_file_short, [r"b\.safetensors cannot be used.*29 bytes, but 28 follow"]),
        (say({"ghost": "a.safetensors"}), ["ghost is not in a.safetensors"]),
        (
            say({"seen": "a.safetensors"}),
            ["seen is not in a.safetensors", "in b.safetensors, but the index says a.safetensors"],
        ),
        (say({"up": "../a.safetensors"}), [r"'\.\./a\.safetensors' is not the name of a file in"]),
        (
            say({"up": "..", "here": ".", "none": "", "odd": "a\0"}),
            [
                rf"{name} is not the name of a file"
                for name in (r"'\.\.'", r"'\.'", "''", r"'a\\x00'")
            ],
        ),
        (say({"root": "/etc/passwd"}), ["'/etc/passwd' is not the name of a file"]),
        (say({"number": 3}), ['must have a "weight_map"']),
        (lambda path: write_index(path, [1]), ['must have a "weight_map"']),
        (lambda path: (path / INDEX).write_text("{"), ["index.json cannot be read"]),
        (forget, ["seen is in b.safetensors, but not in the index"]),
        (only_pickles, [r"pickles, which are not read here: pytorch_model\.bin.*save_pretrained"]),
        (lambda path: path.rename(path.parent / "gone"), ["has neither. Give the folder"]),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(
    break_it: Any, said: list[str], tmp_path: Path
) -> None:
    path = two_files(tmp_path / "model")
    break_it(path)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceFolder(path)
    for text in said:
        caught.match(text)


# --- writing ---------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> TorchFile:
    """Weights of a model, one of them tied, and an optimizer that is not written."""
    model = weights()
    content = {
        "model": {**model, "head": model["embed"]},
        "optimizer": {"state": {}, "param_groups": [{"params": ["embed"]}]},
    }
    torch.save(content, tmp_path / "source.pt")
    return TorchFile(tmp_path / "source.pt")


def folder_entries(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_small_model_is_one_file(source: TorchFile, tmp_path: Path) -> None:
    write_huggingface(source, tmp_path / "model")
    assert folder_entries(tmp_path / "model") == [ONE]
    assert_equal(load_file(tmp_path / "model" / ONE), weights())
    with safe_open(tmp_path / "model" / ONE, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert_equal(read_all(HuggingFaceFolder(tmp_path / "model")), weights())
    assert folder_entries(tmp_path) == ["model", "source.pt"]


@pytest.mark.parametrize(
    ("most", "files"),
    [
        (77, [["embed", "inner", "scale", "seen"]]),
        (76, [["embed", "inner", "scale"], ["seen"]]),
        (68, [["embed", "inner"], ["scale", "seen"]]),
        (43, [["embed"], ["inner", "scale", "seen"]]),
        (28, [["embed"], ["inner", "scale"], ["seen"]]),
        (1, [["embed"], ["inner"], ["scale"], ["seen"]]),
    ],
)
def test_a_larger_model_is_several_files_and_an_index(
    most: int, files: list[list[str]], source: TorchFile, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    write_huggingface(source, path, max_file_bytes=most)
    found = HuggingFaceFolder(path)
    assert_equal(read_all(found), weights())
    if len(files) == 1:
        assert folder_entries(path) == [ONE]
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert folder_entries(path) == [*names, INDEX]
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 77
    assert index["weight_map"] == {
        weight: name for name, inside in zip(names, files, strict=True) for weight in inside
    }


def test_floating_point_numbers_are_cast_and_weights_renamed(
    source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "CAST_BYTES", 8)
    write_huggingface(
        source,
        tmp_path / "model",
        dtype=torch.float16,
        rename=lambda name: None if name == "scale" else name.upper(),
    )
    expected = weights()
    assert_equal(
        load_file(tmp_path / "model" / ONE),
        {
            "EMBED": expected["embed"].half(),
            "INNER": expected["inner"].half(),
            "SEEN": expected["seen"],
        },
    )


class Config:
    """What transformers' configurations and tokenizers have in common."""

    def __init__(self, name: str, **content: Any) -> None:
        self.name = name
        self.content = content

    def save_pretrained(self, folder: Path) -> None:
        (folder / self.name).write_text(json.dumps(self.content))


def test_what_belongs_to_a_model_is_copied_and_names_its_dtype(
    source: TorchFile, tmp_path: Path
) -> None:
    origin = folder_of({"model-00001-of-00001.safetensors": weights()}, tmp_path / "origin")
    Config("config.json", dtype="float64", torch_dtype="float64", layers=2).save_pretrained(origin)
    for name in ("tokenizer.json", "vocab.txt", "training_args.bin", "pytorch_model.bin"):
        (origin / name).write_text(name)
    (origin / "below").mkdir()

    write_huggingface(source, tmp_path / "copied", config_from=origin)
    assert folder_entries(tmp_path / "copied") == [
        "config.json",
        ONE,
        "tokenizer.json",
        "vocab.txt",
    ]
    config = json.loads((tmp_path / "copied" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "torch_dtype": "bfloat16", "layers": 2}

    given = [origin, Config("config.json", dtype=None), Config("generation_config.json")]
    write_huggingface(source, tmp_path / "given", config_from=given, dtype=torch.float32)
    assert "generation_config.json" in folder_entries(tmp_path / "given")
    assert json.loads((tmp_path / "given" / "config.json").read_text()) == {"dtype": None}

    for wrong in (tmp_path / "nobody", 3, [nn.Linear(2, 2)]):
        with pytest.raises(
            ConfigurationError, match="must be a folder, an object with save_pretrained"
        ):
            write_huggingface(source, tmp_path / "wrong", config_from=wrong)
    assert not (tmp_path / "wrong").exists()


def test_a_folder_must_be_empty_or_is_overwritten_and_keeps_all_but_weights(
    source: TorchFile, tmp_path: Path
) -> None:
    path = two_files(tmp_path / "model")
    old = folder_entries(path)
    with pytest.raises(CheckpointError, match="must be new or empty"):
        write_huggingface(source, path)
    assert folder_entries(path) == old and folder_entries(tmp_path) == ["model", "source.pt"]

    (path / "a.safetensors").rename(path / "model-00001-of-00002.safetensors")
    (path / "b.safetensors").rename(path / "model-00002-of-00002.safetensors")
    Config("config.json", dtype="float16").save_pretrained(path)
    (path / "notes").mkdir()
    (path / "notes" / "one.bin").write_text("kept")
    (path / "adapter.safetensors").write_text("kept")
    with (path / "config.json").open() as reader:
        write_huggingface(source, path, overwrite=True)
        assert json.loads(reader.read()) == {"dtype": "float16"}
    assert folder_entries(path) == ["adapter.safetensors", "config.json", ONE, "notes"]
    assert (path / "notes" / "one.bin").read_text() == "kept"
    assert json.loads((path / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert_equal(load_file(path / ONE), weights())
    assert folder_entries(tmp_path) == ["model", "source.pt"]

    (tmp_path / "empty").mkdir()
    write_huggingface(source, tmp_path / "empty")
    assert folder_entries(tmp_path / "empty") == [ONE]
    with pytest.raises(CheckpointError, match="is a file"):
        write_huggingface(source, tmp_path / "source.pt", overwrite=True)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_reader_sees_the_old_folder_or_the_new_one(
    exchanges: bool, source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none, for a moment, where the file system cannot exchange two names."""
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    seen: list[list[str] | None] = []

    def look() -> None:
        seen.append(list(load_file(path / ONE)) if path.exists() else None)

    read, rename = source.read, Path.rename

    def reading(*args: Any) -> None:
        look()
        read(*args)

    def renaming(self: Path, target: Path) -> Path:
        look()
        return rename(self, target)

    monkeypatch.setattr(source, "read", reading)
    exchange = replacement._exchange

    def exchanging(one: Path, other: Path) -> bool:
        look()
        return exchanges and exchange(one, other)

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(replacement, "_exchange", exchanging)
    write_huggingface(source, path, overwrite=True)
    look()
    new = list(load_file(path / ONE))
    assert seen == [["old"]] * 6 + ([new] if exchanges else [["old"], ["old"], None, new])
    assert "old" not in new


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_folder_as_it_was(
    call: str, source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    rename = Path.rename
    monkeypatch.setattr(replacement, "_exchange", lambda *_: False)  # by two renames

    def full(*args: Any) -> None:
        raise OSError(28, "no space left")

    def only_old(self: Path, target: Path) -> Path:
        if self.name == "new":
            full()
        return rename(self, target)

    with monkeypatch.context() as patched:
        if call == "fsync":
            patched.setattr(os, "fsync", full)
        else:
            patched.setattr(Path, "rename", only_old)
        with pytest.raises(CheckpointError, match="no space left"):
            write_huggingface(source, path, overwrite=True)
    assert_equal(load_file(path / ONE), {"old": torch.ones(2)})
    assert folder_entries(tmp_path) == ["model", "source.pt"]


def test_something_that_came_into_the_folder_meanwhile_is_not_lost(
    source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    read = source.read

    def reading(*args: Any) -> None:
        path.mkdir(exist_ok=True)
        (path / ONE).write_text("of another process")
        read(*args)

    monkeypatch.setattr(source, "read", reading)
    with pytest.raises(CheckpointError, match="not empty"):
        write_huggingface(source, path)
    assert (path / ONE).read_text() == "of another process"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("exchanges", [True, False])
def test_what_others_write_while_weights_are_replaced_stays(
    links: bool,
    exchanges: bool,
    source: TorchFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    (path / "logs").mkdir()
    for name in ("notes", "logs/1", "gone", "state"):
        (path / name).write_text("first")
    (path / "link").symlink_to("nowhere")
    log = (path / "logs" / "1").open("a")
    exchange = replacement._exchange

    def exchanging(one: Path, other: Path) -> bool:
        """Another process writes between the linking of files and the exchange, and goes on in the folder it knows."""
        log.write("+ second")
        log.flush()
        (path / "notes.tmp").write_text("second")
        (path / "notes.tmp").rename(path / "notes")
        (path / "state").write_text("second")
        (path / "logs" / "2").write_text("new")
        (path / "more" / "below").mkdir(parents=True)
        (path / "more" / "below" / "file").write_text("new")
        monkeypatch.chdir(path)
        done = exchanges and exchange(one, other)
        if done:
            Path("late").write_text("new")
            (path / "gone").unlink()
        return done

    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(replacement, "_exchange", exchanging)
    write_huggingface(source, path, overwrite=True)
    monkeypatch.chdir(tmp_path)
    log.close()
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    assert_equal(load_file(found.pop(ONE)), weights())
    assert {name: file.read_text() for name, file in found.items()} == {
        "notes": "second",
        "state": "second",
        "logs/1": "first+ second",
        "logs/2": "new",
        "more/below/file": "new",
        **({"late": "new"} if exchanges else {"gone": "first"}),
    }
    assert (path / "link").is_symlink()
    assert folder_entries(tmp_path) == ["model", "source.pt"]


def killed_at(fault: Nth, folder: Path, write: Callable[[], None]) -> bool:
    """Write in a process that is killed where ``fault`` says; return whether it was."""

    def kill(call: str, path: Path) -> bool:
        if fault(call, path):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    process = os.fork()
    if process == 0:
        try:
            with FailingFiles(folder, kill):
                write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["fails", "kills"])
@pytest.mark.filterwarnings("ignore:.*is complete, but files", "ignore:.*fork:DeprecationWarning")
def test_whichever_call_fails_or_kills_the_folder_is_the_old_or_the_new_one(
    how: str, source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder_of({ONE: {"old": torch.ones(2)}}, folder / "model")
        (path / "notes").write_text("kept")
        fault, was_written = Nth(number), True
        write = partial(write_huggingface, source, path, overwrite=True)
        if how == "kills":
            was_written = went_through = not killed_at(fault, folder, write)
        else:
            with FailingFiles(folder, fault):
                try:
                    write()
                except CheckpointError:
                    was_written = False
            went_through = fault.site is None
        found = load_file(path / ONE)
        assert "old" not in found or not was_written, (number, fault.site)
        assert_equal(found, {"old": torch.ones(2)} if "old" in found else weights())
        assert (path / "notes").read_text() == "kept", (number, fault.site)
        write_huggingface(source, path, overwrite=True)
        assert folder_entries(path) == [ONE, "notes"]
        shutil.rmtree(folder)
        if went_through:
            break
    assert number > 20


def test_what_cannot_be_moved_out_of_the_old_folder_is_left_and_said(
    source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    exchange = replacement._exchange

    def exchanging(one: Path, other: Path) -> bool:
        (path / "theirs").write_text("new")
        return exchange(one, other)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(replacement, "_exchange", exchanging)
    monkeypatch.setattr(replacement, "_remove_or_move", refuse)
    with pytest.warns(
        UserWarning, match=r"model is complete, but files .* left in .*/old: .*Input"
    ):
        write_huggingface(source, path, overwrite=True)
    assert_equal(load_file(path / ONE), weights())
    (left,) = tmp_path.glob(".model.*.tmp/old/theirs")
    assert left.read_text() == "new"


def test_a_mounted_file_system_is_refused_before_any_work(
    source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "read", lambda *_: pytest.fail("the work has begun"))
    with pytest.raises(
        CheckpointError, match=r"/proc is replaced .* at these points one is: /proc"
    ):
        write_huggingface(source, "/proc", overwrite=True)
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    for below in (path, path / "volume"):
        monkeypatch.setattr(replacement, "_mount_points", lambda point=below: [point])
        with pytest.raises(CheckpointError, match="no file system may be mounted there or below"):
            write_huggingface(source, path, overwrite=True)
    assert folder_entries(path) == [ONE] and folder_entries(tmp_path) == ["model", "source.pt"]


def test_damage_and_wrong_options_are_said_before_anything_is_written(
    source: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    with pytest.raises(ConfigurationError, match="max_file_bytes must be positive, got 0"):
        write_huggingface(source, path, max_file_bytes=0)
    with pytest.raises(ConfigurationError, match=r"dtype must be .* got torch\.int8"):
        write_huggingface(source, path, dtype=torch.int8)
    with pytest.raises(ConfigurationError, match="embed and inner become x"):
        write_huggingface(source, path, rename=lambda name: "x")
    with pytest.raises(CheckpointError, match="folder must have weights"):
        write_huggingface(source, path, rename=lambda name: None)
    monkeypatch.setattr(source, "verify", lambda wanted: [f"{key} flipped" for key, _ in wanted])
    with pytest.raises(CheckpointError, match=r"is damaged:\n  model/embed flipped\n  model/inner"):
        write_huggingface(source, path)
    assert folder_entries(tmp_path) == ["source.pt"]


# --- ranks -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Uneven for two to four ranks; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.arange(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x))) * self.scale


def by_hand(net: Net) -> nn.Module:
    fully_shard(net.inner)
    return fully_shard(net)


def by_wrapper(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def by_flat_parameter(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


def unsharded(net: nn.Module) -> nn.Module:
    return net


APIS = [by_hand, by_wrapper, by_flat_parameter, unsharded]


def filled() -> dict[str, Tensor]:
    """A state dict in another dtype, every element different."""
    state = Net().state_dict()
    values = {
        name: torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + 100 * index
        for index, (name, tensor) in enumerate(state.items())
    }
    values["head.weight"] = values["embed.weight"]
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in values.items()}


def load_and_save(source: Path, folder: Path) -> None:
    for api in APIS:
        net = api(Net())
        load_huggingface(source, net)
        save_huggingface(folder / api.__name__, net, max_file_bytes=70)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_api_loads_and_saves_on_any_number_of_ranks(
    size: int, world: Any, tmp_path: Path
) -> None:
    expected = filled()
    stored = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    save_file(stored, folder_of({}, tmp_path / "origin") / ONE)
    world(size).run(load_and_save, tmp_path / "origin", tmp_path)
    for api in APIS:
        found = read_all(HuggingFaceFolder(tmp_path / api.__name__))
        assert found.keys() == stored.keys()
        for name, tensor in found.items():
            assert_equal(tensor, stored[name].to(Net().state_dict()[name].dtype))


@pytest.mark.parametrize("stored", [["head.weight"], ["embed.weight", "head.weight"]])
def test_a_tied_weight_may_have_any_of_its_names(stored: list[str], tmp_path: Path) -> None:
    expected = filled()
    others = {k: v for k, v in expected.items() if k not in ("head.weight", "embed.weight")}
    mine = {name: expected["embed.weight"].clone() for name in stored}
    save_file({**others, **mine}, folder_of({}, tmp_path / "origin") / ONE)
    load_huggingface(tmp_path / "origin", net := Net())
    assert_equal(
        net.state_dict(), {k: v.to(net.state_dict()[k].dtype) for k, v in expected.items()}
    )


@pytest.mark.parametrize("change", ["last", "shape", "dtype"])
def test_two_weights_for_one_must_be_the_same(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "CAST_BYTES", 16)
    content = {name: tensor.clone() for name, tensor in filled().items()}
    other = content["head.weight"]
    other[-1, -1] += 1 if change == "last" else 0
    content["head.weight"] = {"last": other, "shape": other[:-1].clone(), "dtype": other.float()}[
        change
    ]
    save_file(content, folder_of({}, tmp_path / "origin") / ONE)
    before = (net := Net()).inner.weight.clone()
    with pytest.raises(CheckpointError, match=r"these are not: head\.weight and embed\.weight"):
        load_huggingface(tmp_path / "origin", net)
    assert_equal(net.inner.weight, before)


def try_to_load(folder: Path, rank_that_sees_nothing: int | None = None, **options: Any) -> Any:
    net = by_hand(Net())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if dist.get_rank() == rank_that_sees_nothing:
        folder = folder / "nothing"
    with pytest.raises(CheckpointError) as caught:
        load_huggingface(folder, net, **options)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    return str(caught.value)


def test_what_does_not_fit_is_said_alike_on_all_ranks_and_nothing_is_loaded(
    world: Any, tmp_path: Path
) -> None:
    content = filled()
    del content["head.weight"], content["scale"]
    content["inner.weight"] = torch.ones(5, 4)
    content["more"] = torch.ones(2)
    origin = folder_of({}, tmp_path / "origin") / ONE
    save_file(content, origin)
    (one, other) = world(2).run(try_to_load, tmp_path / "origin")
    assert one == other
    for name in ("scale", "inner.weight", "more"):
        assert name in one
    (one, other) = world(2).run(try_to_load, tmp_path / "origin", cast=False)
    assert "bfloat16" in one
    for dtype in (torch.int8, torch.complex64):
        save_file(filled() | {"inner.weight": filled()["inner.weight"].to(dtype)}, origin)
        (one, other) = world(2).run(try_to_load, tmp_path / "origin")
        assert one == other and f"inner.weight: {dtype} to torch.float32" in one
    (one, other) = world(2).run(try_to_load, tmp_path / "origin", 1)
    assert one == other
    assert "rank 1: A Hugging Face folder must have" in one


def fail_on_the_last_rank(folder: Path) -> str:
    def full(*args: Any) -> None:
        raise OSError(28, "no space left")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(huggingface, "write_file", full)
        with pytest.raises(CheckpointError) as caught:
            save_huggingface(folder, by_hand(Net()), max_file_bytes=70, overwrite=True)
    return str(caught.value)


def test_what_one_rank_cannot_write_none_does(world: Any, tmp_path: Path) -> None:
    path = folder_of({ONE: {"old": torch.ones(2)}}, tmp_path / "model")
    errors = world(2).run(fail_on_the_last_rank, path)
    assert errors == ["rank 1: OSError: [Errno 28] no space left"] * 2
    assert_equal(load_file(path / ONE), {"old": torch.ones(2)})
    assert folder_entries(tmp_path) == ["model"]


def peak_growth(call: Callable[[], Any]) -> int:
    """Bytes by which the memory of this process, with all that the kernel counts as its own, grows at most."""
    ctypes.CDLL(None).malloc_trim(0)  # so that freed memory is not used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


MiB = 1 << 20


def growths(folder: Path) -> list[float]:
    net = nn.Sequential(*(nn.Linear(1024, 4096, bias=False) for _ in range(6)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    new, half = folder / "new", folder / "half"
    return [
        peak_growth(lambda: load_huggingface(folder / "origin", net)) / MiB,
        peak_growth(lambda: save_huggingface(new, net, max_file_bytes=32 * MiB)) / MiB,
        peak_growth(lambda: save_huggingface(half, net, dtype=torch.bfloat16)) / MiB,
    ]


def test_a_rank_needs_memory_for_one_tensor_beside_its_shard(world: Any, tmp_path: Path) -> None:
    """Of 16 MiB, the model having 96 and the rank 24; in the folder, half of that."""
    content = {f"{i}.weight": torch.ones(4096, 1024, dtype=torch.bfloat16) for i in range(6)}
    folder_of({ONE: content}, tmp_path / "origin")
    for load, save, save_half in world(4).run(growths, tmp_path):
        assert load < 8
        assert save < 16 + 8
        assert save_half < 8 + 8
