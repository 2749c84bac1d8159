"""A small LlamaForCausalLM, data for it, and a Trainer around both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dos

STEPS = 4
SEQUENCE = 8
VOCABULARY = 64
PLANS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "virtual", "stride": "host"},
    "k=1": {"device": "virtual", "stride": 1},
    "k=1.5": {"device": "virtual", "stride": 1.5},
    "k=2, residents": {"device": "virtual", "stride": 2, "resident_ratio": 0.25},
}


def make_model(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype)


def make_data(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (count, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_optimizer(model: torch.nn.Module, **options: Any) -> dos.DOSOptimizer:
    """In two groups, as Trainer makes them."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    options = {"subgroup_size": 512, **options}
    return dos.DOSOptimizer(torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1), **options)


def make_trainer(
    folder: Path,
    plan: dict[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    **arguments: Any,
) -> Trainer:
    """As Trainer is by default (max_grad_norm 1.0, a linear schedule), with accumulation 4."""
    arguments = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 4,
        "save_strategy": "no",
        **arguments,
    }
    model = make_model(dtype)
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            **arguments,
        ),
        train_dataset=make_data(),
        eval_dataset=make_data(8),
        optimizers=(make_optimizer(model, **plan), None),
    )


def inner(optimizer: Any) -> dos.DOSOptimizer:
    """What an AcceleratedOptimizer wraps."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, dos.DOSOptimizer)
    return found


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]
