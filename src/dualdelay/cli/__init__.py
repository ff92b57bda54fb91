"""The shell: ``dualdelay train | compare | resume | replay | list | advise | paper | data``."""

from .commands import main

__all__ = ["main"]
