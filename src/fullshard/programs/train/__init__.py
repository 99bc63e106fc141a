"""`fullshard train`: real runs of language models, sharded over ranks.

The files in the order a run passes through them:

    command              the subcommand: arguments, exit codes
    config               all settings of a run, by section, and the rules for what goes together
    limits               ranges of numbers that a setting may have
    config_fields        all fields as data: kinds of values, defaults, meanings
    config_file          reads and writes a configuration as TOML, and reports all its problems at once
    config_reference     all fields as tables
    renamed_fields       old names of fields, which are still read
    launch               starts ranks on this machine, or joins those of a launcher
    rank_info  slurm     number, device and rendezvous of a rank, from torchrun or from Slurm
    processes            runs ranks as processes, passes signals on, and makes sure that all end
    rank                 one rank: joins the process group, trains, leaves
    rendezvous           a fresh store for ranks that torchrun has restarted
    run_folder           the files in the folder of a run, its lock, and whether its run is this one
    sharded_model        the model, sharded by either API
    loop                 the steps
    optimizer            optimizer and learning rate
    optimizer_cost       bytes of its state, time of its steps
    evaluation           the loss
    traced_steps         the steps that are recorded
    resume  stop         checkpoints and resuming from them; signals and bad steps
    run_events           (one folder up) what happens, as values; `metrics_file` writes it, `progress` shows it
    trackers             pass its numbers on: `tensorboard_files`, `wandb_run`, `mlflow_run`
    memory  result       memory use of a rank; the result of a run
    origin               what a path names: a run, a checkpoint of a run, or another checkpoint
    export               a checkpoint as a folder that transformers loads; `exported_model` knows such folders

Model and data:

    preflight            finds problems of both without torch
    model_source         a model as the loop knows it
    built_in             the built-in model: `decoder`, in the sizes of `decoder_shape`
    transformers_model   any causal language model of transformers
    weights              starting weights, the same on any number of ranks; memory for them
    stored_weights       starting weights of another run, a checkpoint or a Hugging Face folder
    data                 training and held-out windows
    data_files           which files to read; `array_files` reads arrays
    record_files         records of chats, instructions and documents; `conversations` says what a record is
    tokenised_records    their tokens, with `chat_template`, and in windows: `packed_windows`
    tokenizer            from text to tokens and back
    held_out_split       which tokens are held out
    windows  sampler     rows of batches, and their order
    samples              text that the model generates
"""
