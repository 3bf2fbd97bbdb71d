"""A fair comparison of RL objectives on tasks that run on two CPU cores.

    python bench/claims.py run              # every missing run; takes hours; can be interrupted
    python bench/claims.py run --only staleness --minutes 60
    python bench/claims.py report           # every table and figure of docs/results.md
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
p ~ softmax(10 r), from buffers that evict nothing; --max_replays is 4.

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
   reward, staleness, recent_fraction and buffer agree within two seed standard deviations.
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
   So "mixed" has the same ten seeds, with M = 8 and 64, at 3e-4, and at 1e-3 with a linear decay to
   0 in the second half. What would support the paper: with M = 64 at most two of ten collapse on
   each task, and the median seed reaches a reward of 0.5 earlier than with M = 8. M = 1, and the
   first rule at 3e-4, were added after these results.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import mixed  # noqa: F401 - a replay rule
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

    def evaluate(self, examples: list, responses: list[str], ended: np.ndarray) -> list[dict]:
        records = super().evaluate(examples, responses, ended)
        for record, text in zip(records, responses, strict=True):
            record["reward"] = record[self.metric]
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

    metric = "win_rate"


class Attacks(Measured, tba.RedTeam):
    """Red-teaming in miniature: the evaluation reward is the success rate."""

    metric = "attack_success_rate"

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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights, and fuse those that multiply the same hidden states."""
        super().load_weights(weights)
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
            ended |= torch.isin(ids[:, 0], ends)
            between_steps()
            if ended.all():
                break
            if ended.float().mean() > 0.5:  # keep only the unfinished rows
                left = ~ended
                state = {name: tensor[left] for name, tensor in state.items()}
                kept, ids, ended = kept[:, :, left], ids[left], ended[left]
        return self.completions_of(batch, tokens[:, : t + 1].int().numpy(), logprobs.numpy())

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

# ------------------------------------------------------------------------------ a simulated clock


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
        self.meeting = tba.MeetingPoint("127.0.0.1", 0, False, tba.timedelta(seconds=30))
        self.problem.task.reward_threads = 0  # compute rewards synchronously
        self.loaded: list[tba.Searcher] = []
        M = self.config.num_searchers
        for i in range(M):
            commands = queue.SimpleQueue()
            spec = tba.SearcherSpec(
                searcher=i, start=i + 1, first=i, meeting=self.meeting,
                shared=None, commands=commands, messages=queue.SimpleQueue(),
            )  # fmt: skip
            searcher = tba.Searcher(self.config, self.problem, spec)
            self.loaded.append(searcher)
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

    def __init__(self, config, problem, folder, ranks, saved) -> None:
        """Takes the Trainer's arguments."""
        super().__init__(config, problem, folder, ranks, saved)
        duration, latency = [*map(Fraction, self.clock.split()), Fraction(0)][:2]
        self.searchers = SimulatedSearchers(duration, latency, config, problem, folder.say, saved)
        self.waited = Fraction(0)

    def run(self) -> None:
        def broadcast(_: object, weights: tba.FlatWeights) -> None:
            weights.flat.copy_(self.sync.snapshot.flat)  # a no-op on the Trainer's own call

        with mock.patch.object(tba.WeightGroup, "broadcast", broadcast):
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

    def train_step(self, groups: list, recent: float) -> None:
        super().train_step(groups, recent)
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
REPLAYS = (1, 2, 4, 8, 16, 0)  # --max_replays
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
}
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
        found += [Setting("staleness", name, lag) for name in OBJECTIVES]
    found += [Setting("far", name, 100, steps=250) for name in FAR]
    found += [Setting("staleness", name, 2) for name in OBJECTIVES]
    for lag in (0, 40):
        found += [Setting("second model", name, lag, "sort") for name in OBJECTIVES]
    for task in ("summaries", "attacks"):
        found += [Setting("frontiers", name, 10, task, steps=60) for name in FRONTIERS]
    for price in (0.25, 4.0):
        names = [name for name in OBJECTIVES if name != "dr_grpo"]  # it has no KL term
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
            "3e-4, by reward": {"learning_rate": 3e-4, "replay_rule": "newest"},
        }  # fmt: skip
        for (line, own), M in itertools.product(slower.items(), (1, 8, 64)):
            own = {"replay_rule": "mixed"} | own
            own = search("search, mixed, lower rates", M, task, **own)
            line = f"{task}, {steps} steps, {line}"
            found["mixed, lower rates"][line, M] = replace(own, steps=steps)
    return found


