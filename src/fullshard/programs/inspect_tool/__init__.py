"""`fullshard inspect`: how a model would be grouped and sharded, before anything runs.

The files in the order a call passes through them:

    command     the verb: arguments in, exit code out
    measuring   the model on the meta device, sharded in a group of processes that are not there
    showing     what the user sees of it
"""
