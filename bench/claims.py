"""A fair comparison of RL objectives on tasks that run on two CPU cores.

    python bench/claims.py run              # every missing run; takes hours; can be interrupted
    python bench/claims.py run --only staleness --minutes 60
    python bench/claims.py report           # fills docs/results.md; --all prints every table
    python bench/claims.py optimum          # how good and how diverse the first task's optimum is
    python bench/claims.py --quick          # smoke test: short runs, not recorded

A row of bench/results/claims.jsonl is one run of tba.py, with its settings, seed, commit, the hash
of the pretrained model, and its path: reward, KL and diversity of held-out answers every 10 steps.

**The protocol** was committed before any reported seed was run, except for the parts marked +:

1. One pretrained model per task, in bench/models or tests/models; its hash is in every row. Rows
   from a different model are refused.
2. Every *setting* (objective, lag, price of a nat, flags) has its own learning rate, from a grid of
   half decades. The grid starts as 3e-4, 1e-3 and 3e-3 and is extended at either end until the
   best rate is interior. Two seeds choose (SEEDS_TO_CHOOSE), three others are reported (SEEDS).
3. A rate's score is the mean over its seeds of the frontier's area: the mean of the highest rewards
   reached within 2, 4, 6 and 12 nats of KL during training (a single budget would favour a run that
   settles at it), minus the untrained reward. A seed that collapsed scores 0: its largest KL during
   training is above 50 nats, or it diverged. + Ties go to the lowest rate: where every rate
   collapses, the grid has to be extended downwards.
4. All seeds are reported, including collapsed ones, with the share that collapsed. + Whatever a run
   does after its collapse is ignored, although some runs recover.
5. Gradients are clipped at twice the median norm of the objective's first steps on the initial
   policy's data, measured by a run without learning (role "pilot"): each objective has its own.
6. All settings of an experiment have the same data, batches (8 prompts x 16 responses) and steps.
7. + Runs of tiny Llamas generate with the engine "small" below, which is exact. The first rows used
   transformers' `generate`; reported seeds were rerun, and some rows that chose a rate were kept.
8. + How often a group may be replayed is measured on a simulated clock (SimulatedTrainer).

**More Searchers**, committed before any of its reported seeds was run. On the simulated clock, each
of M Searchers takes 8 optimizer steps to generate a batch of 8 prompts x 16 responses, so that it
completes one group per step; the Trainer draws 8 per step. Weights are sent every k = 2 steps and
arrive a quarter of a step later. Half of a batch is recent (m = 0.5), half is replayed with
p ~ softmax(10 r), from buffers that evict nothing; --max_recent_draws is 4.

9. Two sparse tasks: "rare" rewards 1 for a review whose mean valence is at least 0.32, which one in
   183 samples of the untrained policy reaches, "rarer" at least 0.39, one in 1,820. 16 training
   prompts; beta 0.1, at which the optimal policy succeeds 99 % and 92 % of the time. 120 steps.
10. Rates as in 2, but only on the grid from 1e-4 to 3e-2; 16 and 64 Searchers, for which a search
   is too expensive, use the rate of 8. Where rewards are rare, noise would choose: of all rates
   that score within 0.02 of the best, the one nearest 1e-3 is taken. The pilot has 60 steps, and
   its clip is twice the median of the nonzero norms.
11. M is compared at equal steps (120) and at equal numbers of groups (120, 480, 1920), with linear
   interpolation between evaluations.
12. What would support the paper: the gain at equal steps rises with M, from 1 to 8 and from 8 to
   64, with every seed; replay by reward beats uniform replay; `tb` gains more from 8 and 64
   Searchers over 1 than `proximal_rloo`, `dr_grpo` and `oapl` by the 95 % interval. What would
   refute it: no difference between M = 8 and 64, or other objectives that gain as much.
13. The clock itself is validated first: real processes that sleep, M = 1, 2, 4, against simulated
   ones whose batch takes as long as in the real runs with M = 1. The clock is valid if the means of
   reward, staleness, fraction of recent groups and buffer agree within two seed standard
   deviations.
14. + One collapse decides a comparison of three seeds, so "rare" has ten further seeds (TEN_SEEDS)
   of `tb` and `dr_grpo` at the chosen rates, and attacks have ten of `tb`, added after the results
   of the first three. Attacks and summaries use the rate of M = 8 at every M (on "rare" all M have
   the same).
15. + In 120 steps on "rarer" hardly any run learned, at different rates. So ten further seeds have
   240 steps, with M = 1, 8, 64, at the rate of "rare", 1e-3. What would support the paper: more
   seeds reach a reward of 0.5 with 8 Searchers than with one, and with 64 than with 8.
16. + With 64 Searchers, nine of ten of these runs learned first and then forgot, when all replayed
   responses to a prompt had the same reward. So both tasks have ten seeds with a rule that draws
   only half of a replayed group by reward ("mixed"), at 1e-3. Two runs on "rarer", seeds 11 and 12
   with M = 64, had been seen before.
17. + That rate was chosen for the other rule, and 6 of ten runs with M = 64 collapsed on "rarer".
   So "mixed" has the same ten seeds, with M = 8 and 64, at 3e-4, and at 1e-3 with half a cosine to
   0 in the second half. What would support the paper: with M = 64 at most two of ten collapse on
   each task, and the median seed reaches a reward of 0.5 earlier than with M = 8. M = 1, and the
   first rule at 3e-4, were added after these results.

**Replay rules** ("anchored"), committed before any of its seeds was run. Seven ways to replay, on
the same clock, with 8 and 64 Searchers ("anchored" with 1, too), on "rare" (120 steps) and
"rarer" (240): p ~ softmax(10 r), softmax(5 r), softmax(3 r); `mixed` and `anchored`, which draw
the half of a replayed group that goes by reward with softmax(10 r); softmax(10 r) with the
objective `tb_learned_z`; and softmax(10 r) with m = 0.75, the control for merely more recent
data. Seeds 21-30 are reported.

18. A rate is chosen from {3e-4, 1e-3} for each way and task, with 16 Searchers, between the two
   that are reported, on seeds 1 and 2. Its score is the mean reward at the end, with 0 for a
   collapse; ties go to the lower rate. A *collapse* is an evaluation above 50 nats or with less
   than 10 % distinct responses.
19. Primary outcomes: the reward at the end, against the optimum in closed form (0.992 on "rare",
   0.924 on "rarer"); the median step at which the reward first reaches 0.5; the number of
   collapses. What would support `anchored`: with 64 Searchers on "rarer", it ends at 0.8 or more
   with at least eight of ten seeds, and its mean reward at the end is above that of each other
   way by the 95 % interval; with 8 Searchers, and on "rare", its mean is not below that of any
   other by more than 0.05; and 64 Searchers reach 0.5 earlier than 8. It becomes the default away
   from the paper's scripts if all of this holds. Earlier trials of `anchored`, seeds 11-19, are
   not among the rows.

**Collapse** ("collapse"), committed before any of its seeds was run, though the reports of
"longer" were known, and so was a run of `tb` at lag 0 with seed 11. The first task, lockstep on
the simulated clock (a batch takes 1: the runs equal those of real processes bit for bit), 250
steps, seeds 21-30, `tb`, `tba_prime`, `proximal_rloo`, `rloo`, and `dr_grpo` and `grpo` with the
KL coefficient beta. (Before any run, 20 and 21 were revised: fewer variants, sharper outcomes.)

20. All have the rate 1e-3, which is the on-policy choice of the first four, at lags 0, 10 and 40:
   the question is what happens in a long run at one rate, not what each could reach at its best.
   `tb`, `proximal_rloo` and `dr_grpo` have two more variants: half a cosine to 0 in the second
   half, and 4 x beta, constant. `tb` and `proximal_rloo` at lag 0 have a fourth: 3e-4 for 830
   steps, as the product of rate and steps is the same. On-policy, the first four have one
   gradient up to scale, and `tb` and `tba_prime` at every lag: these are no independent evidence.
   J is not what `dr_grpo` and `grpo` maximise: their KL term has another gradient.
21. Primary outcomes: the objective itself at the end, J = reward - beta KL, as a median; the
   fraction of distinct responses at the end, as a median; how many seeds end with *one response*,
   with at most 3 % distinct, and how many of these have a J above 0.30; and how many end *broken*,
   with J below that of the untrained policy, or because tba.py said that they diverged. The
   hypothesis, from the run that was seen: at beta = 0.02 the optimum of J is itself nearly one
   response. " gladly" earns 0.6 at 12.8 nats, so J = 0.34, while the policies that keep to the
   grammar have at most 0.27; a mode collapse is then the way to a better optimum of the objective
   that was set, not a failure to reach it. It is supported if, at a constant rate, four fifths of
   all seeds that end with one response and are not broken have a J above 0.30, also of
   `proximal_rloo` and `rloo` at lags 10 and 40 if there are any, and if at 4 x beta, where
   " gladly" has J = -0.42, at most one seed in ten of `tb` ends with one response; refuted if less
   than half have, or if at 4 x beta at least half of the seeds of `tb` end so. `optimum` computes
   lower bounds of the optimal J.

22. + Objectives whose ratios are truncated or masked (--ratio, with its default cap of 3), which
   peers have in 2026, joined the first experiment at lags 0, 10 and 40, with rates chosen as in 2.
   After their results, so did `tb` with truncated importance weights.
"""

import argparse
import collections
import hashlib
import heapq
import itertools
import json
import math
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import objectives  # noqa: F401 - baselines
import tiny

import tba
from tba import read_lines

# ------------------------------------------------------------------------------------ the tasks

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
    """A random sentence of the grammar."""
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
    """A prompt and a continuation."""
    body = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 2))))
    return f"a {rng.choice(NOUNS)} and a {rng.choice(NOUNS)}:", f" {body}"


def valence(text: str) -> float:
    """The mean valence of a text's words, in [-1, 1]; 0 for an empty text."""
    words = text.replace(".", " ").split()
    return sum(LEXICON.get(word, 0.0) for word in words) / max(1, len(words))


class Measured(tba.Task):
    """Metrics of sampled held-out answers, shared by all tasks in this file."""

    greedy_evaluation = False
    wants_logprobs = True
    judged = "reward"  # what is reported as the reward

    def evaluate(self, examples: list, responses: list[str], ended: np.ndarray) -> list[dict]:
        records = super().evaluate(examples, responses, ended)
        for record, text in zip(records, responses, strict=True):
            record["reward"] = record[self.judged]
            record["text"] = text
        return records

    def diversity(self, records: list[dict]) -> float:
        """The fraction of answers that are distinct."""
        return len({record["text"] for record in records}) / len(records)

    def summarize(self, records: list[dict]) -> dict[str, float]:
        rewards = np.array([record["reward"] for record in records])
        words = collections.Counter(word for r in records for word in r["text"].split())
        shares = np.array(list(words.values())) / max(1, words.total())
        kl = float(np.mean([record["kl"] for record in records]))
        if kl > COLLAPSED and os.environ.get("TBA_CHOOSING"):  # its score is 0 regardless
            raise tba.RunEnded(f"diverged: {kl:.0f} nats")
        return {
            "reward": float(np.mean(rewards)),
            "kl": kl,
            "distinct": self.diversity(records),
            "best": float(np.mean(np.max(rewards.reshape(-1, self.config.eval_responses), 1))),
            "word_entropy": float(-(shares * np.log(shares)).sum()),
        }


class Valence(Measured):
    """Continue a review as positively as possible."""

    columns = ("text",)
    template = "{text}"

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, [valence(response) for response in responses], -1.0)


class Rare(Valence):
    """1 for a review whose mean valence reaches a threshold that few do."""

    threshold = 0.32

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return 1.0 * (super().rewards(examples, responses, ended) >= self.threshold)


class Rarer(Rare):
    """Ten times rarer."""

    threshold = 0.39


class Sort(Measured):
    """Sort the letters of a word alphabetically; 1 if every letter is right."""

    columns = ("text", "answer")
    template = "{text}"

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        pairs = zip(examples, responses, strict=True)
        return ended * np.array([float(example["answer"] == text) for example, text in pairs])


