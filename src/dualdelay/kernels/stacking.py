"""Models under ``vmap`` as more models of one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def more_models(count: int, parts: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Tensor | None]:
    """What ``vmap`` gives to so many calls, each for some models, with the models of all of them along the first axis."""
    stacks: list[Tensor | None] = []
    for part, dim in zip(parts, dims[: len(parts)], strict=True):
        if part is not None:
            part = (part.expand(count, *part.shape) if dim is None else part.movedim(dim, 0)).flatten(0, 1)
        stacks.append(part)
    return stacks
