"""PyTorch's own tests of ``DistributedDataParallel`` end on patched models as ``peer_verdicts.py`` says."""

from __future__ import annotations

import peers
import pytest
from kit.peer_verdicts import DIFFER, FULL_ONLY, NOT_HERE, PASS
from kit.ranks import Rank, on_ranks


@pytest.mark.long
@on_ranks(2)
@pytest.mark.parametrize("precision", ["full", "bfloat16"])
@pytest.mark.parametrize("name", [*PASS, *FULL_ONLY, *DIFFER])
def test_peer_ends_as_expected(rank: Rank, name: str, precision: str) -> None:
    text = peers.conduct(rank, name, precision)
    assert text.startswith(peers.due(name, precision)), text


@pytest.mark.long
@on_ranks(1)
def test_peers_all_have_one_verdict(rank: Rank) -> None:
    known = [*PASS, *FULL_ONLY, *DIFFER, *NOT_HERE]
    assert sorted(known) == peers.names()
