"""tba.py against TRL's GRPOTrainer: wall-clock to an accuracy, and reward against KL.

    python -m venv --system-site-packages /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
    python bench/against_trl.py --trl_python /tmp/trl/bin/python [--pairs 5] [--target 0.97]
    python bench/against_trl.py --trl_python /tmp/trl/bin/python --task valence

The first is of the tiny GSM8K. The same model, prompts, reward, batch (8 prompts x 16 responses)
and cores; runs alternate. Time counts to the first optimizer step whose weights answer that share
of the held-out prompts greedily: from the start of the command, and again without the imports of
libraries. TRL is evaluated after every step with its clock stopped, tba.py every --eval_every steps
by its Searcher, beside training. Both use the learning rate that was fastest in a sweep; else
tba.py's settings are those of run_gsm8k.sh --tiny, with the first step after 128 trajectories.

The second is of the task of claims.py: 80 steps of 8 x 16, and every 10 of them both sample 4
responses to each held-out prompt: the highest reward within a budget of KL, reward and KL at the
end, and the seconds of the steps after the first. TRL's clock stops for evaluations, that of
tba.py does not. TRL runs GRPO as it is by default, without a KL term, and as published, with one.
All have the best of the same learning rates, on a seed that is not reported; TRL clips gradients at
its default, 1. Runs alternate.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import claims  # beside this file; it finds the tests' folder
from harness import read_lines

CORES = len(os.sched_getaffinity(0))


def grpo_trainer(args, model, reward, rows: list[dict], tokenizer, callback, **settings):
    """TRL's GRPOTrainer of 8 prompts x 16 responses a step, with these further settings."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(args.out), use_cpu=True, bf16=False, seed=args.seed, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=args.most_steps,
        per_device_train_batch_size=128, num_generations=16, temperature=1.0,
        learning_rate=args.learning_rate, lr_scheduler_type="constant",
        gradient_checkpointing=False, remove_unused_columns=False, **settings,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    return GRPOTrainer(
        model, reward, config, data, processing_class=tokenizer, callbacks=[callback]
    )  # fmt: skip


