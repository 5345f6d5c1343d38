"""An update of `curriculum train` compiled from shapes alone, and what the tools that compile one have in common."""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from bench_step import applied
from hlo_traffic import arrays, costs
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from results import json_parser

from curriculum.model.formulation import BY_BACKEND, Formulation
from curriculum.model.lora import adapters_of, frozen_of
from curriculum.model.loss import score_targets
from curriculum.model.model import Params
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.model.transformer import transformer
from curriculum.train.compiled import abstract_batch
from curriculum.train.mesh import AXES, ROW_AXES, abstract_on_mesh, on_mesh, state_shardings
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.programs import StepShape
from curriculum.train.step import init_state, make_train_step

NUM_SOURCES = 2


def program_parser(doc: str) -> argparse.ArgumentParser:
    """A parser of the options that say which update is compiled."""
    parser = json_parser(doc)
    parser.add_argument("--preset", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--rows", type=int, default=8, help="rows of the whole update")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding, instead of the preset's")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="others of the model or its formulation, such as layers=scanned or loss_tokens=512",
    )
    return parser


def absent_parser(doc: str) -> argparse.ArgumentParser:
    """`program_parser` for devices that are not there."""
    parser = program_parser(doc)
    parser.add_argument("--mesh", type=int, nargs=3, default=(1, 1, 1), metavar=("DATA", "FSDP", "TENSOR"))
    parser.add_argument("--document-mask", action="store_true")
    parser.add_argument("--most", type=int, default=0, help="how many kinds of instruction to list, the longest first")
    return parser


def chosen(options: argparse.Namespace, backend: str, *settings: str) -> tuple[ModelConfig, Formulation]:
    """The model that the options name, and a backend's formulation; `settings` stand where the options say nothing."""
    settings += (f"remat={options.remat}", *options.set)
    if options.vocab_size:
        settings += (f"vocab_size={options.vocab_size}",)
    return applied(settings, PRESETS[options.preset], BY_BACKEND[backend])


def as_on(backend: str, formulation: Formulation) -> ExitStack:
    """A context in which everything is traced as on that backend, in this formulation."""
    stack = ExitStack()
    for module in ("model.layers", "model.modules", "model.transformer", "model.loss", "train.step"):
        stack.enter_context(mock.patch(f"curriculum.{module}.backend", lambda: backend))
    stack.enter_context(mock.patch.dict(BY_BACKEND, {backend: formulation}))
    return stack


def mesh_of(devices: Iterable, sizes: tuple[int, int, int]) -> Mesh:
    """A data x fsdp x tensor mesh."""
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def compiled_update(
    config: ModelConfig,
    mesh: Mesh,
    rows: int,
    seq_len: int,
    grad_accum: int = 1,
    *,
    document_mask: bool = False,
    ema: bool = False,
    optim: OptimConfig = OptimConfig(),  # noqa: B008
) -> jax.stages.Compiled:
    """The update of `rows` x `seq_len` tokens in `grad_accum` micro-steps, over all devices of the mesh."""
    model, optimizer = transformer(config), make_optimizer(optim)
    params, frozen = trained_and_frozen(config)
    first_state = partial(init_state, optimizer=optimizer, num_sources=NUM_SOURCES, ema=ema)
    state = abstract_on_mesh(mesh, jax.eval_shape(first_state, params))
    step = make_train_step(
        on_mesh(model, mesh),
        optimizer,
        NUM_SOURCES,
        grad_clip=1.0,
        document_mask=document_mask,
        ema_decay=0.999 if ema else None,
        mesh=mesh,
    )
    batch = abstract_batch(mesh, StepShape(grad_accum, rows // grad_accum, seq_len))
    lr = jax.ShapeDtypeStruct((), jnp.float32)
    given = {} if frozen is None else {"frozen": abstract_on_mesh(mesh, frozen)}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=state_shardings(mesh, state))
    return jitted.lower(state, batch, lr, **given).compile()


def trained_and_frozen(config: ModelConfig) -> tuple[Params, Params | None]:
    """Shapes of the trained parameters, and of the frozen ones, if any."""
    shapes = transformer(config).shapes()
    return (shapes, None) if config.lora is None else (adapters_of(shapes), frozen_of(shapes))


def compiled_eval(config: ModelConfig, mesh: Mesh, rows: int, seq_len: int) -> jax.stages.Compiled:
    """The loss and the accuracy of `rows` x `seq_len` tokens, over all devices of the mesh."""
    model = transformer(config)
    params = abstract_on_mesh(mesh, model.shapes())
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
