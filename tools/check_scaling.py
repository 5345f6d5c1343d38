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

import jax
from compiled_update import chosen, collectives, compiled_eval, compiled_update, program_parser
from hlo_traffic import size_bytes
from results import write_json

from curriculum.model.counts import num_parameters
from curriculum.model.presets import ModelConfig
from curriculum.record.wording import mesh_text
from curriculum.schema.sections import MeshConfig
from curriculum.schema.shapes import uneven_rows
from curriculum.train.mesh import AXES, make_mesh
from curriculum.train.programs import needed_bytes


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
    parser = program_parser(__doc__)
    parser.set_defaults(preset="tiny", seq_len=256)
    parser.add_argument("--layers", type=int, help="blocks, instead of the preset's")
    parser.add_argument("--mesh", type=int, nargs=3, action="append", metavar=("DATA", "FSDP", "TENSOR"))
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
    config, _ = chosen(options, "cpu", *([f"n_layer={options.layers}"] if options.layers else []))
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
