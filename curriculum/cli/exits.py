"""How the commands that train end if the run is stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click


@contextmanager
def stopped_runs(go_on: str, run_dir: Path) -> Iterator[None]:
    """Say why the run in `run_dir` was stopped, and how to `go_on` unless it diverged.

    The exit code is 128 + N after signal N, also a second one, which ends the process at once; 0 after a regression, 3
    after a divergence.
    """
    from curriculum.train.divergence import Diverged
    from curriculum.train.processes.together import is_first
    from curriculum.train.signals import Stopped, ending_the_process
    from curriculum.train.watch import RegressionStop

    def tell(message: str, err: bool = False) -> None:
        if is_first():  # of several processes, which all end like this
            click.echo(message, err=err)

    try:
        with ending_the_process():
            yield
    except RegressionStop as stopped:
        back = _way_back(run_dir) if is_first() else ""  # others may not see the whole record yet
        tell(f"{stopped}; continue with {go_on}{back}")
    except Diverged as diverged:
        tell(str(diverged), err=True)
        sys.exit(3)
    except Stopped as stopped:
        with suppress(OSError):  # the terminal may be closed
            tell(f"{stopped}; continue with {go_on}", err=True)
        sys.exit(128 + stopped.signal_number)


def _way_back(run_dir: Path) -> str:
    """How to go back to before the last alarm of a run; nothing if no checkpoint is that old."""
    from curriculum.run import load_run
    from curriculum.views.inspection import way_back

    run = load_run(run_dir)
    command = way_back(run, next(event for event in reversed(run.events) if event["event"] == "eval_regression"))
    return f", or go back to before that with `{command}`" if command else ""
