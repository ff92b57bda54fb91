"""What is trained: exact test problems, any torch module, and data sets split over workers."""

from __future__ import annotations

from typing import Any

from .batchnorm import without_batchnorm
from .cifar10 import Cifar10
from .digits import Digits
from .logistic import Logistic
from .minibatches import Batches
from .network import Network
from .quadratic import Quadratic
from .wrapped import Clipped, FullGradients, LocalSteps, exact

PROBLEMS: dict[str, Any] = {
    "quadratic": Quadratic,
    "logistic": Logistic,
    "digits": Digits,
    "cifar10": Cifar10,
    "local_steps": LocalSteps,
    "clipped": Clipped,
    "full_gradients": FullGradients,
}

__all__ = [
    "PROBLEMS",
    "Batches",
    "Cifar10",
    "Clipped",
    "Digits",
    "FullGradients",
    "LocalSteps",
    "Logistic",
    "Network",
    "Quadratic",
    "exact",
    "without_batchnorm",
]
