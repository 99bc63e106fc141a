"""A training run for newcomers: a byte-level language model, sharded over the ranks of one machine.

The files in the order a run passes through them:

    command      the verb `fullshard train`: arguments in, exit code out
    options      what a run can be told, checked
    text         which bytes to learn from, and which to keep back
    launch       start ranks on this machine, or join those a launcher started
    place        who a rank is, what it runs on, where the ranks meet
    processes    run ranks as processes, and see to it that they all end
    rank         one rank: process group in, training, process group out
    loop         the training loop
    batches      which windows of the text each rank sees at which step
    model        the decoder
    weights      its starting weights, the same on any number of ranks
    memory       what a rank uses of its device's memory
    result       what the loop reports while it runs and at its end
    progress     what the user sees of that
"""
