"""How a watchdog brings back a thread that waits for a device, which only an abort of the backend can end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.divergence.verdict import VERDICT
from fullshard.divergence.watchdog import process, thread
from fullshard.errors import DivergenceError


@pytest.fixture(autouse=True)
def verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("message", "taken", "watched"):
        monkeypatch.setattr(VERDICT, name, getattr(VERDICT, name))


@pytest.mark.parametrize(
    ("taken", "pending", "is_aborted"),
    [(False, "nccl:all_reduce, scheduled", True), (False, "", False), (True, "nccl:...", False)],
    ids=["the device waits", "it runs", "it has raised"],
)
def test_a_rank_that_seems_to_run_is_brought_back_if_its_device_waits(
    monkeypatch: pytest.MonkeyPatch, taken: bool, pending: str, is_aborted: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(thread, "abort_all", lambda: calls.append("abort"))
    monkeypatch.setattr(thread.release, "raise_in", lambda *_: calls.append("raise"))
    monkeypatch.setattr(thread.torch_border, "pending_in_backend", lambda: pending)
    watchdog: Any = object.__new__(thread.Watchdog)
    watchdog._observer = SimpleNamespace(wait=lambda: None, thread=threading.get_ident())
    watchdog._peers = SimpleNamespace(tell=lambda *_: None)
    watchdog._wait_until_all_know = lambda: None
    watchdog._watches_still = lambda: True
    watchdog._is_over, watchdog._final = False, None
    VERDICT.taken = taken
    watchdog._diverge("Ranks have diverged.")
    assert VERDICT.message == "Ranks have diverged."
    assert calls == (["abort", "raise"] if is_aborted else [])


def test_a_group_is_destroyed_once_its_devices_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True, True, False])
    context = SimpleNamespace(is_behind=lambda: next(looks))
    monkeypatch.setattr(process, "comm_contexts", lambda: [context])
    VERDICT.watched, VERDICT.message, VERDICT.taken = True, None, False
    process._await_devices()
    assert next(looks, None) is None, "it has waited"


def test_a_group_whose_devices_never_end_is_not_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(is_behind=lambda: True)
    monkeypatch.setattr(process, "comm_contexts", lambda: [context])
    VERDICT.watched, VERDICT.message, VERDICT.taken = True, "Ranks have diverged.", False
    with pytest.raises(DivergenceError, match="Ranks have diverged"):
        process._await_devices()
    process._await_devices()  # the program has caught it
    VERDICT.taken = False
    try:
        raise ValueError
    except ValueError:
        process._await_devices()  # the error that is on its way says more
