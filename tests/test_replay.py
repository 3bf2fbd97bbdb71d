"""Replay sampling: frequencies by chi-square, and the buffer's rules by brute force."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tba

CRITICAL = {1: 10.8, 3: 16.3, 4: 18.5, 5: 20.5, 11: 31.3}  # chi-square, p = 0.001


def group(prompt_id, responses, rewards=None, version=0, reference=0):
    trajectories = []
    for i, response in enumerate(responses):
        tokens = np.array(response, np.int32)
        reward = 0.0 if rewards is None else float(np.float32(rewards[i]))
        numbers = reward, np.full(len(tokens), i, np.float32)
        row = tokens, tokens.astype(np.float32), i % 2 == 0, *numbers, prompt_id
        trajectories.append(tba.Trajectory(*row, version, reference))
    return tba.Group(prompt_id, trajectories, searcher=0, number=0)


def filled(prompts, S=4, kept=100, rewards=None, seed=0, **flags):
    buffer = tba.ReplayBuffer(tba.Config(kept_per_prompt=kept, seed=seed, **flags))
    for p in range(prompts):
        buffer.add(group(p, [[p, j] for j in range(S)], rewards))
    return buffer


def chi_square(counts, expected):
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("m", [0.0, 0.3, 0.95, 1.0])
def test_recent_prompts_are_drawn_with_probability_m(m):
    buffer = filled(200)
    buffer.begin_window()
    buffer.begin_window()
    for p in range(200, 240):
        buffer.add(group(p, [[p, j] for j in range(4)]))
    draws = [buffer.sample(8, 2, m, 0.0) for _ in range(500)]
    recent = round(sum(fraction for _, fraction in draws) * 8)
    if m in (0.0, 1.0):
        assert recent == m * 4000
    else:
        expected = [m * 4000, (1 - m) * 4000]
        assert chi_square([recent, 4000 - recent], expected) < CRITICAL[1]
    if m == 1.0:
        assert all(g[0].prompt_id >= 200 for groups, _ in draws for g in groups)
        counts = np.bincount([g[0].prompt_id - 200 for groups, _ in draws for g in groups])
        assert chi_square(counts, [100] * 40) < 73.4  # 39 degrees of freedom


def test_refill_draws_every_recent_prompt_before_any_again_and_any_of_its_newest():
    """As the authors' code: without replacement across steps; then all of them once more."""
    buffer = filled(20, S=3, searched_per_prompt=6, replay_rule="refill")
    buffer.begin_window()
    buffer.begin_window()
    for p in range(20, 30):
        buffer.add(group(p, [[p, j] for j in range(12)], [0.0] * 12))
    taken, counts = [], np.zeros(12)
    for step in range(10):
        groups, recent = buffer.sample(2, 3, 1.0, 0.0)
        assert recent == 1.0
        taken += [g[0].prompt_id for g in groups]
        for t in (t for g in groups for t in g):
            counts[t.tokens[1]] += 1
        if step == 2:  # what was drawn is in checkpoints
            state = buffer.state()
            buffer = tba.ReplayBuffer(buffer.config)
            buffer.restore(state)
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(20, 30))
    assert taken[:10] != taken[10:]
    assert counts[:6].sum() == 0 and counts[6:].sum() == 60 and (counts[6:] > 0).all()
    buffer.begin_window()
    buffer.add(group(3, [[3, 9], [3, 10]]))
    groups, recent = buffer.sample(2, 8, 1.0, 0.0)
    assert recent == 1.0 and {g[0].prompt_id for g in groups} == {3}
    assert all(len(g) == 8 for g in groups)  # with replacement, where there are fewer
    old = [buffer.sample(4, 3, 0.0, 0.0) for _ in range(50)]
    assert {g[0].prompt_id for groups, _ in old for g in groups} == set(range(30))


