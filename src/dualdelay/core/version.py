"""Which version of the package this is, and how to install what it can do without."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_SOURCE = "0.0+source"  # of a tree that is on the path and not installed; runs record its commit besides


def _installed() -> Distribution | None:
    """The installed distribution that this very file belongs to: another copy may be installed beside it."""
    here = Path(__file__).resolve()
    for found in distributions(name="dualdelay"):
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            file = Path(url2pathname(urlsplit(origin["url"]).path), "src", "dualdelay", "core", "version.py")
        else:
            file = Path(str(found.locate_file("dualdelay/core/version.py")))
        if file.resolve() == here:
            return found
    return None


_distribution = _installed()
__version__ = _distribution.version if _distribution else _SOURCE


def install_command(*packages: str) -> str:
    """The command that installs packages this one can do without, in versions that will do.

    It names those packages and not an extra of this one, so it works wherever this one came from.
    """
    return f"pip install {' '.join(map(_requirement, packages))}"


def _requirement(package: str) -> str:
    for requirement in (_distribution and _distribution.requires) or ():
        text = requirement.split(";")[0].strip()
        if re.split(r"[^\w.-]", text)[0].lower() == package:
            return f"'{text}'"
    return package
