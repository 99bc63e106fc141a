"""One rank of a run: it joins the process group, trains and leaves.

`launch` has decided which rank it is, and passes it as a `RankInfo`. The first rank owns the run's folder, files and
progress; an error there is raised on all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import log as checkpoint_log
from fullshard.divergence import monitor
from fullshard.errors import CheckpointError, FullshardError
from fullshard.programs.run_events import Watcher, all_of
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.continuation import check_continuation
from fullshard.programs.train.data import open_data
from fullshard.programs.train.data_record import record_of_all_ranks
from fullshard.programs.train.earlier_starts import read_earlier_starts
from fullshard.programs.train.export import export_newest, has_checkpoint
from fullshard.programs.train.loop import Job, Training
from fullshard.programs.train.metrics_file import MetricsFile
from fullshard.programs.train.mlflow_run import MlflowRun
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.progress import RunProgress, showing_progress
from fullshard.programs.train.rank_info import RankInfo
from fullshard.programs.train.rendezvous import store_of_torchrun
from fullshard.programs.train.result import TrainResult
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.sharded_model import freeze_others
from fullshard.programs.train.stop import COLLECTIVE_ERRORS, noticing_stop_requests
from fullshard.programs.train.stored_weights import check_weights
from fullshard.programs.train.tensorboard_files import TensorBoardFiles
from fullshard.programs.train.trackers import Tracking
from fullshard.programs.train.wandb_run import WandbRun


def run_rank(config: RunConfig, rank_info: RankInfo, *, fresh: bool = False) -> TrainResult:
    """Train as one of the ranks; the first rank shows the progress.

    Args:
        config: the run.
        rank_info: which of the ranks this is.
        fresh: start a new run; an old one in the folder is moved aside, after this one was found to be right.

    Raises:
        ConfigurationError: the run cannot be started or resumed.
        StoppedBySignalError: it was asked to stop, and has saved a checkpoint.
        BadStepError: a step was bad.
        CheckpointError: a checkpoint cannot be written, or the newest cannot be read.
    """
    # The loop raises errors of a save when it waits for it. Without this, each rank would also log them.
    checkpoint_log.addHandler(logging.NullHandler())
    device = claim_device(rank_info)
    # Read before the process group exists: an error here must not leave other ranks waiting in a collective.
    source = open_model(config)
    data = open_data(config, source)
    # Signals are noted from here on: until the ranks have met there is nothing to save, and SIGTERM may end them.
    with process_group(rank_info, device, config.run.timeout), noticing_stop_requests() as stop:
        job = Job(config=config, source=source, data=data, device=device, stop=stop)
        return run_in_folder(job, Console(), fresh=fresh)


def run_in_folder(job: Job, console: Console, *, fresh: bool = False) -> TrainResult:
    """Start or resume a run in its folder, on all ranks of the default process group; `fresh` as in `run_rank`."""
    ranks, config, folder = RankGroup(), job.config, job.folder
    data = record_of_all_ranks(job.data, ranks)
    if ranks.on_first(lambda: fresh or not has_checkpoint(folder)):
        ranks.on_each(lambda: _check_model(job))
    with ExitStack() as stack:
        watchers: list[Watcher] = []
        progress = None
        if ranks.is_first:
            progress = stack.enter_context(
                showing_progress(console, folder.path, config.log.console)
            )

        def begin() -> bool:
            """Lock the folder, and say whether its run has steps left."""
            if fresh and (old := folder.move_aside()) and progress is not None:
                progress.print_last(f"The run that was in {folder.path} is now in {old}.")
            stack.enter_context(folder.locked())
            if not folder.has_steps_left(config):
                return False
            earlier = read_earlier_starts(folder.metrics)
            notes = check_continuation(folder, config, earlier, data)
            # The configuration first: a folder without one belongs to no run.
            folder.begin(config)
            data.write(folder.data)
            if progress is not None:
                progress.count_earlier(earlier)
                for note in notes:
                    progress.print_message(note)
            for watcher in _recorders(config, folder, progress):
                watchers.append(stack.enter_context(closing(watcher)))
            return True

        result = TrainResult(was_finished=True)
        if ranks.on_first(begin):
            # Files first, so that what is shown has been written.
            watch = all_of([*watchers, progress] if progress is not None else [])
            result = Training(job, watch).run()
        elif progress is not None:
            progress.print_last(f"The run in {folder.path} is finished.")
        failure = _export(job, progress) if config.checkpoint.export else None
        if progress is not None and config.log.report:
            result.report = _report(folder, progress)
        if failure is not None:  # after the report, because the run itself has succeeded
            raise failure
        return result


def _recorders(
    config: RunConfig, folder: RunFolder, progress: RunProgress | None
) -> Iterator[MetricsFile | Tracking]:
    """Yield the watchers that keep the events of a run, on the first rank."""
    yield MetricsFile(folder.metrics, every=config.log.every)
    warn = progress.print_message if progress is not None else print
    if config.log.tensorboard:
        yield Tracking("TensorBoard", TensorBoardFiles(folder.tensorboard), warn)
    if config.log.wandb:
        yield Tracking("Weights & Biases", WandbRun(folder, config), warn)
    if config.log.mlflow:
        yield Tracking("MLflow", MlflowRun(folder, config), warn)


def _check_model(job: Job) -> None:
    """Raise if fields do not fit the model, before the folder of a new run has a configuration that they are fixed in."""
    check_weights(job.config, job.source)
    if job.config.model.trainable is not None:
        freeze_others(job.source.build(), job.config.model.trainable)


def _export(job: Job, progress: RunProgress | None) -> CheckpointError | None:
    """Export the model, and print where it is; return the error if that fails, which all ranks have."""
    try:
        mark = export_newest(
            job.folder,
            job.source,
            ema=job.config.checkpoint.export_ema,
            best=job.config.checkpoint.best,
        )
    except CheckpointError as error:
        return CheckpointError(
            f"The run is trained and saved, but its model was not exported: {error}"
        )
    if progress is not None:
        progress.print_last(
            f"Model   {job.folder.exported_model}, after step {mark.step}, for transformers"
        )
    return None


def _report(folder: RunFolder, progress: RunProgress) -> Path | None:
    """Write the report, and print where it is."""
    from fullshard.programs.report import write_report

    try:
        report = write_report(folder.path)
    except (
        FullshardError
    ) as error:  # for example plotly is not installed; the run itself has succeeded
        progress.print_last(f"There is no report: {error}")
        return None
    progress.print_last(f"Report  {report}")
    return report


@contextmanager
def process_group(rank_info: RankInfo, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Join the process group of all ranks within the block."""
    store = store_of_torchrun(
        os.environ, rank=rank_info.rank, world=rank_info.world, timeout_s=timeout_s
    )
    dist.init_process_group(
        # gloo for tensors in host memory: offloaded gradients, checkpoints, what ranks agree on.
        backend="cpu:gloo,cuda:nccl" if rank_info.device == "cuda" else "gloo",
        init_method=rank_info.rendezvous if store is None else None,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world,
        device_id=device if rank_info.device == "cuda" else None,
        timeout=timedelta(seconds=timeout_s),
    )
    monitor.install()
    try:
        yield
    except COLLECTIVE_ERRORS:
        dist.destroy_process_group()
        raise
    # Not in a finally: after other errors the other ranks may be in a collective, and destroying the group could wait for
    # them.
    dist.destroy_process_group()


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def claim_device(rank_info: RankInfo) -> torch.device:
    """Return this rank's device, after making it current: a GPU of its own, or the CPU.

    The rank gets its share of the cores: for all that it computes on the CPU, and for updates in host memory.
    """
    torch.set_num_threads(max(1, num_cores() // rank_info.local_world))
    if rank_info.device == "cuda":
        torch.cuda.set_device(rank_info.local_rank)
        return torch.device("cuda", rank_info.local_rank)
    return torch.device("cpu")
