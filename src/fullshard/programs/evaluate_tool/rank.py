"""One rank of an evaluation: it loads its shards of a checkpoint and computes the loss, as the run itself did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.checkpoint.folders.found_checkpoint import FoundCheckpoint, read_together
from fullshard.checkpoint.load_plan import Loaded, load_source
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.sources.formats import open_found, with_base
from fullshard.checkpoint.sources.renamed_source import averages_as_model
from fullshard.programs.evaluate_tool.held_out import HeldOutResult
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.data import Data, open_data
from fullshard.programs.train.data_record import read_record, record_of
from fullshard.programs.train.evaluation import held_out_loss, spread_evenly
from fullshard.programs.train.export import newest_checkpoint
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.rank import claim_device, process_group
from fullshard.programs.train.rank_info import RankInfo
from fullshard.programs.train.resume import state_in
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.sharded_model import build_model


def run_rank(config: RunConfig, checkpoint: Path | None, rank_info: RankInfo) -> HeldOutResult:
    """Evaluate as one of the ranks; all return the same. See `evaluate`."""
    device = claim_device(rank_info)
    with process_group(rank_info, device, config.run.timeout):
        return evaluate(config, checkpoint, device)


def evaluate(config: RunConfig, checkpoint: Path | None, device: torch.device) -> HeldOutResult:
    """Return the loss of a checkpoint on held-out data. All ranks of the default process group call it.

    Args:
        config: The run; its folder has the checkpoint.
        checkpoint: The checkpoint; the newest by default.
        device: This rank's.

    Raises:
        ConfigurationError: model or data cannot be opened.
        CheckpointError: there is no checkpoint, or it cannot be read, or has no averages that are to be evaluated.
    """
    ranks = RankGroup()
    config = for_ranks(config, dist.get_world_size())
    source = ranks.on_each(lambda: open_model(config))
    data = ranks.on_each(lambda: open_data(config, source))
    note = ranks.on_first(lambda: _note_about(config, data))
    path = ranks.on_first(lambda: checkpoint or newest_checkpoint(RunFolder(config.run.folder)))
    model = build_model(config, source, device)

    def load(found: FoundCheckpoint) -> Loaded:
        opened = ranks.on_each(lambda: open_found(found))
        stored = with_base(opened, rank_group=ranks)
        if config.evaluation.ema:
            stored = ranks.on_each(lambda: averages_as_model(stored))
        return load_source(stored, model.module, without_optimizer=True)

    state = state_in(read_together(path, ranks, load))
    loss = held_out_loss(
        source,
        model.module,
        data.held_out,
        limit=config.evaluation.windows,
        rows=config.train.batch // dist.get_world_size(),
        device=device,
    )
    windows = spread_evenly(config.evaluation.windows, len(data.held_out))
    return HeldOutResult(
        checkpoint=path,
        step=state.step,
        loss=loss,
        windows=len(windows),
        tokens=data.held_out.num_targets(windows),
        ema=config.evaluation.ema,
        note=note,
    )


def _note_about(config: RunConfig, data: Data) -> str:
    """Return a sentence about the data that the reader of the loss must know, if there is any."""
    folder = RunFolder(config.run.folder)
    stored = read_record(folder.data)
    is_of_run = read_config(folder.config).data == config.data
    if not is_of_run or stored in (None, record_of(data)):
        return ""
    return (
        "The data have changed since the run began: what is held out now may have been trained on."
    )


def for_ranks(config: RunConfig, world: int) -> RunConfig:
    """Return the configuration for this number of ranks, which need not be one that can train the run.

    If it is one, a rank computes as many windows at a time as in the run.
    """
    rows = max(1, config.train.batch // (world * config.train.accumulate))
    replicas = config.sharding.replicas
    return replace(
        config,
        train=replace(config.train, batch=rows * world, accumulate=1),
        sharding=replace(config.sharding, replicas=1 if world % replicas else replicas),
    )
