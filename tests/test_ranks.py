"""A Trainer of several processes: the same numbers as one, and what happens when one is lost."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ROOT, arguments, run_tba
from harness import GONE, PATIENCE, read_lines, searcher_pids, steps_of, wait_until
from safetensors.torch import load_file

import tba


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(ranks: int, script: Path, args: list[str]) -> subprocess.Popen:
    """Start a script as so many ranks, which the launcher puts into sessions of their own.

    `processes_of_run` finds all by a variable that they inherit.
    """
    run = f"{os.getpid()}-{time.monotonic_ns()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    process = subprocess.Popen(
        [*launcher, "--master_port", str(free_port()), str(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TBA_TEST_RUN": run},
    )
    process.run = f"TBA_TEST_RUN={run}".encode()
    return process


def run_ranks(ranks: int, args: list[str], script: Path = ROOT / "tba.py", code: int = 0) -> str:
    """Run a script as so many ranks to its end; returns what all of them said."""
    process = launch(ranks, script, args)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == code, said
    return said


def processes_of_run(launched: subprocess.Popen) -> dict[int, list[bytes]]:
    """The environments of a run's live processes, by their ids."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            environment = (path / "environ").read_bytes().split(b"\0")
            if launched.run in environment:
                found[int(path.name)] = environment
    return found


def rank_pids(launched: subprocess.Popen) -> list[int]:
    """The processes of the ranks, in their order: children of the launcher."""
    found = {}
    for pid, environment in processes_of_run(launched).items():
        if psutil.Process(pid).ppid() == launched.pid:
            (number,) = (value[5:] for value in environment if value.startswith(b"RANK="))
            found[int(number)] = pid
    return [found[rank] for rank in sorted(found)]


@contextlib.contextmanager
def launched(gsm8k: Path, out: Path, **flags: object) -> Iterator[subprocess.Popen]:
    """An endless run of two ranks, of which nothing is left afterwards."""
    settings = {"steps": 100_000, "eval_every": 0, "save_every": 0, "learning_rate": 1e-6}
    args = arguments(gsm8k, out, **{**settings, "rank_timeout": 30, **flags})
    process = launch(2, ROOT / "tba.py", args)
    try:
        yield process
    finally:
        for pid in processes_of_run(process):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


LEARNS = {
    "learning_rate": 1e-3, "steps": 8, "eval_every": 4, "save_every": 0, "sync_every": 1,
    "seed": 1, "beta": 0.05,
}  # fmt: skip

# what depends on the time, or is below the precision of float32
NOT_COMPARED = re.compile("seconds|busy|per_second|logprob_gap|queue_depth")


def assert_same_metrics(found: list[dict], wanted: list[dict]) -> None:
    assert [m["step"] for m in found] == [m["step"] for m in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not NOT_COMPARED.search(name):
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), (a["step"], name)


def assert_same_model(found: Path, wanted: Path, start: Path) -> None:
    """As a share of what was learned: of a gradient that is next to 0 Adam makes a step."""
    paths = (found / "final", wanted / "final", start)
    a, b, first = (load_file(path / "model.safetensors") for path in paths)
    assert a.keys() == b.keys() == first.keys()
    size = lambda tensors: math.sqrt(sum(float(t.square().sum()) for t in tensors))
    learned = size(b[name] - first[name] for name in b)
    assert size(a[name] - b[name] for name in b) < 1e-2 * learned


@pytest.fixture(scope="module")
def alone(gsm8k, tmp_path_factory) -> Path:
    """The folder of a lockstep run of one process."""
    out = tmp_path_factory.mktemp("ranks") / "alone"
    run_tba([*arguments(gsm8k, out, **LEARNS), "--synchronous"])
    return out


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_sharded_policy_has_the_gradients_weights_and_metrics_of_a_whole_one(
    family, gsm8k, model_of
):
    """Every objective, one pass and two, clipped, adapters, recomputed layers, tied embeddings."""
    said = run_ranks(2, [gsm8k, model_of(family)], ROOT / "tests" / "ranks.py")
    cases = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(cases) == 9
    for case in cases:
        in_bfloat16 = case["flags"].get("dtype") == "bfloat16"
        for name, gap in case["worst"].items():
            assert gap < (0.5 if in_bfloat16 else 1e-4), (case, name)


