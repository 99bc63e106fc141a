"""Traces of training steps: what users start and stop, facts about groups, and the schema of the file.

It may import the engine and below; it knows neither of the two APIs.
It owns the recorder, an observer of steps, and the format of traces, which the report reads.
"""
