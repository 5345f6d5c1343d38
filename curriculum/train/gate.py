"""The external gate: a command that inspects a checkpoint and may veto it as the gold."""

import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_END_CHARACTERS = 300
_LOOK_SECONDS = 0.2


class GateVerdict(NamedTuple):
    """`reason`: why the gate vetoes, in one line; None if it accepts. `score`: lower is better; None if not given."""

    score: float | None
    reason: str | None


def run_gate(
    command: str, checkpoint: str | os.PathLike, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
) -> GateVerdict | None:
    """Ask the gate about a checkpoint, which must be saved whole.

    `command` is split like a shell command but run without a shell, in the working folder, with the checkpoint's
    absolute path as the last argument and nothing on stdin. It must exit with 0 and print on stdout only a JSON
    object: {"accept": true or false, "reason": text, "score": number}. The last two are optional; other keys are
    ignored. Anything else is a veto whose reason says what happened; it never ends the run. After `timeout_seconds`
    the gate is killed with its whole process group. The same happens once `stopped` returns True; the result is then
    None: no answer.
    """
    arguments = [*shlex.split(command), str(Path(checkpoint).absolute())]
    # Files, not pipes: a process left behind by the gate could keep a pipe open, and the read of it waiting.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            gate = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
            )
        except (OSError, ValueError) as error:
            return _veto(f"{arguments[0]} cannot be run: {error}")
        try:
            code = _waited_for(gate, timeout_seconds, stopped)
        except subprocess.TimeoutExpired:
            return None if stopped() else _veto(f"not done after {timeout_seconds:g} s", _end(stderr))
        finally:
            _kill_group(gate)
        if code != 0:
            how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
            return _veto(how, _end(stderr))
        stdout.seek(0)
        try:
            verdict = json.loads(stdout.read(), parse_int=float)
        except (ValueError, RecursionError):
            return _veto(f"expected a JSON object on stdout, got {_end(stdout) or 'nothing'}", _end(stderr))
    return _read(verdict)


def _waited_for(gate: subprocess.Popen, timeout_seconds: float, stopped: Callable[[], bool]) -> int:
    """The gate's exit code. Raises TimeoutExpired after `timeout_seconds`, and soon after `stopped` returns True."""
    until = time.monotonic() + timeout_seconds
    while True:
        left = until - time.monotonic()
        try:
            return gate.wait(max(0.0, min(left, _LOOK_SECONDS)))
        except subprocess.TimeoutExpired:
            if left <= _LOOK_SECONDS or stopped():
                raise


def _read(verdict: Any) -> GateVerdict:
    if not isinstance(verdict, dict):
        return _veto(f"expected a JSON object on stdout, got {json.dumps(verdict)[:_END_CHARACTERS]}")
    accept, reason, score = verdict.get("accept"), verdict.get("reason"), verdict.get("score")
    if not isinstance(accept, bool):
        got = json.dumps(accept) if "accept" in verdict else "none"
        return _veto(f'expected "accept": true or false, got {got[:_END_CHARACTERS]}')
    if reason is not None and not isinstance(reason, str):
        return _veto(f'expected text as "reason", got {json.dumps(reason)[:_END_CHARACTERS]}')
    if score is not None and not (isinstance(score, float) and math.isfinite(score)):
        return _veto(f'expected a finite number as "score", got {json.dumps(score)[:_END_CHARACTERS]}')
    return GateVerdict(score, None if accept else _one_line(reason or "") or "vetoed without a reason")


def _veto(what: str, stderr: str = "") -> GateVerdict:
    return GateVerdict(None, f"{what}: {stderr}" if stderr else what)


def _end(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _END_CHARACTERS))
    return _one_line(file.read().decode("utf-8", "replace"))


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _END_CHARACTERS else "..." + line[-_END_CHARACTERS:]


def _kill_group(gate: subprocess.Popen) -> None:
    """Kill what is left of the gate's process group, which the gate leads."""
    try:
        os.killpg(gate.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # all that is left is another user's: it can only be left, and might never end
        return
    gate.wait()
