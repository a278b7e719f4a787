"""Trains for as long as it is told to: random models and actions on four ranks, every step compared with the oracle.

    python tests/long/soak.py --minutes 60 [--seed 0] [--ranks 4]
    python tests/long/soak.py --walk 17 [--ranks 4]                  # one walk again, with its actions

Every rank does the same walk (``walk.py``), ``ACTIONS_A_WALK`` actions long, and begins the next with new models.  Between two
walks it measures its memory.  The program ends with an error at the first difference from the oracle, which names the seed of
the walk and its action, and when memory grew by more than ``ALLOWED`` MiB after the warm-up, by a fitted line.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests, where the kit is

import torch.distributed as dist
from kit.ranks import Conversation, Rank
from kit.walk import ACTIONS, BUILDS, MODELS, Walk, note

ACTIONS_A_WALK = 100
WARM_UP, WARM_WALKS = 0.2, 20  # of the time, and at least so many: PyTorch keeps what it made for the first of a kind
ALLOWED = 8.0  # MiB that a rank may seem to grow by, from the end of the warm-up to the end

#: How often an action comes, where not once.
OFTEN = {"forward": 12, "backward": 10, "step": 6, "zero_grad": 4, "second": 4, "evaluate": 2}
DRAWN = [name for name in ACTIONS for _ in range(OFTEN.get(name, 1))]


def resident() -> float:
    """MiB of memory that this process holds, after giving back what it does not need."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def growth(times: Sequence[float], sizes: Sequence[float]) -> float:
    """How much a line through the measurements grows from the first to the last, by least squares."""
    count = len(times)
    if count < 2:
        return 0.0
    mean_time, mean_size = sum(times) / count, sum(sizes) / count
    spread = sum((t - mean_time) ** 2 for t in times)
    slope = sum((t - mean_time) * (s - mean_size) for t, s in zip(times, sizes, strict=True)) / spread
    return slope * (times[-1] - times[0])


def draw(chance: random.Random, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """One of each."""
    return {name: chance.choice(values) for name, values in choices.items()}


def actions_of(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """One walk, decided by its seed."""
    chance = random.Random(seed)
    actions = [("build", {"model": model, **draw(chance, BUILDS)}) for model in range(MODELS)]
    for _ in range(ACTIONS_A_WALK - MODELS):
        action = chance.choice(DRAWN)
        actions.append((action, {"model": chance.randrange(MODELS), **draw(chance, ACTIONS[action])}))
    return actions


def walk_once(walk: Walk, seed: int, tell: bool = False) -> None:
    """One walk, with all its comparisons; ``tell`` prints its actions."""
    try:
        for number, action in enumerate(actions_of(seed)):
            with note(f"walk {seed}, action {number}"):
                if tell:
                    print(number, *action, flush=True)
                walk.do(*action)
    finally:
        walk.close()


def soak(rank: Rank) -> None:
    """What a rank does: it hears for how long, and by which seed."""
    for seconds, seed in rank.heard():
        walk = Walk(rank)
        if seconds is None:
            walk_once(walk, seed, tell=rank.index == 0)
            continue
        start, walks = time.monotonic(), 0
        times, sizes = [], []
        first = resident()
        while True:
            passed = time.monotonic() - start
            if rank.gather(passed)[0] >= seconds:  # the first rank's clock
                break
            walk_once(walk, 100_000 * seed + walks)
            walks += 1
            if passed >= WARM_UP * seconds and walks > WARM_WALKS:
                times.append(passed)
                sizes.append(resident())
        grown = rank.gather(growth(times, sizes))
        memory = rank.gather((first, sizes[0] if sizes else first, resident()))
        if rank.index == 0:
            report(walk, walks, seed, memory, grown)
        dist.barrier()
        assert max(grown) <= ALLOWED, f"memory grew by {grown} MiB after the warm-up, allowed {ALLOWED}"


def report(walk: Walk, walks: int, seed: int, memory: list[tuple[float, float, float]], grown: list[float]) -> None:
    """What was done, and what it took."""
    print(f"seed {seed}: {walks} walks, {walk.models} models, {walk.actions} actions ({walk.skipped} of them did nothing),")
    print(f"{walk.backwards} backwards on each of {walk.rank.size} ranks, all as the oracle's")
    print("memory of each rank, MiB: at the start, after the warm-up, at the end; growth of a line fitted after the warm-up")
    for index, (sizes, line) in enumerate(zip(memory, grown, strict=True)):
        print(f"  rank {index}: {', '.join(f'{size:.1f}' for size in sizes)}, {line:+.2f}")
    sys.stdout.flush()


def run(minutes: float | None, seed: int, ranks: int) -> None:
    """Returns when all is well.  Without ``minutes``, ``seed`` is that of one walk."""
    talk = Conversation(ranks, soak, seconds=60 * (minutes or 0) + 300)
    talk.say((minutes and 60 * minutes, seed))
    talk.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--walk", type=int)
    chosen = parser.parse_args()
    from soak import run as run_by_name  # ranks import what they run by the name of its module

    if chosen.walk is not None:
        run_by_name(None, chosen.walk, chosen.ranks)
    else:
        run_by_name(chosen.minutes, chosen.seed, chosen.ranks)
