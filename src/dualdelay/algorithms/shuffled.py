"""Shuffled ASGD: Islamov, Safaryan and Alistarh, "AsGrad", 2024."""

from __future__ import annotations

from dataclasses import dataclass

from .uniform import QueueState, UniformASGD


@dataclass(frozen=True)
class ShuffledASGD(UniformASGD):
    """The new model goes to the next worker of a random order, drawn anew every n jobs, and waits in its queue."""

    name, title = "shuffled", "Shuffled ASGD"
    colour, line, marker = "#56B4E9", "3 1 1 1 1 1", "v"

    def draw(self, s: QueueState) -> int:
        if not s.order:
            s.order = [s.present[k] for k in s.rng.permutation(s.n, s.drawn)]
        return s.order.pop()
