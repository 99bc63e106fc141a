"""A training run for newcomers: a byte-level language model, sharded over the ranks of one machine.

The files in the order a run passes through them:

    command      the verb `fullshard train`: arguments in, exit code out
    options      what a run can be told, checked
    launch       start ranks on this machine, or join those a launcher started
    place        who a rank is, what it runs on, where the ranks meet
    processes    run ranks as processes, and see to it that they all end
    rank         one rank: process group in, training, process group out
    loop         the training loop
    memory       what a rank uses of its device's memory
    result       what the loop reports while it runs and at its end
    progress     what the user sees of that

What is trained, and what is learned from:

    preflight            what is wrong with either, without torch
    models               a model as the loop knows it
    built_in             the decoder of `model`, in the sizes of `decoder_shape`
    transformers_model   any causal language model of transformers
    weights              starting weights, the same on any number of ranks; memory for them
    data                 training and held-out windows
    data_files           which files; `array_files` what is in those that are arrays
    tokenizing           from text to tokens and back
    splitting  windows   what is held out; rows of batches
    sampler              in which order windows are seen
    samples              text that the model writes
"""
