"""The `mesh` section of a config, and what it asks of a batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are divided: data x fsdp x tensor. At most one size may be -1: all remaining devices."""

    data: int = -1
    """Groups of devices that hold the same state and take different rows."""
    fsdp: int = 1
    """Devices over which parameters, gradients and moments are split; each takes rows of its own."""
    tensor: int = 1
    """Devices over which heads, feed-forward and vocabulary are split if it divides them; all take the same rows."""

    def problems(self) -> list[tuple[str, str]]:
        """Problems with the sizes, as (field, message) pairs; the field is empty if several are concerned."""
        sizes = asdict(self)
        problems = [
            (name, f"got {size}, expected 1 or more, or -1 for all remaining devices")
            for name, size in sizes.items()
            if size < 1 and size != -1
        ]
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            problems.append(("", f"got -1 for {' and '.join(free)}, expected at most one -1; give the others a size"))
        return problems

    @property
    def row_shards(self) -> int:
        """How many parts the rows of a micro-step are cut into, or a divisor of that number while a size is -1."""
        return max(self.data, 1) * max(self.fsdp, 1)


def uneven_rows(batch_size: int, grad_accum: int, row_shards: int) -> str | None:
    """Why the rows of a micro-step cannot be cut into `row_shards` equal parts; None if they can."""
    rows = batch_size // grad_accum
    if rows % row_shards == 0:
        return None
    return (
        f"got {batch_size} in {grad_accum} micro-steps of {rows} rows, expected rows that the mesh's data x fsdp "
        f"({row_shards}) divides; change batch_size, grad_accum or mesh"
    )
