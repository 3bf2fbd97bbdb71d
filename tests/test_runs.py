"""Whole runs with real processes, real models and real weight transfers."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import arguments, random_groups, run_tba, trainer_of
from harness import GONE, PATIENCE, Run, processes_of, read_lines, steps_of, wait_until
from safetensors.torch import load_file

import tba

METRICS = (
    "step episode seconds reward loss log_z kl beta lr grad_norm entropy response_length "
    "eos_fraction staleness_mean staleness_max recent_fraction buffer_prompts buffer_trajectories "
    "queue_depth version trainer_busy searcher_busy train_tokens_per_second "
    "generated_tokens_per_second sync_seconds sync_wait_seconds logprob_gap searchers_alive "
    "equal_rewards effective_sample_size ratio_max"
).split()
TIMING = {"seconds", "queue_depth"} | {
    name for name in METRICS if "busy" in name or "second" in name
}
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def stable(out: Path) -> list[list[dict]]:
    """What a run wrote, less what depends on the clock."""
    keep = lambda line: {key: value for key, value in line.items() if key not in TIMING}
    names = "metrics.jsonl", "eval.jsonl", "completions.jsonl"
    return [[keep(line) for line in read_lines(out / name)] for name in names]


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder with a hash of what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.md5(p.read_bytes()).hexdigest() for p in files}


# ---------------------------------------------------------------------------- one whole run

WHOLE = {
    "num_searchers": 2, "steps": 40, "sync_every": 3, "eval_every": 15, "save_every": 30,
    "recent_probability": 0.5, "beta": "0.05@0,0.03@10",
    "lr_schedule": "linear",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(gsm8k, tmp_path_factory) -> tuple[Path, str, str]:
    """A finished run: its folder, stdout and stderr. Tests that change it take a copy."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, *run_tba(arguments(gsm8k, out, **WHOLE))


