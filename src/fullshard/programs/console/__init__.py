"""Output of the programs: lines, tables and progress, on terminals, in pipes and in files.

It may import `errors` and nothing else of fullshard, and no torch.
It owns what happens when the reader has gone, and how text of unknown origin is made safe to print.
"""
