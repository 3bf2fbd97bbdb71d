"""The replay buffer and the paper's rule: frequencies by chi-square, the rest by brute force."""

import io
import itertools
import math
import queue
import tempfile
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import plugin_of_docs
from hypothesis import given, settings
from hypothesis import strategies as st

import tba

# chi-square at p = 0.001, by degrees of freedom
CRITICAL = {1: 10.8, 3: 16.3, 5: 20.5, 11: 31.3, 15: 37.7}


def group(prompt_id, responses, rewards=None, version=0, sync=0):
    """A group whose responses are lists of tokens; it arrived after the sync of this step."""
    trajectories = []
    for i, response in enumerate(responses):
        tokens = np.array(response, np.int32)
        trajectory = tba.Trajectory(
            tokens=tokens,
            logprobs=tokens.astype(np.float32),
            ref_logprobs=np.full(len(tokens), -1.0 - i, np.float32),
            ended=i % 2 == 0,
            temperature=1.0,
            kl=i / 3,
            reward=0.0 if rewards is None else float(np.float32(rewards[i])),
            prompt_id=prompt_id,
            version=version,
            last_version=version,
            reference_version=0,
        )
        trajectories.append(trajectory)
    return tba.Group(0, trajectories, sync)


def rule_of(**flags):
    """An empty buffer with the paper's rule."""
    flags = {"recent_probability": 0.5} | flags
    config = tba.settings(**flags)
    return tba.RecentOrReward(tba.ReplayBuffer(config), config)


def arrive(rule, *groups):
    """Store groups as the Trainer does."""
    for one in groups:
        rule.buffer.add(one)
        rule.on_group(one)


def tokens_of(trajectories):
    return [t.tokens.tolist() for t in trajectories]


def chi_square(counts, expected):
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("m", [0.0, 0.3, 0.95, 1.0])
def test_recent_prompts_are_drawn_with_probability_m(m):
    rule = rule_of(recent_probability=m, max_recent_draws=0)
    arrive(rule, *(group(p, [[p, j] for j in range(4)]) for p in range(200)))
    arrive(rule, group(0, [[0, 9], [0, 8]], sync=1))
    arrive(rule, *(group(p, [[p, j] for j in range(4)], sync=2) for p in range(200, 240)))
    counts = []  # of replayed groups
    replay = rule.replay

    def counted(count, *args):
        counts.append(count)
        return replay(count, *args)

    rule.replay = counted
    drawn = np.zeros(240)
    for _ in range(500):
        groups = rule.sample(8, 2)
        ids = [g[0].prompt_id for g in groups]
        assert len(set(ids)) == 8 and all(len(g) == 2 for g in groups)
        np.add.at(drawn, ids, 1)
    recent = 4000 - sum(counts)
    if m in (0.0, 1.0):
        assert recent == m * 4000
    else:
        expected = [m * 4000, (1 - m) * 4000]
        assert chi_square([recent, 4000 - recent], expected) < CRITICAL[1]
    if m == 1.0:
        assert not drawn[:200].any()
        assert chi_square(drawn[200:], [100] * 40) < 73.4  # 39 degrees of freedom


def test_a_recent_draw_is_the_newest_group_as_it_was_sampled():
    """Seven right answers and one wrong one are trained on as that, and nothing older is."""
    rule = rule_of(recent_probability=1.0)
    arrive(rule, group(7, [[1, i] for i in range(20)], version=1))
    arrive(rule, group(7, [[5]] * 7 + [[6]], version=9))
    (drawn,) = rule.sample(1, 8)
    assert sorted(tokens_of(drawn)) == [[5]] * 7 + [[6]]
    (drawn,) = rule.sample(1, 3)  # the distinct ones first
    assert sorted(tokens_of(drawn)) == [[5], [5], [6]]


def test_groups_of_one_prompt_are_drawn_newest_first_and_not_twice():
    """As in red-teaming, where there is but one prompt."""
    rule = rule_of(recent_probability=1.0)
    arrive(rule, *(group(0, [[i, j] for j in range(4)], version=i) for i in range(6)))
    versions = [[t.version for t in g] for g in rule.sample(4, 4)]
    assert versions == [[5] * 4, [4] * 4, [3] * 4, [2] * 4]
    arrive(rule, group(1, [[9, j] for j in range(4)], version=0))
    first_two = {g[0].prompt_id for g in rule.sample(2, 4)}
    assert first_two == {0, 1}  # each prompt's newest before any second one


