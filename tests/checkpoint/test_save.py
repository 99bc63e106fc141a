"""Saving now and by a thread, what is in a checkpoint beside tensors, and who may save what."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from fullshard import CheckpointError, ConfigurationError, checkpoint, fully_shard
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folders import publication
from fullshard.checkpoint.folders.unfinished_save import UnfinishedSave
from fullshard.checkpoint.host_copies import HostMemory, Snapshot
from tests.helpers.checkpointed import Setting, train, whole_state
from tests.helpers.compare import assert_equal


def test_one_process_without_ranks(tmp_path: Path) -> None:
    setting = Setting(api="plain")
    model, optimizer = setting.build()
    train(model, optimizer, range(2))
    rng = torch.get_rng_state()
    extra = {"step": 2, "rng": rng, "betas": (0.9, None)}
    progress: list[tuple[int, int]] = []
    saved = checkpoint.save(
        tmp_path / "a",
        model,
        optimizer,
        extra=extra,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert progress[-1][0] == progress[-1][1] <= saved.nbytes
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert "iB/s)" in str(saved)
    expected = whole_state(model, optimizer)
    again, its_optimizer = setting.build(seed=5)
    progress.clear()
    loaded = checkpoint.load(
        tmp_path / "a",
        again,
        its_optimizer,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert progress[-1] == (loaded.nbytes, loaded.nbytes)
    assert loaded.extra["betas"] == (0.9, None) and torch.equal(loaded.extra["rng"], rng)
    assert_equal(whole_state(again, its_optimizer), expected)


def test_files_are_what_others_can_read(tmp_path: Path) -> None:
    model, optimizer = Setting(api="plain").build()
    checkpoint.save(tmp_path / "a", model, optimizer)
    (file,) = tmp_path.glob("a/data-*/*.safetensors")
    with safe_open(file, "pt") as found:
        for key, value in model.state_dict().items():
            if key != "head.weight":  # tied
                assert torch.equal(found.get_tensor(f"model/{key}"), value)


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    model, _ = Setting(api="plain").build()
    with pytest.raises(
        CheckpointError, match=r"(?s)extra\.when: builtins\.set.*extra\.f: .*function"
    ):
        checkpoint.save(tmp_path / "a", model, extra={"when": {1}, "f": lambda: 1})
    with pytest.raises(ConfigurationError, match="keep_last must be at least 1"):
        checkpoint.save(tmp_path / "a", model, keep_last=0)
    with pytest.raises(ConfigurationError, match="when_busy must be"):
        checkpoint.async_save(tmp_path / "a", model, when_busy="never")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model, _ = Setting(api="plain").build()
    for step in (8, 9, 10):
        saved = checkpoint.save(tmp_path / f"step-{step}", model, extra=step, keep_last=2)
        assert saved.removed == ((tmp_path / "step-8",) if step == 10 else ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-9"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"


def test_an_error_of_the_thread_is_logged_and_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = Setting(api="plain").build()
    (tmp_path / "file").touch()
    pending = checkpoint.async_save(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match="file"):
        pending.wait()
    assert "A checkpoint was not saved" in caplog.text
    checkpoint.save(tmp_path / "a", model)  # the error was seen, and is not raised again
    checkpoint.async_save(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match="file"):
        checkpoint.save(tmp_path / "a", model)
    checkpoint.save(tmp_path / "a", model)


class Gate:
    """Holds the writing thread back."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._begin = publication.begin

    def __enter__(self) -> Gate:
        publication.begin = self._wait  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        publication.begin = self._begin

    def _wait(self, path: Path) -> UnfinishedSave:
        assert self.open.wait(30)
        return self._begin(path)


def test_the_copies_can_be_waited_for_while_the_thread_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = Setting(api="plain").build()
    waiting: list[threading.Thread] = []
    wait = Snapshot.wait

    def noted_wait(self: Snapshot) -> None:
        waiting.append(threading.current_thread())
        wait(self)

    monkeypatch.setattr(Snapshot, "wait", noted_wait)
    expected = whole_state(model, optimizer)
    with Gate():
        pending = checkpoint.async_save(tmp_path / "a", model)
        pending.wait_for_copies()
        assert threading.current_thread() in waiting and not pending.done()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    pending.wait()
    checkpoint.load(tmp_path / "a", model)
    assert_equal(whole_state(model, optimizer), expected)


