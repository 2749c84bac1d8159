"""Gradients sent to the host as DistributedDataParallel has reduced them, bucket by bucket."""

# Without postponed annotations: torch reads those of a communication hook and wants types.

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dos.errors import ConfigError
from dos.optimizer import DOSOptimizer

CommHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""What `DistributedDataParallel.register_comm_hook` takes."""


def register_ddp(
    model: DistributedDataParallel,
    *optimizers: DOSOptimizer,
    hook: CommHook = allreduce_hook,
    state: object = None,
) -> None:
    """Let `optimizers` send the gradients of `model` while backward runs, once each.

    Call it once, before the first backward. Without it training gives the same bits, but
    gradients are sent in `step()`: before DDP has reduced them nobody knows what they will be.

    Args:
        model: has no communication hook yet, of which torch allows one.
        optimizers: those of its parameters. Where all update parameters in host memory, there is
            nothing to send, and the default hook is left out.
        hook: the communication hook to run; by default gradients are averaged, as by DDP itself.
        state: is handed to `hook`; by default the process group, as torch's hooks want it.

    Raises:
        ConfigError: `model` is no DistributedDataParallel.
        RuntimeError: it has a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"{type(model).__name__} is no DistributedDataParallel",
            where="register_ddp",
            fix="pass the wrapped model; FSDP2 needs no registration",
        )
    senders = [sender for o in optimizers if (sender := o._engine.sender) is not None]
    if not senders and hook is allreduce_hook:
        return
    if state is None:
        state = model.process_group

    def reduce_and_send(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # Taken here: the bucket may be gone when the reduction is over.
        buffer = bucket.buffer()
        views = list(zip(bucket.parameters(), bucket.gradients(), strict=True))

        def send(future: torch.futures.Future[Any]) -> torch.Tensor:
            value = future.value()
            reduced: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
            if reduced.data_ptr() == buffer.data_ptr():  # else DDP copies it, for step() to send
                for parameter, view in views:
                    for sender in senders:
                        sender.reduced(parameter, view)
            return reduced

        return hook(state, bucket).then(send)

    model.register_comm_hook(state, reduce_and_send)
    for sender in senders:
        ignored = model.parameters_to_ignore
        sender.await_reduction(p for n, p in model.module.named_parameters() if n not in ignored)