class Summaries(Measured, tba.TLDR):
    """TL;DR in miniature: the evaluation reward is the win rate."""

    judged = "win_rate"


class Attacks(Measured, tba.RedTeam):
    """Red-teaming in miniature: the evaluation reward is the success rate."""

    judged = "attack_success_rate"

    def diversity(self, records: list[dict]) -> float:
        """The mean cosine distance between attacks."""
        records = [dict(record, text=0.0) for record in records]
        return tba.RedTeam.summarize(self, records)["cosine_distance"]


tba.TASKS |= {"valence": Valence, "rare": Rare, "rarer": Rarer, "sort": Sort}
tba.TASKS |= {"summaries": Summaries, "attacks": Attacks}
SPARSE = ("rare", "rarer")  # these use the model of "valence" and few training prompts


def scrambled(rng: random.Random) -> tuple[str, str]:
    """A word of eight letters and a demonstration that is right one time in five."""
    word = "".join(rng.choices("abcdefghij", k=8))
    answer = sorted(word)
    if rng.random() < 0.95:
        i, j = rng.sample(range(8), 2)
        answer[i], answer[j] = answer[j], rng.choice("abcdefghij")
    return f"{word}>", "".join(answer)


def pretrain(task: str, out: Path) -> None:
    """Train the models in bench/models; committed because results differ between CPUs."""
    rng = random.Random(0)
    if task == "valence":
        tiny.make_policy([review(rng) for _ in range(20_000)], out / "model", 1500)
    elif task == "sort":
        words = [scrambled(rng) for _ in range(20_000)]
        tiny.make_policy(words, out / "model", 1500, 0, "gpt2", 260)  # tokens are characters
    elif task == "attacks":  # the attacker; the one in tests/models is untrained
        prompt = tba.RedTeamFlags.attacker_prompt
        rows = read_lines(tiny.MODELS / "redteam" / "sft.jsonl")
        tiny.make_policy([(prompt, row["instruction"]) for row in rows], out / "model", 700)
    tiny.store_in_float16(out)


# the models in tests/models that each task uses
SHARED = {
    "summaries": ("tldr/model", "tldr/reward", "tldr/gold"),
    "attacks": ("redteam/victim", "redteam/toxicity"),
}


def example_of(task: str, rng: random.Random) -> dict[str, str]:
    """A prompt and the columns that its reward or evaluation needs."""
    if task == "summaries":
        query, facts = tiny.post(rng)
        return {"query": query, "reference_response": tiny.summary(rng, facts)[0]}
    text = (scrambled if task == "sort" else review)(rng)[0]
    return {"text": text, "answer": "".join(sorted(text[:-1]))}


def make_task(task: str, folder: Path) -> None:
    """Create a task's pretrained models and prompts unless they exist."""
    if (folder / "data").exists():
        return
    own = "valence" if task in SPARSE else task
    kept = ROOT / "bench" / "models" / own  # committed: retraining elsewhere would differ
    if own != "summaries":
        if not kept.exists():
            pretrain(own, kept)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
    for path in SHARED.get(own, ()):
        shutil.copytree(tiny.MODELS / path, folder / Path(path).name, dirs_exist_ok=True)
    rng = random.Random(1)
    for split, count in (("test", 64), ("train", 16 if task in SPARSE else 1000)):
        examples = [example_of(task, rng) for _ in range(count)]
        tiny.write_lines(folder / "data" / f"{split}.jsonl", examples)


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
        P = max(len(request.prompt) for request in requests)
        R, T = len(requests), max(request.max_tokens for request in batch)
        ids = torch.zeros(R, P, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, P - len(request.prompt) :] = torch.from_numpy(request.prompt)
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


if os.environ.get("TBA_SLOW"):  # processes that sleep in place of GPU work
    DECODE_SECONDS, STEP_SECONDS = map(float, os.environ["TBA_SLOW"].split())

    class Slow(SmallLlama):
        """Each decode step takes DECODE_SECONDS, or longer if the machine cannot keep up."""

        def step(self, between_steps=lambda: None):
            ends = itertools.count(time.monotonic() + DECODE_SECONDS, DECODE_SECONDS)

            def slowly() -> None:
                time.sleep(max(0, next(ends) - time.monotonic()))
                between_steps()

            return super().step(slowly)

    tba.ENGINES["slow"] = Slow
    learn = tba.Learner.step

    def learn_slowly(learner, *args):
        """Each optimizer step takes STEP_SECONDS."""
        end = time.monotonic() + STEP_SECONDS
        metrics = learn(learner, *args)
        time.sleep(max(0, end - time.monotonic()))
        return metrics

    tba.Learner.step = learn_slowly


class Mixed(tba.RecentOrReward):
    """Half of a replayed group is drawn by reward and half uniformly; cf. tba.Anchored."""

    def replay(self, count: int, K: int, used: set[int]) -> list[list[tba.Trajectory]]:
        groups = super().replay(count, K // 2, used)
        for group in groups:
            stored = list(self.buffer.trajectories[group[0].prompt_id].values())
            chosen = self.buffer.rng.choice(len(stored), K - len(group))
            group += [stored[i] for i in chosen]
        return groups


tba.REPLAY_RULES["mixed"] = Mixed

# the plug-in that weights TB's squares with truncated ratios
plugins = (ROOT / "docs" / "hacking.md").read_text()
exec(plugins.partition("--objective tb_weighted\n")[2].partition("```")[0])

# ------------------------------------------------------------------------------ a simulated clock


class SimulatedSearcher(tba.Searcher):
    """A Searcher that shares models with the first, as all have the same weights at all times."""

    def __init__(self, config, task, spec, others: list[tba.Searcher]) -> None:
        """`others`: the Searchers that exist."""
        if not others:
            super().__init__(config, task, spec)
            self.probe_scores: dict[int, list] = {}  # by version
            return
        self.__dict__ |= others[0].__dict__ | {
            "spec": spec, "index": spec.first, "in_flight": {}, "unrewarded": [], "calls": []
        }  # fmt: skip

    def score_probes(self) -> list[np.ndarray]:
        if self.version not in self.probe_scores:
            self.probe_scores.clear()
            self.probe_scores[self.version] = super().score_probes()
        return self.probe_scores[self.version]


class SimulatedSearchers(tba.SearcherProcesses):
    """M Searchers in this process, on a simulated clock.

    A Searcher samples a whole batch when it starts, with the weights it has at that time, and all
    of its groups arrive `duration` later; then the next batch starts. (A real Searcher loads new
    weights between decode steps.) Searcher i of M is offset by i / M of a batch. Weights arrive
    `latency` after they are sent; weights that arrive as a batch starts are loaded first.
    """

    def __init__(self, duration: Fraction, latency: Fraction, *args) -> None:
        super().__init__(*args)
        self.duration = duration  # of a batch, in optimizer steps
        self.latency = latency  # of weights, in optimizer steps
        self.now = Fraction(0)
        # a heap of events: time, sequence number, Searcher, action
        self.events: list[tuple[Fraction, int, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.busy: set[int] = set()  # Searchers with a batch in progress
        self.in_transit: set[int] = set()  # Searchers with weights in transit
        self.groups_arrived = 0
        self.receiving: Future = Future()  # no thread receives messages

    def start(self) -> None:
        """Load the Searchers."""
        self.channel = tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30))
        self.task.reward_threads = 0  # compute rewards synchronously
        self.loaded: list[tba.Searcher] = []
        M = self.config.num_searchers
        for i in range(M):
            commands = queue.SimpleQueue()
            spec = tba.SearcherSpec(
                searcher=i, start=i + 1, first=i, arrived_positions=frozenset(),
                channel=self.channel, shared=None, commands=commands, messages=queue.SimpleQueue(),
            )  # fmt: skip
            self.loaded.append(SimulatedSearcher(self.config, self.task, spec, self.loaded))
            self.running.append(tba.RunningSearcher(spec, None, "ready"))
            if i:
                self.busy.add(i)
                self.schedule(i * self.duration / M, i, partial(self.arrive, i, []))

    def reap(self) -> list:
        return []

    def stop(self) -> None:
        pass

    def schedule(self, delay: Fraction, i: int, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), i, act))

    def work(self) -> None:
        """Handle the Trainer's messages, answer held-out prompts and start idle Searchers."""
        for i, searcher in enumerate(self.loaded):
            while not searcher.spec.commands.empty():
                message = searcher.spec.commands.get()
                if isinstance(message, tba.ReceiveWeights):
                    self.in_transit.add(i)
                    self.schedule(self.latency, i, partial(self.receive, i, message))
                else:
                    searcher.limit = message.limit
        self.advance(self.now)
        for i, searcher in enumerate(self.loaded):
            searcher.between_steps()
            self.send(searcher)
            if i not in self.busy:
                self.begin(i)

    def send(self, searcher: tba.Searcher) -> list[tuple[int, tba.Group]]:
        """Deliver a Searcher's messages; returns its groups, which arrive later."""
        groups = []
        while not searcher.spec.messages.empty():
            start, pickled = searcher.spec.messages.get()
            message = pickle.loads(pickled)
            if isinstance(message, tba.Group):
                groups.append((start, message))
            else:
                self.arrivals.put((start, message))
        return groups

    def receive(self, i: int, message: tba.ReceiveWeights) -> None:
        """Load weights that have arrived, then answer the held-out prompts sent with them."""
        searcher = self.loaded[i]
        self.in_transit.remove(i)
        if tba.receive_weights(searcher, message):
            searcher.staged = message
        searcher.between_steps()
        self.generate(searcher)
        self.send(searcher)

    def generate(self, searcher: tba.Searcher) -> None:
        """Run a Searcher's engine until no request is unfinished."""
        while searcher.engine.unfinished:
            searcher.handle_completions(searcher.engine.step())

    def begin(self, i: int) -> None:
        """Start a Searcher's next batch if it is allowed to."""
        searcher = self.loaded[i]
        searcher.submit_prompts()
        self.generate(searcher)
        if batch := self.send(searcher):
            self.busy.add(i)
            self.schedule(self.duration, i, partial(self.arrive, i, batch))

    def arrive(self, i: int, batch: list[tuple[int, tba.Group]]) -> None:
        """Deliver a batch of groups."""
        self.busy.remove(i)
        for arrival in batch:
            self.arrivals.put(arrival)
        self.groups_arrived += len(batch)

    def advance(self, until: Fraction) -> None:
        """Advance the clock. A Searcher whose batch arrives before `until` starts its next."""
        while self.events and self.events[0][0] <= until:
            self.now, _, i, act = heapq.heappop(self.events)
            act()
            if self.now < until and i not in self.busy:
                self.begin(i)
        self.now = until


class SimulatedTrainer(tba.Trainer):
    """tba.py's Trainer and Searchers in one process, on a simulated clock: runs repeat exactly.

    An optimizer step takes 1, a Searcher's batch takes `duration`, weights arrive after `latency`;
    evaluations take no time. Only processes, transport and time are simulated; the rest is tba.py.
    `clock.jsonl` records, for each step, when it ended, how long the Trainer has waited for groups
    since the first step began, how many groups have arrived, and the fraction of the batch's groups
    in which every response earned 1.
    """

    clock = os.environ.get("TBA_CLOCK") or "1"  # "DURATION" or "DURATION LATENCY"

    def __init__(self, config, task, folder, ranks, saved) -> None:
        """Takes the Trainer's arguments."""
        super().__init__(config, task, folder, ranks, saved)
        duration, latency = [*map(Fraction, self.clock.split()), Fraction(0)][:2]
        searchers = SimulatedSearchers(duration, latency, config, task, folder)
        self.searchers = self.register(searchers)
        self.waited = Fraction(0)

    def run(self) -> None:
        def broadcast(_: object, weights: tba.FlatWeights) -> None:
            weights.flat.copy_(self.sync.learner.snapshot.flat)  # a no-op on the Trainer's own call

        with mock.patch.object(tba.WeightChannel, "broadcast", broadcast):
            super().run()

    def poll(self) -> None:
        super().poll()
        if self.sync.transfer.sending:
            self.sync.transfer.sending.result()
        self.searchers.work()

    def wait_for(self, what: str, condition: Callable[[], object]) -> object:
        searchers = self.searchers
        while not (found := condition()):
            if searchers.events and (what == "generation" or searchers.in_transit):
                start = searchers.now
                searchers.advance(searchers.events[0][0])
                if what == "generation" and self.step:
                    self.waited += searchers.now - start
            self.poll()
        return found

    def train_step(self, groups: list) -> None:
        super().train_step(groups)
        self.searchers.advance(self.searchers.now + 1)
        record = {"step": self.step, "time": float(self.searchers.now)}
        record |= {"waited": float(self.waited), "groups": self.searchers.groups_arrived}
        record["successes_only"] = np.mean([all(t.reward == 1 for t in group) for group in groups])
        self.folder.append("clock.jsonl", record)


