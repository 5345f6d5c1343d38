"""Events and rows of the record as lines of text, the same in every view."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from curriculum.record.events import number
from curriculum.record.wording import MOST_NAMED, counted, first_of, largest, listed, loss, printable

_MOST_TOLD = 6  # sets that a verdict gives numbers for
_LONGEST_PROMPT, _LONGEST_SAMPLE = 40, 160  # characters of a sample's line


def verdict(event: dict[str, Any]) -> str | None:
    """The line for an event that reports something that happened; None for other events."""
    step = event["step"]
    match event["event"]:
        case "phase_switch":
            switch = f"phase switch at step {step}: {event['from_phase']} → {event['new_phase']}"
            ramp = [f"over {counted(event['ramp_steps'], 'step')}"] if event["ramp_steps"] else []
            return " | ".join([switch, *_moves(event), *ramp, *shape_moves(event), f"lr {event['lr']:.2e}"])
        case "schedule_edit":
            edit = f"schedule edit at step {step}: {event['reason']}"
            until = f"{event['phase']} until step {event['until']}"
            if event.get("accepted_past"):
                until += " | --accept-past: what was trained stays as it was"
            return " | ".join([edit, *_moves(event), *_left_out(event), until])
        case "eval_regression":
            action = f" | {event['action']}" if event["action"] else ""
            new, still = new_offenders(event)
            return f"eval regression at step {step}: {'; '.join([_offenders(new), *still])}{action}"
        case "eval_recovered":
            return f"eval recovered at step {step}: {_offenders(event['offenders'], tolerances=True)}"
        case "gold_checkpoint":
            known = event["previous"] is not None
            previous = f", was {loss(event['previous'])} at step {event['previous_step']}" if known else ""
            return f"gold checkpoint at step {step}: {event['metric']} {loss(event['value'])}{previous}"
        case "gold_blocked":
            return f"gold blocked at step {step}: {event['reason']}"
        case "checkpoint_failed":
            last, then = event["last_good_step"], event["next_try_step"]
            good = "there is no good one yet" if last is None else f"the last good one is of step {last}"
            again = "" if then is None else f"; the next is tried at step {then}"
            return f"checkpoint failed: {event['path']} was not saved: {event['why']}; {good}{again}"
        case "rollback":
            told = f"rollback {event['number']} of {event['max']} at step {event['told_at_step']}, to step {step}"
            first, steps = event["first_bad_step"], counted(event["skip_steps"], "step")
            return f"{told}: {event['reason']} | the data of {steps} from step {first} on are passed over"
        case "diverged":
            good = event["last_good_step"]
            kept = "there is no good checkpoint" if good is None else f"the last good checkpoint is of step {good}"
            return f"diverged at step {step}: {event['reason']} | {kept}"
        case "resume":
            again = event.get("trained_to", step) - step
            back = [f"at least {counted(again, 'step')} after it will be trained again"] if again else []
            if alarm := event.get("stopped_by"):
                back.append(f"an alarm of {first_of(alarm['sets'], MOST_NAMED)} had stopped it at step {alarm['step']}")
            back += [
                f"step {d['step']} is damaged ({d['why']}), moved to {d['moved_to']}" for d in event.get("damaged", [])
            ]
            back += [
                f"gold/{gold['step']} is lost ({gold['why']}): the search for a gold checkpoint starts over"
                for gold in event.get("gold_lost", [])
            ]
            if changed := event.get("software_changed"):
                back.append(f"goes on with other software, perhaps not bit for bit: {_changed(changed)}")
            plan = event["plan"]
            branch = f", a branch of {plan['branched_from']['run']}" if event.get("begins_branch") else ""
            return "; ".join([f"resumed at step {step} of {plan['total_steps']}{branch}", *back])
    return None


def _changed(software: Mapping[str, Sequence[str | None]]) -> str:
    """`jax 0.10.2 → 0.12.0, the code of curriculum`."""
    told = {name: f"{name} {was or 'none'} → {now or 'none'}" for name, (was, now) in software.items()}
    return ", ".join((told | {"code": "the code of curriculum"} if "code" in told else told).values())


def new_offenders(event: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The pairs whose alarm an `eval_regression` raises, and a text of the other sets that are still worse, if any."""
    new = [pair for pair in event["offenders"] if pair["first_step"] == event["step"]]
    named = {pair["set"] for pair in new}
    since = {pair["set"]: pair["first_step"] for pair in event["offenders"] if pair["set"] not in named}
    old = [f"{name} (since step {first})" for name, first in since.items()]
    return new, [f"still worse: {first_of(old, MOST_NAMED)}"] if old else []


