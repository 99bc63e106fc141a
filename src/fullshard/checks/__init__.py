"""Checks of a program that users turn on: `fullshard.debug`, and the order of streams that it proves.

It may import `engine` and what `engine` imports. It owns nothing of a step: it observes devices.
"""
