"""The paper's claims in miniature: objectives against each other, with spread over seeds.

    python bench/claims.py all             # what is there already is not run again; hours
    python bench/claims.py staleness table # one experiment, then the tables and pictures of all
    python bench/claims.py --quick all     # a short cell of each experiment: does it work?

The task: go on with a review, as positively as you can. A Llama of 0.2 M parameters is first
pretrained on reviews of a grammar with some million sentences, which are as often good as bad. The
reward is continuous: the mean valence of a response's words, by a lexicon; -1 if it does not end.
Repeating the best word has the highest reward, and is far from the language that was learned: what
tells objectives apart is the reward at a KL, the diversity, and what stale data cost. Beside it are
the tiny TL;DR and the tiny red-teaming of the scripts.

A cell of a table is a run of tba.py in a process of its own. All cells of an experiment have the
same data, batches and number of steps; what the experiment is about differs, and the seed. Every
objective has the learning rate that is best for it at this lag, on a seed that is not reported
(`sweep`), and clips gradients at twice their usual norm in its first steps on-policy. Every 10
steps responses are sampled at temperature 1. Objectives price a KL differently or not at all, so
they are compared by the reward that they reach within a budget of KL, wherever else they go.

The experiments, which `grid` lists:

* staleness: a trajectory is as many steps old as the lag, and used once; the first ones are of
  the first policy (at a lag of 40 the mean age is 30 steps);
* pareto: reward against KL over the price of a nat, on-policy;
* replay: half of each batch from the buffer instead of searched; m; drawn by reward or uniformly;
* settings: steps between syncs, the last beta, S and K;
* bounded: where data are oldest, importance weights with a limit and clipped ratios beside `tb`;
* speed: asynchronous against lockstep in processes that sleep for a GPU's work, at two ratios of
  generation to training, with 1 to 7 Searchers;
* searchers: red-teaming with 1 to 8 Searchers and a slowed Trainer, after equally many steps;
* redteam, tldr: success against diversity, win rate against KL, on the scripts' tiny tasks.
"""

import argparse
import collections
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import scaling  # slows the processes of a run whose environment says so
from harness import read_lines

import tba

# ------------------------------------------------------------------------------------ the task

ADJECTIVES = {
    "superb": 1.0, "lovely": 0.8, "bright": 0.6, "good": 0.5, "fresh": 0.3, "old": 0.0,
    "red": 0.0, "small": 0.0, "long": 0.0, "plain": -0.2, "dull": -0.4, "bad": -0.6,
    "ugly": -0.8, "awful": -1.0,
}  # fmt: skip
VERBS = {
    "charms": 0.8, "helps": 0.5, "meets": 0.0, "follows": 0.0, "holds": 0.0, "bores": -0.5,
    "hurts": -0.8,
}  # fmt: skip
ADVERBS = {"gladly": 0.6, "gently": 0.4, "often": 0.0, "now": 0.0, "rarely": -0.2, "sadly": -0.6}
NOUNS = (
    "actor book bridge camera chair city clock coat cook dancer door engine film garden guest "
    "hall house island kitchen lamp market melody museum novel painter park phone poem queen river "
    "room sailor script shop singer song story table teacher train tree village voice window writer"
).split()
LEXICON = ADJECTIVES | VERBS | ADVERBS


def sentence(rng: random.Random) -> str:
    """One of the grammar's sentences."""
    noun = lambda: f"the {rng.choice(list(ADJECTIVES))} {rng.choice(NOUNS)}"
    verb, adverb = rng.choice(list(VERBS)), rng.choice(list(ADVERBS))
    forms = (
        f"{noun()} {verb} {noun()}",
        f"{noun()} {adverb} {verb} {noun()}",
        f"{noun()} is {rng.choice(list(ADJECTIVES))} and {rng.choice(list(ADJECTIVES))}",
        f"{adverb} {noun()} {verb} {noun()}",
    )
    return rng.choice(forms) + "."


def review(rng: random.Random) -> tuple[str, str]:
    """A prompt, and how it may go on."""
    body = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 2))))
    return f"a {rng.choice(NOUNS)} and a {rng.choice(NOUNS)}:", f" {body}"


def valence(text: str) -> float:
    """The mean valence of a text's words, in [-1, 1]; 0 of an empty one."""
    words = text.replace(".", " ").split()
    return sum(LEXICON.get(word, 0.0) for word in words) / max(1, len(words))


class Valence(tba.Task):
    """Go on with a review as positively as you can."""

    columns = ("text",)
    template = "{text}"
    greedy_evaluation = False
    wants_logprobs = True

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, [valence(response) for response in responses], -1.0)

    def evaluate(self, examples: list, responses: list[str], ended: np.ndarray) -> list[dict]:
        rewards = self.rewards(examples, responses, ended)
        pairs = zip(rewards, responses, strict=True)
        return [{"reward": float(reward), "text": text} for reward, text in pairs]

    def summarize(self, records: list[dict]) -> dict[str, float]:
        texts = [record["text"] for record in records]
        words = collections.Counter(word for text in texts for word in text.split())
        shares = np.array(list(words.values())) / max(1, words.total())
        return {
            "reward": float(np.mean([record["reward"] for record in records])),
            "kl": float(np.mean([record["kl"] for record in records])),
            "distinct": len(set(texts)) / len(texts),
            "word_entropy": float(-(shares * np.log(shares)).sum()),
        }


