"""Whole runs in one process, turn by turn, against what each step should have (tests/world.py)."""

import math
import random

import numpy as np
import pytest
import tiny
import torch
from harness import config_and_task
from world import SCHEDULES, TURN, Killed, Scripted, World, checksum

import tba


@pytest.fixture(scope="module")
def small(gsm8k, tmp_path_factory):
    """The folder of a model of 16 dimensions, and a task with seven prompts."""
    folder = tmp_path_factory.mktemp("small")
    tiny.make_llama(16, 1, gsm8k, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tba.TASKS, "scripted", Scripted)
        flags = {"task": "scripted", "model": folder, "max_response_tokens": 6}
        config, task = config_and_task(gsm8k, folder / "none", **flags)
    task.train, task.held_out = task.train[:7], task.held_out[:5]
    for name, count in (("train_prompts", 7), ("held_out_prompts", 5)):
        prompts = getattr(task, name)[:count]
        setattr(task, name, [prompt[: 7 + 2 * (i % 3)] for i, prompt in enumerate(prompts)])
    task.longest = 11 + 6
    model = tba.load_model(config, str(folder), torch.float32, torch.device("cpu"))
    return folder, task, checksum(tba.checkpoint_state(model))


@pytest.fixture
def world_of(small, tmp_path):
    """Function: a world whose run has random flags, other than these.

    Its turns come in another order for another `order`. If the seed is odd, three of the seven
    prompts have a demonstration.
    """

    def make(seed, faults=(), order=0, **flags):
        _, task, initial = small
        demonstration = np.array([5, 3 + seed, 0], np.int32)
        task.demonstration_tokens = [[demonstration] * (seed % 2 and i % 2) for i in range(7)]
        task.wants_logprobs = seed % 3 != 1
        task.reward_threads = 1 + seed % 2
        flags = settings_of(small, seed) | flags
        world = World(seed + 100 * order, task, tmp_path / f"run{order}", flags, faults)
        world.checksums[0] = initial
        return world

    return make


def settings_of(small, seed):
    """Random flags of a run."""
    rng = np.random.default_rng([seed, 5])
    draw = lambda options: options[rng.integers(len(options))]
    folder, *_ = small
    return SCHEDULES | {
        "task": "scripted", "engine": "scripted", "model": folder, "dataset": "none",
        "max_response_tokens": 6, "steps": 8, "prompts_per_step": draw([2, 4]),
        "trained_per_prompt": 3, "searched_per_prompt": draw([3, 4]), "seed": seed,
        "num_searchers": draw([1, 2, 3]), "sequences_in_flight": draw([2, 9, 60]),
        "eval_every": draw([0, 2, 3]), "eval_responses": draw([1, 2]), "save_every": draw([0, 3]),
        "eval_samples": draw([0, 3]), "temperature": 0.7,
        "reset_reference_every": draw([0, 3]), "max_total_tokens": draw([0, 12]),
        "transfer_timeout": 9, "searcher_timeout": 30, "max_restarts": 1000,
        "logprob_tolerance": 1e-4,
    }  # fmt: skip


LOCKSTEP = [  # lag, m, E
    (0, 1.0, 1), (2, 1.0, 1), (3, 1.0, 2), (0, 0.5, 2), (2, 0.5, 1), (0, 1.0, 3), (1, 0.5, 3)
]  # fmt: skip


def outcome(out):
    """What must be equal in two lockstep runs."""
    keys = "step reward loss kl grad_norm staleness_mean response_length entropy log_z".split()
    rows = tba.read_lines(out / "metrics.jsonl")
    evaluations = tba.read_lines(out / "eval.jsonl")
    weights = tba.safe_open(out / "final" / "model.safetensors", "pt")
    weights = {name: weights.get_tensor(name).numpy().tobytes() for name in [*weights.keys()]}
    return [{key: row.get(key) for key in keys} for row in rows], evaluations, weights


def test_epochs_have_all_prompts_in_orders_of_their_own():
    orders = [tba.epoch_order(seed, epoch, 9).tolist() for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == [*range(9)] for order in orders)
    assert len(set(map(tuple, orders))) == 9


