"""How far a GPU's numbers are from the processor's, on a short run of every method, by precision.

python experiments/paper/agreement.py [cpu | float32 | tf32 | bfloat16] ...

computes what is named, and prints a table of all that is there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from dualdelay.paper.cells import compute, records
from dualdelay.paper.experiment import FIGURES

SHORT = replace(FIGURES["figure1"], alphas=(0.1,), stds=(1.0,), seeds=(0,), steps=(0.01,), updates=400, evaluations=4)
FOLDER = Path(__file__).parent / "agreement"


def main(names: list[str]) -> None:
    """Print a table: the largest relative difference of F at any evaluation."""
    for name in names:
        options = {"device": "cpu"} if name == "cpu" else {"device": "cuda", "precision": name}
        compute(SHORT, FOLDER / name, **options)
    kinds = [name for name in ("float32", "tf32", "bfloat16") if (FOLDER / name).exists()]
    found = {
        name: {method: record for _, _, method, _, record in records(SHORT, FOLDER / name)} for name in ("cpu", *kinds)
    }
    print("relative difference of F to the processor's, the largest of all evaluations; * the order of arrivals differs")
    print(f"{'method':10s} {'updates':>8s} " + " ".join(f"{name:>10s}" for name in kinds))
    for method, record in found["cpu"].items():
        line = f"{method:10s} {record['updates']:8d} "
        for name in kinds:
            other = found[name][method]
            far = max(abs(a / b - 1) for a, b in zip(other["objective"], record["objective"], strict=True))
            line += f" {far:9.1e}" + (" " if other["version"] == record["version"] else "*")
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
