"""Faults on demand, in a run's own processes: `--task_file tests/faults.py`, env TBA_FAULTS=FOLDER.

A file in FOLDER that bears a fault's name makes the first process that comes to the fault's place
remove the file and suffer the fault. Nothing of this is known to tba.py.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import ClassVar

import tba

FOLDER = Path(os.environ["TBA_FAULTS"])
IN_A_SEARCHER = multiprocessing.parent_process() is not None
tba.BUCKET_BYTES = 100_000  # several buckets even for a tiny model
tba.WeightSync.SHARE_ON_CPU = (FOLDER / "share-memory").exists()


def claim(fault: str) -> bool:
    """Whether this process is the one to suffer the fault."""
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / fault).unlink()
        return True
    return False


def strike(place: str) -> None:
    """Die or hang here, if that is wanted."""
    if claim(f"die-{place}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if claim(f"hang-{place}"):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # another thread takes the signal first, and this one would go on meanwhile
    if claim(f"stuck-{place}"):
        time.sleep(1000)  # this thread alone, as in a reward that never returns


def log(name: str, *values: object) -> None:
    """Add a line to a file of FOLDER, in one write: several processes may do so."""
    with open(FOLDER / name, "a") as file:
        file.write(" ".join(map(str, values)) + "\n")


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in NAMES.split()]


def heap_in_use() -> float:
    """MiB that this process has allocated and not freed: its RSS less what the heap holds free."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def wrap(owner: type, name: str):
    """Decorator: the function replaces the method, which it is given first."""
    original = getattr(owner, name)
    return lambda function: setattr(
        owner, name, lambda self, *args, **kwargs: function(original, self, *args, **kwargs)
    )


@wrap(tba.ManagerStore, "set")
def join_group(original, self, key, value):
    original(self, key, value)
    if IN_A_SEARCHER:
        strike("joining")


@wrap(tba.WeightReceiver, "receive")
def receive(original, self, *message):
    strike("receiving")
    original(self, *message)
    if claim("corrupt"):
        first = next(iter(self.received(*message).values()))
        first.view(-1)[7] += 3.0
    strike("received")


@wrap(tba.Searcher, "load_weights")
def load_weights(original, self):
    log("in-flight", len(self.requests))
    strike("loading")
    if claim("late-loaded"):
        time.sleep(18)  # longer than the limit for a transfer
    original(self)


@wrap(tba.Searcher, "between_steps")
def between_steps(original, self, *args, **kwargs):
    if self.requests:  # responses are under way
        if claim("raise"):
            raise ArithmeticError("a fault on demand")
        if claim("out-of-memory"):
            tba.torch.empty(2**60)
        if claim("leave"):
            left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            log("left", left.pid)
        strike("generating")
    original(self, *args, **kwargs)


@wrap(tba.Searcher, "deliver")
def deliver(original, self):
    waiting = list(self.outbox)
    original(self)
    for group in waiting[: len(waiting) - len(self.outbox)]:
        log("sent", group.searcher, group.number)
        log("delivered", group.trajectories[0].version, self.version)


@wrap(tba.ReplayBuffer, "add")
def add(original, self, group):
    log("stored", group.searcher, group.number)
    first = group.trajectories[0]
    log("weights", group.searcher, first.version, first.reference)
    log("response", group.searcher, zlib.crc32(first.tokens.tobytes()))
    original(self, group)


@wrap(tba.Trainer, "load")
def load(original, self):
    strike("loading-models")
    original(self)


@wrap(tba.Trainer, "take_messages")
def take_messages(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    evaluation = self.evaluation
    moments = {
        "signal-within-a-batch": 0 < len(self.arrived) < self.config.prompts_per_step,
        "signal-within-an-evaluation": evaluation.version is not None and evaluation.records,
    }
    for fault, now in moments.items():
        if now and claim(fault):
            os.kill(os.getpid(), signal.SIGTERM)


@wrap(tba.Trainer, "save_at_the_end")
def save_at_the_end(original, self, *args, **kwargs):
    strike("ending")
    if claim("late-end"):
        time.sleep(3)  # Searchers go on meanwhile
    original(self, *args, **kwargs)


@wrap(tba.Trainer, "train_step")
def train_step(original, self):
    if (FOLDER / "slow-trainer").exists():
        time.sleep(float((FOLDER / "slow-trainer").read_text()))
    if self.step % 50 == 0:
        log("heap", time.monotonic(), heap_in_use())
    original(self)
