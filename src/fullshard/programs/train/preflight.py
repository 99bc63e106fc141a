"""Problems of a run's model and data, found all at once before any rank starts.

Only problems that can be found quickly and without torch. Ranks find the rest when they open model and data
(`model_source`, `data`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.programs.train.array_files import read_header
from fullshard.programs.train.chat_template import own_template
from fullshard.programs.train.config import DataSection, Problem, RunConfig
from fullshard.programs.train.data_files import DataFiles, data_files
from fullshard.programs.train.decoder_shape import VOCABULARY_UNKNOWN, decoder_shape
from fullshard.programs.train.held_out_split import training_lengths
from fullshard.programs.train.record_files import check_datasets
from fullshard.programs.train.tokenizer import tokenizer_path

CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of architectures that predict the next token."""

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Names of the longest context in configurations of transformers."""

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the model."""
    section = config.model
    if section.huggingface is None:
        yield from _decoder_problems(config)
        return
    for package in ("transformers", "tokenizers"):
        if find_spec(package) is None:
            yield Problem(
                ("model.huggingface",),
                f"model.huggingface needs the package {package}. Install fullshard[transformers].",
            )
    folder = section.huggingface
    try:
        content = _read_configuration(folder)
    except ConfigurationError as error:
        yield Problem(("model.huggingface",), str(error))
        return
    architectures = content.get("architectures") or []
    is_causal = any(str(name).endswith(CAUSAL_ENDINGS) for name in architectures)
    if (architectures and not is_causal) or content.get("is_encoder_decoder"):
        yield Problem(
            ("model.huggingface",),
            f"model.huggingface must be a causal language model; {folder / 'config.json'} is of "
            f"{', '.join(map(str, architectures)) or 'an encoder and decoder'}. Take the folder of another model.",
        )
    longest = _longest_context(content)
    if longest is not None and config.data.context > longest:
        yield Problem(
            ("model.huggingface", "data.context"),
            f"data.context must not exceed what the model was made for: {config.data.context} against {longest} in "
            f"{folder / 'config.json'}. Set data.context to {longest} or less.",
        )
    if section.pretrained and not any((folder / name).is_file() for name in WEIGHT_FILES):
        yield Problem(
            ("model.huggingface", "model.pretrained"),
            f"model.pretrained needs {' or '.join(WEIGHT_FILES)} in {folder}, and there is neither. "
            "Leave it out to start from random weights.",
        )


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the data and the tokenizer."""
    section = config.data
    if section.tokenizer is not None:
        if not section.tokenizer.exists():
            yield Problem(
                ("data.tokenizer",),
                f"data.tokenizer must name a tokenizer's folder or file, but there is none at {section.tokenizer}.",
            )
        elif find_spec("tokenizers") is None:
            yield Problem(
                ("data.tokenizer",),
                "data.tokenizer needs the package tokenizers. Install fullshard[transformers].",
            )
    try:
        files = data_files(section)
    except ConfigurationError as error:
        yield Problem(("data.path", "data.kind"), str(error))
        return
    if files.kind == "array":
        yield from _array_problems(config, files)
    elif files.kind == "records":
        yield from _record_problems(config, files)
    elif tokenizer_path(config) is None:  # with a tokenizer the number of tokens is not known yet
        size = sum(file.stat().st_size for file in files.paths)
        size = size if files.max_bytes is None else min(size, files.max_bytes)
        yield from _length_problems([size], section, files)


def _decoder_problems(config: RunConfig) -> Iterator[Problem]:
    shape = decoder_shape(config.model)
    width, heads = shape.width, shape.heads
    if width % (2 * heads):
        yield Problem(
            ("model.size", "model.width", "model.heads"),
            "The decoder's width must be a multiple of 2 * heads, because rotary attention turns pairs of features "
            f"of each head; got width {width} and heads {heads}. "
            f"{math.ceil(width / (2 * heads)) * 2 * heads} would do as model.width.",
        )


def longest_context(folder: Path) -> int | None:
    """Return how many tokens the model in a folder was made for; None if it does not say so, or has no configuration."""
    try:
        return _longest_context(_read_configuration(folder))
    except ConfigurationError:
        return None


def _longest_context(content: dict[str, Any]) -> int | None:
    longest = next((content[name] for name in CONTEXT_NAMES if name in content), None)
    return longest if isinstance(longest, int) else None


def _read_configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder."""
    file = folder / "config.json"
    if not file.is_file():
        found = "it has none" if folder.is_dir() else "there is no such folder"
        raise ConfigurationError(
            f"model.huggingface must be a folder with a model's config.json; {folder}: {found}."
        )
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigurationError(
            f'{file} must be the configuration of a model of transformers; it has no "model_type".'
        )
    return content


def _array_problems(config: RunConfig, files: DataFiles) -> Iterator[Problem]:
    lengths = []
    for path in files.paths:
        try:
            lengths.append(read_header(path, config.data.dtype).length)
        except ConfigurationError as error:
            yield Problem(("data.path", "data.dtype"), str(error))
    if len(lengths) == len(files.paths):
        yield from _length_problems(lengths, config.data, files)
    if (config.model.huggingface, config.model.vocabulary, config.data.tokenizer) == (None,) * 3:
        yield Problem(
            ("data.path", "data.kind", "data.tokenizer", "model.vocabulary"), VOCABULARY_UNKNOWN
        )


def _record_problems(config: RunConfig, files: DataFiles) -> Iterator[Problem]:
    for package in ("transformers", "jinja2"):
        if find_spec(package) is None:
            yield Problem(
                ("data.path", "data.kind"),
                f"Chats and instructions are rendered with the package {package}. Install fullshard[transformers].",
            )
    try:
        check_datasets(files.paths)
        own_template(config)
    except ConfigurationError as error:
        yield Problem(("data.path", "data.kind", "data.template"), str(error))


def _length_problems(
    lengths: list[int], section: DataSection, files: DataFiles
) -> Iterator[Problem]:
    try:
        training_lengths(lengths, section, files.source)
    except ConfigurationError as error:
        yield Problem(("data.path", "data.context", "data.held_out"), str(error))
