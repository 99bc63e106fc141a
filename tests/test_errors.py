"""Messages of errors: the rule, a line per fault, the remedy."""

from __future__ import annotations

from fullshard.errors import fault_paragraphs


def test_a_paragraph_has_the_rule_every_fault_once_in_order_and_the_remedy() -> None:
    faults = (fault for fault in ("b: 2", "a: 1", "b: 2"))
    assert fault_paragraphs(faults, "These differ:", "Make them equal.") == [
        "These differ:\n  a: 1\n  b: 2\nMake them equal."
    ]


def test_without_faults_there_is_no_paragraph() -> None:
    assert fault_paragraphs([], "These differ:", "Make them equal.") == []
