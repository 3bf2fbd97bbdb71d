"""How many Searchers do I need? A discrete-event model of a run, checked against real runs.

    python bench/scaling.py                # the check and the picture, ten minutes
    python bench/scaling.py --only picture --step 6 --decode 0.025 --length 2000 ...

The model follows tba.py: Searchers with sequence slots and groups in flight, scoring, pauses for
weight syncs with --sync_patience, the initial fill, a Trainer that never waits for generation. It
takes what a user can measure: seconds of an optimizer step, of a decode step, of scoring a
trajectory, of a weight transfer, and response lengths. It predicts wall-clock, both busy fractions
and how many trajectories are searched for each one trained on.

The check runs the tiny GSM8K with 1, 2 and 4 Searchers whose processes are slowed to known speeds,
so that two cores suffice, and compares. Constants are measured in the run with 1 Searcher.
"""

import argparse
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
    transfer: float = 0.1  # of weights to all Searchers, as the Trainer sees it
    load: float = 0.0  # until a Searcher generates again after that
    steps: int = 200
    B: int = 7
    K: int = 20
    S: int = 24
    slots: int = 256
    lookahead: float = 4 / 3  # in flight over slots; 1 with --engine transformers
    whole_batches: bool = False  # a batch runs till its longest response ends (transformers)
    sync_every: int = 2
    patience: float = 0.2
    initial: int = 500


class SimulatedSearcher:
    """Groups in flight, slots, and the decode steps between one completion and the next."""

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self.setting, self.rng = setting, rng
        self.running: list[tuple[int, int]] = []  # heap of (decode step of its end, group)
        self.waiting: list[tuple[int, int]] = []  # (length, group)
        self.left: dict[int, int] = {}  # group -> responses not ended
        self.count, self.decoded = itertools.count(), 0
        self.paused, self.pause_requested = True, False
        self.since, self.until, self.idle = 0.0, math.inf, 0.0  # of the present activity
        self.scoring, self.finished = 0, []  # groups being scored; groups to hand over

    def begin(self, now: float) -> None:
        """Start prompts, fill slots, and find when something ends next."""
        s = self.setting
        if self.pause_requested:
            self.paused, self.pause_requested = True, False
        if self.paused:
            self.since, self.until = now, math.inf
            return
        fresh = not s.whole_batches or not self.running
        while fresh and (not self.left or s.S * (len(self.left) + 1) <= s.slots * s.lookahead):
            group = next(self.count)
            self.left[group] = s.S
            drawn = self.rng.choice(s.lengths, s.S)
            self.waiting += [(int(length), group) for length in drawn]
        while self.waiting and len(self.running) < s.slots:
            length, group = self.waiting.pop(0)
            heapq.heappush(self.running, (self.decoded + length, group))
        ends = max(self.running)[0] if s.whole_batches else self.running[0][0]
        self.since, self.until = now, now + (ends - self.decoded) * s.decode

    def end(self, now: float) -> None:
        """What was under way is over: responses ended, or their groups are scored."""
        if self.scoring:
            self.finished += [now] * self.scoring
            self.scoring = 0
            return self.begin(now)
        self.decoded += round((now - self.since) / self.setting.decode)
        done = 0
        while self.running and self.running[0][0] <= self.decoded:
            _, group = heapq.heappop(self.running)
            self.left[group] -= 1
            if not self.left[group]:
                del self.left[group]
                done += 1
        if done:
            self.scoring, self.since = done, now
            self.until = now + done * self.setting.S * self.setting.score
        else:
            self.begin(now)

    def request_pause(self, now: float) -> None:
        """It pauses at the end of this decode step, or of scoring."""
        self.pause_requested = not self.paused
        if self.pause_requested and not self.scoring:
            decode = self.setting.decode
            steps = math.ceil((now - self.since) / decode - 1e-9)
            self.until = min(self.until, self.since + steps * decode)

    def resume(self, now: float, at: float) -> None:
        """It has new weights and generates from `at` on."""
        self.idle += at - self.since
        self.paused = self.pause_requested = False
        self.begin(at)


