"""What one demonstration per prompt is worth, in several objectives (docs/hacking.md).

    python bench/demonstrations.py run --minutes 90   # missing runs; resumable
    python bench/demonstrations.py report             # its table in docs/results.md
    python bench/demonstrations.py make               # the model and the responses, once

A row of bench/results/demonstrations.jsonl is one run, with its settings, seed, commit and held-out
evaluations. The protocol, with its numbered points, is in protocols.md.
"""

import itertools
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import claims
import common  # beside this file; it finds tba.py
import numpy as np
import tiny
from common import Choice, Measured, Setting, last

import tba

MODELS = common.ROOT / "bench" / "models"
FOUND = MODELS / "valence" / "found.jsonl"  # by prompt, the best and the worst of 8,000 samples
SHARES = {"none": 0, "one": 1, "a tenth": 10, "wrong": 1}  # one of how many prompts has one
OBJECTIVES = ("tb", "tb_learned_z", "dr_grpo truncate", "kimi")
TASKS = ("rarer_shown", "scarce", "rare_shown")
LABELS = {"rarer_shown": "1 in 1,820", "scarce": "sums, 1 in 50", "rare_shown": "1 in 183"}
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = range(41, 51)
SEEDS_TO_CHOOSE = (101, 102)


class Shown:
    """A task some of whose prompts have a demonstration; SHOWN is a key of SHARES."""

    def demonstrations(self, example: dict) -> list[str]:
        shown = os.environ.get("SHOWN", "none")  # as this file is also a plug-in: a second module
        share = SHARES[shown]
        place = self.train.index(example)
        return [self.written(place, shown == "wrong")] if share and place % share == 0 else []


class RareShown(Shown, claims.Rare):
    def written(self, place: int, wrong: bool) -> str:
        """The best response to a prompt that was found, or the worst."""
        (row,) = (row for row in tba.read_lines(FOUND) if row["text"] == self.train[place]["text"])
        return row["worst" if wrong else "best"]


class RarerShown(RareShown):
    threshold = claims.Rarer.threshold


class Scarce(Shown, Measured, tba.GSM8K):
    """Tiny GSM8K, from a model that solves one in fifty."""

    judged = "accuracy"

    def written(self, place: int, wrong: bool) -> str:
        """The gold solution, or that of the next problem with another answer."""
        rows = self.train[place:] + self.train[:place]
        answer = lambda row: tba.extract_number(row["answer"])
        others = (row for row in rows if answer(row) != answer(rows[0]))
        return (next(others) if wrong else rows[0])["answer"]


tba.TASKS |= {"rare_shown": RareShown, "rarer_shown": RarerShown, "scarce": Scarce}
for name in ("rare", "rarer"):
    common.OWN_FLAGS[f"{name}_shown"] = claims.reviews | {"plugin": __file__}
    common.BETA[f"{name}_shown"] = common.BETA[name]
    common.PILOT_STEPS[f"{name}_shown"] = 60
common.BETA["scarce"] = 0.05
common.OWN_FLAGS["scarce"] = {
    "model": MODELS / "scarce" / "model", "dataset": common.ROOT / "tests/models/gsm8k/data",
    "plugin": __file__, "engine": "small", "max_response_tokens": 32, "eval_samples": 64,
}  # fmt: skip


def settings_of() -> list[Setting]:
    """For each task, each objective with each kind of demonstration, and fine-tuning first."""
    found = []
    for task in TASKS:
        for shown, objective in (*itertools.product(SHARES, OBJECTIVES), ("sft", "tb")):
            flags = (*claims.LOCKSTEP, ("shown", shown))
            found.append(Setting(task, objective, task=task, steps=100, flags=flags))
    return found


def score(rows: list[dict]) -> float:
    """The mean reward at the end, with 0 for a collapse."""
    return float(np.mean([0.0 if common.lost(row) else last(row)["reward"] for row in rows]))


class Rows(common.Rows):
    """The completed runs: an objective's rate is that which is best with one demonstration."""

    def seeds_of(self, setting: Setting) -> range:
        return SEEDS

    def choice_of(self, setting: Setting) -> Choice:
        flags = dict(setting.flags) | {"shown": "one"}
        chooser = replace(setting, flags=tuple(flags.items()))
        return Choice(RATES, tuple((chooser, seed) for seed in SEEDS_TO_CHOOSE), score)


