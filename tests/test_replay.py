"""The replay buffer and the paper's rule: frequencies by chi-square, the rest by brute force."""

import gc
import itertools
import math
import queue
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness import trajectory
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rapidfuzz.distance.Levenshtein import distance

import tba

# chi-square at p = 0.001, by degrees of freedom
CRITICAL = {2: 13.8, 3: 16.3, 11: 31.3, 15: 37.7, 39: 73.4}


def group(prompt_id, responses, rewards=None, version=0, sync=0):
    """A group whose responses are lists of tokens; it arrived after the sync of this step."""
    trajectories = [
        trajectory(
            response,
            logprobs=np.array(response, np.float32),
            ref_logprobs=np.full(len(response), -1.0 - i, np.float32),
            ended=i % 2 == 0,
            kl=i / 3,
            reward=0.0 if rewards is None else float(np.float32(rewards[i])),
            prompt_id=prompt_id,
            version=version,
        )
        for i, response in enumerate(responses)
    ]
    return tba.Group(0, trajectories, sync)


def rule_of(name="recent_or_reward", **flags):
    """A rule with an empty buffer."""
    config = tba.settings(**{"recent_probability": 0.5} | flags)
    return tba.REPLAY_RULES[name](tba.ReplayBuffer(config), config)


def arrive(rule, *groups):
    """Store groups as the Trainer does."""
    for one in groups:
        rule.buffer.add(one)
        rule.on_group(one)


def assert_frequencies(counts, expected):
    """Counts agree with what is expected of them, by chi-square."""
    square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert square < CRITICAL[len(expected) - 1]


@pytest.mark.parametrize("m", [0.3, 1.0])
def test_each_group_of_a_batch_is_recent_with_probability_m(m):
    """Independently: their number is binomial. A batch has different prompts, and random ones of
    the recent groups and of their responses.
    """
    rule = rule_of(recent_probability=m, max_recent_draws=0)
    arrive(rule, *(group(p, [[p, j] for j in range(4)], sync=2 * (p >= 200)) for p in range(240)))
    counts, drawn = [0] * 4, [0] * 40
    pairs = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(1000):
        rule.epoch = list(range(200))  # so that only older prompts are replayed
        groups = rule.sample(3, 2)
        recent = [g for g in groups if g[0].prompt_id >= 200]
        assert len({g[0].prompt_id for g in groups}) == 3 and all(len(g) == 2 for g in groups)
        counts[len(recent)] += 1
        for g in recent:
            drawn[g[0].prompt_id - 200] += 1
            pairs[tuple(int(t.tokens[1]) for t in g)] += 1
    expected = [1000 * math.comb(3, r) * m**r * (1 - m) ** (3 - r) for r in range(4)]
    if m == 1:
        assert counts == expected
        assert_frequencies(drawn, [75] * 40)
        assert_frequencies(pairs.values(), [250] * 12)
    else:
        assert_frequencies(counts, expected)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 8))
def test_a_recent_draw_has_the_groups_distinct_responses_first(responses, K):
    """Each as often as it was sampled at most, and none from other groups of the prompt."""
    rule = rule_of(recent_probability=1.0)
    arrive(rule, group(7, [[1, i] for i in range(20)]))
    newest = group(7, [[r] for r in responses])
    arrive(rule, newest)
    (drawn,) = rule.sample(1, K)
    assert len(drawn) == len({*map(id, drawn)}) == min(K, len(responses))
    assert {*map(id, drawn)} <= {*map(id, newest.trajectories)}
    assert len({t.tokens[0] for t in drawn}) == min(K, len(set(responses)))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_recent_groups_come_by_sync_and_then_each_prompts_newest_first(arrivals):
    """Within a sync, every prompt's newest group comes before any prompt's second newest."""
    rule = rule_of(recent_probability=1.0)
    sync, expected = 0, []
    for i, (prompt_id, synced) in enumerate(arrivals):
        sync += synced
        arrive(rule, group(prompt_id, [[i]], sync=sync))
        for place in expected:
            place["newer"] += (place["sync"], place["prompt"]) == (sync, prompt_id)
        expected.append({"sync": sync, "prompt": prompt_id, "newer": 0})
    order = [t.tokens[0] for (t,) in rule.sample(len(arrivals), 1)]
    assert sorted(order) == [*range(len(arrivals))]
    places = [(-expected[i]["sync"], expected[i]["newer"]) for i in order]
    assert places == sorted(places)


