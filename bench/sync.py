"""What a weight sync costs: the Trainer, the Searchers, and how long weights are on their way.

    python bench/sync.py [--millions 1 30 300] [--searchers 1 2 4] [--rounds 9]

For each model size and number of Searchers, a Trainer with real Searchers that generate all the
time. Each round does once what a sync cannot do without, a bare copy of the weights into a flat
buffer and the scoring of the probes, and makes one sync:

    Trainer    seconds that the Trainer loses to the sync (WeightSync.seconds); the ratio is over
               the copy and the probes of the same round, and should be at most 1.3
    Searcher   seconds that a Searcher loses: it loads the weights and scores the probes
    whole      from the sync's begin to the last `Loaded`, while the Trainer does nothing else
    bare       the same weights in as many processes that do nothing else: one Gloo broadcast for
               each bucket, then a copy into the model
    blocking   what the Trainer would lose at least if it waited: a copy of the weights, and `bare`

The last column is the Trainer's loss over an optimizer step of 7 x 20 trajectories, extrapolated
from a step of 2 x 2 random responses.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

import tiny

import tba

SHAPES = {1: (128, 4), 30: (512, 9), 300: (1280, 15)}  # millions -> width, layers
GOAL = 1.3  # the most that the Trainer should lose, over a bare copy and the probes


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class BareCopy:
    """What a sync cannot do without: the weights are copied into a flat buffer, probes scored."""

    def __init__(self, trainer: tba.Trainer) -> None:
        self.trainer = trainer
        self.weights = list(trainer.learner.weights.values())
        like = trainer.sync.snapshot.flat
        flat = torch.empty(
            len(like), dtype=like.dtype, device=like.device, pin_memory=like.is_pinned()
        )
        self.parts = flat.split([weight.numel() for weight in self.weights])

    @torch.no_grad()
    def __call__(self) -> None:
        for part, weight in zip(self.parts, self.weights, strict=True):
            part.view_as(weight).copy_(weight.to(part.dtype))
        trainer = self.trainer
        trainer.learner.score_probes()


def lost(s: tba.SearcherState) -> float:
    """Seconds that a Searcher spent neither generating nor scoring, up to its last sign of life."""
    beat = s.beats[-1]
    return beat.time - beat.worked


def sync_times(config: tba.Config, rounds: int) -> dict:
    """Real Searchers: seconds of each round, the first apart, and of an optimizer step."""
    problem = tba.load_problem(config)
    folder = tba.RunFolder(config, {})
    trainer = tba.Trainer(config, problem, folder, {})
    searchers = trainer.searchers
    times: dict[str, list[float]] = {"copy": [], "trainer": [], "searcher": [], "whole": []}
    try:
        searchers.start_manager()
        searchers.start_due()
        trainer.load()
        sync = trainer.sync
        sync.due = True
        trainer.finish_sync()
        trainer.finish_evaluation()  # weights are not loaded while held-out prompts are answered
        searchers.search_up_to(math.inf)
        trainer.wait_for(lambda: trainer.received >= 2 * config.num_searchers)
        trainer.collect()
        trainer.last_step_end = time.perf_counter()
        step = timed(trainer.train_step) * 7 * 20 / 4
        bare_copy = BareCopy(trainer)
        bare_copy()  # the first touches fresh memory

        def next_beats() -> None:
            """Listen until every Searcher has given a new sign of life."""
            now = time.perf_counter()  # the same clock in all processes of a machine
            trainer.wait_for(lambda: all(s.beats and s.beats[-1].time > now for s in searchers))

        for i in range(rounds):
            next_beats()
            before = [lost(s) for s in searchers]
            if i % 2:  # neither always finds the caches that the other has filled
                copy = timed(bare_copy)
            sync.seconds = 0.0
            sync.due = True
            start = time.perf_counter()
            sync.poll(trainer.step)
            trainer.wait_for(lambda: sync.idle)
            whole = time.perf_counter() - start
            if not i % 2:
                copy = timed(bare_copy)
            next_beats()
            times["copy"].append(copy)
            times["trainer"].append(sync.seconds)
            times["whole"].append(whole)
            after = [lost(s) for s in searchers]
            times["searcher"].append(float(np.mean(after) - np.mean(before)))
            trainer.arrived = []
    finally:
        searchers.stop(patience=5)
        searchers.manager_process.kill()
        folder.bar.close()
    return {name: seconds[1:] for name, seconds in times.items()} | {"step": step}


def bare_member(path: str, port: int, rank: int, size: int, rounds: int, answers) -> None:
    """A process of the bare transfer: rank 0 broadcasts its model, the others load it."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = list(model.state_dict().values())
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=300))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, rank, size, options)
    flat = torch.cat([tensor.flatten() for tensor in state])
    parts = flat.split([tensor.numel() for tensor in state])
    pairs = list(zip(state, parts, strict=True))
    copies, transfers = [], []
    for _ in range(rounds):
        group.barrier().wait()
        start = time.perf_counter()
        if rank == 0:
            for tensor, part in pairs:
                part.view_as(tensor).copy_(tensor)
        copied = time.perf_counter()
        for bucket in flat.split(tba.BUCKET_BYTES // 4):
            group.broadcast(bucket, 0).wait()
        if rank:
            for tensor, part in pairs:
                tensor.copy_(part.view_as(tensor))
        group.barrier().wait()
        copies.append(copied - start)
        transfers.append(time.perf_counter() - copied)
    if rank == 0:
        answers.put((copies[1:], transfers[1:]))


def bare_times(path: Path, searchers: int, rounds: int) -> tuple[list[float], list[float]]:
    """The bare transfer between as many processes: seconds of copying, and of all the rest."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    size = searchers + 1
    processes = [
        context.Process(target=bare_member, args=(str(path), port, rank, size, rounds, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    seconds = answers.get(timeout=600)
    for process in processes:
        process.join()
    return seconds


def quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"low": low, "median": median, "high": high}


def shown(found: dict[str, float], digits: int) -> str:
    """A median with its quartiles."""
    median, low, high = (f"{found[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--millions", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "sync.json")
    args = parser.parse_args()
    files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache")) / "tiny-gsm8k"
    tiny.make("gsm8k", files)
    results = []
    print("parameters  Searchers  Trainer, s           over copy + probes   Searcher, s          "
          "whole, s             bare, s  blocking, s  of a step")  # fmt: skip
    for millions in args.millions:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            tiny.make_llama(*SHAPES[millions], files, model)
            for M in args.searchers:
                config = tba.Config(
                    model=str(model), dataset=str(files / "data"), engine="transformers",
                    num_searchers=M, searched_per_prompt=2, trained_per_prompt=2,
                    prompts_per_step=2, max_response_tokens=32, sequences_in_flight=4,
                    temperature=1.0, output_dir=f"{folder}/run-{M}", transfer_timeout=300.0,
                    eval_samples=4,
                )  # fmt: skip
                tba.resolve(config)
                times = sync_times(config, args.rounds)
                copies, transfers = bare_times(model, M, args.rounds)
                bare = float(np.median(transfers))
                ratios = np.array(times["trainer"]) / np.array(times["copy"])
                record = {
                    "millions": millions,
                    "searchers": M,
                    **{name: quartiles(times[name]) for name in ("trainer", "searcher", "whole")},
                    "copy": float(np.median(times["copy"])),
                    "ratio": quartiles(ratios),
                    "bare": bare,
                    "blocking": float(np.median(copies)) + bare,
                    "of_a_step": float(np.median(times["trainer"])) / times["step"],
                }
                results.append(record)
                columns = [shown(record["trainer"], 4), shown(record["ratio"], 2),
                           shown(record["searcher"], 4), shown(record["whole"], 3)]  # fmt: skip
                print(
                    f"{millions:8} M  {M:9}  {'  '.join(f'{text:19}' for text in columns)}  "
                    f"{bare:7.3f}  {record['blocking']:11.3f}  {record['of_a_step']:9.2%}",
                    flush=True,
                )
    met = sum(record["ratio"]["median"] <= GOAL for record in results)
    print(f"the Trainer loses at most {GOAL} times a bare copy and the probes (the goal) in {met} "
          f"of {len(results)} settings, by the medians")  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    sys.stdout.flush()
    tba.exit_now(0)


if __name__ == "__main__":
    main()
