"""The `curriculum` command in this process: a start of its own costs 1 to 3 seconds of the processor."""

import contextlib
import io
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from curriculum.cli.main import run_command


def run(folder: Path, *arguments: str) -> CompletedProcess:
    """What `curriculum ARGUMENTS...` in a folder ends with and prints; an error that would be a traceback is raised."""
    out, errors = io.StringIO(), io.StringIO()
    argv = ["curriculum", *map(str, arguments)]
    with (
        contextlib.chdir(folder),
        patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = run_command()
        except SystemExit as end:
            code = end.code
    return CompletedProcess(argv, code or 0, out.getvalue(), errors.getvalue())


def run_here(*arguments: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of `curriculum ARGUMENTS...` in the working folder."""
    done = run(Path(), *arguments)
    return done.returncode, done.stdout, done.stderr
