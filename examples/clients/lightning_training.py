"""Train with Lightning: ModelParallelStrategy is FSDP2, FSDPStrategy is FSDP1.

torchrun --nproc-per-node 2 -m examples.clients.lightning_training                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.lightning_training   # fullshard
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from examples.clients import small_task
from examples.clients.small_task import BATCH, Batch, Trained


class FSDP1(FSDPStrategy):
    """FSDPStrategy, also on a CPU: Lightning refuses that for the class itself, since torch's FSDP1 cannot."""


class LanguageModel(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, *, seed: int, shard_here: bool) -> None:
        super().__init__()
        self._seed, self._shard_here = seed, shard_here
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Build the model; with ModelParallelStrategy this is also where it is sharded."""
        if hasattr(self, "model"):
            return
        self.model = small_task.small_llama(seed=self._seed)
        if self._shard_here:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the sharded parameters, which the trainer's model has."""
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = small_task.parser(__doc__)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--state-dict", choices=("full", "sharded"), default="sharded")
    parser.add_argument("--flat-parameters", action="store_true", help="FSDP1 only")
    return parser


def make_strategy(options: argparse.Namespace) -> Strategy | str:
    """Choose between the two generations of FSDP."""
    if options.unsharded:
        return "auto"
    if options.fsdp_version == 2:
        return ModelParallelStrategy(
            data_parallel_size=small_task.world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=options.state_dict == "sharded",
        )
    return FSDP1(
        auto_wrap_policy={LlamaDecoderLayer},
        state_dict_type=options.state_dict,
        use_orig_params=not options.flat_parameters,
    )


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses."""
    callbacks = []
    if options.folder:
        callbacks.append(
            ModelCheckpoint(
                options.folder, filename="saved", every_n_train_steps=options.save_after
            )
        )
    trainer = lightning.Trainer(
        accelerator="gpu" if small_task.on_gpu() else "cpu",
        devices=small_task.world_size(),
        strategy=make_strategy(options),
        max_steps=options.steps,
        callbacks=callbacks,
        use_distributed_sampler=False,
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shard_here = not options.unsharded and options.fsdp_version == 2
    module = LanguageModel(seed=1 if options.resume else 0, shard_here=shard_here)
    # Lightning would shuffle, and a checkpoint within an epoch does not have the loader's place.
    loader = small_task.loader(
        BATCH // trainer.world_size,
        first_step=options.save_after if options.resume else 0,
        rank=trainer.global_rank,
        ranks=trainer.world_size,
    )
    checkpoint = Path(options.resume) / "saved.ckpt" if options.resume else None
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return Trained(losses=module.losses, model=trainer.strategy.model or module)


if __name__ == "__main__":
    small_task.run(train, command_line())
