"""Fixtures for all tests: a fixed seed, no ignored signals, `world(n)`, a bench of n real ranks, and a Python that
has imported torch already.

torch is imported where it is used: with several workers, the process that only distributes the tests does without it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.helpers.browser import Browser
    from tests.helpers.ranks import World

GPU_DRIVERS = "/dev/nvidiactl", "/dev/kfd"

# Before torch is imported, here and by inheritance in the ranks. Some machines advertise AMX and do
# not allow it, and oneDNN would die of an illegal instruction in its first bf16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs take all cores that they find, and threads of OpenMP that wait keep their core busy, which others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch's store looks up the name of each client that connects, and answers nobody meanwhile. Where no name server answers, that
# takes 10 s by default, and a rank would seem to be lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A thread that was woken waits until another one pauses, here and by inheritance in all processes that tests start.
# Otherwise gloo's thread that receives often replaces the one that woke it by sending and still holds the lock that
# both need. It then spins: a fifth of the processor time of all tests.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # some containers do not allow it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# How long an example takes says something about the machine, not about what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    from tests.helpers.ranks import RankPool, World

    pool = RankPool()
    yield partial(World, pool)
    pool.close()


@pytest.fixture(scope="session")
def world_of() -> Iterator[Callable[[int, str], World]]:
    """Like `world`, with a backend: "gloo" or "stand-in"."""
    from tests.helpers.ranks import RankPool, World

    pool = RankPool()
    yield partial(World, pool)
    pool.close()


@pytest.fixture
def nccl_world() -> Iterator[Callable[[int], World]]:
    """The same on NCCL, with processes of the test's own.

    NCCL 2.28.9 crashes where a process that has destroyed communicators splits one of two ranks into two of one.
    """
    from tests.helpers.ranks import RankPool, World

    pool = RankPool()
    yield lambda size: World(pool, size, "nccl")
    pool.close()


@pytest.fixture(scope="session")
def preloaded_python() -> Iterator[str]:
    from tests.helpers import preloaded

    with preloaded.preloaded_python() as executable:
        yield executable


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from tests.helpers.browser import Browser, find_chromium

    executable = find_chromium()
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("CI is set and there is no Chromium: pages would go untested")
        pytest.skip("there is no Chromium")
    with Browser(executable) as browser:
        yield browser


@pytest.fixture(autouse=True, scope="session")
def no_ignored_signals() -> None:
    """Make tests independent of what the caller ignores, such as SIGHUP under nohup.

    An ignored signal stays ignored in every process that tests start. A handler does not: programs that are
    started have the default again. It does nothing, so that whoever ran `nohup make test` gets what they asked for.
    """
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}  # in every interpreter
    for number in signal.valid_signals() - ignored_by_python:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def life_cycle() -> None:
    from tests.helpers.life_cycle import check_every_change_of_state

    check_every_change_of_state()


@pytest.fixture(scope="session", autouse=True)
def torch_costs() -> None:
    from tests.helpers.torch_costs import spare_torch_costs

    spare_torch_costs()


@pytest.fixture(autouse=True)
def seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork all workers from one process that has imported torch and the tests; each took twelve seconds to do so."""
    from tests.helpers import preloaded

    if any(map(os.path.exists, GPU_DRIVERS)):
        return  # where tests are collected, CUDA is asked for devices, and no process that has asked can be forked
    python = contextlib.ExitStack()
    executable = python.enter_context(preloaded.preloaded_tests(config.args))
    config.add_cleanup(python.close)
    for spec in specs:
        if spec.popen:
            spec.python = shlex.quote(executable)


def pytest_configure() -> None:
    from tests.helpers import preloaded

    if preloaded.started_as is not None:
        preloaded.start_fork_server(preloaded.started_as)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests, but no garbage: imports make little of it, and looking for it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # The slow ones first: the last of them would otherwise run alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
    gc.freeze()  # no collection needs to walk all tests
