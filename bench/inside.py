"""The paper's own comparison: objectives inside the same asynchronous loop, with real processes.

    python bench/inside.py run --minutes 30     # missing runs; 80 minutes in all; resumable
    python bench/inside.py report               # writes its table in docs/results.md, prints more

Every run is `bash run_gsm8k.sh --tiny` (tests/models/gsm8k, one Searcher and the Trainer, a core
each), with another objective, k (--sync_every) and m (--recent_probability). A row of
bench/results/inside.jsonl is one run, with its settings, seed, commit and held-out evaluations.

**The protocol** was committed before any reported seed was run:

1. Objectives: `tb`, `proximal_rloo`, `dr_grpo`, `grpo`, `online_dpo`. k = 1, 10, 30; m = 0.95, 0.5.
   beta is 0.05. `grpo` has the KL coefficient 0.1, `dr_grpo` none, as published.
2. The rate decays linearly to 0, as in the script. Each objective has its own at each k, from
   RATES, chosen by two runs per rate, one with each m and a seed of its own: the mean of their
   final accuracies, with 0 for a run that failed (or passed 50 nats); ties go to the lowest. The
   grid is not widened. Ten other seeds are reported, all of them.
3. Gradients are clipped at twice the median norm of the objective's first steps, from a run that
   does not learn: norms of these objectives differ a thousandfold.
4. Every 20 steps, and at the end, 2 responses to each of 200 held-out prompts are sampled at
   temperature 1. No held-out prompt is a training prompt.
5. **Primary outcomes**: the final held-out accuracy, as mean and worst seed; and how many seeds
   failed. A seed *fails* if tba.py ends it because it diverged, if its final accuracy is below the
   untrained one, or if fewer than 10 % of its final responses are distinct (of a policy that is
   always right, 48 % are: the prompts have 191 different solutions).
6. Appendix D.1 of the paper finds no stable setting for GRPO's loss in this loop. This is supported
   for `grpo` if at least 2 of 10 seeds fail in each of the six (k, m), and in each of them fewer of
   `tb`. It is refuted if in any of the six no seed fails and the final accuracy is within 0.05 of
   `tb`, or higher. Otherwise it is neither. The same is said of `dr_grpo`.
7. The paper's claim on stale data is supported, against an objective, if the accuracy of `tb` is
   higher at k = 30 by the 95 % interval over seeds, and by more than at k = 1, for both m. It is
   refuted if that of `tb` is lower at k = 30 by that interval, for both m.
8. Beside them, without a verdict: staleness, and how many of the choosing runs failed at each rate.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import claims  # beside this file; it finds tba.py
import numpy as np

import tba

OBJECTIVES = ("tb", "proximal_rloo", "dr_grpo", "grpo", "online_dpo")
SYNC_EVERY = (1, 10, 30)  # k
RECENT = (0.95, 0.5)  # m
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SEEDS_TO_CHOOSE = (101, 102)
SEEDS = range(1, 11)
STEPS = 80
STUDENT_T = {
    5: 2.31,
    10: 2.10,
}  # by seeds in each of two groups, for 95 %
MODELS = claims.ROOT / "tests" / "models"


class Measured(claims.Measured, tba.GSM8K):
    """GSM8K whose evaluations sample, so that distinct responses can be counted."""


tba.TASKS["measured_gsm8k"] = Measured
claims.BETA["gsm8k"] = 0.05
claims.OWN_FLAGS["gsm8k"] = {
    "plugin": __file__, "task": "measured_gsm8k", "engine": "small", "max_response_tokens": 32,
    "eval_every": 20, "eval_responses": 2,
}  # fmt: skip


def settings_of() -> list[claims.Setting]:
    """Every objective with every k and m."""
    return [
        claims.Setting("inside", objective, task="gsm8k", steps=STEPS, flags=flags_of(k, m))
        for k in SYNC_EVERY for m in RECENT for objective in OBJECTIVES
    ]  # fmt: skip


def flags_of(k: int, m: float) -> tuple[tuple[str, object], ...]:
    """The flags of an asynchronous run with one Searcher."""
    return ("asynchronous", 1), ("sync_every", k), ("recent_probability", m)


def failed(row: dict) -> bool:
    """Whether a run diverged, ended below the untrained accuracy, or in few distinct responses."""
    first, last = row["path"][0], row["path"][-1]
    return bool(row["exit_code"]) or last["reward"] < first["reward"] or last["distinct"] < 0.1


def score(row: dict) -> float:
    """The final accuracy, or 0 for a run that failed."""
    return 0.0 if failed(row) else row["path"][-1]["reward"]


class Rows(claims.Rows):
    """The completed runs, with rates chosen from a fixed grid by final accuracy."""

    def __init__(
        self,
        path: Path,
        rates: Sequence[float],
        seeds_of: Callable[[claims.Setting], Sequence[int]],
        choosing: Callable[[claims.Setting], list[tuple[claims.Setting, int]]],
    ) -> None:
        """`seeds_of`: a setting's reported seeds; `choosing`: the runs that choose its rate."""
        super().__init__(path)
        self.rates = rates
        self.seeds_of = seeds_of
        self.choosing = choosing

    def tried(self, setting: claims.Setting, rate: float) -> list[dict]:
        """The rows of a rate that choose."""
        found = []
        for chooser, seed in self.choosing(setting):
            own = self.of(chooser, "choose")
            found += [row for row in own if (row["rate"], row["seed"]) == (rate, seed)]
        return found

    def chosen_rate(self, setting: claims.Setting) -> float:
        """The rate with the best mean score; of equal ones the lowest. A fixed one is kept."""
        if fixed := dict(setting.flags).get("learning_rate"):
            return fixed
        scores = {rate: np.mean(list(map(score, self.tried(setting, rate)))) for rate in self.rates}
        return max(sorted(scores), key=lambda rate: round(scores[rate], 6))

    def missing(self, setting: claims.Setting) -> Iterator[tuple]:
        """The runs that a setting needs next: (setting, role, rate, seed)."""
        if self.clip(setting) is None:
            pilot = replace(setting, experiment="pilot", lag=0, steps=6, flags=())
            yield pilot, "pilot", 1e-12, SEEDS_TO_CHOOSE[0]
            return
        complete = True
        for chooser, seed in self.choosing(setting):
            there = {(row["rate"], row["seed"]) for row in self.of(chooser, "choose")}
            for rate in self.rates:
                if (rate, seed) not in there:
                    complete = False
                    yield chooser, "choose", rate, seed
        if complete:
            rate = self.chosen_rate(setting)
            there = {row["seed"] for row in self.of(setting, "report")}
            for seed in self.seeds_of(setting):
                if seed not in there:
                    yield setting, "report", rate, seed


