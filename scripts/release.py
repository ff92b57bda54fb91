"""Make a release: python scripts/release.py 0.2.0 [--dry-run].

Checks that the tree is clean, the version follows the last tag and the changelog has an entry for it; then tests, builds,
checks what was built, and tags. Pushing the tag, which it leaves to you, publishes (.github/workflows/release.yml). A dry
run makes the checks that take no time, and says what it would run.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path


def git(*words: str) -> str:
    """What git answers."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def parts(version: str) -> tuple[int, ...]:
    """A version as numbers, which compare as versions do."""
    return tuple(map(int, version.removeprefix("v").split(".")))


def problems(version: str) -> list[str]:
    """What stands in the way of this release, each with what to do."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"the version is {version!r}; expected three numbers, such as 0.2.0"]
    found = []
    if changed := git("status", "--porcelain"):
        found.append(f"the tree has changes that are not committed; commit or remove them:\n{changed}")
    tags = [tag for tag in git("tag", "--list", "v*").split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    last = max(tags, key=parts, default="v0.0.0")
    if parts(version) <= parts(last):
        found.append(f"the version is {version}, and the last tag {last}; choose a higher version")
    entry = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |^\[|\Z)",
        Path("CHANGELOG.md").read_text(),
        re.M | re.S,
    )
    if entry is None or not entry[1].strip():
        found.append(f"CHANGELOG.md has no entry; write one below '## [{version}] - YYYY-MM-DD'")
    return found


def main() -> None:
    """Make the release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="three numbers, such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="check, and say what would be run")
    given = parser.parse_args()
    if found := problems(given.version):
        sys.exit("no release: " + "\nno release: ".join(found))
    tag = ["git", "tag", "-a", f"v{given.version}", "-m", f"dualdelay {given.version}"]
    build = [
        "env",
        f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_DUALDELAY={given.version}",
        "make",
        "dist",
    ]  # before there is a tag
    for command in (["make", "test"], ["make", "slow"], ["make", "install-test"], build, tag):
        print("would run:" if given.dry_run else "running:", shlex.join(command), flush=True)
        if not given.dry_run and subprocess.run(command, check=False).returncode:
            sys.exit(f"no release: {shlex.join(command)} failed; nothing is tagged")
    print(f"to publish: git push origin v{given.version}")


if __name__ == "__main__":
    main()
