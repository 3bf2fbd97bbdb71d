"""What the replay buffer costs: adding groups, sampling batches, bytes a trajectory.

python bench/replay.py [--trajectories 1000000] [--repeats 200]
"""

import argparse
import json
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba


def make_group(rng: np.random.Generator, prompt_id: int, S: int, tokens: range) -> tba.Group:
    """A group of S random responses."""
    rows = []
    for T in rng.integers(tokens.start, tokens.stop, S):
        arrays = rng.integers(0, 32_000, T, np.int32), rng.standard_normal(T, np.float32)
        ref_logprobs = rng.standard_normal(T, np.float32)
        rows.append(tba.Trajectory(*arrays, True, rng.random(), ref_logprobs, prompt_id, 0, 0))
    return tba.Group(prompt_id, rows, searcher=0, number=0)


def median_ms(repeats: int, work) -> float:
    """Median milliseconds of `work(i)`."""
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def red_team(repeats: int) -> float:
    """Adding 16 attacks of 5 to 20 tokens to a full buffer of 5,000, near-duplicates looked for."""
    config = tba.Config(kept_per_prompt=5000, evict="lowest_reward", near_duplicate=0.25)
    buffer, rng = tba.ReplayBuffer(config), np.random.default_rng(0)
    groups = [make_group(rng, 0, 16, range(5, 21)) for _ in range(repeats)]
    for _ in range(5):
        buffer.add(make_group(rng, 0, 1000, range(5, 21)))
    assert len(buffer) == 5000
    return median_ms(repeats, lambda i: buffer.add(groups[i]))


def many_prompts(trajectories: int, repeats: int) -> dict[str, float]:
    """Groups of 20 and batches of 7 x 20, as GSM8K's, in a buffer of many trajectories."""
    buffer, rng = tba.ReplayBuffer(tba.Config()), np.random.default_rng(0)
    groups = [make_group(rng, i, 20, range(10, 91)) for i in range(repeats)]
    tracemalloc.start()
    for i in range(trajectories // 20):
        buffer.add(make_group(rng, repeats + i, 20, range(10, 91)))
    size = tracemalloc.get_traced_memory()[0] / len(buffer)
    tracemalloc.stop()
    buffer.begin_window()
    add = median_ms(repeats, lambda i: buffer.add(groups[i]))
    buffer.begin_window()
    sample = median_ms(repeats, lambda _: buffer.sample(7, 20, 0.5, 1.0))
    return {"add_ms": add, "sample_ms": sample, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1_000_000, help="most of them")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "replay.json")
    args = parser.parse_args()
    results: dict = {"red_team_add_ms": red_team(args.repeats)}
    print(f"16 attacks into a full buffer of 5,000: {results['red_team_add_ms']:.1f} ms")
    print("trajectories   add 20, ms   sample 7 x 20, ms   bytes a trajectory (50 tokens)")
    for n in (10_000, 100_000, 1_000_000):
        if n <= args.trajectories:
            results[n] = many_prompts(n, args.repeats)
            add, sample, size = results[n].values()
            print(f"{n:12,} {add:12.3f} {sample:19.3f} {size:20,.0f}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
