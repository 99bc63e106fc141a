"""Which bytes a run learns from."""

import sysconfig
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.train.text import MAX_BYTES, read_text


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_the_standard_library_gives_the_same_text_each_time() -> None:
    first, second = read_text(None, context=128), read_text(None, context=128)
    assert first == second
    assert 100_000 < len(first.training) + len(first.held_out) <= MAX_BYTES
    assert sysconfig.get_path("stdlib") in first.source


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"2" * 40)
    write(tmp_path / "a" / "z.txt", b"1" * 40)
    write(tmp_path / "c.txt", b"3" * 40)
    text = read_text(tmp_path, context=9)
    assert text.training + text.held_out == b"1" * 40 + b"2" * 40 + b"3" * 40


def test_the_end_of_the_text_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "text", b"t" * 1900 + b"h" * 100)
    text = read_text(tmp_path / "text", context=9)
    assert (text.training, text.held_out) == (b"t" * 1900, b"h" * 100)


def test_a_short_text_holds_out_one_window(tmp_path: Path) -> None:
    write(tmp_path / "text", b"t" * 30 + b"h" * 10)
    assert read_text(tmp_path / "text", context=9).held_out == b"h" * 10


def test_tests_hidden_files_and_binaries_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "kept.txt", b"k" * 40)
    write(tmp_path / "test" / "skipped.txt", b"s" * 40)
    write(tmp_path / "site-packages" / "skipped.txt", b"s" * 40)
    write(tmp_path / ".git" / "skipped.txt", b"s" * 40)
    write(tmp_path / "binary", b"\0" * 40)
    text = read_text(tmp_path, context=9)
    assert text.training + text.held_out == b"k" * 40


def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "text", b"t" * 40)
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    text = read_text(tmp_path, context=9)
    assert len(text.training) + len(text.held_out) == 40


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is none at .*nowhere"):
        read_text(tmp_path / "nowhere", context=9)


def test_no_text_names_the_place_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        read_text(None, context=9)
    assert str(tmp_path) in str(caught.value)
    assert "--text PATH" in str(caught.value)


def test_a_missing_standard_library_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(ConfigurationError, match=r"python\.zip.*--text PATH"):
        read_text(None, context=9)


def test_a_text_shorter_than_two_windows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "text", b"t" * 19)
    with pytest.raises(ConfigurationError, match=r"2 \* \(context 9 \+ 1\) = 20 bytes.* has 19"):
        read_text(tmp_path / "text", context=9)
