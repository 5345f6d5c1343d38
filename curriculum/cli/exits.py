"""How the commands that train end if the run is stopped."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click


@contextmanager
def stopped_runs(go_on: str, run_dir: Path) -> Iterator[None]:
    """Say why the run in `run_dir` was stopped, and how to `go_on` unless it diverged.

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
    """How to branch off from the last checkpoint before the rises of the last alarm, or else before some of them.

    Nothing if there is no such checkpoint.
    """
    from curriculum.find_checkpoint import checkpoint_steps
    from curriculum.record.commands import program
    from curriculum.record.sentences import new_offenders
    from curriculum.run import DEFAULT_STORE_DIR, load_run

    run = load_run(run_dir)
    alarm = next(event for event in reversed(run.events) if event["event"] == "eval_regression")
    before: dict[str, int] = {}  # by set, the newest eval that it is worse than
    for pair in new_offenders(alarm)[0]:
        before[pair["set"]] = max(before.get(pair["set"], 0), pair["baseline_step"])
    steps = [step for place in run.directory.places for step in checkpoint_steps(place)]
    earlier = [[step for step in steps if step <= newest] for newest in sorted(before.values())]
    at = max(next(filter(None, earlier), ()), default=None)
    if at is None:
        return ""
    stores = "" if run.store_dir == DEFAULT_STORE_DIR else f" --store-dir {shlex.quote(run.store_dir)}"
    command = f"{program('curriculum')} branch {shlex.quote(str(run_dir))} --at {at} --run-dir NEW{stores}"
    return f", or go back to before that with `{command} --set KEY=VALUE`"
