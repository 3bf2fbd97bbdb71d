"""tba.py against TRL's GRPOTrainer on the task of claims.py: reward against KL, and seconds.

    pip install --no-deps trl==1.16.0
    python bench/against_trl.py run        # two hours on two cores; resumable
    python bench/against_trl.py report     # the table in docs/results.md
    python bench/against_trl.py speed      # seconds per step relative to TRL's, in some ten minutes

The protocol is in protocols.md. `speed` runs TRL and tba.py alternately, and compares the median
step, which has no evaluation, and `seconds`.
"""

import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import claims  # beside this file
import common
import numpy as np
import torch
import transformers
from common import Setting, last, shown

import tba

CORES = len(os.sched_getaffinity(0))
TRL_KL = {"TRL": 0.0, "TRL, KL 0.04": 0.04}
IN_LOCKSTEP = {"tb, lockstep": True, "tb, asynchronous": False}
SETTINGS = [Setting("trl", name) for name in (*TRL_KL, *IN_LOCKSTEP)]


class Rows(claims.Rows):
    """The rows of this comparison, which needs no pilot runs."""

    def clip(self, setting: Setting) -> float:
        return 1.0 if setting.objective in TRL_KL else 100.0  # from claims.py's pilot of tb


def train_with_trl(kl: float, rate: float, seed: int) -> dict:
    """Run TRL in this process; returns `seconds`, `median_step` and `path` of a row."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(CORES)
    flags = common.OWN_FLAGS["valence"]
    config = tba.settings(
        task="valence", model=str(flags["model"]), dataset=str(flags["dataset"]), dtype="float32",
        max_response_tokens=64, sequences_in_flight=10_000,
    )  # fmt: skip
    task = tba.load_task(config)
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model = load(config.model)
    reference = tba.TokenLogProbs(load(config.model), 1.0)
    engine = tba.TransformersEngine(config, seed, "model", task.longest)
    tokenizer = task.tokenizer
    tokenizer.padding_side = "left"

    def reward(prompts: list, completions: list, completion_ids: list, **_: object) -> list[float]:
        ended = np.array([tokenizer.eos_token_id in ids for ids in completion_ids])
        texts = [text.removesuffix(tokenizer.eos_token) for text in completions]
        return task.rewards([], texts, ended).tolist()

    @torch.inference_mode()
    def evaluate(step: int) -> dict[str, float]:
        """An evaluation as those of tba.py's runs."""
        engine.load_weights(tba.checkpoint_state(model).items(), step)
        for i, prompt in enumerate(task.held_out_prompts):
            engine.submit(tba.Request(i, prompt, 4, max_tokens=64, temperature=1.0, seed=step))
        answers = engine.step()
        groups = [(done.request.prompt, done.tokens) for done in answers]
        ref_logprobs = iter(tba.token_logprobs(reference, groups, config))
        records = []
        for done in answers:
            own = task.evaluate([], task.response_texts(done.tokens), np.array(done.ended))
            for record, logprobs in zip(own, done.logprobs, strict=True):
                record["kl"] = float((logprobs - next(ref_logprobs)).sum())
            records += own
        return {"step": step} | task.summarize(records)

    ended_at: list[float] = []  # of each step, on a clock that is paused during evaluations
    path = [evaluate(0)]

    class Evaluate(transformers.TrainerCallback):
        paused = 0.0

        def on_step_end(self, arguments, state, control, **_) -> None:
            now = time.time()
            ended_at.append(now - self.paused)
            if state.global_step % common.EVERY == 0:
                path.append(evaluate(state.global_step))
                self.paused += time.time() - now

    rows = Dataset.from_list([{"prompt": task.prompt(example)} for example in task.train])
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, seed=seed, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=80,
            per_device_train_batch_size=128, num_generations=16, max_completion_length=64,
            learning_rate=rate, lr_scheduler_type="constant", gradient_checkpointing=False,
            temperature=1.0, beta=kl, loss_type="grpo" if kl else "dapo",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, settings, rows, processing_class=tokenizer, callbacks=[Evaluate()]
        )
        trainer.train()
    path = [{name: round(point[name], 3) for name in common.POINT} for point in path]
    times = {"seconds": round(ended_at[-1] - ended_at[0], 1), "median_step": median_step(ended_at)}
    return times | {"path": path}


def median_step(ended_at: list[float]) -> float:
    """The median of the seconds between the ends of two steps."""
    return round(float(np.median(np.diff(ended_at))), 4)


def run(setting: Setting, role: str, rate: float, seed: int, clip: float) -> dict:
    """Run TRL or tba.py once; returns its row."""
    row = {"role": role, "rate": rate, "seed": seed, "clip": clip, "exit_code": 0}
    row |= {"model": common.hash_of(setting.task)}
    if setting.objective in TRL_KL:
        kl = TRL_KL[setting.objective]
        # a new interpreter: in a fork, PyTorch cannot start threads again
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            trained = pool.submit(train_with_trl, kl, rate, seed).result()
        return asdict(setting) | row | trained
    flags = {"engine": "transformers", "lockstep": IN_LOCKSTEP[setting.objective]}
    if not flags["lockstep"]:
        flags["recent_probability"] = 0.9
    as_tb = Setting("trl", "tb", flags=tuple(flags.items()))

    def median(out: Path) -> dict[str, float]:
        metrics = tba.read_lines(out / "metrics.jsonl")
        return {"median_step": median_step([record["seconds"] for record in metrics])}

    result = common.run(as_tb, role, rate, seed, clip, median)
    row |= {"seconds": result["step_seconds"], "median_step": result["median_step"]}
    return asdict(setting) | row | {"path": result["path"]}


def print_speed() -> None:
    """Print how long a step of tba.py takes relative to TRL's, as medians over pairs of runs."""
    ratios = defaultdict(list)
    for seed in range(1, 7):
        trl = run(SETTINGS[0], "speed", 3e-4, seed, 1.0)
        for name in IN_LOCKSTEP:
            own = run(Setting("trl", name), "speed", 1e-3, seed, 100.0)
            for measure in ("median_step", "seconds"):
                ratios[name, measure].append(own[measure] / trl[measure])
    for (name, measure), values in ratios.items():
        spread = f"{min(values):.2f} to {max(values):.2f} in {len(values)} pairs of runs"
        print(f"{name}: {measure} {np.median(values):.2f} of TRL's ({spread})")


def tables_of(rows: Rows) -> dict[str, str]:
    """The table of docs/results.md."""
    lines = []
    for setting in SETTINGS:
        found = rows.of(setting)
        gain = shown(map(common.area, found)) + common.note(found)
        line = [setting.objective, common.rate_of(found), gain]
        line.append(shown(common.objective_of(row, last(row)) for row in found))
        line += [shown(common.frontier(row)[b] for row in found) for b in common.BUDGETS]
        lines.append([*line, shown((row["seconds"] for row in found), 1)])
    head = ["", "rate", "gain", "J at the end"]
    head += [*(f"≤ {b:g} nats" for b in common.BUDGETS), "seconds"]
    return {"trl": common.table(head, lines)}


def main() -> None:
    args = common.parser_of(__doc__, "run", "report", "speed").parse_args()
    rows = Rows(common.ROOT / "bench" / "results" / "trl.jsonl")
    match args.what:
        case "speed":
            print_speed()
        case "run":
            common.run_all(rows, SETTINGS, run, args.minutes)
        case "report":
            common.publish(tables_of(rows), print_all=False)


if __name__ == "__main__":
    main()
