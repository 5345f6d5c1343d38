"""Where arrays live: one mesh, one rule for the state and one for batches. One device is a mesh of one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh of the first `num_devices` devices, all of them along the data axis."""
    devices = np.array(jax.devices()[:num_devices]).reshape(num_devices, 1, 1)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def place_state(mesh: Mesh, state: Any) -> Any:
    """The training state on the mesh: every array whole on every device."""
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def place_batch(mesh: Mesh, batch: Any) -> Any:
    """A batch on the mesh: rows (the second axis) split over the data axes."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"))))


def place_rows(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Rows of an eval micro-batch (the first axis) split over the data axes."""
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
