"""Print what an update holds on a device, and what it and an eval send, by the compiler's analysis; nothing is trained.

    python tools/check_scaling.py --preset llama-1b --mesh 1 8 1 --rows 8 --seq-len 2048

The update of `curriculum train` (AdamW, state donated) is compiled from shapes alone, over simulated CPU devices, for
each mesh given as DATA FSDP TENSOR. `state`: parameters, moments and counters on one device. `peak`: all that the
program holds there at once, except its code, by the compiler's own analysis. Then, for each kind of collective, how
many there are and how many bytes a device receives from them; and the same of an eval of as many tokens. The compiler
for CPUs has no reduce-scatter: it sums whole gradients, and each device keeps its part. The compiler for GPUs turns the
two into a reduce-scatter, which sends half as much.
"""

import math
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from hlo_traffic import arrays, costs, size_bytes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from results import json_parser, write_json

from curriculum.model.counts import num_parameters
from curriculum.model.loss import score_targets
from curriculum.model.model import abstract_params
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.model.transformer import transformer
from curriculum.record.wording import mesh_text
from curriculum.schema.mesh import MeshConfig, uneven_rows
from curriculum.train.compiled import abstract_batch
from curriculum.train.mesh import AXES, ROW_AXES, abstract_on_mesh, make_mesh, on_mesh, state_shardings
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.programs import StepShape, needed_bytes
from curriculum.train.step import init_state, make_train_step

NUM_SOURCES = 2


def compiled_update(
    config: ModelConfig, mesh: Mesh, rows: int, seq_len: int, grad_accum: int = 1, document_mask: bool = False
) -> jax.stages.Compiled:
    """The update of `rows` x `seq_len` tokens in `grad_accum` micro-steps, over all devices of the mesh."""
    model, optimizer = transformer(config), make_optimizer(OptimConfig())
    first_state = partial(init_state, optimizer=optimizer, num_sources=NUM_SOURCES)
    state = abstract_on_mesh(mesh, jax.eval_shape(first_state, abstract_params(model)))
    step = make_train_step(
        on_mesh(model, mesh),
        optimizer,
        NUM_SOURCES,
        grad_clip=1.0,
        document_mask=document_mask,
        mesh=mesh,
    )
    batch = abstract_batch(mesh, StepShape(grad_accum, rows // grad_accum, seq_len))
    lr = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(step, donate_argnums=0, out_shardings=state_shardings(mesh, state)).lower(state, batch, lr).compile()


def compiled_eval(config: ModelConfig, mesh: Mesh, rows: int, seq_len: int) -> jax.stages.Compiled:
    """The loss and the accuracy of `rows` x `seq_len` tokens, over all devices of the mesh."""
    model = transformer(config)
    params = abstract_on_mesh(mesh, abstract_params(model))
    tokens = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(ROW_AXES)))
    return jax.jit(partial(score_targets, on_mesh(model, mesh))).lower(params, tokens, tokens).compile()


def collectives(program: str) -> dict[str, dict[str, int]]:
    """{kind: {shape of the result: how often}} from a compiled program's text; in a loop, once per round."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for cost in costs(program):
        if cost.sent_bytes:
            for shape in arrays(cost.instruction.type):
                found[cost.instruction.opcode.removesuffix("-start")][shape] += cost.times
    return {kind: dict(sorted(of_kind.items())) for kind, of_kind in sorted(found.items())}


def measure(config: ModelConfig, sizes: tuple[int, int, int], rows: int, seq_len: int, grad_accum: int = 1) -> dict:
    """Bytes on one device and collectives of the update on a mesh of these sizes, and collectives of an eval."""
    started, mesh = time.perf_counter(), make_mesh(MeshConfig(*sizes))
    compiled = compiled_update(config, mesh, rows, seq_len, grad_accum)
    memory = compiled.memory_analysis()
    sent = collectives(compiled.as_text())
    return {
        "mesh": list(sizes),
        "num_parameters": num_parameters(config),
        "state_bytes": memory.alias_size_in_bytes,  # the donated arguments, which are all of the state
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": needed_bytes(compiled),
        "collectives": sent,
        "eval_collectives": collectives(compiled_eval(config, mesh, rows, seq_len).as_text()),
        "compile_seconds": round(time.perf_counter() - started, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=int, help="blocks, instead of the preset's")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding, instead of the preset's")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    parser.add_argument("--mesh", type=int, nargs=3, action="append", metavar=("DATA", "FSDP", "TENSOR"))
    parser.add_argument("--rows", type=int, default=8, help="rows of the whole update")
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    options = parser.parse_args(argv)
    meshes = [tuple(sizes) for sizes in options.mesh or [(1, n, 1) for n in (1, 2, 4, 8)]]
    rows, grad_accum = options.rows, options.grad_accum
    if min(rows, grad_accum) < 1 or rows % grad_accum:
        parser.error(f"--rows {rows}: expected a multiple of --grad-accum ({grad_accum}), both 1 or more")
    for sizes in meshes:
        given = f"--mesh {' '.join(map(str, sizes))}"
        if min(sizes) < 1:
            parser.error(f"{given}: expected three sizes of 1 or more; as many devices are simulated")
        if problem := uneven_rows(rows, grad_accum, sizes[0] * sizes[1]):
            parser.error(f"{given}, --rows: {problem}")
    jax.config.update("jax_num_cpu_devices", max(map(math.prod, meshes)))
    config = replace(PRESETS[options.preset], compute_dtype=options.compute_dtype, remat=options.remat)
    config = replace(config, n_layer=options.layers or config.n_layer)
    if options.vocab_size:
        config = replace(config, vocab_size=options.vocab_size)
    size = f"{num_parameters(config):,} parameters, {rows} x {options.seq_len}"
    print(f"{options.preset}, {size}, jax {jax.__version__}")
    results = []
    for sizes in meshes:
        found = measure(config, sizes, rows, options.seq_len, grad_accum)
        results.append(found)
        mesh = mesh_text(dict(zip(AXES, sizes, strict=True)))
        state, peak = (f"{found[key] / 1e6:,.1f} MB" for key in ("state_bytes", "peak_bytes"))
        print(f"{mesh}: state {state} a device, peak {peak} (compiled in {found['compile_seconds']} s)")
        for what in ("collectives", "eval_collectives"):
            for kind, shapes in found[what].items():
                size = sum(size_bytes(shape) * count for shape, count in shapes.items())
                of = "  of an eval" if what == "eval_collectives" else ""
                print(f"    {sum(shapes.values()):4} {kind:19} {size / 1e6:10,.2f} MB{of}")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
