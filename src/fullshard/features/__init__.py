"""Features beside the step: fused gradients, captured graphs, pipelines, `join`, skipped modules, planned groups, full parameters, clipping.

It may import `engine`, `divergence` and what these import. The step does not know it: features join at the events of
`engine.feature_events`, and `registration` registers those of a model.
It owns no order of gathers and reductions.
"""
