"""Recording steps of training: what users start and stop, the facts about groups, and the file that is written.

It may import the engine and below; it knows neither of the two APIs.
It owns the format of traces, which the report reads.
"""
