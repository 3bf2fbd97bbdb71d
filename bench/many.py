"""What many Searchers cost the Trainer: 1, 16 and 64 of them, with optimizer steps of one length.

    python bench/many.py [--searchers 1 16 64] [--seconds 60]

The Searchers stand in for GPUs: each generates with a tiny model and sleeps at every decode step,
so that two cores suffice for 64 of them; the Trainer sleeps at every step. All else is tba.py: the
Manager's queues, weight groups of 65, transfers to all, the restart of one that is killed. The
table has what the Trainer loses to each; the paper's Table 6 is slower with 64 GPUs than with 16.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STEP_SECONDS = 0.3
DECODE_SECONDS = 0.6


def slow_down(notes: Path) -> None:
    """In a run's processes: sleep, and note what the Trainer's seconds go to."""
    import tba

    clock = time.perf_counter
    taken: dict[str, list] = {}
    decode = tba.DecodeHook.__call__
    train = tba.Learner.step

    def slow_decode(self, ids, scores):
        if scores is None:  # the stopping criterion: once a decode step
            time.sleep(DECODE_SECONDS)
        return decode(self, ids, scores)

    def slow_step(self, groups, now):
        time.sleep(STEP_SECONDS)
        if self.scheduler.last_epoch == 1:  # what came before was waiting for the first groups
            taken["take_messages"].clear()
            taken["collect"].clear()
        (notes / "taken.json").write_text(json.dumps(taken))
        return train(self, groups, now)

    def timed(owner: type, name: str) -> None:
        """Note the seconds of each call of a method."""
        original = getattr(owner, name)

        def call(self, *args, **kwargs):
            start = clock()
            result = original(self, *args, **kwargs)
            taken.setdefault(name, []).append(clock() - start)
            return result

        setattr(owner, name, call)

    def between(first: str, last: str, what: str) -> None:
        """Note the seconds from the beginning of one method of WeightSync to a state's end."""
        begun = getattr(tba.WeightSync, first)
        polled = tba.WeightSync.poll
        under_way: list[float] = []

        def begin(self, *args, **kwargs):
            under_way[:] = [clock()]
            begun(self, *args, **kwargs)

        def poll(self, step):
            polled(self, step)
            if under_way and not getattr(self, last):
                taken.setdefault(what, []).append(clock() - under_way.pop())

        setattr(tba.WeightSync, first, begin)
        tba.WeightSync.poll = poll

    tba.DecodeHook.__call__ = slow_decode
    tba.Learner.step = slow_step
    timed(tba.Trainer, "take_messages")
    timed(tba.Trainer, "collect")
    timed(tba.WeightSync, "_begin")
    timed(tba.WeightSync, "_form_group")
    between("_send", "transfer", "until all have loaded")
    between("_form_group", "forming", "until the group is formed")


if os.environ.get("TBA_MANY"):  # in a run's processes
    slow_down(Path(os.environ["TBA_MANY"]))


def lines(path: Path) -> list[dict]:
    """The records of a run's metrics so far."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def measure(searchers: int, seconds: float, folder: Path) -> dict[str, float]:
    """A run of so many Searchers, in which one is killed."""
    sys.path.insert(0, str(ROOT / "tests"))
    from harness import searcher_pids

    folder.mkdir()
    flags = {
        "output_dir": folder / "run", "task_file": __file__, "engine": "transformers",
        "num_searchers": searchers, "steps": 100_000, "eval_every": 0, "eval_samples": 1,
        "save_every": 0, "initial_trajectories": 64, "sync_every": 10, "prompts_per_step": 4,
        "trained_per_prompt": 8, "searched_per_prompt": 8, "sequences_in_flight": 16,
        "max_response_tokens": 8, "transfer_timeout": 120,
    }  # fmt: skip
    command = ["bash", str(ROOT / "run_gsm8k.sh"), "--tiny"]
    command += [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["TBA_MANY"] = str(folder)
    path = folder / "run" / "metrics.jsonl"
    with open(folder / "log", "w") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    begun = time.monotonic()
    try:
        while not lines(path):
            time.sleep(0.5)
            assert run.poll() is None, (folder / "log").read_text()
        started = time.monotonic() - begun
        time.sleep(seconds)
        rows = lines(path)
        taken = json.loads((folder / "taken.json").read_text())
        os.kill(searcher_pids(run.pid)[-1], signal.SIGKILL)
        killed = time.monotonic()
        while lines(path)[-1]["searchers_alive"] == searchers:
            time.sleep(0.1)
        while lines(path)[-1]["searchers_alive"] < searchers:
            time.sleep(0.1)
        restarted = time.monotonic() - killed
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    rows = rows[2:]
    steps = len(rows) - 1
    wall = rows[-1]["seconds"] - rows[0]["seconds"]
    arrived = rows[-1]["buffer_prompts"] - rows[0]["buffer_prompts"]
    total = lambda name: 1000 * sum(taken[name]) / steps
    return {
        "searchers": searchers,
        "seconds until the first step": started,
        "seconds a step": wall / steps,
        "groups a second": arrived / wall,
        "drain and store, ms a step": total("take_messages") + total("collect"),
        "begin a sync, ms": 1000 * float(np.median(taken["_begin"][1:])),
        "until all have loaded, s": float(np.median(taken["until all have loaded"][1:])),
        "begin to form a group, ms": 1000 * float(np.median(taken["_form_group"])),
        "until it is formed, s": float(np.median(taken["until the group is formed"])),
        "killed until it searches again, s": restarted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "many.json")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for searchers in args.searchers:
            results.append(measure(searchers, args.seconds, Path(folder) / str(searchers)))
            print(json.dumps(results[-1]), flush=True)
    for name in results[0]:
        print(f"{name:36s}" + "".join(f"{result[name]:10.3g}" for result in results))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
