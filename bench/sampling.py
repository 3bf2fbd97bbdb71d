"""Whether the check of sampling (tba.SamplingCheck) is quiet on sound engines and sees wrong ones.

    python bench/sampling.py run [--minutes 20]   # every missing unit; can be interrupted
    python bench/sampling.py report               # two tables

**The protocol.** A *unit*, a row of bench/results/sampling.jsonl, has 28 prompts x 18 responses of
a tiny policy. An engine samples every response once, for its unit; tba.py's Searcher makes groups
of them, and its SamplingCheck judges these. A unit gives five *starts* of runs:

* asynchronous: all 504 responses in one call;
* batch: four of 7 x 18 responses each, what a lockstep run knows after its first step.

Starts of one kind are independent, those of different kinds share responses. The thresholds were
chosen after the rows had been seen, and then applied to all of them. Policies called
"generate" or "bfloat16" use tba.py's engine and its Learner as they are; in bfloat16 the Learner
computes with autocast what was sampled in float32. The others use `Tree`, which keeps a model's
logits by prefix, for both sides: ten times faster, always with the same 28 prompts, and no gap.
"long" has 140 prompts: 2,520 responses, of some 5,000 nats^2.

Health: nothing is wrong. The report has quantiles of the statistics, and the number of warnings.
Power: engines with one fault, 20 units each (5 or 10 of "long"). Unless "own" is said, an engine
*lies*: it reports the policy's log-probabilities at --temperature, which hides what it does from
the gap. The report has the share of starts with a warning, and of asynchronous starts in which each
statistic saw it.
"""

import argparse
import json
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba

RESULTS = ROOT / "bench" / "results" / "sampling.jsonl"
POLICIES = {  # files, --temperature, --max_response_tokens, the Trainer's --dtype, units of health
    "gsm8k, 0.7": ("gsm8k", 0.7, 48, "float32", 200),
    "gsm8k, 1.0": ("gsm8k", 1.0, 48, "float32", 160),
    "gsm8k, 1.0, long": ("gsm8k", 1.0, 48, "float32", 10),
    "gsm8k, 1.0, generate": ("gsm8k", 1.0, 48, "float32", 5),
    "gpt2, 1.0, generate": ("redteam", 1.0, 12, "float32", 20),
    "gsm8k, 1.0, bfloat16": ("gsm8k", 1.0, 48, "bfloat16", 10),
    "gpt2, 1.0, bfloat16": ("redteam", 1.0, 12, "bfloat16", 10),
}
TREES = [*POLICIES][:3]
LONG = "gsm8k, 1.0, long"
VALUES = ("gap", "z", "eos z", "unseen", "nats^2", "EOS variance")


@dataclass(frozen=True)
class Engine:
    """What is wrong with an engine; by default nothing."""

    alter: Callable = lambda logprobs, ids, t: logprobs  # the distribution that it samples from
    temperature: float = 0.0  # that it samples at; 0: as requested
    own: bool = False  # reports log-probabilities of what it samples from, not the policy's
    reports: float = 0.0  # temperature of the log-probabilities that it reports
    overwrites: bool = False  # writes its temperature into the request, too
    noise: float = 0.0  # of its weights, relative
    ends: Callable = lambda ends, newline: ends  # the tokens that end a response
    hides: bool = False  # calls responses truncated that another token than EOS has ended


def keep(top_k: int = 10**6, top_p: float = 1.0, min_p: float = 0.0) -> Engine:
    """An engine that samples only some of the likeliest tokens."""

    def alter(logprobs: torch.Tensor, ids: torch.Tensor, t: int) -> torch.Tensor:
        ordered, order = logprobs.sort(descending=True)
        p = ordered.exp()
        drop = (p.cumsum(-1) - p >= top_p) | (p < min_p * p[:, :1])
        drop[:, top_k:] = True
        return logprobs.masked_fill(drop.gather(1, order.argsort()), -torch.inf)

    return Engine(alter)


def penalised(logprobs: torch.Tensor, ids: torch.Tensor, t: int) -> torch.Tensor:
    """A repetition penalty of 1.1, which engines apply to tokens of the prompt, too."""
    return logprobs.scatter(1, ids, 1.1 * logprobs.gather(1, ids))


def without_eos(logprobs: torch.Tensor, ids: torch.Tensor, t: int) -> torch.Tensor:
    """No EOS (token 0 of all policies) among the first 5 tokens."""
    return logprobs.index_fill(1, torch.tensor([0]), -torch.inf) if t < 5 else logprobs


