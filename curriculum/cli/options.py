"""Options that several commands share, and the config they make."""

from __future__ import annotations

from collections.abc import Iterable

import click

from curriculum.plan import DEFAULT_STORE_DIR

_OPTIONS = [
    click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value, as YAML; repeatable."
    ),
    click.option(
        "--dataset-dir", "dataset_dirs", metavar="[NAME=]DIR", multiple=True, help="Define or replace a source."
    ),
    click.option(
        "--eval-dataset-dir", "eval_dataset_dirs", metavar="[NAME=]DIR", multiple=True, help="Add a named eval set."
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


def split_options(options: Iterable[str]) -> dict[str, list[str]]:
    """Options as a run directory remembers them (`--set train.steps=100`), by what `load_config` calls them."""
    names = {"--set": "overrides", "--dataset-dir": "dataset_dirs", "--eval-dataset-dir": "eval_dataset_dirs"}
    given: dict[str, list[str]] = {name: [] for name in names.values()}
    for option in options:
        flag, _, value = option.partition(" ")
        given[names[flag]].append(value)
    return given
