"""Detection as a set of boxes: pictures of several sizes come in a class of the program's own, with their padding mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

QUERIES, CLASSES, WIDTH = 4, 3, 32


class Pictures:
    """Pictures padded to one size; ``padding`` is True where there is none."""

    def __init__(self, pictures: list[torch.Tensor]) -> None:
        height, width = (max(p.shape[axis] for p in pictures) for axis in (1, 2))
        self.tensor = torch.zeros(len(pictures), 3, height, width)
        self.padding = torch.ones(len(pictures), height, width, dtype=torch.bool)
        for index, p in enumerate(pictures):
            self.tensor[index, :, : p.shape[1], : p.shape[2]] = p
            self.padding[index, : p.shape[1], : p.shape[2]] = False


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, WIDTH, 4, stride=4), nn.GroupNorm(4, WIDTH), nn.ReLU())
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.queries = nn.Embedding(QUERIES, WIDTH)
        self.classify, self.locate = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)

    def forward(self, pictures: Pictures) -> dict[str, torch.Tensor]:
        seen = self.backbone(pictures.tensor)
        padding = F.interpolate(pictures.padding[:, None].float(), size=seen.shape[-2:])[:, 0].bool()
        places = torch.stack(((~padding).cumsum(1), (~padding).cumsum(2)), -1).float()  # sine positions, in float32
        waves = (places[..., None] / 10 ** torch.linspace(0, 1, WIDTH // 2)).sin().flatten(3).permute(0, 3, 1, 2)
        memory = (seen + waves).flatten(2).transpose(1, 2)
        queries = self.queries.weight.expand(len(seen), -1, -1)
        found = self.decoder(queries, memory, memory_key_padding_mask=padding.flatten(1))
        return {"classes": self.classify(found), "boxes": self.locate(found).sigmoid()}


def matched(boxes: torch.Tensor, targets: torch.Tensor) -> list[int]:
    """For each target the nearest query that is free, in turn."""
    free, chosen = set(range(QUERIES)), []
    for row in torch.cdist(targets, boxes.detach().float(), p=1):
        chosen.append(min(free, key=lambda query: row[query].item()))
        free.discard(chosen[-1])
    return chosen


class Detection(Program):
    bound = 0.05
    note = "Inputs inside a class of your own are not cast by anybody; under `autocast` they need not be."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Detector())
        backbone, others = (
            self.model.module.backbone.parameters(),
            [p for name, p in self.model.named_parameters() if "backbone" not in name],
        )
        self.optimizer = torch.optim.AdamW([{"params": backbone, "lr": 1e-3}, {"params": others}], lr=5e-3)

    def step(self, number: int) -> torch.Tensor:
        boxes, kinds = torch.rand(4, 2, 4) / 2 + 0.1, torch.randint(CLASSES, (4, 2))
        pictures = []
        for index in range(4):
            picture = torch.zeros(3, 16 + 4 * index, 28 - 4 * index)
            picture[kinds[index]] = boxes[index].mean(1)[:, None, None]
            pictures.append(picture)
        with self.way.computing():
            out = self.model(Pictures(pictures))
            loss = torch.zeros(())
            for index in range(4):
                chosen = matched(out["boxes"][index], boxes[index])
                labels = torch.full((QUERIES,), CLASSES).index_put((torch.tensor(chosen),), kinds[index])
                loss = loss + F.cross_entropy(out["classes"][index].float(), labels)
                loss = loss + F.l1_loss(out["boxes"][index][chosen].float(), boxes[index])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss / 4
