"""Let Accelerate shard on a CPU.

Accelerate 1.15 shards only where there is an accelerator. On a CPU it takes an FSDP plugin and trains unsharded, without
a word. The programs here call `allow_fsdp` so that they can be tried on any machine; on a GPU it does nothing.
"""

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from examples.clients import small_task


def allow_fsdp() -> None:
    """Call this before the Accelerator or the Trainer is made; TrainingArguments forget it."""
    if small_task.on_gpu():
        return
    PartialState(cpu=True)
    # FSDP is looked for with these types only. The device has been chosen by now, and stays the CPU.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