def test_groups_from_before_the_latest_sync_follow_only_where_newer_ones_are_too_few():
    rule = rule_of(recent_probability=1.0)
    arrive(rule, *(group(p, [[p]], version=0) for p in range(5)))
    arrive(rule, *(group(p, [[p]], version=2, sync=2) for p in (5, 6)))
    assert {g[0].prompt_id for g in rule.sample(2, 1)} == {5, 6}
    drawn = [g[0].prompt_id for g in rule.sample(7, 1)]
    assert sorted(drawn) == list(range(7))
    arrive(rule, group(7, [[7]], version=3, sync=3))
    assert {g[0].prompt_id for g in rule.sample(3, 1)} == {5, 6, 7}


EVENTS = st.lists(st.sampled_from(["arrive", "arrive", "sync", "sample"]), max_size=60)


@settings(max_examples=60)
@given(EVENTS, st.sampled_from([0.5, 1.0, 1.5, 14 / 9, 4.0, 0.0]), st.integers(1, 4))
def test_no_group_is_drawn_as_recent_more_often_than_the_bound(events, bound, B):
    """And a batch waits exactly while fewer groups than it wants have draws left."""
    rule = rule_of(recent_probability=1.0, max_recent_draws=bound)
    arrivals = 0
    drawn: dict[int, int] = {}
    sync = 0
    for event in events:
        if event == "arrive":
            arrive(rule, group(arrivals, [[arrivals]], sync=sync))
            arrivals += 1
        elif event == "sync":
            sync += 1
        else:
            batch = rule.sample(B, 1)
            # the n-th group's draws: what n + 1 groups may be drawn more often than n
            allowed = [math.floor((n + 1) * bound) - math.floor(n * bound) for n in range(arrivals)]
            left = [n for n in range(arrivals) if not bound or drawn.get(n, 0) < allowed[n]]
            if len(left) < B:
                assert batch is None
                continue
            ids = [g[0].prompt_id for g in batch]
            assert len(set(ids)) == B and set(ids) <= set(left)
            for prompt_id in ids:
                drawn[prompt_id] = drawn.get(prompt_id, 0) + 1
    if bound:
        assert sum(drawn.values()) <= bound * arrivals


def test_only_the_latest_batches_of_groups_are_recent():
    """However many groups arrive between two syncs, those of long ago are only replayed."""
    rule = rule_of(recent_probability=1.0, max_recent_draws=1, prompts_per_step=4)
    arrive(rule, *(group(p, [[p]], version=p) for p in range(1000)))
    versions = []
    while batch := rule.sample(4, 1):
        versions += [t.version for (t,) in batch]
    assert len(versions) <= 10 * 4 and min(versions) >= 1000 - 10 * 4
    assert len(rule.buffer.trajectories) == 1000


def test_prompts_that_a_rule_drops_from_the_buffer_are_no_longer_replayed():
    rule = rule_of(recent_probability=0.0)
    arrive(rule, *(group(p, [[p]]) for p in range(12)))
    rule.sample(4, 1)
    for p in range(0, 12, 2):
        del rule.buffer.trajectories[p]
    drawn = [g[0].prompt_id for _ in range(6) for g in rule.sample(3, 1)]
    assert set(drawn) == set(range(1, 12, 2))


def test_prompts_without_trajectories_are_not_replayed():
    """A rule may have dropped them all."""
    rule = rule_of(recent_probability=0.0)
    arrive(rule, *(group(p, [[p]]) for p in range(4)))
    rule.buffer.trajectories[2].clear()
    drawn = [g[0].prompt_id for _ in range(3) for g in rule.sample(3, 1)]
    assert sorted(drawn) == [0, 0, 0, 1, 1, 1, 3, 3, 3]
    rule.buffer.trajectories.clear()
    with pytest.raises(tba.RunEnded):
        rule.replay(1, 1, set())


def test_replays_of_the_rest_are_not_counted_and_do_not_wait():
    rule = rule_of(recent_probability=0.0, max_recent_draws=1)
    arrive(rule, *(group(p, [[p]]) for p in range(3)))
    for _ in range(20):
        assert len(rule.sample(3, 1)) == 3


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 3.0])
def test_reward_sampling_is_softmax_without_replacement_if_enough_are_stored(inverse_temperature):
    rewards = [0.0, 0.5, 1.0, -0.5]
    buffer = tba.ReplayBuffer(tba.settings(reward_inverse_temperature=inverse_temperature))
    buffer.add(group(0, [[i] for i in range(4)], rewards))
    weights = np.exp(inverse_temperature * np.array(rewards))
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    n = 12_000
    for _ in range(n):
        counts[tuple(int(t.tokens[0]) for t in buffer.draw(0, 2))] += 1
    expected = []
    for i, j in counts:
        first = weights[i] / weights.sum()
        expected.append(n * first * weights[j] / (weights.sum() - weights[i]))
    assert chi_square(counts.values(), expected) < CRITICAL[11]
    counts = dict.fromkeys(itertools.product(range(4), repeat=2), 0)
    for _ in range(n):
        counts[tuple(int(t.tokens[0]) for t in buffer.draw(0, 6)[:2])] += 1
    # with replacement: independent draws
    expected = [n * weights[i] * weights[j] / weights.sum() ** 2 for i, j in counts]
    assert chi_square(counts.values(), expected) < CRITICAL[15]
    buffer.add(group(1, [[i] for i in range(4)], [1e6, -1e6, 0.0, 1e6]))
    assert len(buffer.draw(1, 3)) == 3


