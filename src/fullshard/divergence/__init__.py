"""What notices that ranks do different things, names it, and ends it: the journal, meetings, verdicts, guards, the watchdog.

It may import `mesh`, `layout` and the vocabulary.
It owns the control connections between ranks, the threads that watch, and what a process says before it ends.
"""