def test_micro_batches_are_shared_out_by_tokens_with_as_many_passes_for_every_rank():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count, ranks = int(rng.integers(1, 30)), int(rng.integers(1, 9))
        shapes = [tuple(pair) for pair in rng.integers(1, 40, (count, 2)).tolist()]
        budget = int(rng.integers(20, 500))
        plans = tba.share_out(shapes, budget, ranks)
        assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1
        assert sorted(i for plan in plans for part in plan for i in part) == list(range(count))
        size = lambda i: shapes[i][0] * shapes[i][1]  # noqa: B023
        tokens = [sum(size(i) for part in plan for i in part) for plan in plans]
        assert max(tokens) - min(tokens) <= max(map(size, range(count)))
        if ranks == 1:
            assert plans == [tba.plan_microbatches(shapes, budget)]


def test_two_ranks_train_as_one_process_does(alone, gsm8k, tmp_path):
    out = tmp_path / "run"
    said = run_ranks(2, [*arguments(gsm8k, out, **LEARNS), "--synchronous"])
    assert "Trainer of 2 ranks" in said and said.count("model: ") == 1
    assert_same_metrics(*(read_lines(path / "metrics.jsonl") for path in (out, alone)))
    assert_same_model(out, alone, gsm8k / "model")
    evaluations = [read_lines(path / "eval.jsonl") for path in (out, alone)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(alone, gsm8k, tmp_path):
    """Two, then one, then three: as if it had been one all along, the optimizer's state too."""
    out = tmp_path / "run"
    first = {**LEARNS, "steps": 3}
    run_ranks(2, [*arguments(gsm8k, out, **first), "--synchronous"])
    run_tba(["--resume", out, "--steps", "5"])
    run_ranks(3, ["--resume", out, "--steps", "8"])
    wanted = read_lines(alone / "metrics.jsonl")
    assert_same_metrics(read_lines(out / "metrics.jsonl"), wanted)
    assert_same_model(out, alone, gsm8k / "model")


@pytest.mark.slow
def test_ranks_learn_from_a_warm_start_with_adapters_while_searchers_go_on(gsm8k, tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "response": f" {i + 1}"} for i in range(40)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = []
    for ranks in (1, 2):
        out = tmp_path / f"run-{ranks}"
        flags = {"sft_data": tmp_path / "sft.jsonl", "sft_epochs": 1, "sft_batch": 10,
                 "sft_held_out": 0.25, "sft_learning_rate": 1e-3, "lora_rank": 4, "steps": 40,
                 "eval_every": 0, "gradient_checkpointing": True, "reset_reference_every": 5,
                 "num_searchers": 2, "sync_every": 2}  # fmt: skip
        args = arguments(gsm8k, out, **flags)
        said = run_ranks(2, args) if ranks == 2 else "".join(run_tba(args))
        (told,) = re.findall(r"warm start: loss ([\d.]+) -> ([\d.]+) .* rows ([\d.]+)", said)
        losses.append([float(loss) for loss in told])
        metrics = read_lines(out / "metrics.jsonl")
        assert len(metrics) == 40 and max(m["version"] for m in metrics) >= 8
        assert max(m["logprob_gap"] for m in metrics) < 1e-3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def ended(process: subprocess.Popen) -> str:
    """What a run said that ends by itself, within bounded time, and leaves no process."""
    said, _ = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not processes_of_run(process), "every process gone", seconds=GONE)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "kill-first", "raise"])
