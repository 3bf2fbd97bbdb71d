"""Runs on GPUs: real ones, or the virtual ones of tests/virtual_gpu (`pytest -m gpu`)."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import harness
import pytest
from harness import PATIENCE, ROOT, Run, arguments, real_gpus, run_tba, steps_of, virtual_gpus
from test_ranks import TORCHRUN

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


def learns(out, gain):
    """Whether held-out accuracy rises by more than this."""
    before, after = (record["accuracy"] for record in read_lines(out / "eval.jsonl"))
    return after > before + gain


def largest_gap(out):
    return max(m["logprob_gap"] for m in read_lines(out / "metrics.jsonl"))


def python(*command, environment):
    """Run Python to its end; returns the ended process."""
    return subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, text=True,
        timeout=4 * PATIENCE,
    )  # fmt: skip


def two_ranks(args, environment):
    """Run two ranks to their end; returns the ended launcher."""
    return python("-m", *TORCHRUN.split(), ROOT / "tba.py", *args, environment=environment)


# ---------------------------------------------------------------------------------- whole runs


def test_one_gpu_for_trainer_and_searcher_in_bfloat16(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"dtype": "auto", "num_searchers": None}
    run_tba(learning(gsm8k, out, **flags), environment=virtual_gpus(1))
    assert largest_gap(out) < 0.5 and learns(out, 0.3)
    assert read_lines(out / "metrics.jsonl")[0]["gpu_memory_gib"] > 0


def test_several_gpus_send_weights_with_nccl(gsm8k, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    environment = virtual_gpus(4)
    if not real_gpus():
        environment["VIRTUAL_GPU_LOG"] = str(log)
    flags = {"num_searchers": None, "steps": 10, "sync_every": 1}
    run_tba(learning(gsm8k, out, **flags), environment=environment)
    assert largest_gap(out) < 1e-3 and learns(out, 0.2)
    last = read_lines(out / "metrics.jsonl")[-1]
    assert last["version"] > 0 and last["searchers_alive"] == 3
    assert real_gpus() or "NCCL rank 3 of 4 has joined" in log.read_text()


def test_two_ranks_compute_what_one_does(gsm8k, tmp_path):
    """A policy sharded over two GPUs by FSDP2, and a Searcher on a third, in lockstep."""
    flags = {"lockstep": True, "num_searchers": None, "steps": 3, "save_every": 3}
    done = two_ranks(learning(gsm8k, tmp_path / "two", **flags), virtual_gpus(3))
    assert done.returncode == 0, done.stdout + done.stderr
    run_tba(learning(gsm8k, tmp_path / "one", **flags), environment=virtual_gpus(1))
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("loss", "grad_norm", "kl", "reward"):
        assert two[0][name] == pytest.approx(one[0][name], rel=2e-3, abs=2e-3)


FINITE = '''"""vLLM's kernels compute nothing on a virtual GPU: its numbers may be NaN."""
import numpy as np
import tba

prompt_logprobs = tba.VLLMEngine.prompt_logprobs

def finite_logprobs(engine, sequences):
    return [np.nan_to_num(row) for row in prompt_logprobs(engine, sequences)]

tba.VLLMEngine.prompt_logprobs = finite_logprobs
'''


def ignoring_numbers(folder):
    """Flags of a run with vLLM on a virtual GPU, where the check of its numbers must not end it."""
    plugin = folder / "finite.py"
    plugin.write_text(FINITE)
    return {"logprob_tolerance": 1e9, "plugin": plugin}


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
        flags |= {"steps": 2, "sync_every": 1} | ignoring_numbers(tmp_path)
    run_tba(learning(gsm8k, out, **flags), environment=virtual_gpus(1))
    config = json.loads((out / "config.json").read_text())["config"]
    assert steps_of(out) == config["steps"]
    if real_gpus():
        assert largest_gap(out) < (1e-3 if dtype == "float32" else 0.5) and learns(out, 0.3)


# ------------------------------------------------------------- devices, ranks, memory, checkpoints

NOTES = '''"""Notes the GPU that each process uses."""
import multiprocessing
import os
import pathlib

import torch
import tba

original = tba.local_device