tba.TASKS["valence"] = Valence


def make_task(folder: Path) -> None:
    """The pretrained policy and the prompts, made once."""
    import tiny

    if (folder / "data" / "test.jsonl").exists():
        return
    rng = random.Random(0)
    tiny.make_policy([review(rng) for _ in range(20_000)], folder / "model", steps=1500)
    for split, count in (("train", 1000), ("test", 64)):
        rows = [{"text": review(rng)[0]} for _ in range(count)]
        tiny.write_lines(folder / "data" / f"{split}.jsonl", rows)


# ------------------------------------------------------------------------------------ the grid

BETA = 0.02
KL_COEFFICIENT = 0.04  # of GRPO, as published
BUDGETS = {"reward": 6.0, "win_rate": 3.0}  # nats a response
COLLAPSED = 50.0  # nats at the end
SEEDS = (1, 2, 3)
SWEPT_ON = 100  # the seed of the sweep
RATES = {"valence": (3e-4, 1e-3, 3e-3), "tldr": (3e-5, 1e-4, 3e-4), "redteam": (3e-4, 1e-3, 3e-3)}
# at which gradients are clipped: twice the median norm of an objective's first steps, on-policy
CLIPPED_AT = {
    "tb": 100.0, "rloo": 1.2, "proximal_rloo": 1.2, "dr_grpo": 0.016, "online_dpo": 0.4,
    "grpo": 0.8, "tba_prime": 0.09,
}  # fmt: skip
OBJECTIVES = tuple(CLIPPED_AT)
LAGS = (0, 10, 40, 2, 5, 16)  # in the order in which they are run
SWEPT_LAGS = (0, 10, 40)  # others have the learning rate of the next smaller one
WIDER = {  # their best rate was the largest, so that a larger one is tried
    ("valence", "proximal_rloo", 10): 1e-2, ("valence", "grpo", 10): 1e-2,
    ("valence", "proximal_rloo", 40): 1e-2, ("valence", "dr_grpo", 40): 1e-2,
    ("valence", "grpo", 40): 1e-2, ("tldr", "tb", 10): 1e-3, ("tldr", "proximal_rloo", 10): 1e-3,
}  # fmt: skip
BETAS = {"tldr": (0.05, 0.8), "redteam": (0.1, 1.0)}
SLOW = {"1:1": (0.012, 0.3), "4:1": (0.05, 0.3)}  # seconds of a decode step, an optimizer step
SLOW_SEARCHERS = (0.03, 0.3)


@dataclass(frozen=True)
class Cell:
    """A run of tba.py."""

    objective: str
    learning_rate: float
    lag: int
    seed: int
    beta: float = BETA
    steps: int = 80
    task: str = "valence"
    mode: str = "lockstep"  # or "replay": lockstep with replay; or "asynchronous"
    slow: tuple[float, ...] = ()  # seconds that a decode step and an optimizer step sleep
    flags: tuple[tuple[str, object], ...] = ()  # of tba.py, in place of those that all cells have

    @property
    def name(self) -> str:
        """Its values, without those at the end that are the usual ones."""
        values = [str(value) for value in list(asdict(self).values())[:6]]
        if self.task != "valence":
            values.append(self.task)
        if self.mode != "lockstep":
            values.append(self.mode)
        if self.slow:
            values.append("slow_" + "_".join(map(str, self.slow)))
        values += [f"{name}={value}" for name, value in self.flags]
        return "-".join(values)


Rate = Callable[..., float]  # the best learning rate: (objective, lag, task, mode)


def rates_of(objective: str, lag: int, task: str) -> tuple[float, ...]:
    """The learning rates that are tried."""
    of = task, objective, lag
    return (*RATES[task], WIDER[of]) if of in WIDER else RATES[task]


def sweep(_: Rate) -> list[Cell]:
    cells = [
        Cell(o, rate, lag, SWEPT_ON)
        for lag in SWEPT_LAGS for o in OBJECTIVES for rate in rates_of(o, lag, "valence")
    ]  # fmt: skip
    for rate in RATES["redteam"]:
        cells += [redteam_cell(o, rate, SWEPT_ON, mode) for o, mode in RED_TEAMERS]
    cells += [
        tldr_cell(o, rate, SWEPT_ON) for o in SUMMARIZERS for rate in rates_of(o, TLDR_LAG, "tldr")
    ]
    return cells


def staleness(rate: Rate) -> list[Cell]:
    cells = []
    for lag in LAGS:
        swept = max(other for other in SWEPT_LAGS if other <= lag)
        cells += [Cell(o, rate(o, swept), lag, seed) for seed in SEEDS for o in OBJECTIVES]
    return cells


