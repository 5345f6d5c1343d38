"""How the commands that train end where a run was stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def stopped_runs(go_on: str) -> Iterator[None]:
    """Say why a run was stopped and how to `go_on`: exit code 128 + N after signal N, 0 after a regression, 3 where
    training diverged."""
    from curriculum.train.divergence import Diverged
    from curriculum.train.signals import Stopped
    from curriculum.train.watch import RegressionStop

    try:
        yield
    except RegressionStop as stopped:
        click.echo(f"{stopped}; go on with {go_on}")
    except Diverged as diverged:
        click.echo(str(diverged), err=True)
        sys.exit(3)
    except Stopped as stopped:
        click.echo(f"{stopped}; go on with {go_on}", err=True)
        sys.exit(128 + stopped.signal_number)
