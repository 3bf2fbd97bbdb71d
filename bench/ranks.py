"""What a step costs a Trainer of several ranks: seconds over those of one process, in one run.

python bench/ranks.py [--ranks 2] [--repeats 9] [--width 256] [--layers 4]

The batches are those of bench/step.py, the policy is sharded by tba.py's own code. Rank 0 takes a
step with all ranks and then one alone, alternately, each rank with one thread; the table has the
median of the ratio and its quartiles. With as many free cores as ranks, 1 / ranks is the bound.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from step import ROOT, SHAPES, VOCABULARY, make_groups

import tba


def learners(args: argparse.Namespace, ranks: tba.Ranks, texts: list, folder: Path) -> list:
    """A Learner of all ranks, and one of this process alone."""
    if ranks.rank == 0:
        heads = max(1, args.width // 64)
        shape = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=3 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=heads,
            num_key_value_heads=heads, max_position_embeddings=2048, tie_word_embeddings=False,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    ranks.from_all(None)
    config = tba.Config(task="gsm8k", model=str(folder), dtype="float32", num_searchers=1)
    config.logprob_tolerance = 1e-3
    problem = tba.Problem(
        None, None, texts, texts, [2], (args.layers, args.width, VOCABULARY), 1, 0
    )
    made = [tba.load_learner(config, problem, r, {}, print) for r in (ranks, tba.Ranks())]
    torch.set_num_threads(1)
    return made


def seconds(learner: tba.Learner, groups: list) -> float:
    """One optimizer step."""
    start = time.perf_counter()
    learner.step(groups, learner.config.at(0))
    return time.perf_counter() - start


def work(args: argparse.Namespace) -> None:
    """A rank."""
    ranks = tba.Ranks.connect(timeout=600)
    for name, shape in SHAPES.items():
        texts, groups = make_groups(shape, args.prompts, args.responses)
        sharded, alone = learners(args, ranks, texts, Path(args.folder) / name)
        if ranks.rank > 0:
            sharded.follow()
            continue
        pairs = [(seconds(sharded, groups), seconds(alone, groups)) for _ in range(args.repeats)]
        several, one = np.array(pairs[1:]).T  # the first are to warm up
        low, median, high = np.quantile(several / one, (0.25, 0.5, 0.75))
        result = {"ratio": median, "low": low, "high": high, "seconds": float(np.median(several)),
                  "seconds_alone": float(np.median(one))}  # fmt: skip
        print(json.dumps({"task": name, **result}), flush=True)
        ranks.dismiss(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("ranks", 2), ("repeats", 9), ("width", 256), ("layers", 4),
                          ("prompts", 6), ("responses", 16)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "ranks.json")
    args = parser.parse_args()
    if args.folder:
        tba.quiet_libraries()
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc_per_node", str(args.ranks), __file__, *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--folder", folder], env=environment, stdout=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{args.ranks} ranks over one    median (quartiles)   seconds a step")
    for r in results:
        spread = f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f})"
        print(
            f"  {r['task']:12s}      {spread:20s} {r['seconds']:.2f} for {r['seconds_alone']:.2f}"
        )
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "folder")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
