"""The check that responses are samples of the policy: its statistics, and what it warns of."""

import copy
import math
import sys

import numpy as np
import pytest
import torch
from harness import ROOT

import tba

sys.path.append(str(ROOT / "bench"))

import sampling

ENDS = [0, 3]


def random_logprobs(n: int, V: int, seed: int, impossible: float = 0.3) -> torch.Tensor:
    """Float64 log-probabilities (n, V), of which many are -inf, but never all of a row."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, V, generator=generator, dtype=torch.float64)
    logits[:, 1:][torch.rand(n, V - 1, generator=generator) < impossible] = -torch.inf
    return logits.log_softmax(-1)


def brute_force(row: list[float], y: int) -> list[float]:
    """The first eight columns, one number at a time."""
    finite = [x for x in row if x > -math.inf]
    entropy = -sum(math.exp(x) * x for x in finite)
    variance = sum(math.exp(x) * (x + entropy) ** 2 for x in finite)
    end = sum(math.exp(row[i]) for i in ENDS)
    likelier = [math.exp(x) for x in row if x > row[y]]
    depth = [len(likelier), sum(likelier), max(row) - row[y]]
    return [row[y], row[y] + entropy, variance, (y in ENDS) - end, end * (1 - end), *depth]


@pytest.mark.parametrize("V", [4, 7, 50])
def test_evidence_equals_brute_force(V):
    logprobs = random_logprobs(200, V, V)
    targets = torch.from_numpy(np.random.default_rng(0).integers(0, V, 200))  # also impossible ones
    found = tba.sampling_evidence(logprobs.float(), targets, ENDS)
    rows = logprobs.float().double().tolist()
    expected = [brute_force(row, y) for row, y in zip(rows, targets.tolist(), strict=True)]
    torch.testing.assert_close(
        found[:, :8], torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=2e-6
    )
    # the token that was drawn is one of the row's, and possible
    for row, drawn in zip(rows, found[:, 8:].tolist(), strict=True):
        depths = [brute_force(row, y)[5:] for y in range(V) if row[y] > -math.inf]
        assert min(np.abs(np.subtract(d, drawn)).max() for d in depths) < 1e-4


def test_a_large_vocabulary_loses_no_precision_that_matters():
    """Nearly uniform over 100,000 tokens, the variance is the difference of two numbers of 132."""
    logits = 0.3 * torch.randn(4, 100_000, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 5, 77, 99_999])
    exact = tba.sampling_evidence(logits.double().log_softmax(-1), targets, ENDS)
    found = tba.sampling_evidence(logits.log_softmax(-1), targets, ENDS)
    torch.testing.assert_close(found[:, :5].double(), exact[:, :5], rtol=1e-3, atol=1e-5)


STOPS = {  # whether a response, given its tokens, is stopped by something other than EOS
    "maximum length": lambda y: len(y) == 4,
    "the second token 2": lambda y: y.count(2) == 2 or len(y) == 5,
    "at once after token 1": lambda y: y[-1] == 1 or len(y) == 4,
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_sums_over_responses_have_mean_0_and_the_summed_variance(stop):
    """By enumeration of a world whose distributions depend on all earlier tokens."""
    table = random_logprobs(5**5, 5, seed=1, impossible=0.1)
    total = probability = 0.0
    second = variance = torch.zeros(2, dtype=torch.float64)
    open_prefixes = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        for y in range(5):
            response = (*prefix, y)
            index = [sum((z + 1) * 6**i for i, z in enumerate(response[:t])) % 5**5
                     for t in range(len(response))]  # fmt: skip
            rows = table[index]
            log_p = rows[range(len(response)), response].sum()
            if log_p == -torch.inf:
                continue
            if y not in ENDS and not stop(response):
                open_prefixes.append(response)
                continue
            found = tba.sampling_evidence(rows, torch.tensor(response), ENDS).sum(0)
            sums = found[[1, 3]]
            probability += log_p.exp()
            total = total + log_p.exp() * sums
            second = second + log_p.exp() * sums**2
            variance = variance + log_p.exp() * found[[2, 4]]
    torch.testing.assert_close(probability, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(total, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(second, variance)


def test_the_most_unlikely_tokens_are_draws_with_probability_2_to_minus_c():
    torch.manual_seed(0)
    runs, n = 2000, 24
    logprobs = random_logprobs(n, 40, seed=3, impossible=0.1).float().repeat(runs, 1)
    targets = torch.multinomial(logprobs.exp(), 1)[:, 0]
    found = tba.sampling_evidence(logprobs, targets, ENDS)[:, 5:].view(runs, n, 2, 3)
    unlikely = found[:, :, 0].amax(1, keepdim=True)
    beyond = (found[:, :, 1] > unlikely).sum(1)  # (runs, 3)
    for c in range(1, 7):
        share = (beyond >= c).float().mean(0)
        assert (share < 2**-c + 5 * math.sqrt(2**-c / runs)).all()  # ties make it less
        assert c > 2 or (share > 0.7 * 2**-c).all()


# ------------------------------------------------------------------ with a real Learner and engine


@pytest.mark.parametrize(
    ("policy", "fault", "statistic"),
    [
        ("gsm8k, 1.0", "healthy", None),
        ("gpt2, 1.0, generate", "healthy", None),
        ("gsm8k, 0.7", "temperature 1.0", "z"),
        ("gpt2, 1.0, generate", "top-k 20", "unseen"),
        ("gpt2, 1.0, generate", "goes on after EOS", None),
        ("gsm8k, 1.0", "the same, called truncated", None),
    ],
)
def test_the_first_responses_of_wrong_engines_are_warned_of(policy, fault, statistic):
    row = sampling.run_unit(policy, fault, 10**6)
    *_, saw, warned = row["asynchronous"]
    assert warned == (fault != "healthy")
    assert statistic is None or statistic in saw


@pytest.fixture(scope="module")
def groups() -> list[tba.Group]:
    return sampling.sample("gsm8k, 1.0, generate", "healthy", 3)[:4]


class Fake:
    """A Learner that notes what it is asked, and finds `value`, or one of each column."""

    def __init__(self, value: float | np.ndarray) -> None:
        real = sampling.load("gsm8k, 1.0, generate")[1]
        self.config, self.task = real.config, real.task
        self.value = value
        self.seen = []

    def sampling_evidence(self, sequences):
        self.seen.append([len(responses) for _, responses in sequences])
        tokens = sum(len(y) for _, responses in sequences for y in responses)
        return np.full((tokens, tba.EVIDENCE), self.value)


def check_with(learner) -> tuple[tba.SamplingCheck, list[str]]:
    real = sampling.load("gsm8k, 1.0, generate")[1]
    said = []
    return tba.SamplingCheck(learner or real, said.append), said


def changed(group: tba.Group, at: slice, **values) -> tba.Group:
    """A copy, with other values of some of its trajectories' fields."""
    group = copy.deepcopy(group)
    for t in group.trajectories[at]:
        for name, value in values.items():
            setattr(t, name, value)
    return group


