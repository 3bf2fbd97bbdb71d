"""Whole runs as a user starts them: what they leave, lockstep, resuming."""

import collections
import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from harness import (
    Run,
    arguments,
    check_positions,
    config_and_task,
    learner_of,
    run_tba,
    steps_of,
    without_searchers,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tba
from tba import read_lines

METRICS = set(
    "step seconds reward reward_std loss log_z kl beta lr grad_norm entropy equal_rewards distinct "
    "forward_backward_seconds optimizer_seconds replay_ratio wait_seconds "
    "effective_sample_size ratio_max version_span response_length eos_fraction staleness_mean "
    "staleness_max sampler_gap sampler_z "
    "buffer_trajectories version trainer_busy "
    "searcher_busy train_tokens_per_second generated_tokens_per_second sync_seconds "
    "sync_wait_seconds logprob_gap searchers_alive gpu_memory_gib".split()
)
MAY_DIFFER = {  # between two lockstep runs that are the same
    "seconds", "trainer_busy", "searcher_busy", "train_tokens_per_second",
    "generated_tokens_per_second", "sync_seconds", "sync_wait_seconds", "wait_seconds",
    "replay_ratio", "distinct",  # over a window that a resumed run begins anew
    "sampler_gap", "sampler_z",
    "forward_backward_seconds", "optimizer_seconds", "gpu_memory_gib",
}  # fmt: skip


def weights_of(folder):
    return load_file(folder / "model.safetensors")


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
    flags = {"steps": 24, "sync_every": 1, "eval_every": 8, "eval_samples": 8, "save_every": 8}
    run = Run(out, arguments(gsm8k, out, num_searchers=2, **flags), interpreter=True)
    run.want("slow-trainer", "0.3")
    said = run.ends(0)
    assert re.search(r"step 0: accuracy [\d.]+, .*\(8 .*step 24: accuracy [\d.]+, .*\(200 ", said)
    assert "warning" not in said and list(short_folder.iterdir()) == []

    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 25))
    for m in metrics:
        assert set(m) == METRICS and all(math.isfinite(value) for value in m.values())
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-3)  # the policy is the reference
    assert metrics[0]["effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert 0 < metrics[-1]["staleness_mean"] <= metrics[-1]["staleness_max"] < 24
    assert metrics[0]["buffer_trajectories"] > 0
    assert all(1 / 128 <= record["distinct"] <= 1 for record in metrics)
    assert metrics[-1]["version"] >= 8 and metrics[-1]["searchers_alive"] == 2
    evaluations = read_lines(out / "eval.jsonl")
    steps = [e["step"] for e in evaluations]
    assert steps[0] == 0 and steps[-1] == 24 and steps == sorted(set(steps)) and len(steps) > 2
    assert [e["n"] for e in evaluations] == [200 if step == 24 else 8 for step in steps]
    assert all(0 <= e["accuracy"] <= 1 and 1 / 200 <= e["distinct"] <= 1 for e in evaluations)
    config = json.loads((out / "config.json").read_text())
    assert config["resolved"]["steps"] == 24 and "torch" in config["versions"]
    completion = read_lines(out / "completions.jsonl")[0]
    assert set(completion) == {"step", "version", "prompt", "response", "reward"}
    answers = (out / "eval_answers.txt").read_text().split("======== step ")
    assert [text.split("\n")[0] for text in answers[1:7]] == ["0"] * 5 + [str(steps[1])]
    for text in answers[1:6]:
        prompt, answer = text.removeprefix("0\n").split("\n-------- answer\n")
        assert answer == f"{greedy_answer(gsm8k, prompt)}\n\n"
    assert min(matplotlib.image.imread(out / "curves.png").shape[:2]) > 300
    drawn = (out / "curves.png").stat().st_mtime
    assert drawn >= (out / "eval.jsonl").stat().st_mtime  # with the final evaluation

    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-16",
        "checkpoint-24",
    ]
    AutoTokenizer.from_pretrained(out / "final")
    model = AutoModelForCausalLM.from_pretrained(out / "final")
    assert same_weights(out / "final", out / "checkpoint-24")
    assert not same_weights(out / "final", gsm8k / "model")
    assert sum(p.numel() for p in model.parameters()) > 100_000
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


def lockstep_flags(prompts):
    """A policy that repeats itself, two Searchers."""
    return {
        "lockstep": True, "temperature": 0.3, "eval_every": 0, "eval_samples": 8,
        "num_searchers": 2, "prompts_per_step": prompts,
    }  # fmt: skip


