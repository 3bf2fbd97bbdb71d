"""Starts, monitors and stops runs of tba.py, for the tests and bench/soak.py."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from starter import restore_signals
from virtual_gpu import build

import tba

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ROOT / "tests" / "faults.py"
# seconds until a wait counts as a hang; a busy machine is many times slower than an idle one
PATIENCE = 600
VIRTUAL_MACHINES: list[str] = []  # VIRTUAL_GPU_IDs given out by `virtual_gpus`
GONE = 300  # seconds until all processes of a run that has ended must be gone


def plugin_of_docs(flags: str) -> str:
    """The plug-in of docs/hacking.md that begins with these flags."""
    text = (ROOT / "docs" / "hacking.md").read_text()
    (plugin,) = re.findall(rf"# flags: {flags}\b.*\n((?s:.*?))```", text)
    return plugin


def processes_of(group: int) -> list[int]:
    """Live processes of an OS session, oldest first; all children of a run belong to its session.

    A process counts as live until its last thread has ended, as its files stay open until then.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (path / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            ended = state == "Z" and len(os.listdir(path / "task")) <= 1
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == group and not ended:
            found.append(int(path.name))
    return sorted(found)


def helpers_of(trainer: psutil.Process) -> list[psutil.Process]:
    """The fork server and the Manager of a run, which are forks of its Trainer, in this order."""
    forks = [p for p in trainer.children() if p.cmdline() == trainer.cmdline()]
    return sorted(forks, key=lambda process: process.create_time())


def wait_until(condition, what, log=lambda: "", seconds=PATIENCE):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what}\n{log()}"
        time.sleep(0.1)


def steps_of(out: Path) -> int:
    """Number of optimizer steps that a run has logged."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def on_virtual_gpus() -> bool:
    """Whether this process itself runs on virtual GPUs."""
    return "libvirtual_gpu.so" in os.environ.get("LD_PRELOAD", "")


def real_gpus() -> int:
    """Number of this machine's GPUs."""
    return 0 if on_virtual_gpus() else torch.cuda.device_count()


def virtual_gpus(gpus: int) -> dict[str, str]:
    """Environment variables under which a run finds this many GPUs.

    These are real ones if this machine has a GPU, else virtual ones, which no other run shares. The
    calling test is skipped where they cannot be had.
    """
    if real_gpus():
        if real_gpus() < gpus:
            pytest.skip(f"needs {gpus} GPUs")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:gpus])}
    if reason := build.cannot_build():
        pytest.skip(reason)
    name = f"{os.getpid()}-{len(VIRTUAL_MACHINES)}"
    VIRTUAL_MACHINES.append(name)
    return build.environment() | {"VIRTUAL_GPUS": str(gpus), "VIRTUAL_GPU_ID": name}


