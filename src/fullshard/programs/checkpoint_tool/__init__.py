"""`fullshard checkpoint`: look into checkpoints of any format, check, convert and compare them.

command     the verbs: arguments in, exit code out; all below is imported when a verb runs
places      in which files and bytes tensors are
contents    what `inspect` knows of a checkpoint, as JSON
checking    what `verify` does
showing     what the user sees of all of these
"""
