"""Where bytes live: one pinned pool of host memory, its leases and their fences."""

from dos.memory.available import available_host_bytes
from dos.memory.fence import Fence, Use
from dos.memory.gates import Gates, HeldState, Hold
from dos.memory.lease import Lease, RingLease, tensor_across
from dos.memory.pinned import Slab
from dos.memory.pool import Pool, PoolStats, Requirement
from dos.memory.ring import Ring
from dos.memory.sizes import PAGE_BYTES, bytes_text, padded_bytes

__all__ = [
    "PAGE_BYTES",
    "Fence",
    "Gates",
    "HeldState",
    "Hold",
    "Lease",
    "Pool",
    "PoolStats",
    "Requirement",
    "Ring",
    "RingLease",
    "Slab",
    "Use",
    "available_host_bytes",
    "bytes_text",
    "padded_bytes",
    "tensor_across",
]