def test_the_window_widens_only_while_it_is_small():
    buffer = filled(5)
    buffer.begin_window()
    buffer.add(group(7, [[7, 0], [7, 1]]))
    buffer.begin_window()
    for p in (8, 9):
        buffer.add(group(p, [[p, 0], [p, 1]]))
    assert {g[0].prompt_id for g in buffer.sample(2, 2, 1.0, 0.0)[0]} == {8, 9}
    assert {g[0].prompt_id for g in buffer.sample(3, 2, 1.0, 0.0)[0]} == {7, 8, 9}
    groups, fraction = buffer.sample(5, 2, 1.0, 0.0)
    assert len({g[0].prompt_id for g in groups}) == 5 and fraction == 3 / 5
    buffer.begin_window()
    buffer.begin_window()  # nothing arrived in between: what was recent stays so
    assert buffer.sample(2, 2, 1.0, 0.0)[1] == 1.0
    buffer.end_windows()
    groups, fraction = buffer.sample(8, 2, 1.0, 0.0)  # as many as there are: all of them
    assert len({g[0].prompt_id for g in groups}) == 8 and fraction == 0
    buffer.add(group(3, [[3, 0], [3, 1]]))
    assert buffer.sample(2, 2, 1.0, 0.0)[1] == 1 / 2


def test_recent_draws_take_the_newest_trajectories():
    buffer = tba.ReplayBuffer(tba.Config())
    for version in range(3):
        buffer.add(group(0, [[version, j] for j in range(3)], version=version))
    (drawn,), _ = buffer.sample(1, 4, 1.0, 0.0)
    assert sorted(tuple(t.tokens) for t in drawn) == [(1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("tries", [None, 0, 1, 64])
def test_reward_sampling_is_softmax_without_replacement(inverse_temperature, tries):
    """Also by rejection, as from a long list, and where its tries do not suffice."""
    rewards = np.array([0.0, 0.5, 1.0, -1.0])
    buffer = filled(1, rewards=rewards)
    if tries is not None:
        buffer.LONG, buffer.TRIES = 1, tries
    weights = np.exp(inverse_temperature * rewards)
    pairs = list(itertools.permutations(range(4), 2))
    probability = [
        weights[a] / weights.sum() * weights[b] / (weights.sum() - weights[a]) for a, b in pairs
    ]
    n, counts = 6000, dict.fromkeys(pairs, 0)
    for _ in range(n):
        (drawn,), fraction = buffer.sample(1, 2, 0.0, inverse_temperature)
        counts[tuple(int(t.tokens[1]) for t in drawn)] += 1
        assert fraction == 0.0
    assert chi_square(counts.values(), n * np.array(probability)) < CRITICAL[11]


def test_prompts_are_drawn_without_replacement_over_an_epoch():
    buffer = filled(12)
    seen = [g[0].prompt_id for _ in range(4) for g in buffer.sample(3, 2, 0.0, 0.0)[0]]
    assert sorted(seen) == list(range(12))
    for _ in range(60):  # an odd batch size: epochs end inside batches
        groups, _ = buffer.sample(5, 2, 0.0, 0.0)
        assert len({g[0].prompt_id for g in groups}) == 5


def test_too_few_trajectories_are_repeated_but_all_taken():
    buffer = tba.ReplayBuffer(tba.Config())
    buffer.add(group(0, [[1], [2], [3]]))
    for m in (0.0, 1.0):
        (drawn,), _ = buffer.sample(1, 7, m, 0.0)
        assert len(drawn) == 7 and {int(t.tokens[0]) for t in drawn} == {1, 2, 3}
    groups, _ = buffer.sample(3, 2, 0.5, 0.0)  # fewer prompts than B
    assert [g[0].prompt_id for g in groups] == [0, 0, 0]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=1, max_size=6),
        ),
        max_size=12,
    ),
    st.integers(2, 6),
)
def test_duplicates_and_eviction_against_brute_force(groups, kept):
    buffer, expected = tba.ReplayBuffer(tba.Config(kept_per_prompt=kept)), {}
    for version, (prompt_id, responses) in enumerate(groups):
        buffer.add(group(prompt_id, responses, version=version))
        stored = expected.setdefault(prompt_id, [])
        arrived = list(dict.fromkeys(tuple(r) for r in responses))
        stored[:] = [s for s in stored if s[0] not in arrived]
        stored += [(r, version) for r in arrived]
        del stored[: max(0, len(stored) - kept)]
    actual = {
        p: [(tuple(t.tokens.tolist()), t.version) for t in stored]
        for p, stored in buffer.trajectories.items()
    }
    assert actual == expected
    assert len(buffer) == sum(map(len, expected.values()))


