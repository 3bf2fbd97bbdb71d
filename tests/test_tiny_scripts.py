"""The scripts with --tiny from end to end, and what they must learn: `pytest -m slow`."""

import json
import os
import subprocess
import sys

import pytest
from conftest import MODELS, ROOT
from harness import arguments, run_tba

from tba import read_lines

pytestmark = pytest.mark.slow
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def run_script(name, *flags):
    """Run a script as a user does; returns its output. With CDPATH, `cd` prints where it went."""
    env = os.environ | {"PYTHON": sys.executable, "CDPATH": str(ROOT.parent)}
    command = ["bash", f"{ROOT.name}/{name}", "--tiny", *map(str, flags)]
    done = subprocess.run(
        command, cwd=ROOT.parent, capture_output=True, text=True, env=env, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def evaluations(out):
    """The first evaluation, and the last one on the same prompts."""
    records = read_lines(out / "eval.jsonl")
    return records[0], records[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_gsm8k_and_a_longer_run_by_the_same_script(engine, tmp_path):
    out = tmp_path / "run"
    stdout, _ = run_script("run_gsm8k.sh", "--engine", engine, "--output_dir", out)
    before, after = evaluations(out)
    assert before["accuracy"] < 0.15 and after["accuracy"] > 0.9 and after["n"] == 200
    assert f"step 80: accuracy {after['accuracy']:.4g}" in stdout and "curves.png" in stdout
    if engine == "vllm":
        return
    # flags before --resume are the script's and do not count, those after it are wishes
    stdout, _ = run_script("run_gsm8k.sh", "--resume", out, "--steps", 84, "--eval_every", 0)
    assert "step 84: accuracy" in stdout
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == list(range(1, 85))
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["steps"], config["eval_every"], config["engine"]) == (84, 0, engine)


def test_tldr(tmp_path):
    run_script("run_tldr.sh", "--engine", "transformers", "--output_dir", tmp_path / "run")
    before, after = evaluations(tmp_path / "run")
    assert after["win_rate"] >= before["win_rate"] + 0.25
    assert abs(before["kl"]) < 1e-3 < after["kl"] < 10
    assert 1 < before["perplexity"] < after["perplexity"] < 1.5


def test_redteam(tmp_path):
    run_script("run_redteam.sh", "--engine", "transformers", "--output_dir", tmp_path / "run")
    before, after = evaluations(tmp_path / "run")
    assert after["attack_success_rate"] >= before["attack_success_rate"] + 0.3
    assert after["cosine_distance"] >= 0.6 * before["cosine_distance"]


def test_math_with_tba_prime(tmp_path):
    """In lockstep, three steps stale: what is learned does not depend on the Searcher's speed."""
    flags = {
        "task": "math", "model": MODELS / "math" / "model",
        "dataset": MODELS / "math" / "data", "objective": "tba_prime", "beta": 0.005,
        "steps": 80, "prompts_per_step": 8, "trained_per_prompt": 16, "searched_per_prompt": 16,
        "lockstep": True, "lag": 3, "reset_reference_every": 30,
        "learning_rate": "2e-4@0,0@end", "max_grad_norm": 1,
        "sequences_in_flight": 128, "eval_every": 20, "eval_samples": 0,
    }  # fmt: skip
    run_tba(arguments(None, tmp_path / "run", **flags), timeout=1800)
    before, after = evaluations(tmp_path / "run")
    assert set(after) == {"step", "n", "accuracy", "distinct"}
    assert after["accuracy"] >= before["accuracy"] + 0.6