ENGINES = {
    "temperature 1.0, own": Engine(temperature=1.0, own=True),
    "temperature 1.0": Engine(temperature=1.0),
    "temperature 0.8": Engine(temperature=0.8),
    "temperature 0.7": Engine(temperature=0.7),
    "temperature 0.9": Engine(temperature=0.9),
    "overwrites the request's temperature by 1.0, own": Engine(
        temperature=1.0, own=True, overwrites=True
    ),
    "reports at temperature 1": Engine(reports=1.0),
    "top-k 2": keep(top_k=2),
    "top-k 5": keep(top_k=5),
    "top-k 20": keep(top_k=20),
    "top-p 0.8": keep(top_p=0.8),
    "top-p 0.95": keep(top_p=0.95),
    "min-p 0.05": keep(min_p=0.05),
    "repetition penalty 1.1": Engine(penalised),
    "no EOS in the first 5 tokens": Engine(without_eos),
    "goes on after EOS": Engine(ends=lambda ends, newline: [1]),  # <pad>, which is never sampled
    "ends at a newline, too": Engine(ends=lambda ends, newline: [*ends, newline]),
    "the same, called truncated": Engine(ends=lambda ends, newline: [*ends, newline], hides=True),
    "weights with 1 % noise, own": Engine(noise=0.01, own=True),
}
FAULTS = {
    "gsm8k, 0.7": ["temperature 1.0, own", "temperature 1.0", "temperature 0.8",
                   "overwrites the request's temperature by 1.0, own", "reports at temperature 1",
                   "top-p 0.8", "repetition penalty 1.1"],
    "gsm8k, 1.0": ["temperature 0.7", "temperature 0.9", "top-k 2", "top-k 5", "top-k 20",
                   "top-p 0.8", "top-p 0.95", "min-p 0.05", "ends at a newline, too",
                   "the same, called truncated"],
    LONG: ["temperature 0.9", "top-k 2", "top-k 5", "top-k 20", "top-p 0.95", "min-p 0.05"],
    "gpt2, 1.0, generate": ["top-k 20", "no EOS in the first 5 tokens", "goes on after EOS",
                            "weights with 1 % noise, own"],
}  # fmt: skip


