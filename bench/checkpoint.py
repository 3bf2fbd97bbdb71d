"""What a checkpoint costs: size and time of saving and loading a large replay buffer.

python bench/checkpoint.py [--trajectories 1000000] [--tokens 250] [--folder DIR]
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

import tba


def fill(buffer: tba.ReplayBuffer, trajectories: int, tokens: int) -> None:
    """Groups of 20 responses, `tokens` long on average, 100 a prompt."""
    rng, S = np.random.default_rng(0), 20
    for number in range(trajectories // S):
        lengths = rng.integers(tokens // 2, tokens + tokens // 2 + 1, S).astype(np.int32)
        N = int(lengths.sum())
        group = tba.Group(
            number // 5, rng.integers(0, 32_000, N, np.int32), rng.standard_normal(N, np.float32),
            lengths, rng.random(S) < 0.9, rng.random(S, np.float32), -rng.random(S, np.float32),
            number, 0, 0, number,
        )  # fmt: skip
        buffer.add(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=250, help="of a response, on average")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not set")
    args = parser.parse_args()
    buffer = tba.ReplayBuffer(tba.Config(kept_per_prompt=100))
    fill(buffer, args.trajectories, args.tokens)
    folder = Path(tempfile.mkdtemp(prefix="tba-checkpoint-", dir=args.folder))
    try:
        seconds = {}
        for name, work in (
            ("write", lambda: np.savez(folder / "buffer.npz", **buffer.state())),
            ("checksums and fsync", lambda: tba.seal(folder)),
            ("verify", lambda: tba.is_sealed(folder)),
        ):
            start = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - start
        again = tba.ReplayBuffer(buffer.config)
        start = time.perf_counter()
        with np.load(folder / "buffer.npz", allow_pickle=False) as arrays:
            again.restore(arrays, buffer.rng.bit_generator.state)
        seconds["load"] = time.perf_counter() - start
        size = (folder / "buffer.npz").stat().st_size
        for name, before in buffer.state().items():
            assert np.array_equal(before, again.state()[name]), name
    finally:
        shutil.rmtree(folder)
    print(f"{len(buffer):,} trajectories of {args.tokens} tokens on average: {size / 1e9:.2f} GB")
    for name, value in seconds.items():
        print(f"  {name:20s} {value:6.1f} s  ({size / value / 1e9:.2f} GB/s)")


if __name__ == "__main__":
    main()
