"""`curriculum inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(run, as_json):
    """Show what RUN is, how far it is, and how it does; the run may still be training."""
    from curriculum.record.events import plain
    from curriculum.run import load_run
    from curriculum.views.inspection import inspect_run, text

    facts = inspect_run(load_run(run))
    click.echo(json.dumps(plain(facts), indent=2, allow_nan=False) if as_json else "\n".join(text(facts)))
