"""Two hosts on one machine: network namespaces with a cable between them.

Each has a loopback and one interface of its own, with an address of the range for examples (RFC 5737), which
exists inside of the namespaces only. Everything is gone afterwards, whatever happened.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "cable"


def why_no_hosts() -> str | None:
    """Why there can be no hosts here, if so."""
    if shutil.which("ip") is None:
        return "needs the command ip"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    ip("netns", "delete", probe)
    return None


def ip(*words: str) -> str:
    run = subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=10)
    return run.stdout


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def start(
        self, command: list[str], *, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program on it, which writes to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[int]:
        """All that runs on it."""
        return [int(word) for word in ip("netns", "pids", self.name).split()]

    def unplug(self) -> None:
        """Pull the cable."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Put the cable back."""
        ip("-n", self.name, "link", "set", INTERFACE, "up")

    def end_processes(self) -> None:
        """End what runs on it, at once; other hosts hear nothing of it if the cable was pulled before."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other and nothing else."""
    first, second = (
        Host(f"fullshard-{os.getpid()}-{number}", f"192.0.2.{number}") for number in (1, 2)
    )
    try:
        for host in (first, second):
            ip("netns", "add", host.name)
        peer = ("peer", "name", INTERFACE, "netns", second.name)
        ip("-n", first.name, "link", "add", INTERFACE, "type", "veth", *peer)
        for host in (first, second):
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.plug()
        yield first, second
    finally:
        for host in (first, second):
            if Path("/run/netns", host.name).exists():
                host.end_processes()
                ip("netns", "delete", host.name)
