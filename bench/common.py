"""What claims.py, inside.py, smollm2.py and against_trl.py share.

A program defines tasks and *settings* (a run without its learning rate and seed). A subclass of
`Rows` says how each setting's rate is chosen and which seeds are reported; `run_all` makes the runs
that are missing, each by `run` in a fork of this process, and appends a row per run to a file in
bench/results. Reports put tables between the markers in docs/results.md.
"""

import argparse
import collections
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import objectives  # noqa: F401 - baselines

import tba
from tba import read_lines

# by task: beta, the price of a nat of KL; flags of its own, with the paths of its pretrained model
# and prompts; steps of a pilot run, if not 6
BETA: dict[str, float] = {}
OWN_FLAGS: dict[str, dict] = {}
PILOT_STEPS: dict[str, int] = {}

OBJECTIVES = {  # names in the tables -> flags, where these differ
    "ftb forward_kl": {"objective": "ftb", "divergence": "forward_kl"},
    "ftb hellinger": {"objective": "ftb", "divergence": "hellinger"},
    "proximal_rloo truncate": {"objective": "proximal_rloo", "ratio": "truncate"},
    "proximal_rloo mask": {"objective": "proximal_rloo", "ratio": "mask"},
    "dr_grpo truncate": {"objective": "dr_grpo", "ratio": "truncate"},
    "dr_grpo mask": {"objective": "dr_grpo", "ratio": "mask"},
    "tb truncate": {"objective": "tb_weighted"},  # a plug-in of docs/hacking.md
}
# beta of oapl's V^, as in A*-PO, whose loss it adopts; its KL has the task's beta
OAPL_VALUE_BETA = 0.5
HALF_DECADES = tuple(float(f"{digit}e{power}") for power in range(-7, 0) for digit in (1, 3))
BUDGETS = (2.0, 4.0, 6.0, 12.0)  # nats per response
COLLAPSED = 50.0  # nats per response
FEW_DISTINCT = 0.1  # below this, different prompts share their responses
EVERY = 10  # steps between evaluations
POINT = ("step", "kl", "reward", "distinct")  # what a row has of each evaluation
NOT_YET = "·"  # in a table: no seed has been run


class Measured(tba.Task):
    """Metrics of sampled held-out answers."""

    greedy_evaluation = False
    wants_logprobs = True
    judged = "reward"  # the column that is reported as the reward
    ends_past_limit = False  # in runs that choose a rate, as their score is 0 regardless

    def evaluate(self, examples: list, responses: list[str], ended: np.ndarray) -> list[dict]:
        records = super().evaluate(examples, responses, ended)
        for record, text in zip(records, responses, strict=True):
            record["reward"] = record[self.judged]
            record["text"] = text
        return records

    def summarize(self, records: list[dict]) -> dict[str, float]:
        kl = float(np.mean([record["kl"] for record in records]))
        if kl > COLLAPSED and Measured.ends_past_limit:
            raise tba.RunEnded(f"diverged: {kl:.0f} nats")
        reward = float(np.mean([record["reward"] for record in records]))
        distinct = len({record["text"] for record in records}) / len(records)
        return {"reward": reward, "kl": kl, "distinct": distinct}


