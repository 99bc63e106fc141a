"""Kinds of records: conversations and documents.

| fields | what it is |
|---|---|
| `messages` or `conversations` | a conversation: objects with `role` and `content`, or with `from` and `value` |
| `prompt` and `completion` (or `response`) | a question and its answer; both may be lists of messages |
| `instruction`, `output` (or `response`), perhaps `input` | the same; the input follows the instruction |
| `question` and `answer` | the same |
| `text` | a document |

A field `system` begins the conversation. Other fields are ignored. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.programs.train.record_files import Record

ASSISTANT, USER, SYSTEM = "assistant", "user", "system"

ROLES = {"human": USER, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
"""Names of roles in some data sets, and the usual ones."""

LISTS = ("messages", "conversations")

PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
"""Names of a question and its answer."""

TEXT = "text"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in their order, each with `role` and `content`; at least one is an answer."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A text."""

    text: str


def read_record(where: str, record: Record) -> Conversation | Document:
    """Return a record as a conversation or a document.

    Raises:
        ConfigurationError: its fields are none of those that are known, or have other contents.
    """
    for name in LISTS:
        if record.get(name) is not None:
            return _conversation(where, record, _messages(where, name, record[name]))
    for question, answer in PAIRS:
        if record.get(question) is not None and record.get(answer) is not None:
            return _pair(where, record, question, answer)
    if isinstance(record.get(TEXT), str):
        return Document(record[TEXT])
    names = ", ".join(sorted(map(str, record))) or "none"
    raise ConfigurationError(
        f"A record must have {' or '.join(LISTS)}, {', '.join(' and '.join(pair) for pair in PAIRS)}, or {TEXT}; {where} has the "
        f'fields {names}. Rename them, or set data.kind = "text" to read the file as text.'
    )


def _pair(where: str, record: Record, question: str, answer: str) -> Conversation:
    asked = _side(where, question, record[question], USER)
    extra = record.get("input")
    if question == "instruction" and isinstance(extra, str) and extra.strip():
        asked[-1] = {**asked[-1], "content": f"{asked[-1]['content']}\n\n{extra}"}
    return _conversation(where, record, [*asked, *_side(where, answer, record[answer], ASSISTANT)])


def _side(where: str, name: str, value: Any, role: str) -> list[Message]:
    """Return a question or an answer as messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(where, name, value)


def _conversation(where: str, record: Record, messages: list[Message]) -> Conversation:
    system = record.get(SYSTEM)
    if isinstance(system, str) and system and messages[0]["role"] != SYSTEM:
        messages = [{"role": SYSTEM, "content": system}, *messages]
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigurationError(
            f"A conversation must have an answer, a message of the role {ASSISTANT}; {where} has only {roles}. Leave the record out, "
            "or name its roles as usual."
        )
    return Conversation(tuple(messages))


def _messages(where: str, name: str, value: Any) -> list[Message]:
    found = [_message(each) for each in value] if isinstance(value, list | tuple) else []
    messages = [message for message in found if message is not None]
    if not messages or len(messages) < len(found):
        raise ConfigurationError(
            f"{name} must be a list of messages, objects with role and content (or from and value) that are texts; that of {where} "
            "is not. Correct the record."
        )
    return messages


def _message(value: Any) -> Message | None:
    if not isinstance(value, Mapping):
        return None
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if isinstance(content, list):  # parts, all of which are texts
        parts = [each.get(TEXT) for each in content if isinstance(each, Mapping)]
        texts = [each for each in parts if isinstance(each, str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": ROLES.get(role, role), "content": content}
