"""Seconds that a weight sync takes, over a bare broadcast and reload of the same bytes.

    python bench/sync.py [--millions 1 30 300] [--searchers 1 2 4] [--rounds 7]

For each model size and number of Searchers: a Trainer with real Searchers that generate. A sync
begins when the Trainer asks the Searchers to pause and ends when the last of them has loaded the
weights and generates again. The bare transfer is the same weights in the same number of processes
that do nothing else: one Gloo broadcast per bucket, then a copy into the model. The Trainer's stall
is the time it does not train, over the time of an optimizer step of 7 x 20 trajectories of 128
tokens, extrapolated from a step of 2 x 2.
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
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


def sync_times(config: tba.Config, rounds: int) -> dict:
    """Real Searchers: seconds of each sync, of the Trainer's stall in it, and of a step."""
    problem = tba.load_problem(config)
    folder = tba.RunFolder(config, {})
    trainer = tba.Trainer(config, problem, folder, {})
    pool = trainer.pool
    loaded: list[float] = []
    pool.on_loaded = lambda s, probes: (
        tba.SearcherPool.on_loaded(pool, s, probes),
        loaded.append(time.perf_counter()),
    )
    seconds, stalls = [], []
    try:
        pool.start_manager()
        pool.check_searchers()
        trainer.load()
        pool.wait_for(partial(pool.sync, 0.0, everyone=True), newcomers=False)
        pool.search(float("inf"))
        pool.wait_for(lambda: pool.received >= 2 * config.num_searchers)
        trainer.collect()
        trainer.last_step_end = start = time.perf_counter()
        trainer.train_step()
        step = (time.perf_counter() - start) * 7 * 20 / 4
        for _ in range(rounds):
            until = time.monotonic() + 0.3  # for which they generate
            pool.wait_for(lambda: time.monotonic() > until, newcomers=False)  # noqa: B023
            loaded.clear()
            start = time.perf_counter()
            while not pool.sync(60.0):
                pass
            stalls.append(time.perf_counter() - start)
            pool.wait_for(lambda: len(loaded) == config.num_searchers, newcomers=False)
            seconds.append(max(loaded) - start)
    finally:
        pool.stop(patience=5)
        pool.manager_process.kill()
        folder.bar.close()
    return {"seconds": seconds[1:], "stall": stalls[1:], "step": step}


def bare_member(path: str, port: int, rank: int, size: int, rounds: int, answers) -> None:
    """A process of the bare transfer: rank 0 broadcasts its model, the others load it."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = list(model.state_dict().values())
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=300))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, rank, size, options)
    bucket = tba.WeightGroup.BUCKET_BYTES // 4
    flat = torch.cat([t.flatten() for t in state])
    seconds = []
    for _ in range(rounds):
        group.barrier().wait()
        start = time.perf_counter()
        for part in flat.split(bucket):
            group.broadcast(part, 0).wait()
        if rank:
            for tensor, part in zip(state, flat.split([t.numel() for t in state]), strict=True):
                tensor.copy_(part.view_as(tensor))
        group.barrier().wait()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        answers.put(seconds[1:])


def bare_times(path: Path, searchers: int, rounds: int) -> list[float]:
    """The bare transfer between as many processes."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--millions", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "sync.json")
    args = parser.parse_args()
    files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache")) / "tiny-gsm8k"
    tiny.make("gsm8k", files)
    results = []
    print("parameters  Searchers  sync (quartiles), s     bare, s  ratio  stall, s  of a step")
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
                )  # fmt: skip
                config.resolve()
                ours = sync_times(config, args.rounds)
                bare = float(np.median(bare_times(model, M, args.rounds)))
                low, median, high = np.quantile(ours["seconds"], (0.25, 0.5, 0.75))
                stall = float(np.median(ours["stall"]))
                record = {"millions": millions, "searchers": M, "seconds": median, "low": low,
                          "high": high, "bare": bare, "ratio": median / bare, "stall": stall,
                          "of_a_step": stall / ours["step"]}  # fmt: skip
                results.append(record)
                print(f"{millions:9} M  {M:9}  {median:.3f} ({low:.3f}-{high:.3f})  {bare:9.3f}  "
                      f"{median / bare:5.2f}  {stall:8.3f}  {stall / ours['step']:9.1%}",
                      flush=True)  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    tba.exit_now(0)


if __name__ == "__main__":
    main()
