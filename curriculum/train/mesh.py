"""Where arrays live: one mesh, one sharding rule for the state and one for rows. A single device is a mesh of one."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import DictKey, GetAttrKey

from curriculum.errors import InputError
from curriculum.model.counts import split_axes
from curriculum.model.model import Model, Placement
from curriculum.record.wording import mesh_text
from curriculum.schema.sections import MeshConfig

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of the devices present, data x fsdp x tensor; only the first of them if the given sizes take fewer.

    Raises InputError if the sizes do not fit the devices, or leave a process without one.
    """
    devices = jax.devices()
    sizes = _axis_sizes(config, len(devices), devices[0].device_kind)
    num_devices = math.prod(sizes)
    without = set(range(jax.process_count())) - {device.process_index for device in devices[:num_devices]}
    if without:
        raise InputError(
            f"got sizes that take {num_devices} of {len(devices)} devices and leave process {min(without)} without "
            "one; make an axis larger, or start fewer processes"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:num_devices])


def _axis_sizes(config: MeshConfig, num_present: int, kind: str) -> tuple[int, ...]:
    sizes = asdict(config)
    asked = mesh_text(sizes)
    present = f"the {num_present} device{'s' * (num_present > 1)} present ({kind})"
    given = math.prod(size for size in sizes.values() if size != -1)
    if given > num_present:
        raise InputError(
            f"got {asked}, which takes {given} devices, expected no more than {present}; make an axis smaller "
            f"(on a CPU the environment variable JAX_NUM_CPU_DEVICES={given} simulates as many)"
        )
    if -1 in sizes.values() and num_present % given:
        raise InputError(
            f"got {asked}, expected sizes whose product {given} divides {present}; change one, or give a number for -1 "
            "to use fewer devices"
        )
    return tuple(num_present // given if size == -1 else size for size in sizes.values())


def introduce(mesh: Mesh) -> None:
    """Run one collective over every group of devices that the axes make; all processes call this at about one time.

    At a group's first collective gloo waits for at most 30 s, at later ones as long as it takes. Without this, the
    first one would be in a program that one process reads from its cache while another is still compiling it.
    """
    zeros = placed(np.zeros(mesh.devices.shape, np.float32), NamedSharding(mesh, PartitionSpec(*AXES)))
    split = [axis for axis in AXES if mesh.shape[axis] > 1]
    for num in range(1, len(split) + 1):
        for axes in combinations(split, num):
            left = PartitionSpec(*(None if axis in axes else axis for axis in AXES))
            total = partial(jax.lax.psum, axis_name=axes)
            exchanged = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec(*AXES), out_specs=left))(zeros)
            jax.block_until_ready(exchanged)


def row_shards(mesh: Mesh) -> int:
    """How many parts rows are cut into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def describe_devices(mesh: Mesh) -> dict[str, Any]:
    """Platform, kind and number of a mesh's devices and the sizes of its axes, for the record; processes if several."""
    device, processes = mesh.devices.flat[0], {d.process_index for d in mesh.devices.flat}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "num": mesh.size,
        "mesh": {axis: mesh.shape[axis] for axis in AXES},
        **({"processes": len(processes)} if len(processes) > 1 else {}),
    }


def partition_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The sharding rule for every array of the state: parameters, their gradients, and moments, whose paths end alike.

    `path` is a key path of jax.tree. The last two axes of a matrix are split by `split_axes`. Everything else stays
    whole: scalars, vectors, and attributes of a named tuple, as opposed to entries of a dict or list (counters and
    sums).
    """
    if len(shape) < 2 or (path and isinstance(path[-1], GetAttrKey)):
        return PartitionSpec()
    *_, module, name = [None, None, *(key.key for key in path if isinstance(key, DictKey))]
    split = split_axes(module, name, shape[-2:], fsdp=mesh.shape["fsdp"], tensor=mesh.shape["tensor"])
    return PartitionSpec(*[None] * (len(shape) - 2), *split) if any(split) else PartitionSpec()


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """The sharding of each array of a state, gradient or parameter tree, by `partition_spec`; shapes are enough."""
    return jax.tree.map_with_path(
        lambda path, array: NamedSharding(mesh, partition_spec(path, array.shape, mesh)), state
    )


def abstract_on_mesh(mesh: Mesh, shapes: Any) -> Any:
    """Shapes, types and placement of a state or of parameters, for which programs are compiled before there are any."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An array of zeros, placed as `like`."""
    return placed(np.zeros(like.shape, like.dtype), like.sharding)


