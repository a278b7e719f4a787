"""Every benchmark runs in its quick form and leaves well-formed results.  Nothing here asserts a time."""

import json
import pathlib
import subprocess
import sys

import pytest

from ddp_mp.tools import shapes

ROOT = pathlib.Path(__file__).parents[2]
#: Result files of each benchmark, and a column that each must have filled with a spread.
RESULTS = {
    "hooks": {"hooks": "sum us/param"},
    "parts": {"parts": None},
    "step": {"step": "step ms"},
    "forward": {"forward": "module ms"},
    "cast": {"cast": "ddp_mp", "cast-model": "ddp_mp"},
    "memory": {"memory": None},
    "scaling": {"scaling-plan": "plan us", "scaling-model": "step ms"},
    "launches": {"launches": None},
}


def run(*module_and_arguments):
    """What a program of this project prints; it must end well."""
    command = [sys.executable, "-m", *map(str, module_and_arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", RESULTS)
def test_benchmark_quick_run_writes_results(name, tmp_path):
    run(f"benchmarks.{name}", "--quick", "--output", tmp_path, "--tag", "quick")
    for file, column in RESULTS[name].items():
        content = json.loads((tmp_path / f"{file}-quick.json").read_text())
        assert content["rows"], file
        assert {"processor", "torch", "ddp_mp", "device"} <= set(content["machine"])
        for row in content["rows"]:
            if column is not None:
                spread = row[column]
                assert 0 < spread["p10"] <= spread["median"] <= spread["p90"], row
        text = (tmp_path / f"{file}-quick.txt").read_text()
        assert content["title"] in text
        assert content["machine"]["processor"] in text


@pytest.mark.long
def test_parts_twin_and_ours_cover_every_call(tmp_path):
    run("benchmarks.parts", "--quick", "--rounds", 1, "--output", tmp_path)
    rows = {row["part"]: row for row in json.loads((tmp_path / "parts.json").read_text())["rows"]}
    # what the model does in every step takes time, and the sum is that of its rows
    timed = [row for part, row in rows.items() if part not in ("root hook", "all bookkeeping", "all-reduce, in no sum")]
    for call in (
        "root hook: check and cast",
        "root hook: match and place",
        "bucket complete: pack",
        "after the forward: look",
        "backward ends: give gradients",
    ):
        (row,) = (row for part, row in rows.items() if part.startswith(call))
        assert row["us a step"]["median"] > 0, call
    assert sum(row["us a step"]["median"] for row in timed) == pytest.approx(rows["all bookkeeping"]["us a step"]["median"])
    for row in timed:
        assert (row["floor ns"] is None) == (row["hot ns"] is None)
    floors = [row["floor ns"]["median"] for row in timed if row["floor ns"]]
    assert len(floors) == 5
    assert sum(floors) == pytest.approx(rows["all bookkeeping"]["floor ns"]["median"])


def test_models_every_list_gives_the_parameters_it_promises():
    assert len(shapes.names()) >= 10
    for name in shapes.names():
        model = shapes.build(name, tied=True)
        assert len(list(model.parameters())) == shapes.load(name)["parameters"], name
        loss = model(next(model.parameters()).new_zeros(())).sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters()), name


@pytest.mark.long
def test_demo_few_steps_trains_both_and_draws(tmp_path):
    printed = run("ddp_mp", "demo", "--steps", 6, "--output", tmp_path)
    runs = json.loads((tmp_path / "losses.json").read_text())
    full, mixed = runs.values()
    assert len(full["loss"]) == len(mixed["loss"]) == 6
    assert full["loss"][-1] < full["loss"][0]
    assert abs(full["loss"][-1] - mixed["loss"][-1]) < 0.05
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert "events" in printed


@pytest.mark.long
def test_forward_parts_are_those_of_the_variant_and_make_the_whole(tmp_path):
    run("benchmarks.forward", "--quick", "--rounds", 1, "--output", tmp_path)
    rows = {row["variant"]: row for row in json.loads((tmp_path / "forward.json").read_text())["rows"]}
    parts = ("module", "casts, leaves", "hooks", "wrapper")
    present = {name: [part for part in parts[1:3] if row[f"{part} ms"]["median"] > 0] for name, row in rows.items()}
    assert present == {"bf16": [], "alone": [], "floor": ["casts, leaves"], "ddp_mp": ["casts, leaves", "hooks"]}
    for row in rows.values():
        assert sum(row[f"{part} ms"]["median"] for part in parts) == pytest.approx(row["forward ms"]["median"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["hooks", "parts", "cast"])
def test_benchmark_of_a_model_that_is_not_there_says_which_are(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--models", "gpt2,bert"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2
    assert "argument --models: no such model: bert; there are bert_base," in result.stderr
