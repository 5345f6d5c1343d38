"""Options that several commands share, and the config they make."""

from __future__ import annotations

import click

from curriculum.plan import DEFAULT_STORE_DIR

_OPTIONS = [
    click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value, as YAML; repeatable."
    ),
    click.option(
        "--dataset-dir",
        "dataset_dirs",
        metavar="[NAME=]DIR",
        multiple=True,
        help="Define or replace a source. Its other fields: --set sources.NAME.format=...",
    ),
    click.option(
        "--eval-dataset-dir",
        "eval_dataset_dirs",
        metavar="[NAME=]DIR",
        multiple=True,
        help="Add a named eval set. Its other fields: --set evalsets.sets.NAME.format=...",
    ),
    click.option(
        "--store-dir", default=DEFAULT_STORE_DIR, show_default=True, metavar="DIR", help="Where token stores are kept."
    ),
]


def config_options(config_required: bool = True):
    """CONFIG and everything that changes it."""

    def decorate(command):
        for option in reversed([click.argument("config_path", metavar="CONFIG", required=config_required), *_OPTIONS]):
            command = option(command)
        return command

    return decorate
