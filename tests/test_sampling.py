"""Whether responses are samples of the policy: the sums of a step, and the warning."""

import itertools
import math
import types

import numpy as np
import pytest
import torch
from harness import learner_of, random_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import random_batch

import tba


@pytest.mark.parametrize("V", [4, 50])
def test_likelihood_equals_brute_force(V):
    """Where many tokens are impossible, but never all."""
    generator = torch.Generator().manual_seed(V)
    logits = 4 * torch.randn(100, V, generator=generator, dtype=torch.float64)
    logits[:, 1:][torch.rand(100, V - 1, generator=generator) < 0.3] = -torch.inf
    logprobs = logits.log_softmax(-1).requires_grad_()
    targets = torch.arange(100) % V
    found = tba.likelihood(logprobs, targets).tolist()
    for row, y, own in zip(logprobs.tolist(), targets.tolist(), found, strict=True):
        finite = [x for x in row if x > -math.inf]
        entropy = -sum(math.exp(x) * x for x in finite)
        variance = sum(math.exp(x) * (x + entropy) ** 2 for x in finite)
        assert own == pytest.approx([row[y], entropy, variance], abs=1e-12)


def test_a_large_vocabulary_loses_no_precision_that_matters():
    """Nearly uniform over 100,000 tokens, the variance is the difference of two numbers of 132."""
    logits = 0.3 * torch.randn(4, 100_000, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 5, 77, 99_999])
    exact = tba.likelihood(logits.double().log_softmax(-1), targets)
    found = tba.likelihood(logits.log_softmax(-1), targets)
    torch.testing.assert_close(found.double(), exact, rtol=5e-3, atol=1e-5)


# ------------------------------------------------------------------ with a real Learner and engine


@pytest.fixture(scope="module")
def learner(gsm8k, model_of, tmp_path_factory) -> tba.Learner:
    """The model is random, so that unlikely tokens are sampled too."""
    out = tmp_path_factory.mktemp("run")
    flags = {"model": model_of("llama"), "temperature": 0.7, "prompts_per_step": 8}
    flags |= {"trained_per_prompt": 16, "searched_per_prompt": 16, "sequences_in_flight": 256}
    return learner_of(gsm8k, out, **flags)


def warnings_of(learner: tba.Learner, *values: tuple[float, float]) -> list[str]:
    """What a run says after steps with these values of the two metrics."""
    said = []
    folder = types.SimpleNamespace(say=said.append, step=0)
    log = tba.StepLog(types.SimpleNamespace(config=learner.config, folder=folder, inbox=[]))
    for gap, z in values:
        log.check_sampling(gap, z)
    return said


VLLM = pytest.param("vllm", 0.7, False, marks=pytest.mark.vllm)
CASES = [("transformers", 0.7, False), ("transformers", 1.0, False), ("transformers", 1.0, True)]


@pytest.mark.parametrize(("name", "temperature", "lies"), [*CASES, VLLM])
def test_an_engine_that_samples_too_hot_is_warned_of(learner, name, temperature, lies):
    """In the first batch, also if it reports the log-probabilities at --temperature."""
    config, prompts = learner.config, learner.task.train_prompts
    engine = tba.ENGINES[name](config, 0, "model", 200)
    for i in range(8):
        engine.submit(tba.Request(i, prompts[i], 16, 32, temperature, seed=i))
    done = []
    while engine.unfinished:
        done += engine.step()
    groups = random_groups(learner.task, 8, 16)
    for group, completion in zip(groups, done, strict=True):
        own, i = completion.logprobs, completion.request.id
        if lies:
            own = tba.token_logprobs(learner.policy, [(prompts[i], completion.tokens)], config)
        for t, tokens, logprobs in zip(group, completion.tokens, own, strict=True):
            t.tokens, t.logprobs, t.ref_logprobs, t.prompt_id = tokens, logprobs, logprobs, i
            t.temperature = config.temperature
    learner.sampling_sums.clear()
    metrics = learner.backward(groups, tba.at_step(config, 0), 0)
    gap, z = metrics["sampler_gap"].item(), metrics["sampler_z"].item()
    said = warnings_of(learner, (gap, z), (gap, z))
    assert learner.sampling_sums.maxlen == 10  # steps that the metrics are of
    if temperature == 0.7:
        assert gap < 1e-4 and abs(z) < 4 and said == []
    else:
        assert z < -5 and (gap < 1e-4) == lies
        assert len(said) == 1 and f"sampler_z {z:.3g}" in said[0]


def test_each_metric_is_warned_of_and_so_is_nan(learner):
    for values in ((math.nan, 0.0), (1e-2, 0.0), (0.0, 6.0), (0.0, -6.0), (0.0, math.nan)):
        assert len(warnings_of(learner, (0.0, 0.0), values, values)) == 1, values


@settings(max_examples=40)
@given(st.integers(0, 999), st.sampled_from([4, 5, 6]))
def test_sums_and_metrics_of_fresh_tokens_equal_brute_force(seed, searched):
    """Only groups that the current weights sampled at --temperature count, and only if at least
    80 % of their responses are drawn, each once; demonstrations (version -1) do not. Metrics cover
    the latest steps together.
    """
    rng = np.random.default_rng(seed)
    config = tba.settings(temperature=0.7, searched_per_prompt=searched)
    found, expected = [], np.zeros(4)
    for step in range(1, 4):
        batch = random_batch(4, 4, seed + step, off_policy=0.5)
        batch.step = step
        moments = torch.rand(len(batch.logprobs), 2, dtype=torch.float64)
        rare = lambda usual, other: rng.choice([usual] * 15 + [other])
        minibatch = [
            [types.SimpleNamespace(
                version=rare(rare(step, step - 1), -1), temperature=rare(0.7, 1.0)
            ) for _ in range(4)] for _ in range(4)
        ]  # fmt: skip
        minibatch[0][rare(2, 3)] = minibatch[0][3]  # mostly a repeat
        batch.versions = torch.tensor([[t.version for t in ts] for ts in minibatch])
        parts = [batch.logprobs.detach(), batch.behaviour, *moments.unbind(1)]
        parts = [x.split(batch.lengths.flatten().tolist()) for x in parts]
        responses = zip(itertools.chain(*minibatch), *parts, strict=True)
        for ts in minibatch:
            repeats = any(x is y for x, y in itertools.combinations(ts, 2))
            fresh = all(t.version in (step, -1) and t.temperature == 0.7 for t in ts)
            for t, p, b, entropy, variance in itertools.islice(responses, 4):
                if fresh and not repeats and searched <= 5 and t.version == step:
                    sums = (p - b).abs().sum(), (p + entropy).sum(), variance.sum()
                    expected += [len(p), *(float(x) for x in sums)]
        found.append(tba.fresh_token_sums(batch, minibatch, moments, config))
    np.testing.assert_allclose(torch.stack(found).sum(0), expected)
    metrics = tba.sampling_metrics(found)
    tokens, gap, surprise, variance = expected
    assert metrics["sampler_gap"].item() == pytest.approx(gap / max(tokens, 1))
    assert metrics["sampler_z"].item() == pytest.approx(surprise / max(variance, 100) ** 0.5)
    many = tba.sampling_metrics([torch.tensor([1000.0, 5, 60, 400])] * 2)
    assert [x.item() for x in many.values()] == pytest.approx([0.005, 120 / 800**0.5])
