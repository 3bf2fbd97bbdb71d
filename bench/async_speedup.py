"""Asynchronous against lockstep training of the tiny GSM8K policy, as a ratio taken in one run.

    python bench/async_speedup.py [--steps 60] [--repeats 2] [FLAGS OF tba.py...]

Runs alternate between the two modes; each trains the same number of steps of the same size.
Reported are seconds per optimizer step, their ratio, and the held-out accuracy reached.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = {"lockstep": ["--synchronous", "--sync_every", "1"], "asynchronous": []}


def train(flags: list[str], out: Path, steps: int) -> tuple[float, float]:
    """One tiny run; returns (seconds per step, final accuracy)."""
    shared = ["--steps", str(steps), "--eval_every", "0", "--output_dir", str(out)]
    command = ["bash", str(ROOT / "run_gsm8k.sh"), "--tiny", *shared, *flags]
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable})
    lines = (out / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    # with --eval_samples the last record is that of the whole held-out set
    accuracy = json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["accuracy"]
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1), accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    args, more = parser.parse_known_args()
    results: dict[str, list] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for name, flags in MODES.items():
                out = Path(folder) / f"{name}-{repeat}"
                seeded = [*flags, "--seed", str(repeat), *more]
                results[name].append(train(seeded, out, args.steps))
    for name, runs in results.items():
        per_step, accuracy = (statistics.mean(column) for column in zip(*runs, strict=True))
        print(f"{name}: {1e3 * per_step:.0f} ms per step, accuracy {accuracy:.3f} after it")
    pairs = zip(results["lockstep"], results["asynchronous"], strict=True)
    ratios = [lockstep[0] / asynchronous[0] for lockstep, asynchronous in pairs]
    print(f"speed-up: {statistics.mean(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
