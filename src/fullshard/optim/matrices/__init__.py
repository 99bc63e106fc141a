"""Muon: optimizers of whole matrices, each of which has one owner.

It may import what `optim` may.
It owns the assignment of matrices to ranks and their exchange.
"""
