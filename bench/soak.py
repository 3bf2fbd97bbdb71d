"""Hours in minutes: tiny training under random faults, with every process's memory watched.

    python bench/soak.py --minutes 30 --every 30        # make the model first: run_gsm8k.sh --tiny

Every --every seconds one Searcher (of three) is killed, killed while it joins a weight group (which
costs the other members their processes too), killed or stopped while it receives or loads weights,
stopped so that it hangs, fails with an exception or for want of memory, or strangers talk to the
run's ports. Prints what was injected and
survived, the slopes of memory, and the accuracies; exits with 1 if something was lost, leaked or
forgotten. A group that a Searcher had put on the queue when it was killed must be stored; what it
had in flight is not made again.
"""

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

import tiny
from harness import Run, processes_of, read_lines, steps_of
from test_faults import listening, share_memory
from test_peers import attacks, talk

FAULTS = ("kill", "die-receiving", "die-loading", "die-joining", "hang", "hang-loading", "raise",
          "out-of-memory", "strangers")  # fmt: skip
SETTLING = 45  # seconds


def flags(files: Path, out: Path, faults: bool) -> list[str]:
    settings = {
        "task": "gsm8k", "model": files / "model", "dataset": out.parent / "data.jsonl",
        "output_dir": out, "engine": "transformers", "num_searchers": 3,
        "steps": 10_000_000 if faults else 200, "prompts_per_step": 4, "trained_per_prompt": 8,
        "searched_per_prompt": 8, "initial_trajectories": 256, "beta": 0.05,
        "learning_rate": 1e-4, "max_grad_norm": 1, "temperature": 1.0, "max_response_tokens": 32,
        "sequences_in_flight": 64, "kept_per_prompt": 32, "eval_every": 100, "eval_samples": 100,
        "save_every": 200, "max_restarts": 10_000, "searcher_timeout": 20, "transfer_timeout": 10,
        "recent_probability": 0.9,
    }  # fmt: skip
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def inject(run: Run, fault: str, rng: random.Random) -> None:
    """Have one fault befall the run."""
    if fault == "kill":
        os.kill(rng.choice(run.searchers()), signal.SIGKILL)
    elif fault == "hang":
        os.kill(rng.choice(run.searchers()), signal.SIGSTOP)
    elif fault == "strangers":
        addresses = []
        for pid in processes_of(run.process.pid):
            with contextlib.suppress(psutil.Error):  # it may be gone by now
                addresses += listening(pid)
        for address in addresses:
            for messages in [[secrets.token_bytes(50)], *attacks("/nowhere/at/all").values()]:
                with contextlib.suppress(OSError):  # and so may the port
                    talk(address, *messages, patience=0.1)
    else:
        run.want(fault)


def sample(run: Run, start: float, samples: dict[int, list]) -> None:
    """Note memory (MiB), open files and threads of each process of the run."""
    for pid in processes_of(run.process.pid):
        try:
            process = psutil.Process(pid)
            row = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        samples.setdefault(pid, []).append((time.monotonic() - start, *row))


def slope(rows: np.ndarray, column: int) -> float:
    """Growth per minute by least squares."""
    return float(np.polyfit(rows[:, 0] / 60, rows[:, column], 1)[0])


