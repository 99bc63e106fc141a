"""Memory of parameters: gather buffers, shard buffers, and the tensors that users see over them.

It may import `plan` and what `plan` imports.
It owns the sharded and the unsharded parameters on the modules, and where their bytes lie.
"""