def test_a_rank_that_is_lost_ends_the_run(fault, gsm8k, tmp_path):
    """It cannot go on, nor write a checkpoint: a part of the weights is gone."""
    out = tmp_path / "run"
    task_file = None
    if fault == "raise":
        task_file = tmp_path / "faulty.py"
        task_file.write_text(
            "import tba\n"
            "backward = tba.Learner.backward\n"
            "def fail(self, *args):\n"
            "    if self.ranks.rank == 1 and self.scheduler.last_epoch > 10:\n"
            "        raise MemoryError('no memory is left')\n"
            "    return backward(self, *args)\n"
            "tba.Learner.backward = fail\n"
        )
    with launched(gsm8k, out, task_file=task_file) as process:
        if fault != "raise":
            wait_until(lambda: steps_of(out) > 10, "it trains")
            first, second = rank_pids(process)
            assert len(processes_of_run(process)) > 4  # and the Manager, a Searcher, ...
            number = signal.SIGSTOP if fault == "stop" else signal.SIGKILL
            os.kill(first if fault == "kill-first" else second, number)
        said = ended(process)
    assert process.returncode == 1
    survivor = "rank 1: error:" if fault == "kill-first" else "tba.py: error:"
    assert f"{survivor} a rank of the Trainer ended, or was silent for 30 s" in said
    assert not list(out.glob("checkpoint-*"))
    assert "[rank0]: Traceback" not in said  # it is one line
    if fault == "raise":
        assert "rank 1: Traceback" in said and "MemoryError: no memory is left" in said


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "killed launcher", "all"])
def test_a_stop_signal_saves_a_checkpoint_of_all_ranks(whom, gsm8k, tmp_path):
    out = tmp_path / "run"
    with launched(gsm8k, out) as process:
        wait_until(lambda: steps_of(out) > 10, "it trains")
        if whom == "all":  # as SLURM does
            for pid in rank_pids(process):
                os.kill(pid, signal.SIGUSR1)
        else:
            process.send_signal(signal.SIGTERM if whom == "launcher" else signal.SIGKILL)
        said = ended(process)
    (checkpoint,) = out.glob("checkpoint-*")
    assert f"checkpoint: {checkpoint}" in said
    steps = int(checkpoint.name[11:])
    run_tba(["--resume", str(out), "--steps", str(steps + 1)])
    assert steps_of(out) == steps + 1


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_last_checkpoint_is_written(gsm8k, tmp_path):
    """It is told in a line, as one that is lost in training is."""
    task_file, pid = tmp_path / "faulty.py", tmp_path / "pid"
    task_file.write_text(
        "import os, pathlib, signal\n"
        "import tba\n"
        f"pid = pathlib.Path({str(pid)!r})\n"
        "if os.environ.get('RANK') == '1':\n"
        "    pid.write_text(str(os.getpid()))\n"
        "save = tba.Checkpoints.save\n"
        "def kill_and_save(self):\n"
        "    os.kill(int(pid.read_text()), signal.SIGKILL)\n"
        "    save(self)\n"
        "tba.Checkpoints.save = kill_and_save\n"
    )
    out = tmp_path / "run"
    with launched(gsm8k, out, task_file=task_file) as process:
        wait_until(lambda: steps_of(out) > 10, "it trains")
        process.kill()  # the launcher: it would end rank 0 too
        said = ended(process)
    assert "tba.py: error: a rank of the Trainer ended, or was silent for 30 s" in said
    assert "no checkpoint can be written without all ranks" in said and "Traceback" not in said
    assert not list(out.glob("checkpoint-*"))


@pytest.fixture
def two_machines() -> Iterator[list[str]]:
    """Two network namespaces with an address each, joined by a wire: 10.77.0.1 and 10.77.0.2."""
    names = [f"tba{os.getpid()}-{i}" for i in (1, 2)]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True)
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["type", "veth", "peer", "name", "wire", "netns", names[1]]
        ip("link", "add", "wire", "netns", names[0], *ends)
        for i, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield names
    for name in names:
        ip("netns", "del", name)


