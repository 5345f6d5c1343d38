"""A record of 12 steps in two phases, written by hand: what its views are tested with."""

PLAN = {
    "total_steps": 12,
    "phases": [
        {"name": "foundation", "start": 0, "end": 6, "mixture": {"web": 1.0, "law": 0.0}},
        {"name": "domain", "start": 6, "end": 12, "mixture": {"web": 0.25, "law": 0.75}},
    ],
}
SHAPE = {"batch_size": 1, "seq_len": 64, "grad_accum": 1, "rope_theta": None, "lr_scale": 1.0}
SAME_UPDATES = {"ramp_steps": 0, "shape_before": SHAPE, "shape_after": SHAPE}


def tokens_at(step):
    return 64 * step


def train(record, start, end, loss=lambda step: 4.0 - step / 10, sets=("general", "code")):
    """A row every 2 steps, an eval every 4, `code` only every 8; the switch at 6."""
    for step in range(start + 1, end + 1):
        phase = PLAN["phases"][0 if step <= 6 else 1]
        if step % 2 == 0:
            record.row(
                {
                    "step": step,
                    "loss": loss(step),
                    "loss_web": loss(step) + 0.5,
                    "loss_law": None if step <= 6 else loss(step) + 1,
                    "grad_norm": "NaN" if step == 2 else 0.25,
                    "lr": 6e-4 / step,
                    "tokens_per_sec": 1000.0,
                    "phase": phase["name"],
                    "packing_mode": "stream",
                    "mixture": phase["mixture"],
                }
            )
        if step % 4 == 0:
            measured = {}
            for number, name in enumerate(sets, start=1):
                if name != "code" or step % 8 == 0:
                    measured |= {f"eval_{name}": loss(step) + number, f"eval_{name}_bpb": 1.5 + number}
                    measured[f"eval_{name}_sem"] = 0.01
            record.event(
                "eval",
                step,
                val_loss=loss(step),
                val_bpb=1.5,
                lr=1e-4,
                phase=phase["name"],
                eval_duration_s=0.5,
                **measured,
            )
        if step == 6:
            record.event(
                "phase_switch",
                step,
                from_phase="foundation",
                new_phase="domain",
                mixture_before={"web": 1.0, "law": 0.0},
                mixture_after={"web": 0.25, "law": 0.75},
                **SAME_UPDATES,
                consumed={"web": 384, "law": 0},
                epochs={"web": 0.5, "law": 0.0},
                lr=1e-4,
            )