def agreeing(groups: list[tba.Group], value: float) -> list[tba.Group]:
    """Copies whose log-probabilities are those that a Fake finds."""
    groups = copy.deepcopy(groups)
    for t in (t for group in groups for t in group.trajectories):
        t.logprobs = np.full(len(t.tokens), value, np.float32)
    return groups


def test_only_the_groups_that_the_policy_sampled_count(groups):
    check, _ = check_with(fake := Fake(0.0))
    groups = agreeing(groups, 0.0)
    versions = {"version": 3, "last_version": 3}
    arrived = [changed(group, slice(None), **versions) for group in groups]
    cases = [
        arrived[0],
        changed(arrived[1], slice(1), last_version=4),  # weights came while it was generated
        changed(arrived[2], slice(None), temperature=0.5),
        arrived[3],
    ]
    check.add(cases[:3], version=3)
    assert fake.seen == [[len(groups[0].trajectories)]]
    check.add(cases, version=4)
    assert len(fake.seen) == 1
    check.add(cases, version=3)
    assert len(fake.seen) == 2 and len(fake.seen[1]) == 2


@pytest.mark.parametrize("variance", [0.01, 0.0])
def test_enough_evidence_is_enough(groups, variance, monkeypatch):
    """A deterministic policy never gives any, but does not cost time and memory for ever."""
    check, _ = check_with(fake := Fake(variance))
    groups = agreeing(groups[:1], variance)
    monkeypatch.setattr(tba.SamplingCheck, "ENOUGH", 10.0)
    monkeypatch.setattr(tba.SamplingCheck, "MOST", 1500)
    limit = check.ENOUGH / variance if variance else check.MOST
    tokens = sum(len(t.tokens) for t in groups[0].trajectories)
    for _ in range(3 + int(limit) // tokens):
        check.add(groups[:1], version=0)
    assert len(fake.seen) == 1 + int(limit) // tokens


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": lambda t: np.full(len(t.tokens), np.nan, np.float32)},
        {"logprobs": lambda t: t.logprobs + 0.1},
        {"ended": lambda t: not t.ended},
        {"tokens": lambda t: t.tokens[:0], "logprobs": lambda t: t.logprobs[:0]},
        {  # EOS is cut off
            "tokens": lambda t: t.tokens[:-1] if len(t.tokens) > 1 else t.tokens,
            "logprobs": lambda t: t.logprobs[:-1] if len(t.tokens) > 1 else t.logprobs,
        },
    ],
    ids=["NaN", "gap", "ended", "empty", "without EOS"],
)
def test_warns_once_of_odd_responses(groups, values):
    check, said = check_with(None)
    check.add(groups[:2], version=0)
    assert not said
    odd = copy.deepcopy(groups[2:])
    for t in odd[0].trajectories[::2]:
        changes = {name: value(t) for name, value in values.items()}
        for name, value in changes.items():
            setattr(t, name, value)
    check.add(odd, version=0)
    check.add(odd, version=0)
    assert len(said) == 1


@pytest.mark.parametrize("mean", [-1.0, 1.0])
@pytest.mark.parametrize("column", [1, 3])
def test_says_which_way_the_temperature_is_wrong_and_that_eos_is(groups, column, mean):
    """Where log pi(y) + entropy, or EOS - P(EOS), is on average a standard deviation from 0."""
    evidence = np.zeros(tba.EVIDENCE)
    evidence[[2, 4]] = 1
    check, said = check_with(Fake(evidence))
    check.add(agreeing(groups[:1], 0.0), version=0)
    assert not said
    evidence[column] = mean
    check.add(agreeing(groups[1:2], 0.0), version=0)
    (warning,) = said
    assert ("higher" in warning) == (column == 1 and mean < 0)
    assert ("lower" in warning) == (column == 1 and mean > 0)


def test_a_policy_that_has_become_nan_is_no_error():
    logprobs = torch.full((3, 5), torch.nan)
    found = tba.sampling_evidence(logprobs, torch.tensor([0, 1, 2]), ENDS)
    assert found.shape == (3, tba.EVIDENCE)