def test_recent_groups_of_an_earlier_sync_come_in_random_order_whatever_is_newer():
    """Prompt 0 has a group of each sync, prompts 1 and 2 of the earlier one."""
    rule = rule_of(recent_probability=1.0, max_recent_draws=0)
    arrive(rule, *(group(p, [[p]]) for p in range(3)), group(0, [[9]], sync=1))
    drawn = [[int(t.tokens[0]) for (t,) in rule.sample(2, 1)] for _ in range(900)]
    assert {first for first, _ in drawn} == {9}
    assert_frequencies([sum(p == second for _, second in drawn) for p in range(3)], [300] * 3)


EVENTS = st.sampled_from(["arrive"] * 5 + ["sync", "sample"])
EVENTS = st.lists(EVENTS, max_size=60) | st.lists(EVENTS, min_size=60, max_size=90)


@settings(max_examples=100)
@given(EVENTS, st.sampled_from([0.5, 1.0, 1.5, 14 / 9, 4.0, 0.0]), st.integers(1, 4))
def test_no_group_is_drawn_as_recent_more_often_than_the_bound(events, bound, B):
    """A batch waits exactly while fewer groups than it wants have draws left. However many arrive
    between two syncs, only those of the latest eight batches are recent.
    """
    rule = rule_of(recent_probability=1.0, max_recent_draws=bound, prompts_per_step=B)
    arrivals, sync = 0, 0
    left: dict[int, float] = {}  # the recent groups' draws, oldest first
    for event in events:
        if event == "arrive":
            arrive(rule, group(arrivals, [[arrivals]], sync=sync))
            n, arrivals = arrivals, arrivals + 1
            # what n + 1 groups may be drawn more often than n
            draws = math.floor((n + 1) * bound) - math.floor(n * bound) if bound else math.inf
            left = {n: count for n, count in (left | {n: draws}).items() if count}
            left = dict([*left.items()][-8 * B :])
        elif event == "sync":
            sync += 1
        else:
            batch = rule.sample(B, 1)
            assert (batch is None) == (len(left) < B)
            ids = {g[0].prompt_id for g in batch or ()}
            assert batch is None or (len(ids) == B and ids <= set(left))
            left = {n: count - (n in ids) for n, count in left.items() if count > (n in ids)}
    assert len(rule.buffer.trajectories) == arrivals


def test_waiting_for_recent_groups_does_not_lower_their_share():
    """How many a batch wants is drawn once, not at every poll."""
    for seed in range(20):
        rule = rule_of(recent_probability=0.5, max_recent_draws=1, prompts_per_step=4, seed=seed)
        arrive(rule, *(group(p, [[p]]) for p in range(40)))
        while rule.sample(4, 1):
            pass
        assert not any(rule.sample(4, 1) for _ in range(100))
        arrive(rule, *(group(p, [[p]]) for p in range(4)))
        assert len(rule.sample(4, 1)) == 4


