"""Fault injection and event logs inside a run: `--plugin tests/faults.py`, env TBA_FAULTS.

TBA_FAULTS is a folder. A file there named after a fault makes the first process that reaches the
fault's injection point remove the file and hit the fault. Events are logged as lines of integers,
one file per kind. tba.py knows nothing of this.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import tba

FOLDER = Path(os.environ["TBA_FAULTS"])
IN_A_SEARCHER = multiprocessing.parent_process() is not None or tba.SEARCHER_FLAG in sys.argv


def claim(fault: str) -> bool:
    """Whether this process is the one that hits the fault."""
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / fault).unlink()
        return True
    return False


def strike(place: str) -> None:
    """Die or hang here if that fault is injected and this is a Searcher."""
    if not IN_A_SEARCHER:
        return
    if claim(f"die-{place}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if claim(f"hang-{place}"):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # another thread takes the signal first, and this one would go on meanwhile


def note(kind: str, *values: int) -> None:
    """Append a line to a file in FOLDER with one write, as several processes do so."""
    with open(FOLDER / kind, "a") as file:
        file.write(" ".join(map(str, values)) + "\n")


def replace(owner, name: str, function) -> None:
    """Wrap an owner's function; the wrapper gets the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def form(original, channel):
    strike("joining")
    return original(channel)


def broadcast(original, channel, weights, meeting):
    strike("receiving")
    original(channel, weights, meeting)
    strike("received")


def load_weights(original, searcher):
    strike("loading")
    original(searcher)


def between_steps(original, searcher):
    if searcher.in_flight:  # responses are under way
        if claim("raise"):
            raise ArithmeticError("a fault on demand")
        strike("generating")
    original(searcher)


def on_group(original, rule, group):
    note("stored", group.index)
    original(rule, group)


def train_step(original, trainer, minibatch):
    note("trained", trainer.step)
    task = trainer.task
    for t in (t for group in minibatch for t in group):
        text = task.response_texts([t.tokens])
        (alone,) = task.rewards([task.train[t.prompt_id]], text, np.array([t.ended]))
        note("judged", int(t.reward), int(alone))
    if (FOLDER / "slow-trainer").exists():
        time.sleep(float((FOLDER / "slow-trainer").read_text()))
    original(trainer, minibatch)


replace(tba.WeightChannel, "form", form)
replace(tba.WeightChannel, "broadcast", broadcast)
replace(tba, "load_weights", load_weights)
replace(tba.Searcher, "between_steps", between_steps)
replace(tba.RecentOrReward, "on_group", on_group)
replace(tba.Trainer, "train_step", train_step)
