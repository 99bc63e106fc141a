"""A device and ranks that do not exist: the engine runs on them, and observers are told of all that it asks for.

It may import the vocabulary: `errors`, `torch_border`, and `mesh` to make its backend known. The planner and the check of streams subscribe to it.
It owns the streams, events and memory of the virtual device, and the operations on tensors without values.
"""
