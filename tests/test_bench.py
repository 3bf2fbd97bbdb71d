"""The measuring programs: pareto.py on evaluations written by hand, step.py's variants."""

import argparse
import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

import tba


def make_run(folder, *points, split="held_out", **metrics):
    """A run's folder whose eval.jsonl has an evaluation (perplexity, win rate) per point."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "eval.jsonl", "a") as file:
        for step, (perplexity, win_rate) in enumerate(points):
            record = {"step": step, "version": step, "split": split, "n": 40}
            record |= metrics or {"win_rate": win_rate, "perplexity": perplexity, "kl": 0.5}
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def pareto(monkeypatch, capsys):
    """Function: run bench/pareto.py with these arguments; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pareto.py", *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "bench" / "pareto.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_folders_of_equal_names_are_told_apart_by_their_paths(pareto, tmp_path):
    runs = [make_run(tmp_path / name, (1.1, 0.5), (1.2, 0.75)) for name in ("a/x/r", "b/x/r", "r2")]
    code, out, err = pareto(*runs, "--out", tmp_path / "pareto.svg")
    assert (code, err) == (0, "")
    numbers = "step 1, 40 held-out prompts: win_rate 0.75, perplexity 1.2, kl 0.5"
    assert out.splitlines()[:-1] == [f"{label}: {numbers}" for label in ("a/x/r", "b/x/r", "r2")]
    picture = (tmp_path / "pareto.svg").read_text()
    for drawn in ("a/x/r", "b/x/r", "r2", "perplexity", "win rate"):
        assert f"<!-- {drawn} -->" in picture


def test_an_evaluation_on_the_whole_held_out_set_is_printed_but_not_drawn(pareto, tmp_path):
    pictures = []
    for extra in ([], [("held_out_whole", 1.3, 0.25)], [("held_out", 1.3, 0.25)]):
        run = make_run(tmp_path / str(len(pictures)) / "run", (1.1, 0.5), (1.2, 0.75))
        for split, *point in extra:
            make_run(run, point, split=split)
        code, out, err = pareto(run, "--out", tmp_path / "pareto.png")
        assert (code, err) == (0, "")
        assert ("win_rate 0.25, perplexity 1.3" in out) == bool(extra)
        pictures.append((tmp_path / "pareto.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_a_line_that_is_being_written_and_a_metric_of_0_do_not_matter(pareto, tmp_path):
    run = make_run(tmp_path / "run", (1.1, 0.0))
    with open(run / "eval.jsonl", "a") as file:
        file.write('{"step": 5, "vers')
    code, out, err = pareto(run, "--out", tmp_path / "pareto.png")
    assert (code, err) == (0, "") and "win_rate 0, perplexity 1.1" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing: no such folder"),
        ("no-evaluations", "no-evaluations: has no eval.jsonl; name the folder of a run"),
        ("empty", "empty: its eval.jsonl has no evaluation yet"),
        ("broken", "broken: its eval.jsonl cannot be read"),
        ("gsm8k", "gsm8k: its evaluations have no perplexity, win_rate (they have accuracy)"),
        ("null", "null: perplexity or win_rate of its last evaluation is not a number"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(name, message, pareto, tmp_path):
    good = make_run(tmp_path / "good", (1.1, 0.5))
    for folder in ("no-evaluations", "empty", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty" / "eval.jsonl").touch()
    (tmp_path / "broken" / "eval.jsonl").write_text("not JSON\n")
    make_run(tmp_path / "gsm8k", (1, 1), accuracy=0.5)
    make_run(tmp_path / "null", (None, None))
    code, out, err = pareto(good, tmp_path / name, "--out", tmp_path / "pareto.png")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("pareto.py: error: ") and message in err
    assert not (tmp_path / "pareto.png").exists()


def test_axes_that_are_not_known_must_be_named(pareto, tmp_path):
    run = make_run(tmp_path / "run", (1, 1), accuracy=0.5, length=7)
    code, _, err = pareto(run, "--out", tmp_path / "pareto.svg")
    assert code == 2 and "choose the axes by --x and --y" in err and "accuracy, length" in err
    code, _, err = pareto(run, "--x", "length", "--y", "accuracy", "--out", tmp_path / "pareto.svg")
    assert (code, err) == (0, "")
    assert "<!-- length -->" in (tmp_path / "pareto.svg").read_text()
    code, _, err = pareto(run, "--x", "length", "--y", "accuracy", "--out", tmp_path / "pareto.xyz")
    assert code == 2 and err.count("\n") == 1 and "--out" in err and "xyz" in err


def test_every_variant_of_a_step_has_the_same_gradient():
    step = runpy.run_path(str(ROOT / "bench" / "step.py"))
    args = argparse.Namespace(width=64, layers=1, prompts=2, responses=4)
    steps, gradients = step["Steps"](args, (12, 9, 30, 40)), {}
    for name in ("packed", "repeated", "common", "maximum"):
        getattr(steps, name)()
        gradients[name] = [p.grad.clone() for p in steps.model.parameters()]
        steps.optimizer.zero_grad()
    for name in ("repeated", "common", "maximum"):
        for one, other in zip(gradients["packed"], gradients[name], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4 * one.abs().max().item(), rtol=1e-3)
    assert all(steps.take(name) > 0 for name in step["VARIANTS"])


def test_the_scaling_model_of_what_can_be_reckoned_by_hand():
    scaling = runpy.run_path(str(ROOT / "bench" / "scaling.py"))
    by_hand = {"lengths": np.array([100]), "decode": 0.01, "step": 1.0, "transfer": 0.1, "B": 2,
               "K": 4, "S": 4, "slots": 8, "lookahead": 1.0, "sync_every": 2, "initial": 16,
               "steps": 50}  # fmt: skip
    for searchers in (1, 3):
        result = scaling["simulate"](scaling["Setting"](searchers, **by_hand))
        # 24 syncs, each a transfer of 0.1 s after less than a decode step
        assert 52.4 <= result["seconds"] <= 52.4 + 24 * 0.011
        assert result["trainer_busy"] == pytest.approx(50 / result["seconds"])
        assert result["searcher_busy"] == pytest.approx(1 - 2.4 / 52.4, abs=0.01)
        # 8 responses of 100 decode steps a second, while it is busy
        expected = searchers * 8 * result["searcher_busy"] * result["seconds"] / (50 * 2 * 4)
        assert result["searched_per_trained"] == pytest.approx(expected, rel=0.05)
    # scoring that takes longer than the patience leaves paused Searchers idle for whole steps
    slow = by_hand | {"score": 0.5, "transfer": 0.0, "step": 8.0}
    patient, hasty = (
        scaling["simulate"](scaling["Setting"](4, **slow, patience=patience)) for patience in (8, 0)
    )
    assert hasty["searcher_busy"] < patient["searcher_busy"] - 0.1


def test_gpu_check_passes_on_a_cpu_as_far_as_that_can_tell(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--tiny"]
    out = tmp_path / "result.json"
    only = ["--only", "versions", "gap", "llama", "vllm", "--out", str(out)]
    result = subprocess.run([*command, *only], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    outcomes = {name: found["outcome"] for name, found in json.loads(out.read_text()).items()}
    with_vllm = "pass" if tba.vllm_can_run() else "needs vLLM with a device to run on"
    assert outcomes == {"versions": "pass", "gap": "pass", "llama": "pass", "vllm": with_vllm}


@pytest.mark.slow
def test_gpu_check_of_lost_members_and_faults(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--tiny"]
    only = ["--only", "nccl", "sync", "faults", "--out", str(tmp_path / "result.json")]
    result = subprocess.run([*command, *only], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
