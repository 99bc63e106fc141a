"""AdamW with its state in 8 bits.

It may import what `optim` may.
It owns blocks, their codes and scales, and the step over them.
"""
