"""Trains a small network with ZeRO-3; knows nothing of this library.

deepspeed --module dos.run examples/zero3.py --deepspeed_config examples/zero3.json
"""

from __future__ import annotations

import argparse

import deepspeed
import torch


def main() -> None:
    """Train some steps and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    engine, *_ = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters()
    )
    x = torch.randn(4, 256, device=engine.device, dtype=torch.bfloat16)
    for _ in range(arguments.steps):
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
    print(f"loss {loss.item():.4f}, optimizer {type(engine.optimizer).__name__}")


if __name__ == "__main__":
    main()
