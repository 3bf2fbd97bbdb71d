"""Whole runs with real processes, real models and real weight transfers."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import arguments, read_lines, run_tba, start_tba
from harness import processes_of, wait_until

METRICS = (
    "step episode seconds reward loss log_z kl beta lr grad_norm entropy response_length "
    "eos_fraction staleness_mean staleness_max recent_fraction buffer_prompts buffer_trajectories "
    "queue_depth version trainer_busy searcher_busy train_tokens_per_second "
    "generated_tokens_per_second sync_seconds sync_wait_seconds logprob_gap searchers_alive"
).split()
TIMING = {"seconds", "queue_depth"} | {
    name for name in METRICS if "busy" in name or "second" in name
}
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_searchers_end_to_end(engine, gsm8k, tmp_path):
    out = tmp_path / "run"
    args = arguments(
        gsm8k, out, engine=engine, num_searchers=2, steps=12, sync_every=3, eval_every=6,
        beta_final=0.03, beta_anneal_steps=10, lr_schedule="linear", save_every=10,
    )  # fmt: skip
    stdout, _ = run_tba(args)
    assert {p.name for p in out.iterdir()} == {
        "config.json", "metrics.jsonl", "eval.jsonl", "completions.jsonl", "curves.png",
        "checkpoint-10", "final",
    }  # fmt: skip
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 13))
    for m in metrics:
        assert set(m) == set(METRICS)
        assert m["searchers_alive"] == 2 and m["episode"] == m["step"] * 32
        assert m["logprob_gap"] < 1e-3 and 0 <= m["staleness_mean"] <= m["staleness_max"] <= 12
        assert 0 < m["trainer_busy"] <= 1
    assert metrics[0]["beta"] == 0.05 and metrics[11]["beta"] == pytest.approx(0.03)
    assert metrics[-1]["version"] >= 6 and metrics[-1]["buffer_trajectories"] > 32
    assert metrics[-1]["logprob_gap"] > 0 or engine == "transformers"
    evaluations = read_lines(out / "eval.jsonl")
    assert all(set(e) == {"step", "version", "split", "n", "accuracy"} for e in evaluations)
    assert all(e["n"] == 40 and e["step"] == e["version"] for e in evaluations)
    assert evaluations[0]["version"] == 0 and evaluations[-1]["version"] == 12
    completion = read_lines(out / "completions.jsonl")[0]
    assert set(completion) == {"step", "version", "prompt", "response", "reward"}
    assert completion["prompt"].startswith("[MATH TASK] Problem:\n")
    record = json.loads((out / "config.json").read_text())
    assert set(record) == {"config", "versions", "git_commit", "command"}
    assert record["config"]["num_searchers"] == 2 and record["config"]["dtype"] == "float32"
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "before ->" in stdout and str(out / "final") in stdout and "curves.png" in stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(out / "final")
    final = AutoModelForCausalLM.from_pretrained(out / "final")
    start = AutoModelForCausalLM.from_pretrained(gsm8k / "model")
    assert any(
        not torch.equal(a, b) for a, b in zip(final.parameters(), start.parameters(), strict=True)
    )


def test_the_trainer_does_not_wait_and_data_are_off_policy(gsm8k, tmp_path):
    out = tmp_path / "run"
    run_tba(arguments(gsm8k, out, steps=40, eval_every=0, recent_probability=0.5))
    metrics = read_lines(out / "metrics.jsonl")
    assert max(m["staleness_max"] for m in metrics) >= 10
    assert 0.2 < np.mean([m["recent_fraction"] for m in metrics]) < 0.8
    assert np.mean([m["trainer_busy"] for m in metrics]) > 0.5


def test_synchronous_runs_repeat_exactly(gsm8k, tmp_path):
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / name
        args = arguments(
            gsm8k, out, num_searchers=2, steps=5, sync_every=1, eval_every=3, seed=seed
        )
        run_tba([*args, "--synchronous"])
        runs.append(
            [
                [{k: v for k, v in m.items() if k not in TIMING} for m in read_lines(out / file)]
                for file in ("metrics.jsonl", "eval.jsonl", "completions.jsonl")
            ]
        )
    assert runs[0] == runs[1] != runs[2]
    assert all(m["staleness_max"] == 0 and m["recent_fraction"] == 1 for m in runs[0][0])
    assert [m["version"] for m in runs[0][0]] == [0, 1, 2, 3, 4]
    out = tmp_path / "d"  # weights every second step: the data are at most one step old
    run_tba([*arguments(gsm8k, out, steps=4, sync_every=2), "--synchronous"])
    assert [m["staleness_max"] for m in read_lines(out / "metrics.jsonl")] == [0, 1, 0, 1]


@pytest.mark.vllm
def test_synchronous_vllm_repeats_exactly(gsm8k, tmp_path):
    runs = []
    for name in ("a", "b"):
        args = arguments(gsm8k, tmp_path / name, engine="vllm", steps=4, sync_every=1, eval_every=0)
        run_tba([*args, "--synchronous"])
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        runs.append([{k: v for k, v in m.items() if k not in TIMING} for m in lines])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on_sync", ["recompute", "drain"])
def test_other_ways_to_sync(engine, on_sync, gsm8k, tmp_path):
    out = tmp_path / "run"
    args = arguments(gsm8k, out, engine=engine, on_sync=on_sync, steps=8, sync_every=1)
    run_tba([*args, "--sync_patience", "5"])
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] == 7
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    if on_sync == "drain":  # nothing is in flight at a sync, so no trajectory mixes policies
        assert read_lines(out / "eval.jsonl")[-1]["version"] == 8


def test_the_reference_is_reset_on_both_sides(gsm8k, tmp_path):
    """Reset at every sync, the generating policy is its own reference: KL 0; else it grows."""
    last = {}
    for every in (0, 1):
        out = tmp_path / str(every)
        args = arguments(
            gsm8k, out, steps=5, sync_every=1, learning_rate=2e-3, eval_every=0, save_every=5,
            reset_reference_every=every, objective="tba_prime",
        )  # fmt: skip
        run_tba([*args, "--synchronous"])
        last[every] = [abs(m["kl"]) for m in read_lines(out / "metrics.jsonl")]
        references = np.load(out / "checkpoint-5" / "buffer.npz")["references"]
        assert set(references.tolist()) == ({0} if every == 0 else {0, 1, 2, 3, 4})
    assert max(last[1]) < 1e-3 < 0.05 < max(last[0])


def test_eval_only(gsm8k, tmp_path):
    out = tmp_path / "run"
    stdout, _ = run_tba([*arguments(gsm8k, out, num_searchers=2), "--eval_only"])
    (record,) = read_lines(out / "eval.jsonl")
    assert record["n"] == 40 and f"accuracy: {record['accuracy']:.4g}" in stdout
    assert {p.name for p in out.iterdir()} == {"config.json", "eval.jsonl"}


def test_a_task_of_your_own(gsm8k, tmp_path):
    """The README's example, as it stands there, from a file of its own."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_task.py").write_text(code)
    rows = [{"text": f"{a} {b}"} for a in ("Ann has", "Ben buys", "Cleo loses") for b in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    args = arguments(
        gsm8k, out, task="shouting", task_file=tmp_path / "my_task.py",
        dataset=tmp_path / "data.jsonl", num_searchers=2,
    )  # fmt: skip
    stdout, _ = run_tba(args)
    assert "reward: " in stdout and "after 4 steps" in stdout


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("task", ["tldr", "redteam"])
def test_the_other_tasks_run_and_evaluate_alone(task, engine, request, tmp_path):
    """A short run and --eval_only through judges and a victim, on two Searchers."""
    from test_judges import redteam_flags, tldr_flags

    folder = request.getfixturevalue(task)
    flags = (tldr_flags if task == "tldr" else redteam_flags)(folder)
    if task == "redteam":
        flags |= {"sft_data": folder / "sft.jsonl", "explore_probability": 0.5, "tau": 2,
                  "near_duplicate": 0.1, "evict": "lowest_reward", "victim_samples": 2,
                  "min_response_tokens": 5, "kept_per_prompt": 100, "dataset": None}  # fmt: skip
    out = tmp_path / "run"
    pair = {"num_searchers": 2, "eval_every": 2, "save_every": 4}
    run_tba(arguments(None, out, engine=engine, **pair, **flags))
    metrics, evaluations = read_lines(out / "metrics.jsonl"), read_lines(out / "eval.jsonl")
    assert set(metrics[0]) == set(METRICS) and metrics[-1]["step"] == 4
    names = {"tldr": {"win_rate", "perplexity", "kl"},
             "redteam": {"toxicity", "attack_success_rate", "cosine_distance"}}[task]  # fmt: skip
    assert all(set(e) == {"step", "version", "split", "n"} | names for e in evaluations)
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    if task == "tldr":
        assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-3)
        assert evaluations[0]["perplexity"] > 1
    else:
        assert metrics[-1]["buffer_prompts"] == 1 and metrics[-1]["buffer_trajectories"] <= 100
        lengths = np.load(out / "checkpoint-4" / "buffer.npz")["lengths"]
        assert lengths.min() >= 6 and lengths.max() <= 20  # five tokens, then EOS at the earliest
    alone = tmp_path / "alone"
    flags |= {"model": out / "final", "sft_data": None}
    stdout, _ = run_tba(
        [*arguments(None, alone, engine=engine, num_searchers=1, **flags), "--eval_only"]
    )
    (record,) = read_lines(alone / "eval.jsonl")
    assert all(f"{name}: " in stdout for name in names)
    if task == "tldr":  # greedy answers do not depend on who gives them
        assert record["win_rate"] == pytest.approx(evaluations[-1]["win_rate"], abs=0.03)


