"""Words of the page that a reader may not know: what they mean, in one or two sentences.

The page explains a word where it stands: it is a link to the list at the end, and its meaning is its tooltip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

MEANINGS = {
    "all-gather": "The collective of a gather: every rank receives the shards of all others.",
    "captured": "Recorded as a CUDA graph, which is then launched as a whole: the host has almost nothing to do.",
    "collective": "Communication in which all ranks take part, such as an all-gather.",
    "exposed communication": "The time in which compute stood still for a gather or a reduction. Communication beside "
    "compute is hidden, and costs nothing.",
    "gather": "Fetching the shards of a group's parameters from all ranks before its layers compute.",
    "gradient norm": "The length of the vector of all gradients. When it grows fast, a run often diverges.",
    "group": "Parameters that are gathered and reduced together, usually those of one layer.",
    "held-out": "Of data that are not trained on. A loss that rises there while that of training falls means overfitting.",
    "MFU": "Model FLOPs utilisation: the arithmetic that the model needs, as a share of what the device could do in that time.",
    "on the wire": "Between ranks: from the moment at which a message is sent until it has arrived.",
    "padding": "Elements without a meaning, which make the shards of all ranks equally long.",
    "prefetch": "Gathering a group before its layers are reached, while others compute.",
    "rank": "One process of the run, usually with one GPU.",
    "reduce-scatter": "The collective of a reduction: gradients of all ranks are added up, and each rank receives its shard.",
    "reduction": "Adding up the gradients of a group over all ranks, each of which keeps its shard of the sum.",
    "replica": "A copy of the sharded model: ranks of a replica share one copy.",
    "resident": "Memory of a process that is in the machine's main memory, with that of Python and all libraries.",
    "shard": "The part of a group that one rank holds.",
    "wait": "Time in which compute stands still for communication.",
}
"""Explanations by word, as it stands on the page."""

FORMS = {
    "all-gathers": "all-gather",
    "collectives": "collective",
    "gathered": "gather",
    "gathers": "gather",
    "groups": "group",
    "ranks": "rank",
    "reductions": "reduction",
    "replicas": "replica",
    "shards": "shard",
    "waits": "wait",
}
"""Other forms of these words."""

_WORDS = {**{word.lower(): word for word in MEANINGS}, **FORMS}
_PATTERN = re.compile(
    rf"(?<![\w`-])({'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})(?![\w-])",
    re.IGNORECASE,
)


def anchor(word: str) -> str:
    """Return the id of a word's entry on the page."""
    return f"word-{word.lower().replace(' ', '-')}"


def explained(text: str) -> Markup:
    """Return the text with each word of the list as a link to its meaning, where it stands for the first time."""
    parts: list[Markup] = []
    seen: set[str] = set()
    done = 0
    for match in _PATTERN.finditer(text):
        word = _WORDS[match[0].lower()]
        if word in seen:
            continue
        seen.add(word)
        parts += [escape(text[done : match.start()]), _link(word, match[0])]
        done = match.end()
    return Markup("").join([*parts, escape(text[done:])])


def _link(word: str, shown: str) -> Markup:
    return Markup('<a class="term" href="#{}" title="{}">{}</a>').format(
        anchor(word), MEANINGS[word], shown
    )


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield id, word and meaning of each, by the alphabet."""
    for word in sorted(MEANINGS, key=str.lower):
        yield anchor(word), word, MEANINGS[word]