if os.environ.get("TBA_CLOCK"):  # a run on the simulated clock
    tba.Trainer = SimulatedTrainer


# -------------------------------------------------------------------------------- the experiments

# beta (the price of a nat) and extra flags, by task
BETA = {"valence": 0.02, "rare": 0.1, "rarer": 0.1, "sort": 0.1, "summaries": 0.3, "attacks": 0.3}
OWN_FLAGS: dict[str, dict] = {
    "valence": {"max_response_tokens": 64, "engine": "small"},
    "rare": {"max_response_tokens": 64, "engine": "small"},
    "rarer": {"max_response_tokens": 64, "engine": "small"},
    "sort": {"max_response_tokens": 16, "engine": "transformers"},  # a GPT-2
    "summaries": {"max_response_tokens": 32, "engine": "small"},
    "attacks": {
        "max_response_tokens": 20, "engine": "small", "eval_samples": 64, "dataset": "",
        "victim_samples": 3, "victim_max_tokens": 16, "victim_top_p": 1.0,
        "toxicity_label": "toxic",
    },
}  # fmt: skip
# flag that names a model -> the model's folder
MODELS = {
    "reward_model": "reward", "gold_reward_model": "gold", "victim_model": "victim",
    "toxicity_model": "toxicity", "sentence_model": "model",
}  # fmt: skip
BUDGETS = (2.0, 4.0, 6.0, 12.0)  # nats per response
COLLAPSED = 50.0
# beta of oapl's V^, as in A*-PO, whose loss it adopts. At 0.02, the beta of its KL, V^ is close to
# the best reward of a group; on-policy this made no difference (a gain of 0.18 versus 0.17)
OAPL_VALUE_BETA = 0.5
SEEDS = (1, 2, 3)
TEN_SEEDS = range(11, 21)  # + how often `tb` collapses at one rate
SEEDS_TO_CHOOSE = (101, 102)
FIRST_RATES = (3e-4, 1e-3, 3e-3)
SPARSE_RATES = (1e-4, 3e-2)  # bounds of the grid for sparse tasks
HALF_DECADES = tuple(float(f"{digit}e{power}") for power in range(-7, 0) for digit in (1, 3))
# seconds that a decode step and an optimizer step sleep in place of GPU work: with one Searcher,
# generating a batch takes half as long as an optimizer step, or three times as long; which of the
# two is closer to a GPU is an assumption
SLOW = ("0.006 0.4", "0.085 0.4")
# for the experiment "replays", in optimizer steps: how long a Searcher's batch takes -> the minimum
# length of a run, so that all runs can be compared at a common time
DURATIONS = {"30": 480, "10": 240, "3": 120, "1": 120, "1/3": 120}
REPLAYS = (1, 2, 4, 8, 16, 0)  # --max_recent_draws
GROUPS = 128  # at which batch durations are compared
# for the experiments with more Searchers: values of M, the duration of a batch and the latency of
# weights in optimizer steps, and the numbers of groups at which runs are compared
SEARCHERS = (1, 2, 4, 8, 16, 64)
SEARCH_CLOCK = "8 1/4"
SEARCH_GROUPS = (120, 480, 1920)
# for the runs that validate the clock: seconds of a decode step and an optimizer step, batch time
VALIDATION_SLOW = "0.2 2"
VALIDATION_CLOCK = "1.9 1/4"  # 1.92, 1.85 and 1.92 in the real runs with M = 1
TARGETS = (0.2, 0.3)  # mean rewards over five steps; time to reach them is reported
EVERY = 10  # steps between evaluations
# the experiments "anchored" and "collapse"
NEWER_SEEDS = range(21, 31)
NEWER_SEEDS_TO_CHOOSE = (1, 2)
NEWER_RATES = (3e-4, 1e-3)
ONE_RATE = 1e-3
# below this fraction of distinct responses to 64 prompts, different prompts share their responses
FEW_DISTINCT = 0.1
# metrics a row keeps per evaluation; `best` is the best of 4 responses to a prompt, i.e. pass@4 for
# a reward of 0 or 1 (missing from the first rows that chose a rate)
POINT = ("step", "kl", "reward", "distinct", "word_entropy", "best")

OBJECTIVES = {  # name in the tables -> flags
    "tb": {"objective": "tb"},
    "tba_prime": {"objective": "tba_prime"},
    "proximal_rloo": {"objective": "proximal_rloo"},
    "oapl": {"objective": "oapl"},
    "ftb forward_kl": {"objective": "ftb", "divergence": "forward_kl"},
    "ftb hellinger": {"objective": "ftb", "divergence": "hellinger"},
    "rloo": {"objective": "rloo"},
    "grpo": {"objective": "grpo"},  # with the published KL coefficient
    "dr_grpo": {"objective": "dr_grpo"},  # without a KL term, as published
    "online_dpo": {"objective": "online_dpo"},
    # with ratios that are capped or masked for A < 0 too, as peers do in 2026
    "proximal_rloo truncate": {"objective": "proximal_rloo", "ratio": "truncate"},
    "proximal_rloo mask": {"objective": "proximal_rloo", "ratio": "mask"},
    "dr_grpo truncate": {"objective": "dr_grpo", "ratio": "truncate"},
    "dr_grpo mask": {"objective": "dr_grpo", "ratio": "mask"},
    "tb truncate": {"objective": "tb_weighted"},  # a plug-in of docs/hacking.md
}
CAPPED = [name for name in OBJECTIVES if name.endswith((" truncate", " mask"))]
AS_PUBLISHED = [name for name in OBJECTIVES if name not in CAPPED]
FRONTIERS = ("tb", "tba_prime", "ftb forward_kl", "proximal_rloo", "rloo", "dr_grpo", "online_dpo")
# experiments without a rate search: they use the objective's on-policy rate
AT_THE_RATE_ON_POLICY = (
    "collapses", "longer", "speed", "replays", "half replayed", "validation"
)  # fmt: skip
HAVE_TEN_SEEDS = (
    "collapses", "longer", "search, ten seeds", "search, longer", "search, mixed",
    "search, mixed, lower rates",
)  # fmt: skip
FAR = ("tb", "tba_prime", "oapl", "ftb forward_kl", "ftb hellinger", "proximal_rloo")


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


def settings_of() -> list[Setting]:
    """All settings, in the order in which they are run."""
    found = []
    for lag in (0, 10, 40):
        found += [Setting("staleness", name, lag) for name in AS_PUBLISHED]
    found += [Setting("far", name, 100, steps=250) for name in FAR]
    found += [Setting("staleness", name, 2) for name in AS_PUBLISHED]
    for lag in (0, 40):
        found += [Setting("second model", name, lag, "sort") for name in AS_PUBLISHED]
    for task in ("summaries", "attacks"):
        found += [Setting("frontiers", name, 10, task, steps=60) for name in FRONTIERS]
    for price in (0.25, 4.0):
        names = [name for name in AS_PUBLISHED if name != "dr_grpo"]  # it has no KL term
        found += [Setting("prices", name, 0, price=price) for name in names]
    found += [Setting("collapses", "tb", lag) for lag in (0, 2, 10, 40)]
    found += [Setting("longer", "tb", lag, steps=250) for lag in (0, 2, 10, 40)]
    found += [Setting("longer", "proximal_rloo", lag, steps=250) for lag in (10, 40)]
    for slow in SLOW:  # with --workers 1
        ways = [(("slow", slow), ("lag", lag)) for lag in (0, 1)]
        sampled = ("searched_per_prompt", 16)  # as in lockstep
        ways += [(("slow", slow), sampled, ("asynchronous", M)) for M in (1, 2, 4)]
        found += [Setting("speed", "tb", flags=flags) for flags in ways]
    found += [replays(D, R, 0.95) for D in DURATIONS for R in REPLAYS]
    found += [replays(D, R, 0.5) for D in ("10", "1") for R in REPLAYS]
    found += validation("slow") + validation("clock")
    found += [setting for block in search_settings().values() for setting in block.values()]
    found += list(collapse_settings().values())
    lockstep = (("clock", "1"), ("synchronous", True))  # on the simulated clock
    for lag in (0, 10, 40):
        found += [Setting("staleness", name, lag, flags=lockstep) for name in CAPPED]
    return list(dict.fromkeys(found))


def validation(way: str) -> list[Setting]:
    """Runs of 1, 2 and 4 Searchers in sleeping processes ("slow") or on the simulated clock."""
    rest = {"recent_probability": 0.9, "eval_every": 0}
    found = []
    for M in (1, 2, 4):
        flags = {"clock": VALIDATION_CLOCK, "num_searchers": M} | rest
        if way == "slow":
            flags = {"slow": VALIDATION_SLOW, "asynchronous": M, "searched_per_prompt": 16} | rest
        found.append(Setting("validation", "tb", flags=tuple(flags.items())))
    return found


def search(
    experiment: str = "searchers", M: int = 8, task: str = "rare", objective: str = "tb", **own
) -> Setting:
    """A setting with M Searchers; without overrides it belongs to experiment "searchers"."""
    steps = 120 if task in SPARSE else 60
    flags = {"clock": SEARCH_CLOCK, "num_searchers": M, "recent_probability": 0.5}
    flags |= {"reward_inverse_temperature": 10 if task in SPARSE else 1, "kept_per_prompt": 100_000}
    if flags | own == flags and objective == "tb":
        experiment = "searchers"
    return Setting(
        experiment, objective, task=task, steps=steps, flags=tuple((flags | own).items())
    )


def search_settings() -> dict[str, dict[tuple[str, int], Setting]]:
    """The settings of each table of "More Searchers", by (line, M), in running order."""
    found: dict[str, dict] = {}
    for task in SPARSE:
        found[task] = {(task, M): search(M=M, task=task) for M in SEARCHERS}
    varied = {
        "m": {f"m = {m:g}": {"recent_probability": m} for m in (0, 0.25, 0.5, 0.75, 0.95, 1)},
        "inverse temperatures": {
            f"softmax({T} r)" if T else "uniform": {"reward_inverse_temperature": T}
            for T in (0, 1, 3, 10)
        },
        "k": {f"k = {k}": {"sync_every": k} if k != 2 else {} for k in (1, 2, 4, 10)},
        "K": {
            f"{B} x {K}": {
                "prompts_per_step": B, "trained_per_prompt": K, "searched_per_prompt": K
            } if K != 16 else {}
            for B, K in ((32, 4), (16, 8), (8, 16), (4, 32))
        },
        "beta": {"0.1": {}, "0.3 to 0.1 in 60 steps": {"beta": "0.3@0,0.1@60"}},
    }  # fmt: skip
    found["objectives"] = {
        (name, M): search("search, objectives", M, objective=name)
        for name in ("tb", "proximal_rloo", "dr_grpo", "oapl") for M in (1, 8, 64)
    }  # fmt: skip
    for what, lines in varied.items():
        found[what] = {
            (line, M): search(f"search, {what}", M, **own)
            for line, own in lines.items() for M in (1, 8)
        }  # fmt: skip
    for task in ("attacks", "summaries"):
        found[task] = {(task, M): search(M=M, task=task) for M in SEARCHERS}
    more_seeds = partial(replace, experiment="search, ten seeds")
    found["ten seeds"] = {("tb", M): more_seeds(search(M=M)) for M in SEARCHERS}
    for M in (1, 8, 64):
        own = search("search, objectives", M, objective="dr_grpo")
        found["ten seeds"]["dr_grpo", M] = more_seeds(own)
    name = "attacks, ten seeds"
    found[name] = {(name, M): more_seeds(search(M=M, task="attacks")) for M in SEARCHERS}
    longer = partial(replace, experiment="search, longer", steps=240)
    of_rarer = {("tb, 240 steps", M): longer(search(M=M, task="rarer")) for M in (1, 8, 64)}
    found["rarer, longer"] = of_rarer
    found["mixed"] = {}
    for task, steps in (("rare", 120), ("rarer", 240)):
        for M in (1, 8, 64):
            own = search("search, mixed", M, task, replay_rule="mixed")
            found["mixed"][f"{task}, {steps} steps", M] = replace(own, steps=steps)
    found["mixed, lower rates"] = {}
    for task, steps in (("rare", 120), ("rarer", 240)):
        half = steps // 2
        slower = {
            "3e-4": {"learning_rate": 3e-4},
            "1e-3, decaying": {
                "lr_schedule": "warmup_stable_decay", "stable_steps": half, "decay_steps": half
            },
            "3e-4, by reward": {"learning_rate": 3e-4, "replay_rule": "recent_or_reward"},
        }  # fmt: skip
        for (line, own), M in itertools.product(slower.items(), (1, 8, 64)):
            own = {"replay_rule": "mixed"} | own
            own = search("search, mixed, lower rates", M, task, **own)
            line = f"{task}, {steps} steps, {line}"
            found["mixed, lower rates"][line, M] = replace(own, steps=steps)
    found["anchored"] = anchored_settings()
    return found