def local_device():
    device = original()
    role = "searcher" if multiprocessing.parent_process() else "trainer"
    name = "GPU-" + str(torch.cuda.get_device_properties(device).uuid)
    (pathlib.Path(os.environ["NOTES"]) / f"{role}-{os.getpid()}").write_text(name)
    return device

tba.local_device = local_device
'''

GREEDY = '''"""A Searcher runs out of memory; when it has new weights again, the Trainer does."""
import os
import pathlib

import torch
import tba

failed = pathlib.Path(os.environ["NOTES"]) / "failed"
restarted = pathlib.Path(os.environ["NOTES"]) / "restarted"
between_steps = tba.Searcher.between_steps
backward = tba.Learner.backward

def exhaust_memory():
    free, total = torch.cuda.mem_get_info()
    return torch.empty(2 * total, dtype=torch.uint8, device="cuda")

def searcher_step(searcher):
    between_steps(searcher)
    if searcher.version < 2:
        return
    if failed.exists():
        restarted.touch()
    else:
        failed.touch()
        exhaust_memory()

def learner_step(learner, minibatch, now, step):
    if restarted.exists():
        exhaust_memory()
    return backward(learner, minibatch, now, step)

tba.Searcher.between_steps = searcher_step
tba.Learner.backward = learner_step
'''


NORMS = '''"""The fused RMSNorm on a GPU against its formula in float64 on the CPU."""
import torch

torch.manual_seed(0)
x = torch.randn(3, 5, 64)
weight = torch.rand(64)
upstream = torch.randn(3, 5, 64)
found = []
for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
    own, scale = (t.to(device, dtype, copy=True).requires_grad_() for t in (x, weight))
    if device == "cuda":
        y = torch.nn.functional.rms_norm(own, (64,), scale, 1e-6)
        assert "FusedRmsNorm" in type(y.grad_fn).__name__
    else:
        y = scale * own * torch.rsqrt(own.square().mean(-1, keepdim=True) + 1e-6)
    y.backward(upstream.to(device, dtype))
    found.append([t.detach().cpu().double() for t in (y, own.grad, scale.grad)])