def test_same_seed_same_draws():
    ids = lambda b: [
        [(t.prompt_id, *t.tokens) for g in b.sample(3, 2, 0.5, 1.0)[0] for t in g]
        for _ in range(20)
    ]
    assert ids(filled(9, seed=1)) == ids(filled(9, seed=1)) != ids(filled(9, seed=2))


def test_extreme_rewards_do_not_break_the_softmax():
    buffer = filled(1, rewards=[0.0, 1e4, -1e4, 5.0])
    (drawn,), _ = buffer.sample(1, 3, 0.0, 50.0)
    assert [int(t.tokens[1]) for t in drawn] == [1, 3, 0]
    assert not math.isnan(drawn[0].reward)


def edit_distance(a, b):
    """Levenshtein's distance, by the textbook's table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(-3, 3)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([0.1, 0.25, 0.5]),
    st.integers(2, 6),
    st.integers(1, 4),
)
def test_near_duplicates_and_lowest_reward_against_brute_force(responses, share, kept, per_group):
    config = tba.Config(near_duplicate=share, kept_per_prompt=kept, evict="lowest_reward")
    buffer, expected = tba.ReplayBuffer(config), []
    for start in range(0, len(responses), per_group):
        part = {tuple(r): reward for r, reward in responses[start : start + per_group]}
        buffer.add(group(0, list(part), list(part.values())))
        expected = [e for e in expected if e[0] not in part]
        for tokens, reward in part.items():
            near = []  # how far they are, and which
            for e in expected:
                both = len(e[0]) + len(tokens)
                edits = edit_distance(e[0], tokens)
                if edits < share * both:
                    near.append((np.float32(edits / both), e))
            _, nearest = min(near, key=lambda pair: pair[0], default=(0, None))
            if nearest is None or nearest[1] < reward:
                expected = [e for e in expected if e != nearest] + [(tokens, reward)]
        while len(expected) > kept:  # those that have just come stay
            expected.remove(min(expected, key=lambda e: (e[0] in part, e[1])))
        buffer.begin_window()
    actual = [(tuple(t.tokens.tolist()), t.reward) for t in buffer.trajectories.get(0, [])]
    assert actual == expected


def test_near_duplicates_by_cosine_and_by_total_reward():
    """Of vectors closer than the distance the more valuable stays; a total counts log pi_ref."""
    turn = lambda angle: np.array([math.cos(angle), math.sin(angle)], np.float32)
    rng = np.random.default_rng(0)
    for evict in ("lowest_reward", "lowest_total"):
        config = tba.Config(near_duplicate=0.02, near_duplicate_by="cosine", evict=evict, beta=0.5)
        value = lambda t: t.reward + 0.5 * t.ref_logprob * (evict == "lowest_total")  # noqa: B023
        buffer, expected = tba.ReplayBuffer(config), []
        for i in range(60):
            new = group(0, [[i]], [rng.normal()]).trajectories[0]
            new.ref_logprobs, new.vector = rng.normal(size=1), turn(rng.uniform(0, 6))
            buffer.add(tba.Group(0, [new], 0, 0))
            distance = lambda t: 1 - t.vector @ new.vector  # noqa: B023
            nearest = min(expected, key=distance, default=None)
            if nearest is None or distance(nearest) >= 0.02:
                expected = [*expected, new]
            elif value(nearest) < value(new):
                expected = [t for t in expected if t is not nearest] + [new]
        kept = buffer.trajectories[0]
        assert [t.tokens[0] for t in kept] == [t.tokens[0] for t in expected]
        assert 5 < len(kept) < 30
        restored = tba.ReplayBuffer(config)
        restored.restore(buffer.state())
        for one, other in zip(kept, restored.trajectories[0], strict=True):
            np.testing.assert_array_equal(one.vector, other.vector)


def test_a_single_prompt_fills_the_batch_with_different_trajectories():
    buffer = filled(1, S=24)
    for m in (0.0, 0.5, 1.0):
        groups, fraction = buffer.sample(6, 4, m, 1.0)
        assert len({tuple(t.tokens) for g in groups for t in g}) == 24
        assert fraction == m or m == 0.5
    groups, _ = buffer.sample(2, 3, 1.0, 0.0)
    assert [sorted(int(t.tokens[1]) for t in g) for g in groups] == [[21, 22, 23], [18, 19, 20]]


def test_references_are_never_mixed():
    """What a new one scored waits for a batch's prompts, then it takes the place of all else."""
    buffer = tba.ReplayBuffer(tba.Config(prompts_per_step=2))
    for p in range(3):
        buffer.add(group(p, [[1], [2], [3]], reference=0))
    buffer.begin_window()
    buffer.add(group(0, [[4], [2]], reference=10))
    buffer.add(group(0, [[6]], reference=10))
    buffer.add(group(2, [[4]], reference=0))  # scored before the reset, and still of use
    references = lambda b: {t.reference for stored in b.trajectories.values() for t in stored}
    assert references(buffer) == {0} and len(buffer) == 10
    restored = tba.ReplayBuffer(buffer.config)
    restored.restore(buffer.state())
    for one in (buffer, restored):
        one.add(group(7, [[5], [6]], reference=10))
        assert references(one) == {10} and len(one) == 5
        assert [int(t.tokens[0]) for t in one.trajectories[0]] == [4, 2, 6]
        one.add(group(1, [[5]], reference=0))  # late
        assert set(one.trajectories) == {0, 7} == set(one.window)
        assert {g[0].prompt_id for g in one.sample(4, 2, 0.5, 0.0)[0]} == {0, 7}
        one.add(group(7, [[8]], reference=20))
        one.add(group(0, [[8]], reference=30))  # reset again, before there were enough
        one.add(group(1, [[9]], reference=30))
        assert references(one) == {30} and len(one) == 2


