"""fullshard in the place of torch's FSDP: `install`, `uninstall`, and `python -m fullshard.run` for whole programs.

It may import everything but the programs, which import it.
It owns the rebinding of torch's names. Its file `install` is the only one that imports `torch.distributed.fsdp`; nothing
imports that file unless it is asked for.
"""
