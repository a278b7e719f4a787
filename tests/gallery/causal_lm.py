"""A causal language model that computes its loss itself, as nanoGPT and the models of transformers do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

WORDS, LENGTH, WIDTH, HEADS = 32, 16, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """The head shares its weight with the word embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.words(inputs) + self.places.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CausalLM(Program):
    note = "The loss is computed inside the forward; under `autocast` it is in float32. The head and the embedding are tied."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Language())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, number: int) -> torch.Tensor:
        start, stride = torch.randint(WORDS, (8, 1)), torch.randint(1, 4, (8, 1))
        tokens = (start + stride * torch.arange(LENGTH)) % WORDS  # counting by ones, twos or threes
        with self.way.computing():
            _, loss = self.model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
