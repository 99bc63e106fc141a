"""`fullshard inspect`: how a model would be grouped and sharded, before anything runs.

The files in the order a call passes through them:

    command   the subcommand: arguments, exit codes
    cost      the model on the meta device, sharded in a fake process group
    output    what is printed
"""
