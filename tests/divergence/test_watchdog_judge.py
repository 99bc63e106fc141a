"""What answers mean: one case for each rule of the judge, and the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fullshard.divergence.watchdog.answers import (
    Absence,
    Answer,
    GroupAnswer,
    History,
    Wait,
    answer_from,
    encode,
    history_from,
)
from fullshard.divergence.watchdog.connections import UNKNOWN
from fullshard.divergence.watchdog.judge import histories_wanted, judge
from fullshard.divergence.watchdog.silences import Silences

ALL = tuple(range(4))


def waits(
    rank: int,
    text: str = "all-gather of layers.1",
    *,
    count: int = 5,
    digest: int = 50,
    kind: str = "fullshard",
    group: str | None = "world",
    seconds: float = 6.0,
    ranks: Sequence[int] = ALL,
) -> Answer:
    """A rank that waits in its collective number ``count``."""
    return Answer(
        rank=rank,
        step=2,
        phase="forward",
        module="layers.1",
        line="train.py:12 in main",
        moved=count,
        wait=Wait(text=text, kind=kind, group=group, count=count, seconds=seconds),
        groups={"world": GroupAnswer(ranks=ranks, count=count, digest=digest)},
        limit_s=600.0,
    )


def runs(rank: int, *, count: int = 4, digest: int = 40, raised: str | None = None) -> Answer:
    """A rank that is in its own code, after its collective number ``count``."""
    groups = {"world": GroupAnswer(ranks=ALL, count=count, digest=digest)}
    return Answer(
        rank=rank,
        step=2,
        host="host b, process 7",
        line="data.py:3 in load",
        groups=groups,
        raised=raised,
    )


def by_rank(*answers: Answer) -> dict[int, Answer]:
    return {answer.rank: answer for answer in answers}


OTHERS = [waits(0), waits(2), waits(3)]


def test_ranks_that_all_run_are_fine() -> None:
    assert judge(by_rank(*map(runs, ALL)), {}).kind == "fine"


def test_a_rank_in_its_own_code_is_slow_and_its_line_is_named() -> None:
    found = judge(by_rank(*OTHERS, runs(1)), {})
    assert (found.kind, found.culprits) == ("slow", (1,))
    assert found.message.splitlines() == [
        "rank 1 keeps others waiting for 6 s. Nothing is wrong so far, so they go on waiting.",
        "  rank 1 (host b, process 7): running: step 2, outside, at data.py:3 in load",
        "  ranks 0, 2, 3: waiting for all-gather of layers.1 (collective 5 of process group world): "
        "step 2, forward of layers.1, at train.py:12 in main, for 6 s",
    ]


@pytest.mark.parametrize(
    ("state", "text", "kind", "named"),
    [
        ("dead", "", "diverged", "rank 1 died, while others wait"),
        ("stopped", "", "diverged", "rank 1 was stopped, while others wait"),
        ("raised", "ValueError: 3", "diverged", "rank 1 raised ValueError: 3, while others wait"),
        ("left", "", "diverged", "rank 1 left, while others wait"),
        ("lost", "", "slow", "Nothing is proven: 0 s of silence, of 300 s that are allowed"),
        ("busy", "", "slow", "rank 1 keeps others waiting"),
        ("unregistered", "", "slow", "rank 1 keeps others waiting"),
    ],
)
def test_a_rank_that_does_not_answer_is_named_with_its_host_and_last_position(
    state: str, text: str, kind: str, named: str
) -> None:
    absence = Absence(rank=1, state=state, text=text, host="host b, process 7", last="step 2")
    found = judge(by_rank(*OTHERS), {1: absence})
    assert (found.kind, found.culprits) == (kind, (1,))
    assert found.message.startswith(("Ranks have diverged: ", "rank 1 keeps"))
    assert named in found.message
    assert "  rank 1 (host b, process 7): " in found.message
    assert "last seen: step 2" in found.message


def test_a_rank_that_has_just_left_may_have_sent_what_others_wait_for() -> None:
    absence = Absence(rank=1, state="left")
    just_now = by_rank(*(waits(rank, seconds=0.5) for rank in (0, 2, 3)))
    assert judge(just_now, {1: absence}).kind == "again"
    wait = just_now[2].wait
    assert wait is not None
    just_now[2] = replace(just_now[2], wait=replace(wait, is_in_vain=True))
    assert judge(just_now, {1: absence}).kind == "diverged", "rank 2 has lost its connection"


def test_silence_is_no_proof_until_the_lease_is_over_or_a_connection_is_lost() -> None:
    silent = Absence(rank=1, state="lost", silent_s=29.0)
    assert judge(by_rank(*OTHERS), {1: silent}, lease_s=30.0).kind == "slow"
    assert judge(by_rank(*OTHERS), {1: silent}, lease_s=30.0).silent == (1,)
    over = judge(by_rank(*OTHERS), {1: replace(silent, silent_s=30.0)}, lease_s=30.0)
    assert (over.kind, over.culprits) == ("diverged", (1,))
    assert "rank 1 cannot be reached for 30 s" in over.message
    assert OTHERS[1].wait is not None
    lost = replace(OTHERS[1], wait=replace(OTHERS[1].wait, is_in_vain=True))
    # Better, it is known which connection was closed: rank 3 is silent, and may be busy.
    one, both = replace(OTHERS[0], closed=(1,)), {1: silent, 3: replace(silent, rank=3)}
    found = judge(by_rank(one, OTHERS[1]), both, lease_s=30.0)
    assert (found.kind, found.culprits) == ("diverged", (1,))
    assert "rank 1 has closed its connections and does not answer" in found.message
    found = judge(by_rank(OTHERS[0], lost, OTHERS[2]), {1: silent}, lease_s=30.0)
    assert (found.kind, found.culprits) == ("diverged", (1,))
    assert "rank 1 cannot be reached, and rank 2 has lost a connection" in found.message


def test_a_rank_is_silent_in_rounds_that_follow_each_other() -> None:
    silences = Silences(longest_gap_s=60.0)
    for now in (0.0, 50.0, 100.0):
        silences.note([1, 2] if now else [1], now)
    assert (silences.seconds(1, 110.0), silences.seconds(2, 110.0)) == (110.0, 60.0)
    assert silences.seconds(3, 110.0) == 0.0, "nothing was heard of rank 3"
    silences.note([2], 120.0)
    assert silences.seconds(1, 120.0) == 0.0, "rank 1 has answered"
    assert silences.seconds(2, 181.0) == 0.0, "this host was paused, or no rank waited"
    silences.note([2], 200.0)
    assert silences.seconds(2, 210.0) == 10.0


@pytest.mark.parametrize("state", ["dead", "stopped", "raised", "left", "lost", "busy"])
def test_nothing_is_wrong_with_a_rank_that_nobody_waits_for(state: str) -> None:
    absence = {3: Absence(rank=3, state=state)}
    assert judge(by_rank(runs(0), runs(1), runs(2)), absence).kind == "fine"


def test_a_rank_that_is_done_may_leave_groups_it_is_not_in() -> None:
    pair = [waits(rank, ranks=(0, 1)) for rank in (0, 1)]
    assert judge(by_rank(*pair), {3: Absence(rank=3, state="left")}).kind == "fine"
    assert judge(by_rank(*pair), {3: Absence(rank=3, state="dead")}).kind == "diverged"


def test_an_exception_that_left_forward_is_found_in_the_rank_that_goes_on() -> None:
    found = judge(by_rank(*OTHERS, runs(1, raised="ValueError: 3")), {})
    assert found.kind == "diverged"
    assert "rank 1 raised ValueError: 3, while others wait" in found.message


def test_a_rank_that_has_caught_its_exception_is_only_slow() -> None:
    caught = replace(runs(1, raised="StopForward: "), has_caught=True)
    found = judge(by_rank(*OTHERS, caught), {})
    assert found.kind == "slow"
    assert "raised StopForward:  and caught it; running" in found.message


def test_different_collectives_under_the_same_number_are_named() -> None:
    answers = by_rank(*OTHERS, runs(1, count=9, digest=91))
    assert histories_wanted(answers) == [0, 1]
    histories = {
        0: History(tags={"world": {3: "a", 4: "b", 5: "c"}}),
        1: History(tags={"world": {4: "b", 5: "x", 6: "c"}}),
    }
    found = judge(answers, {}, histories=histories)
    assert (found.kind, found.culprits) == ("diverged", (1,))
    assert "collective 5 of process group world is c on ranks 0, 2, 3, and x on rank 1" in (
        found.message
    )
    assert ". No step has ended since, so no weights were updated" in found.message
    # How many steps had the other one's weights, as far as the rank remembers its steps.
    for steps, said in (
        ([(1, 4), (2, 8), (3, 12), (4, 16)], "up to 3 steps"),
        ([(4, 2), (5, 6)], "up to 1 step "),
        ([(3, 8), (4, 12)], "more than 2 steps"),
    ):
        histories[1] = replace(histories[1], steps={"world": steps})
        assert f"Since then {said}" in judge(answers, {}, histories=histories).message
    histories[0] = History(tags={"world": {7: "c"}})
    histories[1] = History(tags={"world": {7: "x"}})
    message = judge(answers, {}, histories=histories).message
    assert "c on ranks 0, 2, 3, and x on rank 1, at the latest." in message
    histories[0] = History(tags={"world": {3: "a", 4: "b", 5: "c"}})
    histories[1] = History(tags={"world": {4: "b", 5: "c", 6: "d"}})
    assert judge(answers, {}, histories=histories).kind == "slow"


def test_equal_counts_with_different_digests_are_a_divergence() -> None:
    found = judge(by_rank(waits(0), waits(1, digest=51), waits(2), waits(3)), {})
    assert found.kind == "diverged"
    assert (
        "first 5 collectives of process group world are different ones on ranks 0, 2, 3 and rank 1"
        in (found.message)
    )


def test_a_step_that_ends_after_different_collectives_is_a_divergence() -> None:
    def with_mark(answer: Answer, *mark: int) -> Answer:
        return replace(answer, groups={"world": replace(answer.groups["world"], marks=(mark,))})

    ranks = [with_mark(runs(rank), 1, 8, 80) for rank in range(3)]
    found = judge(by_rank(*ranks, with_mark(runs(3), 1, 12, 120)), {})
    assert (found.kind, found.culprits) == ("diverged", (3,))
    assert "step 1 has ended after different collectives" in found.message
    assert "8 on ranks 0-2, 12 on rank 3" in found.message
    assert judge(by_rank(*ranks, with_mark(runs(3), 2, 12, 120)), {}).kind == "fine"


def test_a_deadlock_is_one_when_nobody_moves_between_two_rounds() -> None:
    barrier = waits(1, "barrier", kind="torch", count=4, digest=40)
    answers = by_rank(*OTHERS, barrier)
    assert judge(answers, {}).kind == "again"
    found = judge(answers, {}, previous=answers)
    assert found.kind == "diverged"
    assert "ranks 0-3 wait for each other in different places" in found.message
    assert "  rank 1: waiting for torch.distributed.barrier: step 2" in found.message
    moved = {**answers, 2: replace(answers[2], moved=3)}
    assert judge(answers, {}, previous=moved).kind != "diverged"


@pytest.mark.parametrize("text", ["recv", "Work.wait for all_reduce"])
def test_a_wait_for_what_may_be_on_its_way_is_a_deadlock_if_nothing_moves(text: str) -> None:
    def answers(traffic: int) -> dict[int, Answer]:
        waiting = waits(1, text, kind="torch", group=None, count=4, digest=40)
        assert waiting.wait is not None
        return by_rank(*OTHERS, replace(waiting, wait=replace(waiting.wait, traffic=traffic)))

    assert judge(answers(100), {}).kind == "again"
    assert judge(answers(100), {}, previous=answers(100)).kind == "diverged"
    assert judge(answers(100), {}, previous=answers(99)).kind != "diverged"
    assert judge(answers(UNKNOWN), {}, previous=answers(UNKNOWN)).kind == "fine"


def test_ranks_that_wait_in_the_same_collective_are_no_deadlock() -> None:
    same = by_rank(*(waits(rank) for rank in ALL))
    assert judge(same, {}, previous=same).kind == "fine"
    # Their hosts have issued different numbers: those that are behind can go on, so the others will.
    ahead = by_rank(*(waits(rank, kind="device", count=5 + rank) for rank in ALL))
    assert judge(ahead, {}, previous=ahead).kind == "fine"
    sends = by_rank(
        waits(0, "send", kind="torch"), *(waits(r, "recv", kind="torch") for r in ALL[1:])
    )
    assert judge(sends, {}, previous=sends).kind == "fine"


def test_a_collective_that_all_have_called_hangs_after_the_limit() -> None:
    answers = by_rank(*(waits(rank, kind="device", seconds=601) for rank in ALL))
    found = judge(answers, {})
    assert found.kind == "diverged"
    assert "all-gather of layers.1 has not ended within 600 s, though ranks 0-3 called it" in (
        found.message
    )
    slow = by_rank(*(waits(rank, seconds=601) for rank in ALL[1:]), runs(0))
    assert judge(slow, {}).kind == "slow"


def test_an_answer_and_a_history_survive_the_store() -> None:
    answer = replace(waits(3, ranks=range(0, 32, 8)), states={0: "dead"}, raised="E: x")
    answer = replace(answer, words={1: ("left", ""), 2: ("raised", "E: y")}, closed=(1, 2))
    group = replace(answer.groups["world"], marks=((1, 2, 3),))
    groups = {"world": replace(group, ranks=range(0, 25, 8)), "pair": replace(group, ranks=(3, 7))}
    answer = replace(answer, groups=groups)
    assert answer_from(encode(answer)) == answer
    tags = {4: "b", 5: "a", 7: "b", 8: "c"}
    history = History(tags={"world": tags}, steps={"world": [(1, 4)]}, backend="started")
    assert history_from(encode(history)) == history
