"""A comparison of RL objectives, replay and search on tasks that run on two CPU cores.

    python bench/claims.py run              # every missing run; takes hours; can be interrupted
    python bench/claims.py run --only staleness --minutes 60
    python bench/claims.py report           # fills docs/results.md; --all prints every table
    python bench/claims.py run --quick      # smoke test: short runs, not recorded

A row of bench/results/claims.jsonl is one run of tba.py, with its settings, seed, commit, the hash
of the pretrained model, and its path: reward, KL and diversity of held-out answers every 10 steps.

The protocol, with its numbered points, is in protocols.md.
"""

import heapq
import itertools
import math
import pickle
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import common  # beside this file; it finds tba.py
import matplotlib
import numpy as np
from common import Choice, Measured, Setting, SmallLlama, area, collapsed, finals, last, shown
from matplotlib.figure import Figure

import tba

# ------------------------------------------------------------------------------------ the tasks

LEXICON = {  # the valence of adjectives, verbs and adverbs; nouns have none
    "superb": 1.0, "lovely": 0.8, "bright": 0.6, "good": 0.5, "fresh": 0.3, "old": 0.0,
    "red": 0.0, "small": 0.0, "long": 0.0, "plain": -0.2, "dull": -0.4, "bad": -0.6,
    "ugly": -0.8, "awful": -1.0, "charms": 0.8, "helps": 0.5, "meets": 0.0, "follows": 0.0,
    "holds": 0.0, "bores": -0.5, "hurts": -0.8, "gladly": 0.6, "gently": 0.4, "often": 0.0,
    "now": 0.0, "rarely": -0.2, "sadly": -0.6,
}  # fmt: skip


def valence(text: str) -> float:
    """The mean valence of a text's words, in [-1, 1]; 0 for an empty text."""
    words = text.replace(".", " ").split()
    return sum(LEXICON.get(word, 0.0) for word in words) / max(1, len(words))


class Valence(Measured):
    """Continue a review as positively as possible."""

    columns = ("text",)
    template = "{text}"

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, [valence(response) for response in responses], -1.0)


class Rare(Valence):
    """1 for a review whose mean valence reaches a threshold that few do; few training prompts."""

    threshold = 0.32

    def examples(self) -> tuple[list[dict], list[dict]]:
        train, held_out = super().examples()
        return train[:16], held_out

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return 1.0 * (super().rewards(examples, responses, ended) >= self.threshold)


class Rarer(Rare):
    """Ten times rarer."""

    threshold = 0.39


tba.TASKS |= {"valence": Valence, "rare": Rare, "rarer": Rarer}


class Slow(SmallLlama):
    """Each decode step takes `seconds`, or longer if the machine cannot keep up."""

    seconds = 0.0

    def step(self, between_steps=lambda: None):
        ends = itertools.count(time.monotonic() + self.seconds, self.seconds)

        def slowly() -> None:
            time.sleep(max(0, next(ends) - time.monotonic()))
            between_steps()

        return super().step(slowly)


def sleep_for_gpus(decode_seconds: float, step_seconds: float) -> None:
    """Have decode steps and optimizer steps sleep in place of GPU work."""
    Slow.seconds = decode_seconds
    tba.ENGINES["slow"] = Slow
    learn = tba.Learner.step

    def learn_slowly(learner, *args):
        end = time.monotonic() + step_seconds
        metrics = learn(learner, *args)
        time.sleep(max(0, end - time.monotonic()))
        return metrics

    tba.Learner.step = learn_slowly
    train_step = tba.Trainer.train_step

    def count_groups(trainer, minibatch):
        searchers = trainer.searchers
        groups = searchers.first_missing + len(searchers.arrived_positions)
        trainer.folder.append("groups.jsonl", {"groups": groups})
        train_step(trainer, minibatch)

    tba.Trainer.train_step = count_groups