def test_distances_against_brute_force_among_many_tokens():
    """The bound by which most pairs are passed over is never above the distance."""
    rng = np.random.default_rng(0)
    config = tba.Config(near_duplicate=0.25)
    index = tba.SimilarityIndex(config)
    trajectories = []
    for _ in range(150):
        tokens = rng.integers(0, 50_000, rng.integers(1, 21)).tolist()
        if trajectories and rng.random() < 0.7:  # some edits of another one
            tokens = trajectories[rng.integers(len(trajectories))].tokens.tolist()
            for _ in range(rng.integers(0, 6)):
                place = rng.integers(len(tokens) + 1)
                tokens[place : place + rng.integers(2)] = rng.integers(0, 50_000, rng.integers(2))
            tokens = tokens or [1]
        trajectories += group(0, [tokens]).trajectories
    slots = [index.add(t) for t in trajectories]
    for t in trajectories[::3]:
        index.remove(t)
    slots = [slot for i, slot in enumerate(slots) if i % 3]
    left = [t for i, t in enumerate(trajectories) if i % 3]
    slots += [index.add(t) for t in trajectories[::6]]
    left += trajectories[::6]
    distances = index.distances(slots)
    near = 0
    for i, one in enumerate(left):
        for j, other in enumerate(left):
            edits = edit_distance(one.tokens.tolist(), other.tokens.tolist())
            both = len(one.tokens) + len(other.tokens)
            expected = np.float32(edits / both) if edits < 0.25 * both else math.inf
            assert distances[i, slots[j]] == expected
            near += i != j and expected < 1
    assert near > 50
    free = np.setdiff1d(np.arange(distances.shape[1]), slots)
    assert len(free) and np.isinf(distances[:, free]).all()


def test_a_frozen_buffer_grows_no_more_but_takes_in_new_trajectories():
    buffer = tba.ReplayBuffer(tba.Config(kept_per_prompt=50, trained_per_prompt=2))
    for start in range(0, 12, 4):
        buffer.add(group(0, [[j] for j in range(start, start + 4)]))
    buffer.freeze()
    restored = tba.ReplayBuffer(buffer.config)
    restored.restore(buffer.state())
    for one in (buffer, restored):
        one.add(group(0, [[j] for j in range(100, 104)]))
        assert [int(t.tokens[0]) for t in one.trajectories[0]] == [*range(4, 12), *range(100, 104)]


def test_trajectories_are_found_and_dropped_wherever_they_stand():
    """Against a plain list, with and without the other orders that hashes may bring."""
    rng = np.random.default_rng(1)
    stored, expected = tba.StoredTrajectories(None), []
    for step in range(600):
        t = group(0, [[step % 97, step]]).trajectories[0]
        stored.add(t)
        expected.append(t)
        while len(expected) > 40 or (rng.random() < 0.3 and expected):
            gone = expected.pop(rng.integers(len(expected)))
            assert stored.find(gone) is gone
            stored.drop(gone)
            assert stored.find(gone) is None
        assert len(stored) == len(expected)
    assert all(a is b for a, b in zip(stored, expected, strict=True))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4),
                  min_size=1, max_size=4), st.booleans(), st.booleans()), max_size=12,
    ),
    st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=100)
