"""Whole runs with real processes, real models and real weight transfers."""

import hashlib
import json
import os
import queue
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import arguments, read_lines, run_tba, trainer_of
from harness import Run
from safetensors.torch import load_file

import tba

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
    "recent_probability": 0.5, "beta_final": 0.03, "beta_anneal_steps": 10,
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
        "config.json", "metrics.jsonl", "eval.jsonl", "completions.jsonl", "curves.png",
        "checkpoint-30", "checkpoint-40", "final",
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
    assert metrics[-1]["version"] >= 20 and metrics[-1]["buffer_trajectories"] > 32
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

    completion = read_lines(out / "completions.jsonl")[0]
    assert set(completion) == {"step", "version", "prompt", "response", "reward"}
    assert completion["prompt"].startswith("[MATH TASK] Problem:\n")
    record = json.loads((out / "config.json").read_text())
    assert set(record) == {"config", "versions", "git_commit", "command"}
    assert record["config"]["num_searchers"] == 2 and record["config"]["dtype"] == "float32"
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
    shutil.copytree(gsm8k / "model", tmp_path / "model")
    responses = "replay buffer has responses"
    refused = [  # flags after --resume DIR, and what the message must name
        (["--dataset", tmp_path / "others.jsonl"], responses),
        (["--dataset", tmp_path / "fewer.jsonl"], responses),
        (["--model", tmp_path / "model"], f"trains {gsm8k / 'model'}"),
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
               (os.remove, "model.safetensors")]  # fmt: skip
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


# --------------------------------------------------------------------------------- lockstep


def test_lockstep_repeats_exactly_also_when_it_was_killed_and_resumed(gsm8k, tmp_path, capsys):
    flags = {
        "num_searchers": 2, "steps": 12, "sync_every": 1, "eval_every": 4, "save_every": 4,
        "learning_rate": 1e-3, "lr_schedule": "linear", "beta_final": 0.02, "tau": 1.5,
        "tau_final": 1, "beta_anneal_steps": 8, "tau_anneal_steps": 8, "eval_samples": 0,
    }  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "run"
    run_tba([*arguments(gsm8k, whole, **flags), "--synchronous"])
    metrics, evaluations, _ = stable(whole)
    assert all(m["staleness_max"] == 0 and m["recent_fraction"] == 1 for m in metrics)
    assert [m["version"] for m in metrics] == list(range(12))
    assert [e["step"] for e in evaluations] == [0, 4, 8, 12]
    assert abs(metrics[-1]["kl"]) > 0.05  # it moved away from its reference

    run = Run(out, [*arguments(gsm8k, out, **flags), "--synchronous"], hooks=False)
    run.reaches(9)
    assert resume_here(out) == 2 and "this run is under way" in capsys.readouterr().err
    run.process.kill()
    run.ends(-9)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "rew')  # a line that was cut off
    run = Run(out, ["--resume", str(out)], hooks=False)
    assert f"resume     {out}/checkpoint-8" in run.ends(0)
    assert stable(out) == stable(whole)


def test_lockstep_with_rare_syncs_another_seed_and_a_reference_that_is_reset(gsm8k, tmp_path):
    """Reset at every sync, the policy that generates is its own reference: KL 0."""
    out = tmp_path / "run"
    flags = {"steps": 6, "sync_every": 2, "learning_rate": 2e-3, "eval_every": 0, "seed": 1,
             "reset_reference_every": 2, "objective": "tba_prime"}  # fmt: skip
    run_tba([*arguments(gsm8k, out, **flags), "--synchronous"])
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["staleness_max"] for m in metrics] == [0, 1, 0, 1, 0, 1]
    assert [m["version"] for m in metrics] == [0, 0, 2, 2, 4, 4]
    assert max(abs(m["kl"]) for m in metrics) < 1e-3
    saved = torch.load(out / "checkpoint-6" / "trainer.pt", weights_only=True)
    assert set(saved["buffer"]["reference"].tolist()) == {0, 2, 4}


