"""Run folders without a run: traces of a made-up machine, whose waits follow from its numbers, and metrics.

root: gathered first and kept, computes before and after the layers
layers.0 .. layers.n-1: gathered `depth` ahead, one at a time; released after forward and after backward
reductions: one at a time beside the gathers; the step waits for the last of them
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = "root"
HOSTILE = (
    "</script><script>window.hacked=1</script><b>x</b><img src=x onerror=window.hacked=2>`&amp;"
)
LANES = {"step": 1, "compute": 2, "wait": 2, "gather": 3, "reduce": 4, "all-reduce": 5}
CONFIG = """\
[run]
folder = "runs/demo"
ranks = 2

[model]
size = "small"

[train]
steps = {steps}
batch = 16

[optimizer]
name = "adamw"
lr = 0.003

[sharding]
api = "fsdp2"
groups = "blocks"
prefetch = {depth}
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What everything takes, in microseconds."""

    layers: int = 4
    compute_us: float = 2000
    """Of a layer in forward, and of the root before and after the layers; twice that in backward."""
    gather_us: float = 3000
    reduce_us: float = 1000
    optimizer_us: float = 4000
    depth: int = 1
    slow_gathers: dict[str, float] = field(default_factory=dict)
    """So much longer, by group."""
    late_rank: int | None = None
    """The other ranks wait `late_us` on the wire for it, at each collective."""
    late_us: float = 0
    jitter: float = 0
    """Part by which times vary."""
    layer_numel: int = 3_000_000
    padding: float = 0.0
    device: str = "cuda"
    world: int = 2

    def groups(self) -> list[str]:
        return [ROOT, *(f"layers.{i}" for i in range(self.layers))]

    def numel(self, group: str) -> int:
        return self.layer_numel * (2 if group == ROOT else 1)

    def gathered_bytes(self, group: str) -> int:
        return 2 * int(self.numel(group) * (1 + self.padding))


class Simulation:
    """A rank of a machine; `trace` is what it leaves."""

    def __init__(self, machine: Machine, rank: int = 0, *, seed: int = 0) -> None:
        self.machine = machine
        self.rank = rank
        self.now = 0.0
        self.step_number = 0
        self.events: list[dict[str, Any]] = []
        self.memory = {"gathered": 0, "reducing": 0}
        self._random = random.Random(f"{seed} {rank}")

    def trace(self, first_step: int = 20, num_steps: int = 1) -> dict[str, Any]:
        for step in range(first_step, first_step + num_steps):
            self.step_number = step
            self._step()
        names = {"step": 1, "compute": 2, "all-gather": 3, "reduce-scatter": 4, "all-reduce": 5}
        named = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": self.rank,
                "tid": tid,
                "args": {"name": name},
            }
            for name, tid in {**names, "host": 6}.items()
        ]
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [*named, *self.events],
            "fullshard": {
                "format": 1,
                "rank": self.rank,
                "world": self.machine.world,
                "device": self.machine.device,
                "first_step": first_step,
                "num_steps": num_steps,
                "zero_unix_ns": 0,
                "groups": [group_facts(self.machine, group) for group in self.machine.groups()],
                "dropped": 0,
            },
        }

    def _step(self) -> None:
        began = self.now
        layers = self.machine.groups()[1:]
        self._pass("forward", [ROOT, *layers])
        self._pass("backward", [*reversed(layers), ROOT])
        self.now += self._about(self.machine.optimizer_us)
        self._span("step", "", "", began, self.now)

    def _pass(self, phase: str, order: Sequence[str]) -> None:
        """Compute in this order; the root's compute of backward comes first, too: the head."""
        machine, began = self.machine, self.now
        compute_us = machine.compute_us * (1 if phase == "forward" else 2)
        needed = list(order) if phase == "forward" else list(order[:-1])
        met: list[float] = []
        wire_free = reduced = began
        if phase == "backward":
            self.now += self._about(compute_us)  # the head, while the last layer is gathered
        for place, group in enumerate(needed):
            issued = met[place - machine.depth] if place >= machine.depth else began
            start = max(issued, wire_free)
            wire_free = start + self._wire(machine.gather_us + machine.slow_gathers.get(group, 0.0))
            nbytes = machine.gathered_bytes(group) * (machine.world - 1) // machine.world
            self._span("gather", group, phase, start, wire_free, bytes=nbytes, issued=issued)
            self._count(issued, "gathered", machine.gathered_bytes(group))
            if wire_free > self.now:
                self._span("wait", group, phase, self.now, wire_free, **{"for": "gather"})
                self.now = wire_free
            met.append(self.now)
            entered, self.now = self.now, self.now + self._about(compute_us)
            if group != ROOT:
                self._span("compute", group, phase, entered, self.now)
                self._count(self.now, "gathered", -machine.gathered_bytes(group))
            if phase == "backward":
                reduced = self._reduce(group, max(reduced, self.now))
        if phase == "backward":
            self._count(self.now, "gathered", -machine.gathered_bytes(ROOT))
            reduced = self._reduce(ROOT, max(reduced, self.now))
        self._span("compute", ROOT, phase, began, self.now)
        if phase == "backward" and reduced > self.now:
            self._span("wait", ROOT, phase, self.now, reduced, **{"for": "reduction"})
            self.now = reduced

    def _reduce(self, group: str, start: float) -> float:
        end = start + self._wire(self.machine.reduce_us)
        nbytes = 2 * self.machine.gathered_bytes(group) * (self.machine.world - 1)
        nbytes //= self.machine.world
        self._span("reduce", group, "backward", start, end, bytes=nbytes, issued=start)
        self._count(start, "reducing", 2 * self.machine.gathered_bytes(group))
        self._count(end, "reducing", -2 * self.machine.gathered_bytes(group))
        return end

    def _wire(self, us: float) -> float:
        machine = self.machine
        is_early = machine.late_rank is not None and machine.late_rank != self.rank
        return self._about(us) + (machine.late_us if is_early else 0)

    def _about(self, us: float) -> float:
        return us * (1 + self.machine.jitter * self._random.uniform(-1, 1))

    def _span(
        self, kind: str, group: str, phase: str, start: float, end: float, **more: Any
    ) -> None:
        args = {"step": self.step_number} | more
        if group:
            args |= {"group": group, "pass": phase}
        verb = {"compute": phase, "wait": "wait for", "step": "step"}.get(kind, kind)
        event = {"ph": "X", "cat": kind, "pid": self.rank, "tid": LANES[kind], "args": args}
        name = f"{verb} {group or self.step_number}"
        self.events.append({**event, "name": name, "ts": start, "dur": end - start})

    def _count(self, time_us: float, what: str, change: int) -> None:
        # Reductions end later than they are written down; what counts is the sum at each time.
        event = {"ph": "C", "name": "memory", "pid": self.rank, "tid": 6, "ts": time_us}
        self.events.append({**event, "change": (what, change)})

    def counted(self) -> Simulation:
        """Turn changes of memory into levels, once all is simulated."""
        changes = sorted((e for e in self.events if "change" in e), key=lambda e: e["ts"])
        for event in changes:
            what, change = event.pop("change")
            self.memory[what] += change
            event["args"] = dict(self.memory)
        return self


