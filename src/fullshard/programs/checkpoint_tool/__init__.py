"""`fullshard checkpoint`: look into checkpoints of any format, check, convert and compare them.

command             the verbs: arguments in, exit code out; imports the others when a verb runs
tensor_locations    the files and bytes of tensors
contents            what `inspect` prints, as JSON
verification        what `verify` does
output              what the user sees
"""
