"""Runs on GPUs: real ones, or the virtual ones of tests/virtual_gpu (`pytest -m gpu`)."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from harness import PATIENCE, ROOT, arguments, real_gpus, run_tba, virtual_gpus
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
