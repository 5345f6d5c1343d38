"""The weights of a Hugging Face folder: safetensors files, found, checked by their headers, and mapped.

Nothing here imports jax. Arrays are read only when `StoredTensor.map()` is indexed, by `hf_fingerprint` and by
`equal_bytes`.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from curriculum.errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredTensor:
    """Where an array is stored: bytes [start, end) of a file, rows first; `dtype` is safetensors' name for its type."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def map(self) -> np.ndarray:
        """The array, read-only, mapped from the file. For FLOATS only."""
        import ml_dtypes

        dtype = np.dtype({"F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}[self.dtype])
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.start, self.shape)


def stored_tensors(folder: str | os.PathLike) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name, from headers. Raises InputError if there are no files, or one is incomplete."""
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in weight_files(folder):
        try:
            for name, tensor in _header(file)[1].items():
                if name in tensors:
                    problems.append(f"{file}: {name} is already in {tensors[name].file.name}; copy the folder again")
                tensors[name] = tensor
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return tensors


def weights_metadata(folder: str | os.PathLike) -> dict[str, str]:
    """What the writer of a folder's weights noted in their header, or in that of the first of their files."""
    return _header(weight_files(folder)[0])[0]


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """model.safetensors, else the shards that the index names. Raises InputError if a file is missing."""
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        fix = "convert it: in transformers, from_pretrained and then save_pretrained writes safetensors"
        if others:
            raise InputError(f"{folder}: has its weights only as {', '.join(others[:3])}; {fix}")
        raise InputError(f"{folder / WEIGHTS}: is missing; expected the weights of a Hugging Face folder")
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = [name for name in sorted(names) if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: is not an index of safetensors files ({error!r}); copy the folder again") from None
    if not names:
        raise InputError(f"{index}: names no file; copy the folder again")
    if missing:
        raise InputError(*(f"{folder / name}: is missing; {INDEX} names it; copy the folder again" for name in missing))
    return [folder / name for name in sorted(names)]


def hf_fingerprint(folder: str | os.PathLike) -> str:
    """xxh3_128 over names and contents of the weights' files; headers would stay the same in further training."""
    digest = xxhash.xxh3_128()
    for file in weight_files(folder):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.file, "rb") as first, open(other.file, "rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = [min(_CHUNK_BYTES, one.end - at) for at in range(one.start, one.end, _CHUNK_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)


def _header(file: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The metadata and the tensors of a file, from its header, which the library checks.

    The format: the length of a JSON object as 8 bytes, the object, then the arrays without gaps.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open(file, "rb") as stream, safe_open(file, "numpy"):  # of a file that cannot be opened Python says more
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except SafetensorError as error:
        raise InputError(f"{file}: is not a complete safetensors file: {error}; copy it again") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    metadata = header.pop("__metadata__", {})
    return metadata, {
        name: StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), *(8 + length + offset for offset in entry["data_offsets"])
        )
        for name, entry in header.items()
    }
