"""The engine: the life of a group of parameters in forward, in backward and between steps.

It may import `transport`, `storage`, `layout` and what they import; it knows neither of the two APIs.
It owns the life cycle of every group, the hooks on modules and autograd, and the access to full parameters.
"""
