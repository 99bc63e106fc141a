"""Fine-tune with transformers' Trainer, with LoRA (PEFT) or all parameters; evaluate and generate afterwards.

torchrun --nproc-per-node 2 -m examples.clients.trainer_lora                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.trainer_lora   # fullshard
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Trainer, TrainingArguments

from examples.clients import accelerate_on_cpu, small_task
from examples.clients.small_task import BATCH, Trained


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = small_task.parser(__doc__)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--state-dict", choices=("full", "sharded"), default="sharded")
    parser.add_argument("--rank-of-lora", type=int, default=4, help="0: train all parameters")
    return parser


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    """Build the model; with LoRA the base model is the same in every run, as a downloaded one would be."""
    other_seed = 1 if options.resume else 0
    if not options.rank_of_lora:
        return small_task.small_llama(seed=other_seed)
    from peft import LoraConfig, get_peft_model

    base = small_task.small_llama()
    torch.manual_seed(other_seed)
    config = LoraConfig(
        r=options.rank_of_lora, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def make_arguments(options: argparse.Namespace, folder: str) -> TrainingArguments:
    """Choose FSDP's options as Trainer names them."""
    return TrainingArguments(
        output_dir=folder,
        fsdp=not options.unsharded,
        fsdp_config={
            "version": options.fsdp_version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": f"{options.state_dict.upper()}_STATE_DICT",
            # FSDP1 only; Accelerate wants an accelerator for it.
            "sync_module_states": small_task.on_gpu(),
        },
        max_steps=options.steps,
        per_device_train_batch_size=BATCH // small_task.world_size(),
        per_device_eval_batch_size=BATCH // small_task.world_size(),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if options.folder else "no",
        save_steps=options.save_after,
        use_cpu=not small_task.on_gpu(),
        report_to=[],
        disable_tqdm=True,
    )


def save_model(trainer: Trainer, folder: Path) -> list[float]:
    """Save what others load, the model or its adapters; return how many tensors, and their sum."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    (file,) = folder.glob("*model.safetensors")
    tensors = load_file(file).values()
    return [float(len(tensors)), float(sum(tensor.double().sum() for tensor in tensors))]


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, evaluate, generate, and return the losses."""
    arguments = make_arguments(options, str(options.folder or tempfile.gettempdir()))
    if not options.unsharded:
        accelerate_on_cpu.allow_fsdp()
    trainer = Trainer(
        model=make_model(options),
        args=arguments,
        train_dataset=small_task.sequences(),
        eval_dataset=small_task.sequences()[:BATCH],
    )
    checkpoint = f"{options.resume}/checkpoint-{options.save_after}" if options.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluated = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([[3, 5, 7]], device=trainer.args.device)
    with torch.no_grad():
        written = trainer.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    first = options.save_after if options.resume else 0
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained(
        losses=[entry["loss"] for entry in log if entry["step"] > first],
        model=trainer.model,
        checks=[evaluated, *map(float, written[0])],
        saved=save_model(trainer, options.folder / "model") if options.folder else [],
    )


if __name__ == "__main__":
    small_task.run(train, command_line())
