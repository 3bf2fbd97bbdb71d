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
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba


def make_group(rng: np.random.Generator, prompt_id: int, S: int, tokens: range) -> tba.Group:
    """A group of S random responses."""
    rows = []
    for T in rng.integers(tokens.start, tokens.stop, S):
        trajectory = tba.Trajectory(
            tokens=rng.integers(0, 32_000, T, np.int32),
            logprobs=rng.standard_normal(T, np.float32),
            ended=True,
            reward=rng.random(),
            ref_logprobs=rng.standard_normal(T, np.float32),
            prompt_id=prompt_id,
            version=0,
            reference=0,
        )
        rows.append(trajectory)
    return tba.Group(prompt_id, rows, searcher=0, number=0)


def median_ms(repeats: int, work) -> float:
    """Median milliseconds of `work(i)`."""
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


WORDS = 30_000
FREQUENCY = 1 / np.arange(1, WORDS + 1)  # of a word, by its rank


def attacks(rng: np.random.Generator, count: int, width: int) -> tba.Group:
    """A group of attacks of 5 to 20 tokens, as frequent as the words of a language."""
    group = make_group(rng, 0, count, range(5, 21))
    for t in group.trajectories:
        share = FREQUENCY / FREQUENCY.sum()
        t.tokens = rng.choice(WORDS, len(t.tokens), p=share).astype(np.int32)
        t.reward = -float(rng.exponential(2))  # a mean log-probability
        if width:
            vector = rng.standard_normal(width, np.float32)
            t.vector = vector / np.linalg.norm(vector)
    return group


def training(seconds: float) -> None:
    """A stand-in for optimizer steps: matrix products in the training thread."""
    matrix = torch.randn(256, 256)
    end = time.thread_time() + seconds  # of this thread's own work
    while time.thread_time() < end:
        matrix @ matrix


def red_team(size: int, repeats: int, by: str) -> dict[str, float]:
    """A full buffer for one prompt, near-duplicates looked for: groups of 16, batches of 16 x 8."""
    limit = 0.25 if by == "edit" else 0.7
    width = 384 if by == "cosine" else 0
    config = tba.Config(kept_per_prompt=size, near_duplicate=limit, near_duplicate_by=by)
    buffer = tba.ReplayBuffer(config)
    rng = np.random.default_rng(0)
    stored = buffer.trajectories[0] = buffer._empty_list()
    while len(stored) < size:  # without a comparison, which would take long
        for t in attacks(rng, 1000, width).trajectories:
            stored.add(t)
    buffer.count = len(stored)
    buffer.highest = max(t.reward for t in stored)
    groups = [attacks(rng, 16, width) for _ in range(3 * repeats)]
    add = median_ms(repeats, lambda i: buffer.add(groups[i]))
    buffer.begin_window()
    sample = median_ms(repeats, lambda _: buffer.sample(16, 8, 0.5, 1.0))

    def step(i: int) -> None:
        """A group arrives, and training goes on while the thread adds it."""
        buffer.add_later(groups[i])
        training(seconds=0.2)

    alone = median_ms(repeats // 4, lambda _: training(seconds=0.2))
    loop = median_ms(repeats // 4, lambda i: step(repeats + i)) - alone
    buffer.finish_adding()
    return {"add_ms": add, "loop_ms": loop, "sample_ms": sample}


def many_prompts(trajectories: int, repeats: int) -> dict[str, float]:
    """Groups of 20 and batches of 7 x 20, as GSM8K's, in a buffer of many trajectories."""
    buffer, rng = tba.ReplayBuffer(tba.Config()), np.random.default_rng(0)
    groups = [make_group(rng, i, 20, range(10, 91)) for i in range(repeats)]
    for i in range(trajectories // 20):
        buffer.add(make_group(rng, repeats + i, 20, range(10, 91)))
    buffer.begin_window()
    add = median_ms(repeats, lambda i: buffer.add(groups[i]))
    buffer.begin_window()
    sample = median_ms(repeats, lambda _: buffer.sample(7, 20, 0.5, 1.0))
    return {"add_ms": add, "sample_ms": sample}


def bytes_per_trajectory() -> float:
    """Of 50 tokens in the mean. Apart from the times, which tracing would spoil."""
    buffer, rng = tba.ReplayBuffer(tba.Config()), np.random.default_rng(0)
    tracemalloc.start()
    for i in range(500):
        buffer.add(make_group(rng, i, 20, range(10, 91)))
    size = tracemalloc.get_traced_memory()[0] / len(buffer)
    tracemalloc.stop()
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1_000_000, help="most of them")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "replay.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as the Trainer beside Searchers on two cores
    results: dict = {"red_team": {}}
    print("one prompt, near-         trajectories   a group of 16, ms:   batch of 16 x 8:")
    print("duplicates by                            thread       loop   sample, ms")
    for by in ("edit", "cosine"):
        for size in (5_000, 150_000):
            figures = red_team(size, args.repeats, by)
            results["red_team"][f"{by} {size}"] = figures
            add, loop, sample = figures.values()
            print(f"{by:<25} {size:12,} {add:9.1f} {loop:10.1f} {sample:12.2f}", flush=True)
    print("trajectories   add 20, ms   sample 7 x 20, ms")
    for n in (10_000, 100_000, 1_000_000):
        if n <= args.trajectories:
            results[n] = many_prompts(n, args.repeats)
            add, sample = results[n].values()
            print(f"{n:12,} {add:12.3f} {sample:19.3f}", flush=True)
    results["bytes"] = bytes_per_trajectory()
    print(f"bytes a trajectory of 50 tokens: {results['bytes']:,.0f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
