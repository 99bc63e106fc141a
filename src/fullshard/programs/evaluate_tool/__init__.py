"""`fullshard evaluate`: the loss of a run's checkpoint on held-out data. Nothing is written.

command     arguments, exit codes, what is printed
start       starts ranks on this machine, or joins those of a launcher
rank        one rank: loads the checkpoint and evaluates
held_out    the result
"""