@pytest.mark.parametrize("seed", range(5))
def test_an_asynchronous_run_uses_all_that_arrives(world_of, seed):
    """Stopped at random, and resumed."""
    draw = random.Random(seed).choice
    flags = {"recent_probability": draw([0.0, 0.5, 1.0]), "sync_every": 2}
    flags |= {"max_recent_draws": draw([0, 1.5]), "initial_trajectories": draw([0, 40])}
    world = world_of(seed, **flags)
    code = world.run(turns=draw([100, 200]))
    assert code in (0, 143)
    before = world.received
    if code and tba.checkpoints(world.out):
        assert world.resume() == 0
        assert before <= world.received


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_faults_of_searchers_cost_neither_groups_nor_evaluations(world_of, seed, lockstep):
    world = world_of(seed, ["die", "miss", "hangs", "die", "miss"], lockstep=lockstep)
    assert world.run(initial_trajectories=0, max_recent_draws=1, steps=12) == 0
    assert not world.faults
    for s in world.trainer.searchers.running:  # the run may end while one still loads, or hangs
        assert s.version == world.trainer.sync.version or s.state != "ready" or s.transfer


def test_wrong_weights_end_the_run_which_is_saved(world_of, capsys):
    world = world_of(0, ["corrupt"])
    assert world.run(steps=100, num_searchers=2) == 1
    assert "--logprob_tolerance" in capsys.readouterr().err
    assert saved_by(world)[0] == f"checkpoint-{world.trainer.step}"


def saved_by(world):
    """Names of a run's checkpoints, the newest first."""
    return [path.name for path in tba.checkpoints(world.out)]


def broken(batch, config):
    """TB that is not finite at step 3, and raises at step 6."""
    if batch.step == 6:
        raise ArithmeticError("step 6")
    result = tba.tb(batch, config)
    return tba.Loss(result.loss * (math.nan if batch.step == 3 else 1))


@pytest.mark.parametrize("lockstep", [False, True])
def test_what_a_run_saves_after_a_skipped_step_and_an_exception(
    world_of, capsys, monkeypatch, lockstep
):
    """A lockstep run could not repeat the unfinished step exactly."""
    monkeypatch.setitem(tba.OBJECTIVES, "broken", broken)
    world = world_of(1, objective="broken", lockstep=lockstep)
    assert world.run(steps=10, save_every=4) == 1
    said = capsys.readouterr().err
    assert "step 4: loss or gradient not finite" in said and "ArithmeticError: step 6" in said
    assert world.checksums[4] == world.checksums[3] != world.checksums[2]
    assert saved_by(world) == ["checkpoint-6"] * (not lockstep) + ["checkpoint-4"]
    world.disturbed = True
    assert world.resume("--steps", "7", "--objective", "tb") == 0


def test_a_checkpoint_that_cannot_be_written_ends_the_run_which_tries_again(
    world_of, capsys, monkeypatch
):
    """The disk is full once; the run may try again at this very step."""
    written, save_model = [], tba.save_model

    def full(*args):
        written.append(args)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        save_model(*args)

    monkeypatch.setattr(tba, "save_model", full)
    world = world_of(2)
    assert world.run(steps=1000, save_every=2) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
    assert saved_by(world) == [f"checkpoint-{world.trainer.step}", "checkpoint-2"]


def test_a_slow_write_of_a_checkpoint_is_waited_for_with_a_notice(world_of, capsys):
    world = world_of(3)
    world.blocked = {"write"}
    assert world.run(turns=400, steps=1000, save_every=2) == 143
    assert "step 4: waiting for the previous checkpoint" in capsys.readouterr().err
    assert saved_by(world) == ["checkpoint-4", "checkpoint-2"]


