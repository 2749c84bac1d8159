"""Scripts that know nothing of this library: DeepSpeed's launcher, and Hugging Face's Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worlds import ROOT

pytest.importorskip("deepspeed")

PORT = str(20_000 + os.getpid() % 10_000)
SECTION = {"enabled": True, "device": "virtual", "stride": 2, "subgroup_size": 1024}
PREPARE = """
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
"""
SCRIPT = (
    PREPARE
    + """
import argparse, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(3):
    loss = engine(torch.ones(2, 32)).square().mean()
    engine.backward(loss)
    engine.step()
kind = type(engine.optimizer).__name__
rank = torch.distributed.get_rank()
with open(f"{args.out}.{rank}", "w") as file:
    json.dump([kind, loss.item(), __name__, len(sys.argv)], file)
"""
)
HF_SCRIPT = (
    PREPARE
    + """
import json, sys
import dos
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

dos.register_deepspeed()
folder, config = sys.argv[1], json.loads(sys.argv[2])


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 16) % 64
        return {"input_ids": ids, "labels": ids}


def train(name, steps, resume=None, save_steps=2):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir=f"{folder}/{name}",
        max_steps=steps,
        save_steps=save_steps,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        max_grad_norm=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        deepspeed=config,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=resume)
    optimizer = trainer.model_wrapped.optimizer
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = torch.cat([flat.detach().flatten() for flat in optimizer.fp32_partitioned_groups_flat])
    return type(optimizer).__name__, losses, state.clone()


kind, losses, straight = train("straight", 4)
train("first", 2)
_, _, resumed = train("second", 4, resume=f"{folder}/first/checkpoint-2")
print(json.dumps([kind, losses, torch.equal(straight, resumed)]))
"""
)


def configuration(**optimizer: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, **optimizer}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "sub_group_size": 2000,
        },
        "deep_optimizer_states": SECTION,
    }


def run(command: list[str], cwd: Path, **variables: str) -> str:
    ours = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **ours, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_launcher_runs_an_unchanged_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(configuration()))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    launcher += ["--master_port", PORT, "--module", "dos.run"]
    arguments = ["train.py", "--out", "result", "--deepspeed_config", "config.json"]
    run([*launcher, *arguments], tmp_path)
    ranks = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
    assert [kind for kind, *_ in ranks] == ["DOSZeroOptimizer_Stage3"] * 2
    assert [name for *_, name, _ in ranks] == ["__main__"] * 2


def test_the_trainer_of_transformers_trains_saves_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = configuration()
    config.update(
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping="auto",
        gradient_accumulation_steps="auto",
        train_batch_size="auto",
    )
    config["optimizer"]["params"].update(lr="auto", weight_decay="auto")
    (tmp_path / "train.py").write_text(HF_SCRIPT)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "train.py", str(tmp_path), json.dumps(config)]
    shown = run(command, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, **alone)
    kind, losses, same = json.loads(shown.splitlines()[-1])
    assert kind == "DOSZeroOptimizer_Stage3"
    assert losses[-1] < losses[0]
    assert same
