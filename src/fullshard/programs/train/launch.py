"""The start of a run: on ranks that are started here, or as one rank of a launcher.

    start(config)
      torchrun, srun   this process is a rank already        -> run_rank
      else             n processes on this machine           -> run_rank in each

Problems are found here, before any rank starts: first by `problems_here`, without the seconds that importing torch takes,
then those that only torch can find.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from fullshard.errors import CheckpointError, ConfigurationError, FullshardError
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.train import slurm
from fullshard.programs.train.after_failure import with_advice
from fullshard.programs.train.config import OFFLOAD_ON_CPU, DeviceChoice, Problem, RunConfig
from fullshard.programs.train.config_fields import config_sections
from fullshard.programs.train.exported_model import check_target
from fullshard.programs.train.memory_kills import memory_kills
from fullshard.programs.train.preflight import data_problems, model_problems
from fullshard.programs.train.processes import (
    ProcessResults,
    RankFailedError,
    Result,
    StoppedError,
    run_in_processes,
)
from fullshard.programs.train.rank_info import (
    Device,
    RankInfo,
    has_torchrun,
    local_rank_infos,
    rank_info_of_torchrun,
)
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.stop import COLLECTIVE_ERRORS, StoppedBySignalError

DEFAULT_CPU_RANKS = 2


def start(config: RunConfig, *, fresh: bool = False) -> None:
    """Train, and return when this process is done.

    Args:
        config: a configuration that `read_config` has checked with `problems_here`.
        fresh: start a new run; an old one in the folder is moved aside.

    Raises:
        ConfigurationError: the configuration does not fit this machine; no rank was started.
        RankFailedError: a rank started here failed; all of them have ended.
        BadStepError: a step was bad, and the configuration says to stop then.
        CheckpointError: a checkpoint cannot be written, or read.
        StoppedError, StoppedBySignalError: this process was asked to stop, and did.
    """
    device = choose_device(config.run.device)
    rank_info = launched_rank_info(os.environ, device)
    if rank_info is not None:
        _check_machine(config, device, world=rank_info.world, ranks_here=rank_info.local_world)
        join(config, rank_info)
    else:
        ranks = ranks_here(config, device)
        _check_machine(config, device, world=ranks, ranks_here=ranks)
        launch(config, ranks, device, fresh=fresh)


# --- ranks -----------------------------------------------------------------------------------------------


def launched_rank_info(environment: Mapping[str, str], device: Device) -> RankInfo | None:
    """Return the rank that a launcher made of this process; None if there is no launcher."""
    if has_torchrun(environment):
        return rank_info_of_torchrun(environment, device)
    if slurm.has_step(environment):
        return slurm.rank_info_of_slurm(environment, device)
    return None


def reports_errors(environment: Mapping[str, str]) -> bool:
    """Say whether this process prints errors that all ranks have: without a launcher, or as rank 0."""
    if has_torchrun(environment):
        return environment["RANK"] == "0"
    return not slurm.has_step(environment) or environment["SLURM_PROCID"] == "0"


def join(config: RunConfig, rank_info: RankInfo) -> None:
    """Train as one rank of a launcher."""
    # A launcher may pass Ctrl-C on as SIGINT; a rank treats it like SIGTERM.
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    from fullshard.programs.train.rank import run_rank

    run_rank(config, rank_info)


def launch(config: RunConfig, ranks: int, device: Device, *, fresh: bool) -> None:
    """Train on ranks that are started here; `fresh` as in `start`."""
    kills_before = memory_kills()
    work = partial(_launched_rank, config, fresh=fresh)
    try:
        ended = on_local_ranks(work, ranks, device, on_stop=_say_stopping)
    except (RankFailedError, StoppedError) as error:
        error.args = (with_advice(error, RunFolder(config.run.folder), kills_before),)
        raise
    outcome = ended.results[0]
    if isinstance(outcome, StoppedBySignalError):
        raise StoppedError(str(outcome), ended.stopped_by or signal.SIGTERM)
    if outcome is not None:
        raise outcome


def ranks_here(config: RunConfig, device: Device) -> int:
    """Return how many ranks to start on this machine."""
    return config.run.ranks or (num_gpus() if device == "cuda" else DEFAULT_CPU_RANKS)


def on_local_ranks(
    work: Callable[[RankInfo], Result],
    ranks: int,
    device: Device,
    *,
    on_stop: Callable[[signal.Signals], None] = lambda by: None,
) -> ProcessResults[Result]:
    """Call a function as each of the ranks that are started here, and return the results."""
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        # A file and not a port: another process could take a free port before the ranks do.
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        rank_infos = local_rank_infos(ranks, device, rendezvous=rendezvous)
        return run_in_processes(work, rank_infos, on_stop=on_stop)


def use_loopback() -> None:
    """Let gloo use the loopback, if all ranks are on this machine: it need not resolve the machine's name."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _launched_rank(config: RunConfig, rank_info: RankInfo, *, fresh: bool) -> FullshardError | None:
    """Train as a rank; return an error that all ranks raise together, since it is not a failure of this one."""
    use_loopback()
    from fullshard.programs.train.rank import run_rank

    try:
        run_rank(config, rank_info, fresh=fresh)
    except COLLECTIVE_ERRORS as error:
        return error
    return None