for fused, plain in zip(*found):
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
'''


def gpu_names(environment):
    """UUIDs of the GPUs, by index."""
    code = "import torch\nfor i in range(torch.cuda.device_count()):\n"
    code += "    print('GPU-' + str(torch.cuda.get_device_properties(i).uuid))"
    return python("-c", code, environment=environment).stdout.split()


def test_the_order_of_visible_gpus_is_kept_and_searchers_may_share_one(gsm8k, tmp_path):
    plugin = tmp_path / "notes.py"
    plugin.write_text(NOTES)
    environment = virtual_gpus(3) | {"NOTES": str(tmp_path)}
    names = gpu_names(environment)
    environment["CUDA_VISIBLE_DEVICES"] = "2,0"
    flags = {"steps": 1, "eval_samples": 8, "plugin": plugin, "num_searchers": 2}
    run_tba(arguments(gsm8k, tmp_path / "run", **flags), environment=environment)
    used = sorted((path.name.split("-")[0], path.read_text()) for path in tmp_path.glob("*er-*"))
    assert used == [("searcher", names[0]), ("searcher", names[0]), ("trainer", names[2])]


def test_a_run_resumes_on_other_numbers_of_gpus_and_ranks(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"steps": 2, "eval_every": 0, "eval_samples": 8, "num_searchers": None}
    done = two_ranks(arguments(gsm8k, out, **flags), virtual_gpus(4))
    assert done.returncode == 0, done.stdout + done.stderr
    for steps, gpus in ((4, 1), (6, 4)):
        run_tba(["--resume", str(out), "--steps", str(steps)], environment=virtual_gpus(gpus))
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["searchers_alive"] for m in metrics[1::2]] == [2, 1, 3]


def test_out_of_memory_restarts_a_searcher_and_ends_the_trainer(gsm8k, tmp_path):
    plugin = tmp_path / "greedy.py"
    plugin.write_text(GREEDY)
    out = tmp_path / "run"
    flags = {"steps": 100_000, "eval_every": 0, "eval_samples": 8, "sync_every": 1}
    environment = virtual_gpus(2) | {"NOTES": str(tmp_path)}
    run = Run(out, arguments(gsm8k, out, plugin=plugin, **flags), False, environment=environment)
    text = run.ends(1)
    assert text.count("OutOfMemoryError") == 2 and run.failed() == [0]
    assert (out / f"checkpoint-{len(read_lines(out / 'metrics.jsonl'))}").exists()


def test_ranks_without_a_gpu_each_are_an_error(gsm8k, tmp_path):
    done = two_ranks(arguments(gsm8k, tmp_path / "run"), virtual_gpus(1))
    assert done.returncode and not (tmp_path / "run").exists()
    assert done.stderr.count("tba.py: error: WORLD_SIZE 2") == 1


@pytest.mark.cluster
def test_searchers_of_a_cluster_have_the_gpus_that_the_trainer_leaves(gsm8k, tmp_path, monkeypatch):
    for name, value in virtual_gpus(3).items():
        monkeypatch.setenv(name, value)  # Ray's processes inherit them
    out = tmp_path / "run"
    flags = {"eval_every": 0, "eval_samples": 8, "num_searchers": None, "dtype": "auto"}
    flags["lockstep"] = True  # waits for all Searchers, also on this node with a single CPU
    with harness.local_cluster(0, gpus=3) as cluster:
        args = arguments(gsm8k, out, cluster=cluster.address, **flags)
        run_tba(args, environment={})
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[-1]["searchers_alive"] == 2
    assert metrics[-1]["gpu_memory_gib"] > 0


def test_gpu_check_on_virtual_gpus(tmp_path):
    """What it says of speed, and of vLLM's kernels, means nothing there."""
    check, environment = ROOT / "bench" / "gpu_check.py", virtual_gpus(2)
    flags = ["nccl", "step", "--logs", tmp_path, "--minutes", "600"]
    done = python(check, *flags, environment=environment)
    report = done.stdout.split("```")[1]
    assert re.search(r"^\| broadcast to 1 GPU\(s\) \| [\d.]+ GB/s", report, re.MULTILINE)
    for dtype in ("float32", "bfloat16"):
        assert re.search(rf"^\| step, {dtype} \| .* \| ok \|$", report, re.MULTILINE), done.stderr
    profile = ["--part", "profile", tmp_path / "model", "4096"]
    done = python(check, *profile, environment=environment)
    wall, *times = map(float, done.stdout.partition("result:")[2].split())
    assert len(times) == 7 and times[-2] > 0 and 0.1 * wall < sum(times) < 1.1 * wall


def test_gpu_check_without_time_a_compiler_or_a_gpu(tmp_path, monkeypatch):
    command = [ROOT / "bench" / "gpu_check.py", "--logs", tmp_path]
    monkeypatch.delenv("CC", raising=False)
    environment = virtual_gpus(1)
    done = python(*command, "--minutes", "0.001", environment=environment)
    assert done.returncode == 0, done.stderr
    for name in ("kernels", "step", "races", "size", "redteam"):
        assert f"\n| {name} | not run: time | " in done.stdout
    assert "gpu_check.py kernels step races size redteam\n" in done.stdout
    lacking = {"PATH": (str(tmp_path), "apt install gcc python3-dev")}
    lacking["CUDA_VISIBLE_DEVICES"] = "", "a GPU"
    for name, (value, needs) in lacking.items():
        done = python(*command, environment=environment | {name: value})
        assert done.returncode == 3 and needs in done.stdout


def test_a_step_asks_of_a_gpu_what_the_docs_say():
    """Launches, synchronizations, bytes and memory, counted by bench/gpu_counts.py."""
    done = python(ROOT / "bench" / "gpu_counts.py", environment=virtual_gpus(1))
    rows = re.findall(r"^\| .*", done.stdout, re.MULTILINE)
    assert len(rows) == 14, done.stderr
    documented = (ROOT / "docs" / "operations.md").read_text()
    for row in rows:
        name, *values = [cell.strip(" H").replace(",", "") for cell in row.strip("|").split(" | ")]
        (line,) = re.findall(rf"^\| {name} \| .*", documented.replace(",", ""), re.MULTILINE)
        expected = [cell.strip(" H") for cell in line.strip("|").split(" | ")[1:]]
        assert [*map(float, values)] == pytest.approx([*map(float, expected)], rel=0.02), name


def test_the_fused_norm_has_the_gradients_of_the_plain_one():
    """Its kernel has no CPU version, so a virtual GPU has one of its own."""
    done = python("-c", NORMS, environment=virtual_gpus(1))
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------- faults of transfers

HANGING = '''"""The second Searcher hangs before a meeting, or while a group forms, but is alive."""
import os, time
from pathlib import Path
import tba

