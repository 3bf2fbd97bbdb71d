"""How many Searchers do I need? A discrete-event model of a run, checked against real runs.

    python bench/scaling.py                # the check and the picture, ten minutes
    python bench/scaling.py --only picture --step 6 --decode 0.025 --length 2000 ...

The model follows tba.py: Searchers with sequence slots and groups in flight, scoring, the initial
fill, a Trainer that never waits for generation. At a sync the Trainer loses the time of a snapshot
and of the probes, the weights travel while both sides work, and each Searcher loads them between
two decode steps; a sync that is due while one is under way is begun when that is over. It takes
what a user can measure: seconds of an optimizer step, of a decode step, of scoring a trajectory, of
a sync's three parts, and response lengths. It predicts wall-clock, both busy fractions, how many
trajectories are searched for each one trained on, and how many syncs there are.

The check runs the tiny GSM8K with 1, 2 and 4 Searchers whose processes are slowed to known speeds,
so that two cores suffice, and compares. Constants are measured in the run with 1 Searcher.
"""

import argparse
import enum
import heapq
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Setting:
    """A run's flags and measured constants, in seconds; lengths (N,) are drawn from."""

    searchers: int
    lengths: np.ndarray
    step: float  # forward, backward, optimizer
    between: float = 0.0  # what the Trainer does besides, between two steps
    decode: float = 0.025  # a decode step of an engine with full slots
    score: float = 0.0  # a trajectory's reward and reference log-probability
    transfer: float = 0.1  # that the Trainer loses at a sync: snapshot and probes
    travel: float = 0.1  # from then on until the weights lie in a Searcher's staging buffer
    load: float = 0.1  # that a Searcher loses: it loads the weights and scores the probes
    steps: int = 200
    B: int = 7
    K: int = 20
    S: int = 24
    slots: int = 256
    lookahead: float = 4 / 3  # in flight over slots; 1 with --engine transformers
    whole_batches: bool = False  # a batch runs till its longest response ends (transformers)
    sync_every: int = 2
    initial: int = 500


class Doing(enum.Enum):
    """What a simulated Searcher does."""

    DECODING = 1
    SCORING = 2
    LOADING = 3


class SimulatedSearcher:
    """Groups in flight, slots, and the decode steps between one event and the next."""

    SCORED_AT_ONCE = 2  # groups, as in tba.Searcher

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self.setting = setting
        self.rng = rng
        self.running: list[tuple[int, int]] = []  # heap of (decode step of its end, group)
        self.waiting: list[tuple[int, int]] = []  # (length, group)
        self.left: dict[int, int] = {}  # group -> responses not ended
        self.count = itertools.count()
        self.decoded = 0  # decode steps so far
        self.doing = Doing.DECODING
        self.since = 0.0  # when the present activity began
        self.until = 0.0  # when it ends
        self.unscored = 0  # groups of which all responses have ended
        self.scoring = 0  # groups that are being scored
        self.finished: list[float] = []  # when each group was ready to be sent
        self.arrival = math.inf  # when weights that are on their way will have been received
        self.loads: list[tuple[float, float]] = []  # (begin, end) of loading weights

    def fill(self) -> None:
        """Start prompts, and put responses into free slots."""
        s = self.setting
        fresh = not s.whole_batches or not self.running
        while fresh and (not self.left or s.S * (len(self.left) + 1) <= s.slots * s.lookahead):
            group = next(self.count)
            self.left[group] = s.S
            drawn = self.rng.choice(s.lengths, s.S)
            self.waiting += [(int(length), group) for length in drawn]
        while self.waiting and len(self.running) < s.slots:
            length, group = self.waiting.pop(0)
            heapq.heappush(self.running, (self.decoded + length, group))

    def work_on(self, now: float) -> None:
        """Begin the next activity: load weights that were received, score, or decode."""
        s = self.setting
        self.since = now
        if self.arrival <= now:
            self.doing = Doing.LOADING
            self.arrival = math.inf
            self.until = now + s.load
            self.loads.append((now, self.until))
        elif self.unscored:
            self.doing = Doing.SCORING
            self.scoring = min(self.unscored, self.SCORED_AT_ONCE)
            self.unscored -= self.scoring
            self.until = now + self.scoring * s.S * s.score
        else:
            self.doing = Doing.DECODING
            self.fill()
            ends = max(self.running)[0] if s.whole_batches else self.running[0][0]
            self.until = now + (ends - self.decoded) * s.decode
            self.stop_for_weights()

    def stop_for_weights(self) -> None:
        """Let decoding end with the step in which weights arrive, if some do before."""
        if self.doing is Doing.DECODING and self.arrival < self.until:
            decode = self.setting.decode
            steps = max(1, math.ceil((self.arrival - self.since) / decode - 1e-9))
            self.until = min(self.until, self.since + steps * decode)

    def end(self) -> None:
        """What was under way is over: responses ended, their groups are scored, weights loaded."""
        if self.doing is Doing.DECODING:
            self.decoded += round((self.until - self.since) / self.setting.decode)
            self.free_slots()
        elif self.doing is Doing.SCORING:
            self.finished += [self.until] * self.scoring
        self.work_on(self.until)

    def free_slots(self) -> None:
        """Take the responses that have ended from their slots."""
        last_of_batch = max(self.running)[0] if self.setting.whole_batches else 0
        while self.running and max(self.running[0][0], last_of_batch) <= self.decoded:
            _, group = heapq.heappop(self.running)
            self.left[group] -= 1
            if not self.left[group]:
                del self.left[group]
                self.unscored += 1

    def send_weights(self, arrival: float) -> None:
        """Weights are on their way and will have been received at this time."""
        self.arrival = arrival
        self.stop_for_weights()

    def seconds_loading(self, begin: float, end: float) -> float:
        """How much of an interval it spent on loading weights."""
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in self.loads)

    def has_loaded(self, now: float) -> bool:
        """Whether no weights are on their way to it, or being loaded."""
        return self.arrival == math.inf and (not self.loads or self.loads[-1][1] <= now)