def simulate(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Wall-clock from the first step on, busy fractions then, trajectories searched in all."""
    s, rng = setting, np.random.default_rng(seed)
    searchers = [SimulatedSearcher(s, rng) for _ in range(s.searchers)]
    for searcher in searchers:
        searcher.resume(0.0, 0.0)
        searcher.running = [  # as if they had run for a while: not all begin together
            (max(1, int(end * (1 if s.whole_batches else rng.random()))), group)
            for end, group in searcher.running
        ]
        heapq.heapify(searcher.running)
        searcher.idle = 0.0
        searcher.begin(0.0)

    def advance(to: float, done=lambda: False) -> float:
        """Let the Searchers work until a time, or until `done`; returns when that was."""
        now = 0.0
        while not done():
            searcher = min(searchers, key=lambda one: one.until)
            if searcher.until > to:
                return to
            now = searcher.until
            searcher.end(now)
        return now

    arrived = lambda: sum(len(searcher.finished) for searcher in searchers)
    now = advance(math.inf, lambda: arrived() * s.S >= s.initial and arrived() >= s.B)
    began, busy, before, due = now, 0.0, arrived(), False
    idle_before = sum(searcher.idle for searcher in searchers)
    paused = lambda: all(searcher.paused for searcher in searchers)
    for step in range(s.steps):
        due |= step > 0 and step % s.sync_every == 0
        if due:
            for searcher in searchers:
                searcher.request_pause(now)
            last = advance(now + max(s.patience, 0.05 * s.step), paused)
            now = max(now, last)
            if paused():
                now += s.transfer
                for searcher in searchers:
                    searcher.resume(now, now + s.load)
                due = False
        now = advance(now + s.step + s.between)
        busy += s.step
    wall = now - began
    idle = sum(searcher.idle for searcher in searchers) - idle_before
    searched = (arrived() - before) * s.S
    return {
        "seconds": wall, "searched": arrived() * s.S, "trainer_busy": busy / wall,
        "searcher_busy": 1 - idle / (wall * s.searchers),
        "searched_per_trained": searched / (s.steps * s.B * s.K),
    }  # fmt: skip


# ----------------------------------------------------------------------- slowed, real processes


def slow_down(
    decode_seconds: float, score_seconds: float, step_seconds: float, notes: Path
) -> None:
    """As a --task_file: sleep in decode steps, scoring and training; note what they take then."""
    import tba

    taken = {"decode": [], "score": [], "load": [], "transfer": [], "lengths": []}
    clock = time.perf_counter
    hook, scored, loaded, pushed, backward = (
        tba.DecodeHook.__call__, tba.Searcher.score_groups, tba.Searcher.on_weights,
        tba.SearcherPool.push, tba.Trainer.backward,
    )  # fmt: skip

    def decode(self, ids, scores):
        if scores is not None:
            return hook(self, ids, scores)
        time.sleep(decode_seconds)
        if hasattr(self, "began"):  # the first step of a batch has its prompts
            taken["decode"].append(clock() - self.began)
        result = hook(self, ids, scores)  # calls what happens between two steps
        self.began = clock()
        return result

    def score(self, completions):
        start, lengths = clock(), [len(tokens) for done in completions for tokens in done.tokens]
        time.sleep(score_seconds * len(lengths))
        groups = scored(self, completions)
        taken["score"].append((clock() - start) / len(lengths))
        taken["lengths"] += lengths
        (notes / f"searcher-{self.queues.searcher}.json").write_text(json.dumps(taken))
        return groups

    def timed(name, method):
        def wrapper(*args):
            start = clock()
            result = method(*args)
            taken[name].append(clock() - start)
            return result

        return wrapper

    def train(*args):
        time.sleep(step_seconds)
        (notes / "trainer.json").write_text(json.dumps(taken))
        return backward(*args)

    tba.DecodeHook.__call__, tba.Searcher.score_groups = decode, score
    tba.Searcher.on_weights = timed("load", loaded)
    tba.SearcherPool.push, tba.Trainer.backward = timed("transfer", pushed), train


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
        "sequences_in_flight": setting.slots, "sync_patience": setting.patience,
    }  # fmt: skip
    command = ["bash", str(ROOT / "run_gsm8k.sh"), "--tiny"]
    command += [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment |= {"TBA_SLOW": " ".join(map(str, slow)), "TBA_SLOW_NOTES": str(folder)}
    subprocess.run(command, check=True, stdout=-3, stderr=-3, env=environment)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    column = lambda name: np.array([row[name] for row in rows[1:]])
    walls = np.diff([row["seconds"] for row in rows])
    busy, lost = (
        column("trainer_busy") * walls,
        column("sync_seconds") + column("sync_wait_seconds"),
    )
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("searcher-*.json"))]
    mean = lambda name: float(np.mean(list(itertools.chain(*(note[name] for note in notes)))))
    transfer = float(np.mean(json.loads((folder / "trainer.json").read_text())["transfer"][1:]))
    measured = replace(
        setting, lengths=np.array(notes[0]["lengths"]), step=float(busy.mean()),
        between=float((walls - busy - lost).mean()), decode=mean("decode"), score=mean("score"),
        transfer=transfer, load=max(0.0, mean("load") - transfer),
    )  # fmt: skip
    return {
        "seconds": float(walls.mean() * setting.steps),
        "searched": sum(len(note["lengths"]) for note in notes),
        "trainer_busy": float(busy.sum() / walls.sum()),
        "searcher_busy": float(np.average(column("searcher_busy"), weights=walls)),
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
    parser.add_argument("--transfer", type=float, default=0.5, help="seconds of a weight transfer")
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