def _say_stopping(by: signal.Signals) -> None:
    cause = "Ctrl-C" if by == signal.SIGINT else by.name
    print(
        f"\n{cause}: the ranks save a checkpoint and leave. Ctrl-C ends them at once.",
        file=broken_pipe_safe(sys.stderr),  # after a SIGHUP there is no terminal
        flush=True,
    )


# --- problems --------------------------------------------------------------------------------------------


def problems_here(config: RunConfig, *, fresh: bool = False) -> Iterator[Problem]:
    """Yield the problems of a configuration on this machine that can be found without torch."""
    launched = None
    try:
        # Only its world is used: whether there is a GPU is not known yet.
        launched = launched_rank_info(os.environ, "cpu")
    except ConfigurationError as error:
        yield Problem((), str(error))
    if launched is not None:
        yield from _problems_under_launcher(config, launched.world, fresh=fresh)
    # If the number of GPUs is needed, which only torch knows: the smallest possible world, which divides all others.
    default = DEFAULT_CPU_RANKS if config.run.device == "cpu" else config.sharding.replicas
    yield from config.world_problems(launched.world if launched else config.run.ranks or default)
    yield from model_problems(config)
    yield from data_problems(config)
    if not fresh:
        yield from _folder_problems(config)
        yield from _export_problems(config)
    weights = config.model.weights
    # A run that is resumed does not read them again.
    if weights is not None and not weights.exists() and (fresh or not _has_run(config)):
        yield Problem(
            ("model.weights",),
            f"model.weights must be the folder of a run, a checkpoint or a Hugging Face folder; there is nothing at {weights}.",
        )
    for package in ("tensorboard", "wandb", "mlflow"):
        if getattr(config.log, package) and importlib.util.find_spec(package) is None:
            yield Problem(
                (f"log.{package}",),
                f"log.{package} needs the package {package}. Install the extra (pip install 'fullshard[{package}]'), or "
                "leave it out.",
            )


def _problems_under_launcher(config: RunConfig, world: int, *, fresh: bool) -> Iterator[Problem]:
    if config.run.ranks not in (None, world):
        yield Problem(
            ("run.ranks",),
            f"run.ranks must agree with the launcher: got {config.run.ranks}, but it has started {world} "
            "ranks. Leave it out under a launcher.",
        )
    if fresh:
        yield Problem(
            (),
            "--fresh is not allowed under a launcher: ranks that are restarted after a failure would start a new run, "
            "too. Move the folder away, or choose another run.folder.",
        )


def _has_run(config: RunConfig) -> bool:
    return RunFolder(config.run.folder).config.is_file()


def _folder_problems(config: RunConfig) -> Iterator[Problem]:
    try:
        RunFolder(config.run.folder).check(config)
    except ConfigurationError as error:
        yield Problem(tuple(config_sections()), str(error))


def _export_problems(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.export:
        try:
            check_target(RunFolder(config.run.folder).exported_model)
        except CheckpointError as error:
            yield Problem(
                ("checkpoint.export", "run.folder"), f"{error} Or leave checkpoint.export out."
            )


def choose_device(choice: DeviceChoice) -> Device:
    """Return the device that a configuration asks for.

    Raises:
        ConfigurationError: the machine does not have it.
    """
    if choice == "cpu":
        return "cpu"
    if num_gpus() > 0:
        return "cuda"
    if choice == "cuda":
        raise ConfigurationError(
            "run.device = cuda needs a GPU that torch can use, and there is none. Leave it out, or "
            "use cpu."
        )
    return "cpu"


def num_gpus() -> int:
    """Return how many GPUs torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_machine(config: RunConfig, device: Device, *, world: int, ranks_here: int) -> None:
    """Raise a ConfigurationError for problems that could not be found without torch."""
    problems = [problem.text for problem in config.world_problems(world)]
    if device == "cpu" and config.sharding.offload:
        problems.append(OFFLOAD_ON_CPU)
    if device == "cuda" and ranks_here > num_gpus():
        problems.append(
            f"Each rank needs a GPU of its own: {ranks_here} ranks on this machine, {num_gpus()} GPUs "
            "that each of them can see. Start fewer ranks here, or use run.device = cpu."
        )
    if problems:
        raise ConfigurationError("\n".join(problems))