def placed(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Put a host array, the same in every process, on devices; each gets only its part by the sharding."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_state(mesh: Mesh, state: Any) -> Any:
    """Put a tree of host arrays on the mesh by `partition_spec`; arrays that are already placed so stay as they are."""

    def place(array: Any, sharding: NamedSharding) -> jax.Array:
        lies = isinstance(array, jax.Array) and array.sharding == sharding
        return array if lies else placed(array, sharding)

    return jax.tree.map(place, state, state_shardings(mesh, state))


def constrain(mesh: Mesh, tree: Any) -> Any:
    """Inside a compiled function: lay out a tree as `state_shardings` says; else every device may keep all of it."""
    return jax.lax.with_sharding_constraint(tree, state_shardings(mesh, tree))


def gather(mesh: Mesh, params: Any) -> Any:
    """Inside a compiled function: parameters as a model uses them, whole over fsdp and still split over tensor.

    Without it the compiler splits the products along the width instead of the rows, and sums activations of every row
    over all devices. The gradient is laid out as the parameters are. By default jax would ask for it whole too, and
    for a sum over all devices that is asked for whole, the compiler for GPUs makes no reduce-scatter. With a `tensor`
    axis the gradient is left to jax: otherwise the compiler copies whole matrices to every device and back.
    """

    def whole_over_fsdp(path, array):
        spec = partition_spec(path, array.shape, mesh)
        return NamedSharding(mesh, PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec)))

    def gathered(params):
        return jax.lax.with_sharding_constraint(params, jax.tree.map_with_path(whole_over_fsdp, params))

    if mesh.size == 1:
        return params
    if mesh.shape["fsdp"] == 1 or mesh.shape["tensor"] > 1:
        return gathered(params)
    scattered = jax.custom_vjp(gathered)
    scattered.defvjp(lambda params: (gathered(params), None), lambda _, grads: (constrain(mesh, grads),))
    return scattered(params)


def on_each(mesh: Mesh, attend: Callable[..., jax.Array], num_groups: int) -> Callable[..., jax.Array]:
    """`Placement.on_each`, by which each device of the mesh attends for itself: nothing is sent within it."""
    if mesh.size == 1:
        return attend
    heads = "tensor" if num_groups % mesh.shape["tensor"] == 0 else None
    own, own_rows = PartitionSpec(ROW_AXES, None, heads), PartitionSpec(ROW_AXES)

    def attend_each(query: jax.Array, key: jax.Array, value: jax.Array, *masks: jax.Array) -> jax.Array:
        inputs = own, own, own, *[own_rows for _ in masks]
        attend_own = jax.shard_map(attend, mesh=mesh, in_specs=inputs, out_specs=own, check_vma=False)
        return attend_own(query, key, value, *masks)

    return attend_each


def on_mesh(model: Model, mesh: Mesh) -> Model:
    """The same model, with its parameters whole over fsdp while it uses them."""
    whole = partial(gather, mesh)

    def using_whole(function: Callable | None) -> Callable | None:
        return None if function is None else lambda params, *inputs: function(whole(params), *inputs)

    if model.placed is not None:
        model = model.placed(Placement(whole, heads_split=mesh.shape["tensor"] > 1, on_each=partial(on_each, mesh)))
    else:
        names = ("forward", "head", "extend")
        model = replace(model, **{name: using_whole(getattr(model, name)) for name in names})
    return replace(model, row_shards=row_shards(mesh), vocab_shards=mesh.shape["tensor"])


def rows_here(mesh: Mesh, num_rows: int) -> slice:
    """The slice of `num_rows` rows that this process's devices take; several processes may take the same rows."""
    indices = NamedSharding(mesh, PartitionSpec(ROW_AXES)).addressable_devices_indices_map((num_rows,))
    spans = [index[0].indices(num_rows)[:2] for index in indices.values()]
    return slice(min(start for start, _ in spans), max(stop for _, stop in spans))


def place_batch(mesh: Mesh, batch: Any, num_rows: int) -> Any:
    """Put a batch of `num_rows` rows, of which `batch` holds those of `rows_here`, on the mesh, rows split."""
    sharding = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    first = rows_here(mesh, num_rows).start

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[1].indices(num_rows)
            return array[:, start - first : stop - first]

        return jax.make_array_from_callback((array.shape[0], num_rows, *array.shape[2:]), sharding, part)

    return jax.tree.map(place, batch)


def place_rows(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Put the rows of an eval micro-batch (the first axis) on the mesh, split over data and fsdp."""
    return placed(array, NamedSharding(mesh, PartitionSpec(ROW_AXES)))


def everywhere(mesh: Mesh) -> NamedSharding:
    """The replicated sharding: every device, and so every process, has the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def on_host(array: jax.Array) -> np.ndarray:
    """The whole array on the host, even if other processes hold parts of it; all processes must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return process_allgather(array, tiled=True)