def test_prompts_that_a_rule_drops_from_the_buffer_are_no_longer_replayed():
    """Or of which it drops all trajectories; and replay does not count as recent draws."""
    rule = rule_of(recent_probability=0.0, max_recent_draws=1)
    arrive(rule, *(group(p, [[p]]) for p in range(12)))
    rule.sample(4, 1)
    for p in range(0, 12, 4):
        del rule.buffer.trajectories[p]
        rule.buffer.trajectories[p + 2].clear()
    assert {g[0].prompt_id for _ in range(6) for g in rule.sample(3, 1)} == {*range(1, 12, 2)}
    rule.buffer.trajectories.clear()
    with pytest.raises(tba.RunEnded):
        rule.replay(1, 1, set())


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_reward_sampling_is_softmax_without_replacement_if_enough_are_stored(scale):
    rewards = [0.0, 0.5, 1.0, -0.5]
    buffer = tba.ReplayBuffer(tba.settings(reward_inverse_temperature=scale))
    buffer.add(group(0, [[i] for i in range(4)], rewards))
    p = np.exp(scale * np.array(rewards))
    p /= p.sum()
    n = 6_000
    pairs = [*itertools.product(range(4), repeat=2)]
    for K in (2, 6):
        drawn = [tuple(int(t.tokens[0]) for t in buffer.draw(0, K)[:2]) for _ in range(n)]
        left = lambda i: 1 if K == 6 else 1 - p[i]  # noqa: B023
        expected = {(i, j): n * p[i] * p[j] / left(i) for i, j in pairs if i != j or K == 6}
        assert set(drawn) <= set(expected)
        assert_frequencies([drawn.count(pair) for pair in expected], expected.values())
    buffer.add(group(1, [[i] for i in range(4)], [1e6, -1e6, 0.0, 1e6]))
    for K in (3, 4):
        assert len({int(t.tokens[0]) for t in buffer.draw(1, K)}) == K


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 99),
)
def test_prompts_are_replayed_in_epochs(prompts, sizes, m, seed):
    """Whatever the batches: each holds every prompt equally often, also if some groups are recent;
    and none falls behind.
    """
    rule = rule_of(recent_probability=m, max_recent_draws=0, seed=seed)
    arrive(rule, *(group(p, [[p]]) for p in range(prompts)))
    counts = np.zeros(prompts, int)
    for size in sizes:
        if (batch := rule.sample(size, 1)) is None:
            break  # more recent groups are wanted than there are
        drawn = np.bincount([g[0].prompt_id for g in batch], minlength=prompts)
        assert drawn.sum() == size and drawn.max() - drawn.min() <= 1
        # repeats and recent ones may be of any prompt
        counts = 0 * counts if size > prompts or m else counts + drawn
        assert counts.max() - counts.min() <= 2


def test_an_epoch_has_each_prompt_once_in_random_order():
    rule = rule_of(recent_probability=0.0)
    arrive(rule, *(group(p, [[p]]) for p in range(12)))
    epochs = [[g[0].prompt_id for _ in range(4) for g in rule.sample(3, 2)] for _ in range(600)]
    assert all(sorted(drawn) == [*range(12)] for drawn in epochs)
    firsts = [drawn[0] for drawn in epochs]
    assert_frequencies([firsts.count(p) for p in range(12)], [50] * 12)


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


def test_a_restored_buffer_and_rule_go_on_as_the_first():
    """From what their state was when it was taken, though it is written later."""
    flags = {"recent_probability": 0.0, "reward_inverse_temperature": 1.0}
    first, same, second = (rule_of(**flags, seed=seed) for seed in (3, 3, 4))
    for rule in (first, same):
        arrive(rule, *(group(p, [[p, j] for j in range(5)], range(5)) for p in range(9)))
        rule.replay(4, 3, set())
    of_buffer, of_rule = first.buffer.state(), first.state()
    arrive(first, group(0, [[0, 9]]))
    first.epoch.append(-1)
    first.replay(4, 3, set())
    second.buffer.load_state(of_buffer)
    second.load_state(of_rule)
    for _ in range(5):
        groups = [rule.replay(4, 3, set()) for rule in (same, second)]
        tokens = [[t.tokens.tolist() for g in drawn for t in g] for drawn in groups]
        assert tokens[0] == tokens[1]
    for names in ([], ["epoch", "more"]):
        with pytest.raises(tba.InputError):
            second.load_state(dict.fromkeys(names))