class Hook(tba.DecodeHook):
    """Applies a fault to the distribution that is sampled from, or to what is reported of it."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        if scores is None:
            return super().__call__(ids, scores)
        fault, scores = self.engine.fault, scores.float()
        at = lambda temperature: (scores / (temperature or self.temperature)).log_softmax(-1)
        sampled = fault.alter(at(fault.temperature), ids, len(self.logprobs)).log_softmax(-1)
        self.distribution = sampled if fault.own else at(fault.reports)
        return sampled


class Tree(tba.TransformersEngine):
    """Keeps the logits after every prefix that it has sampled: ten times faster for `gsm8k`."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        V = self.model.config.vocab_size
        self.logits = torch.zeros(2**16, V)  # by index of a prefix
        self.child = np.full((2**16, V), -1, np.int32)  # index of a prefix that is longer by one
        self.prefixes: list[np.ndarray] = []  # with their prompts
        self.roots: dict[bytes, int] = {}

    @torch.no_grad()
    def add(self, rows: list[np.ndarray]) -> np.ndarray:
        """Compute logits after these prefixes; returns their indices."""
        tokens = [torch.from_numpy(row).long() for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        last = torch.tensor([len(row) - 1 for row in rows])
        index = np.arange(len(rows)) + len(self.prefixes)
        self.prefixes += rows
        self.logits[index] = self.model(ids).logits[torch.arange(len(rows)), last]
        return index

    def step(self) -> list[tba.Completion]:
        batch = self.take_batch()
        new = [r.prompt for r in batch if r.prompt.tobytes() not in self.roots]
        if new:
            self.roots |= {x.tobytes(): int(i) for x, i in zip(new, self.add(new), strict=True)}
        requests = [request for request in batch for _ in range(request.n)]
        R, T = len(requests), batch[0].max_tokens
        nodes = np.array([self.roots[request.prompt.tobytes()] for request in requests])
        # a penalty only asks which tokens there are
        widest = max(len(request.prompt) for request in batch)
        ids = torch.stack([torch.from_numpy(np.resize(r.prompt, widest)).long() for r in requests])
        hook = Hook(self, torch.tensor([[r.temperature] for r in requests]), lambda: None)
        tokens, logprobs = (
            np.full((R, T), self.end_tokens[0], np.int32),
            np.zeros((R, T), np.float32),
        )
        left = np.arange(R)  # unfinished rows
        for t in range(T):
            sampled = hook(ids, self.logits[nodes])
            below = sampled.double().exp().cumsum(-1)
            point = torch.rand(len(left), 1, dtype=torch.float64) * below[:, -1:]
            chosen = torch.searchsorted(below, point, right=True)
            hook.logprobs.append(hook.distribution.gather(1, chosen))
            logprobs[left, t] = hook.logprobs[-1][:, 0]
            tokens[left, t] = y = chosen[:, 0].numpy()
            stay = ~np.isin(y, self.end_tokens)
            nodes, y, left = nodes[stay], y[stay], left[stay]
            if t == T - 1 or not len(left):
                break
            if pairs := sorted({*zip(nodes.tolist(), y.tolist(), strict=True)}):
                pairs = [pair for pair in pairs if self.child[pair] < 0]
            if pairs:
                rows = [np.append(self.prefixes[node], np.int32(z)) for node, z in pairs]
                self.child[tuple(np.array(pairs).T)] = self.add(rows)
            nodes = self.child[nodes, y]
            ids = torch.cat([ids, chosen], 1)[stay]
            hook.temperature = hook.temperature[stay]
        return self.completions_of(batch, tokens, logprobs, [0] * T)

    def sampling_evidence(self, sequences: tba.PromptGroups) -> np.ndarray:
        """What the Learner says of them."""
        nodes, targets = [], []
        for prompt, responses in sequences:
            for response in responses:
                node = self.roots[prompt.tobytes()]
                for token in response:
                    nodes.append(node)
                    node = self.child[node, token]
            targets += responses
        logprobs = (self.logits[nodes] / self.config.temperature).log_softmax(-1)
        targets = torch.from_numpy(np.concatenate(targets)).long()
        return tba.sampling_evidence(logprobs, targets, [0]).numpy()


@cache
def load(policy: str) -> tuple[tba.TransformersEngine, tba.Learner]:
    """An engine, and the Trainer's Learner."""
    files, temperature, longest, dtype, _ = POLICIES[policy]
    models = ROOT / "tests" / "models"
    given = tba.settings(
        model=str(models / files / "model"), dataset=str(models / "gsm8k" / "data"),
        engine="transformers", dtype="float32", num_searchers=1, temperature=temperature,
        max_response_tokens=longest, sequences_in_flight=10_000,
    )  # fmt: skip
    engine = (Tree if policy in TREES else tba.TransformersEngine)(given, 0, "model", 256)
    given.dtype = dtype
    config = tba.resolve(given)
    return engine, tba.Learner(config, tba.load_task(config), tba.Ranks())


def sample(policy: str, name: str, seed: int) -> list[tba.Group]:
    """A unit's groups, as a Searcher makes them."""
    engine, learner = load(policy)
    task, config = learner.task, learner.config
    engine.fault = fault = ENGINES.get(name, Engine())
    newline = task.tokenizer.encode("\n")[0]
    engine.end_tokens = fault.ends(task.end_tokens, newline)
    # of a Tree always the same
    rng = np.random.default_rng(0 if policy in TREES else seed)
    prompts = rng.permutation(1000)[: 140 if policy == LONG else 28]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = [(n, p.clone()) for n, p in engine.state.items()] if fault.noise else []
    noisy = lambda p: p + fault.noise * p.std() * torch.randn(p.shape, generator=generator)
    engine.load_weights(((n, noisy(p)) for n, p in weights), 0)
    in_flight = {}
    for index, prompt_id in enumerate(prompts):
        # in the place of a held-out prompt's, so that log pi_ref, not needed here, is not computed
        source = tba.RequestId(True, index, int(prompt_id))
        in_flight[source] = tba.Request(
            source, task.train_prompts[prompt_id], 18, config.max_response_tokens,
            config.temperature, seed=seed,
        )  # fmt: skip
        engine.submit(tba.Request(**vars(in_flight[source])))
    if fault.overwrites:
        for request in engine.waiting:
            request.temperature = fault.temperature
    with mock.patch.object(tba, "DecodeHook", Hook):
        completions = engine.step()
    engine.load_weights(weights, 0)
    for done in completions if fault.hides else []:
        done.ended = [tokens[-1] in task.end_tokens for tokens in done.tokens]
    searcher = SimpleNamespace(
        config=config, task=task, in_flight=in_flight, reference_version=0, tokens=0
    )
    return tba.Searcher.make_groups(searcher, completions)


class Remembered:
    """A Learner's evidence on groups, computed once."""

    def __init__(self, policy: str, groups: list[tba.Group]) -> None:
        engine, learner = load(policy)
        self.config, self.task = learner.config, learner.task
        prompts = learner.task.train_prompts
        responses = [[t.tokens for t in group.trajectories] for group in groups]
        sequences = [(prompts[g.prompt_id], y) for g, y in zip(groups, responses, strict=True)]
        measure = engine.sampling_evidence if policy in TREES else learner.sampling_evidence
        ends = np.cumsum([sum(map(len, y)) for y in responses])
        parts = np.split(measure(sequences), ends[:-1])
        self.found = {id(y[0]): part for y, part in zip(responses, parts, strict=True)}

    def sampling_evidence(self, sequences: tba.PromptGroups) -> np.ndarray:
        return np.concatenate([self.found[id(y[0])] for _, y in sequences])


def start(learner: tba.Learner, evidence: Remembered, batches: list) -> list:
    """VALUES in the end of a check that is shown these batches, what saw a fault, the warning."""
    said = []
    check = tba.SamplingCheck(evidence, said.append)
    saw = set()
    for groups in batches:
        check.add(groups, 0)
        gap, z, eos_z, unseen = check.metrics.values()
        seen = gap > learner.config.logprob_tolerance / 10, abs(z) > 5, abs(eos_z) > 5, unseen >= 20
        saw |= {name for name, holds in zip(VALUES, seen, strict=False) if holds}
    totals = check.evidence.sum(0)
    values = [float(f"{value:.4g}") for value in (gap, z, eos_z, unseen, totals[2], totals[4])]
    if said and not saw:
        saw = {"ends"}
    return [*values, sorted(saw), bool(said)]


def run_unit(policy: str, name: str, number: int) -> dict:
    """Sample and judge a unit."""
    seed = zlib.crc32(f"{policy}/{name}/{number}".encode())
    groups = sample(policy, name, seed)
    _, learner = load(policy)
    torch.manual_seed(seed)
    evidence = Remembered(policy, groups)
    batches = [groups[i : i + 7] for i in range(0, len(groups), 7)]
    judge = lambda batches: start(learner, evidence, batches)
    return {
        "policy": policy, "engine": name, "unit": number, "asynchronous": judge([groups]),
        "batch": [judge([batch]) for batch in batches],
    }  # fmt: skip


def run(minutes: float) -> None:
    """Run what is missing: first units that all settings have, so that a part is balanced."""
    rows = tba.read_lines(RESULTS)
    known = {(row["policy"], row["engine"], row["unit"]) for row in rows}
    plan = [(u, p, "healthy") for p, (*_, units) in POLICIES.items() for u in range(units)]
    for policy, names in FAULTS.items():
        plan += [(u, policy, name) for name in names for u in range(5 if policy == LONG else 20)]
    deadline = time.monotonic() + 60 * minutes
    first = lambda item: item[0] // (50 if item[2] == "healthy" else 5)
    for unit, policy, name in sorted(plan, key=first):
        if (policy, name, unit) not in known and time.monotonic() < deadline:
            row = json.dumps(run_unit(policy, name, unit))
            with RESULTS.open("a") as file:
                file.write(row + "\n")


def table(head: str, rows: list[list]) -> str:
    """A markdown table."""
    cells = [head.split(" | "), *rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def report() -> None:
    """Print the tables of health and power."""
    found = defaultdict(list)
    units = defaultdict(list)
    for row in tba.read_lines(RESULTS):
        units[row["engine"], row["policy"]].append(row)
        for kind in ("batch", "asynchronous"):
            found[row["policy"], row["engine"], kind] += (
                row[kind] if kind == "batch" else [row[kind]]
            )
    health, power = [], []
    for (policy, name, kind), starts in found.items():
        if name == "healthy":
            columns = list(zip(*starts, strict=True))
            points = [np.quantile(column, (0, 0.001, 0.5, 0.999, 1)) for column in columns[:5]]
            cells = [", ".join(f"{value:.2g}" for value in p) for p in points]
            health.append([policy, kind, len(starts), *cells, sum(columns[-1])])
    share = lambda starts, holds: f"{100 * np.mean([holds(s) for s in starts]):.0f}"
    for name, policy in sorted(units, key=lambda key: [*ENGINES, "healthy"].index(key[0])):
        if name != "healthy":
            own = units[name, policy]
            starts = [row["asynchronous"] for row in own]
            warned = [
                share(found[policy, name, kind], lambda s: s[-1])
                for kind in ("batch", "asynchronous")
            ]
            saw = [share(starts, lambda s, n=n: n in s[6]) for n in ("gap", "z", "eos z", "unseen")]
            saw.append(share(starts, lambda s: s[6] == ["ends"]))
            medians = [f"{np.median([s[i] for s in starts]):.2g}" for i in range(4)]
            power.append([name, policy, len(own), *warned, *saw, *medians])
    head = "policy | start | number | gap: min, 0.1 %, median, 99.9 %, max | z | EOS z | unseen"
    print(table(head + " | nats^2 | warnings", health) + "\n")
    head = "engine | policy | units | warned, %: batch | asynchronous | saw it: gap | z"
    print(table(head + " | EOS z | unseen | ends | median gap | z | EOS z | unseen", power))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes to keep starting units")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run(args.minutes) if args.what == "run" else report()


if __name__ == "__main__":
    main()
