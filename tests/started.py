"""Python programs that a test starts, and does not wait for."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(**more):
    quick = "--xla_backend_optimization_level=0"
    return os.environ | {"XLA_FLAGS": quick, "PYTHONPATH": str(ROOT)} | more


def start(arguments, **more):
    """A Python program that runs: its process, to whose `lines` a thread, `reader`, adds what it prints."""
    begun = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    begun.lines = []
    begun.reader = threading.Thread(target=lambda: begun.lines.extend(begun.stdout), daemon=True)
    begun.reader.start()
    return begun


def ended(begun, seconds=300):
    """(exit code, all that was printed) of a process, which does not outlive the test."""
    try:
        code = begun.wait(timeout=seconds)
    finally:
        begun.kill()
    begun.reader.join(10)
    return code, "".join(begun.lines)
