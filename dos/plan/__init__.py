"""What one optimizer step does, as data: made, proven right and printed before it runs.

Pure Python: importing this loads neither torch nor numpy.
"""

from dos.plan.build import build, place
from dos.plan.ops import (
    STATE_BYTES_PER_ELEMENT,
    Buffer,
    Lane,
    Op,
    OpKind,
    Placement,
    PlanMemory,
    SubgroupSize,
    UpdatePlan,
    operands,
)
from dos.plan.partition import Segment, Subgroup, partition
from dos.plan.text import parse_plan
from dos.plan.verify import verify

__all__ = [
    "STATE_BYTES_PER_ELEMENT",
    "Buffer",
    "Lane",
    "Op",
    "OpKind",
    "Placement",
    "PlanMemory",
    "Segment",
    "Subgroup",
    "SubgroupSize",
    "UpdatePlan",
    "build",
    "operands",
    "parse_plan",
    "partition",
    "place",
    "verify",
]