def train_with_trl(args: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """In TRL's environment: (step, seconds, seconds without imports, accuracy) of each step."""
    import torch
    import transformers

    import tba

    torch.set_num_threads(CORES)
    imported = time.time()
    config = tba.settings(model=str(args.files / "model"), dataset=str(args.files / "data"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, padding_side="left")
    task = tba.GSM8K(config, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    history, paused = [], 0.0

    def accuracy() -> float:
        answers = []
        for start in range(0, len(task.held_out), 100):
            examples = task.held_out[start : start + 100]
            prompts = [task.prompt(example) for example in examples]
            batch = tokenizer(prompts, return_tensors="pt", padding=True)
            with torch.inference_mode():
                tokens = model.generate(**batch, max_new_tokens=32, do_sample=False)
            texts = tokenizer.batch_decode(
                tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
            )
            answers += task.rewards(examples, texts, None).tolist()
        return statistics.mean(answers)

    class Evaluate(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_) -> None:
            nonlocal paused
            now = time.time()
            model.eval()
            times = now - args.launched - paused, now - imported - paused
            history.append((state.global_step, *times, accuracy()))
            model.train()
            paused += time.time() - now
            control.should_training_stop |= history[-1][-1] >= args.target

    def reward(prompts, completions, answer, **_) -> list[float]:
        return task.rewards([{"answer": a} for a in answer], completions, None).astype(float)

    rows = [{"prompt": task.prompt(e), "answer": e["answer"]} for e in task.train]
    trainer = grpo_trainer(
        args, model, reward, rows, tokenizer, Evaluate(), max_completion_length=32
    )
    trainer.train()
    return history


def train_on_valence(args: argparse.Namespace) -> dict:
    """In TRL's environment: claims.py's task, with the fields of its records that it has."""
    import torch
    import transformers

    import tba

    torch.set_num_threads(CORES)
    load = transformers.AutoModelForCausalLM.from_pretrained
    files = args.files / "valence"
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "model", padding_side="left")
    model = load(files / "model", dtype=torch.float32)
    reference = load(files / "model", dtype=torch.float32).eval()
    config = tba.settings(model=str(files / "model"), dataset=str(files / "data"))
    task = claims.Valence(config, tokenizer)

    def reward(prompts, completions, completion_ids, **_) -> list[float]:
        ended = np.array([tokenizer.eos_token_id in ids for ids in completion_ids])
        texts = [text.removesuffix(tokenizer.eos_token) for text in completions]
        return task.rewards([], texts, ended).tolist()

    prompts = [task.prompt(example) for example in task.held_out]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    batch = {name: tensor.repeat_interleave(4, 0) for name, tensor in batch.items()}
    start = batch["input_ids"].shape[1]

    def logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        # positions are relative: padding on the left changes nothing but what the mask leaves out
        seen = torch.nn.functional.pad(
            batch["attention_mask"], (0, tokens.shape[1] - start), value=1
        )
        every = model(tokens, attention_mask=seen).logits[:, start - 1 : -1].log_softmax(-1)
        return every.gather(2, tokens[:, start:, None])[..., 0]

    @torch.inference_mode()
    def evaluate() -> dict[str, float]:
        tokens = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=64)
        ends = (tokens[:, start:] == tokenizer.eos_token_id).int()
        mask = ends.cumsum(1) - ends == 0  # up to the first EOS and with it
        kl = (logprobs(model, tokens) - logprobs(reference, tokens)) * mask
        texts = tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
        return {
            "reward": float(task.rewards([], texts, ends.any(1).numpy()).mean()),
            "kl": float(kl.sum(1).mean()),
            "distinct": len(set(texts)) / len(texts),
        }

    ended_at: list[float] = []  # of each step, on a clock that stands still in evaluations
    evaluations = [evaluate()]

    class Evaluate(transformers.TrainerCallback):
        paused = 0.0

        def on_step_end(self, arguments, state, control, **_) -> None:
            now = time.time()
            ended_at.append(now - self.paused)
            if state.global_step % 10 == 0:
                model.eval()
                evaluations.append(evaluate())
                model.train()
                self.paused += time.time() - now

    rows = [{"prompt": task.prompt(example)} for example in task.train]
    trainer = grpo_trainer(
        args, model, reward, rows, tokenizer, Evaluate(), max_completion_length=64, beta=args.kl,
        loss_type="grpo" if args.kl else "dapo",
    )  # fmt: skip
    trainer.train()
    return {
        "seconds": ended_at[-1] - ended_at[0], "after": evaluations[-1],
        "evaluations": evaluations, "exit_code": 0,
    }  # fmt: skip


def run_trl(
    args: argparse.Namespace, seed: int, rate: float, out: Path, *more: object
) -> list[tuple] | dict:
    """A run in TRL's environment, as a process of its own."""
    flags = ["--child", "--seed", seed, "--learning_rate", rate, "--out", out]
    flags += ["--target", args.target, "--files", args.files, "--launched", time.time()]
    flags += ["--task", args.task, "--most_steps", args.most_steps, *more]
    command = [args.trl_python, __file__, *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
    result = subprocess.run(command, check=True, text=True, stdout=-1, stderr=-3, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def run_tba(args: argparse.Namespace, seed: int, rate: float, out: Path) -> list[tuple]:
    """A run of run_gsm8k.sh --tiny's settings; the same of each evaluation."""
    flags = {
        "model": args.files / "model", "dataset": args.files / "data", "steps": args.most_steps,
        "prompts_per_step": 8, "trained_per_prompt": 16, "searched_per_prompt": 16,
        "recent_probability": 0.9, "beta": 0.05, "learning_rate": rate, "lr_schedule": "linear",
        "max_grad_norm": 1, "temperature": 1.0, "max_response_tokens": 32,
        "sequences_in_flight": 128, "sync_every": 2, "initial_trajectories": 128,
        "eval_every": args.eval_every, "seed": seed, "output_dir": out,
    }  # fmt: skip
    launched = time.time()
    command = [sys.executable, str(ROOT / "tba.py")]
    command += [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=-3, stderr=-3, env=environment)
    records = lambda name: read_lines(out / name)
    began = (out / "config.json").stat().st_mtime - launched  # when "seconds" were about 0
    seconds = {r["step"]: r["seconds"] for r in records("metrics.jsonl")} | {0: 0.0}
    times = lambda step: (began + seconds[step], seconds[step])
    return [(r["step"], *times(r["step"]), r["accuracy"]) for r in records("eval.jsonl")]


def run_cell(args: argparse.Namespace, cell: claims.Cell, folder: Path) -> dict:
    """The same of tba.py."""
    record = claims.run(cell, args.files, folder)
    record["seconds"] = record["seconds"][-1] - record["seconds"][0]
    return {name: record[name] for name in ("seconds", "after", "evaluations", "exit_code")}


def compare_on_valence(args: argparse.Namespace) -> dict:
    """Reward, KL and seconds of the steps of all, by seed, with the best rate of each."""
    claims.make_task(args.files / "valence")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def trl(kl: float, seed: int, rate: float) -> dict:
            return run_trl(args, seed, rate, folder / f"{kl}-{rate}-{seed}", "--kl", kl)

        def ours(mode: str, seed: int, rate: float) -> dict:
            flags = (("recent_probability", 0.9),) if mode == "asynchronous" else ()
            cell = claims.Cell("tb", rate, 0, seed, steps=args.most_steps, mode=mode, flags=flags)
            return run_cell(args, cell, folder)

        runs: dict[str, Callable[[int, float], dict]] = {
            "TRL, no KL term": partial(trl, 0.0),
            "TRL, KL term": partial(trl, 0.04),
            "tba.py, lockstep": partial(ours, "lockstep"),
            "tba.py, asynchronous": partial(ours, "asynchronous"),
        }
        best = {}
        for name, train in runs.items():
            swept = {rate: train(claims.SWEPT_ON, rate) for rate in claims.RATES["valence"]}
            scores = {rate: claims.score(r | {"task": "valence"}) for rate, r in swept.items()}
            best[name] = max(scores, key=scores.get)
            print(f"{name}: {scores}", flush=True)
        results: dict[str, list[dict]] = collections.defaultdict(list)
        for seed in claims.SEEDS:
            for name, train in runs.items():
                results[name].append(train(seed, best[name]) | {"learning_rate": best[name]})
        for name, found in results.items():
            print(f"{name} at {best[name]:g}: {shown_on_valence(found)}", flush=True)
    return results


def shown_on_valence(runs: list[dict]) -> str:
    """Mean and standard deviation over seeds."""
    seconds = claims.mean_and_spread([r["seconds"] for r in runs], 1)
    within = claims.reward_in_budget(runs)
    return f"{within} within the budget, {claims.reward_at_kl(runs)} at the end, {seconds} s"


def reached(history: list[tuple], target: float) -> dict[str, float]:
    """When an evaluation first reached the target."""
    for step, seconds, without_imports, accuracy in history:
        if accuracy >= target:
            return {"step": step, "seconds": seconds, "without_imports": without_imports}
    return {"step": 0, "seconds": float("inf"), "without_imports": float("inf")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--trl_python", default=sys.executable, help="python of an environment with TRL"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--eval_every", type=int, default=5)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-4, 2e-4, 4e-4, 8e-4])
    parser.add_argument("--most_steps", type=int, default=80)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "trl.json")
    parser.add_argument("--task", choices=("gsm8k", "valence"), default="gsm8k")
    for name, kind in (("seed", int), ("kl", float), ("learning_rate", float), ("launched", float),
                       ("out", Path), ("files", Path)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train = train_with_trl if args.task == "gsm8k" else train_on_valence
        return print(json.dumps(train(args)))
    args.files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache"))
    record = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.task == "valence":
        record["valence"] = compare_on_valence(args)
    else:
        args.files = args.files / "tiny-gsm8k"
        record |= compare_on_gsm8k(args)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(record, indent=2) + "\n")


