"""The programs behind the `fullshard` command: train, report, inspect, checkpoint, and their console output.

They may import everything else, as users of it; nothing imports them.
They own the command line, run folders and configuration files.
"""