def forget_virtual_gpus() -> None:
    """Delete what virtual GPUs have left in shared memory."""
    for name in VIRTUAL_MACHINES:
        for path in Path("/dev/shm").glob(f"virtual_gpu-{name}*"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def local_cluster(nodes: int, gpus: int = 0) -> Iterator:
    """A Ray cluster at 127.0.0.1: a head with all GPUs for the Trainer, and nodes of one CPU."""
    os.environ.update(  # read when Ray is imported
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # nodes at 127.0.0.1
        RAY_health_check_period_ms="500",
        RAY_health_check_failure_threshold="20",  # a busy machine is late
        RAY_memory_monitor_refresh_ms="0",  # it counts the memory of other programs
    )
    from ray.cluster_utils import Cluster

    options = {"include_dashboard": False, "object_store_memory": 10**8}
    options["num_cpus"] = 1
    cluster = Cluster(initialize_head=True, head_node_args=options | {"num_gpus": gpus})
    cluster.join = lambda: cluster.add_node(**options)
    cluster.lose = lambda node: cluster.remove_node(node, allow_graceful=False)
    try:
        for _ in range(nodes):
            cluster.join()
        yield cluster
    finally:
        cluster.shutdown()


def cluster_searchers(node: Any = None) -> list[psutil.Process]:
    """The Searchers' processes on one node of a local cluster, or on all nodes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ancestors = [parent.pid for parent in process.parents()]
            there = node is None or node.all_processes["raylet"][0].process.pid in ancestors
            if process.cmdline()[2:] == [tba.SEARCHER_FLAG] and there:
                found.append(process)
    return found


def check_positions(positions: list[int], searchers: int) -> None:
    """Check that no group was lost or stored twice; groups in flight may be missing."""
    assert len(positions) == len(set(positions))
    for searcher in range(searchers):
        own = {position for position in positions if position % searchers == searcher}
        missing = next(p for p in range(searcher, 10**9, searchers) if p not in own)
        assert max(own) - missing < 16 * searchers


class ForkedRun:
    """A run forked by tests/starter.py, with the part of Popen's interface that tests use."""

    def __init__(self, args: list[str], stdout: IO, stderr: IO, **environment: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect("\0" + os.environ["TBA_STARTER"])
        request = json.dumps([args, os.environ | environment, os.getcwd()]).encode()
        socket.send_fds(self.connection, [request], [stdout.fileno(), stderr.fileno()])
        self.pid = self.receive()
        self.returncode: int | None = None

    def receive(self) -> int:
        answer = self.connection.recv(4, socket.MSG_WAITALL)
        assert len(answer) == 4, "tests/starter.py has ended"
        return struct.unpack("i", answer)[0]

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self.receive())
            self.connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the run to end; returns its exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            ready, _, _ = select.select([self.connection], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("tba.py", timeout)
        return self.poll()

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    args: list[str], stdout: IO, stderr: IO, interpreter: bool,
    environment: dict[str, str] | None = None, program: Path = ROOT / "tba.py",
) -> ForkedRun | subprocess.Popen:  # fmt: skip
    """Start tba.py, in a new interpreter if `interpreter` or if there is no starter.

    A run with its own `environment`, added to this process's, always gets a new interpreter: the
    starter has already imported what may depend on it.
    """
    if "TBA_STARTER" in os.environ and not interpreter and environment is None:
        return ForkedRun(args, stdout, stderr)
    return subprocess.Popen(
        [sys.executable, str(program), *args],
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        preexec_fn=restore_signals,
    )


def kill_all(process: ForkedRun | subprocess.Popen) -> None:
    """Kill all processes of a run."""
    for pid in processes_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


class Run:
    """A run of tba.py into which faults can be injected."""

    under_way: ClassVar[list] = []

    def __init__(
        self, out: Path, args: list[str], hooks: bool = True, interpreter: bool = False,
        environment: dict[str, str] | None = None, program: Path = ROOT / "tba.py",
    ) -> None:  # fmt: skip
        self.out, self.faults = out, out.parent / f"{out.name}-faults"
        self.faults.mkdir(exist_ok=True)
        os.environ["TBA_FAULTS"] = str(self.faults)
        more = ["--plugin", str(HOOKS)] if hooks else []
        self.log = open(out.parent / f"{out.name}.log", "a+")  # noqa: SIM115
        output = self.log, self.log
        self.process = start([*args, *more], *output, interpreter, environment, program)
        self.under_way.append(self)

    def text(self) -> str:
        """The output so far."""
        self.log.seek(0)
        return self.log.read()

    def until(self, done, what: str, alive: bool = True) -> None:
        """Wait for a condition; fail with the run's output on a timeout or if the run ends."""

        def there() -> bool:
            if done():
                return True
            assert not alive or self.process.poll() is None, f"{what}\n{self.text()}"
            return False

        wait_until(there, what, self.text)

    def latest(self) -> dict:
        """The metrics of the latest optimizer step."""
        return tba.read_lines(self.out / "metrics.jsonl")[-1]

    def reaches(self, step: int) -> None:
        """Wait until the run has logged this optimizer step."""
        self.until(lambda: steps_of(self.out) >= step, f"step {step}")

    def says(self, text: str, times: int = 1) -> None:
        """Wait until the output contains this text `times` times."""
        said = lambda: self.text().count(text) >= times
        self.until(said, f"{text!r} said", alive=False)

    def failed(self) -> list[int]:
        """The Searchers that have failed, in order, according to the run's warnings."""
        return [int(i) for i in re.findall(r"warning: Searcher (\d+) ", self.text())]

    def ends(self, code: int) -> str:
        """Wait for the run to end; check its exit code and that nothing is left; return output."""
        self.until(lambda: self.process.poll() is not None, "its end", alive=False)
        assert self.process.returncode == code, self.text()
        self.gone()
        return self.text()

    def gone(self) -> None:
        """Wait until all processes of the run are gone."""
        wait_until(lambda: not processes_of(self.process.pid), "every process gone", seconds=GONE)

    def noted(self, name: str) -> list[tuple[int, ...]]:
        """The complete lines of integers that the hooks wrote to a file."""
        path = self.faults / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    def want(self, fault: str, text: str = "") -> None:
        """Inject a fault into the first process that reaches its injection point."""
        whole = self.faults / f".{fault}"
        whole.write_text(text)
        whole.rename(self.faults / fault)

    def suffered(self, fault: str) -> None:
        """Wait until a process has hit the injected fault."""
        self.until(lambda: not (self.faults / fault).exists(), f"{fault} suffered")


def arguments(gsm8k: Path, out: Path, **flags: object) -> list[str]:
    """Flags of a very small run; a flag of value None is left out."""
    settings = {
        "task": "gsm8k",
        "model": gsm8k and gsm8k / "model",
        "dataset": gsm8k and gsm8k / "data",
        "output_dir": out,
        "engine": "transformers",
        "dtype": "float32",
        "num_searchers": 1,
        "steps": 4,
        "prompts_per_step": 4,
        "trained_per_prompt": 8,
        "searched_per_prompt": 8,
        "initial_trajectories": 32,
        "beta": 0.05,
        "learning_rate": 1e-4,
        "temperature": 1.0,
        "max_response_tokens": 32,
        "sequences_in_flight": 64,
        "eval_samples": 40,
        "searcher_timeout": 120,
        **flags,
    }
    return [
        part
        for name, value in settings.items()
        if value is not None
        for part in (f"--{name}", str(value))
    ]


def endless(gsm8k: Path, out: Path, **flags: object) -> list[str]:
    """Flags of a very small run that goes on until it is ended, with a sync after each step."""
    settings = {
        "steps": 100_000, "eval_every": 0, "eval_samples": 8, "save_every": 0, "sync_every": 1,
        "max_restarts": 20, "transfer_timeout": 6, "searcher_timeout": 20,
    }  # fmt: skip
    return arguments(gsm8k, out, **(settings | flags))


def judges_of(path):
    """Flags of the tiny TL;DR or red-teaming's models."""
    if (path / "reward").exists():
        return {"task": "tldr", "reward_model": path / "reward", "gold_reward_model": path / "gold"}
    return {
        "task": "redteam",
        "dataset": None,
        "victim_model": path / "victim",
        "victim_max_tokens": 8,
        "victim_samples": 2,
        "toxicity_model": path / "toxicity",
        "toxicity_label": "toxic",
        "sentence_model": path / "model",
    }


def run_tba(
    args: list[str], code: int = 0, timeout: float = 900, interpreter: bool = False,
    environment: dict[str, str] | None = None,
) -> tuple[str, str]:  # fmt: skip
    """Run tba.py to its end; returns (stdout, stderr) after checking the exit code."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(args, stdout, stderr, interpreter, environment)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        stdout.seek(0)
        stderr.seek(0)
        said = stdout.read(), stderr.read()
    if process.returncode is None:
        kill_all(process)
    assert process.returncode == code, f"exit code {process.returncode}\n{said[0]}\n{said[1]}"
    wait_until(lambda: not processes_of(process.pid), "every process gone", seconds=GONE)
    return said


def config_and_task(files: Path, out: Path, **flags: object) -> tuple[tba.Config, tba.Task]:
    """The resolved settings of a very small run, and its data."""
    tba.prepare_process()
    config = tba.resolve(tba.parse(arguments(files, out, **flags)))
    return config, tba.load_task(config)


def learner_of(files: Path, out: Path, **flags: object) -> tba.Learner:
    """A Learner of a very small run, without a Trainer."""
    config, task = config_and_task(files, out, **flags)
    return tba.Learner(config, task, tba.Ranks())


def trajectory(tokens: Any, **fields: Any) -> tba.Trajectory:
    """A trajectory of these tokens; log-probabilities and other fields are 0 unless given."""
    zeros = np.zeros(len(tokens), np.float32)
    version = fields.get("version", 0)
    defaults = {
        "tokens": np.array(tokens, np.int32), "logprobs": zeros, "ref_logprobs": zeros,
        "ended": True, "kl": 0.0, "temperature": 1.0, "reward": 0.0, "prompt_id": 0,
        "version": version, "last_version": version, "reference_version": 0,
    }  # fmt: skip
    return tba.Trajectory(**defaults | fields)


def plain_logprobs(
    model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (T,) and entropies (T,) of a response, by the full softmax alone."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long().to(model.device)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0], entropies


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model that was saved as one file, by name."""
    return load_file(folder / "model.safetensors")


def random_groups(
    task: tba.Task, B: int, K: int, longest: int = 24, first_prompt: int = 0, shortest: int = 1
) -> list[list[tba.Trajectory]]:
    """K random trajectories of each of B random prompts."""
    rng = np.random.default_rng(0)

    def row(prompt_id: int) -> tba.Trajectory:
        length = int(rng.integers(shortest, longest))
        return trajectory(
            rng.integers(0, len(task.tokenizer), length),
            ref_logprobs=-rng.uniform(0.1, 5, length).astype(np.float32),
            reward=float(rng.integers(0, 2)),
            prompt_id=prompt_id,
        )

    prompts = (first_prompt + rng.permutation(50)[:B]).tolist()
    return [[row(prompt_id) for _ in range(K)] for prompt_id in prompts]


def without_searchers(patch: pytest.MonkeyPatch) -> None:
    """Have runs of this process train on random groups, without Searchers.

    Their checkpoints have a group that has arrived and is not stored yet.
    """

    def start(processes: tba.SearcherProcesses) -> None:
        processes.channel = tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30))
        processes.receiving = Future()

    def train(trainer: tba.Trainer) -> None:
        while trainer.step < trainer.config.steps:
            trainer.saving.exception()  # or saving would wait for it, and store the inbox
            trainer.poll()
            rows = random_groups(trainer.task, 5, 8, first_prompt=trainer.step)
            groups = []
            for trajectories in rows:
                trajectories[0].reference_version = trainer.sync.reference_version
                groups.append(tba.Group(trainer.searchers.first_missing, trajectories))
                trainer.searchers.record_arrival(groups[-1].index)
            trainer.arrived = groups[:-1]
            for group in groups[:-1]:
                trainer.store(group)
            trainer.train_step(rows[:-1])
            trainer.inbox = groups[-1:]
            trainer.save_if_due()
        trainer.evaluations.due = False

    patch.setattr(tba.SearcherProcesses, "start", start)
    patch.setattr(tba.SearcherProcesses, "start_missing", lambda processes: None)
    patch.setattr(tba.Trainer, "run_asynchronous", train)
