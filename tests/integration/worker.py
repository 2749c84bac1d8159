"""One rank: runs the named scenarios and stores what each returns.

`python -m tests.integration.worker FOLDER MODULE.FUNCTION...`
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch


def prepare(folder: Path) -> None:
    """Real DeepSpeed over gloo, without the operators that it would compile first."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes fp16 on the CPU, which DeepSpeed does not know.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    deepspeed.init_distributed("gloo", verbose=False)


def main() -> None:
    """Run them all; after an error go on with the next where the ranks are still together."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    prepare(folder)
    for name in names:
        module, function = name.rsplit(".", 1)
        torch.manual_seed(0)
        try:
            scenario = getattr(import_module(f"tests.integration.{module}"), function)
            # DeepSpeed collects garbage again and again: not what was imported.
            gc.freeze()
            result = scenario()
        except BaseException:
            result = traceback.format_exc()
            print(result, flush=True)
        torch.save(result, folder / f"{name}.{os.environ['RANK']}")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