@pytest.fixture
def ten_prompts(gsm8k, tmp_path):
    """A folder of data with ten training prompts."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("train", 10), ("test", 8)):
        lines = (gsm8k / "data" / f"{name}.jsonl").read_text().split("\n")[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.devices(3)
@pytest.mark.parametrize("lag", [0, 3])
def test_lockstep_trains_on_the_very_groups_that_were_searched(gsm8k, ten_prompts, tmp_path, lag):
    """Ten prompts, four epochs: duplicates count, all trajectories are exactly `lag` steps old."""
    out = tmp_path / "run"
    flags = lockstep_flags(5) | {"steps": 8, "lag": lag, "dataset": ten_prompts}
    run = Run(out, arguments(gsm8k, out, learning_rate=3e-4, **flags))
    run.want("slow-searcher", "0.15")  # it finds what to search and the next weights together
    run.ends(0)
    searched = {index: numbers for index, *numbers in sorted(run.noted("searched"))}
    assert all(reward == alone for reward, alone in run.noted("judged"))
    trained = run.noted("trained")
    assert len(trained) == 40 and len(searched) >= 40
    duplicates = 0
    for place, (step, newest, oldest, *numbers) in enumerate(trained):
        assert step == place // 5
        assert numbers == searched[place]  # prompt, rewards and lengths of the group, in order
        assert newest == oldest == max(0, step - lag)
        responses = list(zip(numbers[1:9], numbers[9:], strict=True))
        duplicates += len(responses) - len(set(responses))
    assert duplicates > 40
    for epoch in range(4):
        part = trained[10 * epoch : 10 * epoch + 10]
        assert len({prompt for _, _, _, prompt, *_ in part}) == 10
    staleness = [m["staleness_max"] for m in read_lines(out / "metrics.jsonl")]
    assert staleness == [min(step, lag) for step in range(8)]


@pytest.mark.devices(3)
def test_lockstep_repeats_exactly_whether_it_was_stopped_killed_or_neither(gsm8k, tmp_path):
    def flags(name, **more):
        settings = lockstep_flags(4) | {"steps": 12, "lag": 2, "save_every": 4}
        settings |= {"recent_probability": 0.5, "eval_every": 4, "temperature": 1.0}
        return arguments(gsm8k, tmp_path / name, **settings, **more)

    def outcome(name):
        metrics = read_lines(tmp_path / name / "metrics.jsonl")
        evaluations = read_lines(tmp_path / name / "eval.jsonl")
        logged = [{k: v for k, v in m.items() if k not in MAY_DIFFER} for m in metrics]
        return logged, evaluations

    run_tba(flags("whole"), interpreter=True)
    stopped = Run(tmp_path / "stopped", flags("stopped"))
    stopped.want("pause", "6")
    stopped.reaches(6)
    os.kill(stopped.process.pid, signal.SIGTERM)
    stopped.ends(128 + signal.SIGTERM)
    assert len(read_lines(tmp_path / "stopped" / "metrics.jsonl")) < 12
    (stopped.faults / "pause").unlink()  # the resumed run has the same plug-in
    run_tba(["--resume", str(tmp_path / "stopped")])

    killed = Run(tmp_path / "killed", flags("killed"))
    killed.want("pause", "6")
    killed.until(lambda: (tmp_path / "killed" / "checkpoint-4").exists(), "a checkpoint")
    killed.reaches(6)
    killed.process.kill()
    killed.process.wait()
    killed.gone()
    (killed.faults / "pause").unlink()
    run_tba(["--resume", str(tmp_path / "killed")])
    for name in ("stopped", "killed"):
        assert outcome(name) == outcome("whole")
        assert same_weights(tmp_path / name / "final", tmp_path / "whole" / "final")

    rows = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert all(row["replay_ratio"] == 2 for row in rows)  # half of each batch is sampled for it
    assert rows[-1]["staleness_max"] > 2  # the other half is replayed


COUNTING = '''"""A Trainer with an object whose state is resumed."""
import tba

class Rewards(tba.Stateful):
    SAVED = ("by_step",)

    def __init__(self):
        self.by_step = {}

class Counting(tba.Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.rewards = self.register(Rewards())

    def train_step(self, groups):
        self.rewards.by_step[self.step] = [t.reward for group in groups for t in group]
        super().train_step(groups)

tba.Trainer = Counting
'''


def test_lockstep_that_ended_goes_on_as_if_it_had_been_given_more_steps(
    gsm8k, ten_prompts, tmp_path, monkeypatch
):
    """When it ends, places of the batches to come have not been begun yet.

    An object of a plug-in goes on as well.
    """
    monkeypatch.setattr(tba, "Trainer", tba.Trainer)  # the plug-in changes it
    plugin = tmp_path / "counting.py"
    plugin.write_text(COUNTING)
    flags = {
        "lockstep": True, "lag": 2, "steps": 6, "sequences_in_flight": 8, "eval_every": 0,
        "dataset": ten_prompts, "plugin": plugin,
    }  # fmt: skip
    run_tba(arguments(gsm8k, tmp_path / "whole", **flags))
    run_tba(arguments(gsm8k, tmp_path / "ended", **(flags | {"steps": 3})))
    resumed = ["--resume", str(tmp_path / "ended"), "--steps", "6"]
    with pytest.raises(SystemExit):  # another K would take the saved groups apart
        tba.main([*resumed, "--trained_per_prompt", "4"])
    run_tba(resumed)
    whole, ended = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "ended"))
    assert [m["loss"] for m in whole] == [m["loss"] for m in ended]
    assert [m["staleness_max"] for m in ended] == [0, 1, 2, 2, 2, 2]
    assert same_weights(tmp_path / "whole" / "final", tmp_path / "ended" / "final")
    paths = [tmp_path / name / "checkpoint-6" for name in ("whole", "ended")]
    whole, ended = (tba.open_checkpoint(path)["Rewards"]["by_step"] for path in paths)
    assert whole == ended and list(whole) == list(range(6))


@pytest.mark.parametrize("mode", ["asynchronous", "lockstep"])
def test_a_reference_that_is_reset_scores_what_is_trained_on(gsm8k, tmp_path, mode):
    """The policy becomes the reference: the KL begins anew, and older groups are not used."""
    out = tmp_path / "run"
    flags = {"steps": 9, "reset_reference_every": 4, "learning_rate": 2e-3, "sync_every": 1}
    flags |= {"eval_every": 0, "eval_samples": 8, "recent_probability": 1}
    if mode == "lockstep":
        flags["lockstep"] = True
    run = Run(out, arguments(gsm8k, out, **flags))
    run.want("slow-trainer", "0.3")
    run.ends(0)
    if mode == "lockstep":
        kl = [m["kl"] for m in read_lines(out / "metrics.jsonl")]
        assert kl[3] > 0.1
        assert kl[4] == pytest.approx(0, abs=1e-3) and kl[8] == pytest.approx(0, abs=1e-3)
        return
    stored = run.noted("stored")
    references = [reference for _, _, reference in stored]
    assert references == sorted(references) and set(references) == {0, 4, 8}


def test_nothing_that_an_earlier_reference_scored_is_replayed(gsm8k, tmp_path):
    """With replay: every trajectory of a batch was scored by the reference of its step."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""Logs the oldest reference of each batch."""
