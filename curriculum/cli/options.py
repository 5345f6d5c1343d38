"""Options that several commands share, and the config they make."""

import functools
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from curriculum.find_checkpoint import is_step
from curriculum.record.events import EVENTS, last_gold, plain, read_events
from curriculum.record.wording import printable
from curriculum.run import DEFAULT_STORE_DIR


class _Folder(click.Path):
    """A folder by its name; an empty one, as of a shell variable that is not set, would be the current folder."""

    def convert(self, value, param, ctx):
        if value == "":
            self.fail("got an empty name; is a shell variable not set? The current folder is .", param, ctx)
        return super().convert(value, param, ctx)


def step_text(run: str | os.PathLike, step: int, asked: str | None, weights: str) -> str:
    """`step 300 (gold)`: the step of a checkpoint of a run; if it was not asked for by its number, what it is."""
    if is_step(asked) or weights.startswith("mean:"):
        return f"step {step:,}"
    record = Path(run) / EVENTS  # a run without one has no gold to take, but parameters
    gold = last_gold(read_events(Path(run))) if asked != "latest" and record.exists() else None
    is_gold = gold is not None and gold["step"] == step
    return f"step {step:,} ({'gold' if is_gold else 'latest'})"


def tell_untrained(step: int | None, asked: str | None) -> None:
    """Tell on stderr that the checkpoint which was taken, as none was asked for, is of before any training."""
    if step == 0 and asked is None:
        click.echo("note: step 0 is what the run began with; --step latest takes the last checkpoint", err=True)


def pass_over_read_only_stores() -> None:
    """Print no warning that compiled programs cannot be kept: a run that is only read may have others' stores."""
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache")


def print_json(told: Any) -> None:
    """Print what `--json` asks for; floats that are not finite are text."""
    click.echo(json.dumps(plain(told), indent=2, allow_nan=False))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines for people; what they name, such as a folder found on the disk, may hold control characters."""
    click.echo("\n".join(map(printable, lines)))


FOLDER = _Folder(path_type=Path)
STORE_DIR = click.option(
    "--store-dir", default=DEFAULT_STORE_DIR, show_default=True, metavar="DIR", help="Where token stores are kept."
)
STEP = click.option(
    "--step", metavar="latest|gold|STEP", help="Which checkpoint; gold by default, or latest without one."
)
WEIGHTS = click.option("--weights", default="raw", show_default=True, metavar="W", help="raw, ema, or mean:PHASE.")
CHANGES = {
    "overrides": click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value, as YAML; repeatable."
    ),
    "dataset_dirs": click.option(
        "--dataset-dir",
        "dataset_dirs",
        metavar="[NAME=]DIR",
        multiple=True,
        help="Define or replace a source; a CONFIG without phases gets one phase of it. Its other fields: "
        "--set sources.NAME.format=...",
    ),
    "eval_dataset_dirs": click.option(
        "--eval-dataset-dir",
        "eval_dataset_dirs",
        metavar="[NAME=]DIR",
        multiple=True,
        help="Add a named eval set. Its other fields: --set evalsets.sets.NAME.format=...",
    ),
    "init_from": click.option(
        "--init-from",
        metavar="RUN|CHECKPOINT|DIR",
        help="Begin with the parameters of a run (its gold, else its latest, or RUN/checkpoints/STEP) or of a Hugging "
        "Face folder.",
    ),
    "keep_optimizer": click.option(
        "--keep-optimizer", is_flag=True, help="With --init-from: also take over the optimizer state."
    ),
}


def config_options(config_required: bool = True):
    """Decorate a command with CONFIG and the options that change it.

    The command gets `config_path`, `store_dir`, and `changes` to unpack into `load_config`.
    """

    def decorate(command):
        @functools.wraps(command)
        def with_changes(**options):
            return command(changes={name: options.pop(name) for name in CHANGES}, **options)

        config = click.argument("config_path", metavar="CONFIG", required=config_required)
        for option in reversed([config, *CHANGES.values(), STORE_DIR]):
            with_changes = option(with_changes)
        return with_changes

    return decorate
