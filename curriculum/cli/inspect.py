"""`curriculum inspect`."""

from pathlib import Path

import click

from curriculum.cli.options import print_json, print_lines


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def command(run, as_json):
    """Show what RUN is, how far it is, and how it does; the run may still be training.

    For a folder of runs: one line per run.
    """
    from curriculum.run import runs_below
    from curriculum.run_directory import RunDirectory
    from curriculum.views.inspection import inspect_run
    from curriculum.views.inspection_text import text
    from curriculum.views.run_list import list_runs, runs_text

    if not RunDirectory(run).has_config and runs_below(run):
        facts, as_text = list_runs(run), runs_text
    else:
        facts, as_text = inspect_run(run), text
    if as_json:
        print_json(facts)
    else:
        print_lines(as_text(facts))
