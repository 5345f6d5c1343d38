"""`curriculum generate`."""

import sys
import time
from dataclasses import asdict

import click

from curriculum.cli.options import (
    STEP,
    STORE_DIR,
    WEIGHTS,
    pass_over_read_only_stores,
    print_json,
    step_text,
    tell_untrained,
)
from curriculum.disk.append import discard
from curriculum.errors import InputError
from curriculum.sampling import Sampling


@click.command()
@click.argument("run")
@click.option("--prompt", "prompts", metavar="TEXT", multiple=True, help="Text to continue; repeatable.")
@click.option(
    "--prompts-file", metavar="FILE", help='One prompt per line; in a .jsonl or .ndjson, one {"prompt": TEXT} per line.'
)
@click.option(
    "--max-tokens",
    type=int,
    default=Sampling.max_tokens,
    show_default=True,
    help="Maximum tokens of each continuation.",
)
@click.option(
    "--temperature",
    type=float,
    default=Sampling.temperature,
    show_default=True,
    help="0: always the most likely token.",
)
@click.option("--top-k", type=int, default=Sampling.top_k, help="Draw only from this many of the most likely tokens.")
@click.option(
    "--top-p",
    type=float,
    default=Sampling.top_p,
    help="Draw only from the most likely tokens that together have this probability.",
)
@click.option(
    "--min-p",
    type=float,
    default=Sampling.min_p,
    help="Drop tokens whose probability is below this share of the highest one.",
)
@click.option("--seed", type=int, default=Sampling.seed, show_default=True, help="The same seed gives the same text.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; repeatable.")
@click.option(
    "--chat",
    is_flag=True,
    help="Prompts are what a user says: written by the run's chat template, and continued up to the end of the answer.",
)
@STEP
@WEIGHTS
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, once all is generated.")
@STORE_DIR
def command(run, prompts, prompts_file, chat, step, weights, as_json, store_dir, **settings):
    """Continue prompts with a checkpoint of RUN, as a document that begins with them. RUN is only read."""
    try:
        _generate(run, prompts, prompts_file, chat, step, weights, as_json, store_dir, Sampling(**settings))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the pipe has closed it
        discard(sys.stdout)


def _generate(run, prompts, prompts_file, chat, step, weights, as_json, store_dir, sampling):
    from curriculum.generate import load_generator, read_prompts

    problems = [f"--{name.replace('_', '-')}: {message}" for name, message in sampling.problems()]
    if bool(prompts) == (prompts_file is not None):
        got = "both" if prompts else "neither"
        problems.append(f"--prompt and --prompts-file: got {got}, expected one of them")
    elif prompts_file is not None:
        try:
            prompts = read_prompts(prompts_file)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)

    pass_over_read_only_stores()
    loaded = load_generator(run, step=step, weights=weights, store_dir=store_dir)
    tell_untrained(loaded.step, step)
    warnings = list(loaded.warnings)
    if chat and not loaded.knows_chat:
        warnings.append(f"{run} was trained on no source of format messages; it is asked by its section chat")
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    started = time.perf_counter()
    sampling = loaded.until_answered(sampling) if chat else sampling
    pieces = loaded.stream(prompts, sampling, chat)
    if as_json:
        whole = {piece.index: piece.whole.to_json() for piece in pieces if piece.whole}
        told = {"run": str(run), "step": loaded.step, "weights": weights, "sampling": asdict(sampling)}
        told |= {"generations": [whole[index] for index in range(len(prompts))], "warnings": warnings}
        print_json(told)
        return
    generations, first_s = _show(pieces, [f"{prompt}\n" for prompt in prompts] if chat else prompts, started)
    num_tokens, all_s = sum(len(generation.ids) for generation in generations), time.perf_counter() - started
    for number, generation in enumerate(generations, start=1):
        if generation.finished == "max_seq_len":
            click.echo(f"prompt {number}: stopped at the model's last position (max_seq_len)", err=True)
    of_step = f"{step_text(run, loaded.step, step, weights)}, {weights} weights"
    click.echo(f"{of_step}: {num_tokens:,} tokens in {all_s:.2f}s, the first after {first_s:.2f}s", err=True)


def _show(pieces, prompts, started):
    """Print continuations in order, streaming the first unfinished one; (all of them, seconds to the first piece)."""
    waiting, wholes = ["" for _ in prompts], [None for _ in prompts]
    shown, first_s = 0, None  # `shown` is how many are printed to their end
    _write(prompts[0], bold=True)
    for piece in pieces:
        first_s = first_s or time.perf_counter() - started
        waiting[piece.index] += piece.text
        wholes[piece.index] = piece.whole
        while shown < len(prompts):
            text, waiting[shown] = waiting[shown], ""
            _write(text)
            if wholes[shown] is None:
                break
            _write("\n")
            shown += 1
            if shown < len(prompts):
                _write("\n")
                _write(prompts[shown], bold=True)
    return wholes, first_s


def _write(text, bold=False):
    """Write text to stdout at once. At a terminal control characters are escaped."""
    if not text:
        return
    if sys.stdout.isatty():
        from curriculum.record.wording import printable

        text = click.style(printable(text, also="\n\t"), bold=bold)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
