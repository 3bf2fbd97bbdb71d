"""Engines against the Trainer's own computation: weights, log-probabilities, sampling."""

import itertools
import time

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
    if not isinstance(served, tba.TransformersEngine):
        weights = tba.revert_weight_conversion(model, weights)
    served.load_weights(weights.items(), version)


def test_in_bfloat16_the_transformers_engine_samples_from_float32_logits(engine_of):
    served, _, task = engine_of("transformers", dtype="bfloat16")
    ids = torch.from_numpy(task.train_prompts[0]).long()[None].to(served.device)
    with torch.no_grad():
        logits = served.model(ids).logits
        hidden = served.model.base_model(ids).last_hidden_state
        exact = hidden.double() @ served.model.get_output_embeddings().weight.double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)  # bfloat16: 4e-3


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_transfer_the_engine_computes_what_the_trainer_does(
    engine, architecture, engine_of, model_of
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
    policy = tba.TokenLogProbs(model, 0.7)
    for i, completion in done.items():
        temperature = completion.request.temperature or 1.0
        groups = [(task.train_prompts[i], completion.tokens)]
        scored = tba.token_logprobs(policy, groups, config, temperature)
        assert len(completion.tokens) == completion.request.n
        for tokens, logprobs, ended, own in zip(
            completion.tokens, completion.logprobs, completion.ended, scored, strict=True
        ):
            np.testing.assert_allclose(logprobs, own, atol=1e-3)
            closes = np.isin(tokens, tba.end_tokens(*tba.check_model("model", config)))
            assert not closes[:-1].any() and closes[-1] == ended
            assert ended or len(tokens) == 12
    ids = torch.from_numpy(task.train_prompts[3]).long()[None]
    for token in done[3].tokens[0]:  # greedy is the argmax, beside requests that sample
        assert int(model(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[int(token)]])], 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_follow_the_policy(engine, engine_of):
    """The mean log-probability of first tokens is minus the entropy, and so for second ones."""
    served, config, task = engine_of(engine, max_response_tokens=2, sequences_in_flight=512)
    n = 4096
    for i in range(8):
        served.submit(request(task, i, n // 8, max_tokens=1))
    done = finish(served)
    model = tba.load_model(config, config.model, torch.float32, CPU)
    surprise = []
    for i, completion in done.items():
        ids = torch.from_numpy(task.train_prompts[i]).long()[None]
        logprobs = (model(ids).logits[0, -1] / 0.7).log_softmax(-1).detach()
        entropy = -(logprobs.exp() * logprobs).sum()
        sampled = torch.tensor([int(tokens[0]) for tokens in completion.tokens])
        surprise.append(logprobs[sampled] + entropy)
    surprise = torch.cat(surprise)
    standard_error = surprise.std() / n**0.5
    assert standard_error < 0.05
    assert abs(surprise.mean()) < 4 * standard_error


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
    groups = [(task.train_prompts[0], after.tokens)]
    scored = tba.token_logprobs(tba.TokenLogProbs(other, 0.7), groups, config)
    for logprobs, own in zip(after.logprobs, scored, strict=True):
        np.testing.assert_allclose(logprobs, own, atol=1e-3)


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
    policy = tba.TokenLogProbs(other, 0.7)
    waited = 0
    for i, completion in done.items():
        new = [j for j, (first, _) in enumerate(completion.versions) if first == 3]
        waited += len(new)
        if new:
            groups = [(prompts[i], [completion.tokens[j] for j in new])]
            scored = tba.token_logprobs(policy, groups, config)
            for j, own in zip(new, scored, strict=True):
                np.testing.assert_allclose(completion.logprobs[j], own, atol=1e-3)
    assert waited >= 6


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


def test_a_member_that_never_comes_ends_a_transfer_in_time():
    store = tba.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        limit = tba.timedelta(seconds=1)
        group = tba.WeightChannel("127.0.0.1", store.port, False, limit, "alone", size=2)
        group.form()
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nucleus_of_almost_nothing_is_the_argmax(engine, engine_of):
    served, _, task = engine_of(engine)
    served.submit(request(task, 0, 8, temperature=1.5, top_p=0.001))
    served.submit(request(task, 1, 8, temperature=1.5))
    served.submit(
        tba.Request(id=2, prompt=task.train_prompts[0], n=1, max_tokens=12, temperature=0.0)
    )
    done = finish(served)
    (greedy,) = done[2].tokens
    assert all(np.array_equal(tokens, greedy) for tokens in done[0].tokens)
    assert len({tokens.tobytes() for tokens in done[1].tokens}) > 1
