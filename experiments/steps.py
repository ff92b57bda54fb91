"""The README's table: DuDe and vanilla ASGD at several steps, on digits by label, over three seeds.

python experiments/steps.py
"""

from __future__ import annotations

import torch

import dualdelay as dd

STEPS = (0.02, 0.05, 0.1, 0.2)


def main() -> None:
    torch.set_num_threads(1)
    methods = {f"{name} {lr}": dd.ALGORITHMS[name](lr=lr) for name in ("dude", "vanilla") for lr in STEPS}
    problem, speeds = dd.Digits(workers=10, split="label"), dd.TruncatedNormalSpeeds(10, std=5.0)
    table = dd.compare(methods, problem, speeds, seeds=(0, 1, 2), time=800.0, evaluation=dd.Evaluation(seconds=800.0))
    for name in methods:
        last = table.objective[(table.algorithm == name) & (table.time == 800.0)]
        print(f"{name:14s} mean {last.mean():.3f}   " + "  ".join(f"{value:.3f}" for value in last))


if __name__ == "__main__":
    main()