@settings(max_examples=40)
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
    assert gc.isenabled()
    assert len(found) == len(rows)
    for one, other in zip(rows, found, strict=True):
        for name in tba.Trajectory.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert np.array_equal(a, b) and (type(a) is type(b) or name == "temperature")
            if name in tba.Trajectory.TOKEN_FIELDS:
                assert a.dtype == b.dtype and b.base is None


def test_writing_trajectories_takes_a_few_mib_however_many_there_are(tmp_path):
    rows = group(0, [[j, *[7] * 300] for j in range(100)]).trajectories * 300
    tracemalloc.start()
    tba.write_trajectories(rows, tmp_path / "rows")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "rows").stat().st_size > 30_000 * 3600 > 10 * peak


# with few different tokens many attacks resemble each other; all tokens must be told apart
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
TOKENS |= st.lists(st.integers(0, 200_000), min_size=1, max_size=5)
ATTACKS = st.lists(st.tuples(TOKENS, st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=100)
@example([([1], 1), ([2, 3], 3)], 0.0, 1, 2, "lowest_total", 0)
@example([([5], 0), ([5 + 2**16], 1)], 0.0, 6, 1, "oldest", 0)
@example([([0, 0, 0, 0], 0), ([1, 1, 1, 0], 0), ([1, 1, 0, 0], 1)], 1 / 3, 6, 1, "oldest", 0)
@given(
    ATTACKS,
    st.sampled_from([0.0, 0.25, 1 / 3, 0.4, 0.5]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["oldest", "lowest_reward", "lowest_total"]),
    st.sampled_from([0, 2]),
)
def test_attacks_that_resemble_others_and_the_worst_ones_go(
    attacks, share, kept, per_group, evict, freeze_at
):
    """A frozen buffer takes in new ones, but no prompt gets more than the fullest had."""
    flags = {"near_duplicate": share, "kept_per_prompt": kept, "freeze_buffer_at": freeze_at}
    buffer = tba.AttackBuffer(tba.settings(evict=evict, beta="0.5@0,9@1", **flags))
    buffer.add(group(1, [[8], [9, 9, 9]]))  # each prompt has its own attacks and number of them
    expected = []  # (tokens, reward, value), oldest first
    parts = [attacks[i : i + per_group] for i in range(0, len(attacks), per_group)]
    for version, part in enumerate(parts):
        buffer.add(group(0, [a for a, _ in part], [reward for _, reward in part], version))
        is_frozen = freeze_at and version >= freeze_at
        capacity = max(min(kept, 2), len(expected)) if is_frozen else kept
        for i, (tokens, reward) in enumerate(part):
            total = (-1 - i) * len(tokens) + reward / 0.5  # log pi_ref is -1 - i of each token
            value = total if evict == "lowest_total" else reward
            shares = [distance(other, tokens) / len(other + tokens) for other, *_ in expected]
            near = [j for j, x in enumerate(shares) if x < share or x == 0]
            if near:
                nearest = min(near, key=lambda j: shares[j])
                if shares[nearest] == 0 or expected[nearest][2] > value:
                    continue
                del expected[nearest]
            expected.append((tokens, reward, value))
        while len(expected) > capacity:
            worst = min(value for *_, value in expected)
            del expected[0 if evict == "oldest" else [v for *_, v in expected].index(worst)]
    stored = buffer.trajectories[0].values()
    assert [(t.tokens.tolist(), t.reward) for t in stored] == [e[:2] for e in expected]


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)), st.integers(0, 12))
def test_each_position_arrives_once_in_whatever_order(order, again, arriving):
    """Positions arrive in any order, some of them again from a process that was restarted.

    A process that is started meanwhile begins at the first of its positions that has not arrived.
    """
    processes = tba.SearcherProcesses(
        tba.settings(num_searchers=3), None, SimpleNamespace(say=print, step=0)
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