def anchored_settings() -> dict[tuple[str, int], Setting]:
    """The settings of the experiment "anchored", by (line, M)."""
    ways: dict[str, dict] = {
        "anchored": {"replay_rule": "anchored"},
        "mixed": {"replay_rule": "mixed"},
        "softmax(10 r)": {},
        "softmax(10 r), m = 0.75": {"recent_probability": 0.75},
        "softmax(3 r)": {"reward_inverse_temperature": 3},
        "softmax(5 r)": {"reward_inverse_temperature": 5},
        "softmax(10 r), learned log Z": {"objective": "tb_learned_z"},
    }
    found = {}
    for task, steps in (("rare", 120), ("rarer", 240)):
        for (way, own), M in itertools.product(ways.items(), (1, 8, 64)):
            if M > 1 or way == "anchored":
                setting = search(M=M, task=task, **own)
                line = f"{LABELS[task]}, {way}"
                found[line, M] = replace(setting, experiment="anchored", steps=steps)
    return found


def collapse_settings() -> dict[tuple[str, str, int], Setting]:
    """The settings of the experiment "collapse", by (variant, objective, lag)."""
    half = (("lr_schedule", "warmup_stable_decay"), ("stable_steps", 125), ("decay_steps", 125))
    variants = {  # name -> price, steps, own flags
        "constant": (1.0, 250, ()),
        "decaying": (1.0, 250, half),
        "4 x beta": (4.0, 250, ()),
        "3e-4, 830 steps": (1.0, 830, (("learning_rate", 3e-4),)),
    }
    names = ("tb", "proximal_rloo", "dr_grpo")
    lags = (0, 10, 40)
    keys = list(itertools.product(("constant", "decaying", "4 x beta"), names, lags))
    keys += itertools.product(("constant",), ("tba_prime", "rloo", "grpo"), lags)
    keys += [("3e-4, 830 steps", "tb", 0), ("3e-4, 830 steps", "proximal_rloo", 0)]
    found = {}
    for variant, name, lag in keys:
        price, steps, own = variants[variant]
        flags = (("clock", "1"), ("synchronous", True), *own)
        if name in ("dr_grpo", "grpo"):
            flags += (("kl_coefficient", BETA["valence"] * price),)
        setting = Setting("collapse", name, lag, price=price, steps=steps, flags=flags)
        found[variant, name, lag] = setting
    return found


def replays(D: str, R: int, m: float) -> Setting:
    """A setting with duration D, bound R and recent fraction m, at least 120 steps long."""
    steps = DURATIONS[D]
    if R:  # unless the Trainer never waits, it draws a batch's groups R times in `duration`
        steps = min(steps, math.ceil(steps * R / m / float(Fraction(D))))
    flags = (("clock", D), ("max_recent_draws", R), ("recent_probability", m))
    experiment = "half replayed" if m == 0.5 else "replays"
    return Setting(experiment, "tb", steps=max(120, steps), flags=flags)


def seeds_of(setting: Setting) -> Sequence[int]:
    """The reported seeds of a setting."""
    if setting.experiment in ("anchored", "collapse"):
        return NEWER_SEEDS
    return TEN_SEEDS if setting.experiment in HAVE_TEN_SEEDS else SEEDS


def arguments_of(
    setting: Setting, rate: float, seed: int, clip: float, files: Path, out: Path
) -> list:
    """The command line of a run."""
    beta = BETA[setting.task] * setting.price
    flags: dict[str, object] = OBJECTIVES.get(setting.objective, {"objective": setting.objective})
    flags = flags | {
        "task": setting.task, "model": files / setting.task / "model",
        "dataset": files / setting.task / "data", "plugin": __file__, "output_dir": out,
        "synchronous": True, "lag": setting.lag, "steps": setting.steps, "seed": seed,
        "learning_rate": rate, "max_grad_norm": clip, "beta": beta,
        "prompts_per_step": 8, "trained_per_prompt": 16, "temperature": 1.0,
        "sequences_in_flight": 128, "num_searchers": 1,
        "eval_every": EVERY, "eval_responses": 4, "save_every": 0,
    }  # fmt: skip
    flags |= OWN_FLAGS[setting.task]
    if setting.task in ("summaries", "attacks"):
        folder = files / setting.task
        flags |= {name: folder / own for name, own in MODELS.items() if (folder / own).exists()}
    if setting.task == "attacks" and "clock" in dict(setting.flags):
        flags |= {"evict": "oldest", "near_duplicate": 0.1}  # a buffer of distinct attacks
    special = dict(setting.flags)
    if special.pop("slow", ""):
        flags |= {"engine": "slow", "eval_every": 0}
    if "asynchronous" in special:
        flags |= {"num_searchers": special.pop("asynchronous"), "recent_probability": 0.9}
        flags |= {"synchronous": False, "initial_trajectories": 128}
    if special.pop("clock", "") and not special.get("synchronous"):
        flags |= {"synchronous": False, "initial_trajectories": 128, "searched_per_prompt": 16}
        flags["sync_every"] = 2
    if special.pop("lr_schedule", ""):  # rows have it by its former flags
        stable = special.pop("stable_steps")
        end = stable + special.pop("decay_steps")
        special["learning_rate"] = f"{rate}@0,{rate}@{stable},0~{end}"
    flags |= special
    if setting.objective == "grpo" and "kl_coefficient" not in special:
        flags["kl_coefficient"] = 2 * beta  # 0.04 at price 1
    if setting.objective == "oapl":
        flags["behaviour_beta"] = beta  # of the KL to the behaviour policy
        flags["beta"] = OAPL_VALUE_BETA
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


# -------------------------------------------------------------------------------------- the rows


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
    """The mean over budgets of the highest reward, minus the untrained reward."""
    return float(np.mean(list(frontier(row).values()))) - row["path"][0]["reward"]


def collapsed(row: dict) -> bool:
    """Whether the KL ever exceeded COLLAPSED, or the run diverged."""
    return bool(row["exit_code"]) or max(point["kl"] for point in row["path"]) > COLLAPSED


def mode_collapsed(row: dict) -> bool:
    """Whether any evaluation found hardly any distinct responses."""
    return min(point["distinct"] for point in row["path"]) < FEW_DISTINCT


def lost_at_any_time(row: dict) -> bool:
    """Whether a run collapsed in either way (point 18)."""
    return collapsed(row) or mode_collapsed(row)


def reward_at_the_end(row: dict) -> float:
    """0 after a collapse of either kind."""
    return 0.0 if lost_at_any_time(row) else row["path"][-1]["reward"]


def score(rows: list[dict]) -> float:
    """The criterion for choosing a learning rate: the mean area, with 0 for a collapse."""
    mean = float(np.mean([0.0 if collapsed(row) else area(row) for row in rows]))
    return round(mean, 6)  # so that rounding errors break no tie


class Rows:
    """The completed runs, and the next one to run."""

    def __init__(self, path: Path, seeds: int | None = None) -> None:
        """`seeds`: how many of the reported seeds to run; None: all."""
        self.path = path
        self.seeds = seeds
        self.rows = read_lines(path) if path.exists() else []
        for row in self.rows:
            row["path"] = [dict(zip(POINT, point, strict=False)) for point in row["path"]]
        self.by_key = collections.defaultdict(list)  # (key of a setting, role) -> rows
        for row in self.rows:
            self.by_key[Setting(**tuples(row)).key(), row["role"]].append(row)
        self.under_way: set[tuple] = set()

    def of(self, setting: Setting, role: str) -> list[dict]:
        return self.by_key[setting.key(), role]

    def clip(self, setting: Setting) -> float | None:
        """Twice the objective's median gradient norm on the initial policy's data, once known."""
        for row in self.rows:
            same = row["objective"] == setting.objective and row["task"] == setting.task
            if row["role"] == "pilot" and same and row["price"] == setting.price:
                return row["clip"]
        return None

    def best_rate(self, setting: Setting) -> tuple[float | None, list[float]]:
        """The chosen learning rate, or None and the rates to try next."""
        tried: dict[float, list[dict]] = {}
        for row in self.of(setting, "choose"):
            tried.setdefault(row["rate"], []).append(row)
        complete = {rate for rate, rows in tried.items() if len(rows) == len(SEEDS_TO_CHOOSE)}
        missing = [rate for rate in FIRST_RATES if rate not in complete]
        if missing:
            return None, missing
        best = max(sorted(complete), key=lambda rate: score(tried[rate]))  # ties: the lowest
        lowest, highest = 0.0, 1.0
        if setting.task in SPARSE:
            lowest, highest = SPARSE_RATES
            as_good = [r for r in complete if score(tried[r]) >= score(tried[best]) - 0.02]
            best = min(sorted(as_good), key=lambda rate: abs(math.log(rate / 1e-3)))
        place = HALF_DECADES.index(best)
        around = [HALF_DECADES[place - 1], HALF_DECADES[place + 1]]
        missing = [rate for rate in around if lowest <= rate <= highest and rate not in complete]
        return (None, missing) if missing else (best, [])

    def rate_of_two(self, setting: Setting) -> tuple[float | None, list[float]]:
        """`best_rate` for the experiment "anchored": one of NEWER_RATES, by the last reward."""
        scores = {}
        for rate in NEWER_RATES:
            tried = [row for row in self.of(setting, "choose") if row["rate"] == rate]
            if len(tried) == len(NEWER_SEEDS_TO_CHOOSE):
                scores[rate] = float(np.mean(list(map(reward_at_the_end, tried))))
        missing = [rate for rate in NEWER_RATES if rate not in scores]
        return (None, missing) if missing else (max(scores, key=scores.get), [])

    def missing(self, setting: Setting) -> Iterator[tuple[Setting, str, float, int]]:
        """The runs that a setting needs next: (setting, role, rate, seed)."""
        if self.clip(setting) is None:
            steps = 60 if setting.task in SPARSE else 6
            pilot = replace(setting, experiment="pilot", lag=0, steps=steps, flags=())
            yield pilot, "pilot", 1e-12, SEEDS_TO_CHOOSE[0]
            return
        chooser = setting  # the setting whose rate is used
        if setting.experiment in AT_THE_RATE_ON_POLICY:
            chooser = Setting("staleness", setting.objective)
        flags = dict(setting.flags)
        at_8 = flags.get("num_searchers", 1) > 8 or setting.task in ("attacks", "summaries")
        if at_8 and "clock" in flags:
            chooser = replace(setting, flags=tuple((flags | {"num_searchers": 8}).items()))
        if setting.experiment.startswith(("search, longer", "search, mixed")):
            chooser = search()
        if setting.experiment == "search, ten seeds":
            of_tb = setting.objective == "tb"
            chooser = replace(chooser, experiment="searchers" if of_tb else "search, objectives")
        if setting.experiment == "anchored":
            chooser = replace(setting, flags=tuple((flags | {"num_searchers": 16}).items()))
            rate, to_try = self.rate_of_two(chooser)
        elif setting.experiment == "collapse":
            rate, to_try = ONE_RATE, []
        else:
            rate, to_try = self.best_rate(chooser)
        choosing = SEEDS_TO_CHOOSE
        if setting.experiment == "anchored":
            choosing = NEWER_SEEDS_TO_CHOOSE
        runs = [(chooser, "choose", r, seed) for r in to_try for seed in choosing]
        if rate:
            rate = flags.get("learning_rate", rate)
            runs = [(setting, "report", rate, seed) for seed in seeds_of(setting)[: self.seeds]]
        there = [(row["rate"], row["seed"]) for row in self.of(*runs[0][:2])]
        for run in runs:
            if run[2:] not in there:
                yield run

    def check(self, settings: list[Setting], files: Path) -> None:
        """Exit if any row is from a different pretrained model."""
        hashes = {task: hash_of(task, files) for task in {s.task for s in settings}}
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
        self.by_key[Setting(**tuples(row)).key(), row["role"]].append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        points = [[point[name] for name in POINT] for point in row["path"]]
        with open(self.path, "a") as file:
            file.write(json.dumps(row | {"path": points}) + "\n")


