"""Runs on GPUs: real ones, or the virtual ones of tests/virtual_gpu."""

import os
import re
import subprocess
import sys

import pytest
from harness import (
    PATIENCE,
    ROOT,
    Run,
    arguments,
    local_cluster,
    processes_of,
    run_tba,
    virtual_gpus,
    wait_until,
)
from test_ranks import TORCHRUN

from tba import read_lines

pytestmark = pytest.mark.gpu


def test_one_gpu_for_both(gsm8k, tmp_path):
    out = tmp_path / "run"
    run_tba(arguments(gsm8k, out, dtype="bfloat16"), environment=virtual_gpus(1))
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[0]["gpu_memory_gib"] > 0


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

def learner_step(learner, groups, now, step):
    if restarted.exists():
        exhaust_memory()
    return backward(learner, groups, now, step)

tba.Searcher.between_steps = searcher_step
tba.Learner.backward = learner_step
'''


def gpu_names(environment):
    """UUIDs of the GPUs, by index."""
    code = "import torch\nfor i in range(torch.cuda.device_count()):\n"
    code += "    print('GPU-' + str(torch.cuda.get_device_properties(i).uuid))"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, text=True, env=os.environ | environment).split()


@pytest.mark.parametrize("named", ["by index", "by UUID"])
def test_the_order_of_visible_gpus_is_kept(gsm8k, tmp_path, named):
    plugin = tmp_path / "notes.py"
    plugin.write_text(NOTES)
    environment = virtual_gpus(3) | {"NOTES": str(tmp_path)}
    names = gpu_names(environment)
    visible = [names[2], names[0]] if named == "by UUID" else ["2", "0"]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    flags = {"steps": 1, "eval_samples": 8, "plugin": plugin}
    run_tba(arguments(gsm8k, tmp_path / "run", **flags), environment=environment)
    used = {path.name.split("-")[0]: path.read_text() for path in tmp_path.glob("*er-*")}
    assert used == {"trainer": names[2], "searcher": names[0]}


def test_a_run_resumes_on_other_numbers_of_gpus_and_ranks(gsm8k, tmp_path):
    out = tmp_path / "run"
    flags = {"steps": 2, "eval_every": 0, "eval_samples": 8, "num_searchers": None}
    command = [sys.executable, "-m", *TORCHRUN.split(), str(ROOT / "tba.py")]
    command += arguments(gsm8k, out, **flags)
    log = tmp_path / "ranks.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | virtual_gpus(4),
        )  # fmt: skip
    assert process.wait(PATIENCE) == 0, log.read_text()
    wait_until(lambda: not processes_of(process.pid), "every process gone")
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
    command = [sys.executable, "-m", *TORCHRUN.split(), str(ROOT / "tba.py")]
    command += arguments(gsm8k, tmp_path / "run")
    environment = os.environ | virtual_gpus(1)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert done.returncode and not (tmp_path / "run").exists()
    assert done.stderr.count("tba.py: error: WORLD_SIZE 2") == 1


@pytest.mark.cluster
def test_searchers_of_a_cluster_have_the_gpus_that_the_trainer_leaves(gsm8k, tmp_path, monkeypatch):
    for name, value in virtual_gpus(3).items():
        monkeypatch.setenv(name, value)  # Ray's processes inherit them
    out = tmp_path / "run"
    flags = {"eval_every": 0, "eval_samples": 8, "num_searchers": None, "dtype": "auto"}
    flags["synchronous"] = True  # waits for all Searchers, also on this node with a single CPU
    with local_cluster(0, gpus=3) as cluster:
        args = arguments(gsm8k, out, cluster=cluster.address, **flags)
        run_tba(args, environment={})
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[-1]["searchers_alive"] == 2
    assert metrics[-1]["gpu_memory_gib"] > 0


def test_gpu_check_prints_a_table_or_that_there_is_no_gpu(tmp_path):
    command = [sys.executable, ROOT / "bench" / "gpu_check.py", "nccl", "--logs", tmp_path]
    command += ["--minutes", "600"]
    options = {"capture_output": True, "text": True, "timeout": 2 * PATIENCE}
    environment = os.environ | virtual_gpus(2)
    done = subprocess.run(command, env=environment, **options)
    assert re.search(r"^\| broadcast to 1 GPU\(s\) \| [\d.]+ GB/s", done.stdout, re.MULTILINE)
    done = subprocess.run(command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, **options)
    assert done.returncode == 3
