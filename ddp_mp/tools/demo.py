"""A demonstration: one small GPT, trained twice side by side on two CPU processes, in fp32 and in mixed precision.

Started by ``make demo`` or ``python -m ddp_mp demo``, or by hand::

    torchrun --standalone --nproc-per-node=2 -m ddp_mp demo

The model reads bytes, its text is the Python standard library's own source, and its input and output embeddings are one
tensor: the case that PyTorch's own hooks cannot train.  Both runs start from the same weights and see the same batches,
and their steps alternate, so that a slow moment of the machine hits both.  Only torch is needed; tqdm, rich and
matplotlib are used where they are installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

from .command import Parser
from .gpt import CONTEXT, GPT
from .show import installed, progress, show_table
from .upstream import silent_device_events

BATCH = 8
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and held-out bytes: the standard library's modules by name, every tenth of them held out."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    train = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 10 != 9)
    held_out = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 10 == 9)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))  # type: ignore[return-value]


def batch_of(text: torch.Tensor, seed: int) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def averaged(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


class Contender:
    """One of the runs that are compared: its model, its optimizer and what was seen."""

    def __init__(self, name: str, model: DistributedDataParallel, steps: int) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda s: min(1.0, (s + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * s / max(1, steps))),
        )
        self.losses: list[float] = []
        self.held_out = math.nan
        self.seconds: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        begin = time.perf_counter()
        loss = loss_of(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(averaged(loss))

    def evaluate(self, text: torch.Tensor, batches: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            losses = [loss_of(self.model, batch_of(text, seed=-1 - i * ranks - rank)) for i in range(batches)]
        self.held_out = averaged(torch.stack(losses).mean())


def contenders(steps: int) -> list[Contender]:
    """The same weights twice: plain DDP, and DDP with mixed precision by one call."""
    torch.manual_seed(0)
    full, mixed = GPT(), GPT()
    mixed.load_state_dict(full.state_dict())
    policy = ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return [
        Contender("fp32", DistributedDataParallel(full), steps),
        Contender("bf16 with ddp_mp", ddp_mp.patch(DistributedDataParallel(mixed), mixed_precision=policy), steps),
    ]


# --- what PyTorch does by itself -----------------------------------------------------------------------------------


def try_native_hooks() -> None:
    """One process, one line of JSON on stdout: what the same model does on PyTorch's own hooks."""
    from torch.nn.parallel.distributed import _MixedPrecision

    def attempt() -> str:
        torch.manual_seed(0)
        policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        train, _ = read_text()
        try:
            model = DistributedDataParallel(GPT(), mixed_precision=policy)
            for seed in range(2):
                loss_of(model, batch_of(train, seed)).backward()
                worst = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
                if not worst < 1e6:
                    return f"no error, and a gradient of {worst:.3g} in step {seed}"
                model.zero_grad()
        except Exception as error:
            sentence = str(error).strip().splitlines()[0].split(". ")[0]
            return f"{type(error).__name__}: {sentence}"
        return "no error"

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    said = {"as it is": attempt()}
    if not torch.accelerator.is_available():
        with silent_device_events():
            said["with device events that do nothing"] = attempt()
    dist.destroy_process_group()
    print(json.dumps(said))


