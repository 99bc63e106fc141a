"""Tokenizers: bytes, one of Hugging Face, or numbers if none is known.

Which one a run has follows from its configuration:

    data.tokenizer given               that one
    a model's folder that has one      that one
    arrays                             none is known: tokens are written as numbers
    text                               bytes

Nothing is downloaded: tokenizers are local files. This file imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.data_files import data_files

TOKENIZER_FILE = "tokenizer.json"

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "spiece.model",
    "sentencepiece*.model",
)
"""Names of a tokenizer's files in a model's folder."""


class Tokenizer(Protocol):
    """A converter of text into tokens and back."""

    vocabulary: int | None
    """All tokens are below it; None if that is not known."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without marks of its beginning or end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens; what is not text is replaced."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the files from which transformers makes this tokenizer."""


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        ConfigurationError: it is missing, or cannot be read.
    """
    path = tokenizer_path(config)
    if path is not None:
        return HuggingFaceTokenizer(path)
    return Bytes() if _is_text(config) else Numbers()


def _is_text(config: RunConfig) -> bool:
    """Say whether the data are text or records, also when they have gone, as long as the configuration tells."""
    kind, has_vocabulary = config.data.kind, config.model.vocabulary is not None
    try:
        return data_files(config.data).kind != "array"
    except ConfigurationError:
        # Arrays without a tokenizer need model.vocabulary.
        if kind in ("text", "records") or (kind == "auto" and not has_vocabulary):
            return True
        if kind == "array" and has_vocabulary:
            return False
        raise


def tokenizer_path(config: RunConfig) -> Path | None:
    """Return the file or folder of a run's Hugging Face tokenizer, if it has one."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer
    folder = config.model.huggingface
    if folder is None or not folder.is_dir():
        return None
    return folder if any(_is_one_of(file, TOKENIZER_FILES) for file in folder.iterdir()) else None


class Bytes:
    """Every byte is a token."""

    vocabulary: int | None = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text in UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; a model may generate invalid UTF-8, or tokens that are not bytes."""
        known = [token if token < 256 else ord("?") for token in tokens]
        return bytes(known).decode(errors="replace")

    def save_pretrained(self, folder: Path) -> None:
        """Write a byte-level tokenizer that merges nothing."""
        characters = {character: byte for byte, character in enumerate(_byte_characters())}
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        content = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": characters, "merges": []},
        }
        _write_tokenizer(folder, json.dumps(content, indent=1))


class Numbers:
    """Tokens are written as numbers, for arrays without a tokenizer."""

    vocabulary: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the numbers in a text; other words are left out."""
        return [int(word) for word in text.split() if word.isdecimal()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(map(str, tokens))

    def save_pretrained(self, folder: Path) -> None:
        """Write nothing: the tokenizer is not known."""


class HuggingFaceTokenizer:
    """A tokenizer from a `tokenizer.json`, or from other files that transformers can read."""

    def __init__(self, path: Path) -> None:
        """Read it from a folder or a file.

        Raises:
            ConfigurationError: it cannot be read, or the packages are missing.
        """
        self._path = path
        try:
            made = _made_from(path)
        except ImportError as error:
            raise ConfigurationError(
                f"A Hugging Face tokenizer needs the package transformers: {error}. "
                "Install fullshard[transformers]."
            ) from error
        except Exception as error:  # whatever these libraries raise on files they do not understand
            raise ConfigurationError(
                f"A tokenizer must be a folder of Hugging Face, or a {TOKENIZER_FILE}; {path} cannot be read as one: "
                f"{error}\nSet data.tokenizer to another."
            ) from error
        self._made = made
        self.vocabulary: int | None = max(made.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        found = self._made.encode(text, add_special_tokens=False)
        return list(getattr(found, "ids", found))  # tokenizers has them in an object

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return str(self._made.decode(list(tokens), skip_special_tokens=False))

    def save_pretrained(self, folder: Path) -> None:
        """Copy its files."""
        if self._path.is_file():
            _write_tokenizer(folder, self._path.read_text())
            return
        copy_files(self._path, TOKENIZER_FILES, folder)


def copy_files(source: Path, patterns: Sequence[str], target: Path) -> None:
    """Copy the files of a folder whose names match."""
    for file in source.iterdir():
        if _is_one_of(file, patterns):
            shutil.copyfile(file, target / file.name)


def _made_from(path: Path) -> Any:
    """Return an object of tokenizers, which is quick to import, or else of transformers."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        from tokenizers import Tokenizer as FastTokenizer

        return FastTokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _is_one_of(file: Path, patterns: Sequence[str]) -> bool:
    return file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)


def _write_tokenizer(folder: Path, content: str) -> None:
    (folder / TOKENIZER_FILE).write_text(content)
    # Without it transformers uses the class of the model's architecture.
    configuration = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n")


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level tokenizers."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
