"""The paper's own comparison: objectives inside the same asynchronous loop, with real processes.

    python bench/inside.py run --minutes 30     # missing runs; 80 minutes in all; resumable
    python bench/inside.py report               # its table in docs/results.md; prints another

Every run is `bash run_gsm8k.sh --tiny` (tests/models/gsm8k, one Searcher and the Trainer, a core
each), with another objective, k (--sync_every) and m (--recent_probability). A row of
bench/results/inside.jsonl is one run, with its settings, seed, commit and held-out evaluations.

The protocol, with its numbered points, is in protocols.md.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import common  # beside this file; it finds tba.py
import numpy as np
from common import Choice, Setting, finals

import tba

OBJECTIVES = ("tb", "proximal_rloo", "dr_grpo", "grpo", "online_dpo")
SYNC_EVERY = (1, 10, 30)  # k
RECENT = (0.95, 0.5)  # m
WAYS = list(itertools.product(SYNC_EVERY, RECENT))
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SEEDS_TO_CHOOSE = (101, 102)
SEEDS = range(1, 11)
FILES = common.ROOT / "tests" / "models" / "gsm8k"


class Measured(common.Measured, tba.GSM8K):
    """GSM8K whose evaluations sample, so that distinct responses can be counted."""

    judged = "accuracy"


tba.TASKS["measured_gsm8k"] = Measured
common.BETA["gsm8k"] = 0.05
common.OWN_FLAGS["gsm8k"] = {
    "task": "measured_gsm8k", "model": FILES / "model", "dataset": FILES / "data",
    "plugin": __file__, "engine": "small", "max_response_tokens": 32,
    "eval_every": 20, "eval_responses": 2,
}  # fmt: skip


def setting_of(objective: str, k: int, m: float) -> Setting:
    """An asynchronous run with one Searcher."""
    flags = (("asynchronous", 1), ("sync_every", k), ("recent_probability", m))
    return Setting("inside", objective, task="gsm8k", steps=80, flags=flags)


def settings_of() -> list[Setting]:
    """Every objective with every k and m."""
    return [setting_of(objective, k, m) for k, m in WAYS for objective in OBJECTIVES]


def failed(row: dict) -> bool:
    """Whether a run diverged, ended below the untrained accuracy, or in few distinct responses."""
    first, last = row["path"][0], row["path"][-1]
    few = last["distinct"] < common.FEW_DISTINCT
    return bool(row["exit_code"]) or last["reward"] < first["reward"] or few


def score(rows: list[dict]) -> float:
    """The mean final accuracy, with 0 for a run that failed."""
    return float(np.mean([0.0 if failed(row) else row["path"][-1]["reward"] for row in rows]))


class Rows(common.Rows):
    """The completed runs, with rates chosen from a fixed grid by final accuracy."""

    rates: Sequence[float] = RATES

    def seeds_of(self, setting: Setting) -> Sequence[int]:
        return SEEDS

    def choice_of(self, setting: Setting) -> Choice:
        k = dict(setting.flags)["sync_every"]
        pairs = zip(RECENT, SEEDS_TO_CHOOSE, strict=True)
        runs = [(setting_of(setting.objective, k, m), seed) for m, seed in pairs]
        return Choice(self.rates, tuple(runs), score)


def run(setting: Setting, role: str, rate: float, *rest) -> dict:
    """Run tba.py once with a rate that decays linearly to 0; returns its row."""
    decaying = (*setting.flags, ("learning_rate", f"{rate}@0,0@end"))
    flags = setting.flags if role == "pilot" else decaying
    row = common.run(replace(setting, flags=flags), role, rate, *rest)
    return row | {"flags": setting.flags}


# ------------------------------------------------------------------------------------- the report


def outcome(found: list[dict]) -> str:
    """The mean and the worst final accuracy, and how many seeds failed, if any did."""
    lost = sum(map(failed, found))
    return f"{np.mean(finals(found)):.2f}, {min(finals(found)):.2f}" + f" ({lost})" * (lost > 0)


def tables_of(rows: Rows) -> dict[str, str]:
    """The table of docs/results.md, and the differences from `tb`."""

    def over_tb(found: list[dict]) -> str:
        of_tb = rows.of(replace(common.setting_of(found[0]), objective="tb"))
        return common.difference(found, of_tb, len(SEEDS))

    settings = {
        (f"k = {k}, m = {m}", f"`{name}`"): setting_of(name, k, m)
        for (k, m), name in itertools.product(WAYS, OBJECTIVES)
    }
    grid = partial(common.grid, rows, settings)
    return {"inside": grid(outcome), "inside, over tb": grid(over_tb)}


def main() -> None:
    args = common.parser_of(__doc__, "run", "report").parse_args()
    rows = Rows(common.ROOT / "bench" / "results" / "inside.jsonl")
    if args.what == "run":
        common.run_all(rows, settings_of(), run, args.minutes)
        return
    rows.check(settings_of())
    common.publish(tables_of(rows), print_all=True)


if __name__ == "__main__":
    main()
