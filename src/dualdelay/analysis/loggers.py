"""Loggers of a run's vital signs, besides the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, require_path
from ..core.version import install_command


class TensorBoard:
    """A ``log`` function that writes a run's vital signs for TensorBoard: ``log=[TensorBoard("runs/board")]``.

    Look at them, during the run or later, with ``tensorboard --logdir runs``. Each number is a scalar whose step is the
    server's version; numbers that are not finite are left out.
    """

    def __init__(self, folder: str | Path) -> None:
        """Write into this folder, which is made if need be."""
        require_path("folder", folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BadInput(
                "the tensorboard package is not installed, and TensorBoard's files need it: "
                f"{install_command('tensorboard')}."
            ) from None
        make: Any = SummaryWriter  # it has no types
        try:
            self._writer = make(str(folder))
        except (OSError, ValueError, RuntimeError) as error:  # ValueError: a name with a zero byte
            raise BadInput(f"{folder} cannot be written for TensorBoard: {error}. Choose another folder.") from None

    def __call__(self, version: int, values: Mapping[str, float]) -> None:
        """Write these numbers; TensorBoard shows them at once."""
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; nothing is lost if a run ends without this."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
