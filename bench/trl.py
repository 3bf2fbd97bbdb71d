"""Wall-clock to an accuracy on the tiny GSM8K: tba.py against TRL's GRPOTrainer.

    python -m venv --system-site-packages /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
    python bench/trl.py --trl_python /tmp/trl/bin/python [--pairs 5] [--target 0.97]

The same model, prompts, reward, batch (8 prompts x 16 responses) and cores; runs alternate. Time
counts to the first optimizer step whose weights answer that share of the held-out prompts greedily:
from the start of the command, and again without the imports of libraries. TRL is evaluated after
every step with its clock stopped, tba.py every --eval_every steps by its Searcher, beside training.
Both use the learning rate that was fastest in a sweep; else tba.py's settings are those of
run_gsm8k.sh --tiny, with the first step after 128 trajectories.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of bench/, where this file would be taken for TRL
CORES = len(os.sched_getaffinity(0))


def train_with_trl(args: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """In TRL's environment: (step, seconds, seconds without imports, accuracy) of each step."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import tba

    torch.set_num_threads(CORES)
    imported = time.time()
    config = tba.Config(model=str(args.files / "model"), dataset=str(args.files / "data"))
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
            control.should_training_stop = history[-1][-1] >= args.target

    def reward(prompts, completions, answer, **_) -> list[float]:
        return task.rewards([{"answer": a} for a in answer], completions, None).astype(float)

    rows = [{"prompt": task.prompt(e), "answer": e["answer"]} for e in task.train]
    settings = GRPOConfig(
        output_dir=str(args.out), use_cpu=True, bf16=False, seed=args.seed, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=args.most_steps,
        per_device_train_batch_size=128, num_generations=16, max_completion_length=32,
        temperature=1.0, learning_rate=args.learning_rate, lr_scheduler_type="constant",
        gradient_checkpointing=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward, settings, Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Evaluate()],
    )  # fmt: skip
    trainer.train()
    return history


def run_trl(args: argparse.Namespace, seed: int, rate: float, out: Path) -> list[tuple]:
    """A run in TRL's environment, as a process of its own."""
    flags = ["--child", "--seed", seed, "--learning_rate", rate, "--out", out]
    flags += ["--target", args.target, "--files", args.files, "--launched", time.time()]
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
    records = lambda name: map(json.loads, (out / name).read_text().splitlines())
    began = (out / "config.json").stat().st_mtime - launched  # when "seconds" were about 0
    seconds = {r["step"]: r["seconds"] for r in records("metrics.jsonl")} | {0: 0.0}
    times = lambda step: (began + seconds[step], seconds[step])
    return [(r["step"], *times(r["step"]), r["accuracy"]) for r in records("eval.jsonl")]


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
    for name, kind in (("seed", int), ("learning_rate", float), ("launched", float),
                       ("out", Path), ("files", Path)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return print(json.dumps(train_with_trl(args)))
    args.files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache")) / "tiny-gsm8k"
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
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(record, indent=2) + "\n")


def shown(result: dict[str, float]) -> str:
    """One run's figures."""
    return "{seconds:.1f} s ({without_imports:.1f} s without imports, step {step})".format(**result)


if __name__ == "__main__":
    main()
