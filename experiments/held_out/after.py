"""AutoDuDe as it is now on the judging seeds of held-out settings, on a processor: a line a run in results/after.jsonl.

python experiments/held_out/after.py straggler10 convex20 mnist50 fashion5

Three to thirty seconds a run for these; `wide` takes four minutes. What the file had of those settings is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compute import outcome, run
from settings import SETTINGS


def main(names: list[str]) -> None:
    """Make the runs, write them down and print their outcomes."""
    path = Path(__file__).with_name("results") / "after.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = [one for one in kept if one["setting"] not in names]
    for name in names:
        setting = SETTINGS[name]
        for seed in setting.judging:
            runs += run(name, "auto", seed, list(setting.methods["auto"].steps), "cpu")
            print(name, seed, f"{outcome(runs[-1], setting.outcome):.4f}", flush=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in runs))


if __name__ == "__main__":
    main(sys.argv[1:])