def choosing(setting: claims.Setting) -> list[tuple[claims.Setting, int]]:
    """The runs that choose the rate of an objective and k: one with each m, and a seed of its own.

    >>> choosing(Setting(m=0.5))  # with the same k and objective
    [(Setting(m=0.95), 101), (Setting(m=0.5), 102)]
    """
    k = dict(setting.flags)["sync_every"]
    return [
        (replace(setting, flags=flags_of(k, m)), seed)
        for m, seed in zip(RECENT, SEEDS_TO_CHOOSE, strict=True)
    ]


def own_columns(out: Path) -> dict:
    """The columns of a row that claims.py does not have, from a run's folder."""
    metrics = claims.read_lines(out / "metrics.jsonl")
    names = ("staleness_max", "replay_ratio", "trainer_busy", "searcher_busy")
    return {name: round(float(np.mean([m[name] for m in metrics])), 2) for name in names}


def run(setting: claims.Setting, role: str, rate: float, *rest) -> dict:
    """Run tba.py once with a rate that decays linearly to 0; returns its row."""
    decay = ("learning_rate", f"{rate}@0,0@end")
    decaying = replace(setting, flags=(*setting.flags, decay))
    if role == "pilot":
        decaying = setting
    row = claims.run(decaying, role, rate, *rest, also=own_columns)
    return row | {"flags": setting.flags}


# ------------------------------------------------------------------------------------- the report


def final(rows: Sequence[dict]) -> list[float]:
    """Final accuracies."""
    return [row["path"][-1]["reward"] for row in rows]


def difference(found: list[dict], others: list[dict]) -> tuple[float, float]:
    """The difference of mean final accuracies, and half its 95 % interval; as many seeds each."""
    a, b = final(found), final(others)
    error = np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / len(a))
    return float(np.mean(a) - np.mean(b)), STUDENT_T[len(a)] * float(error)


def stability(of: Callable[..., list[dict]], objective: str) -> str:
    """What the protocol (6) says of appendix D.1: supported, refuted or neither.

    `of(objective, k, m)` gives the reported runs.
    """
    supports = []
    for k, m in itertools.product(SYNC_EVERY, RECENT):
        found, of_tb = of(objective, k, m), of("tb", k, m)
        lost = sum(map(failed, found))
        if lost == 0 and np.mean(final(found)) >= np.mean(final(of_tb)) - 0.05:
            return f"refuted at k = {k}, m = {m}"
        supports.append(lost >= 2 and sum(map(failed, of_tb)) < lost)
    return "supported" if all(supports) else "neither"