@pytest.mark.slow
def test_ranks_and_a_searcher_on_two_machines(two_machines, gsm8k, tmp_path):
    """A machine that ends is missed by its connections; its place is free for it again."""
    out = tmp_path / "run"
    started = []

    def start(machine: int, args: list[str], **variables: object) -> subprocess.Popen:
        environment = {name: str(value) for name, value in variables.items()}
        environment |= {"TBA_AUTHKEY": "k" * 32, "GLOO_SOCKET_IFNAME": "wire"}
        command = ["ip", "netns", "exec", two_machines[machine], sys.executable, ROOT / "tba.py"]
        log = open(tmp_path / f"{len(started)}.log", "w")  # noqa: SIM115
        process = subprocess.Popen(
            [*command, *args], stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        started.append(process)
        return process

    def text(i: int) -> str:
        return (tmp_path / f"{i}.log").read_text()

    def says(words: str, times: int) -> None:
        wait_until(lambda: text(0).count(words) >= times, words, lambda: text(0))

    flags = {"steps": 100_000, "eval_every": 0, "save_every": 0, "learning_rate": 1e-6,
             "num_searchers": 1, "bind": "10.77.0.1:29500", "remote_searchers": 1,
             "searcher_timeout": 300, "rank_timeout": 60}  # fmt: skip
    join = ["--join", "10.77.0.1:29500"]
    variables = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2,
                 "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29501}  # fmt: skip
    try:
        for rank in (0, 1):
            start(rank, arguments(gsm8k, out, **flags), RANK=rank, **variables)
        wait_until(lambda: steps_of(out) > 3, "it trains", lambda: text(0) + text(1))
        for times in (1, 2, 3):
            joined = start(1, join)
            says("Searcher 1 joined from", times)
            if times > 1:  # before, its Searcher is not there yet
                wait_until(lambda: searcher_pids(joined.pid), "its Searcher")  # noqa: B023
            if times < 3:
                os.killpg(joined.pid, signal.SIGKILL)
                says("its connection was closed", times)
                says("its place is free", times)
        both = lambda: read_lines(out / "metrics.jsonl")[-1]["searchers_alive"] == 2
        wait_until(both, "both Searchers")
        started[0].send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in (*started[:2], joined)]
        assert codes == [128 + signal.SIGTERM] * 2 + [0], text(0) + text(1)
        assert list(out.glob("checkpoint-*"))
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.vllm
def test_searchers_with_vllm_beside_ranks(gsm8k, tmp_path):
    """A launcher's variables do not reach vLLM, which has a process group of its own."""
    out = tmp_path / "run"
    flags = {"engine": "vllm", "steps": 3, "eval_every": 0, "save_every": 0, "kv_cache_gib": 0.5}
    run_ranks(2, arguments(gsm8k, out, **flags))
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 3 and max(m["logprob_gap"] for m in metrics) < 1e-3


def test_what_is_wrong_is_told_once_and_a_plan_tells_the_memory_of_ranks(gsm8k, tmp_path):
    said = run_ranks(2, arguments(gsm8k, tmp_path / "run", steps=0), code=1)
    assert said.count("tba.py: error: --steps 0") == 1
    said = run_ranks(2, arguments(gsm8k, tmp_path / "run", model="nowhere"), code=1)
    assert said.count("tba.py: error: --model nowhere") == 1
    start = time.monotonic()
    said = run_ranks(2, [*arguments(gsm8k, tmp_path / "run"), "--dry_run"])
    assert time.monotonic() - start < 240
    assert said.count("Trainer of 2 ranks") == 1
    (first,) = re.findall(r"Trainer's rank 0 .*", said)
    (other,) = re.findall(r"each other rank .*", said)
    assert "snapshot" in first and "snapshot" not in other and "gathered" in other
    assert not (tmp_path / "run").exists()
