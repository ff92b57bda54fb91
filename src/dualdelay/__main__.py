"""``python -m dualdelay`` is the command ``dualdelay``."""

from .cli import main

main()
