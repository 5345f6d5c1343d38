"""How the commands that train end if the run is stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click


@contextmanager
def stopped_runs(go_on: str) -> Iterator[None]:
    """Say why a run was stopped, and how to `go_on` unless it diverged.

    The exit code is 128 + N after signal N, 0 after a regression, 3 after a divergence.
    """
    from curriculum.train.divergence import Diverged
    from curriculum.train.processes.together import is_first
    from curriculum.train.signals import Stopped
    from curriculum.train.watch import RegressionStop

    def tell(message: str, err: bool = False) -> None:
        if is_first():  # of several processes, which all end like this
            click.echo(message, err=err)

    try:
        yield
    except RegressionStop as stopped:
        tell(f"{stopped}; continue with {go_on}")
    except Diverged as diverged:
        tell(str(diverged), err=True)
        sys.exit(3)
    except Stopped as stopped:
        with suppress(OSError):  # the terminal may be closed
            tell(f"{stopped}; continue with {go_on}", err=True)
        sys.exit(128 + stopped.signal_number)