class SmallLlama(tba.TransformersEngine):
    """Decodes a tiny Llama in a few large operations, three times faster than `generate`.

    For such a model, `generate` spends more time in Python than on arithmetic. The distribution is
    the same: on-policy, a row's `ess` is 1, so its log-probabilities match the Trainer's.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights, and fuse those that multiply the same hidden states."""
        super().load_weights(weights, version)
        self.fuse()

    def fuse(self) -> None:
        self.layers = []
        for layer in self.model.model.layers:
            own = layer.self_attn
            qkv = torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
            gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            down = layer.mlp.down_proj.weight
            self.layers.append((norms, qkv, own.o_proj.weight, gate_up, down))

    @torch.inference_mode()
    def step(self, between_steps: Callable[[], None] = lambda: None) -> list[tba.Completion]:
        """Generate the next batch of R rows; every prompt is left-padded to P tokens."""
        if not hasattr(self, "layers"):
            self.fuse()
        batch = self.take_batch()
        requests = [request for request in batch for _ in range(request.n)]
        prompts = [torch.from_numpy(request.prompt).long() for request in requests]
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        R, P = ids.shape
        T = max(request.max_tokens for request in batch)
        padding = torch.tensor([P - len(request.prompt) for request in requests])[:, None]
        temperature = torch.tensor([[request.temperature] for request in requests])
        places = torch.arange(P + T)
        angles = (places - padding).clamp(min=0)[..., None] * self.model.model.rotary_emb.inv_freq
        config = self.model.config
        heads, width = config.num_attention_heads, config.head_dim
        kept = torch.zeros(len(self.layers), 2, R, heads, P + T, width)
        state = {  # of the unfinished rows
            "row": torch.arange(R), "seen": (places >= padding)[:, None, None],
            "cos": angles.cos().repeat(1, 1, 2)[:, None], "temperature": temperature,
            "sin": torch.cat([-angles.sin(), angles.sin()], -1)[:, None],
        }  # fmt: skip
        tokens = torch.full((R, T), self.end_tokens[0])
        logprobs = torch.zeros(R, T)
        versions = []
        ends = torch.tensor(self.end_tokens)
        ended = torch.zeros(R, dtype=torch.bool)
        source = torch.Generator().manual_seed(batch[0].seed)
        for t in range(T):
            hidden = self.forward(ids, kept, state, 0 if t == 0 else P + t - 1)
            logits = hidden @ self.model.lm_head.weight.t() / state["temperature"]
            distribution = logits.log_softmax(-1)  # (R, V)
            below = distribution.exp().cumsum(-1)
            point = torch.rand(len(below), 1, generator=source) * below[:, -1:]
            ids = torch.searchsorted(below, point).clamp(max=below.shape[1] - 1)  # (R, 1)
            tokens[state["row"], t] = ids[:, 0]
            logprobs[state["row"], t] = distribution.gather(1, ids)[:, 0]
            versions.append(self.version)
            ended |= torch.isin(ids[:, 0], ends)
            between_steps()
            if ended.all():
                break
            if ended.float().mean() > 0.5:  # keep only the unfinished rows
                left = ~ended
                state = {name: tensor[left] for name, tensor in state.items()}
                kept, ids, ended = kept[:, :, left], ids[left], ended[left]
        sampled = tokens[:, : t + 1].int().numpy()
        return self.completions_of(batch, sampled, logprobs.numpy(), versions)

    def forward(
        self, ids: torch.Tensor, kept: torch.Tensor, state: dict, first: int
    ) -> torch.Tensor:
        """The last hidden states (R, H) of tokens (R, n) that start at position `first`."""
        last = first + ids.shape[1]
        mask = state["seen"][..., :last]
        if len(places := torch.arange(first, last)) > 1:
            earlier = places[:, None] >= places  # padding attends to itself: no empty rows
            mask = mask & earlier | (places[:, None] == places)
        cos, sin = state["cos"][:, :, first:last], state["sin"][:, :, first:last]
        epsilon = self.model.config.rms_norm_eps
        hidden = self.model.model.embed_tokens.weight[ids]  # (R, n, H)
        H = hidden.shape[-1]
        half = cos.shape[-1] // 2
        for (norms, qkv, out, gate_up, down), (keys, values) in zip(self.layers, kept, strict=True):
            normed = F.rms_norm(hidden, (H,), norms[0], epsilon)
            heads = F.linear(normed, qkv).view(*ids.shape, -1, keys.shape[-1]).transpose(1, 2)
            turned = heads[:, : -keys.shape[1]]
            turned = turned * cos + turned.roll(half, -1) * sin
            query, keys[:, :, first:last] = turned.chunk(2, 1)
            values[:, :, first:last] = heads[:, -keys.shape[1] :]
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :last], values[:, :, :last], mask
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), out)
            normed = F.rms_norm(hidden, (H,), norms[1], epsilon)
            gate, up = F.linear(normed, gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        return F.rms_norm(hidden[:, -1], (H,), self.model.model.norm.weight, epsilon)


tba.ENGINES["small"] = SmallLlama

# ------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """The unit of comparison: a run without its learning rate and seed."""

    experiment: str
    objective: str
    lag: int = 0
    task: str = "valence"
    price: float = 1.0  # of a nat, in multiples of the usual one
    steps: int = 80
    flags: tuple[tuple[str, object], ...] = ()  # additional flags of tba.py

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Choice:
    """How the learning rate of a setting is chosen; without runs it is the only one of `rates`."""

    rates: tuple[float, ...]
    runs: tuple[tuple[Setting, int], ...] = ()  # settings and seeds that are run at each rate
    score: Callable[[list[dict]], float] = lambda rows: 0.0  # of those runs
    widened: tuple[float, float] | None = None  # up to where, until the best rate is interior
    # of all rates whose score is this close to the best, the one nearest 1e-3; None: the best, and
    # of equal ones the lowest
    margin: float | None = None


def arguments_of(setting: Setting, rate: float, seed: int, clip: float, out: Path) -> list:
    """The command line of a run."""
    beta = BETA[setting.task] * setting.price
    flags: dict[str, object] = {
        "task": setting.task, "output_dir": out, "lockstep": True, "lag": setting.lag,
        "steps": setting.steps, "seed": seed, "learning_rate": rate, "max_grad_norm": clip,
        "beta": beta, "prompts_per_step": 8, "trained_per_prompt": 16, "temperature": 1.0,
        "sequences_in_flight": 128, "num_searchers": 1,
        "eval_every": EVERY, "eval_responses": 4, "save_every": 0,
    }  # fmt: skip
    flags |= OBJECTIVES.get(setting.objective, {"objective": setting.objective})
    flags |= OWN_FLAGS[setting.task]
    special = dict(setting.flags)
    if special.pop("slow", ""):
        flags |= {"engine": "slow", "eval_every": 0}
    if "asynchronous" in special:
        flags |= {"num_searchers": special.pop("asynchronous"), "recent_probability": 0.9}
        flags |= {"lockstep": False, "initial_trajectories": 128}
    if special.pop("clock", "") and not special.get("lockstep"):
        flags |= {"lockstep": False, "initial_trajectories": 128, "searched_per_prompt": 16}
        flags["sync_every"] = 2
    if special.pop("lr_schedule", ""):  # rows have it by its former flags
        stable = special.pop("stable_steps")
        end = stable + special.pop("decay_steps")
        special["learning_rate"] = f"{rate}@0,{rate}@{stable},0~{end}"
    if setting.objective == "grpo":
        flags["kl_coefficient"] = 2 * beta  # as published, 0.04, where beta is 0.02
    if setting.objective == "oapl":
        flags |= {"behaviour_beta": beta, "beta": OAPL_VALUE_BETA}
    return [word for name, value in (flags | special).items() for word in (f"--{name}", value)]


# ----------------------------------------------------------------------------------------- rows


class Rows:
    """The completed runs in a file, and the next one to run.

    A subclass has `choice_of(setting)`, how its learning rate is chosen, and `seeds_of(setting)`,
    the seeds that are reported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_lines(path)
        self.by_key = collections.defaultdict(list)  # (key of a setting, role) -> rows
        self.under_way: set[tuple] = set()
        for row in self.rows:
            row["path"] = [dict(zip(POINT, point, strict=False)) for point in row["path"]]
            self.by_key[setting_of(row).key(), row["role"]].append(row)

    def of(self, setting: Setting, role: str = "report") -> list[dict]:
        return self.by_key[setting.key(), role]

    def clip(self, setting: Setting) -> float | None:
        """Twice the objective's median gradient norm on the initial policy's data, once known."""
        for row in self.rows:
            same = row["objective"] == setting.objective and row["task"] == setting.task
            if row["role"] == "pilot" and same and row["price"] == setting.price:
                return row["clip"]
        return None

    def best_rate(self, choice: Choice) -> tuple[float | None, list[float]]:
        """The chosen learning rate, or None and the rates to try next."""
        if not choice.runs:
            return choice.rates[0], []
        rates = HALF_DECADES if choice.widened else choice.rates
        tried: dict[float, list[dict]] = {rate: [] for rate in sorted(rates)}
        for chooser, seed in choice.runs:
            for row in self.of(chooser, "choose"):
                if row["seed"] == seed and row["rate"] in tried:
                    tried[row["rate"]].append(row)
        complete = [rate for rate in tried if len(tried[rate]) == len(choice.runs)]
        missing = [rate for rate in choice.rates if rate not in complete]
        if missing:
            return None, missing
        scores = {rate: round(choice.score(tried[rate]), 6) for rate in complete}
        best = max(scores, key=scores.get)
        if choice.margin is not None:
            as_good = [rate for rate in complete if scores[rate] >= scores[best] - choice.margin]
            best = min(as_good, key=lambda rate: abs(math.log(rate / 1e-3)))
        if choice.widened:
            place = HALF_DECADES.index(best)
            around = (HALF_DECADES[place - 1], HALF_DECADES[place + 1])
            lowest, highest = choice.widened
            inside = [rate for rate in around if lowest <= rate <= highest]
            missing = [rate for rate in inside if rate not in complete]
        return (None, missing) if missing else (best, [])

    def missing(self, setting: Setting) -> Iterator[tuple[Setting, str, float, int]]:
        """The runs that a setting needs next: (setting, role, rate, seed)."""
        if self.clip(setting) is None:
            steps = PILOT_STEPS.get(setting.task, 6)
            pilot = replace(setting, experiment="pilot", lag=0, steps=steps, flags=())
            yield pilot, "pilot", 1e-12, 101
            return
        choice = self.choice_of(setting)
        rate, to_try = self.best_rate(choice)
        runs = [(own, "choose", r, seed) for own, seed in choice.runs for r in to_try]
        if rate:
            runs = [(setting, "report", rate, seed) for seed in self.seeds_of(setting)]
        for run in runs:
            own, role, *rate_and_seed = run
            if rate_and_seed not in [[row["rate"], row["seed"]] for row in self.of(own, role)]:
                yield run

    def check(self, settings: list[Setting]) -> None:
        """Exit if any row is from a different pretrained model."""
        hashes = {task: hash_of(task) for task in {s.task for s in settings}}
        for row in self.rows:
            if row["model"] != hashes.get(row["task"], row["model"]):
                sys.exit(f"{self.path} has rows of a different pretrained model for {row['task']}")

    def next(self, settings: list[Setting]) -> tuple | None:
        """The next run that is neither done nor in progress; None if there is none.

        For each experiment, rates are chosen first, and each seed is run for all settings before
        the next one, so that incomplete results are still balanced.
        """
        for _, block in itertools.groupby(settings, attrgetter("experiment")):
            jobs = [run for setting in block for run in self.missing(setting)]
            jobs = [run for run in jobs if run not in self.under_way]
            if jobs:
                run = min(jobs, key=lambda run: (run[1] == "report") * run[3])
                self.under_way.add(run)
                return run
        return None

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.by_key[setting_of(row).key(), row["role"]].append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        points = [[point[name] for name in POINT] for point in row["path"]]
        with open(self.path, "a") as file:
            file.write(json.dumps(row | {"path": points}) + "\n")


def setting_of(row: dict) -> Setting:
    """The setting of a row, whose lists become tuples."""
    values = {name: row[name] for name in Setting.__dataclass_fields__}
    return Setting(**values | {"flags": tuple(tuple(pair) for pair in row["flags"])})


def hash_of(task: str) -> str:
    """A short hash of the weights of a task's pretrained model."""
    weights = (OWN_FLAGS[task]["model"] / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest()[:12]


# ----------------------------------------------------------------------------------------- runs


def run_tba(arguments: list, log: Path, prepare: Callable[[], None]) -> int:
    """Run `tba.main` in a fork of this process; its Searchers are forks too, to skip imports.

    `prepare` is called in the fork first. Returns the exit code; stdout and stderr go to `log`.
    """

    def main() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tba.LocalProcess._Popen = staticmethod(multiprocessing.context.ForkProcess._Popen)
        tba.RunFolder.draw_curves = lambda _: None
        prepare()
        sys.exit(tba.main([str(word) for word in arguments]))

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    return child.exitcode


def run(
    setting: Setting, role: str, rate: float, seed: int, clip: float,
    also: Callable[[Path], dict] = lambda out: {}, prepare: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Run tba.py once; returns its row. Raises RuntimeError if it fails without diverging.

    `also` returns additional columns, given the run's folder; `prepare` may patch tba.py.
    """
    Measured.ends_past_limit = role == "choose"  # also in forks
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        log = Path(folder) / "log"
        start = time.time()
        exit_code = run_tba(arguments_of(setting, rate, seed, clip, out), log, prepare)
        said = log.read_text()
        diverged = exit_code == 1 and ("diverged" in said or "finite" in said)
        if exit_code and not diverged:
            raise RuntimeError(f"{setting}: exit code {exit_code}\n{said[-3000:]}")
        evaluations = read_lines(out / "eval.jsonl")
        metrics = read_lines(out / "metrics.jsonl")
        own = also(out)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if role == "pilot":
        # without any reward the gradient is 0; in bfloat16 it is that of rounding errors
        norms = [m["grad_norm"] for m in metrics if m["reward_std"] > 0]
        clip = float(f"{2 * np.median(norms):.2g}")
    return asdict(setting) | {
        "role": role, "rate": rate, "seed": seed, "clip": clip, "exit_code": exit_code,
        "model": hash_of(setting.task), "commit": commit,
        "seconds": round(time.time() - start),
        "step_seconds": round(metrics[-1]["seconds"] - metrics[0]["seconds"], 1),
        "ess": round(float(np.mean([m["effective_sample_size"] for m in metrics])), 3),
        "path": [{name: round(record[name], 3) for name in POINT} for record in evaluations],
    } | own  # fmt: skip


def seconds_to(target: float, metrics: list[dict]) -> float | None:
    """When the mean reward of five steps in a row first reaches a target; None if it never does."""
    for i in range(len(metrics) - 4):
        window = metrics[i : i + 5]
        if np.mean([m["reward"] for m in window]) >= target:
            return window[-1]["seconds"]
    return None


def parser_of(program: str, *commands: str) -> argparse.ArgumentParser:
    """A parser of a program's commands, given its docstring."""
    parser = argparse.ArgumentParser(description=program.split("\n\n")[0])
    parser.add_argument("what", choices=commands)
    help_text = "minutes to keep starting runs"
    parser.add_argument("--minutes", type=float, default=math.inf, help=help_text)
    return parser


def run_all(
    rows: Rows, settings: list[Setting], run: Callable[..., dict], minutes: float = math.inf,
    workers: int = 1,
) -> None:  # fmt: skip
    """Run what is missing, `workers` at a time, until all is done, time is up or a run fails."""
    rows.check(settings)
    end = time.monotonic() + 60 * minutes
    # fork now: everything is imported and no other thread is running
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        under_way: dict[Future, tuple] = {}
        while True:
            while len(under_way) < workers and time.monotonic() < end:
                job = rows.next(settings)
                if job is None:
                    break
                setting, role, _, _ = job
                clip = 0.0 if role == "pilot" else rows.clip(setting)
                under_way[pool.submit(run, *job, clip)] = job
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                job = under_way.pop(future)
                rows.under_way.remove(job)
                row = future.result()
                rows.add(row)
                found = f"{area(row):.3f}{' collapsed' if collapsed(row) else ''}"
                what = f"{row['role']} {row['rate']:g}, seed {row['seed']}: {found}"
                print(f"{job[0]}: {what} ({row['seconds']} s)", flush=True)


# -------------------------------------------------------------------------- numbers of one run


def last(row: dict) -> dict:
    """A run's last evaluation."""
    return row["path"][-1]


def path_of(row: dict) -> list[dict]:
    """A run's evaluations up to the first one past COLLAPSED; later ones are ignored."""
    path = []
    for point in row["path"]:
        path.append(point)
        if point["kl"] > COLLAPSED:
            break
    return path


def frontier(row: dict) -> dict[float, float]:
    """The highest reward within each KL budget, interpolated between evaluations."""
    path = [(point["kl"], point["reward"]) for point in path_of(row)]
    best = {}
    for budget in BUDGETS:
        rewards = [reward for kl, reward in path if kl <= budget]
        for (kl, reward), (next_kl, next_reward) in itertools.pairwise(path):
            if (kl - budget) * (next_kl - budget) < 0:  # it crosses the budget: interpolate
                rewards.append(reward + (next_reward - reward) * (budget - kl) / (next_kl - kl))
        best[budget] = max(rewards)
    return best


def area(row: dict) -> float:
    """The gain: the mean over budgets of the highest reward, minus the untrained reward."""
    return float(np.mean(list(frontier(row).values()))) - row["path"][0]["reward"]


def collapsed(row: dict) -> bool:
    """Whether the KL ever exceeded COLLAPSED, or the run diverged."""
    return bool(row["exit_code"]) or max(point["kl"] for point in row["path"]) > COLLAPSED


def lost(row: dict) -> bool:
    """Whether a run collapsed by its KL at any time, or ends with few distinct responses."""
    return collapsed(row) or last(row)["distinct"] < FEW_DISTINCT


def objective_of(row: dict, point: dict) -> float:
    """J = reward - beta KL at an evaluation: what TB and KL-regularised RL maximise."""
    return point["reward"] - BETA[row["task"]] * row["price"] * point["kl"]


# --------------------------------------------------------------------------------------- tables

# half-width of Student's t 95 % interval in standard errors, by degrees of freedom
STUDENT_T = {2: 4.30, 4: 2.78, 8: 2.31, 9: 2.26, 18: 2.10}


def shown(values: Iterable[float | None], digits: int = 2) -> str:
    """The mean and standard deviation of the values that are not None."""
    found = [value for value in values if value is not None]
    if not found:
        return NOT_YET
    spread = f" ± {np.std(found, ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{np.mean(found):.{digits}f}{spread}"


def mean(values: Iterable[float]) -> str:
    """The mean alone."""
    return shown(values).split(" ")[0]


def rate_of(rows: list[dict]) -> str:
    return f"{rows[0]['rate']:g}" if rows else NOT_YET


def note(rows: list[dict]) -> str:
    """How many seeds are lost, if any are."""
    count = sum(map(lost, rows))
    return f" ({count} of {len(rows)})" if count else ""


def finals(rows: list[dict]) -> list[float]:
    """The rewards at the end."""
    return [last(row)["reward"] for row in rows]


def difference(found: list[dict], others: list[dict], seeds: int) -> str:
    """The difference of the mean rewards at the end, once both have all seeds."""
    if min(len(found), len(others)) < seeds:
        return ""
    a, b = finals(found), finals(others)
    error = np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / seeds)
    return marked(float(np.mean(a) - np.mean(b)), STUDENT_T[2 * seeds - 2] * float(error))


def paired(found: list[dict], others: list[dict]) -> str:
    """The mean difference in gain over the seeds that both have, with its 95 % interval."""
    by_seed = {row["seed"]: area(row) for row in others}
    gaps = [area(row) - by_seed[row["seed"]] for row in found if row["seed"] in by_seed]
    if len(gaps) - 1 not in STUDENT_T:
        return NOT_YET
    half = STUDENT_T[len(gaps) - 1] * np.std(gaps, ddof=1) / math.sqrt(len(gaps))
    return marked(float(np.mean(gaps)), half)


def marked(gap: float, half: float) -> str:
    """A difference and half its interval, bold if the interval excludes 0."""
    text = f"{gap:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(gap) > half else text


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def grid(
    rows: Rows, settings: dict[tuple[str, str], Setting], cell: Callable[[list[dict]], str],
    corner: str = "",
) -> str:  # fmt: skip
    """A table of settings by (column, line), each cell of which is made of a setting's rows."""
    columns = list(dict.fromkeys(column for column, _ in settings))
    lines = []
    for name in dict.fromkeys(name for _, name in settings):
        line = [name]
        for column in columns:
            setting = settings.get((column, name))
            found = rows.of(setting) if setting else []
            missing = NOT_YET if setting else ""
            line.append(cell(found) if found else missing)
        lines.append(line)
    return table([corner, *columns], lines)


def publish(tables: dict[str, str], print_all: bool) -> None:
    """Put tables between their markers in docs/results.md; print all of them if asked to."""
    path = ROOT / "docs" / "results.md"
    text = path.read_text()
    for title, content in tables.items():
        if print_all:
            print(f"\n## {title}\n\n{content}", end="")
        begin = f"<!-- {title} -->\n"
        before, mark, after = text.partition(begin)
        if mark:
            text = f"{before}{begin}{content}<!-- end -->{after.partition('<!-- end -->')[2]}"
    path.write_text(text)