def sets_of_alarm(event: dict[str, Any]) -> list[str]:
    """The sets whose alarm an `eval_regression` raises."""
    return [*dict.fromkeys(pair["set"] for pair in new_offenders(event)[0])]


def skipped_line(row: dict[str, Any], before: dict[str, int]) -> str | None:
    """The line on updates that were skipped since the counts were `before`, from a metrics row; None if none was."""
    now = skipped_counts(row)
    more = {key: now[key] - before.get(key, 0) for key in now}
    if not more.get("skipped_updates"):
        return None
    num = more["skipped_updates"]
    return f"skipped {counted(num, 'update')} up to step {row['step']}: {skipped_why(more)}"


def skipped_counts(line: dict[str, Any]) -> dict[str, int]:
    """How many updates were skipped, in all and by reason, as far as an event or a row tells it."""
    keys = ("skipped_updates", "skipped_nonfinite", "skipped_outliers")
    return {key: line[key] for key in keys if key in line}


def skipped_why(skipped: dict[str, int]) -> str:
    """The reasons of skipped updates, each with its count."""
    nonfinite, outliers = skipped["skipped_nonfinite"], skipped["skipped_outliers"]
    reasons = {
        "not finite": nonfinite,
        "with a loss or gradient norm far above the recent ones": outliers,
        "without a scored target": skipped["skipped_updates"] - nonfinite - outliers,
    }
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


def sample_lines(event: dict[str, Any]) -> Iterator[str]:
    """A line for each sample of a `generation` event; long prompts and texts are shortened."""
    for sample in event["samples"]:
        prompt, text = (printable(sample[key]) for key in ("prompt", "text"))
        prompt = prompt if len(prompt) <= _LONGEST_PROMPT else f"...{prompt[-_LONGEST_PROMPT:]}"
        text = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]}..."
        yield f"  sample at step {event['step']}: {prompt} | {text}"


def _moves(event: dict[str, Any]) -> list[str]:
    """The sources whose share changes; of many, those that it changes most for."""
    before, after = event["mixture_before"], event["mixture_after"]
    return share_moves(
        {
            source: (before.get(source, 0.0), after.get(source, 0.0))
            for source in dict.fromkeys([*before, *after])
            if before.get(source, 0.0) != after.get(source, 0.0)
        }
    )


def share_moves(shares: Mapping[str, tuple[float, float]]) -> list[str]:
    """The change of each source's share, from (before, after)."""
    by = {source: after - before for source, (before, after) in shares.items()}
    return largest(by, lambda source: f"{source} {shares[source][0]:.4g} → {shares[source][1]:.4g}")


