"""How costs grow with the model: the planner alone, and patching and hooks of real models.

    python -m benchmarks.scaling [--quick]

The planner is asked for up to 10,000 parameters and 16 GiB of fp32 masters, without touching any memory.  Patching and
stepping are measured on made-up models of many small parameters; both should grow in proportion to the number of
parameters and not faster.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from benchmarks.harness import Report, Settings, one_process_group, settings
from ddp_mp import _C
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import Spread, collector_paused, now

MIB, GIB = 2**20, 2**30


def sizes_of(parameters: int, total_bytes: int) -> list[int]:
    """Elements of each parameter: mostly a few large ones and many small ones, together ``total_bytes`` of fp32."""
    small = 1024
    large = max(1, parameters // 3)
    rest = max(large, total_bytes // 4 - (parameters - large) * small)
    return [rest // large if i % 3 == 0 and i // 3 < large else small for i in range(parameters)]


def planner(s: Settings, rounds: int) -> Report:
    report = Report("scaling-plan", "planner: time of one plan", s.device, {"rounds": rounds})
    for parameters in (100, 1000) if s.quick else (100, 300, 1000, 3000, 10000):
        for total in (MIB * 64, GIB * 16):
            numels = sizes_of(parameters, total)
            taken = []
            for _ in range(rounds):
                begin = now()
                plan = _C.plan(numels, "bfloat16", MIB, 25 * MIB)
                taken.append(now() - begin)
            low = sum(numels) * 2
            arenas = sum(size for *_, size in plan["buckets"])
            if not low <= arenas <= low + 256 * parameters + 256 * len(plan["buckets"]):
                raise AssertionError(f"{parameters} parameters: arenas of {arenas} bytes for {low} bytes of rows")
            micros = Spread.of(taken, 1e-3)
            report.add(
                parameters=parameters,
                **{"fp32 GiB": round(sum(numels) * 4 / GIB, 3)},
                buckets=len(plan["buckets"]),
                **{"padding %": round(100 * (arenas / low - 1), 3)},
                **{"plan us": micros, "us/param": micros.scaled(1 / parameters)},
            )
    return report


def models_of_many_parameters(s: Settings, rounds: int) -> Report:
    report = Report("scaling-model", "patching and stepping made-up models", s.device, {"rounds": rounds})
    policy = ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with one_process_group(s.device):
        for parameters in (50, 200) if s.quick else (100, 300, 1000, 3000, 10000):
            patching, stepping, plain = [], [], []
            module = shapes.made_up(parameters, parameters * 64).to(s.device)
            ddp = DistributedDataParallel(module)
            reference = DistributedDataParallel(shapes.made_up(parameters, parameters * 64).to(s.device).to(torch.bfloat16))
            for _ in range(max(2, rounds // 4)):
                with collector_paused():  # its passes over everything else alive would be counted otherwise
                    begin = now()
                    ddp_mp.patch(ddp, mixed_precision=policy)
                    patching.append(now() - begin)
                ddp_mp.unpatch(ddp)
            ddp_mp.patch(ddp, mixed_precision=policy)
            with collector_paused():
                for i in range(rounds + 2):
                    for model, times in ((ddp, stepping), (reference, plain)):
                        begin = now()
                        shapes.loss_of(model, s.device).backward()
                        taken = now() - begin
                        if i >= 2:
                            times.append(taken)
                        for p in model.parameters():
                            p.grad = None
            extra = Spread.of((a - b for a, b in zip(stepping, plain, strict=True)), 1e-3)
            report.add(
                parameters=parameters,
                **{"patch ms": Spread.of(patching, 1e-6), "patch us/param": Spread.of(patching, 1e-3 / parameters)},
                **{"step ms": Spread.of(stepping, 1e-6), "bf16 step ms": Spread.of(plain, 1e-6)},
                **{"difference us/param": extra.scaled(1 / parameters)},
            )
    report.notes.append("bf16 step: plain DDP of the same model in bfloat16; difference: forward and backward, round by round")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    s = settings(__doc__, arguments)
    rounds = 4 if s.quick else 20
    plans = planner(s, rounds)
    plans.save(s.output, s.tag)
    report = models_of_many_parameters(s, rounds)
    report.save(s.output, s.tag)
    # Growth, in words: the exponent between the ends (1.0 is proportional).
    first, last = report.rows[0], report.rows[-1]
    ratio = math.log(last["step ms"].median / first["step ms"].median) / math.log(last["parameters"] / first["parameters"])
    print(f"a step grows as parameters ^ {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
