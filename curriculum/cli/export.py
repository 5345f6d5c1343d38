"""`curriculum export`."""

from __future__ import annotations

from pathlib import Path

import click

from curriculum.cli.options import STEP, WEIGHTS


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    required=True,
    metavar="hf|gguf|safetensors",
    help="hf: a folder for transformers, vllm and their like. gguf: model.gguf for llama.cpp. safetensors: the arrays "
    "under their own names, with model.json.",
)
@STEP
@WEIGHTS
@click.option(
    "--dtype",
    default="f32",
    show_default=True,
    metavar="f32|bf16|f16|q8_0",
    help="Of the exported values; q8_0, blocks of 8 bits, for gguf alone.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Fold the adapters of a LoRA run into its model; without it they alone are written, as a folder for peft.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A new or an empty folder.")
def command(run, format_name, step, weights, dtype, merge, output):
    """Write the parameters of RUN, with its tokenizer, into a folder of their own; hf and gguf with a model card."""
    from curriculum.export import export

    exported = export(run, output, format=format_name, step=step, weights=weights, dtype=dtype, merge=merge)
    merged = ", adapters merged" if merge else ""
    click.echo(f"{output}: step {exported} of {run}, {format_name}, {weights} weights, {dtype}{merged}")
    if exported == 0 and step is None:
        click.echo("  the gold, but it is what the run began with: --step latest takes what it ended with")
