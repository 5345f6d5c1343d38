"""`curriculum export`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "format_name", required=True, metavar="F", help="safetensors.")
@click.option("--step", metavar="latest|gold|STEP", help="Which checkpoint; gold by default, or latest without one.")
@click.option("--weights", default="raw", show_default=True, metavar="W", help="raw, ema, or mean:PHASE.")
@click.option("--dtype", default="f32", show_default=True, metavar="f32|bf16|f16", help="Of the exported values.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A new or an empty folder.")
def command(run, format_name, step, weights, dtype, output):
    """Write the parameters of RUN, with model.json and the tokenizer, into a folder of their own."""
    from curriculum.export import export

    exported = export(run, output, format=format_name, step=step, weights=weights, dtype=dtype)
    click.echo(f"{output}: step {exported} of {run}, {format_name}, {weights} weights, {dtype}")
