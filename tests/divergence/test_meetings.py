"""Ranks agree on every collective before they call it: journals, the control channel, meetings."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import DivergenceError
from fullshard.divergence import meetings
from fullshard.divergence.control_channel import ControlChannel, closed_connections
from fullshard.divergence.journal import PROGRESS, RING, RULES, Journal, journal_of
from fullshard.divergence.meetings import Meetings
from fullshard.divergence.verdict import VERDICT
from fullshard.errors import ranks_text
from fullshard.mesh.backends import backend_named
from fullshard.transport import collectives
from fullshard.transport.monitor import POSITION
from fullshard.transport.tags import tag
from tests.helpers.fake import fake_world

WORLDS = [2, 3, 4]


def channel() -> ControlChannel:
    group = dist.group.WORLD
    found = meetings.channel_of(group, journal_of(group), backend_named("gloo"))
    assert found is not None
    return found


# --- journals -----------------------------------------------------------------------------------------


def test_a_journal_depends_on_the_order_and_remembers_the_last_collectives() -> None:
    with fake_world(2):
        first, second = Journal("a", 0, (0, 1)), Journal("b", 0, (0, 1))
        for text in ("a", "b"):
            first.note(tag(text))
        for text in ("b", "a"):
            second.note(tag(text))
        assert first.count == second.count == 2
        assert first.digest != second.digest
        assert first.last_tags() == [(1, "a"), (2, "b")]
        for number in range(RING + 10):
            first.note(tag(str(number)))
        assert first.last_tag == tag(str(RING + 9))
        assert first.last_tags()[-2:] == [(RING + 11, str(RING + 8)), (RING + 12, str(RING + 9))]
        # The place of the oldest may be written over at any time.
        assert [count for count, _ in first.last_tags()] == [*range(14, RING + 13)]


def test_a_journal_knows_its_digest_after_every_call_that_it_remembers() -> None:
    journal = Journal("a", 0, (0, 1))
    digests = [journal.now()]
    for number in range(RING + 5):
        journal.note(tag(str(number % 7)))
        digests.append(journal.now())
    assert digests[-1] == (journal.count, journal.digest)
    for count in (RING + 5, RING, 7):
        assert (count, journal.digest_after(count)) == digests[count]
    assert journal.digest_after(RING + 6) is None, "it was not called yet"
    assert journal.digest_after(5) is None, "it is forgotten"
    # A failed meeting takes a number that no rank uses.
    other = Journal("a", 0, (0, 1))
    for each in (journal, other):
        each.note_failed_meeting(tag("failed"), is_noted=False)
        assert each.now() == (each.count, each.digest)
        assert each.digest_after(each.count - 1) is not None


def test_the_number_of_a_tag_is_the_same_in_every_process(world) -> None:
    assert set(world(2).run(number_of, "all-gather of layers.0")) == {
        tag("all-gather of layers.0").number
    }


def number_of(text: str) -> int:
    return tag(text).number


def test_ranks_are_named_in_runs() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 0]) == "ranks 0, 1"
    assert ranks_text([8, 0, 1, 2, 3, 10]) == "ranks 0-3, 8, 10"


# --- the control channel --------------------------------------------------------------------------------


def agreements(cases: list[list[int]]) -> list[bool]:
    rank = dist.get_rank()
    return [channel().agree(numbers[rank]) for numbers in cases]


@pytest.mark.parametrize("ranks", WORLDS)
def test_all_ranks_know_whether_all_bring_the_same_number(world, ranks: int) -> None:
    differing = [[int(rank == odd) for rank in range(ranks)] for odd in range(ranks)]
    cases = [[7] * ranks, *differing, list(range(ranks)), [2**62] * ranks]
    expected = [True, *[False] * ranks, False, True]
    assert world(ranks).run(agreements, cases) == [expected] * ranks


def exchanged() -> list[str]:
    return channel().exchange(f"é from {dist.get_rank()} " + "x" * 100_000 * dist.get_rank())


@pytest.mark.parametrize("ranks", WORLDS)
def test_all_ranks_hear_what_each_says(world, ranks: int) -> None:
    expected = [f"é from {rank} " + "x" * 100_000 * rank for rank in range(ranks)]
    assert world(ranks).run(exchanged) == [expected] * ranks


def leaves_or_waits() -> str:
    ours = channel()
    assert closed_connections(ours.journal) == set()
    dist.barrier()
    if dist.get_rank() == 1:
        ours.close()
        return ""
    with pytest.raises(DivergenceError) as caught:
        ours.agree(1)
    assert closed_connections(ours.journal) == {1}
    assert closed_connections(Journal("another group", 0, (0, 1))) == set()
    return str(caught.value)


def test_a_rank_that_has_gone_is_named_at_once(world) -> None:
    message, _ = world(2).run(leaves_or_waits)
    assert "rank 1 has ended" in message


def waits_for_the_verdict() -> str:
    ours = channel()
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    timer = threading.Timer(0.1, setattr, (VERDICT, "message", "proven"))
    timer.start()
    try:
        with pytest.raises(DivergenceError) as caught:
            ours.agree(1)
    finally:
        timer.join()
        VERDICT.message = None
        dist.barrier()
    return str(caught.value)


def test_a_wait_ends_with_the_verdict_of_the_watchdog(world) -> None:
    assert world(2).run(waits_for_the_verdict)[0] == "proven"


# --- meetings -------------------------------------------------------------------------------------------


def gathers(texts: list[str]) -> tuple[str, list[int]]:
    """Gather under different names on ranks; then all together."""
    rank, group = dist.get_rank(), dist.group.WORLD
    output = torch.zeros(group.size() * (rank + 1), dtype=torch.uint8)
    try:
        collectives.all_gather(
            [output], [output[: rank + 1]], group, tag(texts[rank]), async_op=False
        )
        message = ""
    except DivergenceError as error:
        message = str(error)
    assert PROGRESS.waiting is None
    return message, collectives.values_of_all_ranks(rank, group, tag("afterwards"))


@pytest.mark.parametrize("ranks", WORLDS)
def test_ranks_that_call_different_collectives_raise_the_same_error_and_can_go_on(
    world, ranks: int
) -> None:
    # Sizes differ, too: gloo would abort the process.
    texts = ["all-gather of layers.0", "all-gather of layers.1", *["all-gather of layers.0"] * 2]
    (message, everybody), *others = world(ranks).run(gathers, texts)
    assert [(message, everybody)] * (ranks - 1) == others
    assert "  rank 1: all-gather of layers.1 (" in message
    assert ": all-gather of layers.0 (" in message
    assert everybody == list(range(ranks))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in model:
        fullshard.fully_shard(layer)
    return fullshard.fully_shard(model)


def steps_apart(kind: str) -> str:
    """Run two steps; in the second, rank 1 differs. Return the error."""
    model, odd = layers(), dist.get_rank() == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(DivergenceError) as caught:
        if kind == "order" and odd:
            model[1](x)
        elif kind == "backward" and odd:
            model(x)
            model(x)
        elif kind == "step" and odd:
            optimizer.step()
            model(x)
        else:
            model(x).sum().backward()
            model(x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("order", ["all-gather of 0 (", "all-gather of 1 ("]),
        ("backward", ["all-gather of 2 (", "all-gather of 0 ("]),
        ("step", ["(step 1, forward", "(step 2, forward"]),
    ],
)
def test_ranks_that_train_differently_are_told_where(world, kind: str, named: list[str]) -> None:
    messages = world(2).run(steps_apart, kind)
    assert messages[0] == messages[1]
    for text in named:
        assert text in messages[0]


def tags_of_layers() -> list[str]:
    model = layers()
    model(torch.ones(2, 4))
    return [text for _, text in journal_of(dist.group.WORLD).last_tags()[-3:]]


def test_a_journal_names_modules(world) -> None:
    expected = [f"all-gather of {name}" for name in "012"]
    assert world(2).run(tags_of_layers) == [expected] * 2


def steps_with_a_part_time_optimizer() -> int:
    """Two models, of which rank 0 trains one by itself; what they share goes on."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = dist.device_mesh.DeviceMesh.from_group(alone, "cpu")
    own = fullshard.fully_shard(nn.Linear(4, 4), mesh=mesh)
    model, x = layers(), torch.ones(2, 4)
    if dist.get_rank() == 0:
        own(x).sum().backward()
        torch.optim.SGD(own.parameters(), lr=0.1).step()
    model(x).sum().backward()
    return journal_of(dist.group.WORLD).step