def check_whole_run(out: Path, stdout: str, stderr: str) -> None:
    """What README promises of the folder and the output of a run."""
    assert {p.name for p in out.iterdir()} == {
        "config.json", "metrics.jsonl", "eval.jsonl", "completions.jsonl", "eval_answers.txt",
        "curves.png", "checkpoint-30", "checkpoint-40", "final",
    }  # fmt: skip
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 41))
    for m in metrics:
        assert set(m) == set(METRICS)
        assert m["searchers_alive"] == 2 and m["episode"] == m["step"] * 32
        assert m["logprob_gap"] < 1e-3 and 0 <= m["staleness_mean"] <= m["staleness_max"] <= 40
        assert 0 < m["trainer_busy"] <= 1
    assert metrics[0]["beta"] == 0.05 and metrics[-1]["beta"] == pytest.approx(0.03)
    assert metrics[0]["lr"] == 1e-4 and metrics[39]["lr"] == pytest.approx(1e-4 / 40)
    assert metrics[-1]["version"] >= 6 and metrics[-1]["buffer_trajectories"] > 32
    # it does not wait for the Searchers, and learns from old data too
    assert max(m["staleness_max"] for m in metrics) >= 10
    assert 0.2 < np.mean([m["recent_fraction"] for m in metrics]) < 0.8

    *during, last, whole = evaluations = read_lines(out / "eval.jsonl")
    assert all(set(e) == {"step", "version", "split", "n", "accuracy"} for e in evaluations)
    assert all(e["split"] == "held_out" and e["n"] == 40 for e in [*during, last])
    assert during[0]["version"] == 0 and all(e["step"] == e["version"] for e in evaluations)
    assert (whole["split"], whole["n"]) == ("held_out_whole", 200)
    assert last["step"] == whole["step"] == 40
    before, after = during[0]["accuracy"], last["accuracy"]
    assert f"accuracy: {before:.4g} before -> {after:.4g} after 40 steps" in stdout
    assert f"on all 200 held-out prompts: accuracy {whole['accuracy']:.4g}" in stdout
    assert str(out / "final") in stdout and "curves.png" in stdout
    assert "reward 0." in stderr and "40/40" in stderr  # the progress, without a terminal too

    answers = (out / "eval_answers.txt").read_text().split("======== step ")[1:]
    assert len(answers) == 5 * len(during) + 5  # the same prompts each time, with their answers
    prompts = [answer.split("-------- answer\n")[0].split("\n", 1)[1] for answer in answers]
    assert prompts == prompts[:5] * (len(during) + 1) and len(set(prompts)) == 5
    for place, answer in enumerate(answers):
        step = [*during, last][place // 5]["step"]
        assert answer.startswith(f"{step}, held-out prompt {place % 5 + 1}: accuracy ")
        assert "\n[MATH TASK] Problem:\n" in answer

    completion = read_lines(out / "completions.jsonl")[0]
    assert set(completion) == {"step", "version", "prompt", "response", "reward"}
    assert completion["prompt"].startswith("[MATH TASK] Problem:\n")
    record = json.loads((out / "config.json").read_text())
    assert set(record) == {"config", "resolved", "versions", "git_commit", "command"}
    assert record["config"]["num_searchers"] == 2 and record["config"]["dtype"] == "auto"
    assert record["resolved"]["dtype"] == "float32"
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_leaves_what_the_readme_lists(finished, gsm8k):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, stdout, stderr = finished
    check_whole_run(out, stdout, stderr)
    for folder in ("final", "checkpoint-40"):
        AutoTokenizer.from_pretrained(out / folder)
    final = AutoModelForCausalLM.from_pretrained(out / "final").state_dict()
    newest = AutoModelForCausalLM.from_pretrained(out / "checkpoint-40").state_dict()
    start = AutoModelForCausalLM.from_pretrained(gsm8k / "model").state_dict()
    assert all(torch.equal(final[name], newest[name]) for name in final)
    assert any(not torch.equal(final[name], start[name]) for name in final)


@pytest.mark.vllm
def test_a_run_with_vllm_leaves_what_the_readme_lists(gsm8k, tmp_path):
    out = tmp_path / "run"
    args = arguments(gsm8k, out, engine="vllm", on_sync="recompute", **WHOLE)
    check_whole_run(out, *run_tba(args))
    assert read_lines(out / "metrics.jsonl")[-1]["logprob_gap"] > 0  # two engines, not one twice


def resume_here(*args: object) -> int:
    """tba.py's answer to `--resume`, in this very process; its exit code."""
    try:
        return tba.main(["--resume", *map(str, args)])
    except SystemExit as stop:
        return stop.code


def test_resume_refuses_what_does_not_fit_and_changes_nothing(finished, gsm8k, tmp_path, capsys):
    rows = (gsm8k / "data" / "train.jsonl").read_text().splitlines()
    (tmp_path / "others.jsonl").write_text("\n".join(reversed(rows)))
    (tmp_path / "fewer.jsonl").write_text("\n".join(rows[:1000]))
    other = shutil.copytree(gsm8k / "model", tmp_path / "model")
    flip(other / "model.safetensors")
    responses = "replay buffer has responses"
    refused = [  # flags after --resume DIR, and what the message must name
        (["--dataset", tmp_path / "others.jsonl"], responses),
        (["--dataset", tmp_path / "fewer.jsonl"], responses),
        (["--model", other], f"--model {other}: its weights are not those that the run"),
        (["--lora_rank", 4], "was trained with 0"),
        (["--steps", 39], "--steps 39: "),
        (["--beta", 0], "--beta 0"),
        (["--eval_only"], "leave out --eval_only"),
    ]
    for i, (flags, message) in enumerate(refused):
        copy = shutil.copytree(finished[0], tmp_path / f"run-{i}")  # this process keeps its lock
        before = contents(copy)
        assert resume_here(copy, *flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tba.py: error: ") and message in line
        assert contents(copy) == before
    assert resume_here(copy / "checkpoint-40") == 2
    assert f"--resume {copy} " in capsys.readouterr().err  # it names the folder to give
    assert resume_here(tmp_path) == 2 and "holds no run" in capsys.readouterr().err


def cut(path: Path) -> None:
    """Lose the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change a byte in the midst of a file."""
    content = bytearray(path.read_bytes())
    place = content.find(b"optimizer") if b"optimizer" in content else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(finished, tmp_path, capsys):
    damages = [(cut, "trainer.pt"), (flip, "trainer.pt"), (cut, "model.safetensors"),
               (flip, "model.safetensors"), (os.remove, "model.safetensors"),
               (os.remove, "config.json")]  # fmt: skip
    for i, (damage, name) in enumerate(damages):
        copy = shutil.copytree(finished[0], tmp_path / f"run-{i}")
        (copy / ".checkpoint-50").mkdir()  # as a run leaves it that is killed while it saves
        damage(copy / "checkpoint-40" / name)
        before = contents(copy)
        assert resume_here(copy, "--dry_run") == 0
        told = capsys.readouterr()
        assert f"warning: {copy}/checkpoint-40 is not used: " in told.err
        assert f"resume     {copy}/checkpoint-30" in told.out
        assert contents(copy) == before  # it looks only
    copy = shutil.copytree(copy, tmp_path / "none")
    cut(copy / "checkpoint-30" / "trainer.pt")
    assert resume_here(copy) == 2
    assert "has no checkpoint that loads" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_can_be_extended_and_one_that_diverged_goes_on(finished, tmp_path):
    """With a far too high learning rate the steps are skipped; with a lower one they count."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    flags = ["--lr_schedule", "constant", "--steps", "60", "--learning_rate", "1e4"]
    _, err = run_tba(["--resume", str(out), *flags], code=1)
    assert "step skipped" in err and "lower --learning_rate" in err
    assert read_lines(out / "metrics.jsonl")[-1]["lr"] == 1e4
    run_tba(["--resume", str(out), "--steps", "44", "--learning_rate", "3e-5"])
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 45))
    assert [m["lr"] for m in metrics[40:]] == [3e-5] * 4
    assert all(m["loss"] is not None and m["grad_norm"] is not None for m in metrics)
    assert metrics[-1]["buffer_trajectories"] > metrics[39]["buffer_trajectories"]
    seconds = [m["seconds"] for m in metrics]
    assert seconds == sorted(seconds)
    assert [e["step"] for e in read_lines(out / "eval.jsonl")][-4:] == [40, 40, 44, 44]
    record = json.loads((out / "config.json").read_text())
    assert record["resumed_from"] == "checkpoint-40" and record["config"]["steps"] == 44


def shell(prefix: str, out: Path, *flags: str) -> subprocess.Popen:
    """`tba.py --resume` from a shell that first did something else."""
    command = [sys.executable, str(tba.__file__), "--resume", str(out), *flags]
    return subprocess.Popen(
        ["bash", "-c", f"{prefix}; exec {shlex.join(command)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_costs_nothing_but_another_start(finished, tmp_path):
    """With a limit on the size of files. The next start is by nohup, and its terminal goes."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(out / "final")
    before = {name: sum for name, sum in contents(out).items() if name.startswith("checkpoint")}
    process = shell("ulimit -f 300", out)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "Traceback" not in text
    assert f"warning: {out}/checkpoint-40 could not be saved: " in text
    assert f"warning: {out}/final could not be saved: " in text
    assert f"--resume {out} writes it again" in text and "model: " not in text
    after = contents(out)
    assert before.items() <= after.items() and not [n for n in after if n.startswith((".", "fin"))]

    process = shell("trap '' HUP", out, "--steps", "60")
    wait_until(lambda: steps_of(out) > 42, "steps")
    process.send_signal(signal.SIGHUP)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and f"model: {out}/final" in text, text
    assert steps_of(out) == 60 and load_file(out / "final" / "model.safetensors")


# --------------------------------------------------------------------------------- lockstep


@pytest.mark.slow
def test_lockstep_repeats_exactly_also_when_it_was_stopped_or_killed_and_resumed(
    gsm8k, tmp_path, capsys
):
    """Stopped by a signal within an evaluation and within a batch, of which some has arrived."""
    flags = {
        "num_searchers": 2, "steps": 12, "sync_every": 1, "eval_every": 4, "save_every": 4,
        "learning_rate": 1e-3, "lr_schedule": "linear", "beta": "0.05@0,0.02@8",
        "tau": "1.5@0,1@8", "eval_samples": 0,
    }  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "run"
    run_tba([*arguments(gsm8k, whole, **flags), "--synchronous"])
    metrics, evaluations, _ = stable(whole)
    assert all(m["staleness_max"] == 0 and m["recent_fraction"] == 1 for m in metrics)
    assert [m["version"] for m in metrics] == list(range(12))
    assert [e["step"] for e in evaluations] == [0, 4, 8, 12]
    assert abs(metrics[-1]["kl"]) > 0.05  # it moved away from its reference

    first, more = [*arguments(gsm8k, out, **flags), "--synchronous"], ["--resume", str(out)]
    run = Run(out, first)
    run.want("signal-within-an-evaluation")
    run.suffered("signal-within-an-evaluation")
    assert "SIGTERM: saving a checkpoint" in run.ends(143)
    run = Run(out, more)
    run.reaches(2)
    run.want("signal-within-a-batch")
    run.suffered("signal-within-a-batch")
    run.ends(143)
    assert 2 <= steps_of(out) < 9
    run = Run(out, more)
    run.want("slow-trainer", "0.5")  # or it may have ended before it is killed
    run.reaches(9)
    assert resume_here(out) == 2 and "this run is under way" in capsys.readouterr().err
    run.process.kill()
    run.ends(-9)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "rew')  # a line that was cut off
    run = Run(out, more, hooks=False)
    assert f"resume     {out}/checkpoint-8" in run.ends(0)
    assert stable(out) == stable(whole)


@pytest.mark.parametrize("arrived", [0, 1, 4])
def test_a_lockstep_batch_that_was_not_trained_on_is_made_again(arrived, gsm8k, tmp_path):
    """All of it, from the same place in the prompt order; demonstrations are kept."""
    trainer = trainer_of(gsm8k, tmp_path / "run", synchronous=True, num_searchers=2)
    groups = random_groups(trainer.problem, 5, 8)
    searchers = trainer.searchers
    searchers.groups, searchers.messages = tba.DrainedQueue(), tba.DrainedQueue()
    for s, number in zip(searchers, (7, 9), strict=True):
        s.number = number
    trainer.received = 16
    send = lambda rows, searcher, number: searchers.groups.put(
        pickle.dumps(tba.Group(rows[0].prompt_id, rows, searcher, number))
    )
    send(groups[4], 0, -1)  # of --sft_to_buffer
    trainer.take_messages()
    trainer.collect()
    assert [s.owed for s in searchers] == [0, 0] and trainer.received == 24
    trainer.begin_batch()
    assert [s.owed for s in searchers] == [2, 2]
    places = [(0, 7), (1, 9), (0, 8), (1, 10)]
    for rows, place in list(zip(groups, places, strict=False))[:arrived]:
        send(rows, *place)
    trainer.save_at_the_end()
    saved = torch.load(tmp_path / "run" / "checkpoint-0" / "trainer.pt", weights_only=True)
    assert saved["numbers"] == [7, 9] and saved["received"] == 16 + 8 and not saved["batches"]
    kept = saved["buffer"]["trajectories"]["prompt_id"].tolist()
    assert set(kept) == {groups[4][0].prompt_id}
    trainer.folder.bar.close()


def test_what_is_due_at_a_step_is_asked_for_once_whatever_was_sent_at_it(gsm8k, tmp_path):
    """A Searcher that was started again may have had a sync of its own at this very step."""
    flags = {"eval_every": 4, "reset_reference_every": 4, "sync_every": 3}
    trainer = trainer_of(gsm8k, tmp_path / "run", **flags)
    sync, evaluation = trainer.sync, trainer.evaluation
    evaluation.due_at = None
    for trainer.step in range(1, 5):
        sync.version, sync.due = trainer.step, False
        trainer.request_due_sync()
        assert sync.due == (trainer.step in (3, 4))
    assert evaluation.due_at == 4 and sync.reset_due
    evaluation.due_at, sync.reset_due, sync.due = None, False, False
    trainer.request_due_sync()  # as in the first step of a resumed run
    assert evaluation.due_at is None and not (sync.reset_due or sync.due)
    trainer.folder.bar.close()


def test_data_that_searchers_withhold_are_asked_for_while_the_trainer_waits(gsm8k, tmp_path):
    for flow, due in ("stream", False), ("published", True):
        trainer = trainer_of(gsm8k, tmp_path / flow, data_flow=flow)
        trainer.ask_for_withheld_data()
        assert trainer.sync.due == due
        trainer.folder.bar.close()


def test_a_whole_lockstep_batch_that_waits_for_its_training_is_in_checkpoints(gsm8k, tmp_path):
    trainer = trainer_of(gsm8k, tmp_path / "run", synchronous=True, lag=2)
    groups = random_groups(trainer.problem, 5, 8)
    batch = [tba.Group(g[0].prompt_id, g, 0, i) for i, g in enumerate(groups)]
    trainer.batches.append(batch)
    file = io.BytesIO()
    torch.save(trainer.checkpoints.state(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = tba.Trainer(trainer.config, trainer.problem, trainer.folder, saved)
    (restored,) = again.batches
    for one, other in zip(batch, restored, strict=True):
        assert (one.prompt_id, one.number) == (other.prompt_id, other.number)
        for t, u in zip(one.trajectories, other.trajectories, strict=True):
            assert t.tokens.tolist() == u.tokens.tolist() and t.reward == u.reward
            assert t.ref_logprobs.tolist() == u.ref_logprobs.tolist()
    trainer.folder.bar.close()


@pytest.mark.slow
def test_a_constant_lag_repeats_exactly_and_uses_every_trajectory_once(gsm8k, tmp_path):
    """Batch t + 3 is searched with the weights of step t; a resumed run repeats it too."""
    flags = {"num_searchers": 2, "steps": 9, "sync_every": 1, "eval_every": 0, "save_every": 5,
             "learning_rate": 1e-3, "lag": 3, "keep_checkpoints": 0}  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "run"
    run_tba([*arguments(gsm8k, whole, **flags), "--synchronous"])
    metrics = read_lines(whole / "metrics.jsonl")
    assert [m["staleness_max"] for m in metrics] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert [m["staleness_mean"] for m in metrics] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert [m["version"] for m in metrics] == list(range(9))
    assert all(m["recent_fraction"] == 1 for m in metrics)
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-9")
    shutil.rmtree(out / "final")
    run_tba(["--resume", str(out)])
    assert stable(out) == stable(whole)


@pytest.mark.slow
def test_lockstep_with_rare_syncs_another_seed_and_a_reference_that_is_reset(gsm8k, tmp_path):
    """Reset at every sync, the policy that generates is its own reference: KL 0."""
    out = tmp_path / "run"
    flags = {"steps": 6, "sync_every": 2, "learning_rate": 2e-3, "eval_every": 0, "seed": 1,
             "reset_reference_every": 2, "objective": "tba_prime"}  # fmt: skip
    # in lockstep nothing is held back: the Trainer waits for it
    run_tba([*arguments(gsm8k, out, **flags), "--synchronous", "--data_flow", "published"])
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["staleness_max"] for m in metrics] == [0, 1, 0, 1, 0, 1]
    assert [m["version"] for m in metrics] == [0, 0, 2, 2, 4, 4]
    assert max(abs(m["kl"]) for m in metrics) < 1e-3
    saved = torch.load(out / "checkpoint-6" / "trainer.pt", weights_only=True)
    assert set(saved["buffer"]["trajectories"]["reference"].tolist()) == {4}


@pytest.mark.slow
def test_with_a_lag_what_waits_is_scored_anew_when_the_reference_is_reset(gsm8k, tmp_path):
    """By the weights that become the reference; nothing is trained on with older scores."""
    out = tmp_path / "run"
    flags = {"steps": 5, "sync_every": 1, "learning_rate": 2e-3, "eval_every": 0, "save_every": 1,
             "reset_reference_every": 3, "lag": 2, "keep_checkpoints": 0}  # fmt: skip
    run_tba([*arguments(gsm8k, out, **flags), "--synchronous"])
    for step, reference in ((1, 0), (3, 0), (4, 3), (5, 3)):
        saved = torch.load(out / f"checkpoint-{step}" / "trainer.pt", weights_only=True)
        assert set(saved["buffer"]["trajectories"]["reference"].tolist()) == {reference}
        batches = tba.groups_from_tensors(saved["batches"])
        waiting = [t for batch in batches for group in batch for t in group.trajectories]
        assert {t.reference for t in waiting} == {reference} and len(waiting) == 2 * 4 * 8
    # those of checkpoint-4 were searched before step 3, and with step 3
    config, problem = problem_at(gsm8k, tmp_path / "other")
    reference = dataclasses.replace(config, model=str(out / "checkpoint-3"))
    model = tba.load_model(reference, torch.float32, torch.device("cpu")).eval()
    policy = tba.TokenLogProbs(model, config.temperature)
    saved = torch.load(out / "checkpoint-4" / "trainer.pt", weights_only=True)
    (first, second) = tba.groups_from_tensors(saved["batches"])
    groups = [*first, *second]
    sequences = [
        (problem.prompts[group.prompt_id], [t.tokens for t in group.trajectories])
        for group in groups
    ]
    scored = tba.token_logprobs(policy, sequences, config)
    for t, expected in zip((t for g in groups for t in g.trajectories), scored, strict=True):
        np.testing.assert_allclose(t.ref_logprobs, expected.numpy(), atol=1e-4)
    assert {t.version for g in groups for t in g.trajectories} == {2, 3}


def problem_at(gsm8k, out):
    """The resolved Config of a very small run, and its Problem."""
    config = tba.parse(arguments(gsm8k, out))
    tba.resolve(config)
    return config, tba.load_problem(config)


@pytest.mark.slow
def test_the_synchronous_baseline_replays_half_of_a_batch_and_learns_log_z(redteam, tmp_path):
    """It fills its buffer first, searches half of a batch, and resumes exactly, log Z included."""
    from test_judges import redteam_flags

    out, again = tmp_path / "run", tmp_path / "again"
    flags = redteam_flags(redteam)
    flags |= {"sft_data": redteam / "sft.jsonl", "objective": "tb_learned_z", "dataset": None,
              "sync_every": 1, "recent_probability": 0.5, "eval_every": 0, "steps": 6, "beta": 0.1,
              "save_every": 3, "keep_checkpoints": 0, "initial_trajectories": 48, "lora_rank": 2,
              "near_duplicate": 0.1, "evict": "lowest_total", "kept_per_prompt": 60,
              "shortest_attack": 5, "min_response_tokens": 1}  # fmt: skip
    run_tba([*arguments(None, out, **flags), "--synchronous", "--synchronous_replay"])
    metrics = read_lines(out / "metrics.jsonl")
    assert 0 < np.mean([m["recent_fraction"] for m in metrics]) < 1
    saved = torch.load(out / "checkpoint-6" / "trainer.pt", weights_only=True)
    assert saved["received"] == 48 + 6 * 2 * 8  # two of four prompts are searched for a step
    assert abs(float(saved["log_z"][0])) > 0.3 and metrics[0]["log_z"] == 0
    shutil.copytree(out, again)
    for name in ("checkpoint-6", "final"):
        shutil.rmtree(again / name)
    run_tba(["--resume", str(again)])
    assert stable(again) == stable(out)


def test_an_evaluation_with_several_answers_to_prompts_of_another_dataset(gsm8k, tmp_path):
    """The mean over all answers, and pass@n over the prompts."""
    rows = [{"question": f"Ann has {i} apples. How many?", "answer": f"#### {i}"} for i in range(9)]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    flags = {"eval_responses": 5, "eval_temperature": 1.3, "eval_dataset": other,
             "eval_samples": None, "num_searchers": 2}  # fmt: skip
    stdout, _ = run_tba([*arguments(gsm8k, out, **flags), "--eval_only"])
    (record,) = read_lines(out / "eval.jsonl")
    assert record["n"] == 9 and "9 held out" in stdout
    assert 0 <= record["accuracy"] <= record["pass@5"] <= 1
    assert record["accuracy"] * 45 == pytest.approx(round(record["accuracy"] * 45))
    assert f"pass@5: {record['pass@5']:.4g}" in stdout
    assert (out / "eval_answers.txt").read_text().count("Ann has") == 5


@pytest.mark.vllm
def test_lockstep_with_vllm_repeats_exactly(gsm8k, tmp_path):
    for name in ("a", "b"):
        args = arguments(gsm8k, tmp_path / name, engine="vllm", steps=4, sync_every=1, eval_every=0)
        run_tba([*args, "--synchronous"])
    assert stable(tmp_path / "a") == stable(tmp_path / "b")


# ------------------------------------------------------------------------- what a run tells


@pytest.fixture
def trainer(gsm8k, tmp_path):
    """A Trainer without Searchers, with 64 trajectories in its buffer."""
    trainer = trainer_of(gsm8k, tmp_path / "run", steps=50)
    groups = random_groups(trainer.problem, 8, 8)
    trainer.arrived = [tba.Group(g[0].prompt_id, g, 0, i) for i, g in enumerate(groups)]
    trainer.collect()
    trainer.last_step_end = time.perf_counter()
    yield trainer
    trainer.folder.bar.close()


@pytest.mark.parametrize(
    ("value", "fault"),
    [(math.nan, "log-probabilities are not finite"), (1e3, "has the log-probability -")],
)
def test_broken_weights_are_said_to_be_that_and_not_saved(value, fault, trainer, capsys):
    trainer.train_step()
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    with torch.no_grad():
        trainer.learner.model.get_output_embeddings().weight[3:90].fill_(value)
        trainer.learner.model.get_output_embeddings().weight[90:].fill_(-value)
    with pytest.raises(tba.Diverged, match=rf"diverged: at step 1 .*{fault}.*--learning_rate"):
        tba.checked_probes(trainer.learner, trainer.step)
    trainer.step = 2
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    (checkpoint,) = trainer.folder.path.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-1"
    said = capsys.readouterr().err
    assert f"{fault}" in said and f"no checkpoint is written; {checkpoint} stays" in said
    trainer.step = 0
    with pytest.raises(tba.InputError, match=r"--model .*: its weights are damaged"):
        tba.checked_probes(trainer.learner, trainer.step)


def test_a_run_that_diverges_says_so_and_ends_with_code_1(gsm8k, tmp_path):
    """Its Searchers' complaints about the same weights do not hide it."""
    out = tmp_path / "run"
    flags = {"sync_every": 1, "save_every": 1, "eval_every": 0, "learning_rate": 3}
    _, err = run_tba(arguments(gsm8k, out, **flags), code=1)
    assert "tba.py: error: training diverged: at step 1 a token of a training prompt has" in err
    assert "Traceback" not in err and "so no checkpoint is written" in err
    assert not list(out.glob("checkpoint-*")) and not (out / "final").exists()


def test_a_run_whose_every_step_was_skipped_is_no_success(gsm8k, tmp_path):
    (tmp_path / "no_loss.py").write_text(
        "import tba\n"
        "tba.OBJECTIVES['nan'] = lambda batch, config: tba.Loss("
        "(batch.logprobs * float('nan')).mean(), batch.rewards.mean(1) * 0)\n"
    )
    out = tmp_path / "run"
    args = arguments(gsm8k, out, objective="nan", task_file=tmp_path / "no_loss.py")
    _, err = run_tba(args, code=1)
    assert "nothing was learned: the loss or gradient was not finite in each of the 4 steps" in err
    assert not (out / "final").exists() and (out / "curves.png").exists()


def test_an_error_between_a_transfer_and_its_probes_is_told_and_a_checkpoint_written(
    gsm8k, tmp_path
):
    """The Searcher has loaded the weights by then, and the Trainer has nothing to compare with."""
    (tmp_path / "faulty.py").write_text(
        "import time, tba\n"
        "score = tba.Learner.score_probes\n"
        "def fail(self):\n"
        "    if self.scheduler.last_epoch == 0:\n"
        "        return score(self)\n"
        "    tba.Learner.score_probes = score\n"
        "    time.sleep(2)\n"
        "    raise MemoryError('no memory is left')\n"
        "tba.Learner.score_probes = fail\n"
    )
    out = tmp_path / "run"
    _, err = run_tba(arguments(gsm8k, out, task_file=tmp_path / "faulty.py"), code=1)
    assert "MemoryError: no memory is left" in err and "ValueError" not in err
    assert list(out.glob("checkpoint-*"))


def test_metrics_that_were_never_a_number_are_named_at_the_end(trainer, capsys):
    trainer.arrivals["reward"] = 0.5
    trainer.new_groups = []
    trainer.train_step()
    trainer.folder.write_evaluation(
        {"step": 1, "version": 1, "split": "held_out", "n": 2, "accuracy": math.nan}
    )
    trainer.folder.warn_of_missing_numbers()
    names = "kl, response_length, eos_fraction, held-out accuracy"
    warning = f"warning: never a finite number in this run: {names}"
    assert warning in capsys.readouterr().err.splitlines()


def test_training_on_alone_is_said_once_for_each_time_without_searchers(trainer, capsys):
    """64 trajectories are seen twice in 4 steps of 32."""

    def warnings(steps):
        for _ in range(steps):
            trainer.collect()
            tba.notice_missing_data(trainer)
            trainer.train_step()
        return capsys.readouterr().err.count("warning: ")

    assert warnings(4) == 0 and warnings(8) == 1
    state = trainer.searchers[0]
    state.status, state.seen = tba.Status.SEARCHING, time.monotonic()  # back, but sent nothing yet
    assert warnings(2) == 0
    state.status = tba.Status.DOWN
    assert warnings(2) == 0  # the same time without
    group = random_groups(trainer.problem, 1, 8, seed=5)[0]
    trainer.arrived = [tba.Group(group[0].prompt_id, group, 0, 9)]
    assert warnings(4) == 0 and warnings(8) == 1
    state.status = tba.Status.SEARCHING  # at work, though nothing comes
    assert warnings(8) == 0


@pytest.mark.slow
def test_a_trainer_waits_for_searchers_if_it_is_told_to(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"steps": 100_000, "eval_every": 0, "save_every": 0, "kept_per_prompt": 8,
             "wait_for_searchers": True}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(5)
    before = len(run.noted("stored"))
    run.want("die-generating")
    run.says("nothing has arrived for")
    waits = steps_of(out)
    text = run.text()
    assert "training waits for more than the" in text and "(see --wait_for_searchers)" in text
    stored = len(run.noted("stored"))
    assert stored >= before
    run.want("slow-trainer", "5")  # or many steps are taken before they are counted
    run.until(lambda: len(run.noted("stored")) > stored, "groups of the new Searcher")
    assert steps_of(out) <= waits + 3  # but for those taken since they arrived
    (run.faults / "slow-trainer").unlink()
    run.reaches(waits + 5)
    run.process.send_signal(signal.SIGINT)
    run.ends(130)


def test_rates_are_those_of_the_latest_ten_seconds():
    state = tba.SearcherState(0, 0)
    assert state.rates() == (0, 0)
    for half_second in range(100):  # all tokens of 8 seconds come at once
        tokens = 800 * (half_second // 16)
        state.on_beat(tba.Beat(half_second / 2, half_second / 4, tokens))
        if half_second >= 40:
            busy, generated = state.rates()
            assert busy == 0.5 and 70 <= generated <= 170
    assert len(state.beats) == 21
    state.on_beat(tba.Beat(149.5, 49.75, 9600))  # after a long silence
    assert state.rates() == pytest.approx((0.25, 48), rel=0.2)


def test_curves_are_drawn_once_a_minute_and_show_mean_and_maximum(trainer, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []

    def savefig(figure, *_, **__):
        for axes in figure.axes:
            if "staleness" in axes.get_title():
                mean, most = (line.get_ydata() for line in axes.lines)
                scale = axes.yaxis.get_transform()
                share = np.ptp(scale.transform(mean)) / max(1, np.ptp(scale.transform(most)))
                drawn.append(float(share))

    monkeypatch.setattr(Figure, "savefig", savefig)
    for _ in range(3):
        trainer.train_step()
        trainer.checkpoints.save()
        trainer.checkpoints.finish()
    assert len(drawn) == 1
    rows = [dict.fromkeys(METRICS, 1.0) | {"step": i, "staleness_mean": i % 4,
             "staleness_max": i} for i in range(300)]  # fmt: skip
    (trainer.folder.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    trainer.save_at_the_end(drain=False)
    assert len(drawn) == 2 and drawn[1] > 0.2  # 0.01 on a linear axis


# ---------------------------------------------------------------------------- interruptions


@pytest.mark.slow
def test_ctrl_c_saves_what_arrived_and_lockstep_can_go_on(gsm8k, tmp_path):
    """Nothing that arrived is lost or made again, nothing that was begun is skipped."""
    out = tmp_path / "run"
    args = arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0, save_every=0)
    run = Run(out, args)
    run.reaches(20)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to every process of the run
    text = run.ends(130)
    assert "SIGINT: saving a checkpoint" in text and "Traceback" not in text
    (checkpoint,) = out.glob("checkpoint-*")
    last = read_lines(out / "metrics.jsonl")[-1]
    step = last["step"]
    assert checkpoint.name == f"checkpoint-{step}" and str(checkpoint) in text
    sent, stored = run.noted("sent"), run.noted("stored")
    assert set(sent) <= set(stored) and len(stored) == len(set(stored))
    saved = torch.load(checkpoint / "trainer.pt", weights_only=True)  # it executes nothing
    assert saved["step"] == step and saved["received"] == 8 * len(stored)
    rows = saved["buffer"]["trajectories"]
    assert len(rows["reward"]) >= last["buffer_trajectories"]
    assert rows["lengths"].sum() == len(rows["tokens"])
    assert not [path for path in checkpoint.rglob("*") if path.suffix in (".bin", ".pkl")]

    # what is on the disk now is asked of a run in lockstep, with one Searcher instead of two
    more = ["--resume", str(out), "--synchronous", "--steps", str(step + 4)]
    run = Run(out, [*more, "--num_searchers", "2"])
    run.ends(0)
    after = run.noted("stored")[len(stored) :]
    assert len(after) == 4 * 4 and not set(after) & set(stored)
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, step + 5))
    assert all(m["recent_fraction"] == 1 for m in metrics[step:])
    assert metrics[-1]["buffer_prompts"] > last["buffer_prompts"]


def test_a_dropped_connection_ends_a_run_as_sigterm_does(gsm8k, tmp_path):
    """The terminal goes: the kernel sends SIGHUP, and nothing can be written there any more."""
    out = tmp_path / "run"
    args = arguments(gsm8k, out, steps=100_000, eval_every=0, save_every=0)
    command = [sys.executable, str(tba.__file__), *args]
    take = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); "
    take += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # nohup pytest has it ignored
    take += "os.execv(sys.argv[1], sys.argv[1:])"
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", take, *command],
        stdin=end, stdout=end, stderr=end, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    try:
        os.set_blocking(terminal, False)

        def trains() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 2**20)  # or it would wait
            return steps_of(out) >= 5

        wait_until(trains, "steps")
        os.close(terminal)
        assert process.wait(PATIENCE) == 128 + signal.SIGHUP
        wait_until(lambda: not processes_of(process.pid), "every process gone", seconds=GONE)
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    (checkpoint,) = out.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{steps_of(out)}"


def test_an_exception_before_the_first_group_ends_the_run_at_once(gsm8k, tmp_path):
    """With the traceback of the user's own line, and without restarts."""
    (tmp_path / "broken-task.v2.py").write_text(
        "import tba\n"
        "class Broken(tba.GSM8K):\n"
        "    def setup(self, device, engine_of): 'not tried before'\n"
        "    def rewards(self, examples, responses, ended):\n"
        "        raise ArithmeticError('reward of ' + examples[0]['question'][:3])\n"
        "tba.TASKS['broken'] = Broken\n"
    )
    task = {"task": "broken", "task_file": tmp_path / "broken-task.v2.py"}
    _, err = run_tba(arguments(gsm8k, tmp_path / "run", **task), code=1)
    assert "Searcher 0 ended with exit code 1" in err and "restart 1 of" not in err
    assert "ArithmeticError: reward of " in err and 'v2.py", line 5, in rewards' in err
    assert list((tmp_path / "run").glob("checkpoint-0"))


# -------------------------------------------------------------------------- other settings


@pytest.mark.parametrize("opens", [True, False])
def test_weights_in_shared_memory_as_on_one_gpu(opens, gsm8k, tmp_path):
    """Nothing is sent to who can open the snapshot; else weights are sent, and it is said once."""
    fails = "def fail(self, handle):\n    raise OSError('no such handle')\n"
    fails += "tba.WeightReceiver.open = fail\n"
    (tmp_path / "sharing.py").write_text(
        "import pathlib, tba\n"
        "tba.WeightSync.SHARE_ON_CPU = True\n"
        "receive = tba.WeightReceiver.receive\n"
        "def noted(self, message):\n"
        "    with open(pathlib.Path(__file__).with_suffix('.txt'), 'a') as file:\n"
        "        file.write(f'{message.version} {message.shared}\\n')\n"
        "    receive(self, message)\n"
        "tba.WeightReceiver.receive = noted\n" + ("" if opens else fails)
    )
    out = tmp_path / "run"
    flags = {"task_file": tmp_path / "sharing.py", "num_searchers": 2, "sync_every": 1,
             "steps": 6, "learning_rate": 1e-3, "eval_every": 0}  # fmt: skip
    _, err = run_tba([*arguments(gsm8k, out, **flags), "--synchronous"])
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["version"] for m in metrics] == list(range(6))
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    noted = (tmp_path / "sharing.txt").read_text().split("\n")[:-1]
    assert len(noted) == 2 * 7 and {line.split()[1] for line in noted} == {str(opens)}
    warning = "warning: weights are sent, for their memory cannot be shared: no such handle"
    assert err.count(warning) == (not opens)


