"""The pictures of a split and of a fleet's speeds, as how_to/splits.md and how_to/workers.md show them."""

from __future__ import annotations

from pathlib import Path

import dualdelay as dd

HERE = Path(__file__).parent


def draw(folder: Path = HERE) -> list[Path]:
    """Draw both into a folder."""
    split, speeds = folder / "split.png", folder / "speeds.png"
    dd.Digits(workers=10, alpha=0.1).plot_split(split)
    dd.speeds.BurstySpeeds(dd.TruncatedNormalSpeeds(10, std=5.0), factor=20.0).plot(speeds)
    return [split, speeds]


if __name__ == "__main__":
    print(*draw(), sep="\n")
