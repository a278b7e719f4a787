"""Every program of the gallery in three ways: plain fp32 DDP, autocast over plain DDP, and ddp_mp with its options."""

from __future__ import annotations

import pytest
from gallery import NAMES
from gallery.compare import train


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gallery_trains_saves_and_resumes(name: str) -> None:
    if name == "lightning_gan":
        pytest.importorskip("lightning")
    train(name=name)
