"""``python -m dualdelay`` is the command ``dualdelay``."""

from .cli.commands import main

main()
