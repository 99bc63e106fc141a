"""Owners of elements: segments, placements, shardings and blocks, as frozen values.

It may import the vocabulary: `errors`, `policies`, `torch_border`; and `mesh`.
It owns the arithmetic of shapes and world sizes; it has no memory and calls no collective.
"""