@pytest.mark.vllm
def test_lockstep_with_vllm_repeats_exactly(gsm8k, tmp_path):
    for name in ("a", "b"):
        args = arguments(gsm8k, tmp_path / name, engine="vllm", steps=4, sync_every=1, eval_every=0)
        run_tba([*args, "--synchronous"])
    assert stable(tmp_path / "a") == stable(tmp_path / "b")


# ---------------------------------------------------------------------------- interruptions


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
    assert saved["pool"]["step"] == step and saved["pool"]["received"] == len(stored)
    assert len(saved["buffer"]["reward"]) >= last["buffer_trajectories"]
    assert saved["buffer"]["lengths"].sum() == len(saved["buffer"]["tokens"])
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


def test_an_exception_before_the_first_group_ends_the_run_at_once(gsm8k, tmp_path):
    """With the traceback of the user's own line, and without restarts."""
    (tmp_path / "broken-task.v2.py").write_text(
        "import tba\n"
        "class Broken(tba.GSM8K):\n"
        "    def rewards(self, examples, responses, ended):\n"
        "        raise ArithmeticError('reward of ' + examples[0]['question'][:3])\n"
        "tba.TASKS['broken'] = Broken\n"
    )
    task = {"task": "broken", "task_file": tmp_path / "broken-task.v2.py"}
    _, err = run_tba(arguments(gsm8k, tmp_path / "run", **task), code=1)
    assert "Searcher 0 ended with exit code 1" in err and "restart 1 of" not in err
    assert "ArithmeticError: reward of " in err and 'v2.py", line 4, in rewards' in err
    assert list((tmp_path / "run").glob("checkpoint-0"))


# -------------------------------------------------------------------------- other settings


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
             "steps": 100_000, "eval_every": 20, "eval_samples": 96, "save_every": 0,
             "dtype": "bfloat16"}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags), hooks=False)
    lines = lambda name: read_lines(out / name) if (out / name).exists() else []
    # the first evaluation is that of step 0, the second is made while it trains
    run.until(lambda: len(lines("eval.jsonl")) >= 2, 120, "the second evaluation")
    metrics, completions = lines("metrics.jsonl"), lines("completions.jsonl")
    evaluation = lines("eval.jsonl")[1]
    run.process.send_signal(signal.SIGINT)
    run.ends(130)
    begun = evaluation["step"]
    during = [m for m in metrics if m["step"] > begun]
    assert evaluation["n"] == 96 and begun >= 20
    assert during[-1]["version"] >= begun + 4  # two syncs since the evaluation began
    assert max(c["version"] for c in completions) > begun  # and responses by those weights
    assert np.mean([m["generated_tokens_per_second"] for m in during]) > 0
    gaps = [m["logprob_gap"] for m in metrics]  # the two sides round differently
    assert 0 < max(gaps) < 0.5


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
    assert {p.name for p in alone.iterdir()} == {"config.json", "eval.jsonl"}
    (record,) = read_lines(alone / "eval.jsonl")
    assert all(f"{name}: {record[name]:.4g}" in stdout for name in names)
    # greedy answers do not depend on who gives them
    last = [e for e in evaluations if e["split"] == "held_out"][-1]
    assert record["n"] == last["n"]
    assert record["win_rate"] == pytest.approx(last["win_rate"], abs=0.03)
    assert resume_here(alone) == 2  # there is nothing to go on with
    assert f"--resume {alone}: holds an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_redteam_with_two_searchers_that_sample_differently(engine, redteam, tmp_path):
    from test_judges import redteam_flags

    flags, out = redteam_flags(redteam), tmp_path / "run"
    flags |= {"on_sync": "drain", "sync_every": 1, "sync_patience": 60, "eval_every": 0}
    flags |= {"sft_data": redteam / "sft.jsonl", "explore_probability": 0.5, "tau": 2,
              "near_duplicate": 0.1, "evict": "lowest_reward", "victim_samples": 2,
              "min_response_tokens": 5, "kept_per_prompt": 100, "dataset": None}  # fmt: skip
    run = Run(out, arguments(None, out, engine=engine, num_searchers=2, **flags))
    run.ends(0, 240)
    metrics, evaluations = read_lines(out / "metrics.jsonl"), read_lines(out / "eval.jsonl")
    assert set(metrics[0]) == set(METRICS) and metrics[-1]["step"] == 4
    names = {"toxicity", "attack_success_rate", "cosine_distance"}
    assert all(set(e) == {"step", "version", "split", "n"} | names for e in evaluations)
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    assert [m["version"] for m in metrics] == [0, 1, 2, 3]  # each waited for the drained ones
    assert metrics[-1]["buffer_prompts"] == 1 and metrics[-1]["buffer_trajectories"] <= 100
    saved = torch.load(out / "checkpoint-4" / "trainer.pt", weights_only=True)
    lengths = saved["buffer"]["lengths"]
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
    stdout, _ = run_tba(args, timeout=600)
    config = json.loads((out / "config.json").read_text())["config"]
    assert config["dtype"] == "bfloat16" and config["engine"] == "vllm"
    assert ("on one GPU" in stdout) == (torch.cuda.device_count() == 1)
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] >= 10 and max(m["logprob_gap"] for m in metrics) < 0.5


