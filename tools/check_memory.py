"""Compare the memory estimate of `curriculum plan` with the figures of jax and the compiler; nothing is trained.

    python tools/check_memory.py --rows 4 --seq-len 512

For each preset: the memory of the whole jitted update (AdamW, state donated), compiled from shapes only, by the
compiler's own analysis; and for each remat policy what jax.vjp keeps for the backward pass, with --scanned including
the stacked copy of the blocks' matrices. The compiler for CPUs merges recomputed values with the original ones, which
undoes remat, and computes bfloat16 products in float32, so it is asked only about float32 without remat.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from results import json_parser, write_json

from curriculum.model.lora import adapters_of, frozen_of, joined
from curriculum.model.memory import kept_bytes, memory_estimate
from curriculum.model.model import Params
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.model.transformer import forward, transformer
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.programs import needed_bytes
from curriculum.train.step import init_state, make_train_step
from phases.batches import Batch

NUM_SOURCES = 2


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


def compiled_bytes(
    config: ModelConfig,
    rows: int,
    seq_len: int,
    grad_accum: int = 1,
    *,
    ema: bool = False,
    document_mask: bool = False,
    optim: OptimConfig = OptimConfig(),  # noqa: B008
) -> int:
    """Bytes of one compiled update: arguments, temporaries, and results that do not take an argument's place."""
    model, optimizer = transformer(config), make_optimizer(optim)
    step = make_train_step(
        model,
        optimizer,
        NUM_SOURCES,
        grad_clip=1.0,
        document_mask=document_mask,
        ema_decay=0.999 if ema else None,
    )

    def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    params, frozen = _parts(config)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer, num_sources=NUM_SOURCES, ema=ema), params)
    slots = array(grad_accum, rows, seq_len)
    batch = Batch(
        inputs_ABT=slots,
        targets_ABT=slots,
        loss_mask_ABT=array(grad_accum, rows, seq_len, dtype=jnp.bool_),
        segment_ids_ABT=slots,
        source_ids_AB=array(grad_accum, rows),
    )
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch, array(dtype=jnp.float32), frozen=frozen)
    return needed_bytes(lowered.compile())


def _parts(config: ModelConfig) -> tuple[Params, Params | None]:
    """Shapes of the trained parameters, and of the frozen ones, if any."""
    shapes = transformer(config).shapes()
    return (shapes, None) if config.lora is None else (adapters_of(shapes), frozen_of(shapes))


def residual_bytes(config: ModelConfig, rows: int, seq_len: int, *, document_mask: bool = False) -> int:
    """Bytes that jax.vjp of the forward pass keeps, without its inputs and the program's constants. The stacked copy
    of scanned layers is included."""
    params, frozen = _parts(config)
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
