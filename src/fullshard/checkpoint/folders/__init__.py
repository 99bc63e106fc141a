"""Folders of checkpoints: a checkpoint appears whole or not at all, is found again, and is removed when it is old.

It may import what `checkpoint` may.
It owns renames, locks and listings.
"""