def compare_on_gsm8k(args: argparse.Namespace) -> dict:
    """Wall-clock to the target, run by run in turn, and the ratios."""
    make = [sys.executable, ROOT / "tests" / "tiny.py", "gsm8k", "--out", args.files]
    subprocess.run(make, check=True)
    runs, best = {"TRL": run_trl, "tba.py": run_tba}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs.items():
            sweep = {}
            for rate in args.learning_rates:
                history = run(args, 1000, rate, Path(folder) / f"{name}-{rate}")
                sweep[rate] = reached(history, args.target)
                print(f"{name} at learning rate {rate:g}: {shown(sweep[rate])}", flush=True)
            best[name] = min(sweep, key=lambda rate: sweep[rate]["seconds"])
        pairs = []
        for seed in range(args.pairs):
            pair = {}
            for name, run in runs.items():
                history = run(args, seed, best[name], Path(folder) / f"{name}-{seed}")
                pair[name] = reached(history, args.target)
            pairs.append(pair)
            print(f"seed {seed}: " + "; ".join(f"{n} {shown(r)}" for n, r in pairs[-1].items()),
                  flush=True)  # fmt: skip
    record = {"target": args.target, "cores": CORES, "learning_rates": best, "pairs": pairs}
    for key in ("seconds", "without_imports"):
        ratios = [pair["tba.py"][key] / pair["TRL"][key] for pair in pairs]
        record[f"ratio of {key}"] = statistics.median(ratios)
        print(f"{key}: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return record


def shown(result: dict[str, float]) -> str:
    """One run's figures."""
    return "{seconds:.1f} s ({without_imports:.1f} s without imports, step {step})".format(**result)


if __name__ == "__main__":
    main()