def simulate(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Wall-clock from the first step on, busy fractions then, trajectories searched in all."""
    s = setting
    rng = np.random.default_rng(seed)
    searchers = [SimulatedSearcher(s, rng) for _ in range(s.searchers)]
    for searcher in searchers:
        searcher.fill()
        searcher.running = [  # as if they had run for a while: not all begin together
            (max(1, int(end * (1 if s.whole_batches else rng.random()))), group)
            for end, group in searcher.running
        ]
        heapq.heapify(searcher.running)
        searcher.work_on(0.0)

    def first() -> SimulatedSearcher:
        return min(searchers, key=lambda searcher: searcher.until)

    def arrived() -> int:
        return sum(len(searcher.finished) for searcher in searchers)

    now = 0.0
    while arrived() * s.S < s.initial or arrived() < s.B:
        searcher = first()
        now = searcher.until
        searcher.end()
    began = now
    before = arrived()
    syncs = 0
    due = False
    for step in range(s.steps):
        due |= step > 0 and step % s.sync_every == 0
        if due and all(searcher.has_loaded(now) for searcher in searchers):
            due = False
            syncs += 1
            now += s.transfer
            for searcher in searchers:
                searcher.send_weights(now + s.travel)
        now += s.step + s.between
        while first().until <= now:
            first().end()
    wall = now - began
    loading = sum(searcher.seconds_loading(began, now) for searcher in searchers)
    searched = (arrived() - before) * s.S
    return {
        "seconds": wall,
        "searched": arrived() * s.S,
        "trainer_busy": s.steps * s.step / wall,
        "searcher_busy": 1 - loading / (wall * s.searchers),
        "searched_per_trained": searched / (s.steps * s.B * s.K),
        "syncs": syncs,
    }


# ----------------------------------------------------------------------- slowed, real processes


def slow_down(
    decode_seconds: float, score_seconds: float, step_seconds: float, notes: Path
) -> None:
    """As a --task_file: sleep in decode steps, scoring and training; note what they take then."""
    import tba

    times = ("decode", "score", "load", "transfer")  # seconds
    clocks = ("received", "begun", "scored", "trained")  # when
    taken: dict[str, list] = {name: [] for name in (*times, *clocks, "lengths")}
    clock = time.perf_counter  # the same in all processes of a machine
    hook = tba.DecodeHook.__call__
    scored = tba.Searcher.score_groups
    loaded = tba.Searcher.load_weights
    received = tba.WeightReceiver.receive
    begun = tba.WeightSync._begin
    backward = tba.Learner.backward

    def decode(self, ids, scores):
        if scores is not None or self.between_steps is tba.do_nothing:  # of a judge or a victim
            return hook(self, ids, scores)
        time.sleep(decode_seconds)
        if hasattr(self, "began"):  # the first step of a batch has its prompts
            taken["decode"].append(clock() - self.began)
        result = hook(self, ids, scores)  # calls what happens between two steps
        self.began = clock()
        return result

    def score(self, completions):
        start = clock()
        lengths = [len(tokens) for done in completions for tokens in done.tokens]
        time.sleep(score_seconds * len(lengths))
        groups = scored(self, completions)
        taken["score"].append((clock() - start) / len(lengths))
        taken["lengths"] += lengths
        taken["scored"] += [clock()] * len(lengths)
        (notes / f"searcher-{self.link.searcher}.json").write_text(json.dumps(taken))
        return groups

    def load(self):
        start = clock()
        loaded(self)
        taken["load"].append(clock() - start)

    def receive(self, message):
        received(self, message)
        taken["received"].append(clock())

    def begin(self, step):
        start = clock()
        begun(self, step)
        taken["begun"].append(clock())
        taken["transfer"].append(clock() - start)

    def train(self, groups, now):
        time.sleep(step_seconds)
        taken["trained"].append(clock())
        (notes / "trainer.json").write_text(json.dumps(taken))
        return backward(self, groups, now)

    tba.DecodeHook.__call__ = decode
    tba.Searcher.score_groups = score
    tba.Searcher.load_weights = load
    tba.WeightReceiver.receive = receive
    tba.WeightSync._begin = begin
    tba.Learner.backward = train


if os.environ.get("TBA_SLOW"):  # in a run's processes
    slow_down(*map(float, os.environ["TBA_SLOW"].split()), Path(os.environ["TBA_SLOW_NOTES"]))


def real(setting: Setting, slow: tuple[float, ...], folder: Path) -> tuple[dict, Setting]:
    """A slowed run: what `simulate` predicts of it, and the setting with measured constants."""
    folder.mkdir()
    flags = {
        "output_dir": folder / "run", "task_file": __file__, "engine": "transformers",
        "num_searchers": setting.searchers, "steps": setting.steps, "eval_every": 0,
        "eval_samples": 4, "save_every": 0, "initial_trajectories": setting.initial,
        "sync_every": setting.sync_every, "prompts_per_step": setting.B,
        "trained_per_prompt": setting.K, "searched_per_prompt": setting.S,
        "sequences_in_flight": setting.slots,
    }  # fmt: skip
    command = ["bash", str(ROOT / "run_gsm8k.sh"), "--tiny"]
    command += [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment |= {"TBA_SLOW": " ".join(map(str, slow)), "TBA_SLOW_NOTES": str(folder)}
    subprocess.run(command, check=True, stdout=-3, stderr=-3, env=environment)
    return read_run(folder / "run", folder, setting)


def read_run(run: Path, notes_at: Path, setting: Setting) -> tuple[dict, Setting]:
    """A slowed run that has ended: what `simulate` predicts of it, and its measured constants."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    column = lambda name: np.array([row[name] for row in rows[1:]])
    walls = np.diff([row["seconds"] for row in rows])
    busy = column("trainer_busy") * walls
    lost = column("sync_seconds") + column("sync_wait_seconds")
    notes = [json.loads(path.read_text()) for path in sorted(notes_at.glob("searcher-*.json"))]
    trainer = json.loads((notes_at / "trainer.json").read_text())

    def mean(name: str, first: int = 0) -> float:
        return float(np.mean([value for note in notes for value in note[name][first:]]))

    # without the first sync's, which find fresh memory
    travels = []
    for note in notes:
        pairs = zip(trainer["begun"][1:], note["received"][1:], strict=False)
        travels += [there - sent for sent, there in pairs]
    measured = replace(
        setting,
        lengths=np.array(notes[0]["lengths"]),
        step=float(busy.mean()),
        between=float((walls - busy - lost).mean()),
        decode=mean("decode"),
        score=mean("score"),
        transfer=float(np.mean(trainer["transfer"][1:])),
        travel=max(0.0, float(np.mean(travels))),
        load=mean("load", first=1),
    )
    return {
        "seconds": float(walls.mean() * setting.steps),
        # until the last step: what was under way then is not trained on
        "searched": sum(
            scored < trainer["trained"][-1] for note in notes for scored in note["scored"]
        ),
        "trainer_busy": float(busy.sum() / walls.sum()),
        "searcher_busy": float(np.average(column("searcher_busy"), weights=walls)),
        "syncs": len(trainer["begun"]) - 1,  # without that of step 0
    }, measured


def check(args: argparse.Namespace) -> dict:
    """Predictions from constants of the run with one Searcher, beside real runs."""
    setting = Setting(
        1, np.ones(1), 0.0, steps=args.check_steps, B=8, K=16, S=16, slots=64, lookahead=1.0,
        whole_batches=True, initial=128,
    )  # fmt: skip
    results, constants = {}, None
    print("Searchers                          predicted      real  difference")
    with tempfile.TemporaryDirectory() as folder:
        for M in args.check:
            came, measured = real(replace(setting, searchers=M), args.slow, Path(folder) / str(M))
            constants = constants or measured
            expected = simulate(replace(constants, searchers=M))
            results[M] = {"predicted": expected, "real": came}
            for name, value in came.items():
                difference = expected[name] / value - 1
                print(f"{M:9}  {name:22} {expected[name]:9.3f} {value:9.3f}  {difference:+10.1%}",
                      flush=True)  # fmt: skip
    return results


def draw(args: argparse.Namespace) -> dict:
    """Searched per trained trajectory, and busy fractions, by Searchers and response length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts, results = [1, 2, 4, 8, 16, 32, 64], {}
    rng = np.random.default_rng(0)
    for mean in args.lengths:
        lengths = np.clip(rng.lognormal(math.log(mean) - 0.125, 0.5, 4096), 1, 4 * mean).astype(int)
        # a training step's time grows with its tokens, from that at the first length
        step = args.step * mean / args.lengths[0]
        runs = [
            simulate(Setting(M, lengths, step, decode=args.decode, transfer=args.transfer,
                             travel=args.travel, load=args.load,
                             score=args.score * mean, sync_every=args.sync_every, steps=60,
                             slots=max(24, min(256, args.cache // (2 * mean)))))
            for M in counts
        ]  # fmt: skip
        results[mean] = dict(zip(counts, runs, strict=True))
        left.plot(counts, [run["searched_per_trained"] for run in runs], "o-", label=f"{mean:,}")
        (line,) = right.plot(counts, [run["trainer_busy"] for run in runs], "o-")
        right.plot(counts, [run["searcher_busy"] for run in runs], "s--", color=line.get_color())
    left.axhline(1, color="black", lw=0.8, label="each trained on once")
    left.set_yscale("log", base=2)
    left.set_ylabel("trajectories searched per trajectory trained on")
    left.set_ylim(top=8 * left.get_ylim()[1])  # room for the legend
    left.legend(title="tokens per response", fontsize=8, loc="upper left", ncols=2)
    right.set_ylim(0, 1.05)
    right.set_ylabel("busy fraction: Trainer (dots), Searchers (dashed)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("Searchers")
        axes.grid(alpha=0.3)
    figure.suptitle(f"step {args.step:g} s at {args.lengths[0]} tokens a response, "
                    f"decode step {args.decode:g} s", fontsize=10)  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out.with_suffix(".png"), dpi=110)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=("check", "picture"))
    parser.add_argument("--check", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--check_steps", type=int, default=60)
    parser.add_argument("--slow", type=float, nargs=3, default=(0.06, 0.004, 0.6),
                        help="sleeps of decoding, scoring a trajectory, training")  # fmt: skip
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000, 8000]
    )
    parser.add_argument(
        "--step", type=float, default=7.0, help="seconds of a training step of 7 x 20"
    )
    parser.add_argument("--decode", type=float, default=0.025, help="seconds of a decode step")
    parser.add_argument("--score", type=float, default=2e-5, help="seconds of scoring a token")
    parser.add_argument("--cache", type=int, default=500_000, help="tokens of KV cache")
    parser.add_argument(
        "--transfer", type=float, default=0.1, help="seconds that the Trainer loses at a sync"
    )
    parser.add_argument(
        "--travel", type=float, default=0.4, help="seconds that weights are on their way"
    )
    parser.add_argument(
        "--load", type=float, default=0.3, help="seconds that a Searcher loses at a sync"
    )
    parser.add_argument("--sync_every", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "scaling.json")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.only != "picture":
        results["check"] = check(args)
    if args.only != "check":
        results["picture"] = draw(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
