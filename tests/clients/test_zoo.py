"""The zoo: its verdicts, classes whose ranks die or hang, and a few classes of transformers."""

import importlib.util
import os

import pytest

from benchmarks import zoo
from benchmarks.client_ranks import Outcome
from benchmarks.zoo import Verdict, Zoo, faults, judge, read_rows, summary


def with_clients(test):
    """Mark a test that starts ranks: `make test-clients` runs it."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(0),  # each job has its own
        pytest.mark.skipif(
            "FULLSHARD_TEST_CLIENTS" not in os.environ, reason="make test-clients runs it"
        ),
    ):
        test = mark(test)
    return test


def outcomes(losses: list[float], saved: float = 1.0) -> list[Outcome]:
    return [Outcome(losses=losses, saved=[saved])] * 2


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (outcomes([4.0, 2.0]), "equal"),
        (outcomes([4.0, 2.0], saved=2.0), "close (weights only)"),
        (outcomes([4.0, 2.000001]), "close (5e-07)"),
        (outcomes([4.0, 2.1]), "differs (5e-02)"),
        (outcomes([4.0, float("nan")]), "differs (NaN)"),
        ([Outcome(error="no answer: the rank was stopped"), Outcome(error="E: x")], "fails: E: x"),
    ],
)
def test_numbers_of_all_ranks_and_the_bits_of_the_weights_are_compared(found, text):
    assert str(judge("torch", outcomes([4.0, 2.0]), found)) == text


@pytest.mark.parametrize(
    ("ours", "torchs", "alone", "bad"),
    [
        ("equal", "equal", 0.0, False),
        ("fails", "equal", None, True),
        ("fails", "fails", None, False),
        ("differs", "differs", 0.0, False),  # torch is off, as with reentrant checkpointing
        ("differs", "equal", 0.1, True),
        ("differs", "fails", 0.1, True),
    ],
)
def test_a_row_is_bad_if_only_fullshard_is(ours, torchs, alone, bad):
    first, second = (Verdict(text=text, against="x", difference=alone) for text in (ours, torchs))
    assert bool(faults(first, second, first, tolerance=1e-5)) is bad


@with_clients
def test_a_dead_or_hanging_rank_is_named_and_the_others_go_on(tmp_path):
    world = Zoo(tmp_path, program="tests.clients.zoo_program", job_timeout_s=20)
    try:
        rows = {
            name: world.examine(name, "causal", "1")
            for name in ("Dies", "Hangs", "Unknown", "Wrong", "Fine")
        }
    finally:
        world.close()
    for name in ("Dies", "Hangs"):
        assert rows[name].bad == ["wrapper: fails: no answer: the rank was stopped"]
    assert rows["Unknown"].left_out == "ValueError: no configuration is known"
    assert rows["Wrong"].bad[0] == "fully_shard: differs (1e+00) from torch"
    assert {api: str(each) for api, each in rows["Fine"].verdicts.items()} == {
        "fully_shard": "equal",
        "wrapper": "equal",
    }
    assert not rows["Fine"].bad


TWO, ONE = ("DeepseekV3ForCausalLM", "T5ForConditionalGeneration"), ("LlamaForCausalLM",)


@with_clients
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("classes", "options"),
    [(TWO, ()), (ONE, ("--real-life",)), (ONE, ("--compile",))],
    ids=["plain", "real life", "compiled"],
)
def test_classes_train_and_a_second_run_goes_on(tmp_path, capsys, monkeypatch, classes, options):
    monkeypatch.setattr("benchmarks.zoo_models.class_names", lambda: dict.fromkeys(classes, "any"))
    arguments = ("--json", str(tmp_path / "rows.jsonl"), *options)
    assert zoo.main((*arguments, "--only", classes[0])) == 0
    assert zoo.main(arguments) == 0
    assert f"{len(classes) - 1} of {len(classes)} classes to train" in capsys.readouterr().out
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row.name for row in rows] == list(classes)
    assert all(len(row.verdicts) == 2 and not row.bad for row in rows)
    assert rows[0].verdicts["fully_shard"].text == "equal"
    if classes == TWO:  # decoder layers read the encoder's output
        assert rows[1].verdicts["fully_shard"].text == "close"
        assert rows[1].alone["fully_shard"].text == "equal"
        assert rows[1].in_torchs_order and rows[1].in_torchs_order.text == "equal"
    number = sum(row.mode == rows[0].mode for row in rows)
    assert f"| {rows[0].mode} | wrapper | {number} | {number} |" in "\n".join(summary(rows))
