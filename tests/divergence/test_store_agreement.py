"""Ranks compare digests through a store: who is asked, who is named, what it costs, what is left behind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.divergence import store_agreement
from fullshard.divergence.store_agreement import StoreAgreement


def joined(reports: Sequence[tuple[list[int], str]]) -> str:
    return "; ".join(f"{ranks}: {text}" for ranks, text in reports)


def compare(
    store: Any, ranks: Sequence[int], rank: int, text: str, *, timeout_s: float = 30.0
) -> str | None:
    agreement = StoreAgreement(store, ranks, rank, timeout_s=timeout_s)
    return agreement.compare(text, lambda: f"all of {text}", joined)


def on_threads(calls: dict[int, Callable[[], str | None]]) -> dict[int, str | None]:
    """Run a call for each rank at the same time."""
    found: dict[int, str | None] = {}

    def run(rank: int) -> None:
        found[rank] = calls[rank]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found.keys() == calls.keys(), "a rank hangs"
    return found


def keys_left(store: dist.HashStore) -> set[str]:
    return {key for key in store.list_keys() if not key.endswith("/number")}


def test_equal_texts_agree_and_leave_no_keys_behind() -> None:
    store = dist.HashStore()
    for _ in range(3):
        calls = {rank: lambda rank=rank: compare(store, (0, 1, 2), rank, "a") for rank in range(3)}
        assert on_threads(calls) == dict.fromkeys(range(3))
        assert not keys_left(store)


def test_one_rank_of_each_kind_describes_what_it_has() -> None:
    store = dist.HashStore()
    texts = {4: "a", 5: "b", 6: "a", 7: "a"}
    calls = {r: lambda r=r, t=t: compare(store, (4, 5, 6, 7), r, t) for r, t in texts.items()}
    messages = set(on_threads(calls).values())
    assert messages == {"[4, 6, 7]: all of a; [5]: all of b"}
    assert not keys_left(store)


def test_sets_of_ranks_do_not_disturb_each_other() -> None:
    store = dist.HashStore()
    calls = {
        0: lambda: compare(store, (0, 1), 0, "a") or compare(store, (0, 1, 2), 0, "c"),
        1: lambda: compare(store, (0, 1), 1, "a") or compare(store, (0, 1, 2), 1, "c"),
        2: lambda: compare(store, (0, 1, 2), 2, "c"),
    }
    assert on_threads(calls) == dict.fromkeys(range(3))


def test_a_rank_that_does_not_come_is_named_and_may_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_agreement, "_GRACE_S", 0.0)
    store = dist.HashStore()
    calls = {
        rank: lambda rank=rank: compare(store, (0, 1, 2), rank, "a", timeout_s=0.1)
        for rank in (0, 2)
    }
    first, second = on_threads(calls).values()
    assert first == second
    assert first is not None and "but rank 1 did not arrive within 0 s" in first
    calls = {rank: lambda rank=rank: compare(store, (0, 1, 2), rank, "a") for rank in range(3)}
    assert on_threads(calls) == dict.fromkeys(range(3)), "the next comparison is a new one"


def test_ranks_that_wait_for_each_other_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_agreement, "_SLOW_S", 0.02)
    store = dist.HashStore()
    calls = {
        0: lambda: compare(store, (0, 1, 2, 3), 0, "a"),
        1: lambda: compare(store, (1, 3), 1, "a"),
        2: lambda: compare(store, (0, 1, 2, 3), 2, "a"),
        3: lambda: compare(store, (0, 1, 2, 3), 3, "a"),
    }
    messages = {*on_threads(calls).values()}
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None and "rank 1: shards over ranks 1, 3" in message


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)])
def test_ranks_that_find_each_other_at_the_same_time_are_told_the_same(
    ranks: tuple[int, int],
) -> None:
    class Interrupted(dist.HashStore):
        """Lets the other rank publish right after this one has claimed its first comparison."""

        def add(self, key: str, amount: int) -> int:
            found = super().add(key, amount)
            if key.endswith("/judges") and interruptions:
                interruptions.pop()()
            return found

    store, interruptions = Interrupted(), list[Callable[[], None]]()
    comparisons = [(0, 1), (1, 2)]
    agreements = {each: StoreAgreement(store, each, 1, timeout_s=1) for each in comparisons}
    for agreement in agreements.values():
        agreement.arrive("a")
    keys = {each: agreement._key for each, agreement in agreements.items()}
    other = next(each for each in comparisons if each != ranks)
    interruptions.append(lambda: agreements[other]._publish("second", keys[ranks]))
    agreements[ranks]._publish("first", keys[other])
    assert {store.get(f"{key}/verdict")[1:] for key in keys.values()} == {b"first"}


def test_a_rank_that_waits_for_others_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 2, which comes late, and then comes to the comparison in which rank 0 waits for it."""
    monkeypatch.setattr(store_agreement, "_SLOW_S", 0.02)
    store, late = dist.HashStore(), threading.Event()
    looks = Counter[str]()

    def look() -> None:
        looks["all"] += 1
        if looks["all"] > 20:
            late.set()

    def rank_0() -> str | None:
        agreement = StoreAgreement(store, (0, 1), 0, timeout_s=30, between_looks=look)
        return agreement.compare("a", lambda: "a", joined)

    calls = {
        0: rank_0,
        1: lambda: compare(store, (1, 2), 1, "a") or compare(store, (0, 1), 1, "a"),
        2: lambda: (late.wait(30), compare(store, (1, 2), 2, "a"))[1],  # type: ignore[dict-item]
    }
    assert on_threads(calls) == dict.fromkeys(range(3))


