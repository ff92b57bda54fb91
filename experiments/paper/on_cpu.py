"""Compute on the processor what the GPU had no time for, run after run; it takes hours.

python experiments/paper/on_cpu.py edge
python experiments/paper/on_cpu.py extreme
"""

from __future__ import annotations

import sys
from pathlib import Path

from grids import GRIDS

from dualdelay.paper.cells import compute


def report(share: float, text: str) -> None:
    """Say how far it is."""
    print(f"{share:.2f} {text}", flush=True)


if __name__ == "__main__":
    for experiment in GRIDS[sys.argv[1]]:
        compute(experiment, Path(__file__).parent / sys.argv[1] / "cells", cores=1, report=report)