def stale_data(of: Callable[..., list[dict]], objective: str) -> str:
    """What the protocol (7) says of `tb` on stale data, compared with an objective."""
    ahead, behind = [], []
    for m in RECENT:
        gap, half = difference(of("tb", SYNC_EVERY[-1], m), of(objective, SYNC_EVERY[-1], m))
        gap_on_policy, _ = difference(of("tb", SYNC_EVERY[0], m), of(objective, SYNC_EVERY[0], m))
        ahead.append(gap > max(half, gap_on_policy))
        behind.append(gap < -half)
    return "supported" if all(ahead) else "refuted" if all(behind) else "neither"


def report(rows: Rows) -> None:
    """Write the table of docs/results.md, and print it with others and the verdicts."""
    settings = {
        (s.objective, *(value for _, value in s.flags[1:])): s for s in settings_of()
    }  # (objective, k, m) -> its setting

    def of(*key: object) -> list[dict]:
        return rows.of(settings[key], "report")

    def outcome(found: list[dict]) -> str:
        if not found:
            return claims.NOT_YET
        lost = sum(map(failed, found))
        return f"{np.mean(final(found)):.2f}, {min(final(found)):.2f}" + f" ({lost})" * (lost > 0)

    def over_tb(key: tuple) -> str:
        found, of_tb = of(*key), of("tb", *key[1:])
        if min(len(found), len(of_tb)) < len(SEEDS):
            return claims.NOT_YET
        gap, half = difference(found, of_tb)
        text = f"{gap:+.2f} ± {half:.2f}"
        return f"**{text}**" if abs(gap) > half else text

    def chosen_by(tried: list[dict], chosen: bool) -> str:
        """The accuracies of the runs with a rate, of which one is chosen."""
        text = ", ".join("failed" if failed(row) else f"{final([row])[0]:.2f}" for row in tried)
        return f"**{text}**" if chosen else text

    def mean(name: str, key: tuple) -> str:
        """The mean of a row's column, or of a metric of the last evaluation."""
        values = [row["path"][-1].get(name, row.get(name)) for row in of(*key)]
        return claims.shown(values).split(" ")[0]

    ways = list(itertools.product(SYNC_EVERY, RECENT))
    columns = [f"k = {k}, m = {m}" for k, m in ways]
    lines: dict[str, list[list[str]]] = defaultdict(list)
    for name in OBJECTIVES:
        keys = [(name, *way) for way in ways]
        lines["outcome"].append([f"`{name}`", *(outcome(of(*key)) for key in keys)])
        lines["more"].append([f"`{name}`, distinct", *(mean("distinct", key) for key in keys)])
        if name != "tb":
            lines["over tb"].append([f"`{name}`", *map(over_tb, keys)])
        for k in SYNC_EVERY:
            setting = settings[name, k, RECENT[0]]
            tried = {rate: rows.tried(setting, rate) for rate in RATES}
            chosen = {row["rate"] for row in of(name, k, RECENT[0])}
            cells = [chosen_by(own, rate in chosen) for rate, own in tried.items()]
            lines["choices"].append([f"`{name}`, k = {k}", *cells])
    for what, title in (
        ("staleness", "`tb`, staleness"),
        ("trainer_busy", "`tb`, Trainer busy"), ("searcher_busy", "`tb`, Searcher busy"),
    ):  # fmt: skip
        lines["more"].append([title, *(mean(what, ("tb", *way)) for way in ways)])
    parts = {
        "inside": claims.table(["", *columns], lines["outcome"]),
        "inside, over tb": claims.table(["", *columns], lines["over tb"]),
        "inside, choices": claims.table(["", *map("{:g}".format, RATES)], lines["choices"]),
        "inside, more": claims.table(["", *columns], lines["more"]),
    }
    claims.publish(parts, print_all=True)
    if all(len(of(*key)) >= len(SEEDS) for key in settings):
        for name in OBJECTIVES[1:]:
            verdicts = f"unstable, D.1: {stability(of, name)}"
            print(f"{name}: {verdicts}; `tb` ahead on stale data: {stale_data(of, name)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes to keep starting runs")
    args = parser.parse_args()
    path = claims.ROOT / "bench" / "results" / "inside.jsonl"
    rows = Rows(path, RATES, lambda setting: SEEDS, choosing)
    if args.what == "run":
        claims.run_all(rows, settings_of(), MODELS, args.minutes, 1, run)
    else:
        rows.check(settings_of(), MODELS)
        report(rows)


if __name__ == "__main__":
    main()
