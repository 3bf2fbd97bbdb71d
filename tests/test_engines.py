"""Engines against the Trainer's own computation: weights, log-probabilities, sampling."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from harness import config_and_task, learner_of
from transformers import AutoModelForCausalLM

import tba

CPU = torch.device("cpu")
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
FAMILIES = ["llama", "tied_llama", "gpt2", "gpt_neox", "qwen2"]


@pytest.fixture
def engine_of(gsm8k, model_of, tmp_path):
    """Function: engine and architecture -> (engine, settings, task)."""

    def make(name, architecture="llama", **flags):
        flags = {"temperature": 0.7, "max_response_tokens": 12} | flags
        model = model_of(architecture)
        config, task = config_and_task(gsm8k, tmp_path, model=model, engine=name, **flags)
        return tba.ENGINES[name](config, 0, "model", 200), config, task

    return make


def request(task, i, n, **settings):
    settings = {"max_tokens": 12, "temperature": 0.7, "seed": i} | settings
    return tba.Request(id=i, prompt=task.train_prompts[i], n=n, **settings)


def finish(engine, between_steps=lambda: None):
    """The completions of all that was submitted, by the request's id."""
    done = {}
    while engine.unfinished:
        done |= {completion.request.id: completion for completion in engine.step(between_steps)}
    return done


def send(served, model, version=1):
    """Load a model's weights, as a Searcher does."""
    weights = tba.checkpoint_state(model)
    named = weights.items()
    if not isinstance(served, tba.TransformersEngine):
        named = tba.named_as_saved(model, weights)
    served.load_weights(named, version)


def heads_of(model):
    """Function: the head's weight of a version; only heads differ, so that KV caches stay right."""
    head = model.get_output_embeddings().weight.detach().clone()
    return lambda version: head * (1 + 0.3 * ((version + 1) % 4))


