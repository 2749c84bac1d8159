"""How far ZeRO-3 with this library may be from upstream's own update, and why that far."""

from __future__ import annotations

from tests.cpu.tolerances import Tolerance

# Ten steps of the small model, lr 1e-2, weights below 1, gradients clipped to 0.05 or about 1.
AFTER_10_STEPS = {
    "weight": Tolerance(
        relative=0.0,
        absolute=4e-3,
        reason="one unit in the last place of a bf16 weight between 0.25 and 1",
    ),
    "master": Tolerance(
        relative=0.0,
        absolute=1e-3,
        reason="the two differ by roundings of 6e-8 until a weight falls on the other side of a"
        " rounding to bf16; from there on every gradient differs by some 1e-3 of itself, and the"
        " step of an element whose gradient is nearly zero by a tenth of lr",
    ),
    "exp_avg": Tolerance(
        relative=0.0,
        absolute=1e-3,
        reason="a bf16 gradient of up to 0.5 differs by a unit in the last place, 2e-3, of which"
        " a tenth enters per step",
    ),
    "exp_avg_sq": Tolerance(
        relative=0.0,
        absolute=1e-6,
        reason="twice the gradient times that difference, of which a thousandth enters per step",
    ),
}

# Thirty steps against DeepSpeedCPUAdam, which also fuses multiply and add.
AFTER_30_STEPS = {
    kind: its._replace(absolute=5 * its.absolute, reason=f"three times as many steps; {its.reason}")
    for kind, its in AFTER_10_STEPS.items()
}

FP32_AFTER_4_STEPS = Tolerance(
    relative=0.0,
    absolute=5e-5,
    reason="fp32 throughout, after weights and moments of about 1 were set: some hundred"
    " roundings of 6e-8, times up to 4 where a moment was doubled",
)

NORM = Tolerance(
    relative=2e-7,
    absolute=0.0,
    reason="upstream reports the norm as fp32, and so do we: two roundings of 6e-8",
)