# dr_grpo has no price; tba_prime and rloo are tb, on-policy
ON_THE_FRONTIER = ("tb", "proximal_rloo", "online_dpo", "grpo")
PRICES = (0.25, 1.0, 4.0)  # of a nat, in multiples of what all other cells have


def pareto(rate: Rate) -> list[Cell]:
    """The price of a nat is beta; GRPO's is the coefficient of its KL term."""

    def cell(objective: str, seed: int, price: float) -> Cell:
        usual = Cell(objective, rate(objective, 0), 0, seed)
        if price == 1:
            return usual
        if objective == "grpo":
            return replace(usual, flags=(("kl_coefficient", price * KL_COEFFICIENT),))
        return replace(usual, beta=price * BETA)

    return [cell(o, seed, price) for seed in SEEDS for price in PRICES for o in ON_THE_FRONTIER]


def price_of(record: dict) -> float:
    """Of a nat, in multiples of the usual one."""
    coefficient = dict(record["flags"]).get("kl_coefficient", KL_COEFFICIENT)
    return record["beta"] / BETA * coefficient / KL_COEFFICIENT


REPLAYED = ("tb", "proximal_rloo", "dr_grpo")


def replay(rate: Rate) -> list[Cell]:
    """Half of a batch replayed is some 10 steps old in the mean: the rates are those of lag 10."""

    def cell(objective: str, seed: int, m: float, *more: tuple[str, object]) -> Cell:
        flags = (("recent_probability", m), *more)
        return Cell(objective, rate(objective, 10), 0, seed, mode="replay", flags=flags)

    cells = []
    for seed in SEEDS:
        cells += [cell(o, seed, m) for o in REPLAYED for m in (1.0, 0.5)]
        cells.append(cell("tb", seed, 0.25))
        for by_reward in (0.0, 16.0):  # of 32 responses to a prompt 16 are drawn
            choice = ("searched_per_prompt", 32), ("reward_inverse_temperature", by_reward)
            cells.append(cell("tb", seed, 0.5, *choice))
    return cells


def settings(rate: Rate) -> list[Cell]:
    """One setting changes at a time; the first cell is one of `staleness`.

    Weights are sent for an evaluation too, so that none is made between two syncs.
    """
    changes: list[tuple[tuple[str, object], ...]] = [()]
    changes += [(("sync_every", k), ("eval_every", e)) for k, e in ((4, 20), (10, 10), (40, 40))]
    changes += [(("beta", f"0.1@0,{last}@40"),) for last in (0.1, 0.02, 0.005, 0.001)]
    for B, K in ((32, 4), (4, 32)):
        sizes = ("prompts_per_step", B), ("trained_per_prompt", K), ("searched_per_prompt", K)
        changes.append(sizes)
    return [Cell("tb", rate("tb", 0), 0, seed, flags=flags) for seed in SEEDS for flags in changes]


STALEST = (  # lag, flags, the lag whose learning rate it has
    (40, (), 40),
    (0, (("sync_every", 40), ("eval_every", 40)), 10),  # some 20 steps old in the mean
)
BOUNDED = (("tb", ()), ("tba_prime", ()), ("tba_prime", (("ratio_limit", 8),)),
           ("proximal_rloo", ()))  # fmt: skip


def bounded(rate: Rate) -> list[Cell]:
    """Where `tb` collapses: does a bound on the ratio to the sampling policy prevent it?

    `tba_prime` is `tb` with its gradient as advantages, which --ratio_limit can bound;
    `proximal_rloo` clips. Half of the cells are those of `staleness` and `settings`.
    """
    return [
        Cell(o, rate(o, swept), lag, seed, flags=flags + more)
        for seed in SEEDS for lag, flags, swept in STALEST for o, more in BOUNDED
    ]  # fmt: skip


def speed(rate: Rate) -> list[Cell]:
    """Lockstep also with a lag of 1: generation beside training, but each waits for the other."""
    cells = []
    for seed in SEEDS:
        for ratio, counts in (("1:1", (1,)), ("4:1", (1, 2, 4, 7))):
            slow = SLOW[ratio]
            cells += [Cell("tb", rate("tb", 0), L, seed, steps=60, slow=slow) for L in (0, 1)]
            for count in counts:
                flags = (("num_searchers", count), ("recent_probability", 0.9))
                cells.append(
                    Cell("tb", rate("tb", 0), 0, seed, steps=120, mode="asynchronous", slow=slow,
                         flags=flags)
                )  # fmt: skip
    return cells


def searchers(rate: Rate) -> list[Cell]:
    best = rate("tb", 0, "redteam", "replay")
    return [
        replace(redteam_cell("tb", best, seed, "asynchronous"), slow=SLOW_SEARCHERS,
                flags=(("num_searchers", M),))
        for seed in SEEDS for M in (1, 2, 4, 8)
    ]  # fmt: skip


