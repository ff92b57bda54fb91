"""The runs whose results are committed here: the paper's grid and more."""

from __future__ import annotations

from dataclasses import replace

from dualdelay.paper.experiment import FIGURES, Experiment

STEPS = (0.001, 0.005, 0.01, 0.02, 0.05)  # the paper's three, and two beyond its edge
WAIT_FOR = (1, 2, 3, 5)


def _wide(name: str, std: float, seeds: int) -> Experiment:
    return replace(FIGURES[name], steps=STEPS, wait_for=WAIT_FOR, stds=(std,), seeds=tuple(range(seeds)))


def _edge(step: float, *methods: str, wait_for: int = 1) -> Experiment:
    """A larger step still, on the most heterogeneous data; of these runs only the end is measured."""
    shared = replace(FIGURES["figure1"], alphas=(0.1,), stds=(1.0,), steps=(step,), evaluations=1)
    return replace(shared, methods=methods, wait_for=(wait_for,))


def _extreme(lr: float, *methods: str, wait_for: int = 1) -> Experiment:
    """The seed in which one worker makes 78% of all gradients, 70 times as many as the slowest."""
    shared = replace(FIGURES["figure1"], alphas=(0.1,), stds=(5.0,), seeds=(6,), steps=(lr,), evaluations=10)
    return replace(shared, methods=methods, wait_for=(wait_for,))


GRIDS = {
    "figure1": [_wide("figure1", 1.0, 5), _wide("figure1", 5.0, 6)],  # with std = 5 three seeds cannot tell
    "figure2": [_wide("figure2", 1.0, 3), _wide("figure2", 5.0, 3)],
    "saturation": [FIGURES["saturation"]],
    "edge": [
        *(_edge(0.1, "sync", "mifa"), _edge(0.1, "dude", wait_for=5), _edge(0.1, "fedbuff")),
        *(_edge(0.1, "dude", wait_for=3), _edge(0.2, "fedbuff"), _edge(0.1, "dude", wait_for=2), _edge(0.1, "shuffled")),
        *(_edge(0.2, "sync", "mifa"), _edge(0.2, "dude", wait_for=5)),
    ],
    "extreme": [
        *(_extreme(0.01, "dude", "vanilla"), _extreme(0.05, "dude", wait_for=3), _extreme(0.02, "vanilla")),
        *(_extreme(0.05, "sync"), _extreme(0.005, "dude"), _extreme(0.05, "fedbuff"), _extreme(0.02, "dude")),
    ],
}