def random_request(task, i):
    """A short request; four in a row have the same kind of sampling."""
    rng, kind = np.random.default_rng(i), np.random.default_rng(i // 4)
    top_p, least = float(kind.choice([1.0, 1.0, 0.5])), int(kind.choice([0, 0, 3]))
    temperature = 0.0 if kind.random() < 0.3 else float(rng.choice([0.5, 2.0]))
    n, longest = int(rng.integers(1, 4)), max(int(rng.integers(1, 7)), least)
    prompt = task.train_prompts[i][: rng.choice([3, 3, 20])]
    return tba.Request(i, prompt, n, longest, temperature, top_p, least, seed=i)


def expected_batches(requests, limit, pads):
    """Requests in their order, as many at once as may be sampled together in `limit` rows."""
    batches = []
    for request in requests:
        same = lambda other, own=request: (
            ((own.temperature == 0) == (other.temperature == 0) and own.top_p == other.top_p)
            and own.min_tokens == other.min_tokens
            and (pads or len(own.prompt) == len(other.prompt))
        )
        rows = request.n + sum(other.n for other in batches[-1]) if batches else limit + 1
        if rows <= limit and same(batches[-1][0]):
            batches[-1].append(request)
        else:
            batches.append([request])
    return [[request.id for request in batch] for batch in batches]


def check_row(model, ends, request, tokens, logprobs, logits):
    """One response beside the logits (T, V) of the weights that sampled each of its tokens."""
    T = len(tokens)
    logits[: request.min_tokens, ends] = -math.inf
    expected = (logits / (request.temperature or 1.0)).log_softmax(-1)
    own = expected[range(T), tokens]
    np.testing.assert_allclose(logprobs, own, atol=1e-4, err_msg=str(request))
    assert request.temperature > 0 or (own == expected.max(-1)[0]).all()
    likelier = torch.where(expected > own[:, None] + 1e-4, expected.exp(), 0).sum(-1)
    assert (likelier < request.top_p).all()  # the nucleus has the token
    is_end = np.isin(tokens, ends)
    assert not is_end[:-1].any() and (is_end[-1] or request.max_tokens == T)
    assert request.min_tokens <= T
    return bool(is_end[-1])


def check_logprobs(model, config, prompt, responses, logprobs, temperature=None):
    """The engine's log-probabilities are those that the Trainer computes."""
    policy = tba.TokenLogProbs(model, 0.7)
    scored = tba.token_logprobs(policy, [(prompt, responses)], config, temperature)
    for found, own in zip(logprobs, scored, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-3)


@pytest.mark.parametrize("pads", [True, False])
def test_each_request_of_a_batch_has_its_own_parameters_and_each_token_its_weights(
    pads, engine_of, monkeypatch
):
    """Random requests, with new weights after each token, beside a plain computation."""
    monkeypatch.setattr(tba.GSM8K, "stop", ("e", "a"))  # responses of one to six tokens
    served, config, task = engine_of("transformers", sequences_in_flight=6)
    served.pads = pads
    head_of, model, ends = heads_of(served.model), copy.deepcopy(served.model), served.end_tokens
    requests = [random_request(task, i) for i in range(24 if pads else 10)]
    for request in requests:
        served.submit(request)

    def load():
        version = served.version + 1
        served.load_weights([("lm_head.weight", head_of(version))], version)

    batches, endings = [], []
    while served.unfinished:
        first = served.version
        done = served.step(load)
        batches.append([completion.request.id for completion in done])
        for completion in done:
            prompt, n = completion.request.prompt, completion.request.n
            columns = (completion.tokens, completion.logprobs, completion.ended)
            assert len(completion.tokens) == n
            for tokens, logprobs, ended, versions in zip(
                *columns, completion.versions, strict=True
            ):
                T = len(tokens)
                assert versions == (first, first + T - 1)
                assert tokens.dtype == np.int32 and logprobs.dtype == np.float32
                ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
                with torch.no_grad():
                    hidden = model.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
                    heads = torch.stack([head_of(first + t) for t in range(T)])
                    logits = (heads @ hidden[..., None])[..., 0]
                assert ended == check_row(model, ends, completion.request, tokens, logprobs, logits)
                endings.append((ended, completion.request.max_tokens == T))
    assert batches == expected_batches(requests, 6, pads)
    full = [sum(requests[i].n for i in batch) for batch in batches if len(batch) > 1]
    assert 6 in full or not pads
    assert len(set(endings)) == 3 or not pads  # also an EOS that is the last token that was allowed


def test_same_seeds_same_samples_whatever_happens_between_decode_steps(engine_of):
    served, _, task = engine_of("transformers")
    other, _, _ = engine_of("transformers")

    def generate_more():
        """As a victim's engine does while answers are judged."""
        other.submit(request(task, 2, 2, max_tokens=2))
        finish(other)

    def sample(between_steps):
        for i in range(2):
            served.submit(request(task, i, 4))
        done = finish(served, between_steps)
        return [tokens.tolist() for i in range(2) for tokens in done[i].tokens]

    first = sample(lambda: None)
    assert sample(generate_more) == first
    served.submit(request(task, 0, 8, seed=5))
    others = [tokens.tolist() for tokens in finish(served)[0].tokens]
    assert len({tuple(tokens) for tokens in others}) > 1 and others[:4] != first[:4]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_transfer_the_engine_computes_what_the_trainer_does(
    engine, architecture, engine_of
):
    """New weights, by the names that it knows; then the probes, packed, beside the engine's own."""
    served, config, task = engine_of(engine, architecture)
    torch.manual_seed(1)
    model = tba.load_model(config, config.model, torch.float32, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sequences, expected = [], []
    for prompt, responses in tba.probes(task):
        scores = tba.token_logprobs(
            tba.TokenLogProbs(model, 0.7), [(prompt, responses)], config, temperature=1.0
        )
        for response, values in zip(responses, scores, strict=True):
            sequences.append(np.concatenate([prompt, response]))
            expected.append(values)

    def gap():
        found = served.prompt_logprobs(sequences)
        pairs = zip(found, expected, strict=True)
        return max(np.abs(one[-len(other) :] - other).max() for one, other in pairs)

    assert gap() > 0.1  # the old weights
    send(served, model)
    assert gap() < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_completions_are_whole_and_their_logprobs_the_policys(engine, engine_of):
    served, config, task = engine_of(engine)
    for i in range(3):
        served.submit(request(task, i, 4, temperature=(0.7, 1.3, 0.5)[i]))
    served.submit(request(task, 3, 1, temperature=0.0))
    done = finish(served)
    model = tba.load_model(config, config.model, torch.float32, CPU)
    for i, completion in done.items():
        temperature = completion.request.temperature or 1.0
        own = completion.tokens, completion.logprobs, temperature
        check_logprobs(model, config, task.train_prompts[i], *own)
        assert len(completion.tokens) == completion.request.n
        for tokens, ended in zip(completion.tokens, completion.ended, strict=True):
            closes = np.isin(tokens, tba.end_tokens(*tba.check_model("model", config)))
            assert not closes[:-1].any() and closes[-1] == ended
            assert ended or len(tokens) == 12
    ids = torch.from_numpy(task.train_prompts[3]).long()[None]
    for token in done[3].tokens[0]:  # greedy is the argmax, beside requests that sample
        assert int(model(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[int(token)]])], 1)
    served.submit(request(task, 3, 8, temperature=1.5, top_p=0.001))
    for tokens in finish(served)[3].tokens:  # and so is all of a nucleus of almost nothing
        np.testing.assert_array_equal(tokens, done[3].tokens[0])


