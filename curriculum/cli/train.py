"""`curriculum train`."""

from pathlib import Path
from typing import Any

import click

from curriculum.cli.exits import stopped_runs
from curriculum.cli.importing import importing
from curriculum.cli.options import FOLDER, config_options
from curriculum.config import load_config
from curriculum.errors import InputError
from curriculum.train.processes.launch import JOIN_SECONDS, find_launch
from curriculum.train.resuming.remembered import config_going_on


@click.command()
@config_options()
@click.option("--run-dir", type=FOLDER, help="Directory of the run; runs/<name> by default.")
@click.option(
    "--resume",
    metavar="latest|gold|STEP",
    help="Continue the run from its newest checkpoint, its gold one, or a step's.",
)
@click.option(
    "--accept-past",
    is_flag=True,
    help="With --resume: continue even if CONFIG contradicts what is already trained; the edit is recorded.",
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="Train in several processes, which connect there: the machine of process 0, and a free port of it. Under "
    "SLURM and Open MPI the processes find each other.",
)
@click.option("--num-processes", type=int, help="Number of processes in the run; 1: this one alone.")
@click.option("--process-id", type=int, help="Index of this process, from 0.")
@click.option(
    "--join-seconds",
    type=click.FloatRange(min=0),
    default=JOIN_SECONDS,
    show_default=True,
    help="How long a process waits for the others to start.",
)
@click.option("--dry-run", is_flag=True, help="Check, prepare, compile, take one step and one eval; leave no run.")
def command(config_path, changes, store_dir, run_dir, resume, accept_past, join_seconds, dry_run, **process):
    """Train a run through its phases, or continue one.

    A run remembers the options that changed its config: they need not be given again with --resume. If CONFIG gives
    another value than one of them, a line says so.
    """
    launch = find_launch(**process)
    if accept_past and resume is None:
        raise InputError("--accept-past: a new run has no past; give --resume, or leave it out")
    if dry_run and resume is not None:
        raise InputError("--dry-run: tests a fresh start, so it cannot be combined with --resume; leave one out")
    unused: list[str] = []
    if resume is None:
        config = load_config(config_path, **changes)
    else:
        config, run_dir, unused = config_going_on(config_path, run_dir, changes)
    run_dir = run_dir or Path("runs") / config.name

    with importing():  # before the processes connect: Ctrl-C in it leaves without a word to others
        from curriculum.train.dry_run import dry_run as run_dry
        from curriculum.train.processes.together import check_same, is_first, joined
        from curriculum.train.trainer import train

    with joined(launch, join_seconds):
        check_same(lambda: {"--dry-run": "yes" if dry_run else "no"})
        for line in unused if is_first() else ():
            click.echo(line, err=True)
        if not dry_run:
            with stopped_runs("--resume latest", run_dir):
                train(config, run_dir, resume=resume, accept_past=accept_past, store_dir=store_dir)
        elif (done := run_dry(config, store_dir=store_dir)) and is_first():
            _tell(config.name, done)


def _tell(name: str, done: dict[str, Any]) -> None:
    from curriculum.record.events import record_name
    from curriculum.record.wording import mesh_text, size_text

    evals = " | ".join(f"{record_name(name)} {loss:.4f}" for name, loss in done["eval_losses"].items())
    devices = done["devices"]
    loss = "no target scored" if done["loss"] is None else f"loss {done['loss']:.4f}"
    trained, whole = done["num_trained"], done["num_parameters"]
    of_them = "" if trained == whole else f", {trained:,} of them trained"
    in_processes = f" in {devices['processes']} processes" if "processes" in devices else ""
    compiled = "".join(
        f"  updates of {update['shape']} compiled in {update['compile_s']:.2f} s; the compiler counts "
        f"{size_text(update['bytes'])} of a device's memory\n"
        for update in done["updates"]
    )
    click.echo(
        f"dry run of {name}: {whole:,} parameters{of_them}, {done['total_steps']} steps planned\n"
        f"  mesh {mesh_text(devices['mesh'])}, {devices['num']} x {devices['kind']}{in_processes}\n"
        f"  first step {done['first_step_s']:.2f} s, {loss} | first eval "
        f"{done['first_eval_s']:.2f} s, {evals}\n"
        f"{compiled}"
        f"  peak memory {done['peak_memory_gb']:.2f} GB; no run was written"
    )
    for warning in done["warnings"]:
        click.echo(f"  warning    {warning}")