@pytest.fixture(scope="module")
def anchored():
    """The rule that is a plug-in of docs/hacking.md."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "REPLAY_RULES", tba.REPLAY_RULES.copy())
        exec(plugin_of_docs("--replay_rule anchored"), {})
        return tba.REPLAY_RULES["anchored"]


@settings(max_examples=60, deadline=None)
@given(stored=st.integers(1, 40), K=st.integers(2, 9), seed=st.integers(0, 99))
def test_anchored_replay_is_half_by_reward_and_half_of_the_newest(anchored, stored, K, seed):
    """Responses 0, 1, ... arrive in this order; only the first half of them earns a reward."""
    config = tba.settings(
        recent_probability=0, reward_inverse_temperature=1000, seed=seed, kept_per_prompt=100
    )
    rule = anchored(tba.ReplayBuffer(config), config)
    for i in range(stored):
        arrive(rule, group(0, [[i]], [float(i < stored / 2)]))
    (drawn,) = rule.sample(1, K)
    assert len(drawn) == K
    by_reward = [t.tokens[0] for t in drawn[: K // 2]]
    newest = [t.tokens[0] for t in drawn[K // 2 :]]
    rewarded = math.ceil(stored / 2)
    if rewarded >= K // 2:  # without replacement, and successes only
        assert len(set(by_reward)) == K // 2 and max(by_reward) < rewarded
    rest = [i for i in reversed(range(stored)) if i not in by_reward]
    if rest:
        assert set(newest) <= set(rest[: 2 * len(newest)])
        assert len(set(newest)) == min(len(newest), len(rest))  # repeated only if too few
    else:
        assert set(newest) <= set(by_reward)


def test_prompts_are_replayed_without_replacement_over_an_epoch():
    rule = rule_of(recent_probability=0.0)
    arrive(rule, *(group(p, [[p, j] for j in range(3)]) for p in range(12)))
    for _ in range(3):  # epochs
        drawn = [g[0].prompt_id for _ in range(4) for g in rule.sample(3, 2)]
        assert sorted(drawn) == list(range(12))
    assert len(rule.sample(20, 2)) == 20  # more than there are: they repeat
    many = rule.sample(1, 8)[0]
    assert len({t.tokens.tobytes() for t in many}) == 3  # all of them, and repeats


@given(st.integers(2, 9), st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(0, 99))
def test_no_prompt_is_replayed_twice_in_a_batch_where_an_epoch_ends(prompts, sizes, seed):
    """Unless a batch wants more prompts than there are; and none falls behind the others."""
    rule = rule_of(recent_probability=0.0, seed=seed)
    arrive(rule, *(group(p, [[p]]) for p in range(prompts)))
    counts = np.zeros(prompts, int)
    for size in sizes:
        drawn = [g[0].prompt_id for g in rule.sample(size, 1)]
        np.add.at(counts, drawn, 1)
        assert len(drawn) == size
        if size <= prompts:
            assert len(set(drawn)) == size
            assert counts.max() - counts.min() <= 2
        else:
            counts[:] = 0  # repeats may be of any prompt


RESPONSES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=6)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), RESPONSES), max_size=12), st.integers(1, 5))
def test_duplicates_and_eviction_against_brute_force(groups, kept):
    buffer = tba.ReplayBuffer(tba.settings(kept_per_prompt=kept))
    expected = {0: [], 1: []}
    for version, (prompt_id, responses) in enumerate(groups):
        buffer.add(group(prompt_id, responses, version=version))
        for response in responses:
            stored = [pair for pair in expected[prompt_id] if pair[0] != response]
            expected[prompt_id] = [*stored, (response, version)]
        expected[prompt_id] = expected[prompt_id][-kept:]
    for prompt_id in (0, 1):
        stored = buffer.trajectories.get(prompt_id, {}).values()
        assert [(t.tokens.tolist(), t.version) for t in stored] == expected[prompt_id]


def test_a_restored_buffer_and_rule_go_on_as_the_first(tmp_path):
    flags = {"recent_probability": 0.0, "reward_inverse_temperature": 1.0, "seed": 3}
    first = rule_of(**flags)
    arrive(first, *(group(p, [[p, j] for j in range(5)], [0, 1, 2, 3, 4]) for p in range(9)))
    first.replay(4, 3, set())
    saved = {"buffer": first.buffer.state(), "rule": first.state()}
    epoch = list(first.epoch)
    rows = saved["buffer"].pop("trajectories")
    arrive(first, group(0, [[0, 9]]))  # what comes before the thread writes is not saved
    first.epoch.append(-1)
    tba.write_trajectories(rows, tmp_path / "rows")
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    saved["buffer"]["trajectories"] = tba.read_trajectories(tmp_path / "rows")
    assert saved["rule"]["epoch"] == epoch and len(saved["buffer"]["trajectories"]) == 45
    del first.epoch[-1], first.buffer.trajectories[0][np.array([0, 9], np.int32).tobytes()]
    second = rule_of(**flags)
    second.buffer.load_state(saved["buffer"])
    second.load_state(saved["rule"])
    for _ in range(5):
        pairs = zip(first.replay(4, 3, set()), second.replay(4, 3, set()), strict=True)
        assert all(tokens_of(a) == tokens_of(b) for a, b in pairs)
    for one, other in zip(
        first.buffer.trajectories[3].values(), second.buffer.trajectories[3].values(), strict=True
    ):
        for name in tba.Trajectory.__slots__:
            assert np.array_equal(getattr(one, name), getattr(other, name))
    others = rule_of(**(flags | {"seed": 4}))
    others.buffer.load_state(saved["buffer"] | {"rng": others.buffer.state()["rng"]})
    assert any(
        tokens_of(a) != tokens_of(b)
        for a, b in zip(first.replay(4, 3, set()), others.replay(4, 3, set()), strict=True)
    )


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=9), max_size=40), st.integers(1, 9))
def test_trajectories_are_read_as_they_were_written(responses, piece):
    """Any number, of any lengths, over several pieces."""
    rows = group(3, responses, rewards=range(len(responses)), version=7).trajectories
    for i, t in enumerate(rows):
        t.temperature = 1 if i == 0 else 0.7  # as a plug-in may return it
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "PIECE", piece)
        tba.write_trajectories(rows, Path(folder, "rows"))
        found = tba.read_trajectories(Path(folder, "rows"))
    assert len(found) == len(rows)
    for one, other in zip(rows, found, strict=True):
        for name in tba.Trajectory.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert np.array_equal(a, b) and (type(a) is type(b) or name == "temperature")
            if name in tba.Trajectory.TOKEN_FIELDS:
                assert a.dtype == b.dtype and b.base is None


def test_a_checkpoint_copies_references_in_the_training_thread_and_writes_in_pieces(tmp_path):
    """Microseconds per trajectory, of which tensors cost ten; and a few MiB."""
    buffer = tba.ReplayBuffer(tba.settings())
    for p in range(300):
        buffer.add(group(p, [[p, j, *[7] * 300] for j in range(100)]))
    times = []
    for _ in range(5):
        start = time.thread_time()
        rows = buffer.state()["trajectories"]
        times.append(time.thread_time() - start)
    assert len(rows) == 30_000 and min(times) < 1e-6 * len(rows)
    tracemalloc.start()
    tba.write_trajectories(rows, tmp_path / "rows")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "rows").stat().st_size > 30_000 * 3600 > 10 * peak


def edit_distance(a, b):
    """Levenshtein's, by his table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