def test_deliveries_at_syncs_only_weights_in_bfloat16_and_warm_up(gsm8k, tmp_path):
    """As the authors train: data come with the weights, masters are bfloat16."""
    out = tmp_path / "run"
    flags = {"steps": 18, "sync_every": 6, "eval_every": 0, "deliver_at_sync": True,
             "sync_patience": 30, "dtype": "bfloat16", "master_dtype": "bfloat16",
             "warmup_steps": 4, "lr_schedule": "linear", "learning_rate": 1e-3,
             "adam_beta2": 0.99, "replay_recent": "exhaust"}  # fmt: skip
    run_tba(arguments(gsm8k, out, **flags))
    metrics = read_lines(out / "metrics.jsonl")
    count = [m["buffer_trajectories"] for m in metrics]
    grown = {i + 1 for i in range(6, 18) if count[i] > count[i - 1]}
    # step 7 is the first with weights of version 6; what they make comes at the sync after step 12
    assert grown <= {7, 8, 13, 14} and grown & {13, 14}, count
    assert [m["lr"] for m in metrics[:4]] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert 0 < metrics[-1]["lr"] < 1e-4
    assert max(m["logprob_gap"] for m in metrics) < 0.5
    tensors = load_file(out / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    before = tba.load_model(tba.Config(model=str(gsm8k / "model")), torch.bfloat16, "cpu")
    before = tba.checkpoint_state(before)
    assert not all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    optimizer = torch.load(out / "checkpoint-18" / "trainer.pt", weights_only=True)["optimizer"]
    assert optimizer[0]["exp_avg"].dtype == torch.bfloat16
    fix = "--master_dtype bfloat16: needs --dtype bfloat16"
    args = arguments(gsm8k, tmp_path / "other", dtype="float32", master_dtype="bfloat16")
    assert fix in run_tba(args, code=2)[1]


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


def test_searchers_pause_while_the_step_before_a_sync_ends(gsm8k, tmp_path):
    """Not before a checkpoint, which takes long, nor while they generate held-out prompts."""
    flags = {"sync_every": 3, "save_every": 9, "num_searchers": 2}
    pool = trainer_of(gsm8k, tmp_path / "run", **flags).pool
    first, newcomer = pool.searchers
    for s in pool.searchers:
        s.process, s.commands = object(), queue.SimpleQueue()
    first.version, pool.pausing = 0, False
    asked = []
    for pool.step in range(12):
        first.generating = pool.step == 5
        pool.prepare_sync()
        if not first.commands.empty():
            assert first.commands.get() == ("pause",) and first.commands.empty()
            asked.append(pool.step)
            pool.pause()  # as the sync does, which follows
            assert first.commands.empty()
        pool.pausing = False  # the weights were sent
    assert asked == [2, 11]
    assert newcomer.commands.empty()
