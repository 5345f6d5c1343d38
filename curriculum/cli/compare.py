"""`curriculum compare`."""

from pathlib import Path

import click

from curriculum.cli.options import print_json, print_lines


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", type=click.Path(path_type=Path))
@click.option(
    "--at",
    metavar="tokens|step|gold|STEP",
    default="tokens",
    show_default=True,
    help="Compare at equal tokens or steps, the most that all have, or at this step; a run that another began from is "
    "taken at the step where that one began. gold: each run at its own gold checkpoint.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(runs, at, as_json):
    """Compare the checkpoints of runs, set by set: losses, and paired differences from the first run.

    A folder of runs stands for all runs in it.
    """
    from curriculum.views.compare import compare
    from curriculum.views.compare_text import table

    comparison = compare(runs, at=at)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_lines(table(comparison))
