"""What is built beside the step: captured graphs, `join`, skipped modules, planned groups, clipping.

It may import `engine` and what that imports; the step does not know it.
It owns no order of gathers and reductions.
"""
