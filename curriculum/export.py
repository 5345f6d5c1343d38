"""A run's parameters in a folder that needs neither the run nor this program."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curriculum.errors import InputError
from curriculum.run import RunDirectory, find_checkpoint

if TYPE_CHECKING:
    from curriculum.model.model import Model, Params

SHARD_BYTES = 5 * 10**9  # as the hub's tools cut large models


def export(
    run: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    format: str = "safetensors",
    step: str | int | None = None,
    weights: str = "raw",
    dtype: str = "f32",
) -> int:
    """Write the parameters of a run, its model.json and its tokenizer/; return the step that they are of.

    `step`: "gold", "latest" or a number; by default gold, or latest where there is no gold.
    `weights`: "raw", or "ema", the moving average, of the checkpoint of `step`; or "mean:PHASE", the mean of the last
    checkpoints of a phase (`averages.phase_mean`), whose step is the phase's last checkpoint.

    `safetensors`: arrays in model.safetensors, named by their dotted path (`blocks.000.attention.query.kernel`, a
    kernel as [in, out]); above 5 GB in several files with model.safetensors.index.json. `dtype`: "f32", or "bf16" or
    "f16" for half the size, every value rounded to the nearest. Of the checkpoint only the parameters are read, and of
    the run nothing else is needed. Raises InputError for a run, step, format, weights, dtype or folder that will not
    do, and for a value too large for the dtype; then nothing is written.
    """
    directory, output = RunDirectory(Path(run)), Path(output_dir)
    if not os.path.isfile(directory.resolved_config):
        raise InputError(f"{run}: holds no run; expected a directory made by `curriculum train`")
    write = _chosen("--format", format, _FORMATS)
    numpy_name = _chosen("--dtype", dtype, _DTYPES)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"-o {output}: is there already; expected a new or an empty folder")

    step, saved = find_weights(directory, step, weights)

    # What can be said without these is said at once.
    import jax

    from curriculum.model.model import parameter_name
    from curriculum.train.checkpoint import load_params

    params = load_params(saved)
    arrays = {}
    for path, array in jax.tree.leaves_with_path(params):
        name = parameter_name(path)
        arrays[name] = _rounded(name, np.asarray(array, np.float32), dtype, jax.numpy.dtype(numpy_name))

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            folder = Path(scratch) / output.name
            folder.mkdir()
            write(folder, arrays, {"step": str(step), "weights": weights})
            shutil.copyfile(directory.path / "model.json", folder / "model.json")
            shutil.copytree(directory.tokenizer, folder / "tokenizer")
            folder.replace(output)
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written: {error}") from None
    return step


def load_exported(folder: str | os.PathLike, model: Model) -> Params:
    """The parameters of `model` on the host, float32, from a folder that `export` wrote as safetensors.

    Raises InputError where the folder holds no such files, or other arrays than the model's.
    """
    import jax
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from curriculum.model.model import abstract_params, parameter_name

    arrays: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        try:
            arrays |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: cannot be read: {error}; export it anew") from None
    if not arrays:
        raise InputError(f"{folder}: holds no model.safetensors; expected a folder made by `curriculum export`")
    shapes = abstract_params(model)
    asked = {parameter_name(path): array.shape for path, array in jax.tree.leaves_with_path(shapes)}
    found = {name: array.shape for name, array in arrays.items()}
    if found != asked:
        name = min(name for name in {*found, *asked} if found.get(name) != asked.get(name))
        got, expected = (str(list(shape[name])) if name in shape else "none" for shape in (found, asked))
        raise InputError(f"{folder}: {name}: got {got}, expected {expected}, as in the model; is it another model's?")
    return jax.tree.map_with_path(lambda path, _: np.asarray(arrays[parameter_name(path)], np.float32), shapes)


def write_safetensors(
    folder: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str], shard_bytes: int = SHARD_BYTES
) -> None:
    """One file, or several of at most `shard_bytes` each (a larger array alone in its own) and their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in arrays.items():
        if shards[-1] and sum(a.nbytes for a in shards[-1].values()) + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = array
    if len(shards) == 1:
        _save(arrays, folder / "model.safetensors", metadata)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _save(shard, folder / file, metadata)
        weight_map |= dict.fromkeys(shard, file)
    total_size = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(arrays: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """As `save_file`, readable by whom the folder is: safetensors makes files for their owner alone."""
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)


_FORMATS = {"safetensors": write_safetensors}
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_WEIGHTS = {"raw": "params", "ema": "ema", "mean:PHASE": None}  # and the item of a checkpoint that holds them


def _rounded(name: str, array: np.ndarray, dtype: str, to: np.dtype) -> np.ndarray:
    """A float32 array in another type. Raises InputError where a finite value becomes infinite."""
    with np.errstate(over="ignore"):
        rounded = array.astype(to, copy=False)
    lost = np.isfinite(array) & ~np.isfinite(rounded)
    if lost.any():
        got = f"{np.count_nonzero(lost)} of {array.size} values of {name} are too large for it"
        raise InputError(f"--dtype {dtype}: {got}, such as {array[lost][0]:g}; use another: {', '.join(_DTYPES)}")
    return rounded


def _chosen(option: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        near = get_close_matches(name, table, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{option} {name}: there is no such one; {hint}expected one of: {', '.join(table)}")
    return table[name]


def find_weights(directory: RunDirectory, step: str | int | None, weights: str) -> tuple[int, Path]:
    """(step, folder of the arrays) of the "raw" or "ema" weights of a checkpoint, or of "mean:PHASE".

    `step` is as for `find_checkpoint`, and None for a mean. Raises InputError where there are none.
    """
    kind, _, phase = weights.partition(":")
    if kind == "mean":
        if step is not None:
            raise InputError(f"--step {step}: the mean of a phase is of its last checkpoints; leave --step out")
        from curriculum.train.averages import mean_of_phase

        return mean_of_phase(directory.averages, phase)
    item = _chosen("--weights", weights, _WEIGHTS)
    step, checkpoint = find_checkpoint(directory, step)
    if not (checkpoint / item).is_dir():
        raise InputError(
            f"--weights {weights}: step {step} of {directory.path} was saved without a moving average, which "
            "averages.ema_decay keeps; expected raw, or mean:PHASE"
        )
    return step, checkpoint / item