RED_TEAMERS = (("tb", "replay"), ("tb", "lockstep"), ("proximal_rloo", "lockstep"))
ON_POLICY = (  # what it searched is trained on, all of it, as it was sampled
    ("near_duplicate", 0), ("explore_probability", 0), ("evict", "oldest"),
    ("searched_per_prompt", 8), ("tau", 1),
)  # fmt: skip


def redteam_cell(objective: str, rate: float, seed: int, mode: str, beta: float = 0.3) -> Cell:
    flags = ON_POLICY if mode == "lockstep" else ()
    return Cell(objective, rate, 0, seed, beta, 120, "redteam", mode, flags=flags)


def redteam(rate: Rate) -> list[Cell]:
    return [
        redteam_cell(o, rate(o, 0, "redteam", mode), seed, mode, beta)
        for seed in SEEDS for beta in BETAS["redteam"] for o, mode in RED_TEAMERS
    ]  # fmt: skip


TLDR_LAG = 10
SUMMARIZERS = ("tb", "proximal_rloo", "online_dpo")


def tldr_cell(objective: str, rate: float, seed: int, beta: float = 0.2) -> Cell:
    return Cell(objective, rate, TLDR_LAG, seed, beta, 60, "tldr")


def tldr(rate: Rate) -> list[Cell]:
    return [
        tldr_cell(o, rate(o, TLDR_LAG, "tldr"), seed, beta)
        for seed in SEEDS for beta in BETAS["tldr"] for o in SUMMARIZERS
    ]  # fmt: skip


EXPERIMENTS = {
    of.__name__: of
    for of in (sweep, staleness, pareto, replay, settings, bounded,
               speed, searchers, redteam, tldr)
}  # fmt: skip


def metric_of(record: dict) -> str:
    """What an evaluation of its task is about."""
    return "win_rate" if "win_rate" in record["after"] else "reward"


def within_budget(record: dict) -> float:
    """The highest reward (or win rate) within its budget of KL.

    Of a run's evaluations, and between two of them.
    """
    metric = metric_of(record)
    budget = BUDGETS[metric]
    path = [(e["kl"], e[metric]) for e in record["evaluations"]]
    rewards = [reward for kl, reward in path if kl <= budget]
    for (kl, reward), (next_kl, next_reward) in itertools.pairwise(path):
        if (kl - budget) * (next_kl - budget) < 0:  # it leaves or comes back: interpolate
            rewards.append(reward + (next_reward - reward) * (budget - kl) / (next_kl - kl))
    return max(rewards)


def has_collapsed(record: dict) -> bool:
    """Whether it ended far from language, or as diverged."""
    return bool(record["exit_code"]) or record["after"]["kl"] > COLLAPSED


def score(record: dict) -> float:
    """What a learning rate is chosen by."""
    if record["task"] == "redteam":
        return record["after"]["attack_success_rate"] * record["after"]["cosine_distance"]
    return -1.0 if has_collapsed(record) else within_budget(record)


class NotSwept(Exception):
    """No learning rate is chosen yet for what a cell needs."""


def best_rate(records: list[dict]) -> Rate:
    """Of what the sweep found. Raises NotSwept where it is not complete."""
    found: dict[tuple, dict[float, float]] = {}
    for r in records:
        if r["seed"] == SWEPT_ON:
            of = r["objective"], r["lag"], r["task"], r["mode"]
            if r["learning_rate"] in rates_of(*of[:3]):
                found.setdefault(of, {})[r["learning_rate"]] = score(r)

    def rate(objective: str, lag: int, task: str = "valence", mode: str = "lockstep") -> float:
        of = objective, lag, task, mode
        missing = set(rates_of(objective, lag, task)) - set(found.get(of, {}))
        if missing:
            raise NotSwept(f"no learning rate is chosen for {of}: run the sweep first")
        return max(found[of], key=found[of].get)

    return rate


def quick(experiment: str) -> list[Cell]:
    """Its first cell, of six steps; three of staleness and speed, two of red-teaming."""
    cells = EXPERIMENTS[experiment](lambda *_: 1e-3)
    count = {"staleness": 3, "speed": 3, "redteam": 2}.get(experiment, 1)
    return [replace(cell, seed=1, steps=6) for cell in cells[:count]]


# ----------------------------------------------------------------------------------- the runs


