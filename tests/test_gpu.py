"""Runs on GPUs: real ones, or the virtual ones of tests/virtual_gpu (`pytest -m gpu`)."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import (
    PATIENCE,
    ROOT,
    Run,
    arguments,
    judges_of,
    real_gpus,
    run_tba,
    steps_of,
    virtual_gpus,
)
from safetensors.torch import load_file

from tba import read_lines

pytestmark = pytest.mark.gpu


def learning(gsm8k, out, **flags):
    """Flags of a run that learns within a few steps."""
    settings = {
        "steps": 20, "prompts_per_step": 8, "trained_per_prompt": 16, "searched_per_prompt": 16,
        "max_grad_norm": 1, "learning_rate": 3e-4, "sequences_in_flight": 128, "eval_every": 0,
        "eval_samples": 64, "sync_every": 2,
    }  # fmt: skip
    return arguments(gsm8k, out, **(settings | flags))


def accuracies(out):
    return [record["accuracy"] for record in read_lines(out / "eval.jsonl")]


# ---------------------------------------------------------------------------------- whole runs


def test_one_gpu_for_trainer_and_searcher_in_bfloat16(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"dtype": "auto", "num_searchers": None}
    run_tba(learning(gsm8k, out, **flags), environment=virtual_gpus(1))
    metrics = read_lines(out / "metrics.jsonl")
    assert max(m["logprob_gap"] for m in metrics) < 0.5 and metrics[0]["gpu_memory_gib"] > 0
    before, after = accuracies(out)
    assert after > before + 0.3


def test_several_gpus_send_weights_with_nccl(gsm8k, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    environment = virtual_gpus(4)
    if not real_gpus():
        environment["VIRTUAL_GPU_LOG"] = str(log)
    flags = {"num_searchers": None, "steps": 10, "sync_every": 1}
    run_tba(learning(gsm8k, out, **flags), environment=environment)
    metrics = read_lines(out / "metrics.jsonl")
    assert max(m["logprob_gap"] for m in metrics) < 1e-3
    assert metrics[-1]["version"] > 0 and metrics[-1]["searchers_alive"] == 3
    before, after = accuracies(out)
    assert after > before + 0.2
    assert real_gpus() or "NCCL rank 3 of 4 has joined" in log.read_text()


def test_two_ranks_and_a_resume_on_one_gpu(gsm8k, tmp_path):
    """A policy sharded over two GPUs by FSDP2, and a Searcher on a third, in lockstep."""
    out = tmp_path / "run"
    flags = {"synchronous": True, "num_searchers": None, "steps": 3, "save_every": 3}
    args = learning(gsm8k, out, **flags)
    launcher = "torch.distributed.run --nproc_per_node 2 --master_port 0 --standalone".split()
    command = [sys.executable, "-m", *launcher, str(ROOT / "tba.py"), *args]
    done = subprocess.run(
        command, env={**os.environ, **virtual_gpus(3)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run_tba(learning(gsm8k, tmp_path / "one", **flags), environment=virtual_gpus(1))
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "one", out))
    for name in ("loss", "grad_norm", "kl", "reward"):
        assert two[0][name] == pytest.approx(one[0][name], rel=2e-3, abs=2e-3)
    run_tba(["--resume", str(out), "--steps", "5"], environment=virtual_gpus(1))
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    start, end = (load_file(f / "model.safetensors") for f in (gsm8k / "model", out / "final"))
    assert all(np.isfinite(end[name]).all() for name in start)


def test_a_step_that_runs_out_of_memory(gsm8k, tmp_path):
    """PyTorch's message says what failed; a resumed run starts at the step before."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""TB that allocates 2 TB at step 2."""
import torch
import tba

def large(batch, config):
    if batch.step == 2:
        torch.empty(2 * 10**12, dtype=torch.uint8, device=batch.logprobs.device)
    return tba.tb(batch, config)

tba.OBJECTIVES["large"] = large
'''
    )
    out = tmp_path / "run"
    environment = virtual_gpus(1)
    args = arguments(gsm8k, out, plugin=plugin, objective="large", eval_every=0)
    _, said = run_tba(args, code=1, environment=environment)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1862" in said
    assert (out / "checkpoint-2").exists()
    run_tba(["--resume", str(out), "--objective", "tb"], environment=environment)
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_on_one_gpu(gsm8k, tmp_path, dtype):
    """On a virtual GPU its kernels compute nothing: numbers count on a real one only."""
    if dtype == "bfloat16" and not real_gpus():
        pytest.skip("on a virtual GPU vLLM's numbers are NaN in bfloat16")
    out = tmp_path / "run"
    flags = {"engine": "vllm", "dtype": dtype, "gpu_memory_utilization": 0.3}
    flags["searcher_timeout"] = PATIENCE  # the engine compiles its kernels first
    if not real_gpus():
        flags |= {"steps": 2, "sync_every": 1, "logprob_tolerance": 1e9}
    run_tba(learning(gsm8k, out, **flags), environment=virtual_gpus(1))
    metrics = read_lines(out / "metrics.jsonl")
    config = json.loads((out / "config.json").read_text())["config"]
    assert len(metrics) == config["steps"]
    if real_gpus():
        assert max(m["logprob_gap"] for m in metrics) < (1e-3 if dtype == "float32" else 0.5)
        before, after = accuracies(out)
        assert after > before + 0.3


# ------------------------------------------------------------------------- faults of transfers

HANGING = '''"""The second Searcher hangs while it joins a group, or while it receives weights."""
import os, time
from pathlib import Path
import tba

