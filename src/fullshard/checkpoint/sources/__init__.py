"""Formats of checkpoints: our own, torch's, safetensors; reading, converting and comparing them.

It may import what `checkpoint` may.
It owns what a file may claim, and what is checked before it is believed.
"""
