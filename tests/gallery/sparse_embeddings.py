"""A recommender: large tables with sparse gradients and an optimizer of their own, a dense part with another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

USERS, ITEMS, WIDTH = 200, 300, 16


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean", sparse=True)
        self.dense = nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat((self.users(users), self.items(seen)), -1)).squeeze(-1)


class SparseEmbeddings(Program):
    note = "Gradients of the tables stay sparse, and reach `SparseAdam` in float32."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Recommender())
        net = self.model.module
        self.tables = torch.optim.SparseAdam([net.users.weight, net.items.weight], lr=1e-2)
        self.dense = torch.optim.Adagrad(net.dense.parameters(), lr=5e-2)

    def step(self, number: int) -> torch.Tensor:
        users, seen = torch.randint(USERS, (32,)), torch.randint(ITEMS, (32, 4))
        liked = (users % 2).float()
        with self.way.computing():
            loss = F.binary_cross_entropy_with_logits(self.model(users, seen).float(), liked)
        loss.backward()
        assert self.model.module.users.weight.grad.is_sparse
        for optimizer in (self.tables, self.dense):
            optimizer.step()
            optimizer.zero_grad()
        return loss
