"""The same model in torch, written by hand (nanoGPT's block) and from transformers: the alternatives to curriculum.

For `tools/bench_step.py`. `program` returns (run, num_parameters): run(n) makes n updates and returns the seconds and
the processor seconds of each.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from curriculum.model.presets import ModelConfig

Run = Callable[[int], tuple[list[float], list[float]]]


def program(
    variant: str, config: ModelConfig, num_rows: int, num_positions: int, dtype: str, wait_every: int
) -> tuple[Run, int]:
    """`variant`: torch, torch_compile, hf, hf_compile or hf_trainer. Fused AdamW, matrices decayed, norm clipped at 1.

    Uses all threads. Attention is torch's scaled_dot_product_attention in all of them. A card is waited for after every
    `wait_every` updates.
    """
    import torch

    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as jax takes it there
    model = (_hf_model(config) if variant.startswith("hf") else _nano_gpt(config)).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    if variant == "hf_trainer":
        return _trainer_run(model, config.vocab_size, num_rows, num_positions, dtype, wait_every), num_parameters
    forward = torch.compile(model) if variant.endswith("_compile") else model
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    tokens = torch.randint(config.vocab_size, (num_rows, num_positions + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def update():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = forward(inputs)
            logits = logits if torch.is_tensor(logits) else logits.logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def run(num_steps):
        times = [_now()]
        for number in range(1, num_steps + 1):
            update()
            if number % wait_every == 0 or number == num_steps:
                _wait()
            times.append(_now())
        return _differences(times)

    return run, num_parameters


def _nano_gpt(config: ModelConfig):
    import torch
    from torch import nn
    from torch.nn import functional as F

    D, H = config.d_model, config.n_head

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(D, bias=False) for _ in range(2))
            self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
            self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

        def forward(self, x):
            B, T, _ = x.shape
            heads = (part.view(B, T, H, D // H).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(D, 2))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, D)
            self.positions = nn.Embedding(config.max_seq_len, D)
            self.blocks = nn.ModuleList(Block() for _ in range(config.n_layer))
            self.norm = nn.LayerNorm(D, bias=False)
            self.head = nn.Linear(D, config.vocab_size, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Gpt()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def _hf_model(config: ModelConfig):
    from transformers import AutoConfig, AutoModelForCausalLM

    from curriculum.model.formats.hf_config_writer import hf_config_of

    if config.pos_encoding == "learned":
        config = replace(config, bias=True)  # GPT-2's class has biases
    written = hf_config_of(config, bos=None, eos=None)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(written.pop("model_type"), **written, use_cache=False))


def _trainer_run(model, vocab_size: int, num_rows: int, num_positions: int, dtype: str, wait_every: int) -> Run:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows = torch.randint(vocab_size, (64 * num_rows, num_positions))
    examples = [{"input_ids": row, "labels": row} for row in rows]

    warmup_steps = 2

    class Clock(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_step_end(self, args, state, control, **kwargs):
            if (state.global_step - warmup_steps) % wait_every == 0 or state.global_step == state.max_steps:
                _wait()
            self.times.append(_now())

    def run(num_steps):
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                folder,
                per_device_train_batch_size=num_rows,
                max_steps=num_steps + warmup_steps,
                learning_rate=1e-3,
                weight_decay=0.1,
                adam_beta2=0.95,
                max_grad_norm=1.0,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                bf16=dtype == "bfloat16",
                optim="adamw_torch_fused",
            )
            Trainer(model, settings, train_dataset=examples, callbacks=[clock]).train()
        return _differences(clock.times[warmup_steps - 1 :])

    return run


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _differences(times: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    pairs = list(zip(times, times[1:], strict=False))
    return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs]
