"""The shell: ``dualdelay train | compare | serve | site | resume | replay | show | report | list | ...``."""

from .shell import main

__all__ = ["main"]
