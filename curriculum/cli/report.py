"""`curriculum report`."""

from pathlib import Path

import click

from curriculum.cli.options import print_lines
from curriculum.record.wording import printable


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
def command(runs, output):
    """Draw RUN as one self-contained HTML file; several runs are also compared.

    A folder of runs stands for all runs in it.
    """
    from curriculum.views.report import write_report

    for line in write_report(runs, output):
        click.echo(printable(line), err=True)
    print_lines([f"{output}: {output.stat().st_size / 1000:,.0f} kB; open it in a browser"])
