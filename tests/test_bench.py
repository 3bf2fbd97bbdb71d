"""The measuring programs: pareto.py on evaluations written by hand, step.py's variants."""

import argparse
import itertools
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
    by_hand = {"lengths": np.array([100]), "decode": 0.01, "step": 1.0, "transfer": 0.1,
               "travel": 0.2, "load": 0.05, "B": 2, "K": 4, "S": 4, "slots": 8, "lookahead": 1.0,
               "sync_every": 2, "initial": 16, "steps": 50}  # fmt: skip
    for searchers in (1, 3):
        result = scaling["simulate"](scaling["Setting"](searchers, **by_hand))
        # 24 syncs: each costs the Trainer 0.1 s, and every Searcher 0.05 s
        assert result["syncs"] == 24
        assert result["seconds"] == pytest.approx(50 + 24 * 0.1)
        assert result["trainer_busy"] == pytest.approx(50 / 52.4)
        assert result["searcher_busy"] == pytest.approx(1 - 24 * 0.05 / 52.4)
        # 8 responses of 100 decode steps a second, while it is busy
        expected = searchers * 8 * result["searcher_busy"] * 52.4 / (50 * 2 * 4)
        assert result["searched_per_trained"] == pytest.approx(expected, rel=0.05)
    # weights under way for 5 s hold nobody up: the next sync begins at the step after they are
    # loaded, so that syncs begin in the seconds 2, 8, 14, ... 44
    far = by_hand | {"transfer": 0.0, "travel": 5.0}
    result = scaling["simulate"](scaling["Setting"](4, **far))
    assert (result["seconds"], result["syncs"]) == (50, 8)
    # one that scores each group for 8 s loads between: at most twice in that time, as the next sync
    # may be due before it has groups to score again
    slow = far | {"travel": 0.0, "score": 2.0}
    result = scaling["simulate"](scaling["Setting"](1, **slow))
    assert result["seconds"] == 50 and 0 < result["syncs"] <= 2 * 50 / 8


@pytest.mark.slow
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


def test_the_valence_of_texts():
    claims = runpy.run_path(str(ROOT / "bench" / "claims.py"))
    assert claims["valence"](" the superb door often meets the awful plain red actor.") == (
        pytest.approx((1.0 - 1.0 - 0.2) / 10)
    )
    assert claims["valence"]("") == 0 and claims["valence"]("superb superb") == 1


def test_the_reward_within_a_budget_and_the_choice_of_rates():
    claims = runpy.run_path(str(ROOT / "bench" / "claims.py"))
    assert claims["BUDGETS"]["reward"] == 6

    def record(*path, seed=100, rate=1e-3, lag=0, code=0):
        evaluations = [{"kl": kl, "reward": reward} for kl, reward in path]
        return {
            "seed": seed, "objective": "tb", "learning_rate": rate, "lag": lag, "task": "valence",
            "mode": "lockstep", "exit_code": code, "evaluations": evaluations,
            "after": evaluations[-1],
        }  # fmt: skip

    within = claims["within_budget"]
    assert within(record((0, 0.0), (2, 0.2), (4, 0.3))) == 0.3
    assert within(record((0, 0.0), (4, 0.2), (8, 0.4))) == pytest.approx(0.3)
    assert within(record((0, 0.0), (4, 0.2), (8, 0.9), (5, 0.7))) == pytest.approx(0.7 + 0.2 / 3)
    assert within(record((0, 0.0), (4, 0.3), (400, -1.0))) == 0.3  # not what came later
    collapsed, far = record((0, 0.0), (4, 0.3), (60, 0.8)), record((0, 0.0), (4, 0.3), (49, 0.8))
    assert claims["has_collapsed"](collapsed) and not claims["has_collapsed"](far)
    assert claims["has_collapsed"](record((0, 0.0), code=1))
    assert claims["reward_in_budget"]([collapsed, far]).endswith(" (1 collapsed)")

    swept = [
        record((0, 0.0), (4, 0.2), rate=3e-4), record((0, 0.0), (6, 0.3), rate=1e-3),
        record((0, 0.0), (6, 0.4), (500, 1.0), rate=3e-3),
    ]  # fmt: skip
    others = [record((0, 0.9), seed=1, rate=3e-4), record((0, 0.9), rate=3e-4, lag=10)]
    rate = claims["best_rate"](swept + others)
    assert rate("tb", 0) == 1e-3  # of the sweep's seed and of this lag alone, and not collapsed
    with pytest.raises(claims["NotSwept"], match=r"chosen for \('tb', 10, .*run the sweep first"):
        rate("tb", 10)  # one of three rates is there