def train_while_saving(folder: Path, api: str) -> None:
    setting = Setting(api=api)
    model, optimizer = setting.build()
    train(model, optimizer, range(1))
    expected = whole_state(model, optimizer)
    extra = {"steps": [1]}
    with Gate() as gate:
        pending = checkpoint.async_save(folder / "a", model, optimizer, extra=extra)
        extra["steps"].append(2)
        train(model, optimizer, range(1, 3))
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        assert not pending.done() and checkpoint.latest(folder) is None
        with pytest.raises(TimeoutError):
            pending.wait(timeout=0.01)
        with pytest.raises(CheckpointError, match="only one save may be in flight"):
            checkpoint.async_save(folder / "b", model, optimizer, when_busy="refuse")
        gate.open.set()
        second = checkpoint.async_save(folder / "b", model, optimizer, extra=2)
    assert pending.done()
    assert pending.wait().path == folder / "a"
    assert second.wait().nbytes == pending.wait().nbytes
    later = whole_state(model, optimizer)
    loaded = checkpoint.load(folder / "a", model, optimizer)
    assert loaded.extra == {"steps": [1]}
    assert_equal(whole_state(model, optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    checkpoint.load(folder / "b", model, optimizer)
    assert_equal(whole_state(model, optimizer), later)


@pytest.mark.parametrize("api", ["functional", "wrapper"])
def test_training_goes_on_while_a_thread_saves(world: Any, tmp_path: Path, api: str) -> None:
    world(2).run(train_while_saving, tmp_path, api)


def save_stages(folder: Path) -> None:
    """Each rank has a layer of its own, as in a pipeline; and they share one."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 5)})
    torch.manual_seed(9)
    stage["shared"] = nn.Linear(4, 3)
    fully_shard(stage["shared"])
    if rank:
        with pytest.raises(
            CheckpointError, match=r"(?s)rank 1: .*layer1.weight: here, not on rank 0"
        ):
            checkpoint.save(folder / "a", stage)
    else:
        with pytest.raises(CheckpointError, match="layer1"):
            checkpoint.save(folder / "a", stage)
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    fully_shard(stage[f"layer{rank}"], mesh=DeviceMesh.from_group(groups[rank], "cpu"))
    optimizer = optim.Adam(stage.parameters())
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = whole_state(stage, optimizer)
    checkpoint.save(folder / "a", stage, optimizer)
    with torch.no_grad():
        for param in stage.parameters():
            param.zero_()
    optimizer.state.clear()
    checkpoint.load(folder / "a", stage, optimizer)
    assert_equal(whole_state(stage, optimizer), before)
    # Here what nobody takes is an error on both.
    del stage[f"layer{rank}"]
    with pytest.raises(
        CheckpointError, match=r"(?s)but the model and the optimizer do not:.*layer0.*layer1"
    ):
        checkpoint.load(folder / "a", stage, without_optimizer=True)


def test_stages_of_a_pipeline_have_one_checkpoint(world: Any, tmp_path: Path) -> None:
    world(2).run(save_stages, tmp_path)


def test_state_is_read_into_the_memory_it_has(tmp_path: Path) -> None:
    model, optimizer = Setting(api="plain").build()
    train(model, optimizer, range(1))
    checkpoint.save(tmp_path / "a", model, optimizer)
    expected = whole_state(model, optimizer)
    train(model, optimizer, range(1, 2))

    def places() -> list[int]:
        states = [optimizer.state[param] for param in model.parameters()]
        return [state[key].data_ptr() for state in states for key in ("exp_avg", "exp_avg_sq")]

    before = places()
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert places() == before
    assert_equal(whole_state(model, optimizer), expected)


def save_on_some(folder: Path) -> None:
    half = dist.new_group([0])
    model, _ = Setting().build()
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match=r"process_group lacks ranks \[1\]"):
            checkpoint.save(folder / "a", model, process_group=half)
    else:
        with pytest.raises(ConfigurationError, match="rank 1 is not"):
            checkpoint.save(folder / "a", model, process_group=half)


def test_all_holders_must_save(world: Any, tmp_path: Path) -> None:
    world(2).run(save_on_some, tmp_path)


def replicas_write_once(folder: Path) -> None:
    model, optimizer = Setting(replicas=2).build()
    train(model, optimizer, range(1))
    checkpoint.save(folder / "a", model, optimizer)


def test_replicas_write_in_turn_and_once(world: Any, tmp_path: Path) -> None:
    world(4).run(replicas_write_once, tmp_path)
    manifest = manifests.read(tmp_path / "a")
    writers = {
        stored.sharding.holders[0]
        for stored in manifest.tensors.values()
        if stored.sharding.cells > 1
    }
    assert writers == {(0, 1), (2, 3)}
    sizes = [record.nbytes for record in manifest.files.values()]
    assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes)
    data = sum(
        torch.Size(stored.shape).numel() * stored.dtype.itemsize
        for stored in manifest.tensors.values()
    )
    headers = 4 * 20_000
    assert data <= sum(sizes) < data + headers


def test_a_relative_path_is_one_in_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = Setting(api="plain").build()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    moved, wait = threading.Event(), Snapshot.wait

    def wait_longer(self: Snapshot) -> None:
        assert moved.wait(30)
        wait(self)

    monkeypatch.setattr(Snapshot, "wait", wait_longer)
    monkeypatch.chdir(tmp_path / "here")
    pending = checkpoint.async_save("step-1", model, keep_last=1)
    monkeypatch.chdir(tmp_path / "there")
    moved.set()
    assert pending.wait().path == tmp_path / "here" / "step-1"
    assert list((tmp_path / "there").iterdir()) == []


def test_copies_hold_the_next_step_back_whatever_other_hooks_there_are() -> None:
    order: list[str] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for name in ("first", "second"):  # two saves without a step between them
        snapshot = Snapshot([torch.ones(2)], HostMemory())
        snapshot._events = {torch.device("cpu"): torch.cpu.Event()}  # type: ignore[dict-item]
        snapshot._let_device_wait = lambda name=name: order.append(name)  # type: ignore[method-assign,misc]
        snapshot.hold_back(optimizer)
        optimizer.register_step_pre_hook(lambda *_: order.append("the user's"))
    optimizer.step()
    assert sorted(order) == ["first", "second", "the user's", "the user's"]
    optimizer.step()
    assert order[4:] == ["the user's", "the user's"]