def test_decoding_and_weights_do_not_wait_for_rewards_or_verdicts(world_of):
    flags = {"num_searchers": 1, "sequences_in_flight": 12, "searched_per_prompt": 4}
    world = world_of(4, steps=20, eval_every=4, sync_every=1, **flags)
    world.blocked = {"checked_rewards", "evaluate"}
    decoded = []

    def turns(count):
        if world.turn > 300 and "checked_rewards" in world.blocked:
            # no more than the ones that wait for rewards, and those that were being decoded
            decoded.append(sum(p.searcher.scoring.unscored for p in world.processes))
            assert 2 * 12 < decoded[-1] <= 2 * 12 + 2 * 12 and world.trainer.step == 0
            world.blocked = {"evaluate"}
        late = world.trainer.step == 20 and world.trainer.sync.version >= 16
        if late and world.blocked:
            assert not (world.out / "eval.jsonl").exists()
            world.blocked = set()
        World.turns(world, count)

    world.turns = turns
    assert world.run() == 0
    assert decoded and not world.blocked


def test_in_lockstep_prompts_are_submitted_whether_or_not_rewards_are_there(world_of):
    """So the order in which the engine gets them does not depend on how long rewards take."""
    flags = {"lockstep": True, "lag": 3, "num_searchers": 1, "sequences_in_flight": 2}
    world = world_of(4, prompts_per_step=4, reset_reference_every=0, **flags)
    world.blocked = {"checked_rewards"}

    def turns(count):
        if world.blocked and world.turn > 600:
            (process,) = world.processes
            assert process.last_index == 4 * 4 - 1 and world.trainer.step == 0
            world.blocked = set()
        World.turns(world, count)

    world.turns = turns
    assert world.run() == 0
    assert not world.blocked


def test_slow_storing_does_not_make_data_ever_staler(world_of):
    """As with a large buffer of attacks: more groups come than can be stored."""
    flags = {"recent_probability": 1, "initial_trajectories": 0, "num_searchers": 1}
    flags |= {"prompts_per_step": 2, "reset_reference_every": 0, "sequences_in_flight": 6}
    world = world_of(5, **flags)
    world.store_seconds, world.turns_per_step = 5 * TURN, 60
    assert world.run(steps=40, eval_every=0) == 0
    staleness = [m["staleness_mean"] for m in tba.read_lines(world.out / "metrics.jsonl")]
    assert max(staleness[-10:]) < 20, staleness


def test_a_reward_that_raises_ends_the_run_with_its_traceback(world_of, capsys, monkeypatch):
    def fails(*_):
        raise ArithmeticError("a judge that fails")

    monkeypatch.setattr(Scripted, "rewards", fails)
    assert world_of(6).run() == 1
    said = capsys.readouterr().err
    assert "ArithmeticError: a judge that fails" in said and "in fails" in said
    assert "before its first group" in said


@pytest.mark.parametrize("seed", range(7))
def test_lockstep_trains_on_what_was_sampled_for_the_step_and_repeats_exactly(world_of, seed):
    """Whatever the order of turns; whether it was stopped, killed or neither."""
    lag, m, E = LOCKSTEP[seed]
    flags = {"lockstep": True, "lag": lag, "recent_probability": m, "updates_per_batch": E}
    if (lag or E > 1) and m < 1:
        flags["reset_reference_every"] = 0
    whole = world_of(seed, **flags)
    assert whole.run() == 0
    for kills in (False, True):
        world = world_of(seed, order=1 + kills, **flags)
        code = None
        try:
            turns = random.Random(seed).randrange(60, 200)
            code = world.run(turns=turns, kills=kills, save_every=2)
        except Killed:
            world.disturbed = True
        if code != 0 and (world.out / "metrics.jsonl").exists() and saved_by(world):
            assert world.resume() == 0
            assert outcome(world.out) == outcome(whole.out)


def test_lockstep_that_ended_goes_on_as_if_it_had_been_given_more_steps(world_of):
    """When it ends, places of the batches to come have not been begun yet."""
    flags = {"lockstep": True, "lag": 2, "recent_probability": 1.0, "eval_every": 3}
    whole, world = (world_of(1, order=i, eval_samples=0, **flags) for i in (0, 2))
    assert whole.run(steps=6) == 0
    assert world.run(steps=3) == 0
    assert world.resume("--steps", "6") == 0
    assert outcome(world.out) == outcome(whole.out)