def test_steps_are_counted_for_the_ranks_that_share_parameters(world) -> None:
    assert world(2).run(steps_with_a_part_time_optimizer) == [0, 0]


def test_debug_knows_its_checks() -> None:
    with pytest.raises(fullshard.ConfigurationError, match=r"'order' and 'streams'.*speed"):
        fullshard.debug("speed")
    fullshard.debug("order")
    assert RULES.every_collective
    fullshard.debug()
    assert not RULES.every_collective


def test_a_rank_of_a_fake_group_meets_nobody() -> None:
    with fake_world(4):
        fullshard.debug("order")
        try:
            Meetings(dist.group.WORLD, backend_named("fake")).before(tag("alone"))
            assert journal_of(dist.group.WORLD).count == 1
        finally:
            fullshard.debug()


class Fallback(nn.Module):
    """Catches what its first layer raises, unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, catches: bool) -> torch.Tensor:
        try:
            return self.first(x[:, :3])
        except RuntimeError:
            if not catches:
                raise
            return self.second(x)


def raises_inside(catches: bool) -> str | None:
    model = Fallback()
    for layer in (model.first, model.second):
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 4), catches=catches)
    raised = POSITION.raised
    model(torch.ones(2, 4), catches=True)
    assert POSITION.raised is None
    return raised


def test_only_exceptions_that_leave_the_model_are_noted(world) -> None:
    assert world(2).run(raises_inside, True) == [None, None]
    for raised in world(2).run(raises_inside, False):
        assert raised is not None
        assert raised.startswith("RuntimeError: ")
