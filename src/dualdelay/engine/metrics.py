"""What is measured of every model, and which way is good."""

from __future__ import annotations

from ..core.errors import BadInput

NAMES = ("time", "version", "objective", "pooled_loss", "accuracy", "gradient_norm", "answered", "share")


def metric_and_way(setting: str, text: str) -> tuple[str, str]:
    """The metric that a text such as "accuracy" or "max f1" names, and whether "max" or "min" of it is good."""
    word, _, rest = text.partition(" ")
    if word in ("max", "min"):
        return rest, word
    if text == "accuracy":
        return text, "max"
    if text in NAMES or text.endswith("loss"):
        return text, "min"
    raise BadInput(f"{setting} is {text!r}; say which way is good: 'max {text}' or 'min {text}'.")