def test_a_rank_that_gives_up_does_not_leave_the_others_waiting() -> None:
    store = dist.HashStore()

    def give_up() -> None:
        if store.check(["fullshard/agreement/0,1,2/0/digest/1"]):
            raise RuntimeError("the watchdog says so")

    def rank_0() -> str | None:
        agreement = StoreAgreement(store, (0, 1, 2), 0, timeout_s=30, between_looks=give_up)
        with pytest.raises(RuntimeError, match="the watchdog says so"):
            agreement.compare("a", lambda: "a", joined)
        return None

    found = on_threads({0: rank_0, 1: lambda: compare(store, (0, 1, 2), 1, "a")})
    assert found[1] == "Rank 0 has given up comparing: RuntimeError: the watchdog says so"


class CountingStore:
    """A store that counts operations and the bytes of keys and values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations: Counter[str] = Counter()
        self.num_bytes = 0

    def _count(self, operation: str, keys: Sequence[str], values: Sequence[bytes] = ()) -> None:
        self.operations[operation] += 1
        self.num_bytes += sum(map(len, keys)) + sum(map(len, values))

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        self._count("set", [key], [self.values[key]])

    def get(self, key: str) -> bytes:
        self._count("get", [key], [self.values[key]])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._count("add", [key], [b"8 bytes."])
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.values[key] for key in keys]
        self._count("multi_get", keys, found)
        return found

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", [key])
        return self.values.pop(key, None) is not None


def cost(num_ranks: int) -> CountingStore:
    """Let so many ranks agree, one after the other, as if each found the verdict at its first look."""
    store, ranks = CountingStore(), tuple(range(num_ranks))
    everyone = [StoreAgreement(store, ranks, rank, timeout_s=30) for rank in ranks]
    digest = "0123456789abcdef" * 2
    lasts = [each.arrive(digest) for each in everyone]
    assert lasts == [False] * (num_ranks - 1) + [True]
    everyone[-1].decide(lambda: "", joined)
    assert [each.learn(lambda: "") for each in everyone] == [None] * num_ranks
    assert {*store.values} == {"fullshard/agreement/twenty-letters-digest/number"}
    return store


def test_the_cost_grows_with_the_number_of_ranks_and_no_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_agreement, "_short", lambda ranks: "twenty-letters-digest")
    small, large = cost(64), cost(16_384)
    assert large.operations["multi_get"] == 1
    per_rank = sum(large.operations.values()) / 16_384
    assert per_rank <= sum(small.operations.values()) / 64 <= 9
    assert large.num_bytes / 16_384 < 800
    print(f"16,384 ranks: {dict(large.operations)}, {large.num_bytes / 2**20:.1f} MiB")
