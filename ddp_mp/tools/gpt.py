"""The small model of the tools: a byte-level GPT."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

#: The longest sequence that the model takes, where nothing else is said.
CONTEXT = 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return result


class GPT(nn.Module):
    """A byte-level GPT whose output layer is its embedding (unless ``tied=False``)."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        tied: bool = True,
        vocabulary: int = 256,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = math.sqrt(2 * layers) if name.endswith(("attention_out.weight", "mlp.2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
