"""The scripts with --tiny from end to end, and what they must learn: `pytest -m slow`."""

import os
import subprocess
import sys

import pytest
import tiny
from conftest import CACHE, ROOT, arguments, read_lines, run_tba

pytestmark = pytest.mark.slow
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def run_script(name, out, *flags):
    """Run a script as a user does; returns its first and last evaluation."""
    env = {**os.environ, "PYTHON": sys.executable, "TBA_CACHE": str(CACHE)}
    done = subprocess.run(
        ["bash", str(ROOT / name), "--tiny", "--output_dir", str(out), *flags],
        capture_output=True,
        text=True,
        env=env,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "before ->" in done.stdout and "curves.png" in done.stdout
    evaluations = read_lines(out / "eval.jsonl")
    return evaluations[0], evaluations[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_gsm8k(engine, tmp_path):
    before, after = run_script("run_gsm8k.sh", tmp_path / "run", "--engine", engine)
    assert after["accuracy"] >= before["accuracy"] + 0.4


def test_tldr(tmp_path):
    before, after = run_script("run_tldr.sh", tmp_path / "run", "--engine", "transformers")
    assert after["win_rate"] >= before["win_rate"] + 0.15
    assert 1 < after["perplexity"] < 3 and after["kl"] < 10
    picture = tmp_path / "pareto.png"
    command = [sys.executable, str(ROOT / "bench" / "pareto.py"), str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--out", str(picture)], capture_output=True, text=True, check=True
    )
    assert f"{after['win_rate']:.4g}" in done.stdout and picture.read_bytes()[:4] == b"\x89PNG"


def test_redteam(tmp_path):
    before, after = run_script("run_redteam.sh", tmp_path / "run", "--engine", "transformers")
    assert after["attack_success_rate"] >= before["attack_success_rate"] + 0.3
    assert after["cosine_distance"] >= 0.8 * before["cosine_distance"]


def test_math_with_tba_prime(tmp_path):
    tiny.make("math", CACHE / "tiny-math")
    flags = {
        "task": "math", "model": CACHE / "tiny-math" / "model",
        "dataset": CACHE / "tiny-math" / "data", "objective": "tba_prime", "beta": 0.005,
        "steps": 80, "prompts_per_step": 8, "trained_per_prompt": 16, "searched_per_prompt": 16,
        "initial_trajectories": 256, "recent_probability": 1, "sync_every": 3,
        "reset_reference_every": 30, "learning_rate": 2e-4, "lr_schedule": "linear",
        "max_grad_norm": 1, "sequences_in_flight": 128, "eval_every": 20, "eval_samples": 0,
    }  # fmt: skip
    run_tba(arguments(None, tmp_path / "run", **flags), timeout=400)
    evaluations = read_lines(tmp_path / "run" / "eval.jsonl")
    assert set(evaluations[0]) == {"step", "version", "split", "n", "accuracy", "unparsed"}
    assert evaluations[-1]["accuracy"] >= evaluations[0]["accuracy"] + 0.4
