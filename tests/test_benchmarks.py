"""Every benchmark runs in its quick form and leaves well-formed results.  Nothing here asserts a time."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
#: Result files of each benchmark, and a column that each must have filled with a spread.
RESULTS = {
    "hooks": {"hooks": "sum us/param"},
    "step": {"step": "step ms"},
    "cast": {"cast": "ddp_mp", "cast-model": "ddp_mp"},
    "memory": {"memory": None},
    "scaling": {"scaling-plan": "plan us", "scaling-model": "step ms"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_benchmark_quick_run_writes_results(name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(tmp_path), "--tag", "quick"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
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


def test_models_every_list_gives_the_parameters_it_promises():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import models
    finally:
        sys.path.remove(str(ROOT))
    assert len(models.names()) >= 10
    for name in models.names():
        model = models.build(name, tied=True)
        assert len(list(model.parameters())) == models.load(name)["parameters"], name
        loss = model(next(model.parameters()).new_zeros(())).sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters()), name


@pytest.mark.slow
def test_demo_few_steps_trains_both_and_draws(tmp_path):
    command = [sys.executable, "-m", "ddp_mp.demo", "--steps", "6", "--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    runs = json.loads((tmp_path / "losses.json").read_text())
    full, mixed = runs.values()
    assert len(full["loss"]) == len(mixed["loss"]) == 6
    assert full["loss"][-1] < full["loss"][0]
    assert abs(full["loss"][-1] - mixed["loss"][-1]) < 0.05
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert "events" in result.stdout
