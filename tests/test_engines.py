"""Generation and weight transfer: each engine says what the Trainer says, before and after."""

import os
import threading

import numpy as np
import pytest
import torch
from conftest import arguments

import tba

ARCHITECTURES = ["llama", "tied_llama", "gpt_neox", "gpt2", "qwen2"]
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture
def engine_of(gsm8k, model_of, tmp_path):
    """Function that builds an engine; also returns its config and problem."""
    closing = []

    def build(engine, architecture="llama", **flags):
        model = gsm8k / "model" if architecture == "tiny" else model_of(architecture)
        flags = {"temperature": 0.7, "dtype": "float32", **flags}
        config = tba.parse(arguments(gsm8k, tmp_path, model=model, engine=engine, **flags))
        config.resolve()
        problem = tba.load_problem(config)
        built = tba.ENGINES[engine](config, problem, torch.device("cpu"))
        closing.append(built)
        return built, config, problem

    yield build
    for engine in closing:
        if hasattr(engine, "llm"):
            engine.engine.engine_core.shutdown()
            del engine.llm, engine.engine


def run(engine, requests):
    """Completions of requests by id."""
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.unfinished:
        done.update({c.request.id: c for c in engine.step()})
    return done


def perturbed(config, seed=1):
    """The model with other weights: what training leaves behind."""
    model = tba.load_model(config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def transfer(model, engine, config, recompute=False):
    """Send a model's weights to an engine over a real link: two ends in two threads."""
    state = tba.checkpoint_state(model)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    board = tba.Blackboard()  # threads share it without a Manager

    def link(rank):
        membership = tba.Membership("test", rank, 2, "gloo")
        return tba.WeightLink(config, shapes, membership, torch.device("cpu"), board, lambda: None)

    sender = threading.Thread(target=lambda: link(0).send(state))
    sender.start()
    receiver = link(1)
    engine.load_weights(receiver.receive(), recompute)
    sender.join(30)
    assert not sender.is_alive() and receiver.lost is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_transfer_the_engine_is_the_trainer(engine, architecture, engine_of, monkeypatch):
    monkeypatch.setattr(tba.WeightLink, "BUCKET_BYTES", 100_000)  # several buckets
    engine, config, problem = engine_of(engine, architecture)
    probes = problem.probes()
    pairs = [(tokens[:1], tokens[1:]) for tokens in probes]
    before = engine.score(probes)
    model = perturbed(config)
    transfer(model, engine, config)
    expected = tba.score(tba.TokenLogProbs(model, 1.0), pairs, config)
    for old, new, want in zip(before, engine.score(probes), expected, strict=True):
        assert np.abs(old - new).max() > 0.1  # the transfer mattered
        np.testing.assert_allclose(new, want.numpy(), atol=1e-4)

    # what it reports of its own samples is the Trainer's tempered policy
    prompts = problem.prompts[:3]
    requests = [tba.Request(i, prompt, 4, seed=i) for i, prompt in enumerate(prompts)]
    policy = tba.TokenLogProbs(model, config.temperature)
    for i, completion in run(engine, requests).items():
        pairs = [(prompts[i], tokens) for tokens in completion.tokens]
        for want, logprobs in zip(
            tba.score(policy, pairs, config), completion.logprobs, strict=True
        ):
            np.testing.assert_allclose(logprobs, want.numpy(), atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_completions_are_whole_and_end_as_they_say(engine, engine_of):
    engine, config, problem = engine_of(engine, "tiny", max_response_tokens=12)
    requests = [tba.Request(i, problem.prompts[i], 1 + i % 3, seed=i) for i in range(40)]
    done = run(engine, requests)
    assert sorted(done) == list(range(40))
    ends = 0
    for i, completion in done.items():
        assert len(completion.tokens) == len(completion.logprobs) == 1 + i % 3
        for tokens, logprobs, ended in zip(
            completion.tokens, completion.logprobs, completion.ended, strict=True
        ):
            assert tokens.dtype == np.int32 and len(tokens) == len(logprobs)
            assert ended == (tokens[-1] in problem.end_tokens)
            assert ended or len(tokens) == 12
            assert not set(tokens[:-1]) & set(problem.end_tokens)
            ends += ended
    assert 0 < ends < sum(1 + i % 3 for i in range(40))


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_is_the_argmax(engine, engine_of):
    engine, config, problem = engine_of(engine, "tiny")
    model = tba.load_model(config, torch.float32, torch.device("cpu"))
    prompts = problem.held_out[:6]
    requests = [tba.Request(i, p, 1, greedy=True) for i, p in enumerate(prompts)]
    for i, completion in run(engine, requests).items():
        ids = torch.from_numpy(np.concatenate([prompts[i], completion.tokens[0]])).long()
        best = model(ids[None]).logits[0].argmax(-1)
        assert best[len(prompts[i]) - 1 : -1].tolist() == completion.tokens[0].tolist()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_load_with_requests_in_flight(engine, recompute, engine_of):
    """Tokens after the load are the new policy's; with recompute, their whole context is too."""
    engine, config, problem = engine_of(engine, "llama", max_response_tokens=16)
    old = tba.TokenLogProbs(
        tba.load_model(config, torch.float32, torch.device("cpu")), config.temperature
    )
    model = perturbed(config)
    new = tba.TokenLogProbs(model, config.temperature)
    for i, prompt in enumerate(problem.prompts[:4]):
        engine.submit(tba.Request(i, prompt, 3, seed=i))
    done = []
    for _ in range(6):
        done += engine.step()
    transfer(model, engine, config, recompute)
    while engine.unfinished:
        done += engine.step()
    assert len(done) == 4
    changed = 0
    for completion in done:
        for tokens, logprobs in zip(completion.tokens, completion.logprobs, strict=True):
            pair = [(completion.request.prompt, tokens)]
            by_old, by_new = (tba.score(p, pair, config)[0].numpy() for p in (old, new))
            np.testing.assert_allclose(logprobs[:5], by_old[:5], atol=1e-4)
            if recompute:
                np.testing.assert_allclose(logprobs[8:], by_new[8:], atol=1e-4)
            changed += np.abs(logprobs[8:] - by_old[8:]).max(initial=0) > 0.05
    assert changed >= 6


@pytest.mark.parametrize("engine", ENGINES)
def test_new_requests_never_reuse_a_prefix_of_older_weights(engine, engine_of):
    """A cached prompt of 40 tokens must not survive a load, even with requests still running."""
    engine, config, problem = engine_of(engine, "llama")
    prompt = np.concatenate([problem.prompts[0], problem.prompts[1]])[:40]
    engine.submit(tba.Request("running", prompt, 2))
    for _ in range(3):
        engine.step()
    model = perturbed(config)
    transfer(model, engine, config)
    engine.submit(tba.Request("new", prompt, 2))
    done = {}
    while engine.unfinished:
        done.update({c.request.id: c for c in engine.step()})
    policy = tba.TokenLogProbs(model, config.temperature)
    for tokens, logprobs in zip(done["new"].tokens, done["new"].logprobs, strict=True):
        want = tba.score(policy, [(prompt, tokens)], config)[0].numpy()
        np.testing.assert_allclose(logprobs, want, atol=1e-4)


def test_same_seeds_same_samples(engine_of):
    engine, _, problem = engine_of("transformers", "tiny")
    requests = [tba.Request(i, problem.prompts[i], 4, seed=7 + i) for i in range(8)]
    first, second = run(engine, requests), run(engine, requests)
    other = run(engine, [tba.Request(i, problem.prompts[i], 4, seed=99 + i) for i in range(8)])
    sample = lambda done: [t.tolist() for i in range(8) for t in done[i].tokens]
    assert sample(first) == sample(second) != sample(other)


def test_samples_follow_the_policy(engine_of):
    """First tokens over many samples have the model's tempered distribution (chi-square)."""
    engine, config, problem = engine_of(
        "transformers", "tiny", max_response_tokens=1, sequences_in_flight=4000
    )
    prompt = problem.prompts[0]
    tokens = np.concatenate(run(engine, [tba.Request(0, prompt, 4000, seed=3)])[0].tokens)
    model = tba.load_model(config, torch.float32, torch.device("cpu"))
    logits = model(torch.from_numpy(prompt).long()[None]).logits[0, -1].double() / 0.7
    expected = 4000 * logits.softmax(-1).detach().numpy()
    counts = np.bincount(tokens, minlength=len(expected))
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 0.5)).sum()
    freedom = likely.sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoint_names_are_those_of_the_saved_file(architecture, model_of, tmp_path):
    from safetensors import safe_open

    folder = model_of(architecture)
    model = tba.AutoModelForCausalLM.from_pretrained(folder)
    (file,) = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    with safe_open(folder / file, "pt") as saved:
        state = tba.checkpoint_state(model)
        assert set(state) == set(saved.keys())
        for name, tensor in state.items():
            assert torch.equal(tensor, saved.get_tensor(name))
    # live views: training the model changes what is sent
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(not tensor.any() for tensor in state.values())


def test_a_flipped_bit_changes_the_fingerprint():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(7, 5, dtype=dtype)
        whole = int(tba.fingerprint(tensor, dtype))
        assert whole == int(tba.fingerprint(tensor.t(), dtype))  # a sum: the layout is no matter
        bits = tensor.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
        for bit in range(8 * dtype.itemsize - 1):
            bits[3, 2] ^= 1 << bit
            assert int(tba.fingerprint(tensor, dtype)) != whole
            bits[3, 2] ^= 1 << bit
        assert int(tba.fingerprint(tensor, dtype)) == whole
