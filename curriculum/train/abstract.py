"""Abstract arrays, for which programs are compiled before there are values."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curriculum.train.mesh import ROW_AXES, placed, state_shardings
from curriculum.train.programs import StepShape
from phases.batches import Batch


def abstract_on_mesh(mesh: Mesh, shapes: Any) -> Any:
    """Shapes, types and placement of a state or of parameters."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def abstract_batch(mesh: Mesh, shape: StepShape) -> Batch:
    """Shapes, types and placement of a batch."""
    A, B, T, _ = shape
    lying = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec(None, ROW_AXES)))
    ids_ABT, scored_ABT = lying((A, B, T), np.int32), lying((A, B, T), np.bool_)
    return Batch(ids_ABT, ids_ABT, scored_ABT, ids_ABT, lying((A, B), np.int32))


def num_bytes(tree: Any) -> int:
    """Total bytes of the arrays of a tree; abstract arrays will do."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))


def zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An array of zeros, placed as `like`."""
    return placed(np.zeros(like.shape, like.dtype), like.sharding)


def abstract_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, type and placement of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
