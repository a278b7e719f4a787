"""Counters, and what the package says about itself."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from kit.modules import column, mlp, scalar, vectors
from kit.oracle import BF16, F32, Trial, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

ROOT = pathlib.Path(__file__).parents[2]


@on_ranks(2)
def test_stats_of_a_new_model_are_zero_but_for_its_plan(rank: Rank) -> None:
    counters = ddp_mp.stats(Trial(rank, mlp()).ddp)
    assert counters.backend == "host"
    assert (counters.parameters, counters.buckets) == (4, 1)
    zeros = ("forwards", "casts", "skipped", "launches", "fallbacks", "bytes_read", "bytes_written", "low_bytes")
    assert [getattr(counters, name) for name in zeros] == [0] * len(zeros)
    assert (counters.reductions, counters.bytes_reduced, counters.rebuilds, counters.waits) == (0, 0, 0, 0)


@on_ranks(2)
def test_stats_count_a_step_exactly(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    numel = sum(p.numel() for p in trial.module.parameters())
    for step in range(1, 4):
        square_step(trial.ddp, torch.randn(4, 8))
        counters = ddp_mp.stats(trial.ddp)
        assert counters.forwards == counters.casts == counters.launches == counters.reductions == step
        assert counters.bytes_read == 4 * numel * step
        assert counters.bytes_written == 2 * numel * step
        assert counters.bytes_reduced == 4 * numel * step
        assert (counters.skipped, counters.low_bytes, counters.fallbacks) == (0, 0, 0)
        assert counters.host_us > 0
        trial.zero_grad()


@on_ranks(2)
def test_stats_tell_evaluation_reuse_and_local_steps_apart(rank: Rank) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(BF16, BF16))
    with torch.no_grad():
        trial.ddp(torch.randn(4, 8))
    counters = ddp_mp.stats(trial.ddp)
    assert (counters.forwards, counters.casts, counters.reductions, counters.low_bytes) == (1, 1, 0, 0)
    with trial.ddp.no_sync():
        square_step(trial.ddp, torch.randn(4, 8))
    assert ddp_mp.stats(trial.ddp).reductions == 0
    first, second = trial.ddp(torch.randn(4, 8)), trial.ddp(torch.randn(4, 8))
    counters = ddp_mp.stats(trial.ddp)
    assert (counters.forwards, counters.casts, counters.skipped) == (4, 4, 0)
    assert counters.low_bytes > 0
    (first.sum() + second.sum()).backward()
    counters = ddp_mp.stats(trial.ddp)
    assert counters.bytes_reduced == 2 * sum(p.numel() for p in trial.module.parameters())
    assert counters.low_bytes == 0


@on_ranks(2)
def test_stats_tell_a_direct_call_from_one_of_the_wrapper(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    trial.module(column(1).bfloat16()).sum().backward()
    direct = ddp_mp.stats(trial.ddp)
    assert (direct.forwards, direct.casts, direct.reductions) == (1, 1, 0)
    trial.ddp(column(1)).sum().backward()
    wrapped = ddp_mp.stats(trial.ddp)
    assert (wrapped.forwards, wrapped.casts, wrapped.reductions) == (2, 2, 1)


@on_ranks(2)
def test_stats_count_parameters_cast_by_pytorch(rank: Rank) -> None:
    model = mlp()
    model[0].weight.data = torch.randn(16, 16)[::2, ::2]
    trial = Trial(rank, model).train(vectors(), steps=3)
    counters = ddp_mp.stats(trial.ddp)
    assert (counters.fallbacks, counters.parameters) == (3, 4)


@on_ranks(2)
def test_stats_of_an_all_ignored_model_warn_once_and_count_no_cast(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=BF16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    model[0].bfloat16()
    with pytest.warns(UserWarning, match="without any cast to torch.bfloat16"):
        square_step(ddp, torch.randn(4, 8))
    square_step(ddp, torch.randn(4, 8))  # no second warning, which would be an error here
    assert ddp_mp.stats(ddp).casts == 0


@on_ranks(2)
def test_stats_of_an_unpatched_model_are_an_error(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"ddp_mp\.patch"):
        ddp_mp.stats(DistributedDataParallel(scalar()))


@on_ranks(2)
def test_stats_begin_again_where_the_plan_is_built_anew(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    before = ddp_mp.stats(trial.ddp)
    trial.module[0].weight = nn.Parameter(trial.module[0].weight.detach().clone())
    square_step(trial.ddp, torch.randn(4, 8))
    after = ddp_mp.stats(trial.ddp)
    assert (before.rebuilds, after.rebuilds) == (0, 1)
    assert after.forwards == before.forwards + 1
    for name in ("casts", "launches", "bytes_read", "bytes_written", "reductions", "bytes_reduced"):
        assert getattr(after, name) * before.forwards == getattr(before, name), name


@on_ranks(2)
def test_stats_print_as_one_line_a_counter(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    counters = ddp_mp.stats(trial.ddp)
    lines = str(counters).splitlines()
    assert [line.split()[0] for line in lines] == [field.name for field in dataclasses.fields(counters)]
    assert len({len(line) for line in lines}) == 1, "values are aligned"
    shown = dict(line.split() for line in lines)
    assert shown["casts"] == "3"
    assert shown["backend"] == "host"
    assert shown["bytes_read"] == f"{counters.bytes_read:,}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        counters.casts = 0  # type: ignore[misc]


def ranges(trace: torch.profiler.profile) -> list[str]:
    """Our ranges in a trace, in the order in which they began."""
    ours = [event for event in trace.events() if event.name.startswith("ddp_mp::")]
    return [event.name.removeprefix("ddp_mp::") for event in sorted(ours, key=lambda event: event.time_range.start)]


@on_ranks(2)
def test_trace_of_a_step_names_casts_waits_and_reductions(rank: Rank) -> None:
    trial = Trial(rank, mlp(), bucket_cap_mb=1e-4)
    buckets = 2
    trial.train(vectors(), steps=1)  # the first round is reduced when it ends
    for profiled in (True, False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if profiled else nullcontext() as trace:
            square_step(trial.ddp, torch.randn(4, 8))
        if profiled:
            assert ranges(trace) == ["cast", "wait", "restore", *["reduce"] * buckets, "restore", "finish"], ranges(trace)
        trial.zero_grad()
    with torch.profiler.profile() as trace, torch.no_grad():
        trial.ddp(torch.randn(4, 8))
    assert ranges(trace) == ["cast", "wait", "restore"]
    trial.train(vectors())


@on_ranks(2)
def test_trace_shows_the_waits_of_modules_while_a_profiler_runs(rank: Rank) -> None:
    trial = Trial(rank, mlp(8, 3), options={"wait": "module", "first_bucket_mb": 1e-5, "bucket_mb": 1e-5})
    square_step(trial.ddp, torch.randn(4, 8))
    plain = [dict(m._forward_pre_hooks) for m in trial.module.modules()]
    with torch.profiler.profile() as trace:
        square_step(trial.ddp, torch.randn(4, 8))
    assert ranges(trace)[:4] == ["cast", *["wait"] * 3]
    assert [dict(m._forward_pre_hooks) for m in trial.module.modules()] != plain
    square_step(trial.ddp, torch.randn(4, 8))
    assert [dict(m._forward_pre_hooks) for m in trial.module.modules()] == plain, "no range, no cost"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_mp", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_info_command_prints_what_build_info_returns() -> None:
    result = run("info")
    assert result.returncode == 0, result.stderr
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines()}
    info = ddp_mp.build_info()
    assert {name.split(".")[0] for name in shown} == {*info, "gpus"}
    assert shown["cuda_image.note"] == info["cuda_image"]["note"]
    assert shown["simd_available"] == ", ".join(info["simd_available"])
    assert shown["debug"] == ("yes" if info["debug"] else "no")
    assert not any(sign in result.stdout for sign in "[{}]'"), "for people, not for Python"
    assert shown["version"] == ddp_mp.__version__ == info["version"]
    assert shown["torch"] == torch.__version__


def test_info_command_as_json_is_what_build_info_returns() -> None:
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown.pop("gpus")
    assert shown == json.loads(json.dumps(ddp_mp.build_info(), default=str))


def test_info_says_why_there_is_no_cuda_or_what_it_found() -> None:
    info = ddp_mp.build_info()
    text = " ".join(f"{key} {value}" for key, value in info.items() if "cuda" in key.lower())
    assert text, info


def test_command_without_arguments_says_what_there_is() -> None:
    result = run()
    assert result.returncode == 2
    assert all(word in result.stderr for word in ("info", "check", "bench", "demo"))


def test_public_names_are_documented() -> None:
    for name in ddp_mp.__all__:
        value = getattr(ddp_mp, name)
        assert name == "__version__" or value.__doc__, name
    for cls in (ddp_mp.Options, ddp_mp.Stats):
        for field in dataclasses.fields(cls):
            assert f"{field.name}:" in (cls.__doc__ or ""), f"{cls.__name__}.{field.name}"
