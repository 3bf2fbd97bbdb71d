"""A tiny run under random faults: no group may be lost or counted twice.

    python bench/soak.py --minutes 10 --faults 40

Three Searchers are killed, hung or made to raise at random points, also during weight transfers.
Prints the injected faults and a summary. Exits with 1 if a group was lost or stored twice, if
weights were wrong, or if the run did not end cleanly with a checkpoint.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import ROOT, read_lines  # beside this file; it finds the tests' helpers
from harness import Run, arguments, check_positions

PHASES = ("generating", "joining", "receiving", "received", "loading")
FAULTS = ["raise", *(f"{kind}-{phase}" for kind in ("die", "hang") for phase in PHASES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--files", type=Path, default=ROOT / "tests" / "models" / "gsm8k")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    out = folder / "run"
    flags = {
        "steps": 10**6, "eval_every": 500, "eval_samples": 8, "save_every": 500, "sync_every": 1,
        "num_searchers": 3, "max_restarts": 100, "transfer_timeout": 3, "searcher_timeout": 10,
    }  # fmt: skip
    run = Run(out, arguments(args.files, out, **flags))
    run.until(lambda: len({index % 3 for index, *_ in run.noted("stored")}) == 3, "first groups")
    rng = random.Random(0)
    injected: Counter[str] = Counter()
    end = time.monotonic() + 60 * args.minutes
    while sum(injected.values()) < args.faults and time.monotonic() < end:
        fault = rng.choice(FAULTS)
        failures = len(run.failed())
        run.want(fault)
        run.suffered(fault)
        run.until(lambda: len(run.failed()) > failures, f"{fault} noticed")  # noqa: B023
        injected[fault] += 1
        time.sleep(rng.uniform(0, 60 * args.minutes / args.faults / 2))
    os.kill(run.process.pid, signal.SIGTERM)
    output = run.ends(128 + signal.SIGTERM)
    stored = [index for index, *_ in run.noted("stored")]
    metrics = read_lines(out / "metrics.jsonl")
    gap = max(m["logprob_gap"] for m in metrics)
    print(dict(injected))
    print(
        f"{sum(injected.values())} faults, {len(run.failed())} restarts, {len(metrics)} steps, "
        f"{len(stored)} groups; largest logprob_gap {gap:.1g}"
    )
    check_positions(stored, 3)
    assert gap < 1e-3
    assert any(out.glob("checkpoint-*"))
    assert "Traceback" not in output.split("SIGTERM")[-1]
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