def test_a_want_of_memory_before_the_first_group_does_not_end_the_run(gsm8k, tmp_path):
    """Neither does a port that is taken: another start may go well. An error in the code does."""
    (tmp_path / "hungry.py").write_text(
        "import pathlib, torch, tba\n"
        "class Hungry(tba.GSM8K):\n"
        "    def setup(self, device, engine_of):\n"
        "        mark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "        if not mark.exists():\n"
        "            mark.touch()\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "tba.TASKS['hungry'] = Hungry\n"
    )
    out = tmp_path / "run"
    flags = {"task": "hungry", "task_file": tmp_path / "hungry.py", "eval_every": 0, "steps": 2}
    _, err = run_tba(arguments(gsm8k, out, **flags))
    assert err.count("OutOfMemoryError: CUDA out of memory") == 1 and "restart 1 of 5" in err
    assert tba.is_of_the_machine(OSError(errno.EADDRINUSE, "Address already in use"))
    assert tba.is_of_the_machine(torch.distributed.DistNetworkError("failed to listen"))
    assert tba.is_of_the_machine(RuntimeError("NCCL error: unhandled system error"))
    assert not tba.is_of_the_machine(OSError(errno.ENOENT, "no such file"))
    assert not tba.is_of_the_machine(ArithmeticError())