def ask_native_hooks() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_", "RANK", "LOCAL_"))}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ddp_mp.tools.demo", "--native-hooks"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    try:
        answer: dict[str, str] = json.loads(result.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        # A crash is an answer too: its last words.
        answer = {"as it is": (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]}
    return answer


# --- what is shown -------------------------------------------------------------------------------------------------


def smoothed(values: Sequence[float], keep: float = 0.9) -> list[float]:
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def draw(runs: Sequence[Contender], path: pathlib.Path) -> bool:
    if not installed("matplotlib"):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, gap) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    for run, color in zip(runs, ("tab:blue", "tab:orange"), strict=True):
        curves.plot(run.losses, color=color, alpha=0.25, linewidth=0.8)
        curves.plot(smoothed(run.losses), color=color, label=f"{run.name}: held out {run.held_out:.3f}")
    curves.set_ylabel("loss a byte (nats)")
    curves.set_title("byte-level GPT with tied embeddings, two processes")
    curves.legend()
    curves.grid(alpha=0.3)
    gap.plot([b - a for a, b in zip(runs[0].losses, runs[1].losses, strict=True)], color="tab:gray", linewidth=0.8)
    gap.axhline(0, color="black", linewidth=0.8)
    gap.set_ylabel("mixed - fp32")
    gap.set_xlabel("step")
    gap.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def report(runs: Sequence[Contender], steps: int, elapsed: float, output: pathlib.Path) -> None:
    full, mixed = runs
    size = sum(p.numel() for p in full.model.parameters())
    stats = ddp_mp.stats(mixed.model)
    rows = []
    for run, reduced, hooks in (
        (full, f"{size * 4 / 1e6:.2f} MB", "-"),
        (mixed, f"{stats.bytes_reduced / steps / 1e6:.2f} MB", f"{stats.host_us / steps:.0f} us"),
    ):
        # The first steps build buckets and warm caches up.
        per_step = statistics.median(run.seconds[min(5, steps // 2) :])
        loss = f"{smoothed(run.losses)[-1]:.4f}"
        rows.append((run.name, loss, f"{run.held_out:.4f}", f"{per_step * 1e3:.1f} ms", reduced, hooks))
    show_table(
        f"after {steps} steps of {BATCH * dist.get_world_size()} x {CONTEXT} bytes; {size:,} parameters",
        ("", "loss", "held out", "a step", "reduced", "cast"),
        rows,
    )
    print("a step: median time. A step and a process: bytes reduced, host time of casts and switches.")
    print("\nThe same model on PyTorch's own hooks, DDP(model, mixed_precision=...):")
    for how, what in ask_native_hooks().items():
        print(f"  {how}: {what}")
    output.mkdir(parents=True, exist_ok=True)
    curves = {run.name: {"loss": run.losses, "held_out": run.held_out, "seconds": run.seconds} for run in runs}
    (output / "losses.json").write_text(json.dumps(curves))
    picture = output / "losses.png"
    print(f"\nloss curves: {picture if draw(runs, picture) else output / 'losses.json'}; {elapsed:.0f} s of training")


def not_writable(folder: pathlib.Path) -> str:
    """Why nothing can be written to a folder, which is made where there is none; empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"nothing can be written there: {error.strerror}"


def main(arguments: Sequence[str] = ()) -> int:
    parser = Parser("demo", "Trains one small GPT twice, side by side on two CPU processes: in fp32 and in mixed precision.")
    parser.add_argument("--steps", type=int, default=480, help="number of training steps (default: 480)")
    place = pathlib.Path("demo-output")
    parser.add_argument("--output", type=pathlib.Path, default=place, help=f"folder for what it writes (default: {place})")
    parser.add_argument("--native-hooks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if not args.native_hooks and (why := not_writable(args.output)):
        parser.error(f"--output {args.output}: {why}")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.native_hooks:
        try_native_hooks()
        return 0
    if "RANK" not in os.environ:
        # Not started by torchrun: start two processes of this same program.
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "ddp_mp.tools.demo",
        ]
        return subprocess.call(
            [*launcher, "--steps", str(args.steps), "--output", str(args.output)],
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train, held_out = read_text()
    runs = contenders(args.steps)
    begin = time.perf_counter()
    steps = progress(range(args.steps), visible=rank == 0)
    for step in steps:
        batch = batch_of(train, seed=step * ranks + rank)
        for run in runs if step % 2 == 0 else reversed(runs):
            run.step(batch)
        if hasattr(steps, "set_postfix"):
            steps.set_postfix({run.name: f"{smoothed(run.losses[-20:])[-1]:.3f}" for run in runs}, refresh=False)
    elapsed = time.perf_counter() - begin
    for run in runs:
        run.evaluate(held_out, batches=16)
    if rank == 0:
        report(runs, args.steps, elapsed, args.output)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