FOLDER = Path(os.environ["TBA_FAULTS"])
receive = tba.receive_weights

def receive_weights(searcher, message):
    global number
    number = searcher.spec.searcher
    return receive(searcher, message)

send = tba.SearcherSpec.send

def send_and_note(spec, *messages):
    send(spec, *messages)
    if any(isinstance(message, tba.Group) for message in messages):
        (FOLDER / f"pid-{spec.searcher}").write_text(str(os.getpid()))

def hanging(method):
    def wrapped(group, *args):
        fault = FOLDER / f"hang-{method.__name__}"
        while group.rank and number == 1 and fault.exists():
            (FOLDER / "hangs").touch()
            time.sleep(0.01)
        return method(group, *args)
    return wrapped

tba.receive_weights = receive_weights
tba.SearcherSpec.send = send_and_note
tba.WeightGroup.form = hanging(tba.WeightGroup.form)
tba.WeightGroup.run = hanging(tba.WeightGroup.run)
'''


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_only_the_member_that_hangs_or_dies_is_restarted(gsm8k, tmp_path, library):
    plugin = tmp_path / "mine.py"
    plugin.write_text(HANGING)
    environment = virtual_gpus(4) if library == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    out = tmp_path / "run"
    flags = {"num_searchers": 3, "sync_every": 1, "transfer_timeout": 6, "steps": 10**6}
    flags |= {"plugin": plugin, "save_every": 0}
    args = learning(gsm8k, out, **flags)
    run = Run(out, args, hooks=False, environment=environment)

    def kill(searcher):
        os.kill(int((run.faults / f"pid-{searcher}").read_text()), signal.SIGKILL)

    def next_versions():
        """Wait until every Searcher has newer weights."""
        last = steps_of(out)
        there = lambda: read_lines(out / "metrics.jsonl")[-1]
        run.until(
            lambda: there()["version"] > last and there()["searchers_alive"] == 3, "new weights"
        )

    # without a group of its own, a Searcher that fails ends the run
    sent = lambda: all((run.faults / f"pid-{i}").exists() for i in range(3))
    run.until(sent, "groups of all")
    run.reaches(steps_of(out) + 2)
    # the first Searcher waits for the second while a group forms, and is told of its death
    (run.faults / "hang-form").touch()
    kill(2)
    run.until((run.faults / "hangs").exists, "a group that waits for a member")
    kill(1)
    (run.faults / "hang-form").unlink()
    next_versions()
    assert run.failed() == [2, 1]
    # all miss the weights; then each gets them alone
    (run.faults / "hang-run").touch()
    run.says("warning: Searcher 1 missed")
    (run.faults / "hang-run").unlink()
    next_versions()
    assert run.failed() == [2, 1, 1], run.text()
    run.process.send_signal(signal.SIGINT)
    run.ends(130)


# ------------------------------------------------------------------------------------- engines

MEASURING = '''"""An engine that measures free memory as vLLM does; the policy loads slowly."""
import os, time
from pathlib import Path
import torch
import tba

FOLDER = Path(os.environ["TBA_FAULTS"])
load = tba.load_policy

def wait_for(name, seconds):
    end = time.monotonic() + seconds
    while not (FOLDER / name).exists() and time.monotonic() < end:
        time.sleep(0.01)

def load_policy(*args):
    wait_for("measuring", 5)  # in vain, if Searchers start later
    policy = load(*args)
    (FOLDER / "policy").touch()
    return policy

class Measuring(tba.TransformersEngine):
    def __init__(self, *args):
        free = torch.cuda.mem_get_info()[0]
        (FOLDER / "measuring").touch()
        wait_for("policy", 600)
        taken = free - torch.cuda.mem_get_info()[0]
        (FOLDER / "taken").write_text(f"{taken}\\n")
        super().__init__(*args)

tba.load_policy = load_policy
tba.ENGINES["measuring"] = Measuring
'''


def test_the_trainer_allocates_nothing_while_an_engine_on_its_gpu_starts(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(MEASURING)
    out = tmp_path / "run"
    args = arguments(gsm8k, out, engine="measuring", plugin=plugin, eval_every=0, steps=1)
    run = Run(out, args, hooks=False, environment=virtual_gpus(1))
    run.ends(0)
    assert run.noted("taken") == [(0,)]


@pytest.mark.vllm
def test_two_vllm_engines_in_a_process_keep_their_cuda_graphs(redteam, tmp_path):
    """On a virtual GPU their kernels compute nothing."""
    out = tmp_path / "run"
    flags = {"engine": "vllm", "steps": 2, "max_response_tokens": 16, "sequences_in_flight": 16}
    flags |= {"eval_samples": 4, "gpu_memory_utilization": 0.4} | judges_of(redteam)
    flags["searcher_timeout"] = 4 * PATIENCE  # both engines compile their kernels first
    if not real_gpus():
        flags["logprob_tolerance"] = 1e9
    args = arguments(redteam, out, **flags)
    run_tba(args, environment=virtual_gpus(1), timeout=4 * PATIENCE)
    assert len(read_lines(out / "metrics.jsonl")) == 2


def test_vllm_engines_in_several_threads_are_refused(redteam, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("import tba\ntba.RedTeam.reward_threads = 1\n")
    args = arguments(redteam, tmp_path / "run", engine="vllm", plugin=plugin, **judges_of(redteam))
    _, said = run_tba(args, code=2, environment=virtual_gpus(1))
    assert "--engine vllm" in said and "reward_threads" in said and "Traceback" not in said
