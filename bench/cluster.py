"""The overhead of more Searchers on the Trainer, measured on one machine without GPUs.

    python bench/cluster.py --searchers 1 4 16 64                      # about ten minutes
    python bench/cluster.py --searchers 64 --kill_every 5              # one is killed every 5 s
    python bench/cluster.py --searchers 4 --cluster auto               # unknown flags go to tba.py

Each size is a run of tba.py with this file as its plug-in, which sleeps in place of GPU work: a
Searcher delivers a group of 24 responses of 250 tokens every 0.3 s, and an optimizer step takes
0.7 s (both close to the paper's GSM8K). Rewards and log pi_ref cost nothing. Everything else
is real: processes, queues, messages, weight transfers, probes, the replay buffer, restarts.

On a machine with few cores, rely on CPU time: wall-clock includes waiting for a core.
"""

import argparse
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import numpy as np
import torch

import tba

FILES = ROOT / "tests" / "models" / "gsm8k"
RESPONSES = 24
TOKENS = 250

# ------------------------------------------------------------------------------------ the plug-in


@dataclass
class Durations:
    """Durations that the plug-in simulates."""

    group_seconds: float = tba.flag(0.3, "Seconds a Searcher takes to generate a group.")
    step_seconds: float = tba.flag(0.7, "Seconds an optimizer step takes.")


tba.FLAGS.append(Durations)


class SleepingEngine(tba.TransformersEngine):
    """Returns random responses at a fixed rate; the model is used for probes only."""

    POLL = 0.05  # seconds between two calls of `between_steps`
    due = 0.0  # scheduled completion time of the latest group

    def step(self, between_steps=lambda: None):
        request = self.waiting.popleft()
        self.due = max(self.due, time.monotonic() - 0.1) + self.config.group_seconds
        while (left := self.due - time.monotonic()) > 0:
            time.sleep(min(left, self.POLL))
            between_steps()
        vocabulary = self.model.config.vocab_size
        tokens = np.random.randint(0, vocabulary, (request.n, TOKENS)).astype(np.int32)  # noqa: NPY002
        logprobs = np.full((request.n, TOKENS), -1, np.float32)
        ended = np.ones(request.n, bool)
        versions = [(self.version, self.version)] * request.n
        return [tba.Completion(request, list(tokens), list(logprobs), ended, versions)]


tba.ENGINES["sleeping"] = SleepingEngine

if multiprocessing.parent_process() or tba.SEARCHER_FLAG in sys.argv:  # a Searcher

    def token_logprobs(scorer, groups, config, temperature=None):
        """A free stand-in for log pi_ref, which a GPU would compute."""
        return [np.full(len(tokens), -1, np.float32) for _, own in groups for tokens in own]

    tba.token_logprobs = token_logprobs
    tba.Task.response_texts = lambda task, responses: ["7"] * len(responses)

spent: Counter[str] = Counter()  # seconds and events since the start, by name
nested = np.zeros(2)  # wall-clock and CPU seconds in measured functions, outermost calls


def clocks() -> np.ndarray:
    """Wall-clock time and this thread's CPU time."""
    return np.array([time.perf_counter(), time.thread_time()])


def measure(owner, method: str, name: str) -> None:
    """Accumulate a function's time under `name`, excluding measured functions it calls."""
    original = getattr(owner, method)

    def measured(*args, **kwargs):
        in_main = threading.current_thread() is threading.main_thread()
        before = nested.copy()
        start = clocks()
        try:
            return original(*args, **kwargs)
        finally:
            took = clocks() - start
            own = took - (nested - before) * in_main
            spent[f"{name}_count"] += 1
            spent[f"{name}_wall"] += float(own[0])
            spent[f"{name}_cpu"] += float(own[1])
            if in_main:
                nested[:] = before + took

    setattr(owner, method, measured)


def sleeping_step(learner, minibatch, now, step):
    """Stands in for Learner.step: sleeps and perturbs the weights."""
    start = time.perf_counter()
    time.sleep(learner.config.step_seconds)
    with torch.no_grad():
        for weights in learner.model.parameters():
            weights += 1e-5 * torch.randn_like(weights)
    names = ("loss", "log_z", "entropy", "grad_norm", "optimizer_seconds")
    names += ("sampler_gap", "sampler_z")
    seconds = time.perf_counter() - start
    return {**dict.fromkeys(names, 0.0), "forward_backward_seconds": seconds}


tba.Learner.step = sleeping_step
write = tba.StepLog.write


def write_measurements(log, measured, *args):
    """Add the measurements to the step's metrics."""
    measured |= spent
    measured["thread_cpu"] = time.thread_time()
    searchers = log.trainer.searchers
    measured["groups"] = searchers.first_missing + len(searchers.arrived_positions)
    measured["starts"] = log.trainer.searchers.starts
    write(log, measured, *args)


