"""A whole run in one process: real Trainer, Learner, Searchers and weight sync, turn by turn.

Processes and threads take turns, in random order, while the Trainer waits or before it takes a
step; each turn moves the clock. Replaced are only processes (a Searcher lives here), threads (their
tasks wait for a turn), the broadcast (a copy), and the engine's sampling: a response is a function
of the request's seed and the weights' version, so it is known what each should be. `World` checks
every request, group, batch, weight and evaluation on the way.
"""

import contextlib
import copy
import functools
import math
import pickle
import queue
import random
import traceback
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import arguments, plain_logprobs

import tba

TURN = 0.2  # seconds
LIMIT = 5000  # turns
SCHEDULES = {"learning_rate": "0.05@0,0.01@8", "beta": "0.05@0,0.1@8"}


class Killed(BaseException):
    """The Trainer's process is killed: nothing is saved."""


class Wrong(BaseException):
    """A check failed: tba.py handles exceptions, but not this one."""


def ends_the_run(check: Callable) -> Callable:
    """A function whose failed assertions raise Wrong."""

    @functools.wraps(check)
    def checked(*args: Any) -> Any:
        try:
            return check(*args)
        except AssertionError as error:
            raise Wrong(f"{check.__name__}: {error}") from error

    return checked


class Scripted(tba.GSM8K):
    """Rewards, temperatures and adjusted log pi_ref that a test can predict."""

    min_eval_tokens = 2

    @ends_the_run
    def rewards(self, examples: list, responses: list, ended: np.ndarray) -> np.ndarray:
        """Calls have a limited number of responses, and whole groups."""
        S = self.config.searched_per_prompt
        most = max(S, self.config.sequences_in_flight // self.reward_threads)
        assert len(responses) <= most and len(responses) % S == 0
        for i in range(0, len(responses), S):
            assert all(example is examples[i] for example in examples[i : i + S])
        return self.judge(examples, responses, ended)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        return [{"reward": reward} for reward in self.judge(examples, responses, ended)]

    def judge(self, examples: list, responses: list, ended: np.ndarray) -> np.ndarray:
        triples = zip(examples, responses, ended, strict=True)
        return np.array([reward_of(x, y) + 10 * bool(done) for x, y, done in triples])

    def temperature(self, rng: np.random.Generator) -> float:
        return 1.5 if rng.random() < 0.2 else self.config.temperature

    def adjust_ref_logprobs(self, tokens: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
        return ref_logprobs - 3 if len(tokens) == 1 else ref_logprobs


def reward_of(example: dict, response: str) -> float:
    return zlib.crc32((example["question"] + response).encode()) % 7 / 4


def response_of(request: tba.Request, i: int, version: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Tokens (T,), log-probabilities (T,), and whether it ends with EOS, of response i of n."""
    rng = np.random.default_rng([request.seed, i, version])
    length = int(rng.integers(1, request.max_tokens + 1))
    ended = length < request.max_tokens or bool(rng.random() < 0.5)
    tokens = rng.integers(2, 40, length).astype(np.int32)
    if ended:
        tokens[-1] = 0
    return tokens, -rng.uniform(0.1, 5, length).astype(np.float32), ended


class ScriptedEngine(tba.TransformersEngine):
    """Decodes a token of every request at each step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.world: World
        self.process: Process
        self.decoding: list[tuple[tba.Request, list[int]]] = []  # with each token's version

    @property
    def unfinished(self) -> int:
        return len(self.decoding)

    def submit(self, request: tba.Request) -> None:
        self.world.on_submit(self.process, request)
        self.decoding.append((copy.copy(request), []))
        request.temperature = math.nan  # as an engine may change what it is given

    def step(self, between_steps: Callable = lambda: None) -> list[tba.Completion]:
        done = []
        for request, versions in list(self.decoding):
            versions.append(self.version)
            rows = [response_of(request, i, versions[0]) for i in range(request.n)]
            if len(versions) == max(len(tokens) for tokens, *_ in rows):
                self.decoding.remove((request, versions))
                spans = [(versions[0], versions[len(tokens) - 1]) for tokens, *_ in rows]
                done.append(tba.Completion(request, *map(list, zip(*rows, strict=True)), spans))
        if self.world.random.random() < 0.5:
            receive_all(self.process.searcher)  # weights may come while it decodes
        between_steps()
        self.world.random.shuffle(done)
        return done

    @ends_the_run
    def load_weights(self, weights: Iterable, version: int) -> None:
        super().load_weights(weights, version)
        same = checksum(self.state) == self.world.checksums[version]
        assert same or "corrupt" in self.world.struck, f"weights of step {version}"


def checksum(weights: dict[str, torch.Tensor]) -> int:
    """A checksum of weights by name."""
    value = 0
    for name in sorted(weights):
        value = zlib.crc32(weights[name].detach().numpy().tobytes(), value)
    return value


class Inbox(queue.Queue):
    """A queue whose reader does not wait: where nothing is left, its loop ends."""

    def get(self) -> Any:
        return super().get(block=False)


def receive_all(receiver: Any) -> None:
    """Have a Searcher, or the Trainer's thread, receive what is there."""
    with contextlib.suppress(queue.Empty):
        receiver.receive_messages()


class Look(Future):
    """The thread in which a Searcher receives messages: it looks once in each turn."""

    def __init__(self, searcher: tba.Searcher) -> None:
        super().__init__()
        self.searcher = searcher

    def done(self) -> bool:
        looked = super().done()
        if not looked:
            self.set_result(None)
            receive_all(self.searcher)
        return looked


class Threads:
    """A ThreadPoolExecutor whose tasks wait for a turn; those of one thread keep their order."""

    def __init__(self, world: "World", size: int = 1) -> None:
        self.world, self.size = world, size

    def submit(self, function: Callable, *args: Any) -> Any:
        if getattr(function, "__name__", "") == "receive_messages":
            return Look(function.__self__)
        task = Task(self, partial(function, *args))
        self.world.tasks.append(task)
        return task


class Task(Future):
    """What a thread does at its turn, or at once if somebody waits for it."""

    def __init__(self, threads: Threads, function: partial) -> None:
        super().__init__()
        self.threads, self.world, self.function = threads, threads.world, function
        self.name = getattr(function.func, "func", function.func).__name__

    def may_run(self) -> bool:
        """Whether it may take a turn: no earlier task has its thread, and no test blocks it."""
        earlier = (t for t in self.world.tasks if t.threads is self.threads)
        is_next = self.threads.size > 1 or next(earlier) is self
        return is_next and self.name not in self.world.blocked

    def turn(self) -> None:
        self.world.tasks.remove(self)
        try:
            self.set_result(self.function())
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.turn()
        return super().result()

    def exception(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.turn()
        return super().exception()


class Process:
    """A Searcher's process; `state` is alive, hangs, failed (it waits to be killed) or dead."""

    def __init__(self, world: "World", spec: tba.SearcherSpec, environment: Any = None) -> None:
        self.world, self.spec = world, spec
        self.searcher: tba.Searcher | None = None
        self.state = "alive"
        self.fault = ""  # of the next weights that it receives: miss or corrupt
        self.exitcode: int | None = None
        self.versions: dict[tba.RequestId, int] = {}  # of the weights at submission
        self.last_index = -1
        self.tokens = 0  # generated
        world.processes.append(self)

    def is_alive(self) -> bool:
        return self.state != "dead"

    def kill(self) -> None:
        self.state, self.exitcode = "dead", -9

    def turn(self) -> None:
        """Load the models, or go once through the Searcher's loop."""
        try:
            if self.searcher:
                self.searcher.run()
                return
            self.spec.send(tba.Started())
            config, task = pickle.loads(self.spec.shared["run"])
            self.searcher = tba.Searcher(config, task, self.spec)
            vars(self.searcher.engine).update(world=self.world, process=self)
        except Exception:
            self.spec.send(tba.Failed(traceback.format_exc(), False))
            self.state = "failed"


class World:
    """Runs tba.main, perhaps several times in one folder, and checks all that happens."""

    def __init__(
        self, seed: int, task: tba.Task, out: Path, flags: dict, faults: Iterable[str] = ()
    ) -> None:
        self.out, self.flags = out, flags
        self.random = random.Random(seed)
        self.task = task
        self.faults = list(faults)  # each strikes once, at random
        self.now = 1000.0
        self.checksums: dict[int, int] = {}  # of the policy's weights, by step
        self.requests: dict[int, tuple] = {}  # position -> prompt id, seed, temperature
        self.groups: dict[int, tba.Group] = {}  # position -> the group as it was sent last
        self.struck: set[str] = set()
        self.disturbed = False  # by a fault, or a resume: data may be fresher than --lag says
        self.answers: dict[tuple[int, int], list] = {}  # version, row -> scored answers
        self.blocked: set[str] = set()  # names of functions that threads do not run
        self.store_seconds = 0.0  # that storing a group takes
        self.turns_per_step = 6  # at most, while the Trainer does not wait
        self.clear()

    def clear(self) -> None:
        """Forget the processes and threads of the previous run."""
        self.turn = 0
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        self.trainer: Any = None
        self.received: set[int] = set()  # positions
        self.kept: set[int] = set()  # positions that were stored, or dropped at a reset
        self.stored_since_reset = 0
        self.dropped = 0  # groups since the latest step
        self.steps: list[dict] = []  # what metrics.jsonl should have

    # ----------------------------------------------------------------------------- turns

    def turns(self, count: int) -> None:
        """Let some of those that can act take a turn each."""
        for _ in range(count):
            self.now += TURN
            self.turn += 1
            self.turns_left -= 1
            if self.turn > LIMIT:
                raise Wrong("the run does not end")
            if self.turns_left == 0 and self.kills:
                raise Killed
            if self.turns_left == 0:
                self.trainer.signals[15] = self.now
            actors = [p.turn for p in self.processes if p.state == "alive"]
            actors += [t.turn for t in self.tasks if t.may_run()]
            actors.append(partial(receive_all, self.trainer.searchers))
            if self.faults and self.random.random() < 0.1:
                actors = [self.strike]
            self.random.choice(actors)()

    def strike(self) -> None:
        """Inject the next fault into a Searcher that has sent a group."""
        searchers = self.trainer.searchers
        sent = {index % len(searchers.running) for index in self.received}
        able = [
            s.process for s in searchers.running
            if s.state == "ready" and s.process.state == "alive" and s.spec.searcher in sent
        ]  # fmt: skip
        if not able:
            return
        self.disturbed = True
        process = self.random.choice(able)
        fault = self.faults.pop()
        self.struck.add(fault)
        if fault == "die":
            process.kill()
        elif fault in ("miss", "corrupt"):
            process.fault = fault
        else:
            process.state = fault  # "hangs"

    def broadcast(self, channel: Any, weights: tba.FlatWeights, meeting: Barrier) -> None:
        """Rank 0 leaves a copy, which the others take, unless a member is lost."""
        channel.formed = channel.formed or SimpleNamespace(abort=lambda: None)
        if channel.rank == 0:
            meeting.weights = weights.flat.clone()
            members = self.trainer.sync.transfer.members
            if any(s.process.state != "alive" for s in members):
                meeting.abort()
                raise RuntimeError("a member is lost")
            return
        (process,) = (p for p in self.processes if p.searcher and p.searcher.staging is weights)
        fault, process.fault = process.fault, ""
        if meeting.broken or fault == "miss":
            raise RuntimeError("a broadcast failed")
        weights.flat.copy_(meeting.weights)
        if fault == "corrupt":
            weights.flat[len(weights.flat) // 2] += 3.0

    # ---------------------------------------------------------------------------- checks

    @ends_the_run
    def on_submit(self, process: Process, request: tba.Request) -> None:
        """Check a request; the engine's weights are those of its first tokens."""
        searcher, source = process.searcher, request.id
        config, task = searcher.config, searcher.task
        process.versions[source] = searcher.engine.version
        if source.held_out:
            n = config.eval_responses
            assert np.array_equal(request.prompt, task.held_out_prompts[source.prompt_id])
            assert (request.n, request.seed) == (n, config.seed + source.prompt_id * n)
            assert request.temperature == (config.temperature if n > 1 else 0)
            assert request.min_tokens == min(task.min_eval_tokens, request.max_tokens)
            return
        assert np.array_equal(request.prompt, task.train_prompts[source.prompt_id])
        total = config.max_total_tokens or math.inf
        longest = min(config.max_response_tokens, total - len(request.prompt))
        assert (request.max_tokens, request.min_tokens) == (longest, 0)
        demonstrations = task.demonstration_tokens[source.prompt_id]
        assert request.n == config.searched_per_prompt - len(demonstrations)
        index = source.index
        told = source.prompt_id, request.seed, request.temperature
        assert self.requests.setdefault(index, told) == told
        seeds = [seed for _, seed, _ in self.requests.values()]
        assert seeds.count(request.seed) == 1
        assert index % config.num_searchers == process.spec.searcher
        assert max(process.last_index, process.spec.first - 1) < index < searcher.search_end
        assert index not in process.spec.arrived_positions
        process.last_index = index
        in_flight = sum(r.n for r in searcher.in_flight.values())
        assert in_flight <= config.sequences_in_flight or in_flight == request.n
        if config.lockstep:
            batch, E = index // self.sampled, config.updates_per_batch
            assert batch <= self.trainer.step // E + config.lag
            assert self.disturbed or searcher.version == max(0, batch - config.lag) * E

    @ends_the_run
    def on_group(self, searcher: tba.Searcher, done: tba.Completion, group: tba.Group) -> None:
        """Check a group that waits for its rewards."""
        (process,) = (p for p in self.processes if p.searcher is searcher)
        config, source = searcher.config, done.request.id
        usual = done.request.temperature == config.temperature
        assert checksum(searcher.reference_weights) == self.checksums[searcher.reference_version]
        sampled = group.trajectories[: done.request.n]
        process.tokens += sum(len(t.tokens) for t in sampled)
        demonstrations = searcher.task.demonstration_tokens[source.prompt_id]
        for i, t in enumerate(group.trajectories):
            version = process.versions[source]
            if i < done.request.n:
                tokens, logprobs, ended = response_of(done.request, i, version)
            else:
                tokens = demonstrations[i - done.request.n]
                version, logprobs, ended = -1, np.zeros(len(tokens)), True
            assert np.array_equal(t.tokens, tokens) and np.array_equal(t.logprobs, logprobs)
            assert (t.version, t.last_version) == (version, done.versions[i][1])
            assert t.reference_version == searcher.reference_version and t.ended == ended
            assert (t.prompt_id, t.temperature) == (source.prompt_id, done.request.temperature)
            if source.held_out and not searcher.task.wants_logprobs:
                continue
            if usual and len(tokens) > 1 and version >= 0:
                assert t.kl == pytest.approx(float((logprobs - t.ref_logprobs).sum()), abs=1e-4)
            else:
                assert math.isnan(t.kl)
            if self.random.random() < 0.4:
                temperature = config.temperature if done.request.temperature else 1.0
                model, prompt = searcher.reference.model, done.request.prompt
                expected, _ = plain_logprobs(model, prompt, tokens, temperature)
                expected -= 3 * (len(tokens) == 1)
                np.testing.assert_allclose(t.ref_logprobs, expected, atol=1e-4)

    @ends_the_run
    def on_message(self, spec: tba.SearcherSpec, message: Any) -> None:
        """Check the rewards of groups, and the answers of an evaluation."""
        task = self.task
        if isinstance(message, tba.Group):
            assert len(message.trajectories) == self.trainer.config.searched_per_prompt
            assert message.index % self.trainer.config.num_searchers == spec.searcher
            prompt_id, *_ = self.requests[message.index]
            self.groups[message.index] = message
            for t in message.trajectories:
                (text,) = task.response_texts([t.tokens])
                assert t.prompt_id == prompt_id
                assert t.reward == reward_of(task.train[prompt_id], text) + 10 * t.ended
        if isinstance(message, tba.Heartbeat):
            (process,) = (p for p in self.processes if p.spec is spec)
            assert message.tokens == process.tokens
        if isinstance(message, tba.Evaluated):
            for row, records in message.records.items():
                assert len(records) == self.trainer.config.eval_responses
                self.answers[message.version, row] = records

    @ends_the_run
    def on_step(self, minibatch: tba.Minibatch) -> None:
        """Check a batch; remember what its metrics should be."""
        trainer = self.trainer
        config, step = trainer.config, trainer.step
        resets = config.reset_reference_every
        reference_of = lambda version: version - version % resets if resets else 0
        # in lockstep, as of the sampling; resumed runs and new Searchers sample later
        E = config.updates_per_batch
        oldest = max(0, step // E - config.lag) * E if config.lockstep else step
        latest = step if self.disturbed else oldest
        references = set(map(reference_of, range(oldest, latest + 1)))
        assert len(minibatch) == config.prompts_per_step
        for group in minibatch:
            assert len(group) == config.trained_per_prompt
            assert len({t.prompt_id for t in group}) == 1
            assert {t.reference_version for t in group} <= references
        if config.lockstep:
            self.check_lockstep(minibatch, step, oldest)
            is_new = step % E == 0 or not self.steps
            assert len(trainer.arrived) == self.sampled * is_new
        elif not any(s.transfer for s in trainer.searchers.running) and not self.disturbed:
            assert trainer.sync.version >= step - step % config.sync_every
        staleness = [step - t.version for group in minibatch for t in group if t.version >= 0]
        self.steps.append(
            {
                "step": step + 1,
                "staleness_mean": pytest.approx(np.mean(staleness)),
                "staleness_max": max(staleness),
                "version": trainer.sync.version,
                "dropped_groups": self.dropped,
                "lr": pytest.approx(np.interp(step, [0, 8], [0.05, 0.01])),  # SCHEDULES
                "beta": pytest.approx(np.interp(step, [0, 8], [0.05, 0.1])),
            }
        )
        self.dropped = 0
        arrived = [t for group in trainer.arrived for t in group.trajectories if t.version >= 0]
        if arrived:
            self.steps[-1]["reward"] = pytest.approx(np.mean([t.reward for t in arrived]))
        if kl := [t.kl for t in arrived if not math.isnan(t.kl)]:
            self.steps[-1]["kl"] = pytest.approx(np.mean(kl), rel=1e-3, abs=1e-3)

    def check_lockstep(self, minibatch: tba.Minibatch, step: int, oldest: int) -> None:
        """The sampled part is exactly what was sampled for this step; the rest is replayed."""
        for place, trajectories in enumerate(minibatch[: self.sampled]):
            batch = step // self.trainer.config.updates_per_batch
            sampled = self.groups[self.sampled * batch + place].trajectories
            for t, sent in zip(trajectories, sampled, strict=True):
                assert np.array_equal(t.tokens, sent.tokens) and t.reward == sent.reward
                assert t.version in (oldest, -1) or (self.disturbed and oldest <= t.version <= step)
        ids = [group[0].prompt_id for group in minibatch]
        stored = sum(map(bool, self.trainer.buffer.trajectories.values()))
        if self.sampled < len(minibatch) <= stored:
            assert len(set(ids[self.sampled :])) == len(ids[self.sampled :])
            assert not set(ids[: self.sampled]) & set(ids[self.sampled :])

    def on_end(self, code: int) -> None:
        """Check the logs, and that no group was lost."""
        config, trainer = self.trainer.config, self.trainer
        rows = tba.read_lines(self.out / "metrics.jsonl")
        rows = [row for row in rows if self.steps and row["step"] >= self.steps[0]["step"]]
        assert len(rows) == len(self.steps) or (code == 1 and len(rows) == len(self.steps) - 1)
        for row, expected in zip(rows, self.steps, strict=False):
            assert {name: row[name] for name in expected} == expected
        if not config.lockstep:
            assert self.received == self.kept | {group.index for group in trainer.inbox}
        records = tba.read_lines(self.out / "eval.jsonl")
        for record in records:
            rows = [self.answers[record["step"], row] for row in range(record["n"])]
            held_out = len(self.task.held_out)
            is_last = record["step"] == config.steps
            assert record["n"] == (held_out if is_last else config.eval_samples or held_out)
            answers = [pair for pairs in rows for pair in pairs]
            expected = np.mean([answer["reward"] for answer, _ in answers])
            assert record["reward"] == pytest.approx(expected)
            texts = {text for _, text in answers}
            assert record["distinct"] == pytest.approx(len(texts) / len(answers))
            for row, pairs in enumerate(rows):
                self.check_answers(record["step"], row, pairs)
        steps = [record["step"] for record in records]
        assert len(steps) == len(set(steps))
        if code == 0:
            every = config.eval_every or config.steps
            due = sorted({0, config.steps, *range(0, config.steps, every)})
            assert config.steps in steps and (steps == due or not config.lockstep)
            assert config.lockstep or trainer.searchers.search_end == 0

    def check_answers(self, version: int, row: int, pairs: list[tuple[dict, str]]) -> None:
        """An evaluation's answers to a prompt are those of its weights, judged by its example."""
        config, task = self.trainer.config, self.task
        n = config.eval_responses
        longest = config.response_limit(task.held_out_prompts[row])
        request = tba.Request(None, None, n, longest, 0, seed=config.seed + row * n)
        for i, (answer, text) in enumerate(pairs):
            tokens, logprobs, ended = response_of(request, i, version)
            assert [text] == task.response_texts([tokens])
            assert answer["reward"] == reward_of(task.held_out[row], text) + 10 * ended
            if task.wants_logprobs:
                kl = float(logprobs.sum()) - answer["ref_logprob"]
                assert answer["kl"] == pytest.approx(kl, abs=1e-4)
                assert answer["tokens"] == len(tokens)

    # ----------------------------------------------------------------------------- a run

    def run(self, turns: float = math.inf, kills: bool = False, **flags: Any) -> int:
        """A new run; after this many turns it is stopped, or killed. Returns the exit code."""
        return self.main(arguments(None, self.out, **self.flags | flags), turns, kills)

    def resume(self, *flags: str) -> int:
        """Resume the run; returns the exit code."""
        return self.main(["--resume", str(self.out), *flags])

    def main(self, args: list[str], turns: float = math.inf, kills: bool = False) -> int:
        self.clear()
        self.turns_left, self.kills = turns, kills
        with pytest.MonkeyPatch.context() as patch:
            self.replace(patch)
            code = tba.main(args)
        self.on_end(code)
        return code

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Replace processes, threads, the broadcast and the clock; have what happens checked."""
        load_model = tba.load_model
        models: dict[str, torch.nn.Module] = {}
        running_searcher = tba.RunningSearcher
        make_groups = tba.Searcher.make_groups
        send = tba.SearcherSpec.send
        save = tba.save
        clock = lambda: self.now

        def load_once(config: tba.Config, *args: Any, **named: Any) -> torch.nn.Module:
            key = str((args, named))
            if key not in models:
                models[key] = load_model(config, *args, **named)
            return copy.deepcopy(models[key])

        @ends_the_run
        def checked_save(trainer: tba.Trainer) -> None:
            # a resumed run would sample a group that is in flight with other weights
            assert not trainer.config.lockstep or self.disturbed or trainer.at_barrier()
            save(trainer)

        def start_searcher(*args: Any) -> tba.RunningSearcher:
            # by default it would take the real time, and so a run would not repeat
            return running_searcher(*args, started=self.now, seen=self.now)

        def load_task(config: tba.Config) -> tba.Task:
            task = copy.copy(self.task)
            task.config = config
            return task

        def checked_groups(searcher: tba.Searcher, completions: list) -> list[tba.Group]:
            groups = make_groups(searcher, completions)
            for done, group in zip(completions, groups, strict=True):
                self.on_group(searcher, done, group)
            return groups

        def checked_send(spec: tba.SearcherSpec, *messages: Any) -> None:
            for message in messages:
                self.on_message(spec, message)
            send(spec, *messages)

        def start(processes: tba.SearcherProcesses) -> None:
            config = processes.config
            nothing = SimpleNamespace(kill=lambda: None)
            processes.manager = SimpleNamespace(
                Queue=Inbox, Barrier=Barrier, _process=nothing, shutdown=lambda: None
            )
            processes.messages = Inbox()
            processes.shared = {"run": pickle.dumps((config, processes.task))}
            timeout = tba.timedelta(seconds=config.transfer_timeout)
            processes.channel = tba.WeightChannel("127.0.0.1", 0, False, timeout)
            processes.receiving = Future()
            processes.start_missing()

        now = SimpleNamespace(monotonic=clock, perf_counter=clock, strftime=str)
        patch.setattr(tba, "time", now)
        patch.setattr(tba, "POLL_SECONDS", 0)
        patch.setattr(tba, "ThreadPoolExecutor", partial(Threads, self))
        patch.setattr(tba, "LocalProcess", partial(Process, self))
        patch.setattr(tba, "RunningSearcher", start_searcher)
        patch.setattr(tba, "Trainer", partial(WorldTrainer, self))
        patch.setattr(tba, "load_task", load_task)
        patch.setattr(tba, "save", checked_save)
        patch.setattr(tba, "load_model", load_once)
        patch.setattr(tba.metadata, "distributions", lambda **_: [])  # reading them takes a second
        patch.setattr(tba.WeightChannel, "broadcast", lambda *args: self.broadcast(*args))
        patch.setattr(tba.SearcherProcesses, "start", start)
        patch.setattr(tba.RunFolder, "draw_curves", lambda folder: None)
        patch.setattr(tba.Searcher, "make_groups", checked_groups)
        patch.setattr(tba.SearcherSpec, "send", checked_send)
        patch.setitem(tba.ENGINES, "scripted", ScriptedEngine)
        patch.setitem(tba.TASKS, "scripted", Scripted)


class WorldTrainer(tba.Trainer):
    """A Trainer whose batches and groups are checked, and that lets others take turns meanwhile."""

    def __init__(self, world: World, *args: Any) -> None:
        self.world = world
        world.trainer = self
        super().__init__(*args)
        config = self.config
        world.sampled = max(1, round(config.recent_probability * config.prompts_per_step))
        world.received = {*range(self.searchers.first_missing), *self.searchers.arrived_positions}
        world.kept = world.received - {group.index for group in self.inbox}
        record = self.searchers.record_arrival

        @ends_the_run
        def record_arrival(index: int) -> bool:
            is_new = record(index)
            assert is_new == (index not in world.received)
            world.received.add(index)
            return is_new

        self.searchers.record_arrival = record_arrival

    def run(self) -> None:
        wait = lambda seconds: self.world.turns(1)
        nothing = lambda: None
        self.searchers.wake_up = SimpleNamespace(wait=wait, set=nothing, clear=nothing)
        super().run()

    @ends_the_run
    def next_batch(self) -> Any:
        """The Trainer waits exactly while too little has come."""
        world, config = self.world, self.config
        batch = super().next_batch()
        enough = len(world.received) * config.searched_per_prompt >= config.initial_trajectories
        least = min(config.prompts_per_step, len(self.task.train_prompts))
        assert self.groups_stored == world.stored_since_reset
        if not config.max_recent_draws:
            assert (batch is not None) == (enough and world.stored_since_reset >= least)
        return batch

    @ends_the_run
    def store(self, group: tba.Group) -> None:
        """Groups that an earlier reference scored are dropped."""
        world, was = self.world, self.groups_stored
        world.now += world.store_seconds
        super().store(group)
        assert group.index not in world.kept
        world.kept.add(group.index)
        usable = group.trajectories[0].reference_version == self.sync.reference_version
        stored = self.buffer.trajectories.get(group.prompt_id, {}).values()
        assert any(t is group.trajectories[-1] for t in stored) == usable
        world.stored_since_reset += usable
        world.dropped += not usable
        assert self.groups_stored == was + usable

    def train_step(self, minibatch: tba.Minibatch) -> None:
        if not self.config.lockstep:
            self.world.turns(self.world.random.randrange(self.world.turns_per_step))
        self.world.now += TURN
        self.world.on_step(minibatch)
        super().train_step(minibatch)
        self.world.checksums[self.step] = checksum(self.learner.weights)

    def reset_reference(self) -> None:
        super().reset_reference()
        self.world.stored_since_reset = 0
