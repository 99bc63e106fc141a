"""The differences between the descriptions of ranks, as one message for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fullshard.divergence.model_description import GENERAL, Description
from fullshard.errors import ranks_text

_LINES = 10
"""The most differences that a message lists."""
_CHANGES = 3
"""The most changes of one rank that are listed. They are part of the name of a collective, so they are fewer."""
_MISSING = "missing"

Descriptions = Sequence[tuple[list[int], Description]]
"""Different descriptions, each with the ranks that have it."""


def message_about(descriptions: Descriptions) -> str:
    """Return the rule, the differences and the remedy."""
    lines = [*_differences(descriptions)]
    shown = lines[:_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    everyone = ranks_text(rank for ranks, _ in descriptions for rank in ranks)
    return (
        f"Ranks that share a model must shard the same modules in the same way, but {everyone} differ:\n  "
        + "\n  ".join(shown)
        + "\nNo collective has been issued. Build the same model from the same configuration on all ranks, and change its "
        "options on all of them."
    )


def changes(before: Description, after: Description) -> str:
    """Return the changes in the description of one rank, shortly."""
    found = [
        f"{item} is now {text}"
        for title, section in after.items()
        for item, text in section.items()
        if before.get(title, {}).get(item) != text
    ]
    if not found:
        return "groups or parameters are now missing, or in another order"
    more = f" and {len(found) - _CHANGES} more" if len(found) > _CHANGES else ""
    return ", ".join(found[:_CHANGES]) + more


def _differences(descriptions: Descriptions) -> Iterator[str]:
    titles = _in_order([description for _, description in descriptions])
    in_common = [title for title in titles if all(title in each for _, each in descriptions)]
    found = False
    for title in titles:
        for line in (
            _differences_within(title, descriptions)
            if title in in_common
            else [_missing_group(title, descriptions)]
        ):
            found = True
            yield line
    if not found:  # each has the same groups
        texts = [
            (ranks, ", ".join(t for t in each if t != GENERAL)) for ranks, each in descriptions
        ]
        yield _line("the order of groups", texts)


def _missing_group(title: str, descriptions: Descriptions) -> str:
    texts = [
        (ranks, "there" if title in description else _MISSING)
        for ranks, description in descriptions
    ]
    return _line(f"group {title}", texts)


def _differences_within(title: str, descriptions: Descriptions) -> Iterator[str]:
    sections = [(ranks, description[title]) for ranks, description in descriptions]
    found = False
    items = _in_order([section for _, section in sections])
    named = {item for _, section in sections for item in section if _is_param(item, section)}
    absent = {item for item in named if any(item not in section for _, section in sections)}
    for item in items:
        if item.partition(" of ")[2] in absent:
            continue  # one line says that the parameter itself is missing
        texts = [(ranks, section.get(item, _MISSING)) for ranks, section in sections]
        if len({text for _, text in texts}) > 1:
            found = True
            yield _line(item, texts)
    if not found and len({(*section,) for _, section in sections}) > 1:
        yield _line(
            f"the order of parameters in {title}",
            [
                (ranks, ", ".join(item for item in section if _is_param(item, section)))
                for ranks, section in sections
            ],
        )


def _is_param(item: str, section: Mapping[str, str]) -> bool:
    return f"dtype of {item}" in section


def _line(item: str, texts: Sequence[tuple[list[int], str]]) -> str:
    """Return a line about an item, with the ranks of each text: against the majority, or each side if there is none."""
    ranks_by_text: dict[str, list[int]] = {}
    for ranks, text in texts:
        ranks_by_text.setdefault(text, []).extend(ranks)
    by_number = sorted(ranks_by_text.items(), key=lambda each: -len(each[1]))
    majority, rest = by_number[0], by_number[1:]
    if len(majority[1]) > sum(len(ranks) for _, ranks in rest):
        sides = [f"{text} on {ranks_text(ranks)}" for text, ranks in rest[1:]]
        (text, ranks), others = rest[0], f"others {majority[0]}"
        return f"{ranks_text(ranks)}: {item} is {text}, {', '.join([*sides, others])}"
    each_side = sorted(by_number, key=lambda each: min(each[1]))
    (text, ranks), *more = each_side
    return ", ".join(
        [
            f"{ranks_text(ranks)}: {item} is {text}",
            *(f"{ranks_text(theirs)}: {each}" for each, theirs in more),
        ]
    )


def _in_order(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return all keys, as far as possible in the order that the mappings have them."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
