"""The engine on a device that does not exist does what it does on a real one, and all of it is written down."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.programs.inspect_tool.cost import measure
from fullshard.programs.plan_tool.program import (
    Allocate,
    Collective,
    Free,
    HostWork,
    Kernel,
    Launch,
    Program,
    Record,
    Wait,
)
from fullshard.programs.plan_tool.recording import Recorder
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.optimizer import build_optimizer
from fullshard.programs.train.sharded_model import FullyShardModel, build_model
from fullshard.virtual import known_operations
from fullshard.virtual.known_operations import KnownOperation
from tests.helpers.fake import fake_world
from tests.helpers.groups import leave_group
from tests.helpers.traffic import Traffic

WORLD = 4
CPU = torch.device("cpu")


def config(**sections: dict[str, Any]) -> RunConfig:
    """Return a small run, with some fields changed."""
    run = RunConfig()
    changes: dict[str, dict[str, Any]] = {
        "model": {"layers": 3, "width": 32, "heads": 2},
        "data": {"context": 16},
        "train": {"batch": 2 * WORLD},
    }
    for name, fields in sections.items():
        changes.setdefault(name, {}).update(fields)
    for name, fields in changes.items():
        run = replace(run, **{name: replace(getattr(run, name), **fields)})
    return run


def recorded(run: RunConfig, world: int = WORLD) -> Program:
    return record_step(run, world, open_model(run)).program


def launched(program: Program) -> list[Launch]:
    step = program.entries[program.begin : program.end]
    return [entry for entry in step if isinstance(entry, Launch)]


def collectives(program: Program) -> list[tuple[str, int]]:
    works = [entry.work for entry in launched(program)]
    return [(work.kind, work.nbytes) for work in works if isinstance(work, Collective)]


_NAMES = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


def real_collectives(run: RunConfig) -> list[tuple[str, int]]:
    """Return the collectives of the second step of a run, with real tensors on the CPU."""
    source = open_model(run)
    with fake_world(WORLD):
        model = build_model(run, source, CPU)
        assert isinstance(model, FullyShardModel)
        for parameter in model.module.parameters():
            nn.init.zeros_(parameter)
        optimizer = build_optimizer(run.optimizer, model)
        rows = run.train.batch // WORLD
        windows = torch.zeros(rows, run.data.context + 1, dtype=torch.int64)
        for _ in range(2):
            with Traffic() as traffic:
                for part in windows.chunk(run.train.accumulate):
                    last = part.data_ptr() == windows.chunk(run.train.accumulate)[-1].data_ptr()
                    model.module.set_requires_gradient_sync(last)  # type: ignore[operator]
                    window_losses(source, model.module, part).sum().backward()
                model.clip_gradients(1.0)
                optimizer.step()
                optimizer.zero_grad()
    kinds = [
        next(_NAMES[each] for each in _NAMES if name.startswith(each)) for name in traffic.names
    ]
    return list(zip(kinds, traffic.nbytes, strict=True))


@pytest.mark.parametrize(
    "run",
    [
        config(
            sharding={"reshard_after_forward": False},
            compute={"precision": "bf16", "wire": "bf16"},
        ),
        config(
            sharding={"replicas": 2, "prefetch": 2},
            compute={"checkpoint_activations": "blocks", "precision": "bf16"},
        ),
        config(train={"accumulate": 2}, sharding={"groups": "plan"}),
    ],
    ids=["kept, bf16 wire", "HSDP, recomputed", "accumulated, planned groups"],
)
def test_the_collectives_of_a_step_are_those_of_the_real_engine(run: RunConfig) -> None:
    step = record_step(run, WORLD, open_model(run), has_streams=False)
    assert collectives(step.program) == real_collectives(run)


def test_operations_that_were_seen_before_are_recorded_as_if_they_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config(compute={"precision": "bf16"})
    remembered = recorded(run)
    monkeypatch.setattr(KnownOperation, "result", property(lambda self: pytest.fail("used")))
    original = KnownOperation.__init__

    def forgetful(self: Any, *args: Any) -> None:
        original(self, *args)
        self.outputs = None

    monkeypatch.setattr(KnownOperation, "__init__", forgetful)
    monkeypatch.setattr(known_operations, "_KNOWN", {})
    assert recorded(run).entries == remembered.entries


def test_numbers_of_other_types_make_results_of_other_dtypes() -> None:
    with Recorder().recording():
        counts = torch.empty(3, dtype=torch.int64, device="meta")
        made = [counts * 2, counts * 2.0, counts + 1, counts + 1.0, counts.bool() + True]
    dtypes = torch.int64, torch.float32, torch.int64, torch.float32, torch.bool
    assert [each.dtype for each in made] == list(dtypes)


def test_all_memory_of_a_step_is_given_back_but_what_stays_between_steps() -> None:
    run = config(optimizer={"ema": 0.9})
    program = recorded(run)
    balance: Counter[int] = Counter()
    for entry in program.entries[program.begin : program.end]:
        if isinstance(entry, Allocate):
            balance[entry.memory] += entry.nbytes
        elif isinstance(entry, Free):
            balance.pop(entry.memory, None)
    assert not balance
    count = sum(p.numel() for p in open_model(run).build().parameters())
    held: Counter[str] = Counter()
    for entry in program.entries[: program.begin]:
        if isinstance(entry, Allocate):
            balance[entry.memory] = entry.nbytes
        elif isinstance(entry, Free):
            del balance[entry.memory]
    for memory, nbytes in balance.items():
        held[program.kinds[memory]] += nbytes
    shard = 4 * count / WORLD
    assert held["parameters"] == pytest.approx(shard, rel=0.02)
    assert held["optimizer"] == pytest.approx(3 * shard, rel=0.02), "Adam, EMA"


def state_bytes(program: Program) -> int:
    sizes = {e.memory: e.nbytes for e in program.entries if isinstance(e, Allocate)}
    return sum(sizes[memory] for memory, kind in program.kinds.items() if kind == "optimizer")


def test_the_state_of_muon_is_what_inspect_says() -> None:
    run = config(optimizer={"name": "muon"})
    expected = measure(run, WORLD).rank
    leave_group()
    state = state_bytes(recorded(run))
    assert expected.parameters < state < 1.5 * expected.parameters
    assert state == pytest.approx(expected.optimizer, rel=0.01)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_replicas_divide_the_optimizer_state_and_gather_what_they_updated(name: str) -> None:
    def facts(divides: bool) -> tuple[int, int]:
        section = {"shard_over_replicas": divides, "name": name}
        program = recorded(config(sharding={"replicas": 2}, optimizer=section))
        gathers = [
            entry
            for entry in launched(program)
            if isinstance(entry.work, Collective) and entry.phase == "optimizer"
        ]
        return state_bytes(program), sum(entry.work.kind == "all_gather" for entry in gathers)

    (whole, none), (part, some) = facts(False), facts(True)
    assert none == 0 < some
    assert part == pytest.approx(whole / 2, rel=0.1)


def test_the_compiled_update_of_adamw8bit_is_one_kernel_over_parameters_gradients_and_codes() -> (
    None
):
    run = config(optimizer={"name": "adamw8bit"}, model={"width": 64})
    program = recorded(run)
    updates = [
        entry.work
        for entry in launched(program)
        if isinstance(entry.work, Kernel) and entry.work.name == "AdamW8bit.update_rows"
    ]
    count = sum(p.numel() for p in open_model(run).build().parameters()) / WORLD
    # A parameter and two codes are read and written, a gradient is read: 16 bytes an element, and little for each block.
    assert sum(work.nbytes for work in updates) == pytest.approx(16 * count, rel=0.05)
    on_cpu = record_step(run, WORLD, open_model(run), has_streams=False).program
    assert not any(
        isinstance(e.work, Kernel) and "update_rows" in e.work.name for e in launched(on_cpu)
    )


def test_an_optimizer_s_gradients_are_not_copied() -> None:
    program = recorded(config())
    works = [entry.work for entry in launched(program) if entry.phase == "optimizer"]
    copied = [w.nbytes for w in works if isinstance(w, Kernel) and "copy" in w.name]
    assert max(copied) < 1000  # norms


def test_recomputation_runs_the_blocks_again_within_backward() -> None:
    kept, again = config(), config(compute={"checkpoint_activations": "blocks"})

    def flops(run: RunConfig, phase: str) -> int:
        works = [entry.work for entry in launched(recorded(run)) if entry.phase == phase]
        return sum(work.flops for work in works if isinstance(work, Kernel))

    assert flops(kept, "forward") == flops(again, "forward")
    assert flops(kept, "backward") < flops(again, "backward") < 1.5 * flops(kept, "backward")


def test_without_streams_the_host_waits_for_collectives() -> None:
    run = config()
    program = record_step(run, WORLD, open_model(run), has_streams=False).program
    waits = [e for e in program.entries[program.begin :] if isinstance(e, Wait)]
    assert collectives(program) == collectives(recorded(run))  # without replicas, in the same order
    assert waits
    assert {wait.stream for wait in waits} == {-1}


def test_a_hundred_thousand_ranks_are_no_more_work() -> None:
    run = config(train={"batch": 100_000}, sharding={"replicas": 1000})
    program = record_step(run, 100_000, open_model(run)).program
    ranks = {e.work.ranks for e in launched(program) if isinstance(e.work, Collective)}
    assert ranks == {100, 1000}


def test_what_recomputation_costs_the_host_is_counted() -> None:
    found = {}
    for what in ("none", "blocks", "selective"):
        program = recorded(config(compute={"checkpoint_activations": what}))
        step = program.entries[program.begin : program.end]
        found[what] = Counter(entry.kind for entry in step if isinstance(entry, HostWork))
    hooks = found["none"]["hook"]
    assert found["none"] == {"hook": hooks}
    assert found["blocks"] == {"hook": hooks, "checkpoint": 3, "recomputation": 3}
    assert found["selective"].pop("decision") > 100
    assert found["selective"] == found["blocks"]


def test_memory_that_was_needed_to_build_a_model_stays_reserved() -> None:
    """Shards are allocated one by one, and then packed into one buffer for each group."""
    program = recorded(config())
    steps = (i for i, e in enumerate(program.entries) if isinstance(e, Record))
    first = next(steps)  # of the first gather
    before = program.entries[:first]
    taken = {entry.memory: entry.nbytes for entry in before if isinstance(entry, Allocate)}
    given = {entry.memory for entry in before if isinstance(entry, Free)}
    held = sum(n for memory, n in taken.items() if program.kinds[memory] == "parameters")
    assert 0.9 * held < sum(taken[memory] for memory in given) < 1.1 * held