# with few different tokens many attacks resemble each other; all tokens must be told apart
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
TOKENS |= st.lists(st.integers(0, 200_000), min_size=1, max_size=5)
ATTACKS = st.lists(st.tuples(TOKENS, st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(ATTACKS, st.sampled_from([0.0, 0.25, 0.5]), st.integers(2, 6), st.integers(1, 4))
def test_attacks_that_resemble_others_and_the_worst_ones_go(attacks, share, kept, per_group):
    config = tba.settings(
        near_duplicate=share, kept_per_prompt=kept, evict="lowest_reward", trained_per_prompt=2
    )
    buffer = tba.AttackBuffer(config)
    expected = []  # (tokens, reward), oldest first
    for i in range(0, len(attacks), per_group):
        part = attacks[i : i + per_group]
        buffer.add(group(0, [tokens for tokens, _ in part], [reward for _, reward in part]))
        for tokens, reward in part:
            shares = []
            for other, _ in expected:
                length = len(other) + len(tokens)
                equal = -1.0 if other == tokens else edit_distance(other, tokens) / length
                shares.append(equal if equal < share or equal < 0 else math.inf)
            nearest = int(np.argmin(shares)) if expected and min(shares) < math.inf else None
            if nearest is not None:
                if shares[nearest] < 0 or expected[nearest][1] > reward:
                    continue  # equal, or better
                del expected[nearest]
            expected.append((tokens, reward))
        while len(expected) > kept:
            worst = min(reward for _, reward in expected)
            del expected[[reward for _, reward in expected].index(worst)]
    stored = buffer.trajectories[0].values()
    assert [(t.tokens.tolist(), t.reward) for t in stored] == expected


@pytest.mark.parametrize(
    ("one", "other", "share", "near"),
    [
        ("aaaaaaaaaa", "aaaaaabbbb", 0.25, True),  # 4 edits of 20 tokens
        ("aaaaaaaaaa", "aaaaabbbbb", 0.25, False),  # 5 of 20 are not less than a quarter
        ("aaaaaaaa", "aaaa", 0.4, True),  # 4 of 12
        ("aaaa", "aaaaaaaa", 0.4, True),
        ("aaaaaaaa", "aaaa", 0.3, False),
        ("a", "b", 0.5, False),  # 1 of 2
        ("a", "b", 0.6, True),
        ("a", "ab", 0.3, False),  # 1 of 3
        ("a", "ab", 0.35, True),
        ("a", "a", 0.0, True),
    ],
)
def test_near_duplicates_are_told_by_edits_over_the_sum_of_lengths(one, other, share, near):
    buffer = tba.AttackBuffer(tba.settings(near_duplicate=share, kept_per_prompt=9))
    for attack in (one, other):
        buffer.add(group(0, [["ab".index(letter) for letter in attack]]))
    assert len(buffer.trajectories[0]) == (1 if near else 2)


def test_a_frozen_buffer_of_attacks_takes_in_new_ones_but_does_not_grow():
    buffer = tba.AttackBuffer(tba.settings(kept_per_prompt=100, freeze_buffer_at=5))
    buffer.add(group(1, [[9]]))
    for step in range(12):
        buffer.add(group(0, [[step, j] for j in range(4)], version=step))
        if step > 4:
            buffer.add(group(1, [[step, j] for j in range(4)], version=step))
    assert sorted({t.version for t in buffer.trajectories[0].values()}) == [7, 8, 9, 10, 11]
    assert [t.version for t in buffer.trajectories[1].values()] == [11]  # each prompt's own size
    total = tba.AttackBuffer(tba.settings(evict="lowest_total", kept_per_prompt=2, beta="0.5"))
    total.add(group(0, [[1], [2], [3]], [0.0, 0.4, 1.0]))  # log pi_ref -1, -2, -3
    # totals -1 + 0, -2 + 0.8, -3 + 2
    assert sorted(t.tokens[0] for t in total.trajectories[0].values()) == [1, 3]


def test_a_buffer_freezes_once_it_has_attacks():
    buffer = tba.AttackBuffer(tba.settings(kept_per_prompt=100, freeze_buffer_at=1))
    buffer.add(group(0, [[j] for j in range(4)], version=3))
    buffer.add(group(0, [[9, j] for j in range(4)], version=3))
    assert len(buffer.trajectories[0]) == 4


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)), st.integers(0, 12))
def test_each_position_arrives_once_in_whatever_order(order, again, arriving):
    """Positions arrive in any order, some of them again from a process that was restarted.

    A process that is started meanwhile begins at the first of its positions that has not arrived.
    """
    processes = tba.SearcherProcesses(
        tba.settings(num_searchers=3), None, SimpleNamespace(say=print, code="")
    )
    processes.manager = SimpleNamespace(Queue=queue.Queue)
    processes.messages = processes.channel = processes.shared = None
    arrived = set()
    for index in order[:arriving]:
        arrived.add(index)
        assert processes.record_arrival(index)
        for repeated in set(again) & arrived:
            assert not processes.record_arrival(repeated)
        missing = next(p for p in range(100) if p not in arrived)
        assert processes.first_missing == missing
        assert processes.arrived_positions == {p for p in arrived if p > missing}
        for position in range(missing + 3):  # all before it of its Searcher have arrived
            assert set(range(position % 3, position, 3)) <= arrived
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "LocalProcess", lambda spec, code: None)
        for searcher in range(3):
            spec = processes.start_searcher(searcher).spec
            searched = set(range(spec.first, 30, 3)) - spec.arrived_positions
            assert searched == set(range(searcher, 30, 3)) - arrived
