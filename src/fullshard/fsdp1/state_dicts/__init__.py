"""State dicts of the wrapper: of the model and of its optimizers, and which kind is made.

It may import what `fsdp1` may.
It owns the entries of state dicts and how ranks agree on them.
"""
