"""The start of an evaluation: on ranks that are started here, or as one rank of a launcher. This file imports no torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from fullshard.errors import ConfigurationError, FullshardError
from fullshard.programs.evaluate_tool.held_out import HeldOutResult
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.launch import (
    choose_device,
    launched_rank_info,
    num_gpus,
    on_local_ranks,
    ranks_here,
    use_loopback,
)
from fullshard.programs.train.processes import StoppedError
from fullshard.programs.train.rank_info import RankInfo
from fullshard.programs.train.stop import COLLECTIVE_ERRORS


def start(config: RunConfig, checkpoint: Path | None) -> HeldOutResult:
    """Evaluate a checkpoint of a run, the newest by default, and return the result.

    Raises:
        ConfigurationError: model, data or machine do not fit.
        CheckpointError: the checkpoint cannot be read.
        RankFailedError: a rank started here failed; all of them have ended.
        StoppedError: this process was asked to stop.
    """
    device = choose_device(config.run.device)
    rank_info = launched_rank_info(os.environ, device)
    if rank_info is not None:
        from fullshard.programs.evaluate_tool.rank import run_rank

        return run_rank(config, checkpoint, rank_info)
    ranks = ranks_here(config, device)
    if device == "cuda" and ranks > num_gpus():
        raise ConfigurationError(
            f"Each rank needs a GPU of its own: {ranks} ranks, {num_gpus()} GPUs. Start fewer ranks."
        )
    try:
        ended = on_local_ranks(partial(_launched_rank, config, checkpoint), ranks, device)
    except StoppedError as error:
        raise StoppedError("Stopped.", error.by) from None  # there was nothing to save
    result = ended.results[0]
    if isinstance(result, FullshardError):
        raise result
    return result


def _launched_rank(
    config: RunConfig, checkpoint: Path | None, rank_info: RankInfo
) -> HeldOutResult | FullshardError:
    """Evaluate as a rank; return an error that all ranks raise together, since it is not a failure of this one."""
    use_loopback()
    from fullshard.programs.evaluate_tool.rank import run_rank

    try:
        return run_rank(config, checkpoint, rank_info)
    except COLLECTIVE_ERRORS as error:
        return error
