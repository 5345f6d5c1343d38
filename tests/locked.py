"""A run that another process holds."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from pathlib import Path
from curriculum.disk.lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    lock.take()
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked_by_another(run_dir: Path) -> Iterator[int]:
    """While the lock of a run is held by a process, whose id this gives."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.communicate()