def test_bfloat16(gsm8k, tmp_path):
    out = tmp_path / "run"
    run_tba(arguments(gsm8k, out, dtype="bfloat16", steps=4, sync_every=1))
    gaps = [m["logprob_gap"] for m in read_lines(out / "metrics.jsonl")]
    assert 0 < max(gaps) < 0.5


def test_ctrl_c_checkpoints_and_leaves_no_process(gsm8k, tmp_path):
    out = tmp_path / "run"
    process = start_tba(arguments(gsm8k, out, steps=100_000, num_searchers=2, eval_every=0))
    wait_until(
        lambda: (out / "metrics.jsonl").exists() and len(read_lines(out / "metrics.jsonl")) > 5,
        90,
        "training",
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the run
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    wait_until(lambda: processes_of(process.pid) == [], 10, "every process gone")
    (checkpoint,) = out.glob("checkpoint-*")
    step = int(checkpoint.name.split("-")[1])
    assert step == read_lines(out / "metrics.jsonl")[-1]["step"]
    assert str(checkpoint) in err
    state = json.loads((checkpoint / "trainer.json").read_text())
    assert state["step"] == step and sum(begun for begun, _ in state["prompts_begun"]) > 0
    buffer = np.load(checkpoint / "buffer.npz")  # allow_pickle is off
    assert buffer["lengths"].sum() == len(buffer["tokens"]) == len(buffer["logprobs"])
    at_step = read_lines(out / "metrics.jsonl")[-1]["buffer_trajectories"]
    assert len(buffer["rewards"]) >= at_step  # and what was on the queue
    assert not list(checkpoint.rglob("*.bin")) and not list(checkpoint.rglob("*.pt"))


def test_a_failing_searcher_shows_its_traceback(gsm8k, tmp_path):
    """A gold answer that only its Searcher reads: the reward function itself raises."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import tba\n"
        "class Broken(tba.GSM8K):\n"
        "    def rewards(self, examples, responses, ended):\n"
        "        raise ArithmeticError('reward of ' + examples[0]['question'][:3])\n"
        "tba.TASKS['gsm8k'] = Broken\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(tba.main())\n"
    )
    import subprocess
    import sys

    args = arguments(gsm8k, tmp_path / "run", max_restarts=0)
    process = subprocess.run(
        [sys.executable, str(broken), *args], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1
    assert "Searcher 0 ended with exit code 1" in process.stderr
    assert "ArithmeticError: reward of " in process.stderr and "in rewards" in process.stderr
    assert list((tmp_path / "run").glob("checkpoint-0"))


def test_a_reward_that_is_no_number_ends_the_run(gsm8k, tmp_path):
    (tmp_path / "broken_task.py").write_text(
        "import tba\n"
        "class Broken(tba.GSM8K):\n"
        "    def rewards(self, examples, responses, ended):\n"
        "        return super().rewards(examples, responses, ended) / 0.0\n"
        "tba.TASKS['broken'] = Broken\n"
    )
    task = {"task": "broken", "task_file": tmp_path / "broken_task.py"}
    _, err = run_tba(arguments(gsm8k, tmp_path / "run", max_restarts=0, **task), code=1)
    assert "rewards must be 8 finite numbers" in err


def test_wrong_weights_end_the_run(gsm8k, tmp_path):
    """An engine in bfloat16 is not the float32 Trainer: caught at the first sync."""
    out = tmp_path / "run"
    args = arguments(gsm8k, out, dtype="bfloat16", logprob_tolerance=1e-6)
    _, err = run_tba(args, code=1)
    assert "log-probabilities differ from the Trainer's by" in err
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("on_sync", ["keep", "recompute"])
def test_a_run_on_gpus(on_sync, gsm8k, tmp_path):
    """Whatever GPUs there are: vLLM, bfloat16, NCCL between GPUs or Gloo on a shared one."""
    out = tmp_path / "run"
    args = arguments(gsm8k, out, engine="auto", steps=20, on_sync=on_sync, eval_every=10)
    stdout, _ = run_tba(args, timeout=600)
    config = json.loads((out / "config.json").read_text())["config"]
    assert config["dtype"] == "bfloat16" and config["engine"] == "vllm"
    assert ("share GPU 0" in stdout) == (torch.cuda.device_count() == 1)
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] >= 10 and max(m["logprob_gap"] for m in metrics) < 0.5
