"""A rank's part of a model and an optimizer, read for a save and written by a load.

It may import what `checkpoint` may.
It owns the way between parameters and the tensors of a checkpoint.
"""