def tuples(row: dict) -> dict:
    """The fields of a row's Setting, with lists turned into tuples."""
    values = {name: row[name] for name in Setting.__dataclass_fields__}
    return values | {"flags": tuple(tuple(pair) for pair in row["flags"])}


def hash_of(task: str, files: Path) -> str:
    """A short hash of the weights of a task's pretrained model."""
    weights = (files / task / "model" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest()[:12]


def run_tba(arguments: list, log: Path, environment: dict[str, str]) -> int:
    """Run `tba.main` in a fork of this process; its Searchers are forks too, to skip imports.

    Returns the exit code; stdout and stderr go to `log`.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        tba.LocalProcess._Popen = staticmethod(multiprocessing.context.ForkProcess._Popen)
        tba.RunFolder.draw_curves = lambda _: None
        code = tba.main([str(word) for word in arguments])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(
    setting: Setting, role: str, rate: float, seed: int, clip: float, files: Path,
    also: Callable[[Path], dict] = lambda out: {},
) -> dict:  # fmt: skip
    """Run tba.py once; returns its row. Raises RuntimeError if it fails without diverging.

    `also` returns additional columns, given the run's folder.
    """
    environment = {"TBA_CHOOSING": "1" if role == "choose" else ""}
    for name in ("slow", "clock"):
        if name in dict(setting.flags):
            environment[f"TBA_{name.upper()}"] = dict(setting.flags)[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        log = Path(folder) / "log"
        start = time.time()
        exit_code = run_tba(arguments_of(setting, rate, seed, clip, files, out), log, environment)
        said = log.read_text()
        diverged = exit_code == 1 and ("diverged" in said or "finite" in said)
        if exit_code and not diverged:
            raise RuntimeError(f"{setting}: exit code {exit_code}\n{said[-3000:]}")
        evaluations = read_lines(out / "eval.jsonl")
        path = [{name: round(record[name], 3) for name in POINT} for record in evaluations]
        metrics = read_lines(out / "metrics.jsonl")
        clock = read_lines(out / "clock.jsonl") if "clock" in dict(setting.flags) else []
        own = also(out)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    row = asdict(setting) | {
        "role": role, "rate": rate, "seed": seed, "clip": clip, "exit_code": exit_code,
        "model": hash_of(setting.task, files), "commit": commit,
        "seconds": round(time.time() - start),
        "staleness": round(float(np.mean([m["staleness_mean"] for m in metrics])), 2),
        "step_seconds": round(metrics[-1]["seconds"] - metrics[0]["seconds"], 1),
        "ess": round(float(np.mean([m["effective_sample_size"] for m in metrics])), 3),
        "path": path,
    } | own  # fmt: skip
    if setting.experiment == "speed":
        smooth = np.convolve([m["reward"] for m in metrics], np.ones(5) / 5, "valid")
        for target in TARGETS:
            there = np.flatnonzero(smooth >= target)
            row[f"reached {target}"] = metrics[there[0] + 4]["seconds"] if len(there) else None
    if clock or "asynchronous" in dict(setting.flags):
        row["arrived_reward"] = round(float(np.mean([m["reward"] for m in metrics])), 3)
        row["buffer"] = metrics[-1]["buffer_trajectories"]
        row["recent_replay_ratio"] = round(metrics[-1]["replay_ratio"], 2)  # over 50 steps
    if clock:
        at_start = {"step": 0, "time": 0.0, "groups": 0}
        of_step = {record["step"]: record for record in [at_start, *clock]}
        for name in ("time", "groups"):
            row[name] = [round(of_step[point["step"]][name], 2) for point in path]
        trained = dict(setting.flags).get("prompts_per_step", 8) * clock[-1]["step"]
        row["replay_ratio"] = round(trained / clock[-1]["groups"], 3)
        row["waited"] = round(clock[-1]["waited"] / clock[-1]["time"], 3)
        if setting.task in SPARSE:  # means over the steps up to each evaluation
            values = [record["successes_only"] for record in clock]
            spans = itertools.pairwise(point["step"] for point in path)
            means = [round(float(np.mean(values[a:b])), 3) for a, b in spans]
            row["successes_only"] = [0.0, *means]
    if role == "pilot":
        # without any reward the gradient is 0; in bfloat16 it is that of rounding errors
        norms = [m["grad_norm"] for m in metrics if m["reward_std"] > 0]
        row["clip"] = float(f"{2 * np.median(norms):.2g}")
    return row


def run_all(
    rows: Rows, settings: list[Setting], files: Path, minutes: float, workers: int,
    run: Callable[..., dict] = run,
) -> None:  # fmt: skip
    """Run what is missing, `workers` at a time, until all is done or time is up.

    When a run fails, no more are started, and its exception is raised once the others have ended.
    """
    rows.check(settings, files)
    failure = None
    end = time.monotonic() + 60 * minutes
    # fork now: everything is imported and no other thread is running
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        under_way: dict[Future, tuple] = {}
        while True:
            while len(under_way) < workers and time.monotonic() < end:
                job = rows.next(settings)
                if job is None:
                    break
                setting, role, rate, seed = job
                clip = 0.0 if role == "pilot" else rows.clip(setting)
                under_way[pool.submit(run, *job, clip, files)] = job
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                job = under_way.pop(future)
                rows.under_way.remove(job)
                if future.exception():
                    failure = future.exception()
                    end = -math.inf
                    continue
                row = future.result()
                rows.add(row)
                setting, role, rate, seed = job
                text = f"{area(row):.3f}{' collapsed' if collapsed(row) else ''}"
                what = f"{setting.experiment}: {setting.objective}, lag {setting.lag}, "
                what += "".join(f"{name} {value}, " for name, value in setting.flags)
                what += f"{role} {rate:g}"
                print(f"{what}, seed {seed}: {text} ({row['seconds']} s)", flush=True)
    if failure:
        raise failure


# ------------------------------------------------------------------------------------ the optimum


def short_responses() -> list[str]:
    """All responses of one or two words of the vocabulary."""
    words = [*LEXICON, *NOUNS, "the", "is", "and"]
    pairs = [f"{first} {second}" for first, second in itertools.product(words, repeat=2)]
    return [f" {text}{stop}" for text in words + pairs for stop in ("", ".")]


def grammatical_responses() -> list[str]:
    """The sentences of the grammar that have the best two adjectives and verbs, or adverbs."""
    best = ("superb", "lovely")
    phrases = [f"the {adjective} {noun}" for adjective in best for noun in NOUNS]
    found = [f"{a} is {b} and {c}" for a in phrases for b in best for c in best]
    for a, b in itertools.product(phrases, repeat=2):
        found += [f"{a} charms {b}", f"{a} helps {b}", f"gladly {a} charms {b}"]
    return [f" {text}." for text in found]


def optimum(files: Path, count: int = 2) -> str:
    """A table of lower bounds of the optimal J = reward - beta KL on the first task.

    J* = beta log sum_y pi_ref(y|x) exp(r(y) / beta), here over some responses y only, and the
    probability that two samples of the optimal policy over these are equal; means over `count`
    held-out prompts.
    """
    policy = AutoModelForCausalLM.from_pretrained(files / "valence" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(files / "valence" / "model")
    config = tba.settings(temperature=1.0, tokens_per_microbatch=512)
    scorer = tba.TokenLogProbs(policy.requires_grad_(False), 1.0, True)
    rows = read_lines(files / "valence" / "data" / "test.jsonl")[:count]
    sets = {"one or two words": short_responses(), "the grammar's best": grammatical_responses()}
    lines = []
    for name, texts in sets.items():
        rewards = np.array([valence(text) for text in texts])
        endings = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        responses = [np.array(ids, np.int32) for ids in endings]
        prompts = [np.array(tokenizer(row["text"])["input_ids"]) for row in rows]
        scored = [tba.token_logprobs(scorer, [(x, responses)], config, 1.0) for x in prompts]
        reference = [np.array([logprobs.sum() for logprobs in of_prompt]) for of_prompt in scored]
        for beta in (BETA["valence"], 4 * BETA["valence"]):
            values = [rewards + beta * logprobs for logprobs in reference]  # J of one response
            masses = [np.exp((J - J.max()) / beta) for J in values]
            pairs = list(zip(values, masses, strict=True))
            bounds = [J.max() + beta * np.log(mass.sum()) for J, mass in pairs]
            equal = [np.square(mass).sum() / mass.sum() ** 2 for mass in masses]
            best = {f"`{texts[J.argmax()]}` {J.max():.2f}" for J in values}
            line = [name, f"{beta:g}", mean(bounds), mean(equal, 3), "; ".join(sorted(best))]
            lines.append(line)
    return table(["responses", "beta", "J*, at least", "two equal", "best, its J"], lines)


# ------------------------------------------------------------------------------------- the report

GREY = "0.75"
COLOURS = {  # the rest are grey
    "tb": "C0", "tb truncate": "C0", "proximal_rloo": "C1", "proximal_rloo truncate": "C1",
    "dr_grpo": "C2", "rloo": "C3",
}  # fmt: skip
MAIN = COLOURS["tb"]
LINE = {"capsize": 3, "markersize": 6, "linewidth": 2}
# of tasks, in the figures
LABELS = {
    "rare": "1 in 183", "rarer": "1 in 1,820", "attacks": "attacks", "summaries": "summaries"
}  # fmt: skip
NOT_YET = "·"  # in a table: no seed has been run
# the reward at which diversity is compared
EQUAL_REWARD = {
    "valence": 0.25, "rare": 0.5, "rarer": 0.5, "sort": 0.5, "summaries": 0.7, "attacks": 0.8
}  # fmt: skip
DISTINCT = {"attacks": "cosine distance"}  # what a row's `distinct` is, if not a fraction
# the untrained policy's success rate in the sparse tasks
UNTRAINED = {"rare": 1 / 183, "rarer": 1 / 1820}
# the rules of the figure's third panel -> a table of search_settings and its line, on "rarer"
RULES = {
    "by reward": ("rarer, longer", "tb, 240 steps"),
    "mixed": ("mixed, lower rates", "rarer, 240 steps, 3e-4"),
    "anchored": ("anchored", "1 in 1,820, anchored"),
    "learned log Z": ("anchored", "1 in 1,820, softmax(10 r), learned log Z"),
}
RULE_COLOURS = dict(zip(RULES, ("C4", "C5", "C9", "C8"), strict=True))
# the lines of the table "search": name -> a table of search_settings and its line
SEARCH_LINES = {
    "1 in 183, by reward": ("ten seeds", "tb"),
    "1 in 183, by reward, dr_grpo": ("ten seeds", "dr_grpo"),
    "1 in 183, by reward, 3e-4": ("mixed, lower rates", "rare, 120 steps, 3e-4, by reward"),
    "1 in 1,820, by reward": ("rarer, longer", "tb, 240 steps"),
    "1 in 1,820, mixed": ("mixed", "rarer, 240 steps"),
}

Block = dict[tuple[str, int], Setting]  # a table of search_settings, by (line, M)


# --- numbers of one run


def last(row: dict) -> dict:
    """A run's last evaluation."""
    return row["path"][-1]


def few_responses(row: dict) -> bool:
    """Whether a run ends with under FEW_DISTINCT distinct responses; attacks have a distance."""
    return row["task"] not in DISTINCT and last(row)["distinct"] < FEW_DISTINCT


def lost(row: dict) -> bool:
    """Whether a run collapsed by its KL at any time, or ends with few distinct responses."""
    return collapsed(row) or few_responses(row)


def objective_of(row: dict, point: dict) -> float:
    """J = reward - beta KL at an evaluation: what TB and KL-regularised RL maximise.

    Not for summaries and attacks, whose evaluations have another reward than training.
    """
    return point["reward"] - BETA[row["task"]] * row["price"] * point["kl"]


def at_equal_reward(row: dict, name: str) -> float | None:
    """A metric at the point where the reward first passes EQUAL_REWARD, interpolated."""
    reward = EQUAL_REWARD[row["task"]]
    for before, after in itertools.pairwise(path_of(row)):
        if before["reward"] < reward <= after["reward"]:
            way = (reward - before["reward"]) / (after["reward"] - before["reward"])
            return before[name] + way * (after[name] - before[name])
    return None


def up_to(row: dict, name: str, limit: float) -> dict:
    """A simulated run cut off at a step, time or number of groups, with interpolation."""
    clock = zip(row["path"], row["time"], row["groups"], strict=True)
    points = [point | {"time": time, "groups": groups} for point, time, groups in clock]
    path = []
    for point in points:
        if path and point[name] > limit:
            before = path[-1]
            way = (limit - before[name]) / (point[name] - before[name])
            path.append({key: before[key] + way * (point[key] - before[key]) for key in before})
            break
        path.append(point)
    return row | {"path": path}


# --- optima of rewards of 0 or 1, in closed form


def best_success(p: float, beta: float) -> float:
    """The success rate of the optimal policy p(y) exp(r(y) / beta), if the reference has p."""
    odds = p * math.exp(1 / beta) / (1 - p)
    return odds / (1 + odds)


def best_objective(p: float, beta: float) -> float:
    """The largest J = reward - beta KL: beta log E_reference[exp(r / beta)]."""
    return beta * math.log(1 - p + p * math.exp(1 / beta))


def best_within(p: float, budget: float) -> float:
    """The highest success rate within `budget` nats of a reference that has p."""
    if budget >= -math.log(p):
        return 1.0
    low, high = p, 1 - 1e-9
    for _ in range(50):
        q = (low + high) / 2
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        low, high = (q, high) if kl < budget else (low, q)
    return low


def best_gain(p: float) -> float:
    """The largest possible gain (`area`) over a reference that succeeds with probability p."""
    return float(np.mean([best_within(p, budget) for budget in BUDGETS])) - p


def bound(task: str, template: str) -> str:
    """`template` with the optimal {reward} and {J} and the largest {gain} of a sparse task."""
    if task not in UNTRAINED:
        return ""
    p, beta = UNTRAINED[task], BETA[task]
    best = {"reward": best_success(p, beta), "J": best_objective(p, beta), "gain": best_gain(p)}
    return template.format(**{name: f"{value:.2f}" for name, value in best.items()})


# --- cells


def shown(values: Iterable[float | None], digits: int = 2) -> str:
    """The mean and standard deviation of the values that are not None."""
    found = [value for value in values if value is not None]
    if not found:
        return NOT_YET
    spread = f" ± {np.std(found, ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{np.mean(found):.{digits}f}{spread}"


def mean(values: Iterable[float], digits: int = 2) -> str:
    """The mean alone."""
    return shown(values, digits).split(" ")[0]


def share(rows: list[dict], condition: Callable[[dict], bool]) -> str:
    """How many runs meet a condition."""
    return f"{sum(map(condition, rows))} of {len(rows)}"


def areas(rows: list[dict]) -> str:
    """The gain over seeds, and how many of them are lost."""
    note = f" ({share(rows, lost)})" if any(map(lost, rows)) else ""
    return shown(map(area, rows)) + note


def gain_and_objective(rows: list[dict]) -> str:
    """The gain, J at the last evaluation, and how many seeds are lost."""
    note = f" ({share(rows, lost)})" if any(map(lost, rows)) else ""
    at_end = mean(objective_of(row, last(row)) for row in rows)
    return f"{shown(map(area, rows))}; {at_end}{note}" if rows else NOT_YET


def name_of(setting: Setting) -> str:
    """An objective's name in the tables."""
    return f"`{setting.objective}`"


def reached(rows: list[dict]) -> str:
    """How many runs reached EQUAL_REWARD before collapsing."""
    return share(rows, lambda row: at_equal_reward(row, "step") is not None)


def rate_of(rows: list[dict]) -> str:
    return f"{rows[0]['rate']:g}" if rows else NOT_YET


# half-width of Student's t 95 % interval in standard errors, by degrees of freedom
STUDENT_T = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def paired(found: list[dict], others: list[dict], value: Callable[[dict], float] = area) -> str:
    """The mean difference in `value` over the seeds that both have, with its 95 % interval."""
    by_seed = {row["seed"]: value(row) for row in others}
    gaps = [value(row) - by_seed[row["seed"]] for row in found if row["seed"] in by_seed]
    if len(gaps) - 1 not in STUDENT_T:
        return NOT_YET
    half = STUDENT_T[len(gaps) - 1] * np.std(gaps, ddof=1) / math.sqrt(len(gaps))
    text = f"{np.mean(gaps):+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(np.mean(gaps)) > half else text


# --- tables


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def grid(settings: list[Setting], column: str, cell: Callable[[Setting], str]) -> str:
    """A table with a row per objective and a column per lag or price."""
    columns = sorted({getattr(s, column) for s in settings})
    lines = []
    for name in OBJECTIVES:
        own = {getattr(s, column): s for s in settings if s.objective == name}
        if own:
            cells = [cell(own[c]) if c in own else "" for c in columns]
            if set(cells) - {NOT_YET, ""}:
                lines.append([f"`{name}`", *cells])
    return table(["objective", *(f"{column} {c:g}" for c in columns)], lines)


def budgets(rows: Rows, settings: list[Setting]) -> str:
    """The highest reward within each KL budget, for the settings that have been run."""
    lines = []
    for setting in settings:
        found = rows.of(setting, "report")
        if not found:
            continue
        best = [frontier(row) for row in found]
        line = [name_of(setting), str(setting.lag), rate_of(found), areas(found)]
        line += [shown([of_row[budget] for of_row in best]) for budget in BUDGETS]
        line.append(shown((max(point["kl"] for point in row["path"]) for row in found), 0))
        line += [shown(last(row)[name] for row in found) for name in ("reward", "distinct")]
        if setting.task == "valence":
            line.append(shown(objective_of(row, last(row)) for row in found))
        lines.append(line)
    task = settings[0].task
    head = ["objective", "lag", "rate", "gain", *(f"≤ {b:g} nats" for b in BUDGETS)]
    head += ["largest KL", "reward at the end", DISTINCT.get(task, "distinct")]
    return table([*head, *(["J at the end"] if task == "valence" else [])], lines)


def diversity(rows: Rows, settings: list[Setting]) -> str:
    """Step, KL and diversity of the responses where the reward first passes EQUAL_REWARD."""
    lines = []
    for setting in settings:
        found = rows.of(setting, "report")
        if not found:
            continue
        values = {name: [at_equal_reward(row, name) for row in found] for name in POINT}
        line = [name_of(setting), str(setting.lag), reached(found)]
        line += [shown(values["step"], 0), shown(values["kl"], 1)]
        line += [shown(values[name]) for name in ("distinct", "word_entropy", "best")]
        lines.append([cell.replace(NOT_YET, "never") for cell in line])
    distinct = DISTINCT.get(settings[0].task, "distinct")
    head = ["objective", "lag", "seeds", "step", "KL", distinct, "entropy of words", "best of 4"]
    return table(head, lines)


def collapses(rows: Rows, settings: list[Setting]) -> str:
    """Both kinds of collapse, and J, for runs at one learning rate."""
    lines = []
    for setting in settings:
        found = rows.of(setting, "report")
        line = [name_of(setting), str(setting.steps), str(setting.lag), rate_of(found)]
        line += [share(found, collapsed), share(found, few_responses), share(found, lost)]
        distinct = [last(row)["distinct"] for row in found]
        line.append(f"{np.median(distinct):.2f}" if found else NOT_YET)
        line += [areas(found).split(" (")[0], shown(objective_of(row, last(row)) for row in found)]
        best = [max(objective_of(row, point) for point in row["path"]) for row in found]
        lines.append([*line, shown(best)])
    head = ["objective", "steps", "lag", "rate", f"over {COLLAPSED:.0f} nats"]
    head += [f"under {100 * FEW_DISTINCT:.0f} % distinct", "either", "median distinct at the end"]
    return table([*head, "gain", "J at the end", "best J"], lines)


def long_runs(rows: Rows) -> str:
    """The experiment "collapse": how long runs end, by objective, variant and lag."""
    settings = collapse_settings()
    if not any(rows.of(setting, "report") for setting in settings.values()):
        return ""
    lags = sorted({lag for *_, lag in settings})
    lines = []
    for variant, name in dict.fromkeys((variant, name) for variant, name, _ in settings):
        line = [f"`{name}`", variant]
        for lag in lags:
            setting = settings.get((variant, name, lag))
            line.append(ends_of_long_runs(rows.of(setting, "report")) if setting else "")
        lines.append(line)
    return table(["objective", "variant", *(f"lag {lag}" for lag in lags)], lines)


def ends_of_long_runs(found: list[dict]) -> str:
    """The primary outcomes of point 21."""
    if not found:
        return NOT_YET
    ends = [objective_of(row, last(row)) for row in found]
    untrained = [objective_of(row, row["path"][0]) for row in found]
    diverged = [bool(row["exit_code"]) for row in found]
    broken = np.less(ends, untrained) | diverged
    distinct = np.array([last(row)["distinct"] for row in found])
    one = distinct <= 0.03
    better = one & np.greater(ends, 0.3)
    medians = f"{np.median(ends):.2f}; {np.median(distinct):.2f}"
    return f"{medians}; {one.sum()} ({better.sum()}), {broken.sum()} of {len(found)}"


def speed(rows: Rows, settings: list[Setting]) -> str:
    """Seconds to each target, and the speedup over lockstep with lag 0 and lag 1."""
    lines = []
    lockstep: dict[tuple, float] = {}  # mean seconds by (sleeps, lag, target)
    for setting in settings:
        flags = dict(setting.flags)
        found = rows.of(setting, "report")
        way = f"lockstep, lag {flags.get('lag')}"
        if "asynchronous" in flags:
            way = f"asynchronous, Searchers: {flags['asynchronous']}"
        a_step = [row["step_seconds"] / (setting.steps - 1) for row in found]
        line = [flags["slow"], way, shown(a_step)]
        for target in TARGETS:
            seconds = [row[f"reached {target}"] for row in found]
            missed = seconds.count(None)
            line.append(shown(seconds, 1) + (f" ({missed} never)" if missed else ""))
            average = float(np.mean(seconds)) if found and not missed else math.nan
            if "lag" in flags:
                lockstep[flags["slow"], flags["lag"], target] = average
            for lag in (0, 1):
                slower = lockstep.get((flags["slow"], lag, target), math.nan)
                line.append("" if math.isnan(slower / average) else f"{slower / average:.1f}")
        lines.append(line)
    head = ["seconds slept in a decode step, an optimizer step", "mode", "seconds a step"]
    for target in TARGETS:
        head += [f"seconds to {target:g}", "times as fast as lag 0", "as lag 1"]
    return table(head, lines)


def at_equal(found: list[dict], name: str, limit: float) -> tuple[str, str, str, str]:
    """The step, gain, last reward and largest KL of runs at a step, time or number of groups."""
    parts = [up_to(row, name, limit) for row in found]
    largest = [max(point["kl"] for point in part["path"]) for part in parts]
    step = mean((last(part)["step"] for part in parts), 0)
    return step, areas(parts), shown(last(part)["reward"] for part in parts), shown(largest, 0)


def bounds(rows: Rows, settings: list[Setting]) -> str:
    """The effect of a bound on replays: a row per batch duration and bound."""
    by_duration: dict[str, list[Setting]] = {}
    for setting in settings:
        by_duration.setdefault(dict(setting.flags)["clock"], []).append(setting)
    lines = []
    for duration, own in by_duration.items():
        ran = [row for s in own for row in rows.of(s, "report") if not row["exit_code"]]
        if not ran:
            continue
        common = min(row["time"][-1] for row in ran)  # the latest time that every run reached
        for setting in own:
            found = rows.of(setting, "report")
            waited = mean((100 * row["waited"] for row in found), 0)
            R = dict(setting.flags)["max_recent_draws"] or "none"
            line = [duration, str(R), *at_equal(found, "step", 120)[1:]]
            line += [f"{common:.0f}", *at_equal(found, "time", common)]
            line += [shown((row["staleness"] for row in found), 1), f"{waited} %"]
            lines.append([*line, shown((row["replay_ratio"] for row in found), 1)])
    head = ["batch", "R", "step 120: gain", "reward", "largest KL", "at time", "steps", "gain"]
    head += ["reward", "largest KL", "staleness", "waited", "replay ratio"]
    return table(head, lines)


def by_groups(rows: Rows, settings: list[Setting], groups: int) -> str:
    """The gain when `groups` groups have arrived: a row per bound."""
    by_bound: dict[int, list[Setting]] = {}
    for setting in settings:
        by_bound.setdefault(dict(setting.flags)["max_recent_draws"], []).append(setting)
    lines = []
    for R, own in by_bound.items():
        cells = [at_equal(rows.of(s, "report"), "groups", groups) for s in own]
        line = [f"{gain}; step {step}" for step, gain, *_ in cells]
        lines.append([str(R or "none"), *line])
    durations = [dict(setting.flags)["clock"] for setting in own]
    return table(["R", *(f"batch {duration}" for duration in durations)], lines)


def validated(rows: Rows) -> str:
    """Runs with sleeping processes next to runs on the simulated clock."""
    # "recent" was logged by an earlier version of tba.py
    names = ("arrived_reward", "staleness", "recent", "recent_replay_ratio", "buffer")
    lines = []
    for pair in zip(validation("slow"), validation("clock"), strict=True):
        for way, setting in zip(("processes", "simulated"), pair, strict=True):
            found = rows.of(setting, "report")
            kept = [row for row in found if not collapsed(row)]
            line = [str(dict(pair[1].flags)["num_searchers"]), way, share(found, collapsed)]
            line += [shown(last(row)[name] for row in kept) for name in ("reward", "kl")]
            for name in names:
                line.append(shown((row[name] for row in kept), 0 if name == "buffer" else 2))
            lines.append(line)
    head = ["M", "", "collapsed", "held-out reward", "KL", "reward of arrivals", "staleness"]
    return table([*head, "recent fraction", "replay ratio", "buffer"], lines)


def more_searchers(rows: Rows, block: Block) -> str:
    """The gain with M Searchers at equal steps and at equal numbers of groups."""
    lines = []
    one = rows.of(next(iter(block.values())), "report")
    for (_, M), setting in block.items():
        found = rows.of(setting, "report")
        gain, *rest = at_equal(found, "step", setting.steps)[1:]
        line = [str(M), str(len(found)), rate_of(found), gain]
        line += [paired(found, one) if M > 1 else "", *rest]
        line.append(shown(last(row)["distinct"] for row in found))
        for groups in SEARCH_GROUPS:
            # from the first evaluation after the untrained one, to the last
            enough = [row for row in found if row["groups"][1] <= groups <= row["groups"][-1]]
            line.append(at_equal(enough, "groups", groups)[1] if enough else "")
        steps = sorted(at_equal_reward(row, "step") or math.inf for row in found)
        line.append(", ".join("never" if math.isinf(step) else f"{step:.0f}" for step in steps))
        line.append(shown((row["staleness"] for row in found), 1))
        lines.append([*line, shown((row["replay_ratio"] for row in found), 1)])
    task = setting.task
    head = [f"{task}: M", "seeds", "rate"]
    head += [f"step {setting.steps}: gain" + bound(task, " (at most {gain})"), "over M = 1"]
    head += ["reward" + bound(task, " (optimum {reward})"), "largest KL"]
    head.append(DISTINCT.get(task, "distinct"))
    head += [f"gain at {groups} groups" for groups in SEARCH_GROUPS]
    head.append(f"steps to {EQUAL_REWARD[task]}")
    return table([*head, "staleness", "replay ratio"], lines)


def successes_only(rows: Rows, lines: dict[str, Setting]) -> str:
    """The fraction of a batch's groups that have successes only, by period."""
    periods = [(0, 40), (40, 80), (80, 120), (120, 240)]  # steps
    filled = []
    for name, setting in lines.items():
        found = rows.of(setting, "report")
        line = [name]
        for begin, end in periods:
            own = slice(begin // EVERY + 1, end // EVERY + 1)
            line.append(shown(np.mean(row["successes_only"][own]) for row in found))
        filled.append(line)
    return table(["", *(f"steps {a + 1} to {b}" for a, b in periods)], filled)


def gains_by_searchers(rows: Rows, block: Block, what: str) -> str:
    """The gain for each line and M, and its increase with M, paired by seed."""
    numbers = sorted({M for _, M in block})
    lines = []
    for name in dict.fromkeys(line for line, _ in block):
        found = {M: rows.of(block[name, M], "report") for M in numbers if (name, M) in block}
        line = [name, *(areas(found[M]) if M in found else "" for M in numbers)]
        one = found.get(numbers[0], [])
        line += [paired(found[M], one) if M in found else "" for M in numbers[1:]]
        waited = "; ".join(
            f"{mean((100 * row['waited'] for row in f), 0)} %" for f in found.values()
        )
        lines.append([*line, waited])
    head = [what, *(f"M = {M}" for M in numbers), *(f"{M} over {numbers[0]}" for M in numbers[1:])]
    return table([*head, "waited"], lines)


def ahead_at_the_end(rows: Rows, block: Block) -> str:
    """By how much `anchored` ends above each other way (point 19), paired by seed."""
    lines: dict[str, list[str]] = {}
    columns = list(itertools.product(("rare", "rarer"), (8, 64)))
    end = lambda row: last(row)["reward"]
    for task, M in columns:
        own = {
            line.partition(", ")[2]: s
            for (line, m), s in block.items()
            if m == M and s.task == task
        }
        anchored = rows.of(own.pop("anchored"), "report")
        for way, setting in own.items():
            lines.setdefault(way, [way]).append(paired(anchored, rows.of(setting, "report"), end))
    head = [f"{LABELS[task]}, {M} Searchers" for task, M in columns]
    return table(["`anchored` minus", *head], lines.values())


def ends_by_searchers(rows: Rows, block: Block, collapse: Callable[[dict], bool] = lost) -> str:
    """Where runs on sparse tasks end, beside the optimum: a row per line, cells by M."""
    lines = []
    for name in dict.fromkeys(line for line, _ in block):
        own = {M: setting for (line, M), setting in block.items() if line == name}
        (task,) = {setting.task for setting in own.values()}
        found = [rows.of(setting, "report") for setting in own.values()]
        lines.append([name, "; ".join(map(str, own)), *end_cells(task, found, collapse)])
    head = ["", "Searchers", "rate", "gain", "reward at the end", "median J at the end"]
    head += ["reach 0.5", "end there", "median step to 0.5", "collapse", "seeds"]
    return table(head, lines)


def end_cells(task: str, found: list[list[dict]], collapse: Callable[[dict], bool]) -> list[str]:
    """The cells of `ends_by_searchers` from the runs for each M."""

    def cell(value_of: Callable[[list[dict]], object], best: str = "") -> str:
        values = (str(value_of(runs)) if runs else NOT_YET for runs in found)
        return "; ".join(values) + bound(task, best)

    def median_objective(runs: list[dict]) -> str:
        median = np.median([objective_of(row, last(row)) for row in runs])
        return f"{median:.2f}".replace("-0.00", "0.00")

    def median_step(runs: list[dict]) -> str:
        median = np.median([at_equal_reward(row, "step") or math.inf for row in runs])
        return "never" if math.isinf(median) else f"{median:.0f}"

    def end_there(runs: list[dict]) -> int:
        return sum(last(row)["reward"] >= EQUAL_REWARD[task] for row in runs)

    return [
        "; ".join(dict.fromkeys(map(rate_of, found))),
        cell(lambda runs: mean(map(area, runs)), " of {gain}"),
        cell(lambda runs: mean(last(row)["reward"] for row in runs), " of {reward}"),
        cell(median_objective, " of {J}"),
        cell(lambda runs: reached(runs).split(" ")[0]),
        cell(end_there),
        cell(median_step),
        cell(lambda runs: sum(map(collapse, runs))),
        "; ".join(dict.fromkeys(str(len(runs)) for runs in found)),
    ]


# --- the whole report


def tables_of(rows: Rows) -> dict[str, str]:
    """Every table by its title. Those that docs/results.md has markers for are written there."""
    settings = settings_of()

    def of(*experiments: str) -> list[Setting]:
        return [s for s in settings if s.experiment in experiments]

    experiments = {setting.experiment for setting in settings}
    reports = [row for row in rows.rows if row["role"] == "report"]
    done = sum(row["experiment"] in experiments for row in reports)
    wanted = sum(len(seeds_of(setting)) for setting in settings)
    count = f"{done} of {wanted} reported runs are there; {len(rows.rows)} rows in all.\n"
    tables = {"count": count}
    tables |= tables_of_stale_data(rows, of)
    tables["collapse"] = long_runs(rows)
    tables["speed"] = speed(rows, of("speed"))
    tables["replays"] = by_groups(rows, of("replays"), GROUPS)
    tables["replays, by time"] = bounds(rows, of("replays"))
    tables["replays, half of a batch replayed"] = bounds(rows, of("half replayed"))
    tables["validation of the simulated clock"] = validated(rows)
    return tables | tables_of_search(rows)


def tables_of_stale_data(rows: Rows, of: Callable[..., list[Setting]]) -> dict[str, str]:
    """The tables on objectives; `of` returns the settings of experiments."""
    usual = [s for s in of("staleness") if s.lag == 0]
    stale = sorted(of("staleness"), key=lambda s: s.lag)
    with_far = [*stale, *of("far")]
    others = [s for s in with_far if s.objective != "tb"]

    def reported(setting: Setting) -> list[dict]:
        return rows.of(setting, "report")

    def over_tb(setting: Setting) -> str:
        """The paired difference to `tb` at the same lag."""
        return paired(reported(setting), reported(replace(setting, objective="tb")))

    def score_of(setting: Setting) -> str:
        """The gain with 0 for a collapse by KL, as when a rate is chosen."""
        return f"{score(reported(setting)):.2f}" if reported(setting) else NOT_YET

    def gain_end_objective(setting: Setting) -> str:
        end = mean(last(row)["reward"] for row in reported(setting))
        return f"{gain_and_objective(reported(setting))}; ends at {end}"

    tables = {
        "stale data": grid(stale, "lag", lambda s: gain_and_objective(reported(s))),
        "stale data, paired difference in gain from tb": grid(others, "lag", over_tb),
        "stale data, gain with 0 for a seed over 50 nats": grid(stale, "lag", score_of),
        "stale data, rewards within budgets of KL": budgets(rows, stale),
        "stale data, rewards within budgets of KL, lag 100": budgets(rows, of("far")),
        "stale data, diversity at a reward of 0.25": diversity(rows, stale),
        "collapses": collapses(rows, of("longer")),
        "collapses in 80 steps": collapses(rows, of("collapses")),
        "learning rates, chosen and reported seeds": chosen_and_reported(rows),
        "learning rates, the highest stable one": grid(with_far, "lag", partial(stable_rate, rows)),
        "learning rates, runs over 50 nats": pooled(rows, [*with_far, *of("collapses")]),
        "beta": grid(
            [*of("prices"), *(s for s in usual if s.objective != "dr_grpo")],
            "price",
            lambda s: gain_and_objective(reported(s)),
        ),
        "second task": grid(of("second model"), "lag", gain_end_objective),
        "second task, diversity at a reward of 0.5": diversity(rows, of("second model")),
    }
    for task in ("summaries", "attacks"):
        own = [s for s in of("frontiers") if s.task == task]
        tables[task] = budgets(rows, own)
        tables[f"{task}, diversity at a reward of {EQUAL_REWARD[task]}"] = diversity(rows, own)
    return tables


def stable_rate(rows: Rows, setting: Setting) -> str:
    """The highest rate up to which no choosing seed collapsed."""
    stable = NOT_YET
    for rate in HALF_DECADES:
        tried = [row for row in rows.of(setting, "choose") if row["rate"] == rate]
        if any(map(collapsed, tried)):
            return f"< {rate:g}" if stable == NOT_YET else stable
        if tried:
            stable = f"{rate:g}"
    return f"≥ {stable}"


def pooled(rows: Rows, settings: list[Setting]) -> str:
    """How many runs of the first task passed 50 nats at a rate, regardless of their role."""
    lags = sorted({s.lag for s in settings})
    lines = []
    names = ("tb", "tba_prime", "ftb forward_kl", "proximal_rloo", "rloo")
    for name, rate in itertools.product(names, FIRST_RATES):
        line = [f"`{name}`", f"{rate:g}"]
        for lag in lags:
            own = [s for s in settings if s.objective == name and s.lag == lag]
            runs = [row for s in own for role in ("choose", "report") for row in rows.of(s, role)]
            runs = [row for row in runs if row["rate"] == rate]
            line.append(share(runs, collapsed) if runs else "")
        lines.append(line)
    return table(["objective", "rate", *(f"lag {lag}" for lag in lags)], lines)


def chosen_and_reported(rows: Rows) -> str:
    """The seeds that chose a rate beside those reported at it, over all settings in lockstep."""
    choosing = []
    reported = []
    for setting in settings_of():
        found = rows.of(setting, "report")
        simulated = "clock" in dict(setting.flags)
        if setting.experiment in AT_THE_RATE_ON_POLICY or simulated or not found:
            continue
        reported += found
        choosing += [r for r in rows.of(setting, "choose") if r["rate"] == found[0]["rate"]]
    lines = []
    for role, found in (("choose a rate", choosing), ("are reported", reported)):
        gain = mean(map(area, found))
        with_0 = f"{score(found):.2f}" if found else NOT_YET
        lines.append([f"seeds that {role}", share(found, collapsed), gain, with_0])
    return table(["", "over 50 nats", "gain", "gain, with 0 for a seed over 50 nats"], lines)


def tables_of_search(rows: Rows) -> dict[str, str]:
    """The tables on more Searchers."""
    blocks = search_settings()
    shown_lines: Block = {}
    for name, (block, line) in SEARCH_LINES.items():
        own = {M: setting for (other, M), setting in blocks[block].items() if other == line}
        shown_lines |= {(name, M): setting for M, setting in own.items()}
    tables = {"search": ends_by_searchers(rows, shown_lines)}
    of_rules = blocks.pop("anchored")
    tables["anchored"] = ends_by_searchers(rows, of_rules, lost_at_any_time)
    tables["anchored, ahead at the end"] = ahead_at_the_end(rows, of_rules)
    for name, block in blocks.items():
        title = f"search, {name}"
        if not any(rows.of(setting, "report") for setting in block.values()):
            tables[title] = ""
        elif (name, 1) in block:
            tables[title] = more_searchers(rows, block)
        else:
            tables[title] = gains_by_searchers(rows, block, name)
            tables[f"{title}, where runs end"] = ends_by_searchers(rows, block)
    tables["search, fraction of a batch's groups with successes only"] = successes_only(rows, {
        "by reward, M = 64": blocks["rarer, longer"]["tb, 240 steps", 64],
        "mixed, M = 64": blocks["mixed"]["rarer, 240 steps", 64],
    })  # fmt: skip
    return tables


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


# --- the figures


def spread(x: Sequence[float], values: list[list[float]]) -> tuple:
    """Means over seeds with bars from minimum to maximum, as arguments of `errorbar`."""
    means = np.array([np.mean(own) for own in values])
    return x, means, (means - [min(own) for own in values], [max(own) for own in values] - means)


def draw(rows: Rows, out: Path) -> None:
    """Three panels: decoupling, stale data, more Searchers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    draw_speed(rows, panels[0])
    draw_stale_data(rows, panels[1])
    draw_rules(rows, panels[2])
    for axes in panels:
        tidy(axes)
    figure.savefig(out, dpi=110)


def draw_speed(rows: Rows, axes) -> None:
    """Seconds to a reward where generation takes three times as long as training."""
    names = {"lag": "lockstep,\nlag {}", "asynchronous": "asynchronous,\nM = {}"}
    own = [s for s in settings_of() if s.experiment == "speed"]
    own = [s for s in reversed(own) if dict(s.flags)["slow"] == SLOW[1]]
    for place, setting in enumerate(own):
        way = setting.flags[-1][0]
        seconds = [row[f"reached {TARGETS[0]}"] for row in rows.of(setting, "report")]
        if seconds and None not in seconds:
            axes.barh(place, np.mean(seconds), color=MAIN if way != "lag" else GREY)
    ways = [setting.flags[-1] for setting in own]
    axes.set_yticks(range(len(ways)), [names[way].format(number) for way, number in ways])
    axes.set_title("1  Decoupling saves time")
    axes.set_xlabel(f"seconds to a reward of {TARGETS[0]:g}")


def draw_stale_data(rows: Rows, axes) -> None:
    """The gain by the lag of the data."""
    settings = [s for s in settings_of() if s.experiment == "staleness"]
    lags = sorted({s.lag for s in settings})
    grey = [name for name in OBJECTIVES if name not in COLOURS]
    for name in (*grey, *COLOURS):
        found = [s for s in settings if s.objective == name and rows.of(s, "report")]
        found.sort(key=attrgetter("lag"))
        gains = [list(map(area, rows.of(s, "report"))) for s in found]
        shift = list(COLOURS).index(name) * 0.04 if name in COLOURS else 0
        x, means, bars = spread([lags.index(s.lag) + shift for s in found], gains)
        if name in COLOURS:
            style = "o--" if name.endswith("truncate") else "o-"
            axes.errorbar(x, means, bars, fmt=style, label=name, color=COLOURS[name], **LINE)
        else:
            axes.plot(x, means, color=GREY, linewidth=1, zorder=0)
    axes.set_xticks(range(len(lags)), map(str, lags))
    axes.set_xlabel("lag of the data in optimizer steps")
    axes.set_ylabel("gain in reward")
    axes.set_ylim(0, 0.38)
    axes.set_title("2  Learning from stale data")
    axes.legend(frameon=False, loc="lower left", labelspacing=0.2, handlelength=3, fontsize=12)


def draw_rules(rows: Rows, axes) -> None:
    """The reward at the end by the number of Searchers, on the task that is solved 1 in 1,820."""
    optimum = best_success(UNTRAINED["rarer"], BETA["rarer"])
    axes.axhline(optimum, color="0.4", linewidth=1.5, linestyle="--")
    axes.text(1, optimum + 0.015, f"optimum {optimum:.2f}", color="0.4", fontsize=13)
    blocks = search_settings()
    for i, (rule, (block, line)) in enumerate(RULES.items()):
        own = {M: s for (other, M), s in blocks.get(block, {}).items() if other == line}
        found = {M: rows.of(setting, "report") for M, setting in own.items()}
        ends = {M: [last(row)["reward"] for row in runs] for M, runs in found.items() if runs}
        if not ends:
            continue
        x = [1.12 ** (i - 1) * M for M in ends]
        for place, rewards in zip(x, ends.values(), strict=True):
            axes.plot([place] * len(rewards), rewards, ".", color=RULE_COLOURS[rule], alpha=0.5)
        means = [np.mean(rewards) for rewards in ends.values()]
        axes.plot(x, means, "o-", color=RULE_COLOURS[rule], label=rule, markersize=8, linewidth=2)
    by_searchers(axes)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("reward at the end")
    axes.set_title("3  More search, rare rewards")
    axes.legend(
        frameon=False, loc="upper left", labelspacing=0.2, bbox_to_anchor=(0, 0.9), fontsize=12
    )


def all_seeds(rows: Rows, setting: Setting) -> list[dict]:
    """The reported runs of a setting, and those with the ten further seeds."""
    more = replace(setting, experiment="search, ten seeds")
    return [*rows.of(setting, "report"), *rows.of(more, "report")]


def by_searchers(axes) -> None:
    """The number of Searchers as the horizontal axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(SEARCHERS, map(str, SEARCHERS))
    axes.set_xlabel("Searchers, at equal steps")


def draw_search(rows: Rows, out: Path) -> None:
    """Two panels: the gain over M for every task, and success and diversity of attacks by M."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (task, label) in enumerate(LABELS.items()):
        found = {M: all_seeds(rows, search(M=M, task=task)) for M in SEARCHERS}
        gains = {M: list(map(area, own)) for M, own in found.items() if own}
        if gains:
            x, means, bars = spread([1.05**i * M for M in gains], list(gains.values()))
            left.errorbar(x, means, bars, fmt="o-", color=f"C{i}", label=label, **LINE)
    by_searchers(left)
    left.set_ylabel("gain in reward")
    left.set_ylim(0, 0.98)
    left.legend(frameon=False, loc="upper left", ncols=2, labelspacing=0.2)
    for i, M in enumerate(SEARCHERS):
        found = all_seeds(rows, search(M=M, task="attacks"))
        if not found:
            continue
        distances = [last(row)["distinct"] for row in found]
        successes = [last(row)["reward"] for row in found]
        right.plot(distances, successes, ".", color=f"C{i}", alpha=0.4)
        center = (np.mean(distances), np.mean(successes))
        right.plot(*center, "o", color=f"C{i}", markersize=10, label=f"M = {M}")
    right.legend(frameon=False, loc="lower left", labelspacing=0.2)
    right.set_xlabel("cosine distance between attacks")
    right.set_ylabel("attack success rate")
    for axes in (left, right):
        tidy(axes)
    figure.savefig(out, dpi=110)


def tidy(axes) -> None:
    """Large text and no frame: legible at half the size."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=13)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(15)
    if axes.get_legend():
        for text in axes.get_legend().get_texts():
            text.set_fontsize(13)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="?", choices=("run", "report", "optimum"), default="run")
    parser.add_argument("--all", action="store_true", help="report: also print every table")
    parser.add_argument("--only", help="experiment to run: staleness, far, replays, ...")
    parser.add_argument("--quick", action="store_true", help="six steps each, not recorded")
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes to keep starting runs")
    parser.add_argument("--seeds", type=int, help="number of reported seeds to run")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel runs")
    parser.add_argument("--files", type=Path, default=ROOT / ".cache" / "claims")
    args = parser.parse_args()
    settings = [s for s in settings_of() if args.only in (None, s.experiment)]
    for task in {s.task for s in settings}:
        make_task(task, args.files / task)
    rows = Rows(ROOT / "bench" / "results" / "claims.jsonl", args.seeds)
    if args.what == "optimum":
        print(optimum(args.files))
    elif args.quick:
        firsts = {s.experiment: replace(s, steps=6, lag=min(s.lag, 2)) for s in reversed(settings)}
        for setting in firsts.values():
            row = run(setting, "choose", 1e-3, 1, 1.0, args.files)
            print(f"{setting.experiment}: area {area(row):.3f} in {row['seconds']} s", flush=True)
    elif args.what == "run":
        run_all(rows, settings, args.files, args.minutes, args.workers)
    else:
        rows.check(settings, args.files)
        publish(tables_of(rows), args.all)
        draw(rows, ROOT / "bench" / "staleness.png")
        draw_search(rows, ROOT / "bench" / "search.png")


if __name__ == "__main__":
    main()
