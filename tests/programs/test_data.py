"""What a run learns from: which files, which tokens, which windows."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.data import Data, open_data
from fullshard.programs.train.held_out_split import num_windows, training_lengths
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.windows import Windows, tokens_in


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def opened(path: Path | None, *, vocabulary: int | None = None, **section: Any) -> Data:
    section = {"context": 9, **section}
    config = RunConfig(
        data=DataSection(path=path, **section), model=ModelSection(vocabulary=vocabulary)
    )
    return open_data(config, open_model(config))


def all_rows(windows: Windows) -> list[list[int]]:
    return windows.rows(range(len(windows))).tolist()


# --- text ------------------------------------------------------------------------------------------------


def test_the_standard_library_gives_the_same_windows_each_time() -> None:
    first, second = opened(None, context=128), opened(None, context=128)
    assert sysconfig.get_path("stdlib") in first.source
    assert re.fullmatch(r"[0-9.]+ MiB of [0-9.]+ MiB of text \(data.max_bytes\)", first.left_out)
    assert 100_000 < first.training.tokens + first.held_out.tokens <= 8_000_000
    assert len(first.held_out) == pytest.approx(len(first.training) * 0.05 / 0.95, rel=0.01)
    assert torch.equal(first.training.rows([7, 1000]), second.training.rows([7, 1000]))


def test_windows_overlap_by_one_token_and_what_is_left_is_not_used(tmp_path: Path) -> None:
    text = bytes(range(1, 101)) + b"h" * 12
    data = opened(write(tmp_path / "text", text), held_out=0.1)
    assert len(data.training) == 11
    assert all_rows(data.training)[0] == list(range(1, 11))
    assert all_rows(data.training)[1] == list(range(10, 20))
    assert all_rows(data.training)[-1] == list(range(91, 101))
    assert all_rows(data.held_out) == [list(b"h" * 10)]
    assert data.training.rows([3]).dtype == torch.int64


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"2" * 10)
    write(tmp_path / "a" / "z.txt", b"1" * 10)
    write(tmp_path / "c.txt", b"3" * 11)
    assert all_rows(opened(tmp_path).training) == [list(b"1" * 10), list(b"1" + b"2" * 9)]


def test_all_text_in_a_folder_is_read_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    write(tmp_path / "kept.txt", b"k" * 40)
    for name in ("test", "tests", "site-packages", "__pycache__"):
        write(tmp_path / name / "kept.txt", name[0].encode() * 40)
    data = opened(tmp_path)
    assert data.left_out == ""
    rows = all_rows(data.training) + all_rows(data.held_out)
    assert {token for row in rows for token in row} == {*b"kts_"}

    write(tmp_path / ".git" / "skipped.txt", b"x" * 40)
    write(tmp_path / "lost+found" / "skipped.txt", b"x" * 40)
    for name in "abcde":
        write(tmp_path / "tests" / f"{name}.png", b"\0" * 40)
    data = opened(tmp_path, max_bytes=190)
    by_name = "to read one, name it with data.path"
    assert data.left_out == (
        f"hidden, or a link to a folder: .git, lost+found ({by_name}); "
        f'binary: tests/a.png, tests/b.png, tests/c.png and 2 more ({by_name}, and set data.kind = "text"); '
        "10 B of 200 B of text (data.max_bytes)"
    )
    assert all(ord("x") not in row for row in all_rows(data.training))


def test_a_text_is_read_to_its_end_and_a_limit_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"t" * 12_000_000)
    data = opened(path, context=1000)
    assert data.left_out == ""
    assert data.training.tokens + data.held_out.tokens > 11_990_000
    limited = opened(path, context=1000, max_bytes=8_000_000)
    assert limited.left_out == "3.81 MiB of 11.4 MiB of text (data.max_bytes)"


def test_an_opening_is_the_first_held_out_text_in_whole_characters(tmp_path: Path) -> None:
    text = "a" * 80 + "über Bäume und Wälder"
    data = opened(write(tmp_path / "text", text.encode()), context=20, held_out=0.24)
    assert data.tokenizer.decode(data.opening()) == "über Bäum"
    assert data.tokenizer.decode(opened(tmp_path / "text", held_out=0.24).opening()) == "über"


def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "text", b"t" * 28)
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    data = opened(tmp_path)
    assert (len(data.training), len(data.held_out)) == (1, 1)


def test_no_more_text_than_asked_for_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a", b"a" * 15)
    write(tmp_path / "b", b"b" * 1000)
    assert len(opened(tmp_path, max_bytes=28).training) == 1
    with pytest.raises(ConfigurationError, match="has 19 tokens"):
        opened(tmp_path, max_bytes=19)


def test_text_that_the_model_does_not_know_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"a" * 50 + b"z" + b"a" * 50)
    with pytest.raises(ConfigurationError, match=r"vocabulary of 100.* number 50 of .*text is 122"):
        opened(path, vocabulary=100)


# --- arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
)
def test_npy_arrays_of_any_integers_are_mapped(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=dtype))
    data = opened(tmp_path / "tokens.npy", vocabulary=100)
    assert all_rows(data.training)[2] == list(range(18, 28))


def test_bin_files_are_numbers_of_the_dtype_that_was_said(tmp_path: Path) -> None:
    for dtype in ("uint16", "int32"):
        np.arange(1000, 1100).astype(dtype).tofile(tmp_path / "tokens.bin")
        data = opened(tmp_path / "tokens.bin", vocabulary=1100, dtype=dtype)
        assert all_rows(data.training)[2] == list(range(1018, 1028))


def test_no_window_crosses_from_one_file_into_the_next(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.full(25, 2, dtype="uint16"))
    np.full(14, 1, dtype="uint16").tofile(tmp_path / "a.bin")
    np.full(5, 7, dtype="uint16").tofile(tmp_path / "c.bin")
    write(tmp_path / "notes.txt", b"beside arrays, text is not meant" * 10)
    data = opened(tmp_path, vocabulary=8)
    assert data.left_out == 'no arrays: notes.txt (data.kind = "text" reads them)'
    assert all_rows(data.training) == [[1] * 10, [2] * 10]
    assert all_rows(data.held_out) == [[2] * 10]


def test_a_token_beyond_the_vocabulary_is_named_with_its_file(tmp_path: Path) -> None:
    tokens = np.zeros(200, dtype="int32")
    tokens[150] = -3
    np.save(tmp_path / "tokens.npy", tokens)
    data = opened(tmp_path / "tokens.npy", vocabulary=8)
    data.training.rows([0, 1])
    with pytest.raises(ConfigurationError, match=r"number 150 of .*tokens\.npy is -3.*begin a run"):
        data.training.rows([0, 16])
    tokens[150], tokens[195] = 8, 9
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ConfigurationError, match=r"number 150 of .*tokens\.npy is 8\."):
        opened(tmp_path / "tokens.npy", vocabulary=8).training.rows([16])
    with pytest.raises(ConfigurationError, match=r"number 195 of .*tokens\.npy is 9\."):
        opened(tmp_path / "tokens.npy", vocabulary=8).held_out.rows([0])


def test_a_mapped_file_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """A sparse file of 8 GB: nobody could read it in the time of this test."""
    with (tmp_path / "tokens.bin").open("wb") as stream:
        stream.truncate(8 << 30)
        stream.seek((4 << 30) - 2)
        stream.write(b"\5\0")
    data = opened(tmp_path / "tokens.bin", vocabulary=8)
    number = ((2 << 30) - 1) // 9
    assert 5 in data.training.rows([number])[0]


def test_a_file_that_is_cut_short_while_it_is_used_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(20_000) % 7)
    data = opened(path, vocabulary=8)
    last = len(data.training) - 1
    before = data.training.rows([0, last])
    os.truncate(path, 4096)
    assert torch.equal(data.training.rows([0]), before[:1])
    for windows in (data.training, data.held_out):
        with pytest.raises(ConfigurationError, match=r"tokens\.npy had 20000 tokens, and now ends"):
            windows.rows([len(windows) - 1])
    # A new file of the same name is another one: the run keeps the old.
    np.save(path, np.arange(20_000) % 7)
    data = opened(path, vocabulary=8)
    np.save(tmp_path / "new.npy", np.arange(20_000) % 5)
    (tmp_path / "new.npy").rename(path)
    assert torch.equal(data.training.rows([0, last]), before)


def test_one_file_that_is_no_text_is_refused_unless_it_is_said_to_be_read_as_it_is(
    tmp_path: Path,
) -> None:
    text = b"words and words " * 30
    arrow = b"ARROW1\0\0" + text
    refused = {
        "a.gz": (gzip.compress(text), "gzip"),
        "a.bz2": (bz2.compress(text), "bzip2"),
        "a.xz": (lzma.compress(text), "xz"),
        "a.npz": (b"PK\x03\x04" + text, r"zip, as \.npz is"),
        "a.pq": (b"PAR1" + text + b"PAR1", "Parquet"),
        "a.arrow": (arrow, "Arrow"),
        "tokens": (b"\x93NUMPY\1\0" + text, "an array of numpy"),
        "utf16.txt": (text.decode().encode("utf-16"), "zero bytes"),
    }
    for name, (content, kind) in refused.items():
        path = write(tmp_path / name, content)
        with pytest.raises(ConfigurationError, match=f"{name} is neither .*{kind}"):
            opened(path)
        data = opened(path, kind="text")
        assert data.training.rows([0])[0].tolist() == list(content[:10])
    with pytest.raises(ConfigurationError, match="is empty, or not text"):
        opened(tmp_path)
    for name in ("b.txt", "b.json", "b.gz", "PKGBUILD"):
        assert opened(write(tmp_path / name, b"P" + text)).left_out == ""


def saved(path: Path, array: Any) -> bytes:
    np.save(path, array)
    return path.read_bytes()


def test_what_is_no_array_of_tokens_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.npy", np.arange(100))
    breaches = {
        b"": "does not begin like one",
        b"text, and long enough": "does not begin like one",
        whole[:20]: "ends within its header",
        whole[:-5]: "last 5 bytes are missing",
        whole.replace(b"'descr'", b"'dtype'"): "does not say shape and dtype",
        whole.replace(b"{'descr'", b"{'descr ("): "header cannot be read",
        saved(tmp_path / "x.npy", np.zeros((2, 50), dtype="int64")): r"shape \(2, 50\)",
        saved(tmp_path / "x.npy", np.zeros(100)): "<f8",
        saved(tmp_path / "x.npy", np.zeros(100, dtype=">i4")): ">i4",
        saved(tmp_path / "x.npy", np.zeros(100, dtype=[("a", "<i4")])): "one dimension",
    }
    for content, message in breaches.items():
        with pytest.raises(
            ConfigurationError, match=f"(?s)broken.npy.*{message}|{message}.*broken.npy"
        ):
            opened(write(tmp_path / "broken.npy", content), vocabulary=100)
    with pytest.raises(ConfigurationError, match=r"^An array of tokens must have one dimension"):
        opened(tmp_path / "x.npy", vocabulary=100)
    with pytest.raises(ConfigurationError, match=r"odd\.bin must be tokens of 2 bytes.*101 bytes"):
        opened(write(tmp_path / "odd.bin", b"x" * 101), vocabulary=100)


# --- nothing, or too little ------------------------------------------------------------------------------


def test_what_is_not_there_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"there is none at .*nowhere"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigurationError, match=r"no text files in the folder .*empty.*data\.path"
    ):
        opened(tmp_path / "empty")
    with pytest.raises(ConfigurationError, match=r"no \.npy or \.bin files"):
        opened(tmp_path / "empty", kind="array")
    with pytest.raises(ConfigurationError, match=r"is empty, or not text.*data\.path"):
        opened(write(tmp_path / "text", b""))
    with pytest.raises(ConfigurationError, match=r"\.npy or \.bin files, but data\.path is .*text"):
        opened(tmp_path / "text", kind="array")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(ConfigurationError, match=r"python\.zip.*data\.path"):
        opened(None)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"context \+ 1 = 10 tokens .* has 19 tokens in one"
    ):
        opened(write(tmp_path / "text", b"t" * 19))
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.zeros(9, dtype="uint16"))
    with pytest.raises(ConfigurationError, match="27 tokens in 3 files, the longest of 9"):
        opened(tmp_path, vocabulary=8)


def test_arrays_do_not_say_how_many_tokens_there_are(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(100, dtype="uint16"))
    with pytest.raises(ConfigurationError, match=r"set model\.vocabulary, or data\.tokenizer"):
        opened(tmp_path / "tokens.npy")
    assert opened(tmp_path / "tokens.npy", vocabulary=8).tokenizer.decode([3, 5]) == "3 5"


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    context=st.integers(1, 12),
    held_out=st.floats(0.01, 0.99),
)
def test_both_parts_have_a_window_or_the_data_is_refused(
    lengths: list[int], context: int, held_out: float
) -> None:
    """What is found is the latest cut that leaves a window on either side and holds out enough."""

    def parts(cut: int) -> list[int]:
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        return [
            min(max(cut - start, 0), length) for start, length in zip(starts, lengths, strict=True)
        ]

    def has_windows(training: list[int]) -> bool:
        rest = [length - part for length, part in zip(lengths, training, strict=True)]
        return all(any(num_windows(each, context) for each in side) for side in (training, rest))

    total = sum(lengths)
    cuts = [cut for cut in range(total - int(total * held_out) + 1) if has_windows(parts(cut))]
    section = DataSection(context=context, held_out=held_out)
    if cuts:
        assert training_lengths(lengths, section, "a test") == parts(max(cuts))
    else:
        with pytest.raises(ConfigurationError):
            training_lengths(lengths, section, "a test")


def test_rows_are_the_same_whatever_asks_for_them() -> None:
    windows = Windows(
        [tokens_in("one", torch.arange(20)), tokens_in("two", torch.arange(50, 75))],
        context=4,
        vocabulary=100,
    )
    assert len(windows) == 4 + 6
    assert windows.tokens == 40
    assert windows.rows([3, 4]).tolist() == [[12, 13, 14, 15, 16], [50, 51, 52, 53, 54]]
    assert windows.rows([9]).tolist() == [[70, 71, 72, 73, 74]]
