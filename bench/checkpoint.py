"""What a checkpoint costs: size and time of saving and loading a large replay buffer.

python bench/checkpoint.py [--trajectories 1000000] [--tokens 250] [--folder DIR]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

import tba


def fill(buffer: tba.ReplayBuffer, trajectories: int, tokens: int) -> None:
    """Groups of 20 responses, `tokens` long on average, 100 a prompt."""
    rng, S = np.random.default_rng(0), 20
    for number in range(trajectories // S):
        prompt_id = number // 5
        rows = []
        for T in rng.integers(tokens // 2, tokens + tokens // 2 + 1, S):
            trajectory = tba.Trajectory(
                tokens=rng.integers(0, 32_000, T, np.int32),
                logprobs=rng.standard_normal(T, np.float32),
                ended=rng.random() < 0.9,
                reward=rng.random(),
                ref_logprobs=rng.standard_normal(T, np.float32),
                prompt_id=prompt_id,
                version=number,
                reference=0,
            )
            rows.append(trajectory)
        buffer.add(tba.Group(prompt_id, rows, searcher=0, number=number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=250, help="of a response, on average")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not set")
    args = parser.parse_args()
    buffer, again = (tba.ReplayBuffer(tba.Config(kept_per_prompt=100)) for _ in range(2))
    fill(buffer, args.trajectories, args.tokens)
    seconds: dict[str, float] = {}

    def timed(what: str, work):
        start = time.perf_counter()
        result = work()
        seconds[what] = time.perf_counter() - start
        return result

    with tempfile.TemporaryDirectory(prefix="tba-checkpoint-", dir=args.folder) as folder:
        path = Path(folder) / "trainer.pt"
        state = timed("ReplayBuffer.state", buffer.state)
        timed("torch.save", lambda: torch.save(state, path))
        with open(path) as file:
            timed("fsync", lambda: os.fsync(file.fileno()))
        timed("checksum", lambda: tba.file_checksum(path))
        loaded = timed("torch.load", lambda: torch.load(path, "cpu", weights_only=True))
        timed("ReplayBuffer.restore", lambda: again.restore(loaded))
        size = path.stat().st_size
    restored = again.state()
    for name, tensor in state.pop("trajectories").items():
        assert torch.equal(tensor, restored["trajectories"][name]), name
    del restored["trajectories"]
    assert restored == state
    print(f"{len(buffer):,} trajectories of {args.tokens} tokens on average: {size / 1e9:.2f} GB")
    for what, value in seconds.items():
        print(f"  {what:20s} {value:6.1f} s  ({size / value / 1e9:.2f} GB/s)")


if __name__ == "__main__":
    main()
