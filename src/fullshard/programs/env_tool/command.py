"""The subcommand `fullshard env`. Its exit code is 0, whatever is missing on this machine."""

from __future__ import annotations

from fullshard.programs.env_tool.environment import print_environment
from fullshard.programs.version_option import Version


def env(version: Version = False) -> None:
    """Print what a report of a problem needs: versions, GPUs and settings."""
    print_environment()
