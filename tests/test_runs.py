"""Whole runs as a user starts them: what they leave, lockstep, resuming."""

import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from harness import Run, arguments, check_positions, run_tba, steps_of, weights_of
from test_system import outcome
from transformers import AutoModelForCausalLM, AutoTokenizer

import tba
from tba import read_lines

METRICS = set(
    "step seconds reward reward_std loss log_z kl beta lr grad_norm entropy equal_rewards distinct "
    "forward_backward_seconds optimizer_seconds replay_ratio dropped_groups wait_seconds "
    "effective_sample_size ratio_max version_span response_length eos_fraction staleness_mean "
    "staleness_max sampler_gap sampler_z "
    "buffer_trajectories version trainer_busy "
    "searcher_busy train_tokens_per_second generated_tokens_per_second sync_seconds "
    "sync_wait_seconds logprob_gap searchers_alive gpu_memory_gib".split()
)


def same_weights(one, other):
    one, other = weights_of(one), weights_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def short_folder():
    """An empty folder whose path leaves room for a socket's name, which has at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="tba-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.devices(3)
def test_a_run_leaves_what_is_promised(gsm8k, tmp_path, short_folder, monkeypatch):
    """Two Searchers, a sync after every step; an evaluation may be late, and miss its turn."""
    monkeypatch.setenv("TMPDIR", str(short_folder))
    out = tmp_path / "run"
    flags = {"steps": 12, "sync_every": 1, "eval_every": 4, "eval_samples": 8, "save_every": 4}
    run = Run(out, arguments(gsm8k, out, num_searchers=2, **flags))
    run.want("slow-trainer", "0.3")
    said = run.ends(0)
    assert re.search(r"step 0: accuracy [\d.]+, .*\(8 .*step 12: accuracy [\d.]+, .*\(200 ", said)
    assert "warning" not in said and list(short_folder.iterdir()) == []

    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 13))
    for m in metrics:
        assert set(m) == METRICS and all(math.isfinite(value) for value in m.values())
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-3)  # the policy is the reference
    assert metrics[0]["effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert 0 < metrics[-1]["staleness_mean"] <= metrics[-1]["staleness_max"] < 12
    assert metrics[0]["buffer_trajectories"] > 0
    assert metrics[-1]["version"] >= 4 and metrics[-1]["searchers_alive"] == 2
    evaluations = read_lines(out / "eval.jsonl")
    steps = [e["step"] for e in evaluations]
    assert steps[0] == 0 and steps[-1] == 12 and steps == sorted(set(steps)) and len(steps) > 2
    assert [e["n"] for e in evaluations] == [200 if step == 12 else 8 for step in steps]
    assert all(0 <= e["accuracy"] <= 1 and 1 / 200 <= e["distinct"] <= 1 for e in evaluations)
    config = json.loads((out / "config.json").read_text())
    assert config["resolved"]["steps"] == 12 and "torch" in config["versions"]
    completion = read_lines(out / "completions.jsonl")[0]
    assert set(completion) == {"step", "version", "prompt", "response", "reward"}
    answers = (out / "eval_answers.txt").read_text().split("======== step ")
    assert [text.split("\n")[0] for text in answers[1:7]] == ["0"] * 5 + [str(steps[1])]
    for text in answers[1:6]:
        prompt, answer = text.removeprefix("0\n").split("\n-------- answer\n")
        assert answer == f"{greedy_answer(gsm8k, prompt)}\n\n"
    assert min(matplotlib.image.imread(out / "curves.png").shape[:2]) > 300
    drawn, written = ((out / name).stat().st_mtime for name in ("curves.png", "eval.jsonl"))
    assert drawn >= written  # with the final evaluation
    assert [path.name for path in tba.checkpoints(out)] == ["checkpoint-12", "checkpoint-8"]
    AutoTokenizer.from_pretrained(out / "final")
    AutoModelForCausalLM.from_pretrained(out / "final")
    assert same_weights(out / "final", out / "checkpoint-12")
    assert not same_weights(out / "final", gsm8k / "model")
    check_positions([index for index, *_ in run.noted("stored")], 2)
    assert all(reward == alone for reward, alone in run.noted("judged"))


def greedy_answer(files, prompt):
    """The untrained model's most likely answer to a prompt."""
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=32)[0]
    answer = ids[inputs["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


PATIENT = "import tba\n\ntba.POLL_SECONDS = 1e6\n"


@pytest.mark.slow
@pytest.mark.devices(3)
def test_lockstep_of_real_processes_repeats_exactly_though_it_was_stopped(gsm8k, tmp_path):
    """Nothing that it waits for is found by polling."""
    (tmp_path / "patient.py").write_text(PATIENT)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    flags = {
        "lockstep": True, "lag": 2, "recent_probability": 0.5, "num_searchers": 2,
        "eval_every": 4, "eval_samples": 8, "plugin": tmp_path / "patient.py",
    }  # fmt: skip
    run = Run(stopped, arguments(gsm8k, stopped, steps=100_000, **flags), hooks=False)
    run.reaches(6)
    os.kill(run.process.pid, signal.SIGTERM)
    run.ends(128 + signal.SIGTERM)
    steps = steps_of(stopped) + 6
    run_tba(["--resume", str(stopped), "--steps", str(steps)])
    run_tba(arguments(gsm8k, whole, steps=steps, **flags), interpreter=True)
    assert outcome(stopped) == outcome(whole)
    rows = read_lines(whole / "metrics.jsonl")
    assert all(row["replay_ratio"] == 2 for row in rows)  # half of each batch is sampled for it
    assert rows[-1]["staleness_max"] > 2  # the other half is replayed


def test_an_evaluation_alone(gsm8k, tmp_path):
    out = tmp_path / "evaluation"
    flags = {"steps": 0, "eval_responses": 4, "eval_samples": 20}
    said, _ = run_tba(arguments(gsm8k, out, **flags))
    records = read_lines(out / "eval.jsonl")
    assert [record["n"] for record in records] == [200]
    assert said.count("accuracy") == 1 and "->" not in said
    assert 0 < records[0]["accuracy"] < 1
    assert not list(out.glob("checkpoint-*")) and not (out / "metrics.jsonl").exists()


@pytest.mark.slow
def test_trackio_gets_steps_and_evaluations_and_resumes_its_run(gsm8k, tmp_path, monkeypatch):
    """On this machine, without an account or a network."""
    pytest.importorskip("trackio", reason="trackio is optional and not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    out = tmp_path / "run"
    flags = {"report_to": "trackio", "steps": 3, "eval_every": 1, "eval_samples": 20}
    for args in (arguments(gsm8k, out, **flags), ["--resume", str(out), "--steps", "4"]):
        run_tba(args)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "tba.db")) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics").fetchall()
    assert len({run for run, *_ in rows}) == 1 and max(step for _, step, _ in rows) == 4
    logged = [{"step": step, **json.loads(values)} for _, step, values in rows]
    for shown, file in (("reward", "metrics"), ("held_out/accuracy", "eval")):
        values = {row["step"]: row[shown] for row in logged if shown in row}
        records = read_lines(out / f"{file}.jsonl")
        assert values == {row["step"]: row[shown.split("/")[-1]] for row in records}


@pytest.mark.vllm
@pytest.mark.devices(3)
def test_a_run_with_vllm(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"engine": "vllm", "steps": 6, "num_searchers": 2, "eval_every": 3, "sync_every": 1}
    run_tba(arguments(gsm8k, out, **flags))
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-3)
    assert np.max([m["logprob_gap"] for m in metrics]) < 1e-3
    assert {e["step"] for e in read_lines(out / "eval.jsonl")} >= {0, 6}
