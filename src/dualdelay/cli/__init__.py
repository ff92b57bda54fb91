"""The shell: ``dualdelay train | compare | resume | replay | show | report | list | advise | paper | data | new``."""

from .shell import main

__all__ = ["main"]
