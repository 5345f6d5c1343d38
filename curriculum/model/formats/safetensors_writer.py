"""Arrays written as safetensors files, in several types and shards."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from curriculum.errors import InputError

SHARD_BYTES = 5 * 10**9  # as the hub's tools cut large models
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def write_safetensors(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write one file, or several of at most `shard_bytes` each (a larger array alone in its own) and their index.

    `arrays` are (name, array); only those of one file are held at a time.
    """
    files: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total_size = 0

    def save() -> None:
        files.append(list(shard))
        save_arrays(shard, folder / f"{len(files)}.part", metadata)
        shard.clear()

    for name, array in arrays:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > shard_bytes:
            save()
        shard[name] = array
        total_size += array.nbytes
    save()
    if len(files) == 1:
        (folder / "1.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(files, start=1):
        file = f"model-{i:05}-of-{len(files):05}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_arrays(arrays: dict[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a file: unlike safetensors' own, the same bytes for the same arrays, with its folder's readers."""
    from safetensors.numpy import save_file

    save_file(arrays, path, dict(metadata))
    with open(path, "r+b") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        in_order = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(in_order) > num_bytes:
            raise ValueError(f"{path}: {len(in_order)} bytes of header, expected at most {num_bytes}")
        file.seek(8)
        file.write(in_order.ljust(num_bytes))
    path.chmod(path.parent.stat().st_mode & 0o666)


def rounded_all(arrays: Iterable[tuple[str, np.ndarray]], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 array) rounded to DTYPES[dtype]. Raises InputError if a finite value becomes infinite."""
    import ml_dtypes  # noqa: F401, by which numpy knows bfloat16

    for name, array in arrays:
        with np.errstate(over="ignore"):
            rounded = array.astype(DTYPES[dtype], copy=False)
        check_rounded(name, array, rounded, dtype, DTYPES)
        yield name, rounded


def check_rounded(name: str, array: np.ndarray, rounded: np.ndarray, dtype: str, dtypes: Iterable[str]) -> None:
    """Raise InputError, which names the `dtypes` there are, if a finite value became infinite."""
    lost = np.isfinite(array) & ~np.isfinite(rounded)
    if lost.any():
        got = f"{np.count_nonzero(lost)} of {array.size} values of {name} are too large for it"
        raise InputError(f"--dtype {dtype}: {got}, such as {array[lost][0]:g}; use another: {', '.join(dtypes)}")