FOLDER = Path(os.environ["TBA_FAULTS"])
receive = tba.receive_weights

def receive_weights(searcher, message):
    global number
    number = searcher.spec.searcher
    receive(searcher, message)

send = tba.SearcherSpec.send

def send_and_note(spec, *messages):
    send(spec, *messages)
    if any(isinstance(message, tba.Group) for message in messages):
        own = FOLDER / str(os.getpid())  # renamed, so that nobody reads it half-written
        own.write_text(own.name)
        own.replace(FOLDER / f"pid-{spec.searcher}")

def hanging(method):
    def wrapped(channel, *args):
        fault = FOLDER / f"hang-{method.__name__}"
        while channel.rank and number == 1 and fault.exists():
            (FOLDER / "hangs").touch()
            time.sleep(0.01)
        return method(channel, *args)
    return wrapped

tba.receive_weights = receive_weights
tba.SearcherSpec.send = send_and_note
tba.WeightChannel.broadcast = hanging(tba.WeightChannel.broadcast)
tba.WeightChannel.form = hanging(tba.WeightChannel.form)
'''


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_only_the_member_that_hangs_or_dies_is_restarted(gsm8k, tmp_path, library):
    plugin = tmp_path / "mine.py"
    plugin.write_text(HANGING)
    environment = virtual_gpus(4) if library == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    out = tmp_path / "run"
    flags = {"num_searchers": 3, "sync_every": 1, "transfer_timeout": 40, "steps": 10**6}
    flags |= {"plugin": plugin, "save_every": 0}
    args = learning(gsm8k, out, **flags)
    run = Run(out, args, hooks=False, environment=environment)
    hangs = run.faults / "hangs"

    def kill(searcher):
        os.kill(int((run.faults / f"pid-{searcher}").read_text()), signal.SIGKILL)

    def versions():
        """The versions that were sent; a transfer begins only once the previous one is over."""
        return {m["version"] for m in read_lines(out / "metrics.jsonl")}

    def hang(where):
        """Wait until a member hangs; returns the versions that were sent before."""
        hangs.unlink(missing_ok=True)
        (run.faults / f"hang-{where}").touch()
        run.until(hangs.exists, f"a member that hangs in {where}")
        return versions()

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
    # the others, which wait for one, go on as soon as it has ended
    before = hang("broadcast")
    kill(1)
    (run.faults / "hang-broadcast").unlink()
    ended = time.monotonic()
    run.until(lambda: len(versions() - before) >= 3, "newer weights of the others")
    assert time.monotonic() - ended < 20
    next_versions()
    assert run.failed() == [1]
    # after --transfer_timeout they go on without one that does not come, until it does
    before = hang("broadcast")
    run.until(lambda: len(versions() - before) >= 3, "newer weights of the others")
    assert "suspected: Searcher 1\n" in run.text()
    (run.faults / "hang-broadcast").unlink()
    next_versions()
    assert run.failed() == [1], run.text()
    # if a group does not form, nobody knows whose fault it is: all try again
    hangs.unlink()
    (run.faults / "hang-form").touch()
    kill(2)  # the next group has other members
    run.until(hangs.exists, "a group that does not form")
    failure = r"suspected: Searcher \d, Searcher \d"  # perhaps with the one that was restarted
    run.until(lambda: re.search(failure, run.text()), "the end of the transfer")
    (run.faults / "hang-form").unlink()
    next_versions()
    assert run.failed() == [1, 2], run.text()
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
    flags |= {"eval_samples": 4, "gpu_memory_utilization": 0.4} | harness.judges_of(redteam)
    flags["searcher_timeout"] = 4 * PATIENCE  # both engines compile their kernels first
    if not real_gpus():
        flags |= ignoring_numbers(tmp_path)
    args = arguments(redteam, out, **flags)
    run_tba(args, environment=virtual_gpus(1), timeout=4 * PATIENCE)
    assert steps_of(out) == 2
