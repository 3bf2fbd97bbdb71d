"""Whether the check of sampling (tba.SamplingCheck) is quiet on sound engines and sees wrong ones.

    python bench/sampling.py run [--minutes 20]   # every missing unit; can be interrupted
    python bench/sampling.py report               # a table

The protocol is in protocols.md.
"""

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from unittest import mock

import common  # beside this file; it finds tba.py
import numpy as np
import torch

import tba

RESULTS = common.ROOT / "bench" / "results" / "sampling.jsonl"
MODELS = common.ROOT / "tests" / "models"
POLICIES = {  # files, --temperature, --max_response_tokens, the Trainer's --dtype, units of health
    "gsm8k, 0.7": ("gsm8k", 0.7, 48, "float32", 200),
    "gsm8k, 1.0": ("gsm8k", 1.0, 48, "float32", 160),
    "gsm8k, 1.0, long": ("gsm8k", 1.0, 48, "float32", 10),
    "gsm8k, 1.0, generate": ("gsm8k", 1.0, 48, "float32", 5),
    "gpt2, 1.0, generate": ("redteam", 1.0, 12, "float32", 20),
    "gsm8k, 1.0, bfloat16": ("gsm8k", 1.0, 48, "bfloat16", 10),
    "gpt2, 1.0, bfloat16": ("redteam", 1.0, 12, "bfloat16", 10),
}
LONG = "gsm8k, 1.0, long"
STATISTICS = ("gap", "z", "eos z", "unseen")


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


