"""`curriculum export`."""

import os
from pathlib import Path

import click

from curriculum.cli.options import FOLDER, STEP, WEIGHTS, print_json, step_text, tell_untrained


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    required=True,
    metavar="hf|gguf|safetensors",
    help="hf: a folder for transformers, vllm and similar tools. gguf: model.gguf for llama.cpp. safetensors: the "
    "arrays under their own names, with model.json.",
)
@STEP
@WEIGHTS
@click.option(
    "--dtype",
    default="f32",
    show_default=True,
    metavar="f32|bf16|f16|q8_0",
    help="Type of the exported values; q8_0 (8-bit blocks) is for gguf only.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Fold the adapters of a LoRA run into its model; without it the adapters alone are written, for peft.",
)
@click.option("-o", "--output", required=True, type=FOLDER, help="A new or an empty folder to write to.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(run, format_name, step, weights, dtype, merge, output, as_json):
    """Write the parameters of RUN, with its tokenizer, to a folder; hf and gguf get a model card."""
    # Nothing is computed on a device: an export takes no memory of a card that a run may be using.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from curriculum.export import export

    exported = export(run, output, format=format_name, step=step, weights=weights, dtype=dtype, merge=merge)
    if as_json:
        written = {"format": format_name, "weights": weights, "dtype": dtype, "merge": merge}
        files = {
            file.relative_to(output).as_posix(): file.stat().st_size for file in output.rglob("*") if file.is_file()
        }
        print_json({"run": str(run), "step": exported, "output": str(output), **written, "files": files})
    else:
        merged = ", adapters merged" if merge else ""
        of_step = step_text(run, exported, step, weights)
        click.echo(f"{output}: {of_step} of {run}, {format_name}, {weights} weights, {dtype}{merged}")
    tell_untrained(exported, step)
