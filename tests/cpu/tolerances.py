"""How far a result may be from torch's own, and why that far.

Between our own implementations there is no tolerance: those give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """|ours - theirs| <= absolute + relative * |theirs|."""

    relative: float
    absolute: float
    reason: str


# A hundred steps of torch.optim.AdamW or Adam in fp32: lr 1e-2, parameters near 1, gradients
# from a standard normal. One rounding is at most 6e-8 relative, and errs at random.
AFTER_100_STEPS = {
    "exp_avg": Tolerance(
        relative=0.0,
        absolute=1e-6,
        reason="torch takes lerp(m, g, 1-beta1), we m*beta1 + g*(1-beta1): three roundings per"
        " step of values up to 1, remembered for 1/(1-beta1) = 10 steps; absolute, because m"
        " crosses zero",
    ),
    "exp_avg_sq": Tolerance(
        relative=1e-6,
        absolute=0.0,
        reason="three roundings per step on either side, all 100 remembered:"
        " 6e-8 * sqrt(3 * 100) = 1e-6; relative, because every term is positive",
    ),
    "p": Tolerance(
        relative=1e-6,
        absolute=1e-7,
        reason="each step rounds p once on either side: 6e-8 * sqrt(2 * 100) = 8e-7; the"
        " error of the step itself is 1e-2 of that of m; absolute for a p that crosses zero",
    ),
}

CLIP = Tolerance(
    relative=1e-12,
    absolute=0.0,
    reason="torch.nn.utils.clip_grad_norm_ of the same gradients in float64 adds some 300,000"
    " squares in another order; one rounding is at most 1.1e-16 relative, and errs at random",
)

# At most some forty steps of torch.optim.AdamW, each on any mixture of accumulated, edited, zeroed
# and clipped gradients, with lr up to 1e-2; exp_avg in units of the largest gradient seen.
AFTER_ACTIONS = {
    "exp_avg": AFTER_100_STEPS["exp_avg"],
    "exp_avg_sq": Tolerance(
        relative=2e-6,
        absolute=1e-30,
        reason="as after 100 steps, and clipping: torch rounds norm, factor and product in fp32,"
        " we the factor alone; up to 3 * 6e-8 of a gradient, twice that of its square;"
        " absolute for a variance that is nothing but squares of tiny gradients",
    ),
    "p": Tolerance(
        relative=1e-6,
        absolute=2e-7,
        reason="as after 100 steps; a small variance beside a momentum of larger gradients makes"
        " steps of up to 3 lr, whose error is 3e-2 of that of m",
    ),
}

# At most a dozen steps of a small model at lr 1e-2, each gradient computed from the weights before.
AFTER_STEPS_OF_A_MODEL = Tolerance(
    relative=1e-6,
    absolute=2e-6,
    reason="weights that differ in their last bits have gradients that differ by 1e-7 of their"
    " largest terms; where the terms nearly cancel that is up to 1e-4 of the gradient, and Adam"
    " divides the gradient's size out again: 1e-4 * lr a step, in either direction",
)