tba.StepLog.write = write_measurements
for owner, method, name in [
    (tba.Learner, "step", "step"),
    (tba.Trainer, "handle_messages", "take"),
    (tba.Trainer, "store", "store"),
    (tba.WeightSync, "begin_if_due", "sync"),
    (tba.WeightSync, "poll", "sync"),
    (tba.WeightSync, "on_loaded", "sync"),
    (tba.WeightSync, "send", "send"),  # `send` and `form` run in a thread
    (tba.WeightChannel, "form", "form"),
    (tba.SearcherProcesses, "reap", "failures"),
    (tba.SearcherProcesses, "restart", "failures"),
    (tba.StepLog, "write", "log"),
    (tba.RecentOrReward, "sample", "draw"),
]:
    measure(owner, method, name)

# ------------------------------------------------------------------------------------- the driver

PARTS = ("take", "sync", "failures", "store", "draw", "log")


def run(args: argparse.Namespace, M: int, flags: list[str], folder: Path) -> dict[str, float]:
    """Run tba.py with M Searchers; returns the measurements by name."""
    # here, as runs that have this plug-in do not need them
    import psutil
    from harness import Run, arguments, helpers_of, steps_of

    out = folder / f"searchers-{M}"
    settings = {
        "plugin": __file__, "engine": "sleeping", "num_searchers": M,
        "steps": 10**6, "prompts_per_step": 7, "trained_per_prompt": 20,
        "searched_per_prompt": RESPONSES, "sequences_in_flight": RESPONSES,
        "kept_per_prompt": RESPONSES, "max_response_tokens": 128, "max_recent_draws": 0,
        "eval_every": 0, "eval_samples": 8, "save_every": 0, "max_restarts": 1000,
    }  # fmt: skip
    own = Run(out, [*arguments(FILES, out, **settings), *flags], hooks=False)
    trainer = psutil.Process(own.process.pid)

    def searchers() -> list[psutil.Process]:
        """The Searchers' processes, children of the fork server."""
        return server.children()

    own.reaches(5)
    server, manager = helpers_of(trainer)
    parts = {"Trainer": trainer, "Manager": manager}
    cores = lambda: {name: sum(p.cpu_times()[:2]) for name, p in parts.items()}
    begin = time.monotonic()
    first = steps_of(out) - 1
    cpu = cores()
    read = manager.io_counters().read_chars
    kills = 0
    while time.monotonic() < begin + args.seconds:
        time.sleep(0.2)
        if args.kill_every and time.monotonic() > begin + args.kill_every * (kills + 1):
            kills += 1
            random.choice(searchers()).kill()
    seconds = time.monotonic() - begin
    usage = {f"{name}, cores": (spent - cpu[name]) / seconds for name, spent in cores().items()}
    read = (manager.io_counters().read_chars - read) / seconds
    for name, process in parts.items():
        usage[f"{name}, private MB"] = process.memory_full_info().uss / 2**20
        usage[f"{name}, descriptors"] = process.num_fds()
    private = [p.memory_full_info().uss / 2**20 for p in searchers()]
    usage["a Searcher, private MB"] = sum(private) / max(1, len(private))
    steps = tba.read_lines(out / "metrics.jsonl")[first:]
    trainer.terminate()
    text = own.ends(128 + signal.SIGTERM)
    assert "Traceback" not in text, text

    over = lambda name: steps[-1].get(name, 0) - steps[0].get(name, 0)  # of a cumulative metric
    n = over("step")
    wall = over("seconds")
    syncs = max(1, over("send_count"))
    outside = (over("thread_cpu") - over("step_cpu")) / n  # CPU seconds per step, without learning
    step_seconds = over("step_wall") / n
    return {
        "Searchers": M,
        "groups/s": over("groups") / wall,
        "MB/s": read / 1e6,
        "busy, wall": over("step_wall") / wall,
        "busy, CPU": step_seconds / (step_seconds + outside),
        **{f"{part}, CPU ms/step": 1000 * over(f"{part}_cpu") / n for part in PARTS},
        **{f"{part}, wall ms/step": 1000 * over(f"{part}_wall") / n for part in PARTS},
        "sync, CPU ms": 1000 * over("sync_cpu") / syncs,
        "syncs": over("send_count"),
        "transfer, s": over("send_wall") / syncs,
        "forming a Gloo group, s": over("form_wall") / max(1, over("form_count")),
        "kills": kills,
        "restarts": over("starts"),
        **usage,
    }


def main() -> None:
    """Run each size and print a table with a row per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=60, help="seconds measured, after warmup")
    parser.add_argument("--kill_every", type=float, default=0, help="seconds between kills; 0: off")
    args, flags = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="tba-cluster-"))
    rows = []
    for M in args.searchers:
        rows.append(run(args, M, flags, folder))
        print(json.dumps(rows[-1]), flush=True)
    for name in rows[0]:
        print(f"| {name} |", " | ".join(f"{row[name]:.4g}" for row in rows), "|")


if __name__ == "__main__":
    main()
