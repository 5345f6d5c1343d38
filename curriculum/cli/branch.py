"""`curriculum branch`."""

from pathlib import Path

import click

from curriculum.cli.exits import stopped_runs
from curriculum.cli.options import CHANGES, FOLDER, STORE_DIR


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--at", metavar="STEP", required=True, help="The step where the new run departs from RUN.")
@click.option("--run-dir", type=FOLDER, required=True, help="Directory of the new run.")
@CHANGES["overrides"]
@CHANGES["dataset_dirs"]
@CHANGES["eval_dataset_dirs"]
@click.option("--dry-run", is_flag=True, help="Check everything, and show what would be trained; leave no run.")
@STORE_DIR
def command(run, at, run_dir, dry_run, store_dir, **changes):
    """Train a new run that equals RUN up to a step and continues with RUN's config as the options change it.

    It starts from RUN's newest checkpoint at or before that step and repeats the steps between exactly as RUN did.
    """
    from curriculum.branch import branch, go_on_command

    with stopped_runs(f"`{go_on_command(run_dir, store_dir)}`", run_dir):
        branch(run, at, run_dir, **changes, store_dir=store_dir, dry_run=dry_run)
