"""Whether responses are samples of the policy: the sums of a step, and the warning."""

import math
import types

import numpy as np
import pytest
import torch
from harness import arguments, learner_of, random_groups, run_tba

import tba

ENDS = [0, 3]


def random_logprobs(n: int, V: int, seed: int, impossible: float = 0.3) -> torch.Tensor:
    """Float64 log-probabilities (n, V), of which many are -inf, but never all of a row."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, V, generator=generator, dtype=torch.float64)
    logits[:, 1:][torch.rand(n, V - 1, generator=generator) < impossible] = -torch.inf
    return logits.log_softmax(-1).requires_grad_()


@pytest.mark.parametrize("V", [4, 50])
def test_likelihood_equals_brute_force(V):
    logprobs = random_logprobs(100, V, V)
    targets = torch.arange(100) % V
    for row, y, found in zip(
        logprobs.tolist(), targets.tolist(), tba.likelihood(logprobs, targets).tolist(), strict=True
    ):
        finite = [x for x in row if x > -math.inf]
        entropy = -sum(math.exp(x) * x for x in finite)
        variance = sum(math.exp(x) * (x + entropy) ** 2 for x in finite)
        assert found == pytest.approx([row[y], entropy, variance], abs=1e-12)


def test_a_large_vocabulary_loses_no_precision_that_matters():
    """Nearly uniform over 100,000 tokens, the variance is the difference of two numbers of 132."""
    logits = 0.3 * torch.randn(4, 100_000, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 5, 77, 99_999])
    exact = tba.likelihood(logits.double().log_softmax(-1), targets)
    found = tba.likelihood(logits.log_softmax(-1), targets)
    torch.testing.assert_close(found.double(), exact, rtol=5e-3, atol=1e-5)


STOPS = {  # whether a response, given its tokens, is stopped by something other than EOS
    "maximum length": lambda y: len(y) == 4,
    "the second token 2": lambda y: y.count(2) == 2 or len(y) == 5,
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_responses_sum_has_mean_0_and_the_summed_variance(stop):
    """By enumeration of a world whose distributions depend on all earlier tokens."""
    table = random_logprobs(5**5, 5, seed=1, impossible=0.1).detach().requires_grad_()
    probability = mean = second = variance = 0.0
    open_prefixes = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        for y in range(5):
            response = (*prefix, y)
            index = [sum((z + 1) * 6**i for i, z in enumerate(response[:t])) % 5**5
                     for t in range(len(response))]  # fmt: skip
            log_p = table[index][range(len(response)), response].sum().item()
            if log_p == -math.inf:
                continue
            if y not in ENDS and not stop(response):
                open_prefixes.append(response)
                continue
            logprobs, entropies, variances = tba.likelihood(
                table[index], torch.tensor(response)
            ).unbind(1)
            total = (logprobs + entropies).sum().item()
            probability += math.exp(log_p)
            mean += math.exp(log_p) * total
            second += math.exp(log_p) * total**2
            variance += math.exp(log_p) * variances.sum().item()
    assert probability == pytest.approx(1)
    assert mean == pytest.approx(0, abs=1e-12)
    assert second == pytest.approx(variance)


# ------------------------------------------------------------------ with a real Learner and engine


@pytest.fixture(scope="module")
def learner(gsm8k, tmp_path_factory) -> tba.Learner:
    out = tmp_path_factory.mktemp("run")
    flags = {"temperature": 0.7, "prompts_per_step": 8, "trained_per_prompt": 16}
    return learner_of(gsm8k, out, **flags, searched_per_prompt=16, sequences_in_flight=256)


def sample(learner: tba.Learner, temperature: float) -> list[list[tba.Trajectory]]:
    """16 responses to each of 8 prompts from the engine at this temperature."""
    config = learner.config
    engine = tba.TransformersEngine(config, 0, "model", 256)
    prompts = learner.task.train_prompts
    for i in range(8):
        engine.submit(tba.Request(i, prompts[i], 16, 32, temperature, seed=i))
    done = engine.step() + (engine.step() if engine.unfinished else [])
    groups = random_groups(learner.task, 8, 16)
    for group, completion in zip(groups, done, strict=True):
        for j, t in enumerate(group):
            t.tokens, t.logprobs = completion.tokens[j], completion.logprobs[j]
            t.ref_logprobs = t.logprobs
            t.prompt_id, t.temperature = completion.request.id, config.temperature
    return groups


def measured(learner: tba.Learner, groups: list, step: int = 0) -> tuple[float, float]:
    learner.sampling_sums.clear()
    metrics = learner.backward(groups, tba.at_step(learner.config, step), step)
    return metrics["sampler_gap"].item(), metrics["sampler_z"].item()


def warnings_of(learner: tba.Learner, *values: tuple[float, float]) -> list[str]:
    """What a run says after steps with these values of the two metrics."""
    said = []
    folder = types.SimpleNamespace(say=said.append, step=0)
    log = tba.StepLog(types.SimpleNamespace(config=learner.config, folder=folder, inbox=[]))
    for gap, z in values:
        log.check_sampling(gap, z)
    return said


def test_samples_of_the_policy_are_not_warned_of(learner):
    gap, z = measured(learner, sample(learner, 0.7))
    assert gap < 1e-5 and abs(z) < 4
    assert warnings_of(learner, (gap, z), (gap, -z)) == []


@pytest.mark.parametrize("lies", [False, True])
def test_an_engine_that_samples_too_hot_is_warned_of_in_the_first_batch(learner, lies):
    groups = sample(learner, 1.0)
    if lies:  # it reports the log-probabilities at --temperature
        prompts = learner.task.train_prompts
        sequences = [(prompts[g[0].prompt_id], [t.tokens for t in g]) for g in groups]
        true = tba.token_logprobs(learner.policy, sequences, learner.config)
        for t, logprobs in zip((t for g in groups for t in g), true, strict=True):
            t.logprobs = logprobs
    gap, z = measured(learner, groups)
    assert z < -5 and (gap < 1e-5) == lies
    said = warnings_of(learner, (gap, z), (gap, z))
    assert len(said) == 1 and f"sampler_z {z:.3g}" in said[0]


@pytest.mark.parametrize("values", [(math.nan, 0.0), (1e-2, 0.0), (0.0, 6.0), (0.0, math.nan)])
def test_each_metric_is_warned_of_and_so_is_nan(learner, values):
    assert len(warnings_of(learner, (0.0, 0.0), values, values)) == 1


def test_only_what_the_present_weights_sampled_counts(learner, monkeypatch):
    groups = random_groups(learner.task, 3, 16)
    for i, group in enumerate(groups):
        for t in group:
            t.version, t.temperature = 5, 0.7
            t.logprobs = np.full(len(t.tokens), -0.1 * i, np.float32)
    tokens = lambda chosen: sum(len(t.tokens) for group in chosen for t in group)

    def counted(step: int = 5) -> float:
        learner.sampling_sums.clear()
        learner.backward(groups, tba.at_step(learner.config, step), step)
        return learner.sampling_sums[-1][0].item()

    assert counted() == tokens(groups) and counted(step=6) == 0
    groups[0][3].version = 4  # sampled with earlier weights
    groups[1][15] = groups[1][14]  # drawn twice by replay
    assert counted() == tokens(groups[2:])
    groups[2][0].temperature = 1.3
    assert counted() == 0
    groups[2][0].temperature = 0.7
    monkeypatch.setattr(learner.config, "searched_per_prompt", 24)  # distinct ones first
    assert counted() == 0


def test_a_run_logs_both_metrics(gsm8k, tmp_path):
    run_tba(arguments(gsm8k, tmp_path / "run", lockstep=True, steps=2, eval_samples=4))
    for row in tba.read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert row["sampler_gap"] < 1e-5 and abs(row["sampler_z"]) < 5