import torch, tba
step = tba.Learner.step

def logged(learner, minibatch, now, number):
    metrics = step(learner, minibatch, now, number)
    return metrics | {"oldest": min(t.reference_version for group in minibatch for t in group)}

tba.Learner.step = logged
'''
    )
    out = tmp_path / "run"
    flags = {"steps": 9, "reset_reference_every": 3, "sync_every": 1, "recent_probability": 0.3}
    flags |= {"eval_every": 0, "eval_samples": 8, "plugin": plugin}
    run_tba(arguments(gsm8k, out, **flags))
    oldest = [m["oldest"] for m in read_lines(out / "metrics.jsonl")]
    assert oldest == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_news_ends_every_wait(gsm8k, tmp_path):
    """Nothing that a run waits for is found by polling: it ends even if nobody ever polls."""
    plugin = tmp_path / "mine.py"
    plugin.write_text("import tba\n\ntba.POLL_SECONDS = 1e6\n")
    out = tmp_path / "run"
    flags = {"plugin": plugin, "lockstep": True, "eval_every": 2, "eval_samples": 8}
    run_tba(arguments(gsm8k, out, **flags))
    assert len(read_lines(out / "metrics.jsonl")) == 4


def test_an_evaluation_alone_and_a_run_that_is_given_more_steps(gsm8k, tmp_path):
    out = tmp_path / "evaluation"
    flags = {"steps": 0, "eval_responses": 4, "eval_samples": 20}
    said, _ = run_tba(arguments(gsm8k, out, **flags))
    records = read_lines(out / "eval.jsonl")
    assert [record["n"] for record in records] == [200]
    assert said.count("accuracy") == 1 and "->" not in said
    assert 0 < records[0]["accuracy"] < 1
    assert not list(out.glob("checkpoint-*")) and not (out / "metrics.jsonl").exists()

    out = tmp_path / "run"
    rate = "5e-4@0,1e-3@1,1e-3@3,0~12"
    adapters = {"lora_rank": 4, "learning_rate": rate, "objective": "tba_prime"}
    run_tba(arguments(gsm8k, out, eval_every=0, beta="0.1@0,0.05@5", **adapters))
    base, final = weights_of(gsm8k / "model"), weights_of(out / "final")
    changed = {name for name in base if not torch.equal(base[name], final[name])}
    assert changed and all("_proj" in name for name in changed)
    # of two checkpoints the newer one is damaged: the older one is used, and that is said
    shutil.copytree(out / "checkpoint-4", out / "checkpoint-9")
    state = (out / "checkpoint-9" / "trainer.pt").read_bytes()
    (out / "checkpoint-9" / "trainer.pt").write_bytes(state[: len(state) // 2])
    _, err = run_tba(["--resume", str(out), "--steps", "6"])
    assert "checkpoint-9.broken" in err
    kept = {path.name for path in out.glob("checkpoint-*")}
    assert kept == {"checkpoint-4", "checkpoint-6", "checkpoint-9.broken"}
    assert [e["n"] for e in read_lines(out / "eval.jsonl")] == [40, 200, 200]
    metrics = read_lines(out / "metrics.jsonl")
    np.testing.assert_allclose([m["beta"] for m in metrics], [0.1, 0.09, 0.08, 0.07, 0.06, 0.05])
    rates = [m["lr"] for m in metrics]
    assert len(rates) == 6 and rates[1] == rates[2] == 1e-3 and 0 < rates[5] < rates[4] < 1e-3


def test_tensorboard_gets_steps_and_evaluations_of_a_run_that_was_killed(gsm8k, tmp_path):
    """It shows a run as one, with each step once, though some were taken twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    flags = {"report_to": "tensorboard", "steps": 6, "eval_every": 2, "save_every": 2}
    run = Run(out, arguments(gsm8k, out, **flags))
    run.want("pause", "3")
    run.until(lambda: (out / "checkpoint-2").exists(), "a checkpoint")
    run.reaches(3)
    run.process.kill()
    run.process.wait()
    run.gone()
    (run.faults / "pause").unlink()
    said, _ = run_tba(["--resume", str(out), "--steps", "2"])  # evaluates on all prompts, too
    assert "step 2:" in said and [e["n"] for e in read_lines(out / "eval.jsonl")][-1] == 200
    run_tba(["--resume", str(out), "--steps", "6"])
    files = list(out.rglob("events.*"))
    assert len(files) == 3 and {path.parent.name for path in files} == {"tba"}
    events = EventAccumulator(str(out / "tba"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward_std")] == [1, 2, 3, 4, 5, 6]
    evaluations = read_lines(out / "eval.jsonl")
    tracked = {event.step: event.value for event in events.Scalars("held_out/accuracy")}
    assert tracked == pytest.approx({e["step"]: e["accuracy"] for e in evaluations})
    assert max(tracked) == 6


RECORDER = """
import json
class Run:
    def log(self, values, step=None):
        rows = lambda table: table.rows
        print("wandb", json.dumps(["log", step, values], default=rows), flush=True)
    def define_metric(self, name, step_metric):
        print("wandb", json.dumps(["axis", name, step_metric]), flush=True)
    def finish(self):
        pass
class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]
def init(**options):
    print("wandb", json.dumps(["init", options]), flush=True)
    return Run()
"""


def test_wandb_gets_every_evaluation_at_its_step_and_resumes_its_run(gsm8k, tmp_path, monkeypatch):
    """A recorder takes the place of wandb, which refuses steps that are not later than all."""
    library = tmp_path / "library"
    (library / "wandb-1.0.dist-info").mkdir(parents=True)
    (library / "wandb-1.0.dist-info" / "METADATA").write_text("Name: wandb\nVersion: 1.0\n")
    (library / "wandb.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", str(library), prepend=os.pathsep)
    out = tmp_path / "run"
    flags = {"report_to": "wandb", "steps": 3, "eval_every": 1}
    calls = []
    for args in (arguments(gsm8k, out, **flags), ["--resume", str(out), "--steps", "4"]):
        said, _ = run_tba(args, interpreter=True)
        lines = [line[6:] for line in said.splitlines() if line.startswith("wandb ")]
        calls.append([json.loads(line) for line in lines])
    first, second = (next(call[1] for call in run if call[0] == "init") for run in calls)
    assert first["name"] == "run" and first["id"] == second["id"] and second["resume"] == "allow"
    assert all(["axis", "*", "step"] in call for call in calls)
    logged = [call[1:] for run in calls for call in run if call[0] == "log"]
    assert all(step is None for step, _ in logged)
    assert [values["step"] for _, values in logged if "loss" in values] == [1, 2, 3, 4]
    evaluated = [values for _, values in logged if "held_out/accuracy" in values]
    accuracies = {e["step"]: e["accuracy"] for e in read_lines(out / "eval.jsonl")}
    assert {e["step"]: e["held_out/accuracy"] for e in evaluated} == accuracies
    tables = [row for _, values in logged for row in values.get("completion", [])]
    assert tables == read_lines(out / "completions.jsonl")


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
    assert len({run for run, _, _ in rows}) == 1
    logged = [{"step": step, **json.loads(values)} for _, step, values in rows]
    for name, shown, file in (
        ("reward", "reward", "metrics.jsonl"),
        ("accuracy", "held_out/accuracy", "eval.jsonl"),
    ):
        values = {row["step"]: row[shown] for row in logged if shown in row}
        assert values == {row["step"]: row[name] for row in read_lines(out / file)}
    assert max(values) == 4


def test_a_run_that_learns_nothing_says_so_once(gsm8k, tmp_path):
    """No response ends, no prompt has two rewards, and then the learning rate is 0."""
    out = tmp_path / "run"
    flags = {"max_response_tokens": 1, "learning_rate": "1e-12@0,0@24", "steps": 26}
    flags |= {"eval_every": 0, "eval_samples": 1, "prompts_per_step": 1, "lockstep": True}
    _, err = run_tba(arguments(gsm8k, out, **flags))
    warnings = [line for line in err.splitlines() if "warning" in line]
    for name in ("--max_response_tokens", "--dataset", "--learning_rate"):
        assert sum(name in line for line in warnings) == 1, err
    assert len(warnings) == 3


def test_what_is_logged_as_waiting_is_waiting():
    """Not the work of the condition that is waited for, such as storing groups."""
    log = tba.StepLog(None)
    searchers = SimpleNamespace(wake_up=threading.Event())
    trainer = SimpleNamespace(log=log, searchers=searchers, poll=lambda: None, LOG_EVERY=30)
    answers = iter([False, False, True])

    def condition():
        time.sleep(0.3)
        return next(answers)

    assert tba.Trainer.wait_for(trainer, "generation", condition)
    assert 0 < log.waited["generation"] < 0.6  # of 1.0 s; the first wait ends at once


def test_rates_of_a_searcher_that_is_not_heard_of_fall():
    s = tba.RunningSearcher(None, None, "ready")
    for seconds in range(10):
        s.heartbeats.append(tba.Heartbeat(100.0 + seconds, 0.1 * seconds, 50 * seconds))
    assert s.recent_rates() == pytest.approx((0.9, 50), rel=0.01)
    s.seen = time.monotonic() - 10  # a second of which is usual
    assert s.recent_rates() == pytest.approx((0.45, 25), rel=0.01)


def test_files_are_json_that_strict_parsers_read(tmp_path):
    folder = SimpleNamespace(path=tmp_path)
    record = {"step": 1, "loss": math.nan, "kl": -math.inf, "text": "NaN"}
    tba.RunFolder.append(folder, "metrics.jsonl", record)

    def refuse(name):
        raise ValueError(name)

    found = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert found == {"step": 1, "loss": None, "kl": None, "text": "NaN"}


def test_a_settings_value_that_json_lacks_is_its_default_after_a_resume(tmp_path):
    given = tba.settings(output_dir=str(tmp_path / "run"))
    given.a_plugins_limit = math.inf
    tba.claim_folder(given, given, 0)

    def refuse(name):
        raise ValueError(name)

    text = (tmp_path / "run" / "config.json").read_text()
    assert json.loads(text, parse_constant=refuse)["config"]["a_plugins_limit"] is None
    resumed = tba.parse(["--resume", str(tmp_path / "run")])
    assert resumed.steps == given.steps and not hasattr(resumed, "a_plugins_limit")


@pytest.fixture
def older_model(gsm8k, tmp_path):
    """A bfloat16 model as transformers 4 wrote it, with a processor's file."""
    folder = tmp_path / "older"
    shutil.copytree(gsm8k / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rope_theta": 5000.0, "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
    (folder / "config.json").write_text(json.dumps(config))
    words = json.loads((folder / "tokenizer_config.json").read_text())
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "preprocessor_config.json").write_text("{}")
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(folder).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_final_model_is_read_as_the_initial_one_was(gsm8k, older_model, tmp_path):
    """Other programs and users can read it, too; checkpoints stay float32."""
    learner = learner_of(gsm8k, tmp_path / "run", model=older_model)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    before = os.umask(0o027)
    try:
        for name, final in (("checkpoint", False), ("final", True)):
            with tba.atomic_folder(tmp_path / name) as new:
                tba.save_model(learner.model, tba.saved_weights(learner), learner.task, new, final)
    finally:
        os.umask(before)
    final = tmp_path / "final"
    files = {file.name for file in older_model.iterdir()}
    assert files <= {file.name for file in final.iterdir()}
    for name in files - {"model.safetensors", "generation_config.json"}:
        assert (final / name).read_bytes() == (older_model / name).read_bytes()
    assert {file.stat().st_mode & 0o777 for file in final.iterdir()} == {0o640}
    exact, rounded = weights_of(tmp_path / "checkpoint"), weights_of(final)
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert all(exact[name].dtype == torch.float32 for name in exact)
    for name, dtype in (("checkpoint", torch.float32), ("final", torch.bfloat16)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == dtype and loaded.config.rope_parameters["rope_theta"] == 5000
    assert (tmp_path / "checkpoint" / "preprocessor_config.json").exists()


def test_a_final_model_of_a_changed_configuration_has_its_own(gsm8k, older_model, tmp_path):
    learner = learner_of(gsm8k, tmp_path / "run", model=older_model)
    learner.model.config.max_position_embeddings = 99
    (tmp_path / "final").mkdir()
    weights = tba.saved_weights(learner)
    tba.save_model(learner.model, weights, learner.task, tmp_path / "final", True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.config.max_position_embeddings == 99 and loaded.dtype == torch.bfloat16


def test_a_home_folder_is_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    config = tba.parse(["--output_dir=~/run", "--model", "~/model", "--beta=0.1@0,0.2~9"])
    found = [config.output_dir, config.model, config.beta]
    assert found == [str(tmp_path / "run"), str(tmp_path / "model"), "0.1@0,0.2~9"]


def test_two_runs_never_share_a_folder(gsm8k, tmp_path):
    """Nor does one that resumes a running one; a run that was killed can be resumed."""
    out = tmp_path / "run"
    endless = arguments(gsm8k, out, steps=100_000, eval_every=0, eval_samples=8, save_every=2)
    run = Run(out, endless, hooks=False)
    run.until(lambda: (out / "config.json").exists(), "a folder")
    _, err = run_tba(endless, code=2)
    assert err.splitlines()[-1].startswith("tba.py: error: --output_dir")
    run.until(lambda: list(out.glob("checkpoint-*")), "a checkpoint")
    record = (out / "config.json").read_bytes()
    resume = ["--resume", str(out), "--steps", "100_000"]
    _, err = run_tba(resume, code=2)
    assert err.splitlines()[-1].startswith("tba.py: error: --resume")
    assert (out / "config.json").read_bytes() == record and not list(out.glob("*.broken"))
    run.reaches(steps_of(out) + 1)
    run.process.kill()
    run.process.wait()
    run.gone()
    run_tba(["--resume", str(out), "--steps", str(steps_of(out) + 1)])


# ------------------------------------------------------------------- resuming, without Searchers


def files_of(folder):
    """Every file of a folder, by path, with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change_state(path, change):
    """Change what a checkpoint's trainer.pt holds."""
    saved = torch.load(path / "trainer.pt", weights_only=True)
    change(saved)
    torch.save(saved, path / "trainer.pt")


@pytest.fixture
def resumed(monkeypatch):
    """Function: resume a run, but do not train; returns the Trainer."""
    trainers = []
    monkeypatch.setattr(tba, "run", lambda trainer: trainers.append(trainer) or 0)

    def resume(out, *flags):
        assert tba.main(["--resume", str(out), *flags]) == 0
        return trainers[-1]

    return resume


class Count(tba.Stateful):
    """An object of a plug-in."""

    SAVED = ("n",)

    def __init__(self, n=0):
        self.n = n


class Counting(tba.Trainer):
    """A plug-in's Trainer that registers it."""

    count: object = Count()

    def __init__(self, *args):
        super().__init__(*args)
        self.register(self.count, "my count")


def unreadable(*args, **kwargs):
    raise OSError(errno.EIO, "Input/output error")


def empty_buffers(out, patch):
    for path in out.glob("checkpoint-*"):
        (path / "ReplayBuffer.trajectories").write_bytes(b"")


def save_count(out, patch):
    change_state(out / "checkpoint-2", lambda saved: saved.update({"my count": {"n": 1}}))


REFUSALS = {  # what is said of a resume, and what is done before it
    "--temperature 0.5": lambda out, patch: None,
    "had the sizes {'log_z': 1000}, now {'log_z': 7}": lambda out, patch: patch.setitem(
        tba.PARAMETERS, "log_z", (7, 0.1)
    ),
    "now {'log_z': 1000, 'value': 3}": lambda out, patch: patch.setitem(
        tba.PARAMETERS, "value", (3, 0.1)
    ),
    "now {}": lambda out, patch: patch.delitem(tba.PARAMETERS, "log_z"),
    "RecentOrReward.SAVED is": lambda out, patch: patch.setattr(
        tba.RecentOrReward, "SAVED", (*tba.RecentOrReward.SAVED, "more")
    ),
    "no state of my count": lambda out, patch: patch.setattr(tba, "Trainer", Counting),
    "has the state of my count": save_count,
    "checkpoint-3 cannot be read": lambda out, patch: patch.setattr(tba.torch, "load", unreadable),
    "no checkpoint that loads": empty_buffers,
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_resume_that_is_refused_changes_no_file(said, saved_run, tmp_path, capsys, monkeypatch):
    """Not a log, which has later steps, nor a newer checkpoint, which is damaged."""
    out = saved_run(tmp_path / "run")
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-3")
    os.truncate(out / "checkpoint-3" / "ReplayBuffer.trajectories", 5000)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "seconds": 1.0}\n')
    REFUSALS[said](out, monkeypatch)
    before = files_of(out)
    monkeypatch.setattr(tba, "run", lambda trainer: 0)
    flags = said.split() if said.startswith("--") else []
    with pytest.raises(SystemExit) as ended:
        tba.main(["--resume", str(out), *flags])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert ended.value.code == 2 and len(lines) == 1 and said in lines[0]
    assert files_of(out) == before


DAMAGE = {
    "emptied": lambda path: (path / "ReplayBuffer.trajectories").write_bytes(b""),
    "missing": lambda path: (path / "ReplayBuffer.trajectories").unlink(),
    "cut": lambda path: os.truncate(path / "ReplayBuffer.trajectories", 5000),
    "state": lambda path: os.truncate(path / "trainer.pt", 20_000),
    "tokenizer": lambda path: os.truncate(path / "tokenizer.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    damage, saved_run, resumed, tmp_path, capsys
):
    out = saved_run(tmp_path / "run")
    DAMAGE[damage](out / "checkpoint-2")
    trainer = resumed(out)
    assert trainer.step == 1
    assert sum(map(len, trainer.buffer.trajectories.values())) == 4 * 8
    said = capsys.readouterr().err
    assert "checkpoint-2 is damaged" in said and "renamed to checkpoint-2.broken" in said
    assert {path.name for path in out.glob("checkpoint-*")} == {
        "checkpoint-1",
        "checkpoint-2.broken",
    }
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == [1]


def test_a_run_resumes_whatever_its_classes_are_called(saved_run, tmp_path, capsys, monkeypatch):
    """A plug-in may have a Learner and a Trainer of its own. A line of the log is damaged."""
    out = saved_run(tmp_path / "run")
    lines = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(bytes(50) + b"\n" + lines)
    trainers = []

    class MyTrainer(tba.Trainer):
        def run(self):
            trainers.append((self, [group.index for group in self.inbox]))
            super().run()

    without_searchers(monkeypatch)
    monkeypatch.setattr(tba, "Trainer", MyTrainer)
    monkeypatch.setattr(tba, "Learner", type("MyLearner", (tba.Learner,), {}))
    assert tba.main(["--resume", str(out)]) == 0
    ((trainer, inbox),) = trainers
    assert inbox == [9] and trainer.searchers.first_missing == 10
    loaded = trainer.learner.state()["optimizer"]
    saved = tba.open_checkpoint(out / "checkpoint-2")["Learner"]["optimizer"]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[n]["exp_avg"], saved[n]["exp_avg"]) for n in saved)
    assert any(saved[n]["exp_avg"].any() for n in saved)
    assert "warning: skipping a damaged line" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize("value", [np.float64(0.5), collections.deque([1])], ids=["numpy", "deque"])
def test_a_state_that_no_resume_could_load_ends_the_run_at_its_first_checkpoint(
    value, gsm8k, tmp_path, capsys, monkeypatch
):
    without_searchers(monkeypatch)
    monkeypatch.setattr(Counting, "count", Count({"a prompt": value}))
    monkeypatch.setattr(tba, "Trainer", Counting)
    out = tmp_path / "run"
    flags = {"steps": 9, "save_every": 1, "eval_every": 0, "eval_samples": 8}
    assert tba.main(arguments(gsm8k, out, **flags)) == 1
    said = capsys.readouterr().err
    name = "numpy._core.multiarray.scalar" if value == 0.5 else "collections.deque"
    assert f"a value of {name}: SAVED may have" in said and "Traceback" not in said
    assert len(read_lines(out / "metrics.jsonl")) <= 2
    assert not [
        path for path in out.iterdir() if re.match(r"checkpoint|final|\.partial", path.name)
    ]


def test_a_reset_that_fails_is_repeated_by_the_resumed_run(gsm8k, tmp_path, capsys, monkeypatch):
    """The reference and its version are the old ones; the step is not counted."""
    without_searchers(monkeypatch)
    out = tmp_path / "run"
    flags = {"steps": 2, "reset_reference_every": 2, "save_every": 0, "learning_rate": 1e-3}
    calls = []

    def fails(policy, reference, config):
        calls.append(policy)
        assert len(calls) < 5
        return policy

    with monkeypatch.context() as patch:
        patch.setattr(tba, "next_reference", fails)
        assert tba.main(arguments(gsm8k, out, eval_every=0, eval_samples=8, **flags)) == 1
    assert "AssertionError" in capsys.readouterr().err
    saved = tba.open_checkpoint(out / "checkpoint-1")["WeightSync"]
    model = weights_of(gsm8k / "model")
    assert saved["reference_version"] == 0
    assert all(torch.equal(saved["reference"][name], model[name]) for name in model)
    assert tba.main(["--resume", str(out)]) == 0
    saved = tba.open_checkpoint(out / "checkpoint-2")["WeightSync"]
    policy = weights_of(out / "checkpoint-2")
    assert saved["reference_version"] == 2
    assert all(torch.equal(saved["reference"][name], policy[name]) for name in policy)


# ---------------------------------------------------------------------------------- a run's folder


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    config = tba.settings(output_dir=str(tmp_path / "run"))
    held = tba.lock_folder(config)
    with pytest.raises(tba.InputError):
        tba.lock_folder(config)
    held.close()
    tba.lock_folder(config).close()
    monkeypatch.setattr(tba.fcntl, "flock", no_locks)
    tba.lock_folder(config)


def logged_arrivals(steps):
    """`distinct` after each step, and the warnings, if these groups of responses arrive."""
    said = []
    ignore = lambda name, record: None
    config = SimpleNamespace(report_to="none")
    folder = SimpleNamespace(say=said.append, append=ignore, config=config)
    task = SimpleNamespace(
        train_prompts=[None] * 1000, text=str, response_texts=lambda responses: responses
    )
    log = tba.StepLog(SimpleNamespace(folder=folder, task=task, step=0))
    found = []
    for groups in steps:
        arrived = []
        for index, responses in enumerate(groups):
            rows = []
            for tokens in responses:
                zeros = np.zeros(len(tokens), np.float32)
                row = tba.Trajectory(
                    np.array(tokens, np.int32), zeros, zeros, True, 0.0, 1.0, 0.0, index, 0, 0, 0
                )
                rows.append(row)
            arrived.append(tba.Group(index, rows))
        log.log_arrivals(arrived)
        log.check_learning()
        found.append(log.means["distinct"])
    return found, said


RESPONSES = st.lists(st.integers(0, 2), max_size=3)
GROUPS = st.lists(st.lists(RESPONSES, min_size=1, max_size=4), min_size=1, max_size=40)


@given(st.lists(GROUPS, min_size=1, max_size=4))
def test_distinct_responses_are_counted(steps):
    """Among two of each of the latest groups, however these came."""
    found, _ = logged_arrivals(steps)
    pairs = []
    for step, groups in enumerate(steps):
        pairs += [response for responses in groups for response in responses[:2]]
        latest = pairs[-128:]
        new = [i for i, response in enumerate(latest) if response not in latest[:i]]
        assert found[step] == len(new) / len(latest)


def policy_of(kind, S, rng):
    """A batch of ten groups of S responses, or of one group."""
    if kind == "a single group with different answers":
        return [[[i] for i in range(S)]]
    if kind == "diverse":
        return rng.integers(0, 99, (10, S, 8)).tolist()
    if kind == "one response per prompt":
        return rng.integers(0, 99, (10, 1, 8)).repeat(S, 1).tolist()
    if kind == "one of two answers":
        return rng.integers(0, 2, (10, S, 1)).tolist()
    return [[[5, 5]] * S] * 10


@pytest.mark.parametrize("S", [2, 4, 24])
@pytest.mark.parametrize(
    "kinds, warnings",
    [
        (["diverse", "one response per prompt"], 0),  # it may have learned the right answers
        (["one of two answers", "one response"], 0),  # few from the start
        (["a single group with different answers", "one of two answers"], 0),  # also few
        (["diverse", "one response"], 1),
        (["diverse", "one response per prompt", "one response"], 1),
    ],
)
def test_a_collapse_is_reported_once(kinds, warnings, S):
    rng = np.random.default_rng(0)
    found, said = logged_arrivals(policy_of(kind, S, rng) for kind in kinds for _ in range(10))
    assert len(said) == warnings, said
    assert all("distinct" in text and "docs/hacking.md" in text for text in said)
    if kinds[1:] == ["one response per prompt"]:
        assert found[-1] == 0.5
    if kinds[-1] == "one response":
        assert found[-1] == 1 / 128


@pytest.mark.parametrize("resumed_at", [0, 40])
def test_only_the_first_steps_of_a_run_can_learn_nothing(resumed_at):
    """Later there may be nothing left to learn."""
    said = []
    folder = SimpleNamespace(say=said.append, step=resumed_at)
    trainer = SimpleNamespace(folder=folder)
    log = tba.StepLog(trainer)
    log.means["distinct"] = 1.0
    for trainer.step in range(resumed_at + 1, resumed_at + 30):
        log.check_learning()
    assert len(said) == (0 if resumed_at else 2)


SHORT = """
import numpy as np
import tba

class Short(tba.GSM8K):
    def rewards(self, examples, responses, ended):
        return -np.array(list(map(len, responses)))

tba.TASKS["short"] = Short
"""


def test_a_run_whose_best_response_is_empty_says_that_it_collapses(gsm8k, tmp_path):
    """Its KL to the reference stays small."""
    (tmp_path / "short.py").write_text(SHORT)
    flags = {"task": "short", "plugin": tmp_path / "short.py", "lockstep": True, "steps": 14}
    flags |= {"beta": 0.01, "learning_rate": 5e-3, "prompts_per_step": 16, "trained_per_prompt": 4}
    out = tmp_path / "run"
    _, err = run_tba(arguments(gsm8k, out, eval_every=0, eval_samples=1, **flags))
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[3]["distinct"] > 0.4 and metrics[-1]["distinct"] < 0.1
    assert max(m["kl"] for m in metrics) < 50
    assert read_lines(out / "eval.jsonl")[-1]["distinct"] < 0.1
    warnings = [line for line in err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "distinct" in warnings[0]


def test_curves_that_cannot_be_drawn_cost_a_warning(gsm8k, tmp_path):
    out = tmp_path / "run"
    (out / "curves.png").mkdir(parents=True)
    _, err = run_tba(arguments(gsm8k, out, eval_samples=8, eval_every=0))
    assert "warning: curves.png" in err and (out / "final").exists()


def test_evaluations_take_a_fixed_random_sample(gsm8k, tmp_path):
    """Held-out data may be sorted, for instance by difficulty."""
    samples = []
    for seed in (0, 1):
        _, task = config_and_task(gsm8k, tmp_path, seed=seed)
        samples.append([example["question"] for example in task.held_out[:40]])
        encoded = task.tokenizer(task.prompt(task.held_out[3]))["input_ids"]
        assert encoded == task.held_out_prompts[3].tolist()
    lines = read_lines(gsm8k / "data" / "test.jsonl")
    places = [i for i, line in enumerate(lines) if line["question"] in samples[0]]
    assert samples[0] == samples[1] and len(places) >= 40 and np.ptp(places) > 150


def test_curves_of_a_run_with_many_steps_cost_what_those_of_few_do(tmp_path):
    config = tba.settings(output_dir=str(tmp_path))
    rows = [dict.fromkeys(METRICS, 0.5) | {"step": step} for step in range(1, 20_001)]
    del rows[0]["distinct"]  # of a version that did not log it
    evaluations = [{"step": 0, "n": 8, "accuracy": 0.1}]
    evaluations.append(evaluations[0] | {"step": 50, "distinct": 0.9})
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    folder = tba.RunFolder(config)
    times = {}
    for steps in (1000, 20_000):
        lines = "".join(json.dumps(row) + "\n" for row in rows[:steps])
        (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 20')  # is being written
        folder.bar.update(steps - folder.bar.n)
        times[steps] = []
        for _ in range(3):
            start = time.thread_time()
            folder.draw_curves()
            times[steps].append(time.thread_time() - start)
        assert min(matplotlib.image.imread(tmp_path / "curves.png").shape[:2]) > 300
        shown = tba.read_lines(tmp_path / "metrics.jsonl", folder.bar.n // 1000 + 1)
        assert 500 <= len(shown) <= 1000 and shown[-1]["step"] > 0.99 * steps
    assert min(times[20_000]) < 1.5 * min(times[1000])


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