def run(setting: Setting, role: str, rate: float, seed: int, clip: float) -> dict:
    """Run tba.py once, in one process; its Searchers wait for training."""
    flags = dict(setting.flags)
    shown = flags.pop("shown", "none")

    def prepare() -> None:
        os.environ["SHOWN"] = "none" if shown == "sft" else shown
        tba.Trainer = claims.SimulatedTrainer

    with tempfile.TemporaryDirectory() as folder:
        if shown == "sft":
            path = Path(folder) / "pairs.jsonl"
            path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs_of(setting.task)))
            flags |= {"sft_data": path, "sft_epochs": 10 if setting.task != "scarce" else 2}
            flags |= {"sft_batch_size": 16, "sft_learning_rate": "1e-3@0,0~end"}
        plain = replace(setting, flags=tuple(flags.items()))
        row = common.run(plain, role, rate, seed, clip, prepare=prepare)
    return row | {"flags": setting.flags}


def pairs_of(task: str) -> list[dict]:
    """What is fine-tuned on: the prompts with their right demonstrations."""
    own = common.OWN_FLAGS[task]
    flags = {"task": task, "max_response_tokens": own["max_response_tokens"]}
    flags |= {name: str(own[name]) for name in ("model", "dataset")}
    with mock.patch.dict(os.environ, SHOWN="one"):
        found = tba.load_task(tba.settings(**flags))
        return [
            {"prompt": found.prompt(example), "response": found.demonstrations(example)[0]}
            for example in found.train
        ]


def make() -> None:
    """Make the policy that solves one in fifty; search the untrained policy's samples."""
    with mock.patch.object(tiny, "WRONG", 0.98), tempfile.TemporaryDirectory() as folder:
        tiny.make_gsm8k(Path(folder))
        tiny.store_in_float16(Path(folder))
        Path(folder, "model").rename(MODELS / "scarce" / "model")
    own = common.OWN_FLAGS["rare_shown"]
    config = tba.settings(
        task="rare_shown", model=str(own["model"]), dataset=str(own["dataset"]),
        max_response_tokens=64, temperature=1.0, sequences_in_flight=500, dtype="float32",
    )  # fmt: skip
    task = tba.load_task(config)
    engine = common.SmallLlama(config, 0, "model", task.longest)
    engine.load_weights((), 0)
    lines = []
    for i, prompt in enumerate(task.train_prompts):
        texts = set()
        for seed in range(16):
            fields = {"n": 500, "max_tokens": 64, "temperature": 1.0, "seed": 16 * i + seed}
            engine.submit(tba.Request(tba.RequestId(False, 0, i), prompt, **fields))
            for done in engine.step():
                pairs = zip(task.response_texts(done.tokens), done.ended, strict=True)
                texts |= {text for text, ended in pairs if ended}
        best, worst = max(texts, key=claims.valence), min(texts, key=claims.valence)
        lines.append({"text": task.train[i]["text"], "best": best, "worst": worst})
    tiny.write_lines(FOUND, lines)


def ends(found: list[dict]) -> str:
    """Reward, KL and share of distinct responses at the end, and how many seeds collapsed."""
    kl = f"{np.mean([last(row)['kl'] for row in found]):.1f}"
    distinct = common.mean(last(row)["distinct"] for row in found)
    return f"{common.mean(common.finals(found))}; {kl}; {distinct}{common.note(found)}"


def tables_of(rows: Rows) -> dict[str, str]:
    """The table of docs/results.md."""
    by_place = {}
    for setting in settings_of():
        shown = dict(setting.flags)["shown"]
        objective = "fine-tuned, then `tb`" if shown == "sft" else f"`{setting.objective}`"
        column = "one" if shown == "sft" else shown
        by_place[column, f"{LABELS[setting.task]}: {objective}"] = setting
    return {"demonstrations": common.grid(rows, by_place, ends)}


def main() -> None:
    parser = common.parser_of(__doc__, "run", "report", "make")
    parser.add_argument("--workers", type=int, default=1, help="number of parallel runs")
    args = parser.parse_args()
    rows = Rows(common.ROOT / "bench" / "results" / "demonstrations.jsonl")
    if args.what == "make":
        make()
    elif args.what == "run":
        common.run_all(rows, settings_of(), run, args.minutes, args.workers)
    else:
        common.publish(tables_of(rows), print_all=True)


if __name__ == "__main__":
    main()
