"""Steps that are captured in CUDA graphs and replayed.

It may import what `features` may.
It owns captures, and what makes a captured step invalid.
"""
