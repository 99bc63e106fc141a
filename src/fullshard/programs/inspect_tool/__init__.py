"""`fullshard inspect`: how a model would be grouped and sharded, before anything runs.

The files in the order a call passes through them:

    command        the subcommand: arguments, exit codes
    factory        models of users, from module:function
    cost           the model on the meta device, sharded in a fake process group
    activations    what forward keeps for backward
    without_values what a model does on the meta device as it does it on an accelerator
    folded_groups  groups of equal layers, as one
    output         what is printed
"""
