"""The parts that notice that ranks do different things, name it, and end it: the agreement, meetings, guards, the watchdog.

It may import `engine`, `transport` and what they import, which know only the monitor that it installs.
It owns the control connections between ranks, the threads that watch, and what a process says before it ends.
"""
