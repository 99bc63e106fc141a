"""Run one of TRL's own scripts, unmodified: sft, dpo, kto, reward, grpo or rloo.

torchrun --nproc-per-node 2 -m examples.clients.trl_scripts dpo                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.trl_scripts dpo   # fullshard

On a GPU, and with a model and data of yours, `torchrun ... -m fullshard.run -m trl.scripts.dpo ...` does the same. This program
makes a small model and a few sentences, passes them to the script as arguments, and lets Accelerate shard on a CPU.
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers.trainer
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

from examples.clients import accelerate_on_cpu, small_task, trl_sft
from examples.clients.small_task import BATCH, CONTEXT, Trained

SCRIPTS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
WRITES_TEXT = ("grpo", "rloo")
"""Scripts whose model is asked for answers, which a reward judges."""

HAS_REFERENCE = ("dpo", "kto", "rloo")
"""Scripts that compare with the model as it was before training."""


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = small_task.parser(__doc__)
    parser.add_argument("script", choices=SCRIPTS)
    return parser


def reward_of_variety(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward completions of many different words."""
    return [float(len(set(text.split()))) for text in completions]


def rows(script: str) -> list[dict[str, Any]]:
    """Return data in the form that a script reads."""
    found: list[dict[str, Any]] = []
    for number, sequence in enumerate(small_task.sequences()):
        words = [str(token) for token in sequence["input_ids"].tolist()]
        half = len(words) // 2
        prompt, answer = " ".join(words[:half]) + " ", " ".join(words[half:])
        worse = " ".join(reversed(words[half:]))
        forms: dict[str, dict[str, Any]] = {
            "sft": {"text": prompt + answer},
            "dpo": {"prompt": prompt, "chosen": answer, "rejected": worse},
            "kto": {
                "prompt": prompt,
                "completion": worse if number % 2 else answer,
                "label": number % 2 == 0,
            },
            "reward": {"chosen": prompt + answer, "rejected": prompt + worse},
            "grpo": {"prompt": prompt},
            "rloo": {"prompt": prompt},
        }
        found.append(forms[script])
    return found


def arguments(options: argparse.Namespace, folder: Path) -> list[str]:
    """Write model, tokenizer, data and configuration to a folder; return the script's command line."""
    model, data = folder / "model", folder / "data"
    same_base = options.script in HAS_REFERENCE or not options.resume
    llama = small_task.small_llama(seed=0 if same_base else 1)
    llama.config.architectures = [type(llama).__name__]
    llama.config.save_pretrained(model)
    save_file(llama.state_dict(), model / "model.safetensors")  # save_pretrained: rank 0 only
    trl_sft.tokenizer().save_pretrained(model)
    data.mkdir()
    lines = (json.dumps(row) for row in rows(options.script))
    (data / "train.jsonl").write_text("\n".join(lines))
    chosen: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "dataset_name": str(data),
        "output_dir": str(options.folder or folder / "output"),
        "fsdp": not options.unsharded,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "max_steps": options.steps,
        "per_device_train_batch_size": BATCH // small_task.world_size(),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "steps" if options.folder else "no",
        "save_steps": options.save_after,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not small_task.on_gpu(),
        "report_to": "none",
        "disable_tqdm": True,
    }
    if options.script in WRITES_TEXT:
        chosen |= {
            "num_generations": 2,
            "max_completion_length": CONTEXT // 2 - 2,  # prompts are one half
            "reward_funcs": [f"{__spec__.name}.{reward_of_variety.__name__}"],
        }
    if options.resume:
        chosen["resume_from_checkpoint"] = str(options.resume / f"checkpoint-{options.save_after}")
    config = folder / "config.yaml"
    config.write_text(json.dumps(chosen))  # which YAML contains
    return ["--config", str(config)]


class Log(TrainerCallback):
    """What the script's Trainer logs, and its model."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        """By step: the loss, and the norm of the gradients."""
        self.model = nn.Module()

    def on_log(self, _: Any, state: Any, control: Any, **found: Any) -> None:
        """Keep the numbers of a step."""
        if "loss" in found["logs"]:
            self.numbers += [found["logs"]["loss"], found["logs"]["grad_norm"]]

    def on_train_end(self, _: Any, state: Any, control: Any, **found: Any) -> None:
        """Keep the model."""
        self.model = found["model"]


def train(options: argparse.Namespace) -> Trained:
    """Run the script as its own `__main__` does, and return each step's loss and gradient norm."""
    script = importlib.import_module(f"trl.scripts.{options.script}")
    log = Log()
    transformers.trainer.DEFAULT_CALLBACKS.append(log)
    try:
        with tempfile.TemporaryDirectory() as folder:
            parsed = script.make_parser().parse_args_and_config(
                args=arguments(options, Path(folder)), fail_with_unknown_args=False
            )
            accelerate_on_cpu.allow_fsdp()
            script.main(*parsed)
    finally:
        transformers.trainer.DEFAULT_CALLBACKS.remove(log)
    return Trained(losses=log.numbers, model=log.model)


if __name__ == "__main__":
    small_task.run(train, command_line())
