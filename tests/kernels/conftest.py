"""Lets Triton's interpreter run loops whose length a kernel computes: it takes int() of an array, which NumPy gave up."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def loops_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
