"""`curriculum eval`."""

import click

from curriculum.cli.options import (
    STEP,
    STORE_DIR,
    WEIGHTS,
    pass_over_read_only_stores,
    print_json,
    print_lines,
    step_text,
    tell_untrained,
)


@click.command()
@click.argument("run")
@STEP
@WEIGHTS
@click.option(
    "--eval-dataset-dir", "eval_dataset_dirs", metavar="[NAME=]DIR", multiple=True, help="A new eval set; repeatable."
)
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set another field of a new set, as in evalsets.sets.NAME.format=messages; repeatable.",
)
@click.option(
    "--sets",
    metavar="NAME,...",
    multiple=True,
    help="The run's sets to measure beside new ones, all by default; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@STORE_DIR
def command(run, step, weights, eval_dataset_dirs, overrides, sets, as_json, store_dir):
    """Measure a checkpoint of RUN as training would have, on its eval sets and on new ones. RUN is only read."""
    from curriculum.evaluate import evaluate

    pass_over_read_only_stores()
    measured = evaluate(
        run,
        step=step,
        weights=weights,
        eval_dataset_dirs=eval_dataset_dirs,
        overrides=overrides,
        sets=[name.strip() for name in ",".join(sets).split(",") if name.strip()] if sets else None,
        store_dir=store_dir,
    )
    tell_untrained(measured.step, step)
    for warning in measured.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json(measured.to_json())
    else:
        print_lines(table(measured, step_text(run, measured.step, step, weights)))


def table(measured, of_step) -> list[str]:
    """An `Evaluation` as lines of text; `of_step` says which step it is."""
    from curriculum.record.wording import columns, few_documents, metric_texts, metric_titles
    from evalsets.metrics import clusters
    from evalsets.summary import Summary

    header = ("set", *metric_titles(Summary), "windows", "documents")
    rows = [header]
    for name, summary in measured.summaries.items():
        evalset = measured.evalsets[name]
        counts = (f"{evalset.num_windows:,}", f"{evalset.num_documents:,}")
        rows.append((name, *metric_texts(vars(summary), Summary), *counts))
    title = f"{measured.run}: {of_step}, {measured.weights} weights"
    few = [name for name in measured.summaries if clusters(measured.evalsets[name].origin_N)[1] == "blocks"]
    footer = [f"few documents in {few_documents(few)}"] if few else []
    return [title, *columns(rows, right=range(1, len(header)), indent=""), *footer]