def replays(D: str, R: int, m: float) -> Setting:
    """A setting with duration D, bound R and recent fraction m, at least 120 steps long."""
    steps = DURATIONS[D]
    if R:  # unless the Trainer never waits, it draws a batch's groups R times in `duration`
        steps = min(steps, math.ceil(steps * R / m / float(Fraction(D))))
    flags = (("clock", D), ("max_replays", R), ("recent_probability", m))
    experiment = "half replayed" if m == 0.5 else "replays"
    return Setting(experiment, "tb", steps=max(120, steps), flags=flags)


def seeds_of(setting: Setting) -> Sequence[int]:
    """The reported seeds of a setting."""
    return TEN_SEEDS if setting.experiment in HAVE_TEN_SEEDS else SEEDS


def arguments_of(
    setting: Setting, rate: float, seed: int, clip: float, files: Path, out: Path
) -> list:
    """The command line of a run."""
    beta = BETA[setting.task] * setting.price
    flags: dict[str, object] = OBJECTIVES[setting.objective] | {
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
    if special.pop("clock", ""):
        flags |= {"synchronous": False, "initial_trajectories": 128, "searched_per_prompt": 16}
        flags["sync_every"] = 2
    if special.pop("lr_schedule", ""):  # rows have it by its former flags
        stable = special.pop("stable_steps")
        end = stable + special.pop("decay_steps")
        special["learning_rate"] = f"{rate}@0,{rate}@{stable},0~{end}"
    flags |= special
    if setting.objective == "grpo":
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
        self.keys = [Setting(**tuples(row)).key() for row in self.rows]
        self.under_way: set[tuple] = set()

    def of(self, setting: Setting, role: str) -> list[dict]:
        wanted = setting.key()
        keys = zip(self.rows, self.keys, strict=True)
        return [row for row, key in keys if row["role"] == role and key == wanted]

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
        rate, to_try = self.best_rate(chooser)
        runs = [(chooser, "choose", r, seed) for r in to_try for seed in SEEDS_TO_CHOOSE]
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

        For each experiment and task, rates are chosen first, and each seed is run for all settings
        before the next one, so that incomplete results are still balanced.
        """
        for _, block in itertools.groupby(settings, attrgetter("experiment", "task", "steps")):
            jobs = [run for setting in block for run in self.missing(setting)]
            jobs = [run for run in jobs if run not in self.under_way]
            if jobs:
                run = min(jobs, key=lambda run: (run[1] == "report") * run[3])
                self.under_way.add(run)
                return run
        return None

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.keys.append(Setting(**tuples(row)).key())
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
        row["recent"] = round(float(np.mean([m["recent_fraction"] for m in metrics])), 3)
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
    """Run what is missing, `workers` at a time, until all is done or time is up."""
    rows.check(settings, files)
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
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                job = under_way.pop(future)
                rows.under_way.remove(job)
                row = future.result()
                rows.add(row)
                setting, role, rate, seed = job
                text = f"{area(row):.3f}{' collapsed' if collapsed(row) else ''}"
                what = f"{setting.experiment}: {setting.objective}, lag {setting.lag}, "
                what += "".join(f"{name} {value}, " for name, value in setting.flags)
                what += f"{role} {rate:g}"
                print(f"{what}, seed {seed}: {text} ({row['seconds']} s)", flush=True)


# ------------------------------------------------------------------------------------- the report

GREY = "0.75"
COLOURS = {"tb": "C0", "proximal_rloo": "C1", "dr_grpo": "C2", "rloo": "C3"}  # the rest are grey
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


def shown(values: Iterable[float | None], digits: int = 2) -> str:
    """The mean and standard deviation of the values that are not None."""
    found = [value for value in values if value is not None]
    if not found:
        return NOT_YET
    spread = f" ± {np.std(found, ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{np.mean(found):.{digits}f}{spread}"


def share_collapsed(rows: list[dict]) -> str:
    """How many runs collapsed."""
    return f"{sum(map(collapsed, rows))} of {len(rows)}"


def areas(rows: list[dict]) -> str:
    """The frontier's area over seeds, and how many of them collapsed."""
    lost = f" ({share_collapsed(rows)})" if any(map(collapsed, rows)) else ""
    return shown(map(area, rows)) + lost


def name_of(setting: Setting) -> str:
    """An objective's name in the tables."""
    return f"`{setting.objective}`"


def at_equal_reward(row: dict, name: str) -> float | None:
    """A metric at the point where the reward first passes EQUAL_REWARD, interpolated."""
    reward = EQUAL_REWARD[row["task"]]
    for before, after in itertools.pairwise(path_of(row)):
        if before["reward"] < reward <= after["reward"]:
            way = (reward - before["reward"]) / (after["reward"] - before["reward"])
            return before[name] + way * (after[name] - before[name])
    return None


def reached(rows: list[dict]) -> str:
    """How many runs reached EQUAL_REWARD before collapsing."""
    return f"{sum(at_equal_reward(row, 'step') is not None for row in rows)} of {len(rows)}"


# half-width of Student's t 95 % interval in standard errors, by degrees of freedom
STUDENT_T = {2: 4.30, 9: 2.26}


def paired(found: list[dict], others: list[dict]) -> str:
    """The mean difference in gain over the seeds that both have, with its 95 % interval."""
    by_seed = {row["seed"]: area(row) for row in others}
    gaps = [area(row) - by_seed[row["seed"]] for row in found if row["seed"] in by_seed]
    if len(gaps) - 1 not in STUDENT_T:
        return NOT_YET
    half = STUDENT_T[len(gaps) - 1] * np.std(gaps, ddof=1) / math.sqrt(len(gaps))
    mean = np.mean(gaps)
    text = f"{mean:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(mean) > half else text


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
        largest = [max(point["kl"] for point in row["path"]) for row in found]
        end = [row["path"][-1]["reward"] for row in found]
        cells = [shown([of_row[budget] for of_row in best]) for budget in BUDGETS]
        line = [name_of(setting), str(setting.lag), f"{found[0]['rate']:g}", areas(found), *cells]
        lines.append([*line, shown(largest, 0), shown(end)])
    head = ["objective", "lag", "rate", "gain", *(f"≤ {b:g} nats" for b in BUDGETS)]
    head += ["largest KL", "at the end"]
    return table(head, lines)


def diversity(rows: Rows, settings: list[Setting]) -> str:
    """Step, KL and diversity of the responses where the reward first passes EQUAL_REWARD."""
    lines = []
    for setting in settings:
        found = rows.of(setting, "report")
        if not found:
            continue
        values = {name: [at_equal_reward(row, name) for row in found] for name in POINT}
        there = sum(value is not None for value in values["kl"])
        line = [name_of(setting), str(setting.lag), f"{there} of {len(found)}"]
        line += [shown(values["step"], 0), shown(values["kl"], 1)]
        line += [shown(values[name]) for name in ("distinct", "word_entropy", "best")]
        lines.append([cell.replace(NOT_YET, "never") for cell in line])
    distinct = "cosine distance" if settings[0].task == "attacks" else "distinct"
    head = ["objective", "lag", "seeds", "step", "KL", distinct, "entropy of words", "best of 4"]
    return table(head, lines)


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
            mean = float(np.mean(seconds)) if found and not missed else math.nan
            if "lag" in flags:
                lockstep[flags["slow"], flags["lag"], target] = mean
            for lag in (0, 1):
                slower = lockstep.get((flags["slow"], lag, target), math.nan)
                line.append("" if math.isnan(slower / mean) else f"{slower / mean:.1f}")
        lines.append(line)
    head = ["seconds slept in a decode step, an optimizer step", "mode", "seconds a step"]
    for target in TARGETS:
        head += [f"seconds to {target:g}", "times as fast as lag 0", "as lag 1"]
    return table(head, lines)


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


def at_equal(found: list[dict], name: str, limit: float) -> tuple[str, str, str, str]:
    """The step, gain, last reward and largest KL of runs at a step, time or number of groups."""
    parts = [up_to(row, name, limit) for row in found]
    last = [part["path"][-1] for part in parts]
    largest = [max(point["kl"] for point in part["path"]) for part in parts]
    step = shown([np.mean([point["step"] for point in last])] if last else [], 0)
    return step, areas(parts), shown(point["reward"] for point in last), shown(largest, 0)


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
            waited = shown([100 * np.mean([row["waited"] for row in found])] if found else [], 0)
            R = dict(setting.flags)["max_replays"] or "none"
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
        by_bound.setdefault(dict(setting.flags)["max_replays"], []).append(setting)
    lines = []
    for R, own in by_bound.items():
        cells = [at_equal(rows.of(s, "report"), "groups", groups) for s in own]
        line = [f"{gain}; step {step}" for step, gain, *_ in cells]
        lines.append([str(R or "none"), *line])
    durations = [dict(setting.flags)["clock"] for setting in own]
    return table(["R", *(f"batch {duration}" for duration in durations)], lines)


def validated(rows: Rows) -> str:
    """Runs with sleeping processes next to runs on the simulated clock."""
    names = ("arrived_reward", "staleness", "recent", "recent_replay_ratio", "buffer")
    lines = []
    for pair in zip(validation("slow"), validation("clock"), strict=True):
        for way, setting in zip(("processes", "simulated"), pair, strict=True):
            found = rows.of(setting, "report")
            end = [row["path"][-1] for row in found if not collapsed(row)]
            line = [str(dict(pair[1].flags)["num_searchers"]), way, share_collapsed(found)]
            line += [shown(point[name] for point in end) for name in ("reward", "kl")]
            for name in names:
                digits = 0 if name == "buffer" else 2
                line.append(shown((row[name] for row in found if not collapsed(row)), digits))
            lines.append(line)
    head = ["M", "", "collapsed", "held-out reward", "KL", "reward of arrivals", "staleness"]
    return table([*head, "recent_fraction", "replay ratio", "buffer"], lines)


def more_searchers(rows: Rows, block: dict[tuple[str, int], Setting]) -> str:
    """The gain with M Searchers at equal steps and at equal numbers of groups."""
    lines = []
    for (_, M), setting in block.items():
        found = rows.of(setting, "report")
        rate = f"{found[0]['rate']:g}" if found else NOT_YET
        end = [row["path"][-1] for row in found]
        one = rows.of(next(iter(block.values())), "report")
        gain, *rest = at_equal(found, "step", setting.steps)[1:]
        line = [str(M), str(len(found)), rate, gain, paired(found, one) if M > 1 else "", *rest]
        line += [shown(point["distinct"] for point in end)]
        for groups in SEARCH_GROUPS:
            # from the first evaluation after the untrained one, to the last
            enough = [row for row in found if row["groups"][1] <= groups <= row["groups"][-1]]
            gain = at_equal(enough, "groups", groups)[1] if enough else ""
            line.append(gain)
        steps = sorted(at_equal_reward(row, "step") or math.inf for row in found)
        line.append(", ".join("never" if math.isinf(step) else f"{step:.0f}" for step in steps))
        line.append(shown((row["staleness"] for row in found), 1))
        lines.append([*line, shown((row["replay_ratio"] for row in found), 1)])
    distinct = "cosine distance" if setting.task == "attacks" else "distinct"
    head = [f"{setting.task}: M", "seeds", "rate", f"step {setting.steps}: gain"]
    head += ["over M = 1", "reward", "largest KL"]
    head += [distinct, *(f"gain at {groups} groups" for groups in SEARCH_GROUPS)]
    head.append(f"steps to {EQUAL_REWARD[setting.task]}")
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


def gains_by_searchers(rows: Rows, block: dict[tuple[str, int], Setting], what: str) -> str:
    """The gain for each line and M, and its increase with M, paired by seed."""
    numbers = sorted({M for _, M in block})
    lines = []
    for name in dict.fromkeys(line for line, _ in block):
        found = {M: rows.of(block[name, M], "report") for M in numbers if (name, M) in block}
        line = [name, *(areas(found[M]) if M in found else "" for M in numbers)]
        one = found[numbers[0]]
        line += [paired(found[M], one) if M in found else "" for M in numbers[1:]]
        line.append("; ".join(f"{own[0]['rate']:g}" for own in found.values() if own))
        line.append("; ".join(reached(own) for own in found.values() if own))
        waited = [[row["waited"] for row in own] for own in found.values() if own]
        lines.append([*line, "; ".join(f"{100 * np.mean(own):.0f} %" for own in waited)])
    head = [what, *(f"M = {M}" for M in numbers), *(f"{M} over {numbers[0]}" for M in numbers[1:])]
    head += ["rates", f"reach {EQUAL_REWARD[next(iter(block.values())).task]}", "waited"]
    return table(head, lines)


def report(rows: Rows) -> None:
    """Write every table and figure of docs/results.md."""
    settings = settings_of()

    def of(*experiments: str) -> list[Setting]:
        return [s for s in settings if s.experiment in experiments]

    def reported(setting: Setting) -> str:
        return areas(rows.of(setting, "report"))

    def stable_rate(setting: Setting) -> str:
        """The highest rate up to which no choosing seed collapsed."""
        stable = NOT_YET
        for rate in HALF_DECADES:
            tried = [row for row in rows.of(setting, "choose") if row["rate"] == rate]
            if any(map(collapsed, tried)):
                return f"< {rate:g}" if stable == NOT_YET else stable
            if tried:
                stable = f"{rate:g}"
        return f"≥ {stable}"

    def of_all(objective: str, rate: float, lag: int) -> str:
        """How many runs of the first task collapsed at a rate, regardless of their role."""
        found = []
        for setting in (s for s in [*stale, *of("far", "collapses")] if s.lag == lag):
            own = [*rows.of(setting, "choose"), *rows.of(setting, "report")]
            found += [row for row in own if setting.objective == objective and row["rate"] == rate]
        return share_collapsed(found) if found else ""

    def over_tb(setting: Setting) -> str:
        """The paired difference to `tb` at the same lag."""
        tb = rows.of(replace(setting, objective="tb"), "report")
        return paired(rows.of(setting, "report"), tb)

    def at_the_end(setting: Setting) -> str:
        return shown(row["path"][-1]["reward"] for row in rows.of(setting, "report"))

    def collapsed_as_0(found: list[dict]) -> str:
        return f"{score(found):.2f}" if found else NOT_YET

    usual = [s for s in of("staleness") if s.lag == 0]
    stale = sorted(of("staleness"), key=lambda s: s.lag)
    others = [s for s in [*stale, *of("far")] if s.objective != "tb"]
    lags = sorted({s.lag for s in [*stale, *of("far")]})
    names = ("tb", "tba_prime", "ftb forward_kl", "proximal_rloo", "rloo")
    pooled = []
    for name, rate in itertools.product(names, FIRST_RATES):
        pooled.append([f"`{name}`", f"{rate:g}", *(of_all(name, rate, lag) for lag in lags)])
    choosing = []
    reported_runs = []
    for setting in settings:
        found = rows.of(setting, "report")
        if (
            setting.experiment in AT_THE_RATE_ON_POLICY
            or not found
            or "clock" in dict(setting.flags)
        ):
            continue
        reported_runs += found
        choosing += [r for r in rows.of(setting, "choose") if r["rate"] == found[0]["rate"]]
    of_roles = []
    for role, found in (("choose a rate", choosing), ("are reported", reported_runs)):
        gain = shown(map(area, found)).split(" ")[0]
        line = [f"seeds that {role}", share_collapsed(found), gain, collapsed_as_0(found)]
        of_roles.append(line)
    experiments = {setting.experiment for setting in settings}
    reports = [row for row in rows.rows if row["role"] == "report"]
    done = sum(row["experiment"] in experiments for row in reports)
    wanted = sum(len(seeds_of(setting)) for setting in settings)
    per_lag = []
    for setting in of("collapses", "longer"):
        found = rows.of(setting, "report")
        of_run = [name_of(setting), str(setting.steps), str(setting.lag)]
        per_lag.append([*of_run, share_collapsed(found), shown(map(area, found))])
    parts = {
        "count": f"{done} of {wanted} reported runs are there; {len(rows.rows)} rows in all.\n",
        "staleness": grid(stale, "lag", reported),
        "paired": grid(others, "lag", over_tb),
        "collapsed as 0": grid(
            stale, "lag", lambda setting: collapsed_as_0(rows.of(setting, "report"))
        ),
        "choices": table(["", "collapsed", "gain", "gain, collapsed as 0"], of_roles),
        "stable rates": grid([*stale, *of("far")], "lag", stable_rate),
        "pooled": table(["objective", "rate", *(f"lag {lag}" for lag in lags)], pooled),
        "far": budgets(rows, of("far")),
        "collapses": table(["objective", "steps", "lag", "collapsed", "gain"], per_lag),
        "budgets": budgets(rows, stale),
        "diversity": diversity(rows, stale),
        "second model": grid(of("second model"), "lag", reported),
        "second model, at the end": grid(of("second model"), "lag", at_the_end),
        "second model, diversity": diversity(rows, of("second model")),
        "speed": speed(rows, of("speed")),
        "prices": grid(
            [*of("prices"), *(s for s in usual if s.objective != "dr_grpo")], "price", reported
        ),
    }
    parts["replays"] = bounds(rows, of("replays"))
    parts["replays, groups"] = by_groups(rows, of("replays"), GROUPS)
    parts["half replayed"] = bounds(rows, of("half replayed"))
    parts["validation"] = validated(rows)
    blocks = search_settings()
    for name, block in blocks.items():
        measured = any(rows.of(setting, "report") for setting in block.values())
        as_table = partial(gains_by_searchers, what=name)
        if (name, 1) in block:
            as_table = more_searchers
        parts[f"searchers, {name}"] = as_table(rows, block) if measured else ""
    parts["searchers, successes only"] = successes_only(rows, {
        "by reward, M = 64": blocks["rarer, longer"]["tb, 240 steps", 64],
        "mixed, M = 64": blocks["mixed"]["rarer, 240 steps", 64],
    })  # fmt: skip
    for task in ("summaries", "attacks"):
        own = [s for s in of("frontiers") if s.task == task]
        parts[task] = budgets(rows, own)
        parts[f"{task}, diversity"] = diversity(rows, own)
    draw(rows, ROOT / "bench" / "staleness.png")
    if parts["searchers, attacks"]:
        draw_search(rows, ROOT / "bench" / "search.png")
    write_parts(parts)


def write_parts(parts: dict[str, str]) -> None:
    """Put each part into docs/results.md, between its markers."""
    path = ROOT / "docs" / "results.md"
    text = path.read_text()
    for name, part in parts.items():
        begin = f"<!-- {name} -->"
        before, mark, after = text.partition(begin)
        if not mark:
            sys.exit(f"{path} has no {begin}")
        text = f"{before}{begin}\n{part}<!-- end -->{after.partition('<!-- end -->')[2]}"
    path.write_text(text)


def spread(x: Sequence[float], values: list[list[float]]) -> tuple:
    """Means over seeds with bars from minimum to maximum, as arguments of `errorbar`."""
    mean = np.array([np.mean(own) for own in values])
    return x, mean, (mean - [min(own) for own in values], [max(own) for own in values] - mean)


def draw(rows: Rows, out: Path) -> None:
    """Three panels: decoupling, stale data, more Searchers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    speed, stale, more = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    settings = settings_of()

    names = {"lag": "lockstep,\nlag {}", "asynchronous": "asynchronous,\nM = {}"}
    own = [s for s in settings if s.experiment == "speed" and dict(s.flags)["slow"] == SLOW[1]]
    for place, setting in enumerate(reversed(own)):
        way, number = setting.flags[-1]
        seconds = [row[f"reached {TARGETS[0]}"] for row in rows.of(setting, "report")]
        if seconds and None not in seconds:
            speed.barh(place, np.mean(seconds), color=MAIN if way != "lag" else GREY)
    ways = [setting.flags[-1] for setting in reversed(own)]
    speed.set_yticks(range(len(ways)), [names[way].format(number) for way, number in ways])
    speed.set_title("1  Decoupling saves time")
    speed.set_xlabel(f"seconds to a reward of {TARGETS[0]:g}")

    settings = [s for s in settings if s.experiment == "staleness"]
    lags = sorted({s.lag for s in settings})
    for name in sorted(OBJECTIVES, key=lambda name: name in COLOURS):
        found = [s for s in settings if s.objective == name and rows.of(s, "report")]
        found.sort(key=attrgetter("lag"))
        gains = [list(map(area, rows.of(s, "report"))) for s in found]
        shift = list(COLOURS).index(name) * 0.04 if name in COLOURS else 0
        x, mean, bars = spread([lags.index(s.lag) + shift for s in found], gains)
        if name in COLOURS:
            stale.errorbar(x, mean, bars, fmt="o-", label=name, color=COLOURS[name], **LINE)
        else:
            stale.plot(x, mean, color=GREY, linewidth=1, zorder=0)
    stale.set_xticks(range(len(lags)), map(str, lags))
    stale.set_xlabel("lag of the data in optimizer steps")
    stale.set_ylabel("gain in reward")
    stale.set_ylim(0, 0.38)
    stale.set_title("2  Learning from stale data")
    stale.legend(frameon=False, loc="lower left", labelspacing=0.2)

    blocks = search_settings()
    ten = blocks["ten seeds"]
    lines = {LABELS["rare"]: {M: rows.of(ten["tb", M], "report") for M in SEARCHERS}}
    rarer = {
        "": (blocks["rarer, longer"], "tb, 240 steps"),
        ", mixed": (blocks["mixed, lower rates"], "rarer, 240 steps, 3e-4"),
    }
    for label, (block, line) in rarer.items():
        lines[LABELS["rarer"] + label] = {
            M: rows.of(block[line, M], "report") for M in SEARCHERS if (line, M) in block
        }
    draw_gains(more, lines)
    more.set_title("3  More search, rare rewards")
    more.set_ylim(0, 0.98)  # room for the legend
    more.legend(frameon=False, loc="upper left", labelspacing=0.2)
    for axes in (speed, stale, more):
        tidy(axes)
    figure.savefig(out, dpi=110)


def all_seeds(rows: Rows, setting: Setting) -> list[dict]:
    """The reported runs of a setting, and those with the ten further seeds."""
    more = replace(setting, experiment="search, ten seeds")
    return [*rows.of(setting, "report"), *rows.of(more, "report")]


def draw_gains(axes, lines: dict[str, dict[int, list[dict]]]) -> None:
    """The gain over M at equal steps: a line per label, from the runs for each M."""
    for i, (label, found) in enumerate(lines.items()):
        gains = {M: list(map(area, own)) for M, own in found.items() if own}
        if gains:
            x, mean, bars = spread([1.05**i * M for M in gains], list(gains.values()))
            axes.errorbar(x, mean, bars, fmt="o-", color=f"C{i}", label=label, **LINE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SEARCHERS, map(str, SEARCHERS))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Searchers, at equal steps")
    axes.set_ylabel("gain in reward")


def draw_search(rows: Rows, out: Path) -> None:
    """Two panels: the gain over M for every task, and success and diversity of attacks by M."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = {
        label: {M: all_seeds(rows, search(M=M, task=task)) for M in SEARCHERS}
        for task, label in LABELS.items()
    }
    draw_gains(left, lines)
    left.set_ylim(0, 0.98)
    left.legend(frameon=False, loc="upper left", ncols=2, labelspacing=0.2)
    for i, M in enumerate(SEARCHERS):
        found = all_seeds(rows, search(M=M, task="attacks"))
        if not found:
            continue
        distances = [row["path"][-1]["distinct"] for row in found]
        successes = [row["path"][-1]["reward"] for row in found]
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
    parser.add_argument("what", nargs="?", choices=("run", "report"), default="run")
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
    if args.quick:
        firsts = {s.experiment: replace(s, steps=6, lag=min(s.lag, 2)) for s in reversed(settings)}
        for setting in firsts.values():
            row = run(setting, "choose", 1e-3, 1, 1.0, args.files)
            print(f"{setting.experiment}: area {area(row):.3f} in {row['seconds']} s", flush=True)
    elif args.what == "run":
        run_all(rows, settings, args.files, args.minutes, args.workers)
    else:
        rows.check(settings, args.files)
        report(rows)


if __name__ == "__main__":
    main()
