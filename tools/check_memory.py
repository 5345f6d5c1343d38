"""Compare the memory estimate of `curriculum plan` with the figures of jax and the compiler; nothing is trained.

    python tools/check_memory.py --rows 4 --seq-len 512

For each preset: the memory of the whole jitted update (AdamW, state donated), compiled from shapes only, by the
compiler's own analysis; and for each remat policy what jax.vjp keeps for the backward pass, with --scanned including
the stacked copy of the blocks' matrices. The compiler for CPUs merges recomputed values with the original ones, which
undoes remat, and computes bfloat16 products in float32, so it is asked only about float32 without remat.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from compiled_update import compiled_update, trained_and_frozen
from results import json_parser, write_json

from curriculum.model.lora import joined
from curriculum.model.memory import kept_bytes, memory_estimate
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.model.transformer import forward
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import make_mesh
from curriculum.train.programs import needed_bytes


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--layers", type=int, help="blocks, instead of the preset's")
    parser.add_argument("--scanned", action="store_true", help="compute the layers in a loop")
    options = parser.parse_args(argv)
    results = []
    rows, seq_len = options.rows, options.seq_len
    print(f"MB, {rows} rows x {seq_len}, jax {jax.__version__} on {jax.default_backend()}\n")
    print(
        "| preset | layers | update, estimate | compiler | ratio | kept, remat none | dots | full | each by jax.vjp |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.presets:
        config = PRESETS[name]
        config = config if options.layers is None else replace(config, n_layer=options.layers)
        config = replace(config, layers="scanned" if options.scanned else "unrolled")
        estimate = memory_estimate(config, rows=rows, seq_len=seq_len)
        compiled = compiled_bytes(config, rows, seq_len)
        policies = [replace(config, remat=remat) for remat in ("none", "dots", "full")]
        kept = [kept_bytes(policy, rows, seq_len) + estimate.stacked for policy in policies]
        by_jax = [residual_bytes(policy, rows, seq_len) for policy in policies]
        sizes = [megabytes(estimate.total), megabytes(compiled), f"{estimate.total / compiled:.2f}"]
        sizes += [*map(megabytes, kept), ", ".join(map(megabytes, by_jax))]
        print(f"| {name} | {config.n_layer} | {' | '.join(sizes)} |", flush=True)
        totals = {"estimate_bytes": estimate.total, "compiler_bytes": compiled}
        results.append(
            {"preset": name, "n_layer": config.n_layer, **totals, "kept_bytes": kept, "jax_vjp_bytes": by_jax}
        )
    write_json(options.json, results)


def compiled_bytes(config: ModelConfig, rows: int, seq_len: int, grad_accum: int = 1, **settings: Any) -> int:
    """Bytes of one compiled update: arguments, temporaries, and results that do not take an argument's place."""
    one = make_mesh(MeshConfig(1, 1, 1))
    return needed_bytes(compiled_update(config, one, rows * grad_accum, seq_len, grad_accum, **settings))


def residual_bytes(config: ModelConfig, rows: int, seq_len: int, *, document_mask: bool = False) -> int:
    """Bytes that jax.vjp of the forward pass keeps, without its inputs and the program's constants. The stacked copy
    of scanned layers is included."""
    params, frozen = trained_and_frozen(config)
    tokens_BT = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)

    def way_back(params, frozen, tokens_BT, segment_ids_BT):
        keys_B = jax.random.split(jax.random.key(0), rows) if config.dropout else None

        def features(params):
            whole = params if frozen is None else joined(frozen, params)
            return forward(config, whole, tokens_BT, segment_ids_BT, keys_B)

        return jax.vjp(features, params)[1]

    program = jax.make_jaxpr(way_back)(params, frozen, tokens_BT, tokens_BT if document_mask else None).jaxpr
    given = {id(variable) for variable in (*program.invars, *program.constvars)}
    kept = {id(variable): variable.aval for variable in program.outvars if id(variable) not in given}
    return sum(array.size * array.dtype.itemsize for array in kept.values())


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}"


if __name__ == "__main__":
    main()
