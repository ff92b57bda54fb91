"""Run every peer whose environment exists, one after the other, and print one table.

    python benchmarks/peers/run_all.py --install    # once: several gigabytes
    python benchmarks/peers/run_all.py

The interpreter that runs this file is the one with dualdelay; each peer has an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
PACKAGES = {
    "pfl": ["pfl==0.6.0"],
    "appfl": ["appfl==1.12.0"],
    "flsim": ["flsim==0.1.0"],
    "flower": ["flwr[simulation]==1.41.0"],
}
COMMANDS = {  # of an environment: what runs in it
    "pfl": [["python", "pfl_sync.py"], ["torchrun", "--nproc_per_node", "2", "pfl_sync.py"]],
    "appfl": [["python", "appfl_vsim.py"]],
    "flsim": [["python", "flsim_async.py"]],
    "flower": [["python", "flower.py"]],
}


def install(folder: Path) -> None:
    for name, packages in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            print(TORCH, file=constraints, flush=True)
            pip = [folder / name / "bin" / "pip", "install", "--quiet", "-c", constraints.name, "torch", *packages]
            subprocess.run(pip, check=True)


def rows(command: list[str | Path], settings: list[str]) -> list[dict]:
    """What the script measured; the peers' own lines between are dropped unless it fails."""
    done = subprocess.run([*command, *settings], cwd=HERE, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if done.returncode:
        print(f"{command[-1]} failed: {done.stderr[-2000:]}", file=sys.stderr)
    return found


def show(row: dict) -> None:
    low, high = min(row["ratios"]), max(row["ratios"])
    cells = [row["name"], row["version"], f"{row['rate']:g}", f"{row['plain']:g}", f"{row['ratio']:.2g}"]
    print("| " + " | ".join([*cells, f"{low:.2g} to {high:.2g}", row["kind"]]) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "dualdelay-peers")
    parser.add_argument("--install", action="store_true", help="make the environments and stop")
    parser.add_argument("--seconds", default="6", help="of each timed section")
    parser.add_argument("--rounds", default="3", help="timed sections of each row")
    given = parser.parse_args()
    if given.install:
        sys.exit(install(given.environments))
    commands: list[list[str | Path]] = [[sys.executable, "ours.py"]]
    for name, several in COMMANDS.items():
        place = given.environments.expanduser().resolve() / name / "bin"
        if place.exists():
            commands += [[place / tool, *rest] for tool, *rest in several]
        else:
            print(f"no environment for {name}", file=sys.stderr)
    print("| what | version | updates/s | plain loop/s | ratio | in all rounds | kind |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for command in commands:
        for row in rows(command, ["--seconds", given.seconds, "--rounds", given.rounds]):
            show(row)
