"""A GPT of a few million parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        n, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(n, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """Byte-level language model; the output matrix is the embedding's."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of int64 tokens [batch, length]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, window: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats of predicting each next token of [batch, length + 1].

        A processor that cannot multiply bf16 takes 25 times as long for it as for fp32, so there
        the weights are widened, exactly, for forward and backward.
        """
        weights: dict[str, torch.Tensor] = dict(self.named_parameters())
        if window.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            weights = {name: weight.float() for name, weight in weights.items()}
        logits = functional_call(self, weights, (window[:, :-1],)).float()
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
