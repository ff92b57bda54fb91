"""Print a folder in memory that has room for what the tests write; or nothing, and they write to the system's usual one.

A run's folder is flushed to the disk many times, and tests make thousands of them: on a disk they would mostly wait.
"""

import os
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 4 * 2**30  # the tests need a tenth of it, and Ray its share


def has_room(folder: Path) -> bool:
    """Whether files can be written there, and executed: some tests write programs."""
    if not os.access(folder, os.W_OK):
        return False
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize >= ROOM and not about.f_flag & os.ST_NOEXEC


if __name__ == "__main__":
    print(MEMORY if has_room(MEMORY) else "")