def group_facts(machine: Machine, group: str) -> dict[str, Any]:
    numel, world = machine.numel(group), machine.world
    padded = int(numel * (1 + machine.padding))
    others = world - 1
    return {
        "name": group,
        "modules": [group],
        "parameters": 9,
        "numel": numel,
        "padded_numel": padded,
        "shard_bytes": 4 * padded // world,
        "gathered_bytes": 2 * padded,
        "gather_bytes": 2 * padded * others // world,
        "reduce_bytes": 4 * padded * others // world,
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "wire_dtype": "float32",
        "world": world,
        "replicas": 1,
    }


def simulated_trace(machine: Machine, rank: int = 0, *, num_steps: int = 1) -> dict[str, Any]:
    simulation = Simulation(machine, rank)
    trace = simulation.trace(num_steps=num_steps)
    simulation.counted()
    return trace


def write_traces(folder: Path, machine: Machine, *, num_steps: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(machine.world):
        trace = simulated_trace(machine, rank, num_steps=num_steps)
        (folder / f"rank_{rank:05}.json").write_text(json.dumps(trace))


def metrics_records(steps: int = 120, world: int = 2) -> list[dict[str, Any]]:
    noise = random.Random(0)
    records: list[dict[str, Any]] = [
        {
            "kind": "start",
            "step": 0,
            "world": world,
            "device": "cuda",
            "parameters": 27_000_000,
            "unsharded_bytes": 108_000_000,
            "rank_bytes": [54_000_000] * world,
            "tokens_per_step": 2048,
            "steps": steps,
            "model": "decoder, 8 layers of width 512",
            "data": "Python's standard library",
            "versions": {"fullshard": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
            "resumed_from": None,
        },
        {"kind": "evaluation", "step": 0, "loss": 5.6},
    ]
    for step in range(1, steps + 1):
        warm = min(1.0, step / (0.1 * steps))
        records.append(
            {
                "kind": "step",
                "step": step,
                "loss": 1.4 + 4.1 * math.exp(-step / (0.3 * steps)) + noise.gauss(0, 0.05),
                "grad_norm": 0.6 + math.exp(-step / 20) + noise.uniform(0, 0.2),
                "lr": 3e-3 * warm * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2),
                "tokens": 2048 * step,
                "step_s": 0.06 + noise.uniform(0, 0.004) + (0.05 if step == 1 else 0),
                "memory_bytes": 812_000_000,
            }
        )
        if step % (steps // 3) == 0:
            path = f"checkpoints/step_{step:08}"
            records.append({"kind": "checkpoint", "step": step, "path": path, "blocked_s": 0.01})
            records.append({"kind": "evaluation", "step": step, "loss": records[-2]["loss"] + 0.1})
    records.append({"kind": "samples", "step": steps, "texts": ["def main(self):\n    return 1\n"]})
    records.append({"kind": "end", "step": steps, "seconds": 0.06 * steps})
    return [{"time": 1.7e9 + i, **record} for i, record in enumerate(records)]


def write_metrics(folder: Path, records: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)


def write_run(folder: Path, machine: Machine, *, steps: int = 120, num_traced: int = 3) -> Path:
    write_metrics(folder, metrics_records(steps, machine.world))
    (folder / "config.toml").write_text(CONFIG.format(steps=steps, depth=machine.depth))
    write_traces(folder / "trace", machine, num_steps=num_traced)
    return folder


def hostile_run(folder: Path) -> Path:
    """Every text that a user can choose is out to break the page."""
    records = metrics_records(12)
    records[0] |= {"model": HOSTILE, "data": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    records += [
        {"kind": "trouble", "step": 5, "what": HOSTILE, "action": HOSTILE},
        {"kind": "stall", "step": 5, "ranks": [1], "where": HOSTILE, "report": HOSTILE},
        {"kind": "samples", "step": 12, "texts": [HOSTILE]},
    ]
    write_metrics(folder, records)
    (folder / "config.toml").write_text(f"[data]\npath = '''{HOSTILE}'''\n")
    trace = json.dumps(simulated_trace(Machine(slow_gathers={"layers.1": 5000})))
    trace = trace.replace('"layers.1"', json.dumps(HOSTILE))
    (folder / "rank_00000.json").write_text(trace)
    return folder
