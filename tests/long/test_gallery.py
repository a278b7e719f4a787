"""Every program of the gallery in three ways: plain fp32 DDP, autocast over plain DDP, and ddp_mp with its options."""

from __future__ import annotations

from pathlib import Path

import pytest
from gallery import NAMES, program
from gallery.compare import train
from gallery.training import line


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_gallery_trains_saves_and_resumes(name: str) -> None:
    if name == "lightning_gan":
        pytest.importorskip("lightning")
    train(name=name)


def test_page_has_the_options_and_the_note_of_every_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `")]
    shown = {row[0].strip("| `"): (row[1].strip("`"), row[-1].removesuffix(" |")) for row in rows}
    assert shown == {f"{name}.py": (line(program(name).options), program(name).note) for name in NAMES}