@pytest.mark.slow
def test_a_slow_judge_holds_up_neither_syncs_nor_searching(gsm8k, tmp_path):
    """README's example of a task, with an evaluation that takes seconds; in bfloat16."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_task.py").write_text(code)
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "import my_task, tba\n"
        "class SlowJudge(my_task.Shouting):\n"
        "    def evaluate(self, *answers):\n"
        "        time.sleep(1)\n"
        "        return super().evaluate(*answers)\n"
        "tba.TASKS['slow'] = SlowJudge\n"
    )
    names = "Ann has", "Ben buys", "Cleo loses", "Dan finds"
    rows = [json.dumps({"text": f"{name} {n}"}) for n in range(50) for name in names]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows[:80]))
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(rows[80:]))
    out = tmp_path / "run"
    flags = {"task": "slow", "task_file": tmp_path / "slow.py", "dataset": tmp_path / "data",
             "steps": 100_000, "eval_every": 20, "eval_samples": 48, "save_every": 0,
             "dtype": "bfloat16"}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags), hooks=False)
    lines = lambda name: read_lines(out / name) if (out / name).exists() else []
    # the first evaluation is that of step 0, the second is made while it trains
    run.until(lambda: len(lines("eval.jsonl")) >= 2, "the second evaluation")
    metrics, completions = lines("metrics.jsonl"), lines("completions.jsonl")
    evaluation = lines("eval.jsonl")[1]
    run.process.send_signal(signal.SIGINT)
    run.ends(130)
    begun = evaluation["step"]
    during = [m for m in metrics if m["step"] > begun]
    assert evaluation["n"] == 48 and begun >= 20
    assert during[-1]["version"] >= begun + 4  # two syncs since the evaluation began
    assert max(c["version"] for c in completions) > begun  # and responses by those weights
    assert np.mean([m["generated_tokens_per_second"] for m in during]) > 0
    gaps = [m["logprob_gap"] for m in metrics]  # the two sides round differently
    assert 0 < max(gaps) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_tldr_with_two_searchers(engine, tldr, tmp_path, capsys):
    """And its final model evaluated alone, which gives what the run's end gave."""
    from test_judges import tldr_flags

    flags, out = tldr_flags(tldr), tmp_path / "run"
    run_tba(arguments(None, out, engine=engine, num_searchers=2, eval_every=2, **flags))
    metrics, evaluations = read_lines(out / "metrics.jsonl"), read_lines(out / "eval.jsonl")
    assert set(metrics[0]) == set(METRICS) and metrics[-1]["step"] == 4
    names = {"win_rate", "perplexity", "kl", "response_perplexity"}
    assert all(set(e) == {"step", "version", "split", "n"} | names for e in evaluations)
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-3)
    assert evaluations[0]["perplexity"] > 1
    if engine == "vllm":
        return
    alone = tmp_path / "alone"
    flags |= {"model": out / "final"}
    stdout, _ = run_tba([*arguments(None, alone, engine=engine, **flags), "--eval_only"])
    files = {"config.json", "eval.jsonl", "eval_answers.txt"}
    assert {p.name for p in alone.iterdir()} == files
    record = read_lines(alone / "eval.jsonl")[0]
    shown = (alone / "eval_answers.txt").read_text()
    assert shown.count("======== step 0, held-out prompt ") == 5 and "win_rate " in shown
    (record,) = read_lines(alone / "eval.jsonl")
    assert all(f"{name}: {record[name]:.4g}" in stdout for name in names)
    # greedy answers do not depend on who gives them
    last = [e for e in evaluations if e["split"] == "held_out"][-1]
    assert record["n"] == last["n"]
    assert record["win_rate"] == pytest.approx(last["win_rate"], abs=0.03)
    assert resume_here(alone) == 2  # there is nothing to go on with
    assert f"--resume {alone}: holds an evaluation" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_redteam_with_two_searchers_that_sample_differently(engine, redteam, tmp_path):
    from test_judges import redteam_flags

    flags, out = redteam_flags(redteam), tmp_path / "run"
    flags |= {"on_sync": "drain", "sync_every": 1, "eval_every": 0}
    flags |= {"sft_data": redteam / "sft.jsonl", "explore_probability": 0.5, "tau": 2,
              "near_duplicate": 0.1, "evict": "lowest_reward", "victim_samples": 2,
              "min_response_tokens": 5, "kept_per_prompt": 100, "dataset": None}  # fmt: skip
    run = Run(out, arguments(None, out, engine=engine, num_searchers=2, **flags))
    run.ends(0)
    metrics, evaluations = read_lines(out / "metrics.jsonl"), read_lines(out / "eval.jsonl")
    assert set(metrics[0]) == set(METRICS) and metrics[-1]["step"] == 4
    names = {"toxicity", "attack_success_rate", "cosine_distance"}
    assert all(set(e) == {"step", "version", "split", "n"} | names for e in evaluations)
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    in_flight = [count for (count,) in run.noted("in-flight")]
    assert len(in_flight) >= 4 and not any(in_flight)  # no response crossed a sync
    assert metrics[-1]["buffer_prompts"] == 1 and metrics[-1]["buffer_trajectories"] <= 100
    saved = torch.load(out / "checkpoint-4" / "trainer.pt", weights_only=True)
    lengths = saved["buffer"]["trajectories"]["lengths"]
    assert lengths.min() >= 6 and lengths.max() <= 21  # EOS after 5 to 20 tokens
    attacks = {0: set(), 1: set()}  # the first of each group; the only prompt is theirs both
    for searcher, attack in run.noted("response"):
        attacks[searcher].add(attack)
    assert attacks[0] and attacks[1] and not attacks[0] & attacks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("on_sync", ["keep", "recompute"])
