"""Whether one learning rate of AdamW serves different numbers of workers: its two second moments compared, on the digits.

python experiments/held_out/adam.py writes adam.md, in about five minutes of one core. Development data, not held-out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

import dualdelay as dd

STEPS = [2.0**-k for k in range(14, 4, -1)]
SEEDS, GRADIENTS = (0, 1), 2000
WAYS: dict[str, Any] = {
    "arriving gradients": "AdamW",
    "the direction (torch's)": lambda params, lr: torch.optim.AdamW(params, lr=lr),
}


def loss(way: Any, n: int, c: int, lr: float, seed: int) -> float:
    """F at the end, the mean of the last four of twenty evaluations."""
    speeds = dd.TruncatedNormalSpeeds(n, std=1.0, seed=seed)
    time = GRADIENTS / sum(1 / speeds.seconds(worker, 0) for worker in range(n))
    run = dd.simulate(
        dd.DuDe(lr=lr, wait_for=c), dd.Digits(workers=n, alpha=0.1), speeds, time=time, seed=seed,
        server=dd.Server(optimizer=way), evaluation=dd.Evaluation(seconds=time / 20), watch=[],
    )  # fmt: skip
    return float(run.metrics.objective[-4:].mean())


def main() -> None:
    """Find the best learning rate for each, and write the table."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = ["| second moment of | n | c | best lr | F there | F at 2^-9 |", "| --- | --- | --- | --- | --- | --- |"]
    for name, way in WAYS.items():
        for n, c in ((4, 1), (10, 1), (10, 3), (30, 1), (30, 8)):
            means = {lr: sum(loss(way, n, c, lr, seed) for seed in SEEDS) / len(SEEDS) for lr in STEPS}
            best = min(means, key=lambda lr: means[lr])
            power = STEPS.index(best) - 14
            lines.append(f"| {name} | {n} | {c} | 2^{power} | {means[best]:.3f} | {means[2.0**-9]:.3f} |")
            print(lines[-1], flush=True)
    title = "# One learning rate for AdamW\n\nDuDe with AdamW at the server on the digits, alpha = 0.1, TN(1, 1), the time"
    text = f"{title} of 2,000 gradients, mean of two seeds.\n\n" + "\n".join(lines) + "\n"
    Path(__file__).with_name("adam.md").write_text(text)


if __name__ == "__main__":
    main()