def scaled(path):
    """A model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def loader(served, model, step):
    """A function that loads a model's weights, as version 3, when it is called this often."""
    calls = itertools.count(1)

    def load():
        if next(calls) == step:
            send(served, model, version=3)

    return load


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_load_with_requests_in_flight(engine, engine_of, model_of):
    """What is begun after the load has the new weights' log-probabilities."""
    served, config, task = engine_of(engine, max_response_tokens=24)
    other = scaled(model_of("llama"))
    load = loader(served, other, step=6)
    served.submit(request(task, 0, 4, max_tokens=24))
    before = finish(served, load)[0]
    assert all(np.isfinite(values).all() for values in before.logprobs)
    lasts = [3 if len(tokens) > 6 else -1 for tokens in before.tokens]
    assert before.versions == [(-1, last) for last in lasts] and 3 in lasts
    served.submit(request(task, 0, 4, max_tokens=24))
    after = finish(served)[0]
    assert after.versions == [(3, 3)] * 4
    check_logprobs(other, config, task.train_prompts[0], after.tokens, after.logprobs)


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_that_waited_for_a_slot_while_weights_loaded_use_nothing_of_the_old_ones(
    engine, engine_of, model_of
):
    """Nor the prompt's KV, which a response of the same request computed before the load."""
    served, config, task = engine_of(engine, max_response_tokens=24, sequences_in_flight=4)
    other = scaled(model_of("llama"))
    load = loader(served, other, step=2)
    prompts = [np.resize(prompt, 160) for prompt in task.train_prompts[:4]]  # over a block of KV
    for i, prompt in enumerate(prompts):  # some responses of the second wait, and the last two
        served.submit(tba.Request(i, prompt, n=3, max_tokens=24, temperature=0.7, seed=i))
    done = finish(served, load)
    waited = 0
    for i, completion in done.items():
        own = completion.versions, completion.tokens, completion.logprobs
        for (first, _), tokens, logprobs in zip(*own, strict=True):
            if first == 3:
                check_logprobs(other, config, prompts[i], [tokens], [logprobs])
                waited += 1
    assert waited >= 6


@pytest.mark.parametrize("architecture", [*FAMILIES, "olmo2"])
def test_saved_weights_are_the_models_under_its_files_names(
    gsm8k, model_of, tmp_path, architecture
):
    """With adapters merged, tied weights once; `from_pretrained` gives the same logits."""
    rank = 4 if architecture in ("llama", "olmo2") else 0  # peft has no default for the latter
    path = model_of(architecture)
    learner = learner_of(gsm8k, tmp_path / "run", model=path, lora_rank=rank)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    (tmp_path / "saved").mkdir()
    weights = tba.saved_weights(learner)
    tba.save_model(learner.model, weights, learner.task, tmp_path / "saved")
    names = []
    for folder in (path, tmp_path / "saved"):
        with tba.safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.from_numpy(learner.task.train_prompts[0]).long()[None]
    with torch.no_grad():
        expected = learner.model.eval()(ids.to(learner.model.device)).logits.cpu()
        torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-4, rtol=1e-4)
        old = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        assert (old - expected).abs().max() > 0.1
