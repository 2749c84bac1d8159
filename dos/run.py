"""Runs a training script unchanged: `deepspeed --module dos.run train.py ...`.

A DeepSpeed configuration with the section "deep_optimizer_states" switched on then works in any
script that was written for DeepSpeed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dos import register_deepspeed
from dos.errors import ConfigError


def main() -> None:
    """Register with DeepSpeed, then run the script of the command line as `__main__`.

    Raises:
        ConfigError: no script is named.
        IntegrationError: DeepSpeed is not installed, or not as known.
    """
    # The launcher may put its own --local_rank before the script.
    arguments = sys.argv[1:]
    position = next((n for n, word in enumerate(arguments) if not word.startswith("-")), None)
    if position is None:
        raise ConfigError(
            "no script is named", where="dos.run", fix="deepspeed --module dos.run train.py ..."
        )
    register_deepspeed()
    script = arguments[position]
    sys.argv = [script, *arguments[:position], *arguments[position + 1 :]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
