r"""Text of a conversation: the chat template of the tokenizer, and where the answers are in that text.

    <|im_start|>user\\nHow many?<|im_end|>\\n<|im_start|>assistant\\nFour.<|im_end|>\\n
                                                               |      answer       |

An answer is what follows the template's prompt for it, up to the end of its message, with the mark by which the model ends
it. So the model learns to answer after exactly the text that it sees when it is asked, and to stop.

A tokenizer without a template gets `PLAIN`; an export has it, too. Templates are rendered by transformers, as every program
renders them that uses the exported model. This file imports no torch by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.conversations import ASSISTANT, USER, Message
from fullshard.programs.train.data_files import has_records
from fullshard.programs.train.tokenizer import tokenizer_path

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Template for tokenizers that have none."""

SAMPLE = "an answer"


def own_template(config: RunConfig) -> str | None:
    """Return the template that a run uses in place of the tokenizer's: the configured one, `PLAIN` if there is none, or None.

    Raises:
        ConfigurationError: the configured one cannot be read.
    """
    if config.data.template is not None:
        try:
            return config.data.template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"data.template must be a file with a template in Jinja: {error}."
            ) from error
    path = tokenizer_path(config)
    return None if path is not None and _has_template(path) else PLAIN


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """The template of a run, for the folder of an export."""

    template: str

    def save_pretrained(self, folder: Path) -> None:
        """Write it where transformers looks for it."""
        (folder / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")


def template_files(config: RunConfig) -> tuple[TemplateFile, ...]:
    """Return the template that an export must have beside its tokenizer: none if that has its own, or for other data."""
    if not has_records(config.data):
        return ()
    template = own_template(config)
    return () if template is None else (TemplateFile(template),)


def _has_template(path: Path) -> bool:
    if not path.is_dir():
        return False
    if (path / TEMPLATE_FILE).is_file():
        return True
    try:
        content = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(content.get("chat_template"))


class ChatTemplate:
    """The template of a run."""

    def __init__(self, path: Path | None, template: str | None) -> None:
        """Take the tokenizer at ``path`` (None: a tokenizer without special tokens), and its template unless one is given.

        Raises:
            ConfigurationError: transformers is missing, or cannot read the tokenizer.
        """
        self._path = path
        self._template = template
        try:
            self._tokenizer = _tokenizer(path)
        except ImportError as error:
            raise ConfigurationError(
                f"Chats are rendered by the package transformers: {error}. Install fullshard[transformers]."
            ) from error
        except Exception as error:  # whatever transformers raises on files it does not understand
            raise ConfigurationError(
                f"transformers must be able to read the tokenizer {path}: {error}"
            ) from error

    def render(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        """Return a conversation as text; with ``to_answer``, up to where the next answer begins.

        Raises:
            ConfigurationError: the template refuses it.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=to_answer,
            )
        except Exception as error:  # of Jinja, or raised by the template
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(
                f"The chat template must take the conversations of the data; it refuses one of the roles {roles}: {error}"
            ) from error
        return str(text)

    def render_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Return a conversation as parts of its text, each with whether it is an answer.

        Raises:
            ConfigurationError: the text of a conversation's beginning is not the beginning of its text.
        """
        whole = self.render(messages)
        parts: list[tuple[str, bool]] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], to_answer=True)
            until = self.render(messages[: number + 1])
            if not whole.startswith(before) or not whole.startswith(until):
                raise ConfigurationError(
                    "To learn answers only, the chat template must render the beginning of a conversation as the beginning of its "
                    f"text; that of {self._path or 'data.template'} does not, for a conversation of {len(messages)} messages. Give "
                    'another template with data.template, or set data.loss_on = "all".'
                )
            parts += [(whole[done : len(before)], False), (whole[len(before) : len(until)], True)]
            done = len(until)
        return [(text, answers) for text, answers in [*parts, (whole[done:], False)] if text]

    @cached_property
    def end(self) -> str:
        """The text by which an answer ends; empty if it has none."""
        asked = [{"role": USER, "content": "a question"}, {"role": ASSISTANT, "content": SAMPLE}]
        end = self.render(asked).rpartition(SAMPLE)[2]
        return end.strip() or end

    @property
    def end_of_document(self) -> str:
        """The token by which a document ends; empty if the tokenizer has none."""
        return str(self._tokenizer.eos_token or "")


def _tokenizer(path: Path | None) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path is not None and path.is_dir():
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if path is not None:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