def shape_moves(event: dict[str, Any]) -> list[str]:
    """The changes that a phase switch makes to the shape of updates, and what it passes over for them."""
    before, after = event["shape_before"], event["shape_after"]
    keys = dict.fromkeys(["seq_len", *before, *after])
    changes = {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
    return [*_shape_changes(changes), *_left_out(event)]


def _shape_changes(changes: Mapping[str, Sequence[Any]]) -> list[str]:
    return [
        f"{shape_title(key)} {shape_text(key, was)} → {shape_text(key, now)}" for key, (was, now) in changes.items()
    ]


def _left_out(event: dict[str, Any]) -> list[str]:
    """What a switch or an edit passes over, to begin with a whole sequence; a raised share passes over nothing."""
    left = event.get("passed_over", {})
    told = ", ".join(largest(left, lambda source: f"{source} {left[source]:,}"))
    return [f"passed over {told} tokens"] if told else []


def shape_title(key: str) -> str:
    """What a part of the shape of updates, or a setting of a phase, is called in sentences and tables."""
    return {"rope_theta": "rope theta", "lr_scale": "rates x"}.get(key, key)


def shape_text(key: str, value: Any) -> str:
    """The value of a part of the shape, or of a setting, in words."""
    if value is None:
        return "the model's own" if key == "rope_theta" else "the run's own"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.10g}"


def _offenders(offenders: Iterable[dict[str, Any]], tolerances: bool = False) -> str:
    """Each set that an event names, its change against each baseline, and what changed since the newest one.

    Sets with the same text are named together. Of many sets, those that rose most are named. `tolerances` adds the
    tolerance of each set.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for pair in offenders:
        sets.setdefault(pair["set"], []).append(pair)
    more = len(sets) - _MOST_TOLD
    if more > 0:
        by_rise = sorted(sets, key=lambda name: max(map(rise, sets[name])), reverse=True)
        sets = {name: sets[name] for name in by_rise[:_MOST_TOLD]}
    lines: dict[str, list[str]] = {}  # the sets of each text
    for name, pairs in sets.items():
        names: dict[int, list[str]] = {}  # baselines by step; those of one step are the same eval
        for pair in pairs:
            names.setdefault(pair["baseline_step"], []).append(pair["baseline"])
        by_step = {pair["baseline_step"]: pair for pair in pairs}
        changes = [f"{_change(by_step[s])} against {listed(names[s])} at step {s}" for s in sorted(names)]
        line = f"{loss(pairs[0]['loss'])}: {', '.join(changes)}"
        newest = by_step[max(names)]
        # Of a recovery a raised rate is no reason.
        if moved := share_moves(newest["mixture_change"]) if tolerances else what_changed(newest):
            line += f" (since step {newest['baseline_step']}: {', '.join(moved)})"
        if tolerances:
            within = pairs[0]["tolerance"]
            above = any(number(pair["delta"]) > within for pair in pairs)  # by no more than chance explains
            line += f", {'no longer clearly above the tolerance of' if above else 'tolerance'} {within:g}"
        lines.setdefault(line, []).append(name)
    told = [f"{listed(named)} {line}" for line, named in lines.items()]
    return "; ".join([*told, f"and {more} more"] if more > 0 else told)


def what_changed(pair: Mapping[str, Any]) -> list[str]:
    """What changed in training since the baseline of an offender: mixture, shape, a rate that rose, what was reread."""
    moves = share_moves(pair["mixture_change"])
    moves += _shape_changes(pair.get("shape_change", {}))  # older runs say neither this nor what follows
    if raised := pair.get("rate_rise"):
        moves.append(f"learning rate {raised[0]:.3g} → {raised[1]:.3g}")
    again = pair.get("repeated", {})
    by = {source: now - was for source, (was, now) in again.items()}
    moves += largest(by, lambda source: f"epochs of {source} {again[source][0]:,.2f} → {again[source][1]:,.2f}")
    return moves


def rise(pair: dict[str, Any]) -> float:
    """Nats per token by which a set is worse; one that is not finite is worse than all others."""
    delta = number(pair["delta"])
    return delta if math.isfinite(delta) else math.inf


def _change(pair: dict[str, Any]) -> str:
    """A difference in nats per token and its interval, if it is finite."""
    delta, low, high = (number(value) for value in (pair["delta"], *pair["interval"]))
    if not math.isfinite(delta):
        return "not finite"
    return f"{delta:+.4f} (95 % {low:+.4f} to {high:+.4f})"
