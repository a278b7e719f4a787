"""A recurrent tagger: a bidirectional LSTM over sentences of several lengths gives every word a tag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .training import Program, Way

WORDS, TAGS, LENGTH = 40, 4, 8


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.tag = nn.Linear(48, TAGS)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        return self.tag(pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)[0])


class Tagger(Program):
    note = "`nn.LSTM` keeps a list of its weights beside its parameters; it too holds leaves inside a forward."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Recurrent())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> torch.Tensor:
        lengths = torch.randint(3, LENGTH + 1, (8,))
        words = torch.randint(1, WORDS, (8, LENGTH)) * (torch.arange(LENGTH) < lengths[:, None])
        tags = torch.where(words > 0, words % TAGS, -100)
        with self.way.computing():
            loss = F.cross_entropy(self.model(words, lengths).float().flatten(0, 1), tags.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
