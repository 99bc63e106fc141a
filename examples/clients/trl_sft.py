"""Fine-tune with TRL's SFTTrainer, with LoRA (PEFT) or all parameters.

torchrun --nproc-per-node 2 -m examples.clients.trl_sft                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.trl_sft   # fullshard
"""

import argparse
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from examples.clients import accelerate_on_cpu, small_task
from examples.clients.small_task import BATCH, VOCABULARY, Trained


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = small_task.parser(__doc__)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--state-dict", choices=("full", "sharded"), default="sharded")
    parser.add_argument("--lora", action="store_true", help="train adapters, not all parameters")
    return parser


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose words are numbers."""
    words = {str(number): number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="0", bos_token="1", eos_token="2", unk_token="0"
    )


def make_config(options: argparse.Namespace, folder: str) -> SFTConfig:
    """Choose FSDP's options as Trainer names them."""
    return SFTConfig(
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
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if options.folder else "no",
        save_steps=options.save_after,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not small_task.on_gpu(),
        report_to=[],
        disable_tqdm=True,
    )


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses."""
    texts = [" ".join(map(str, row["input_ids"].tolist())) for row in small_task.sequences()]
    config = make_config(options, str(options.folder or tempfile.gettempdir()))
    if not options.unsharded:
        accelerate_on_cpu.allow_fsdp()
    same_base = options.lora or not options.resume
    trainer = SFTTrainer(
        model=small_task.small_llama(seed=0 if same_base else 1),
        args=config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if options.lora else None,
    )
    checkpoint = f"{options.resume}/checkpoint-{options.save_after}" if options.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    first = options.save_after if options.resume else 0
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained(
        losses=[entry["loss"] for entry in log if entry["step"] > first],
        model=trainer.model_wrapped,
    )


if __name__ == "__main__":
    small_task.run(train, command_line())
