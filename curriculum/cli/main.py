"""The `curriculum` command.

Exit codes: 0 done, or stopped by `regression.action: stop`; 1 another process of the run is gone; 2 wrong input, too
little memory or disk, or the run is another's; 3 training diverged; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from curriculum.cli.importing import importing
from curriculum.disk.append import discard, how_to_make_room, is_disk_error, tell
from curriculum.errors import InputError, is_out_of_memory, nearest

_TAKES_LESS = (
    "`curriculum plan CONFIG` estimates the device memory of an update; a higher train.grad_accum, model.remat, a "
    "shorter seq_len, mesh.fsdp over more devices and a smaller model need less"
)
_JAX_VARIABLE = re.compile(r"for (?:JAX flag|environment) '?(jax_\w+)", re.IGNORECASE)  # in what jax raises
_LONGEST_LINE = 900  # characters of a message
_COMMANDS = {  # each in the module of its name
    "train": "Train a run through its phases, or continue one.",
    "plan": "Show what each phase reads and when, before training.",
    "prepare": "Turn text into token stores.",
    "eval": "Measure a checkpoint on the run's eval sets and on new ones.",
    "inspect": "Show what a run is, how far it is, and how it is doing.",
    "generate": "Continue prompts with a checkpoint of a run.",
    "compare": "Compare the checkpoints of runs, set by set, with intervals.",
    "report": "Draw one or more runs as one HTML file.",
    "branch": "Train a new run that shares another run's history up to a step.",
    "export": "Write the parameters of a run in another format.",
}


class _LazyGroup(click.Group):
    """Imports a command's module when it is run: `--help` stays quick."""

    def list_commands(self, ctx):
        return list(_COMMANDS)

    def get_command(self, ctx, name):
        if name not in _COMMANDS:
            return None
        with importing():
            module = importlib.import_module(f"curriculum.cli.{name}")
        return module.command

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(self, ctx, args):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = nearest(args[0], _COMMANDS)
            hint = f" Did you mean {near!r}?" if near and "Did you mean" not in error.message else ""
            error.message += hint or ("" if near else f" (commands: {', '.join(_COMMANDS)})")
            raise


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="curriculum")
def cli():
    """Train language models through a curriculum of data phases while several eval sets watch."""


def _one_line(problem: str) -> str:
    """A message as one line that is safe to print: what it quotes may be long and hold control characters."""
    line = "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in problem)
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} [...] {line[-_LONGEST_LINE // 2 :]}"  # keeps the place and the fix
    return line


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams: else the next files get their numbers, and what is logged."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _end_by_signals() -> None:
    """Let SIGTERM and SIGHUP end process 1 of a container, as they end any other where nothing handles them."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if os.getpid() == 1 and signal.getsignal(number) is signal.SIG_DFL:  # which Linux takes for "ignore" there
            signal.signal(number, lambda number, _: os._exit(128 + number))


def main() -> None:
    _open_closed_streams()
    _end_by_signals()
    # numpy would start a thread per core for products that no command makes; each spins for a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.unraisablehook = _unraisable
    try:
        run_command()
    except BaseException as ending:
        programs = sys.modules.get("curriculum.train.programs")
        vocabulary = sys.modules.get("curriculum.data.tokenizers.vocabulary")
        interrupted = isinstance(ending.__context__, KeyboardInterrupt | click.Abort)
        if not (
            (programs and programs.compiling())
            or (vocabulary and vocabulary.is_training())
            or (interrupted and "jax" in sys.modules)
        ):
            raise
        # Nothing of it can be interrupted. The interpreter would wait for the compiler, which may take minutes, and
        # crash if a tokenizer is trained, or XLA computes, just as it ends.
        status = ending.code if isinstance(ending, SystemExit) else 1
        if not isinstance(ending, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if processes := sys.modules.get("curriculum.train.processes.together"):
            processes.see_off()  # else done at the interpreter's exit
        os._exit(status)


def _interrupted() -> str:
    trains = sys.argv[1:2] in (["train"], ["branch"])
    return "interrupted" + ("; continue a run that had begun with --resume latest" if trains else "")


def run_command() -> None:
    """Run the command that the arguments name. Raises SystemExit with its exit code."""
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except InputError as error:
        if not error.problems:
            tell("process 0 says why this run of several processes ends")
        _refuse(error.problems, error.details)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as ending:
        if isinstance(ending.__cause__, EOFError):  # click takes it for the end of input, for which no command asks
            raise ending.__cause__ from None
        print(_interrupted(), file=sys.stderr)
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _refuse([f"out of memory: {error}"], [_TAKES_LESS])
    except ValueError as error:
        if not (variable := _JAX_VARIABLE.search(str(error))):
            raise
        _refuse([f"{variable[1].upper()}: jax cannot start: {error}; fix or unset this environment variable"])
    except PermissionError as error:
        if error.filename is None:
            raise
        _refuse([f"{error.filename}: {error.strerror}; grant the permission, or name another path"])
    except OSError as error:
        if not is_disk_error(error) or error.filename is not None:
            raise
        discard(sys.stdout)  # mostly it was that; at its exit Python would try to write the rest
        _refuse([f"cannot write: {error.strerror}; {how_to_make_room(error)}, or write to another place"])


def _refuse(problems: Sequence[str], details: Sequence[str] = ()) -> NoReturn:
    """Exit with 2 after saying what is wrong with the user's input or machine."""
    for problem in problems:
        tell(f"error: {_one_line(problem)}")
    for line in details:
        tell(f"  {_one_line(line)}".rstrip())
    sys.exit(2)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """End the process on a Ctrl-C that cannot be raised, as during garbage collection in jax, and would be lost."""
    if lost.exc_type is KeyboardInterrupt:
        print(_interrupted(), file=sys.stderr, flush=True)
        os._exit(130)
    sys.__unraisablehook__(lost)


if __name__ == "__main__":
    main()
