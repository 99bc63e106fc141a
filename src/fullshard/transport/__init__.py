"""The ways of messages: streams, collectives, and the comm objects that carry them.

It may import `storage` and what that imports.
It owns every collective, every stream and event, and the order in which memory is allocated and released on them.
"""
