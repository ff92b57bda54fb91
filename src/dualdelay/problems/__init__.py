"""What is trained: exact test problems, any torch module, and data sets split over workers."""

from __future__ import annotations

from typing import Any

from .batchnorm import without_batchnorm
from .cifar10 import Cifar10
from .digits import Digits
from .languages import Languages
from .logistic import Logistic
from .manpages import Manpages
from .minibatches import Batches
from .mnist import FashionMnist, Mnist
from .network import Network
from .quadratic import Quadratic
from .splits import shards, split_samples
from .wrapped import Clipped, FullGradients, LocalSteps, exact

PROBLEMS: dict[str, Any] = {
    "quadratic": Quadratic,
    "logistic": Logistic,
    "digits": Digits,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "cifar10": Cifar10,
    "manpages": Manpages,
    "languages": Languages,
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
    "FashionMnist",
    "FullGradients",
    "Languages",
    "LocalSteps",
    "Logistic",
    "Manpages",
    "Mnist",
    "Network",
    "Quadratic",
    "exact",
    "shards",
    "split_samples",
    "without_batchnorm",
]
