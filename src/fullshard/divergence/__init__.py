"""What notices that ranks do different things, names it, and ends it: the agreement, meetings, guards, the watchdog.

It may import `engine`, `transport` and what they import, which know only the monitor that it installs.
It owns the control connections between ranks, the threads that watch, and what a process says before it ends.
"""
