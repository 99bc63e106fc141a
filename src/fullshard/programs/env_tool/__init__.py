"""`fullshard env`: what a report of a problem must say about versions, GPUs and settings.

command      the subcommand
environment  the facts; Python's own library is enough for them
"""