with_newline = lambda ends, newline: [*ends, newline]
# engines -> what is wrong with them, and the policies that they are tried on
SHARP, FLAT, GPT2 = "gsm8k, 0.7", "gsm8k, 1.0", "gpt2, 1.0, generate"
FAULTS = {
    "temperature 1.0, own": (Engine(temperature=1.0, own=True), [SHARP]),
    "temperature 1.0": (Engine(temperature=1.0), [SHARP]),
    "temperature 0.8": (Engine(temperature=0.8), [SHARP]),
    "temperature 0.7": (Engine(temperature=0.7), [FLAT]),
    "temperature 0.9": (Engine(temperature=0.9), [FLAT, LONG]),
    "overwrites the request's temperature by 1.0, own":
        (Engine(temperature=1.0, own=True, overwrites=True), [SHARP]),
    "reports at temperature 1": (Engine(reports=1.0), [SHARP]),
    "top-k 2": (keep(top_k=2), [FLAT, LONG]),
    "top-k 5": (keep(top_k=5), [FLAT, LONG]),
    "top-k 20": (keep(top_k=20), [FLAT, LONG, GPT2]),
    "top-p 0.8": (keep(top_p=0.8), [SHARP, FLAT]),
    "top-p 0.95": (keep(top_p=0.95), [FLAT, LONG]),
    "min-p 0.05": (keep(min_p=0.05), [FLAT, LONG]),
    "repetition penalty 1.1": (Engine(penalised), [SHARP]),
    "no EOS in the first 5 tokens": (Engine(without_eos), [GPT2]),
    # <pad>, which is never sampled
    "goes on after EOS": (Engine(ends=lambda ends, newline: [1]), [GPT2]),
    "ends at a newline, too": (Engine(ends=with_newline), [FLAT]),
    "the same, called truncated": (Engine(ends=with_newline, hides=True), [FLAT]),
    "weights with 1 % noise, own": (Engine(noise=0.01, own=True), [GPT2]),
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


@cache
def load(policy: str) -> tuple[tba.TransformersEngine, tba.Learner]:
    """An engine, and the Trainer's Learner."""
    tba.prepare_process()
    files, temperature, longest, dtype, _ = POLICIES[policy]
    given = tba.settings(
        model=str(MODELS / files / "model"), dataset=str(MODELS / "gsm8k" / "data"),
        engine="transformers", dtype="float32", num_searchers=1, temperature=temperature,
        max_response_tokens=longest, sequences_in_flight=10_000,
    )  # fmt: skip
    engine = tba.TransformersEngine(given, 0, "model", 256)
    given.dtype = dtype
    config = tba.resolve(given)
    return engine, tba.Learner(config, tba.load_task(config), tba.Ranks())


def sample(policy: str, name: str, seed: int) -> list[tba.Group]:
    """A unit's groups, as a Searcher makes them."""
    engine, learner = load(policy)
    task, config = learner.task, learner.config
    engine.fault = fault = Engine() if name == "healthy" else FAULTS[name][0]
    engine.end_tokens = fault.ends(task.end_tokens, task.tokenizer.encode("\n")[0])
    prompts = np.random.default_rng(seed).permutation(1000)[: 140 if policy == LONG else 28]
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


def judge(learner: tba.Learner, groups: list[tba.Group]) -> list:
    """STATISTICS of a check of groups, nats^2, EOS variance, what saw a fault, if it warned."""
    said = []
    check = tba.SamplingCheck(learner, said.append)
    check.add(groups, 0)
    gap, z, eos_z, unseen = check.metrics.values()
    seen = gap > learner.config.logprob_tolerance / 10, abs(z) > 5, abs(eos_z) > 5, unseen >= 20
    saw = sorted(name for name, holds in zip(STATISTICS, seen, strict=True) if holds)
    totals = check.evidence.sum(0)
    values = [float(f"{value:.4g}") for value in (gap, z, eos_z, unseen, totals[2], totals[4])]
    return [*values, saw or ["ends"] * bool(said), bool(said)]


def run_unit(policy: str, name: str, number: int) -> dict:
    """Sample and judge a unit."""
    seed = zlib.crc32(f"{policy}/{name}/{number}".encode())
    groups = sample(policy, name, seed)
    torch.manual_seed(seed)
    _, learner = load(policy)
    return {
        "policy": policy, "engine": name, "unit": number, "asynchronous": judge(learner, groups),
        "batch": [judge(learner, groups[i : i + 7]) for i in range(0, len(groups), 7)],
    }  # fmt: skip


def run(minutes: float) -> None:
    """Run what is missing: first units that all settings have, so that a part is balanced."""
    known = {(row["policy"], row["engine"], row["unit"]) for row in tba.read_lines(RESULTS)}
    plan = [(u, p, "healthy") for p, (*_, units) in POLICIES.items() for u in range(units)]
    for name, (_, policies) in FAULTS.items():
        plan += [(u, p, name) for p in policies for u in range(5 if p == LONG else 20)]
    deadline = time.monotonic() + 60 * minutes
    first = lambda item: item[0] // (50 if item[2] == "healthy" else 5)
    for unit, policy, name in sorted(plan, key=first):
        if (policy, name, unit) not in known and time.monotonic() < deadline:
            row = json.dumps(run_unit(policy, name, unit))
            with RESULTS.open("a") as file:
                file.write(row + "\n")


def report() -> None:
    """Print the shares of batches and of asynchronous starts with a warning."""
    units = defaultdict(list)
    for row in tba.read_lines(RESULTS):
        units[row["engine"], row["policy"]].append(row)
    lines = []
    for name, policy in sorted(units, key=lambda key: [*FAULTS, "healthy"].index(key[0])):
        own = units[name, policy]
        batches = [start[-1] for row in own for start in row["batch"]]
        starts = [row["asynchronous"][-1] for row in own]
        counts = [str(len(batches)), str(len(starts))]
        lines.append([name, policy, *counts, f"{np.mean(batches):.2f}", f"{np.mean(starts):.2f}"])
    head = ["engine", "policy", "batches", "starts", "batches warned", "starts warned"]
    print(common.table(head, lines))


def main() -> None:
    args = common.parser_of(__doc__, "run", "report").parse_args()
    torch.set_num_threads(1)
    if args.what == "run":
        run(args.minutes)
    else:
        report()


if __name__ == "__main__":
    main()