def test_the_grid_of_the_papers_claims():
    claims = runpy.run_path(str(ROOT / "bench" / "claims.py"))
    cells = {name: of(lambda *_: 1e-3) for name, of in claims["EXPERIMENTS"].items()}
    for name, own in cells.items():
        names = [cell.name for cell in own]
        assert len(set(names)) == len(names), name  # each has a file of its own
        reported = {cell.seed for cell in own}
        assert reported == ({claims["SWEPT_ON"]} if name == "sweep" else set(claims["SEEDS"]))
    assert claims["SWEPT_ON"] not in claims["SEEDS"] and len(claims["SEEDS"]) >= 3
    assert {cell.lag for cell in cells["staleness"]} == {0, 2, 5, 10, 16, 40}
    # what is reported was swept
    swept = {(c.objective, c.lag, c.task, c.mode) for c in cells["sweep"]}
    asked = set()

    def rate(objective, lag, task="valence", mode="lockstep"):
        asked.add((objective, lag, task, mode))
        return 1e-3

    for name in ("staleness", "replay", "bounded", "speed", "searchers", "redteam", "tldr"):
        claims["EXPERIMENTS"][name](rate)
    assert asked <= swept and len(asked) > 20


@pytest.mark.slow
def test_cells_of_the_papers_claims(tmp_path):
    """A short one of each experiment; run again, none is run again; tables and pictures."""
    out = tmp_path / "claims"
    command = [sys.executable, str(ROOT / "bench" / "claims.py"), "--quick", "all"]
    command += ["--out", str(out), "--plots", str(tmp_path)]
    for ran in (14, 0):  # that of `settings` is one of `staleness`
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("{'step': 6, ") == ran
    out /= "quick"
    cells = [json.loads(path.read_text()) for path in out.glob("*-*.json")]
    assert len(cells) == 14 and all(c["exit_code"] == 0 and c["steps_taken"] == 6 for c in cells)
    assert {cell["task"] for cell in cells} == {"valence", "redteam", "tldr"}
    assert {cell["mode"] for cell in cells} == {"lockstep", "replay", "asynchronous"}
    for cell in cells:
        if cell["task"] == "valence":
            assert abs(cell["before"]["kl"]) < 1e-3 and cell["after"]["kl"] < 5
            least = 1e-3 if cell["learning_rate"] >= 1e-3 else -0.1  # it is estimated
            assert cell["before"]["kl"] != cell["after"]["kl"] > least
        if cell["mode"] == "asynchronous":
            assert cell["slow"] and cell["observed"]["searched"] >= 128
            assert cell["constants"]["step"] > cell["slow"][1]  # it sleeps, and works
        if cell["mode"] == "lockstep" and cell["task"] == "redteam":
            assert cell["staleness"] < 0.05  # on-policy, but for attacks that were made twice
    titles = ["sweep", "staleness", "staleness, diversity", "bounded", "speed", "searchers"]
    for title in [*titles, "redteam", "tldr"]:
        assert f"\n{title}\n\n| " in done.stdout
    for name in ("objectives", "speed", "redteam"):
        assert (tmp_path / "quick" / f"{name}.png").stat().st_size > 10_000
    frontier = json.loads((out / "best_of_n.json").read_text())
    assert [n for n, *_ in frontier] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(a[2] < b[2] for a, b in itertools.pairwise(frontier))
