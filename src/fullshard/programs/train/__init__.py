"""`fullshard train`: real runs of language models, sharded over ranks.

The files in the order a run passes through them:

    command              the verb: arguments in, exit code out
    config               what a run can be told, by section, and the rules for what goes together
    limits               between which numbers a value must lie
    config_fields        all fields as data: kinds of values, defaults, meanings
    config_file          a configuration from and to TOML, and all its problems at once
    config_reference     its fields as tables
    launch               start ranks on this machine, or join those a launcher started
    place  slurm         who a rank is, what it runs on, where the ranks meet; as Slurm says it
    processes            run ranks as processes, tell them to stop, see to it that they all end
    rank                 one rank: process group in, training, process group out
    meeting              where ranks meet that torchrun has started again
    run_folder           what is where in the folder of a run, and whose it is
    sharding             the model through either door
    loop                 the steps
    optimizing           optimizer and learning rate
    evaluating           the loss
    traced_steps         the steps that are recorded
    resuming  stopping   checkpoints, and going on from them; signals and bad steps
    run_events           (beside this folder) what happens, as values; `metrics_file` writes it, `progress` shows it
    memory  result       what a rank uses of its device; what a run has come to

What is trained, and what is learned from:

    preflight            what is wrong with either, without torch
    model_source         a model as the loop knows it
    built_in             the decoder of `decoder`, in the sizes of `decoder_shape`
    transformers_model   any causal language model of transformers
    weights              starting weights, the same on any number of ranks; memory for them
    data                 training and held-out windows
    data_files           which files; `array_files` what is in those that are arrays
    tokenizing           from text to tokens and back
    splitting  windows   what is held out; rows of batches
    sampler              in which order windows are seen
    samples              text that the model writes
"""
