"""Decisions that need no memory and no communication: meshes, layouts, placements, shardings, the order of use.

It may import the vocabulary: `errors`, `torch_border`.
It owns the arithmetic: which rank has which elements of a group, as which DTensors, and what is used after what.
"""
