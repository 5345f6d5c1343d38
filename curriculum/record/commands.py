"""Commands that messages and views name: what the user may type next."""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from curriculum.run import DEFAULT_STORE_DIR

MORE_STEPS, MORE_EPOCHS = "train.steps", "sources.NAME.max_epochs"  # what is raised so that a complete run goes on


def resume_command(
    config_file: str | Path,
    run_dir: Path,
    store_dir: str | Path,
    step: str = "latest",
    raised: str | None = None,
    *,
    own_model: bool = False,
    own_optimizer: str | None = None,
) -> str:
    """The command that goes on with a run; `raised` is the key to raise so that it can.

    With a model or an optimizer (its name) of the user's own, which no command knows, the Python call.
    """
    if own_model or own_optimizer is not None:
        run = repr(str(run_dir))
        remembered = f"remembered=run_directory({run}).command_line(), continues={run}"
        config = f"load_config({str(config_file)!r}, {remembered})"
        resume = repr(int(step) if step.isdecimal() else step)
        more = [] if raised is None else [f"a higher {raised}"]
        return _call(f"train({config}, {run}, resume={resume}", store_dir, own_model, own_optimizer, more)
    own, where = shlex.quote(str(config_file)), shlex.quote(str(run_dir))
    more = "" if raised is None else f" --set {raised}=MORE"
    return f"{program('curriculum')} train {own} --run-dir {where}{_stores(store_dir)} --resume {step}{more}"


def branch_command(
    run_dir: Path,
    store_dir: str | Path,
    at: int,
    changes: Sequence[str] = ("KEY=VALUE",),
    *,
    own_model: bool = False,
    own_optimizer: str | None = None,
) -> str:
    """The command that branches off from a run at a step, with changes of its config; the Python call as above."""
    if own_model or own_optimizer is not None:
        call = f"branch({str(run_dir)!r}, {at}, 'NEW', overrides={[*changes]}"
        return _call(call, store_dir, own_model, own_optimizer)
    sets = "".join(f" --set {change}" for change in changes)
    trunk = shlex.quote(str(run_dir))
    return f"{program('curriculum')} branch {trunk} --at {at} --run-dir NEW{_stores(store_dir)}{sets}"


def _call(
    begun: str, store_dir: str | Path, own_model: bool, own_optimizer: str | None, given: Sequence[str] = ()
) -> str:
    """A Python call, of which `begun` lacks the last arguments, and what it needs beside the arguments."""
    stores = "" if str(store_dir) == DEFAULT_STORE_DIR else f", store_dir={str(store_dir)!r}"
    model = ", make_model=..." if own_model else ""
    given = [*given, *([] if own_optimizer is None else [f"{own_optimizer!r} in OPTIMIZERS"])]
    return f"{begun}{stores}{model}) from Python{', with ' if given else ''}{' and '.join(given)}"


def _stores(store_dir: str | Path) -> str:
    return "" if str(store_dir) == DEFAULT_STORE_DIR else f" --store-dir {shlex.quote(str(store_dir))}"


def program(name: str) -> str:
    """How to call a program of this environment: by its name if PATH leads to it, else by its path."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def tensorboard_link(run_dir: Path) -> str:
    """The URL of one chart with all eval sets of this run, without averages, if TensorBoard serves the folder above."""
    run_filter = "^" + re.sub(r"([^\w-])", r"\\\1", run_dir.resolve().name) + "/"
    run_filter += "[^@]*$" if any((run_dir / "tensorboard").glob("*@*")) else ""
    query = f"runFilter={quote(run_filter, safe='')}&tagFilter=eval_sets&smoothing=0"
    return f"http://127.0.0.1:6006/?{query}#timeseries"
