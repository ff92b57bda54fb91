"""Compute the steps beyond the grid's edge on the processor, one cell after the other; it takes hours.

python experiments/paper/edge.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from grids import GRIDS

from dualdelay.paper.cells import compute

if __name__ == "__main__":
    for experiment in GRIDS["edge"]:
        for cell in experiment.cells():
            compute(
                cell.alone, Path(sys.argv[1]), cores=1, report=lambda share, text: print(f"{share:.2f} {text}", flush=True)
            )
