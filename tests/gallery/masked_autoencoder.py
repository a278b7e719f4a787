"""A masked autoencoder: an encoder sees a random quarter of the patches of an image, a decoder paints the others."""

from __future__ import annotations

import torch
from torch import nn

from .training import Program, Way

PATCHES, PIXELS, WIDTH, KEPT = 16, 16, 32, 4


def layers(count: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


class Autoencoder(nn.Module):
    """Returns the loss on the patches that the encoder did not see.  The order of the patches and the mask are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Linear(PIXELS, WIDTH), layers(2), layers(1)
        self.unseen = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.paint = nn.Linear(WIDTH, PIXELS)
        self.register_buffer("places", torch.randn(1, PATCHES, WIDTH))  # fixed, in float32

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        order = torch.rand(images.shape[:2]).argsort(1)
        seen = order[:, :KEPT, None].expand(-1, -1, WIDTH)
        visible = (self.embed(images) + self.places).gather(1, seen)
        tokens = self.unseen.expand(len(images), PATCHES, -1).to(visible.dtype)
        tokens = tokens.scatter(1, seen, self.encoder(visible).to(visible.dtype))
        painted = self.paint(self.decoder(tokens + self.places))
        hidden = torch.ones(images.shape[:2]).scatter(1, order[:, :KEPT], 0.0)
        return ((painted - images).square().mean(-1) * hidden).sum() / hidden.sum()


class MaskedAutoencoder(Program):
    note = "Fixed positions (a float32 buffer) and a mask that the forward makes meet the activations, which promote."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Autoencoder())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def step(self, number: int) -> torch.Tensor:
        waves = torch.linspace(0, 6, PATCHES * PIXELS).view(1, PATCHES, PIXELS) * torch.rand(16, 1, 1)
        with self.way.computing():
            loss = self.model(waves.sin())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