def test_a_restored_buffer_goes_on_as_the_first(history, draws):
    """Through a file: every trajectory, its order, the windows, and the next random draws."""
    config = tba.Config(kept_per_prompt=5, trained_per_prompt=2)
    first, again = tba.ReplayBuffer(config), tba.ReplayBuffer(config)
    for version, (prompt_id, responses, sync, draw) in enumerate(history):
        rewards = [len(r) / 3 for r in responses]
        first.add(group(prompt_id, responses, rewards, version=version, reference=version // 4))
        if sync:
            first.begin_window()
        if draw:
            first.sample(2, 2, 0.5, 1.0)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    again.restore(torch.load(file, weights_only=True))  # nothing that loading could execute
    fields = lambda t: [getattr(t, name) for name in tba.Trajectory.__slots__]
    plain = lambda t: [x.tolist() if isinstance(x, np.ndarray) else x for x in fields(t)]
    contents = lambda b: {p: list(map(plain, stored)) for p, stored in b.trajectories.items()}
    assert contents(first) == contents(again)
    for stored in again.trajectories.values():
        assert all(t.tokens.dtype == np.int32 and t.logprobs.dtype == np.float32 for t in stored)
        assert all(t.tokens.base is None for t in stored)  # evicting one frees it
    for _ in range(draws if history else 0):
        (a, share_a), (b, share_b) = (x.sample(2, 2, 0.5, 1.0) for x in (first, again))
        key = lambda groups: [[plain(t) for t in group] for group in groups]
        assert key(a) == key(b) and share_a == share_b


def test_lowest_total_counts_the_likelihood():
    """Total reward is log pi_ref + reward / beta, as GFlowNets have it."""
    config = tba.Config(kept_per_prompt=2, trained_per_prompt=2, evict="lowest_total", beta=0.5)
    buffer = tba.ReplayBuffer(config)
    new = group(0, [[1], [2], [3]], rewards=[1.0, 2.0, 3.0])  # ref_logprob is 0, 1, 2
    for t, likelihood in zip(new.trajectories, (-1.0, -2.0, -9.0), strict=True):
        t.ref_logprobs = np.array([likelihood], np.float32)  # totals 0.5 x (1, 2, -3)
    buffer.add(new)
    assert [t.tokens[0] for t in buffer.trajectories[0]] == [1, 2]
    buffer.begin_window()
    for tokens in ([4], [5]):  # bad, but not yet trained on
        buffer.add(group(0, [tokens], rewards=[-50.0]))
    assert [t.tokens[0] for t in buffer.trajectories[0]] == [4, 5]
    buffer.begin_window()
    buffer.add(group(0, [[6]], rewards=[0.0]))
    assert [t.tokens[0] for t in buffer.trajectories[0]] == [5, 6]


def test_a_thread_adds_what_is_compared_while_batches_are_sampled():
    """As if it were added at once; what goes wrong in it is raised, and nothing waits for ever."""
    config = tba.Config(near_duplicate=0.3, kept_per_prompt=60, trained_per_prompt=2)
    rng = np.random.default_rng(3)
    groups = []
    for version in range(150):
        responses = rng.integers(0, 4, (8, 5)).tolist()
        groups.append(group(0, responses, rng.normal(size=8), version=version))
    at_once, later = tba.ReplayBuffer(config), tba.ReplayBuffer(config)
    later.MOST_PENDING = 20
    for one in groups:
        at_once.add(one)
        later.add_later(one)
        if later.trajectories:
            drawn, _ = later.sample(2, 2, 0.5, 1.0)
            assert all(len(g) == 2 for g in drawn)
    state, expected = later.state(), at_once.state()  # which waits for the rest
    for name in tba.Trajectory.__slots__:
        assert torch.equal(state["trajectories"][name], expected["trajectories"][name])
    later.add_later(tba.Group(0, [], 0, 0))
    with pytest.raises(IndexError):
        later.finish_adding()
