"""A host that the network does not reach: ranks wait for it until the lease is over, and go on if it comes back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.distant_ranks import LEASE_S, be_rank
from tests.helpers.hosts import two_hosts, why_no_hosts
from tests.helpers.ranks import FORK_SERVER

NO_HOSTS = why_no_hosts()
TIMEOUT_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
def test_ranks_go_on_when_the_network_comes_back_and_end_when_it_does_not(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        ranks = [
            FORK_SERVER.Process(target=be_rank, args=(rank, host, hosts[0], tmp_path), daemon=True)
            for rank, host in enumerate(hosts)
        ]
        try:
            for each in ranks:
                each.start()
            wait_until(lambda: steps(tmp_path) >= 5, tmp_path)
            hosts[1].unplug()
            # Both have seen that the other one is silent: before, that was the end.
            wait_until(
                lambda: all("Nothing is proven" in said(tmp_path, r) for r in (0, 1)), tmp_path
            )
            hosts[1].plug()
            gone_before = steps(tmp_path)
            wait_until(lambda: steps(tmp_path) >= gone_before + 5, tmp_path)
            assert not list(tmp_path.glob("*.error"))
            hosts[1].unplug()
            wait_until(lambda: len(list(tmp_path.glob("*.error"))) == 2, tmp_path)
        finally:
            for each in ranks:
                each.kill()
                each.join()
    of_first, of_second = ((tmp_path / f"{rank}.error").read_text() for rank in (0, 1))
    assert f"rank 1 cannot be reached for {LEASE_S:.0f} s" in of_first, of_first
    # The store is on the other host: nothing tells more.
    assert (
        "the store has not answered for 3 s" in of_second
        or "the store does not answer" in of_second
    )
    for rank, message in enumerate((of_first, of_second)):
        assert re.search(rf"rank {rank} \(host .*\): waiting for .* of root", message), message


def steps(folder: Path) -> int:
    """Return how many steps both ranks have done."""
    texts = [path.read_text() for path in folder.glob("*.steps")]
    return min(int(text or 0) for text in texts) if len(texts) == 2 else 0


def said(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.log"
    return path.read_text() if path.exists() else ""


def wait_until(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, (
            [said(folder, rank) for rank in (0, 1)],
            [path.read_text() for path in folder.glob("*.error")],
        )
        time.sleep(0.05)
