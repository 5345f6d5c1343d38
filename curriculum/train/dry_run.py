"""A dry run: does everything that a run does once, and keeps only prepared data and compiled programs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from curriculum.config import Config, check_is_config
from curriculum.model.model import Model, count, num_parameters
from curriculum.run import DEFAULT_STORE_DIR
from curriculum.train.clock import peak_memory_gb
from curriculum.train.device import own_settings
from curriculum.train.mesh import describe_devices
from curriculum.train.resuming.opening import check
from curriculum.train.resuming.start import start_of
from curriculum.train.setup import build, check_same_config
from curriculum.train.step import read_window
from evalsets.metrics import summarise


@own_settings()
def dry_run(
    config: Config, *, store_dir: str | Path = DEFAULT_STORE_DIR, make_model: Callable[[int], Model] | None = None
) -> dict[str, Any]:
    """Validate, prepare, build, compile, take one step of each shape and run one eval.

    Leaves only prepared data and compiled programs behind. In the result, `updates` has for each shape, in words, the
    seconds it took to compile and the device memory it needs, as the compiler counts it (`plan` estimates it).
    """
    check_is_config(config)
    check_same_config(config)
    check(config)
    setup = build(config, store_dir, make_model=make_model, start=start_of(config))
    course, states, compiled = setup.course, setup.states, setup.compiled
    try:
        state = setup.make_ready(0, states.first())
        clock = time.perf_counter()
        state = setup.update_at(0)(state, course.feed[0], *course.knobs(0))
        loss = read_window(state.window, states.sources)["loss"]
        step_s, clock = time.perf_counter() - clock, time.perf_counter()
        evaluated = setup.suite_at(1).run(states.whole(state.params))
        eval_losses = {name: summarise(r).loss for name, r in evaluated.items()}
        eval_s = time.perf_counter() - clock
        for shape in course.shapes_from(0)[1:]:  # each takes a step, so that its memory shows too
            step = next(s.start for s in course.schedule.segments if course.shape_at(s.start) == shape)
            state = setup.update_at(step)(state, course.feed[step], *course.knobs(step))
        jax.block_until_ready(state.step)
    finally:
        setup.close()
    return {
        "devices": describe_devices(setup.mesh),
        "num_parameters": num_parameters(setup.model),
        "num_trained": count(states.like.params),
        "total_steps": course.schedule.total_steps,
        "loss": loss,
        "eval_losses": eval_losses,
        "first_step_s": step_s,
        "first_eval_s": eval_s,
        "updates": [
            {"shape": str(shape), "compile_s": seconds, "bytes": compiled.update_bytes(shape)}
            for shape, seconds in compiled.updates.seconds.items()
        ],
        "peak_memory_gb": peak_memory_gb(),
        "warnings": setup.warnings(),
    }