def accuracies(out: Path) -> list[float]:
    records = read_lines(out / "eval.jsonl")
    return [record["accuracy"] for record in records if record["split"] == "held_out"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=30, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share_memory", action="store_true", help="weights are not sent, as on one GPU"
    )
    args = parser.parse_args()
    files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache")) / "tiny-gsm8k"
    tiny.make("gsm8k", files)
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="tba-soak-"))
    train = sorted((files / "data").glob("train*"))[0].read_text().splitlines()
    (folder / "data.jsonl").write_text("\n".join(train[:700]) + "\n")  # the buffer fills early
    shared = set(os.listdir("/dev/shm"))

    calm = Run(folder / "calm", flags(files, folder / "calm", faults=False))
    calm.ends(0, seconds=600)
    if args.share_memory:
        share_memory(folder / "run")
    run = Run(folder / "run", flags(files, folder / "run", faults=True))
    run.reaches(1)
    start, due, injected, order = time.monotonic(), args.every / 2, Counter(), []
    samples: dict[int, list] = {}
    while (now := time.monotonic() - start) < 60 * args.minutes:
        if run.process.poll() is not None:
            print(run.text())
            return 1
        sample(run, start, samples)
        if now > due and run.searchers():
            order = order or rng.sample(FAULTS, len(FAULTS))  # each kind as often as the others
            fault = order.pop()
            inject(run, fault, rng)
            injected[fault] += 1
            due += args.every
        time.sleep(1)
    for _ in range(SETTLING):  # a weight group that was given up may hold its sockets for a while
        sample(run, start, samples)
        time.sleep(1)
    steps, text = steps_of(folder / "run"), run.text()
    pending = [fault for fault in FAULTS if (run.faults / fault).exists()]
    run.process.send_signal(signal.SIGTERM)
    run.ends(143)

    rows = {pid: np.array(rows) for pid, rows in samples.items()}
    skip = min(120, 0.4 * 60 * args.minutes)  # libraries are loaded, the buffer fills
    lasting = {pid: r[r[:, 0] > skip] for pid, r in rows.items() if r[0, 0] < 5}
    end = max(r[-1, 0] for r in rows.values())
    lasting = {pid: r for pid, r in lasting.items() if len(r) and r[-1, 0] > end - 5}
    names = {run.process.pid: "Trainer"}
    print(f"{args.minutes:g} minutes, {steps} optimizer steps")
    leaks = False
    for pid, r in lasting.items():
        memory = slope(r, 1)
        # while Searchers are away less is open: the most at first, beside the least at last
        first, last = r[:SETTLING, 2:].max(0), r[-SETTLING:, 2:].min(0)
        name = names.get(pid, "Manager or helper")
        print(
            f"{name:16s} {r[-1, 1]:7.1f} MiB {memory:+.3f} MiB/min; files {first[0]:.0f} at first, "
            f"{last[0]:.0f} at last; threads {first[1]:.0f}, {last[1]:.0f}"
        )
        growth = memory * (r[-1, 0] - r[0, 0]) / 60
        # the heap of the Trainer holds more and more free for a while; what is in use tells leaks
        bound = 0.05 * r[-1, 1] if name == "Trainer" else max(8, 0.02 * r[-1, 1])
        leaks |= growth > bound or any(last - first > (4, 2))
    heap = np.loadtxt(run.faults / "heap") - (start, 0)
    heap = heap[heap[:, 0] > skip]
    metrics = read_lines(folder / "run" / "metrics.jsonl")
    held = metrics[-1]["buffer_trajectories"]
    print(
        f"of the Trainer's heap in use: {heap[-1, 1]:.1f} MiB {slope(heap, 1):+.3f} MiB/min, with "
        f"{held} trajectories in the buffer at last"
    )
    leaks |= slope(heap, 1) * np.ptp(heap[:, 0]) / 60 > 8
    own = [r[r[:, 0] > r[0, 0] + 60] for pid, r in rows.items() if pid not in lasting]
    slopes = [slope(r, 1) for r in own if len(r) > 45]
    if slopes:
        print(
            f"Searchers: median {np.median(slopes):+.3f} MiB/min over {len(slopes)} lives of two "
            "minutes and more, their first minute apart"
        )
    print("injected: " + ", ".join(f"{n} x {fault}" for fault, n in sorted(injected.items())))
    print(f"Searchers lost and restarted: {len(run.failed())}; transfers that failed: "
          f"{text.count('weights failed: ')}; faults that nobody met yet: {pending}")  # fmt: skip
    sent, stored = run.noted("sent"), run.noted("stored")
    unstored, twice = set(sent) - set(stored), len(stored) - len(set(stored))
    print(f"groups sent {len(sent)}, lost {len(unstored)}, stored twice {twice}")
    late, calm_end = accuracies(folder / "run")[-8:], accuracies(folder / "calm")[-1]
    print(f"accuracy {np.median(late):.3f} (median of the last {len(late)} evaluations; worst "
          f"{min(late):.3f}); without faults {calm_end:.3f}")  # fmt: skip
    waits = [m["sync_seconds"] + m["sync_wait_seconds"] for m in metrics]
    print(f"longest halt of the Trainer at a transfer: {max(waits):.1f} s")
    left = set(os.listdir("/dev/shm")) - shared
    print(
        f"left in shared memory: {sorted(left) or 'nothing'}; leaks: {'yes' if leaks else 'none'}"
    )
    worse = np.median(late) < calm_end - 0.1
    if leaks or unstored or twice or left or worse or len(pending) > 1:
        print(f"failed; the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    finally:
        for run in Run.under_way:
            for pid in processes_of(run.process.pid):
                os.kill(pid, signal.SIGKILL)
    sys.exit(code)
