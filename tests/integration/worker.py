"""One rank: runs the named scenarios and stores what each returns.

`python -m tests.integration.worker FOLDER MODULE.FUNCTION...`
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch

SILENCE_S = 120  # after which a rank no longer waits for another


def main() -> None:
    """Run them all, up to the first that fails.

    Then the process ends, so that the other ranks do not wait for it: they fail at once.
    """
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SILENCE_S),
    )
    for name in names:
        module, function = name.rsplit(".", 1)
        torch.manual_seed(0)
        try:
            scenario = getattr(import_module(module), function)
            # DeepSpeed collects garbage again and again: not what was imported.
            gc.freeze()
            result = scenario()
        except BaseException:
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            if world > 1:
                os._exit(1)
            continue
        torch.save(result, folder / f"{name}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
