"""The weights of a Hugging Face folder: safetensors files, found, checked by their headers, and mapped.

Nothing here imports jax. Arrays are read only when `StoredTensor.map()` is indexed, by `hf_fingerprint` and by
`equal_bytes`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from curriculum.errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_ITEM_BYTES |= {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
FLOATS = ("F32", "F16", "BF16")
_LARGEST_HEADER_BYTES = 100_000_000  # the format's limit
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
    """Every tensor of a folder by name, from the files' headers.

    Raises InputError if there are no safetensors files, or if one is incomplete.
    """
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in weight_files(folder):
        try:
            for name, tensor in _header(file).items():
                if name in tensors:
                    problems.append(f"{file}: {name} is already in {tensors[name].file.name}; copy the folder again")
                tensors[name] = tensor
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return tensors


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """model.safetensors or, in a folder without it, the shards that the index names, as transformers chooses.

    Raises InputError if a file is missing.
    """
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
    """A hex digest of the weights: xxh3_128 over the names and contents of the files, all of which are read.

    Sizes and headers are not enough: further training leaves them the same.
    """
    digest = xxhash.xxh3_128()
    for file in weight_files(folder):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.file, "rb") as first, open(other.file, "rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = [min(_CHUNK_BYTES, one.end - at) for at in range(one.start, one.end, _CHUNK_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)


def _header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, from its header.

    The format: the length of a JSON object as 8 bytes, the object, then the arrays without gaps.
    """
    problem = f"{file}: is not a complete safetensors file"
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            fits = 8 + length <= size and length <= _LARGEST_HEADER_BYTES
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if not fits:
        raise InputError(f"{problem}: its header does not fit into its {size} bytes; copy it again")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{problem}: its header is not JSON") from None
    try:
        tensors = dict(_entries(file, 8 + length, header))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{problem}: its header: {error!r}; copy it again") from None
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise InputError(f"{problem}: {name} begins at byte {tensor.start}, expected {end}; copy it again")
        end = tensor.end
    if end != size:
        raise InputError(f"{problem}: it has {size} bytes, but its header describes {end}; copy it again")
    return tensors


def _entries(file: Path, offset: int, header: dict) -> Iterable[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(f"{name}: {entry}")
        if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - start:
            raise ValueError(f"{name}: {dtype}{list(shape)} in {end - start} bytes")
        yield name, StoredTensor(file, dtype, shape, offset + start, offset + end)