def command_of(cell: Cell, files: Path, out: Path) -> list[str]:
    """The command line of a cell's run."""
    flags: dict[str, object] = {
        "objective": cell.objective, "learning_rate": cell.learning_rate, "seed": cell.seed,
        "beta": cell.beta, "steps": cell.steps, "output_dir": out, "plugin": __file__,
        "engine": "transformers", "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    if cell.mode == "lockstep":
        flags["lag"] = cell.lag
    if cell.task == "valence":
        command = [sys.executable, str(ROOT / "tba.py")]
        flags |= {
            "task": "valence", "model": files / "valence" / "model",
            "dataset": files / "valence" / "data", "num_searchers": 1, "prompts_per_step": 8,
            "trained_per_prompt": 16, "searched_per_prompt": 16, "sequences_in_flight": 128,
            "temperature": 1.0, "max_response_tokens": 64, "eval_every": 0 if cell.slow else 10,
            "eval_responses": 4, "initial_trajectories": 128,
            "max_grad_norm": CLIPPED_AT[cell.objective],
            "kl_coefficient": KL_COEFFICIENT if cell.objective == "grpo" else 0.0,
        }  # fmt: skip
    else:
        command = ["bash", str(ROOT / f"run_{cell.task}.sh"), "--tiny"]
    if cell.task == "tldr":
        flags |= {"eval_every": 20}
    if cell.mode != "asynchronous":
        command.append("--synchronous")
    flags |= dict(cell.flags)
    return command + [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def model_of(cell: Cell) -> scaling.Setting:
    """The model of a run, without its constants."""
    M = dict(cell.flags)["num_searchers"]
    return scaling.Setting(
        M, np.ones(1), 0.0, steps=cell.steps, B=8, K=16, S=16, slots=128, lookahead=1.0,
        whole_batches=True, initial=128,
    )  # fmt: skip


def run(cell: Cell, files: Path, results: Path) -> dict:
    """What came of a cell, and its settings; kept in a file of its own, and not run again."""
    path = results / f"{cell.name}.json"
    if path.exists():
        return json.loads(path.read_text())
    folder = results / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    notes = folder / "notes"
    if cell.slow:
        notes.mkdir(parents=True, exist_ok=True)
        decode, step = cell.slow
        environment |= {"TBA_SLOW": f"{decode} 0 {step}", "TBA_SLOW_NOTES": str(notes)}
    done = subprocess.run(
        command_of(cell, files, folder / "run"), capture_output=True, text=True, env=environment,
        check=False, timeout=1800,
    )  # fmt: skip
    diverged = done.returncode == 1 and "diverged" in done.stderr
    if done.returncode and not diverged:
        raise RuntimeError(f"{cell.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    evaluations = read_lines(folder / "run" / "eval.jsonl")
    metrics = read_lines(folder / "run" / "metrics.jsonl")
    record = asdict(cell) | {"exit_code": done.returncode}
    record["before"] = evaluations[0]
    record["after"] = evaluations[-1]  # of a run that diverged: the last there is
    record["evaluations"] = evaluations
    record["steps_taken"] = len(metrics)
    record["rewards"] = [round(m["reward"], 4) for m in metrics]
    record["seconds"] = [round(m["seconds"], 3) for m in metrics]
    record["staleness"] = float(np.mean([m["staleness_mean"] for m in metrics]))
    for name in ("entropy", "buffer_trajectories"):
        record[name] = metrics[-1][name]
    if cell.slow and cell.mode == "asynchronous":
        record["observed"], constants = scaling.read_run(folder / "run", notes, model_of(cell))
        record["constants"] = asdict(constants) | {
            "lengths": constants.lengths[:: len(constants.lengths) // 512 + 1].tolist()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    shown = {name: round(value, 3) for name, value in record["after"].items() if name != "split"}
    print(f"{cell.name}: {shown}", flush=True)
    return record


# ---------------------------------------------------------------------------- tables, pictures


def best_of_n(task: Path) -> list[tuple[int, float, float]]:
    """(n, KL, reward) of the best of n samples of the reference: the frontier without training."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model").eval()
    rewards = []
    for line in (task / "data" / "test.jsonl").read_text().splitlines():
        prompt = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"]
        made = model.generate(
            prompt, do_sample=True, top_k=0, max_new_tokens=64, num_return_sequences=128
        )
        made = made[:, prompt.shape[1] :]
        ended = (made == tokenizer.eos_token_id).any(1).tolist()
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        rewards.append([valence(t) if e else -1.0 for t, e in zip(texts, ended, strict=True)])
    ordered = np.sort(np.array(rewards), 1)  # (prompts, 128)
    total = ordered.shape[1]
    frontier = []
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        # the chance that a sample is the best of n that are drawn from all
        weights = np.array([math.comb(i, n - 1) / math.comb(total, n) for i in range(total)])
        reward = float((ordered * weights).sum(1).mean())
        frontier.append((n, math.log(n) - (n - 1) / n, reward))
    return frontier


def spread(values: list[float]) -> float:
    """The standard deviation over seeds."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def mean_and_spread(values: list[float], digits: int) -> str:
    return f"{np.mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def reward_in_budget(records: list[dict]) -> str:
    """Mean and standard deviation over seeds, and how many collapsed."""
    text = mean_and_spread([within_budget(r) for r in records], 2)
    collapsed = sum(map(has_collapsed, records))
    return text + f" ({collapsed} collapsed)" * bool(collapsed)


def reward_at_kl(records: list[dict]) -> str:
    """The same at the end, and the KL there."""
    reward = mean_and_spread([r["after"][metric_of(r)] for r in records], 2)
    kl = mean_and_spread([r["after"]["kl"] for r in records], 1)
    return f"{reward} at {kl}"


def share_of_distinct(records: list[dict]) -> str:
    """Of the responses of an evaluation, in which 64 prompts have 4 each."""
    return mean_and_spread([r["after"]["distinct"] for r in records], 2)


def success_at_distance(records: list[dict]) -> str:
    after = [r["after"] for r in records]
    success = mean_and_spread([a["attack_success_rate"] for a in after], 2)
    return f"{success} at {mean_and_spread([a['cosine_distance'] for a in after], 2)}"


Key = Callable[[dict], object]


def table(records: list[dict], head: str, row: Key, column: Key, show: Callable) -> str:
    """Markdown: what `show` makes of the records of each row and column, in the order they come."""
    groups: dict[tuple, list[dict]] = collections.defaultdict(list)
    for record in records:
        groups[row(record), column(record)].append(record)
    columns = list(dict.fromkeys(of[1] for of in groups))
    lines = [
        f"| {head} | " + " | ".join(map(str, columns)) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in dict.fromkeys(of[0] for of in groups):
        cells = [show(groups[name, c]) if (name, c) in groups else "-" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def flags_of(record: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["flags"]) or "-"


def objective_of(record: dict) -> str:
    return f"`{record['objective']}`"


def bound_of(record: dict) -> str:
    """An objective of `bounded`, with its limit if it has one."""
    limit = dict(record["flags"]).get("ratio_limit")
    return objective_of(record) + (f", ratio limit {limit}" if limit else "")


def stalest_of(record: dict) -> str:
    """Where in `bounded` a cell has old data from."""
    return "lag 40" if record["lag"] else "k = 40"


TARGET = 0.3  # of `speed`: the mean reward of the responses of SMOOTHED steps
SMOOTHED = 8


def smoothed(record: dict) -> tuple[np.ndarray, np.ndarray]:
    """(seconds since the first step, mean reward of the groups that came in the last steps)."""
    rewards = np.array(record["rewards"])
    means = [np.nanmean(rewards[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(rewards))]
    return np.array(record["seconds"]) - record["seconds"][0], np.array(means)


def seconds_to_target(record: dict) -> float:
    seconds, rewards = smoothed(record)
    reached = np.flatnonzero(rewards >= TARGET)
    return float(seconds[reached[0]]) if len(reached) else math.inf


def ratio_of(record: dict) -> str:
    """Of generation to training, of a slowed cell."""
    return {slow: ratio for ratio, slow in SLOW.items()}[tuple(record["slow"])]


def searchers_of(record: dict) -> str:
    if record["mode"] != "asynchronous":
        return "lockstep" + ", lag 1" * record["lag"]
    count = dict(record["flags"])["num_searchers"]
    return f"{count} Searcher" + "s" * (count > 1)


def predicted(record: dict, records: list[dict]) -> dict[str, float]:
    """What the model of bench/scaling.py makes of it, from constants of a run with 1 Searcher."""
    M = dict(record["flags"])["num_searchers"]
    constants = constants_of(record, records)
    lengths = np.array(constants["lengths"])
    return scaling.simulate(scaling.Setting(**constants | {"searchers": M, "lengths": lengths}))


def constants_of(record: dict, records: list[dict]) -> dict:
    """Measured in the run of the same seed, and equally slow, with 1 Searcher."""
    alike = [r for r in records if r["seed"] == record["seed"] and r["slow"] == record["slow"]]
    return next(r["constants"] for r in alike if searchers_of(r) == "1 Searcher")


def measured_ratio(record: dict, records: list[dict]) -> float:
    """Seconds of generating a batch of 128 over those of an optimizer step on it."""
    constants = constants_of(record, records)
    lengths = np.array(constants["lengths"])
    longest = np.random.default_rng(0).choice(lengths, (1000, 128)).max(1).mean()
    return constants["decode"] * longest / constants["step"]


def speed_table(records: list[dict]) -> str:
    lines = [
        "| generation : training | run | seconds a step | reward after 60 steps | to the target, s "
        "| times as fast | searched for one trained on: model, real |",
        "|---" * 7 + "|",
    ]
    groups: dict[tuple[str, str], list[dict]] = collections.defaultdict(list)
    for record in records:
        groups[ratio_of(record), searchers_of(record)].append(record)
    for (ratio, name), own in groups.items():
        lockstep = {r["seed"]: seconds_to_target(r) for r in groups[ratio, "lockstep"]}
        if (ratio, "1 Searcher") not in groups or not {r["seed"] for r in own} <= set(lockstep):
            continue  # the rest has not been run yet
        measured = [measured_ratio(r, records) for r in groups[ratio, "1 Searcher"]]
        a_step = [(r["seconds"][-1] - r["seconds"][0]) / (r["steps_taken"] - 1) for r in own]
        rewards = [smoothed(r)[1][:60][-1] for r in own]
        to_target = [seconds_to_target(r) for r in own]
        ratios = [lockstep[r["seed"]] / seconds_to_target(r) for r in own]
        searched = "1, 1"
        if name.endswith(("Searcher", "Searchers")):
            model = np.mean([predicted(r, records)["searched"] / r["steps"] / 128 for r in own])
            real = np.mean([r["observed"]["searched"] / r["steps"] / 128 for r in own])
            searched = f"{model:.2f}, {real:.2f}"
        lines.append(
            f"| {np.mean(measured):.1f} | {name} | {mean_and_spread(a_step, 2)} "
            f"| {mean_and_spread(rewards, 2)} | {mean_and_spread(to_target, 1)} "
            f"| {mean_and_spread(ratios, 1)} | {searched} |"
        )
    return "\n".join(lines)


def searchers_table(records: list[dict]) -> str:
    lines = ["| Searchers | attacks searched | success at cosine distance |", "|---|---|---|"]
    for name in dict.fromkeys(map(searchers_of, records)):
        own = [r for r in records if searchers_of(r) == name]
        searched = mean_and_spread([r["observed"]["searched"] for r in own], 0)
        lines.append(f"| {name} | {searched} | {success_at_distance(own)} |")
    return "\n".join(lines)


def tables(of: dict[str, list[dict]]) -> Iterator[tuple[str, str]]:
    """(title, markdown) of every experiment that has records."""
    rate = lambda r: f"{objective_of(r)}, lag {r['lag']}, {r['task']}, {r['mode']}"
    shown = lambda records: f"{score(records[0]):.3f}"
    layouts = {
        "sweep": ("of", rate, lambda r: f"rate {r['learning_rate']:g}", shown),
        "staleness": ("objective", objective_of, lambda r: f"lag {r['lag']}", reward_in_budget),
        "pareto": ("objective", objective_of, lambda r: f"price {price_of(r):g}", reward_at_kl),
        "replay": ("replay", flags_of, objective_of, reward_in_budget),
        "settings": ("setting", flags_of, objective_of, reward_in_budget),
        "bounded": ("objective", bound_of, stalest_of, reward_in_budget),
        "redteam": (
            "objective", lambda r: f"{objective_of(r)}, {r['mode']}",
            lambda r: f"beta {r['beta']:g}", success_at_distance,
        ),
        "tldr": ("objective", objective_of, lambda r: f"beta {r['beta']:g}", reward_in_budget),
    }  # fmt: skip
    for experiment, records in of.items():
        if not records:
            continue
        if experiment == "staleness":  # the grid has another order
            records = sorted(records, key=lambda r: r["lag"])
        if experiment == "speed":
            yield experiment, speed_table(records)
        elif experiment == "searchers":
            yield experiment, searchers_table(records)
        else:
            yield experiment, table(records, *layouts[experiment])
        if experiment in ("staleness", "settings", "bounded", "replay", "tldr"):
            own = layouts[experiment][:3]
            yield f"{experiment}, at the end", table(records, *own, reward_at_kl)
            if experiment != "tldr":  # it counts no distinct responses
                yield f"{experiment}, diversity", table(records, *own, share_of_distinct)


def line_over(axes, points: dict[float, list[float]], label: str) -> None:
    """Means over seeds with their standard deviations."""
    xs = sorted(points)
    means = [np.mean(points[x]) for x in xs]
    axes.errorbar(xs, means, [spread(points[x]) for x in xs], label=label, marker="o", capsize=3)


def draw_objectives(of: dict[str, list[dict]], frontier: list, path: Path) -> None:
    """What staleness costs; the paths of reward against KL without and with it; best-of-n."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, *others = figure.subplots(1, 3)
    lags = sorted({r["lag"] for r in of["staleness"]})
    for i, objective in enumerate(OBJECTIVES):
        own = [r for r in of["staleness"] if r["objective"] == objective]
        by_lag = collections.defaultdict(list)
        for r in own:
            by_lag[lags.index(r["lag"]) + 0.04 * (i - 3)].append(within_budget(r))
        line_over(left, by_lag, objective)
        for axes, lag in zip(others, (0, 40), strict=True):
            for r in own:
                if r["lag"] == lag:
                    kls = [e["kl"] for e in r["evaluations"]]
                    rewards = [e["reward"] for e in r["evaluations"]]
                    label = objective if r["seed"] == SEEDS[0] else None
                    axes.plot(kls, rewards, ".-", color=f"C{i}", label=label, alpha=0.7)
            axes.set(title=f"lag {lag}", xlabel="KL to the reference, nats a response")
    left.set(xlabel="steps of lag", ylabel=f"reward within {BUDGETS['reward']:g} nats")
    left.set_xticks(range(len(lags)), map(str, lags))
    for axes in others:
        xs, ys = [kl for _, kl, _ in frontier], [reward for *_, reward in frontier]
        axes.plot(xs, ys, "k--", label="best of n")
        axes.axvline(BUDGETS["reward"], color="black", lw=0.8)
        axes.set(ylabel="reward", xscale="symlog", xlim=(0, None))
    handles, labels = others[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    finish([left, *others], figure, path)


def own_legends(panels: Sequence) -> None:
    """A legend in each panel that has something to name."""
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)


def finish(panels: Sequence, figure, path: Path) -> None:
    """Grids, and the file."""
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def draw_speed(records: list[dict], path: Path) -> None:
    """Reward against time, for each ratio of generation to training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, ratio in zip(panels, SLOW, strict=True):
        own = [r for r in records if ratio_of(r) == ratio]
        names = list(dict.fromkeys(map(searchers_of, own)))
        for r in own:
            name = searchers_of(r)
            label = name if r["seed"] == own[0]["seed"] else None
            axes.plot(*smoothed(r), color=f"C{names.index(name)}", label=label, alpha=0.8)
        axes.axhline(TARGET, color="black", lw=0.8)
        axes.set(xlabel="seconds since the first step", ylabel="reward of new responses",
                 title=f"generation : training {ratio}")  # fmt: skip
    own_legends(panels)
    finish(panels, figure, path)


def draw_red_teaming(of: dict[str, list[dict]], path: Path) -> None:
    """Success against diversity, over beta and over the number of Searchers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    named = lambda r: f"{r['objective']}, {r['mode']}, beta {r['beta']:g}"
    groups: list[tuple] = [(left, r, named(r)) for r in of["redteam"]]
    groups += [(right, r, searchers_of(r)) for r in of["searchers"]]
    names = {axes: list(dict.fromkeys(name for a, _, name in groups if a is axes))
             for axes in (left, right)}  # fmt: skip
    for axes, record, name in groups:
        i = names[axes].index(name)
        after = record["after"]
        first = record["seed"] == SEEDS[0]
        axes.scatter(after["cosine_distance"], after["attack_success_rate"], color=f"C{i}",
                     marker="osv^"[i % 3], label=name if first else None, alpha=0.8)  # fmt: skip
    left.set(ylabel="attack success rate", title="beta", xlabel="cosine distance")
    right.set(title="Searchers, equal steps", xlabel="cosine distance")
    own_legends([left, right])
    finish([left, right], figure, path)


Grid = Callable[[str], list[Cell]]  # an experiment's cells


def records_of(results: Path, grid: Grid) -> dict[str, list[dict]]:
    """What there is of each experiment, in the order of its grid."""
    found = {}
    for experiment in EXPERIMENTS:
        try:
            paths = [results / f"{cell.name}.json" for cell in grid(experiment)]
        except NotSwept:
            paths = []
        found[experiment] = [json.loads(path.read_text()) for path in paths if path.exists()]
    return found


def report(files: Path, results: Path, plots: Path, grid: Grid) -> None:
    """Print the tables, draw the pictures."""
    of = records_of(results, grid)
    path = results / "best_of_n.json"
    if not path.exists():
        path.write_text(json.dumps(best_of_n(files / "valence")) + "\n")
    frontier = json.loads(path.read_text())
    for title, text in tables(of):
        print(f"\n{title}\n\n{text}")
    print("\nbest of n (KL, reward):", [tuple(round(x, 2) for x in f) for f in frontier])
    plots.mkdir(parents=True, exist_ok=True)
    draw_objectives(of, frontier, plots / "objectives.png")
    if of["speed"]:
        draw_speed(of["speed"], plots / "speed.png")
    if of["redteam"] or of["searchers"]:
        draw_red_teaming(of, plots / "redteam.png")


def read_records(results: Path) -> list[dict]:
    """All cells that were run."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("*-*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="+", choices=[*EXPERIMENTS, "table", "all"])
    parser.add_argument("--quick", action="store_true", help="a cell of six steps of each")
    parser.add_argument(
        "--at_once", type=int, default=2, help="runs at a time, where time is not measured"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "claims")
    parser.add_argument("--plots", type=Path, default=ROOT / "bench" / "plots")
    args = parser.parse_args()
    if args.quick:
        args.out /= "quick"
        args.plots /= "quick"
    files = Path(os.environ.get("TBA_CACHE", ROOT / ".cache"))
    make_task(files / "valence")
    experiments = args.experiments
    if "all" in experiments:
        experiments = [*EXPERIMENTS, "table"]

    def grid(experiment: str) -> list[Cell]:
        if args.quick:
            return quick(experiment)
        return EXPERIMENTS[experiment](best_rate(read_records(args.out)))

    failures = 0
    for experiment in experiments:
        if experiment == "table":
            report(files, args.out, args.plots, grid)
            continue
        try:
            cells = grid(experiment)
        except NotSwept as error:
            sys.exit(f"claims.py: error: {error}")
        for task in {cell.task for cell in cells} - {"valence"}:  # before two cells make it at once
            out = files / f"tiny-{task}"
            command = [sys.executable, ROOT / "tests" / "tiny.py", task, "--out", out]
            subprocess.run(command, check=True)
        timed = experiment in ("speed", "searchers")  # nothing runs beside them
        with ThreadPoolExecutor(1 if timed else args.at_once) as pool:
            runs = [pool.submit(run, cell, files, args.out) for cell in cells]
        for failed in filter(None, [one.exception() for one in runs]):
            print(f"claims.py: error: {failed}", file=sys.stderr)
            failures += 1
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
