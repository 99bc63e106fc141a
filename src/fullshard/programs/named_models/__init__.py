"""Published models by name: `llama3-8b`, `gpt2`, ... Each folder here has the `config.json` of one, and nothing else.

The sizes are those that the authors published; a test counts the parameters. There are no weights and no tokenizers, so a
plan needs no download, and a run starts from random weights.
"""
