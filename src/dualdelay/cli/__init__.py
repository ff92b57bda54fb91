"""The shell: ``dualdelay train | compare | resume | replay | list | advise | paper | data | new``."""

from .commands import main

__all__ = ["main"]