class Mixed(tba.RecentOrReward):
    """Half of a replayed group is drawn by reward and half uniformly; cf. `anchored`."""

    def replay(self, count: int, K: int, used: set[int]) -> list[list[tba.Trajectory]]:
        groups = super().replay(count, K // 2, used)
        for group in groups:
            stored = list(self.buffer.trajectories[group[0].prompt_id].values())
            chosen = self.buffer.rng.choice(len(stored), K - len(group))
            group += [stored[i] for i in chosen]
        return groups


tba.REPLAY_RULES["mixed"] = Mixed

# TB's squares with truncated ratios as weights, and a rule that keeps failures in replayed groups
plugins = (common.ROOT / "docs" / "hacking.md").read_text()
for name in ("--objective tb_weighted", "--replay_rule anchored"):
    exec(plugins.partition(name)[2].partition("\n")[2].partition("```")[0])

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
            "spec": spec, "index": spec.first, "in_flight": {},
            "scoring": tba.Scoring(config, task, others[0].wake_up),
        }  # fmt: skip


engine_probes = tba.engine_probes


def engine_probes_once(searcher: SimulatedSearcher) -> list[np.ndarray]:
    """The engine's scores of the probes, computed once for all Searchers."""
    if searcher.version not in searcher.probe_scores:
        searcher.probe_scores.clear()
        searcher.probe_scores[searcher.version] = engine_probes(searcher)
    return searcher.probe_scores[searcher.version]


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
        self.receiving: Future = Future()  # no thread receives messages

    def start(self) -> None:
        """Load the Searchers."""
        self.channel = tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30))
        self.manager = SimpleNamespace(Barrier=lambda members: None)
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
                    searcher.search_end = message.position
        self.advance(self.now)
        for i, searcher in enumerate(self.loaded):
            searcher.between_steps()
            self.collect(searcher)
            if i not in self.busy:
                self.begin(i)

    def send(self, s: tba.RunningSearcher, message: object) -> None:
        s.spec.commands.put(message)

    def collect(self, searcher: tba.Searcher) -> list[tuple[int, tba.Group]]:
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
        tba.receive_weights(searcher, message)
        searcher.between_steps()
        self.generate(searcher)
        self.collect(searcher)

    def generate(self, searcher: tba.Searcher) -> None:
        """Run a Searcher's engine until no request is unfinished."""
        while searcher.engine.unfinished:
            searcher.handle_completions(searcher.engine.step())
            searcher.between_steps()

    def begin(self, i: int) -> None:
        """Start a Searcher's next batch if it is allowed to."""
        searcher = self.loaded[i]
        searcher.submit_prompts()
        self.generate(searcher)
        if batch := self.collect(searcher):
            self.busy.add(i)
            self.schedule(self.duration, i, partial(self.arrive, i, batch))

    def arrive(self, i: int, batch: list[tuple[int, tba.Group]]) -> None:
        """Deliver a batch of groups."""
        self.busy.remove(i)
        for arrival in batch:
            self.arrivals.put(arrival)

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
    """

    clock = "1"  # "DURATION" or "DURATION LATENCY"

    def __init__(self, config, task, folder, ranks, checkpoint) -> None:
        super().__init__(config, task, folder, ranks, checkpoint)
        duration, latency = [*map(Fraction, self.clock.split()), Fraction(0)][:2]
        searchers = SimulatedSearchers(duration, latency, config, task, folder)
        self.searchers = self.register(searchers)

    def run(self) -> None:
        def broadcast(channel: tba.WeightChannel, weights: tba.FlatWeights, _: None) -> None:
            weights.flat.copy_(self.sync.learner.snapshot.flat)  # a no-op on the Trainer's own call

        with (
            mock.patch.object(tba.WeightChannel, "broadcast", broadcast),
            mock.patch.object(tba, "engine_probes", engine_probes_once),
        ):
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
                searchers.advance(searchers.events[0][0])
            self.poll()
        return found

    def train_step(self, minibatch: tba.Minibatch) -> None:
        super().train_step(minibatch)
        self.searchers.advance(self.searchers.now + 1)


# -------------------------------------------------------------------------------- the experiments

MODELS = common.ROOT / "bench" / "models"  # with prompts
reviews = {
    "model": MODELS / "valence" / "model", "dataset": MODELS / "valence" / "data",
    "plugin": __file__, "engine": "small", "max_response_tokens": 64,
}  # fmt: skip
common.BETA |= {"valence": 0.02, "rare": 0.1, "rarer": 0.1}
common.PILOT_STEPS |= {"rare": 60, "rarer": 60}
common.OWN_FLAGS |= {"valence": reviews, "rare": reviews, "rarer": reviews}
AS_PUBLISHED = (
    "tb", "tba_prime", "proximal_rloo", "oapl", "ftb forward_kl", "ftb hellinger", "rloo",
    "grpo",  # with the published KL coefficient
    "dr_grpo",  # without a KL term
    "online_dpo",
)  # fmt: skip
CAPPED = (
    "proximal_rloo truncate", "proximal_rloo mask", "dr_grpo truncate", "dr_grpo mask",
    "tb truncate",
)  # fmt: skip
SEEDS = (1, 2, 3)
FIVE_SEEDS = range(31, 36)
TEN_SEEDS = range(11, 21)
NEWER_SEEDS = range(21, 31)
SEEDS_TO_CHOOSE = (101, 102)
FIRST_RATES = (3e-4, 1e-3, 3e-3)
# seconds that a decode step and an optimizer step sleep in place of GPU work, and how long a batch
# then takes to generate, compared with a step; which is closest to a GPU is an assumption
SLOW = {"0.004 0.25": "half as long", "0.011 0.25": "as long", "0.053 0.25": "three times as long"}
TARGETS = (0.2, 0.3)  # mean rewards over five steps; time to reach them is reported
SEARCHERS = (1, 2, 4, 8, 16, 64)
SEARCH_CLOCK = "8 1/4"  # how long a batch takes, and weights, in optimizer steps
LOCKSTEP = (("clock", "1"), ("lockstep", True))  # on the simulated clock
# the untrained policy's success rate in the sparse tasks
UNTRAINED = {"rare": 1 / 183, "rarer": 1 / 1820}
LABELS = {"rare": "1 in 183", "rarer": "1 in 1,820"}


def settings_of() -> list[Setting]:
    """All settings, in the order in which they are run."""
    found = []
    for lag in (0, 10, 40, 2):
        found += [Setting("staleness", name, lag) for name in AS_PUBLISHED]
    for lag in (0, 10, 40):
        found += [Setting("staleness", name, lag, flags=LOCKSTEP) for name in CAPPED]
    for own in (speed_settings(), search_settings(), rule_settings(), collapse_settings()):
        found += own.values()
    return found


def speed_settings() -> dict[tuple[str, str], Setting]:
    """The settings of the experiment "reuse" by (slow, mode); to be run with --workers 1."""
    modes: dict[str, tuple] = {}
    for lag, E in itertools.product((0, 1), (1, 4)):
        name = f"lockstep, lag {lag}, E = {E}"
        modes[name] = (("lag", lag), ("updates_per_batch", E))
    for R in (1, 4):
        sampled = ("searched_per_prompt", 16)  # as in lockstep
        modes[f"asynchronous, R = {R}"] = (sampled, ("asynchronous", 1), ("max_recent_draws", R))
    return {
        (slow, mode): Setting("reuse", "tb", flags=(("slow", slow), *flags))
        for slow, (mode, flags) in itertools.product(SLOW, modes.items())
    }


def search(
    experiment: str, M: int = 8, task: str = "rare", objective: str = "tb", steps: int = 120, **own
) -> Setting:
    """A setting with M Searchers on a sparse task."""
    flags = {"clock": SEARCH_CLOCK, "num_searchers": M, "recent_probability": 0.5}
    flags |= {"reward_inverse_temperature": 10, "kept_per_prompt": 100_000}
    return Setting(experiment, objective, 0, task, steps=steps, flags=tuple((flags | own).items()))


def search_settings() -> dict[tuple[str, str], Setting]:
    """The settings of the table "search" by (column, M)."""
    ten, few = "search, ten seeds", (1, 8, 64)
    found = {("1 in 183, `tb`", str(M)): search(ten, M) for M in SEARCHERS}
    found |= {("1 in 183, `dr_grpo`", str(M)): search(ten, M, objective="dr_grpo") for M in few}
    longer = partial(search, "search, longer", task="rarer", steps=240)
    return found | {("1 in 1,820, `tb`", str(M)): longer(M) for M in few}


def rule_settings() -> dict[tuple[str, str, int], Setting]:
    """The settings of the table "rules" by (way, task, M)."""
    ways: dict[str, dict] = {
        "anchored": {"replay_rule": "anchored"},
        "mixed": {"replay_rule": "mixed"},
        "softmax(10 r)": {},
        "softmax(10 r), m = 0.75": {"recent_probability": 0.75},
        "softmax(3 r)": {"reward_inverse_temperature": 3},
        "softmax(5 r)": {"reward_inverse_temperature": 5},
        "softmax(10 r), learned log Z": {"objective": "tb_learned_z"},
    }
    steps = {"rare": 120, "rarer": 240}
    return {
        (way, task, M): search("anchored", M, task, steps=steps[task], **ways[way])
        for way, task, M in itertools.product(ways, steps, (1, 8, 64))
        if M > 1 or way == "anchored"
    }


def collapse_settings() -> dict[tuple[str, str, int], Setting]:
    """The settings of the experiment "collapse", by (variant, objective, lag)."""
    half = (("lr_schedule", "warmup_stable_decay"), ("stable_steps", 125), ("decay_steps", 125))
    variants = {  # name -> price, steps, own flags
        "constant": (1.0, 250, ()),
        "decaying": (1.0, 250, half),
        "4 x beta": (4.0, 250, ()),
        "3e-4, 830 steps": (1.0, 830, (("learning_rate", 3e-4),)),
    }
    lags = (0, 10, 40)
    names = ("tb", "proximal_rloo", "dr_grpo")
    keys = list(itertools.product(("constant", "decaying", "4 x beta"), names, lags))
    keys += itertools.product(("constant",), ("tba_prime", "rloo", "grpo"), lags)
    keys += [("3e-4, 830 steps", "tb", 0), ("3e-4, 830 steps", "proximal_rloo", 0)]
    found = {}
    for variant, name, lag in keys:
        price, steps, own = variants[variant]
        flags = (*LOCKSTEP, *own)
        if name in ("dr_grpo", "grpo"):
            flags += (("kl_coefficient", common.BETA["valence"] * price),)
        setting = Setting("collapse", name, lag, price=price, steps=steps, flags=flags)
        found[variant, name, lag] = setting
    return found


class Rows(common.Rows):
    """The completed runs, with rates and seeds as in the protocol."""

    def seeds_of(self, setting: Setting) -> Sequence[int]:
        if setting.experiment in ("anchored", "collapse"):
            return NEWER_SEEDS
        if setting.experiment == "reuse":
            return FIVE_SEEDS
        return TEN_SEEDS if setting.experiment.startswith("search") else SEEDS

    def choice_of(self, setting: Setting) -> Choice:
        chooser = setting  # the setting whose rate is used
        match setting.experiment:
            case "collapse":
                return Choice((dict(setting.flags).get("learning_rate", 1e-3),))
            case "anchored":
                flags = dict(setting.flags) | {"num_searchers": 16}
                chooser = replace(setting, flags=tuple(flags.items()))
                return Choice((3e-4, 1e-3), ((chooser, 1), (chooser, 2)), score_at_the_end)
            case "reuse":
                chooser = Setting("staleness", setting.objective)
            case "search, longer":
                chooser = search("searchers")
            case "search, ten seeds":
                name = "searchers" if setting.objective == "tb" else "search, objectives"
                M = min(8, dict(setting.flags)["num_searchers"])
                chooser = search(name, M, objective=setting.objective)
        runs = tuple((chooser, seed) for seed in SEEDS_TO_CHOOSE)
        if chooser.task in UNTRAINED:
            return Choice(FIRST_RATES, runs, score, widened=(1e-4, 3e-2), margin=0.02)
        return Choice(FIRST_RATES, runs, score, widened=(0.0, 1.0))


def score(rows: list[dict]) -> float:
    """The mean gain, with 0 for a collapse (point 3)."""
    return float(np.mean([0.0 if collapsed(row) else area(row) for row in rows]))


def lost_at_any_time(row: dict) -> bool:
    """Whether a run collapsed in either way (point 18)."""
    fewest = min(point["distinct"] for point in row["path"])
    return collapsed(row) or fewest < common.FEW_DISTINCT


def score_at_the_end(rows: list[dict]) -> float:
    """The mean reward at the end, with 0 for a collapse of either kind (point 18)."""
    return float(np.mean([0.0 if lost_at_any_time(row) else last(row)["reward"] for row in rows]))


def run(setting: Setting, role: str, rate: float, seed: int, clip: float) -> dict:
    """Run tba.py once, with sleeps or on the simulated clock if the setting says so."""
    flags = dict(setting.flags)

    def prepare() -> None:
        if "slow" in flags:
            sleep_for_gpus(*map(float, flags["slow"].split()))
        if "clock" in flags:
            SimulatedTrainer.clock = flags["clock"]
            tba.Trainer = SimulatedTrainer

    also = columns_of_speed if setting.experiment == "reuse" else lambda out: {}
    return common.run(setting, role, rate, seed, clip, also, prepare)


def columns_of_speed(out: Path) -> dict:
    """The reward over seconds; where its mean over five steps first reaches each target.

    "reached 0.2": seconds, optimizer steps, and responses that have arrived.
    """
    metrics = tba.read_lines(out / "metrics.jsonl")
    groups = [line["groups"] for line in tba.read_lines(out / "groups.jsonl")]
    row: dict = {"curve": [[round(m["seconds"], 2), round(m["reward"], 4)] for m in metrics]}
    row["responses"] = 16 * groups[-1]
    for target in TARGETS:
        seconds = common.seconds_to(target, metrics)
        steps = [m["seconds"] for m in metrics].index(seconds) + 1 if seconds else None
        row[f"reached {target}"] = seconds and [round(seconds, 2), steps, 16 * groups[steps - 1]]
    return row


# ------------------------------------------------------------------------------------- the report


def best_success(p: float, beta: float) -> float:
    """The success rate of the optimal policy p(y) exp(r(y) / beta), if the reference has p."""
    odds = p * math.exp(1 / beta) / (1 - p)
    return odds / (1 + odds)


def first_step(row: dict, reward: float) -> float:
    """The step at which the reward first passes a value, interpolated; infinity if never."""
    for before, after in itertools.pairwise(common.path_of(row)):
        if before["reward"] < reward <= after["reward"]:
            way = (reward - before["reward"]) / (after["reward"] - before["reward"])
            return before["step"] + way * (after["step"] - before["step"])
    return math.inf


def tables_of(rows: Rows) -> dict[str, str]:
    """Every table by its title. Those that docs/results.md has markers for are written there."""

    def over_tb(found: list[dict]) -> str:
        """The paired difference to `tb` at the same lag."""
        of_tb = replace(common.setting_of(found[0]), objective="tb", flags=())
        return common.paired(found, rows.of(of_tb))

    stale = sorted(of("staleness"), key=attrgetter("lag"))
    by_lag = {(f"lag {s.lag}", f"`{s.objective}`"): s for s in stale}
    long_runs = {
        (f"{variant}, lag {lag}", f"`{name}`"): setting
        for (variant, name, lag), setting in collapse_settings().items()
    }
    rules = {
        (f"{LABELS[task]}, {M} Searchers", way): setting
        for (way, task, M), setting in rule_settings().items()
        if M > 1
    }
    by_objective = partial(common.grid, rows, corner="objective")
    return {
        "stale data": by_objective(by_lag, gain_and_objective),
        "stale data, paired difference in gain from tb": by_objective(by_lag, over_tb),
        "collapse": by_objective(long_runs, ends_of_long_runs),
        "speed": speed(rows),
        "search": common.grid(rows, search_settings(), ends_of_search, "Searchers"),
        "rules": common.grid(rows, rules, ends_of_search),
    }


def of(*experiments: str) -> list[Setting]:
    """The settings of experiments."""
    return [setting for setting in settings_of() if setting.experiment in experiments]


def gain_and_objective(found: list[dict]) -> str:
    """The gain, J at the last evaluation, and how many seeds are lost."""
    at_end = common.mean(common.objective_of(row, last(row)) for row in found)
    return f"{shown(map(area, found))}; {at_end}{common.note(found)}"


def ends_of_long_runs(found: list[dict]) -> str:
    """The primary outcomes of point 21: one response, broken; the median J."""
    ends = [common.objective_of(row, last(row)) for row in found]
    untrained = [common.objective_of(row, row["path"][0]) for row in found]
    broken = np.less(ends, untrained) | [bool(row["exit_code"]) for row in found]
    one = np.array([last(row)["distinct"] for row in found]) <= 0.03
    return f"{one.sum()}, {broken.sum()}; {np.median(ends):.2f}"


def speed(rows: Rows) -> str:
    """Seconds, steps and responses to each target, and collapses, by mode and duration."""
    head = [""]
    lines: dict[str, list[str]] = {}
    for label in SLOW.values():
        head += [f"{label}: to {target:g}" for target in TARGETS]
    for (_, mode), setting in speed_settings().items():
        line = lines.setdefault(mode, [mode])
        found = rows.of(setting)
        line += [way_to(target, found) for target in TARGETS]
        line[-1] += common.note(found)
    return common.table(head, lines.values())


def way_to(target: float, found: list[dict]) -> str:
    """Seconds, steps and responses to a reward, over the seeds that reach it."""
    reached = [row[f"reached {target}"] for row in found if row[f"reached {target}"]]
    seconds, steps, responses = zip(*reached, strict=True)
    never = f" ({len(found) - len(reached)} never)" * (len(reached) < len(found))
    return f"{np.mean(seconds):.1f}; {np.mean(steps):.0f}; {np.mean(responses):.0f}{never}"


def ends_of_search(found: list[dict]) -> str:
    """The mean reward at the end (median J), the median step to 0.5, and collapses."""
    J = np.median([common.objective_of(row, last(row)) for row in found])
    step = np.median([first_step(row, 0.5) for row in found])
    text = f"{common.mean(finals(found))} ({J:.2f})".replace("(-0.00)", "(0.00)")
    steps = "never" if math.isinf(step) else f"{step:.0f}"
    return f"{text}; {steps}; {sum(map(lost_at_any_time, found))}"


# --- the figures

LEGIBLE = {  # at half the size
    "axes.titlesize": 15, "axes.labelsize": 15, "legend.fontsize": 13, "xtick.labelsize": 13,
    "ytick.labelsize": 13, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
COLOURS = {  # the other objectives are grey
    "tb": "C0", "tb truncate": "C0", "proximal_rloo": "C1", "proximal_rloo truncate": "C1",
    "dr_grpo": "C2", "rloo": "C3",
}  # fmt: skip
# the lines of the right panel of staleness.png: label -> a line of the table "rules", colour
RULES = {
    "by reward": ("softmax(10 r)", "C4"), "mixed": ("mixed", "C5"),
    "anchored": ("anchored", "C9"), "learned log Z": ("softmax(10 r), learned log Z", "C8"),
}  # fmt: skip
CLIP = 60  # seconds shown in time_to_reward.png
MODES = {  # of time_to_reward.png: a mode -> label, colour
    "lockstep, lag 0, E = 1": ("lockstep", "0.45"),
    "lockstep, lag 1, E = 1": ("+ overlap (a lag of 1)", "C1"),
    "lockstep, lag 0, E = 4": ("+ reuse (4 steps per batch)", "C2"),
    "lockstep, lag 1, E = 4": ("+ both", "C3"),
    "asynchronous, R = 4": ("asynchronous", "C0"),
}


def draw_time_to_reward(rows: Rows, out: Path) -> None:
    """Seconds to a reward if generation takes three times as long as training.

    A dot per seed; bars are medians.
    """
    settings = speed_settings()
    slowest = [*SLOW][-1]
    target = TARGETS[-1]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    middle: list[float] = []
    for place, (mode, (_, colour)) in enumerate(MODES.items()):
        reached = [row[f"reached {target}"] for row in rows.of(settings[slowest, mode])]
        seconds = [found[0] for found in reached if found]
        middle.append(float(np.median(seconds)))
        axes.barh(place, middle[-1], color=colour, alpha=0.25, height=0.6)
        shown_seconds = [s for s in seconds if s < CLIP]
        axes.plot(shown_seconds, [place] * len(shown_seconds), "o", color=colour, markersize=7)
        late = [f" (one seed: {s:.0f})" for s in seconds if s >= CLIP]
        faster = f", {middle[0] / middle[-1]:.1f} times as fast" * (place > 0)
        text = f"{middle[-1]:.0f} s{faster}{''.join(late)}"
        axes.text(middle[0] + 6, place, text, va="center", fontsize=13)  # right of the dots
    axes.set_yticks(range(len(MODES)), [label for label, _ in MODES.values()], fontsize=14)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * CLIP)
    axes.set_xticks(range(0, CLIP, 10))
    axes.set_xlabel(
        f"seconds to a mean reward of {target:g} (bars: medians; dots: seeds)", loc="left"
    )
    title = "Overlap and batch reuse match asynchrony (simulated delays)"
    axes.set_title(title, fontsize=15, loc="left")
    figure.savefig(out, dpi=110)


def draw_stale_data(rows: Rows, axes) -> None:
    """The gain by the lag of the data; bars are from the lowest to the highest seed."""
    settings = sorted(of("staleness"), key=attrgetter("lag"))
    lags = sorted({s.lag for s in settings})
    grey = [name for name in AS_PUBLISHED + CAPPED if name not in COLOURS]
    for name in (*grey, *COLOURS):
        own = [s for s in settings if s.objective == name and rows.of(s)]
        gains = [list(map(area, rows.of(s))) for s in own]
        means = np.array([np.mean(values) for values in gains])
        x = np.array([lags.index(s.lag) for s in own])
        if name not in COLOURS:
            axes.plot(x, means, color="0.75", linewidth=1, zorder=0)
            continue
        bars = means - [min(v) for v in gains], [max(v) for v in gains] - means
        style = "o--" if name.endswith("truncate") else "o-"
        axes.errorbar(
            x + list(COLOURS).index(name) * 0.04, means, bars, fmt=style, label=name,
            color=COLOURS[name], capsize=3, markersize=6, linewidth=2,
        )  # fmt: skip
    axes.set_xticks(range(len(lags)), map(str, lags))
    axes.set_xlabel("lag of the data in optimizer steps")
    axes.set_ylabel("gain in reward")
    axes.set_ylim(0, 0.38)
    axes.set_title("1  Learning from stale data")
    axes.legend(frameon=False, loc="lower left", labelspacing=0.2, handlelength=3)


def draw_rules(rows: Rows, axes) -> None:
    """The reward at the end by the number of Searchers, on the task that is solved 1 in 1,820."""
    optimum = best_success(UNTRAINED["rarer"], common.BETA["rarer"])
    axes.axhline(optimum, color="0.4", linewidth=1.5, linestyle="--")
    axes.text(1, optimum + 0.015, f"optimum {optimum:.2f}", color="0.4", fontsize=13)
    settings = rule_settings()
    for i, (label, (way, colour)) in enumerate(RULES.items()):
        own = {M: rows.of(s) for (*key, M), s in settings.items() if key == [way, "rarer"]}
        x = [1.12 ** (i - 1) * M for M in own]
        for place, found in zip(x, own.values(), strict=True):
            axes.plot([place] * len(found), finals(found), ".", color=colour, alpha=0.5)
        means = [np.mean(finals(found)) for found in own.values()]
        axes.plot(x, means, "o-", color=colour, label=label, markersize=8, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SEARCHERS, map(str, SEARCHERS))
    axes.set_xlabel("Searchers, at equal steps")
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("reward at the end")
    axes.set_title("2  More search, rare rewards")
    axes.legend(frameon=False, loc="upper left", labelspacing=0.2, bbox_to_anchor=(0, 0.9))


def main() -> None:
    parser = common.parser_of(__doc__, "run", "report")
    parser.add_argument("--all", action="store_true", help="report: also print every table")
    parser.add_argument("--only", help="experiment to run: staleness, collapse, anchored, ...")
    parser.add_argument("--quick", action="store_true", help="six steps each, not recorded")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel runs")
    args = parser.parse_args()
    settings = [s for s in settings_of() if args.only in (None, s.experiment)]
    rows = Rows(common.ROOT / "bench" / "results" / "claims.jsonl")
    if args.quick:
        firsts = {s.experiment: replace(s, steps=6, lag=min(s.lag, 2)) for s in reversed(settings)}
        for setting in firsts.values():
            row = run(setting, "choose", 1e-3, 1, 1.0)
            print(f"{setting.experiment}: area {area(row):.3f} in {row['seconds']} s", flush=True)
    elif args.what == "run":
        common.run_all(rows, settings, run, args.minutes, args.workers)
    else:
        rows.check(settings)
        common.publish(tables_of(rows), args.all)
        matplotlib.rcParams |= LEGIBLE
        figure = Figure(figsize=(10.5, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_stale_data(rows, left)
        draw_rules(rows, right)
        figure.savefig(common.ROOT / "bench" / "staleness.png", dpi=110)
        draw_time_to_reward(rows, common.ROOT / "bench" / "time_to_reward.png")


if __name__ == "__main__":
    main()