def test_a_run_on_gpus(on_sync, gsm8k, tmp_path):
    """Whatever GPUs there are: vLLM, bfloat16, NCCL between GPUs or Gloo on a shared one."""
    out = tmp_path / "run"
    args = arguments(gsm8k, out, engine="auto", steps=20, on_sync=on_sync, eval_every=10)
    stdout, _ = run_tba(args, timeout=1800)
    config = json.loads((out / "config.json").read_text())["resolved"]
    assert config["dtype"] == "bfloat16" and config["engine"] == "vllm"
    assert ("on one GPU" in stdout) == (torch.cuda.device_count() == 1)
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] >= 10 and max(m["logprob_gap"] for m in metrics) < 0.5


@pytest.mark.slow
def test_deliveries_at_syncs_only_weights_in_bfloat16_and_warm_up(gsm8k, tmp_path):
    """As the authors train: data come with the weights, masters are bfloat16."""
    out = tmp_path / "run"
    flags = {"steps": 40, "sync_every": 6, "eval_every": 0, "data_flow": "published",
             "dtype": "bfloat16", "master_dtype": "bfloat16", "warmup_steps": 4,
             "lr_schedule": "linear", "learning_rate": 1e-3, "adam_beta2": 0.99}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags))
    run.ends(0)
    delivered = run.noted("delivered")  # (version that began the group, of the weights since)
    assert {begun for begun, _ in delivered if begun}, "no weights were loaded"
    assert all(begun < now for begun, now in delivered if begun)
    assert any(begun == now for begun, now in delivered if not begun)  # but for the first ones
    assert not any(count for (count,) in run.noted("in-flight"))
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["lr"] for m in metrics[:4]] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert 0 < metrics[-1]["lr"] < 1e-4
    assert max(m["logprob_gap"] for m in metrics) < 0.5
    tensors = load_file(out / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    before = tba.load_model(tba.Config(model=str(gsm8k / "model")), torch.bfloat16, "cpu")
    before = tba.checkpoint_state(before)
    assert not all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    optimizer = torch.load(out / "checkpoint-40" / "trainer.pt", weights_only=True)["optimizer"]
    assert optimizer[0]["exp_avg"].dtype == torch.bfloat16
    fix = "--master_dtype bfloat16: needs --dtype bfloat16"
    args = arguments(gsm8k, tmp_path / "other", dtype="float32", master_dtype="bfloat16")
    assert fix in run_tba(args, code=2)[1]


@pytest.mark.slow
def test_low_rank_adapters_are_trained_pushed_merged_and_resumed(gsm8k, tmp_path):
    """In lockstep, so that a resumed run must repeat one that was not interrupted."""
    flags = {"steps": 6, "synchronous": True, "sync_every": 1, "eval_every": 0, "lora_rank": 4,
             "learning_rate": 1e-2, "save_every": 3, "keep_checkpoints": 0}  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_tba(arguments(gsm8k, whole, **flags))
    metrics = read_lines(whole / "metrics.jsonl")
    assert max(m["logprob_gap"] for m in metrics) < 1e-3  # engines have the merged weights
    before, after = (load_file(f / "model.safetensors") for f in (gsm8k / "model", whole / "final"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 4
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoint-6")
    run_tba(["--resume", str(part)])
    assert stable(part) == stable(whole)
    for name, tensor in load_file(part / "final" / "model.safetensors").items():
        torch.testing.assert_close(tensor, after[name], atol=0, rtol=0)
    optimizer = torch.load(part / "checkpoint-6" / "trainer.pt", weights_only=True)["optimizer"]
    assert sum(s["exp_avg"].numel() for s in optimizer.values()) < 0.2 * sum(
        tensor.numel() for tensor in after.values()
    )


@pytest.mark.parametrize("architecture", ["llama", "tied_llama", "gpt_neox", "gpt2"])
def test_a_checkpoint_is_of_the_weights_when_it_was_begun(architecture, gsm8k, model_of, tmp_path):
    """Another thread writes copies, which training does not change; tied weights stay tied."""
    trainer = trainer_of(gsm8k, tmp_path / "run", model=model_of(architecture))
    wanted = {name: tensor.clone() for name, tensor in trainer.learner.model.state_dict().items()}
    writing, may_write = [], threading.Event()
    write = trainer.checkpoints.write

    def write_later(*args):
        writing.append(threading.current_thread())
        assert may_write.wait(30)
        write(*args)

    trainer.checkpoints.write = write_later
    trainer.checkpoints.save()  # returns although nothing is written yet
    trainer.buffer.memory["later"] = 1
    with torch.no_grad():
        for parameter in trainer.learner.model.parameters():
            parameter.zero_()
    may_write.set()
    trainer.checkpoints.finish()
    assert writing[0] is not threading.current_thread()
    path = tmp_path / "run" / "checkpoint-0"
    saved = tba.transformers.AutoModelForCausalLM.from_pretrained(path)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    state = torch.load(path / "trainer.pt", weights_only=True)
    assert state["buffer"]["memory"] == {}
    trainer.folder.bar.close()
