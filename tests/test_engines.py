"""Generation and weight transfer: each engine says what the Trainer says, before and after."""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, arguments
from hypothesis import given
from hypothesis import strategies as st

import tba

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "tied_llama", "gpt_neox", "gpt2", "qwen2"]
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
KEEP_OR_RECOMPUTE = [
    ("transformers", "keep"),
    pytest.param("vllm", "keep", marks=pytest.mark.vllm),
    pytest.param("vllm", "recompute", marks=pytest.mark.vllm),
]


def close(engine):
    if hasattr(engine, "llm"):
        engine.engine.engine_core.shutdown()
        del engine.llm, engine.engine
        gc.collect()  # here, rather than in a thread of a later test


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    monkeypatch.setattr(tba, "BUCKET_BYTES", 100_000)  # of even a tiny model


@pytest.fixture
def engine_of(gsm8k, model_of, tmp_path):
    """Function that builds an engine; also returns its config and problem."""
    closing = []

    def build(engine, architecture="llama", seed=0, **flags):
        model = gsm8k / "model" if architecture == "tiny" else model_of(architecture)
        flags = {"model": model, "temperature": 0.7, "dtype": "float32", **flags}
        config = tba.parse(arguments(gsm8k, tmp_path, engine=engine, **flags))
        tba.resolve(config)
        problem = tba.load_problem(config)
        built = tba.ENGINES[engine](config, problem, CPU, seed)
        closing.append(built)
        return built, config, problem

    yield build
    for engine in closing:
        close(engine)


def run(engine, requests, between_steps=lambda: None):
    """Completions of requests by id."""
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.unfinished:
        done.update({c.request.id: c for c in engine.step(between_steps)})
    return done


def at_decode_step(number, action):
    """A function for `between_steps` that acts once, after that many decode steps."""
    counted = []

    def between_steps():
        counted.append(None)
        if len(counted) == number:
            action()

    return between_steps


def perturbed(config, seed=1):
    """The model with other weights: what training leaves behind."""
    model = tba.load_model(config, torch.float32, CPU)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def weight_group(config, shared, rank, name="weights-1"):
    """One end of a weight group of two; its ends find each other in a dict of this process."""
    return tba.WeightGroup(config, shared, name, rank, 2, CPU)


def both_ends(config, shared, name="weights-1"):
    """Both ends of a weight group, (sender, receiver), formed in two threads."""
    sender = weight_group(config, shared, 0, name)
    receiver = weight_group(config, shared, 1, name)
    thread = threading.Thread(target=sender.form)
    thread.start()
    receiver.form()
    thread.join(30)
    assert sender.formed and receiver.formed
    return sender, receiver


def transfer(model, engine, config):
    """Send a snapshot of a model's weights to an engine through a real weight group."""
    state = tba.checkpoint_state(model)
    shapes = {key: tensor.shape for key, tensor in state.items()}
    sender, receiver = both_ends(config, {})
    snapshot = tba.FlatWeights(shapes, torch.float32, CPU)
    staging = tba.FlatWeights(shapes, torch.float32, CPU)
    snapshot.copy_from(state.items())
    assert len(snapshot.buckets) == len(staging.buckets) > 1
    works = sender.broadcast(snapshot.buckets)
    receiver.wait(receiver.broadcast(staging.buckets))
    sender.wait(works)
    engine.load_weights(staging.views.items())
    staging.flat.fill_(math.nan)  # the engine holds on to nothing of it: the next sync refills it
    sender.abort()
    receiver.abort()


# ------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_transfer_the_engine_is_the_trainer(engine, architecture, engine_of):
    engine, config, problem = engine_of(engine, architecture)
    probes = problem.probes()
    pairs = [(tokens[:1], [tokens[1:]]) for tokens in probes]
    before = engine.prompt_logprobs(probes)
    model = perturbed(config)
    transfer(model, engine, config)
    expected = tba.token_logprobs(tba.TokenLogProbs(model, 1.0), pairs, config)
    for old, new, want in zip(before, engine.prompt_logprobs(probes), expected, strict=True):
        assert np.abs(old - new).max() > 0.1  # the transfer mattered
        np.testing.assert_allclose(new, want.numpy(), atol=1e-4)

    # what it reports of its own samples is the Trainer's tempered policy, at any temperature
    prompts, temperatures = problem.prompts[:4], [None, None, None, 1.6]
    requests = [
        tba.Request(i, prompt, 4, seed=i, temperature=temperatures[i])
        for i, prompt in enumerate(prompts)
    ]
    for i, completion in run(engine, requests).items():
        policy = tba.TokenLogProbs(model, temperatures[i] or config.temperature)
        expected = tba.token_logprobs(policy, [(prompts[i], completion.tokens)], config)
        for want, logprobs in zip(expected, completion.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, want.numpy(), atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_completions_are_whole_and_end_as_they_say(engine, engine_of):
    engine, config, problem = engine_of(
        engine, "tiny", max_response_tokens=20, min_response_tokens=14
    )
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
            assert tokens.base is None and logprobs.base is None  # it keeps no batch in memory
            assert ended == (tokens[-1] in problem.end_tokens)
            assert len(tokens) > 14 and (ended or len(tokens) == 20)
            assert not set(tokens[:-1]) & set(problem.end_tokens)
            ends += ended
    assert 0 < ends < sum(1 + i % 3 for i in range(40))


def test_a_batch_of_the_transformers_engine_is_as_large_as_allowed(engine_of):
    engine, _, problem = engine_of(
        "transformers", "tiny", max_response_tokens=2, sequences_in_flight=7
    )
    for i in range(5):
        engine.submit(tba.Request(i, problem.prompts[i], 3))
    engine.submit(tba.Request(5, problem.prompts[5], 20))  # more than allowed: by itself
    batches = []
    while engine.unfinished:
        batches.append([c.request.id for c in engine.step()])
    assert batches == [[0, 1], [2, 3], [4], [5]]


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_is_the_argmax_beside_requests_that_sample(engine, engine_of):
    engine, config, problem = engine_of(engine, "tiny")
    model = tba.load_model(config, torch.float32, CPU)
    prompts = problem.held_out[:6]
    requests = [tba.Request(i, p, 1, greedy=True) for i, p in enumerate(prompts)]
    requests[2:2] = [tba.Request("sampled", prompts[0], 3, temperature=2.0)]
    done = run(engine, requests)
    assert len({tuple(tokens) for tokens in done.pop("sampled").tokens}) > 1
    for i, completion in done.items():
        ids = torch.from_numpy(np.concatenate([prompts[i], completion.tokens[0]])).long()
        logits = model(ids[None]).logits[0, len(prompts[i]) - 1 : -1]
        assert logits.argmax(-1).tolist() == completion.tokens[0].tolist()
        want = logits.log_softmax(-1).max(-1).values.detach()  # temperature 1
        np.testing.assert_allclose(completion.logprobs[0], want.numpy(), atol=1e-4)


@pytest.mark.parametrize(("engine", "on_sync"), KEEP_OR_RECOMPUTE)
def test_weights_load_with_requests_in_flight(engine, on_sync, engine_of):
    """Tokens after the load are the new policy's; with recompute, their whole context is too."""
    engine, config, problem = engine_of(engine, max_response_tokens=16, on_sync=on_sync)
    old = tba.TokenLogProbs(tba.load_model(config, torch.float32, CPU), config.temperature)
    model = perturbed(config)
    new = tba.TokenLogProbs(model, config.temperature)
    requests = [tba.Request(i, prompt, 3, seed=i) for i, prompt in enumerate(problem.prompts[:4])]
    done = run(engine, requests, at_decode_step(6, lambda: transfer(model, engine, config)))
    assert len(done) == 4
    changed = 0
    for completion in done.values():
        for tokens, logprobs in zip(completion.tokens, completion.logprobs, strict=True):
            group = [(completion.request.prompt, [tokens])]
            by_old, by_new = (tba.token_logprobs(p, group, config)[0].numpy() for p in (old, new))
            np.testing.assert_allclose(logprobs[:5], by_old[:5], atol=1e-4)
            if on_sync == "recompute":
                np.testing.assert_allclose(logprobs[8:], by_new[8:], atol=1e-4)
            changed += np.abs(logprobs[8:] - by_old[8:]).max(initial=0) > 0.05
    assert changed >= 6


@pytest.mark.parametrize("engine", ENGINES)
def test_new_requests_never_reuse_a_prefix_of_older_weights(engine, engine_of):
    """A cached prompt of 40 tokens must not survive a load, even with requests still running."""
    engine, config, problem = engine_of(engine)
    prompt = np.concatenate([problem.prompts[0], problem.prompts[1]])[:40]
    model = perturbed(config)

    def load_and_submit():
        transfer(model, engine, config)
        engine.submit(tba.Request("new", prompt, 2))

    done = run(engine, [tba.Request("running", prompt, 2)], at_decode_step(3, load_and_submit))
    policy = tba.TokenLogProbs(model, config.temperature)
    for tokens, logprobs in zip(done["new"].tokens, done["new"].logprobs, strict=True):
        want = tba.token_logprobs(policy, [(prompt, [tokens])], config)[0].numpy()
        np.testing.assert_allclose(logprobs, want, atol=1e-4)


def sampled(engine, problem, seed, **more):
    """Responses to eight prompts."""
    requests = [tba.Request(i, problem.prompts[i], 4, seed=seed + i) for i in range(8)]
    done = run(engine, requests, **more)
    return [tokens.tolist() for i in range(8) for tokens in done[i].tokens]


def test_same_seeds_same_samples_whatever_happens_between_decode_steps(engine_of):
    engine, _, problem = engine_of("transformers", "tiny")
    victim, _, _ = engine_of("transformers", "tiny", max_response_tokens=3)

    def judge():  # as a Searcher that judges an evaluation's answers
        run(victim, [tba.Request(0, problem.prompts[0], 2, seed=5)])

    first = sampled(engine, problem, 7)
    assert first == sampled(engine, problem, 7) != sampled(engine, problem, 99)
    assert first == sampled(engine, problem, 7, between_steps=at_decode_step(4, judge))


def test_a_checkpoints_own_generation_settings_do_not_change_sampling(gsm8k, engine_of, tmp_path):
    ours, _, problem = engine_of("transformers", "tiny")
    folder = shutil.copytree(gsm8k / "model", tmp_path / "model")
    settings = {
        "do_sample": False,
        "repetition_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.01,
        "min_p": 0.5,
        "num_beams": 2,
        "num_return_sequences": 2,
        "suppress_tokens": list(range(10, 40)),
        "max_new_tokens": 3,
        "max_length": 5,
        "stop_strings": ["1"],
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "repetition_penalty": 3.0}))
    theirs, _, _ = engine_of("transformers", model=folder)
    assert sampled(theirs, problem, 7) == sampled(ours, problem, 7)
    greedy = lambda e: run(e, [tba.Request(0, problem.prompts[0], 1, greedy=True)])[0].tokens[0]
    assert greedy(theirs).tolist() == greedy(ours).tolist()


@pytest.mark.parametrize(("top_p", "own"), [(1.0, None), (0.7, None), (1.0, 0.7)])
def test_samples_follow_the_policy(top_p, own, engine_of):
    """First tokens over many samples have the model's tempered distribution (chi-square)."""
    engine, config, problem = engine_of(
        "transformers", max_response_tokens=1, sequences_in_flight=4010, top_p=top_p
    )
    prompt = problem.prompts[0][:8]
    request = tba.Request(0, prompt, 4000, seed=3, top_p=own)
    top_p = own or top_p
    both = run(engine, [request, tba.Request(1, prompt, 10)])  # the other's nucleus is another
    tokens = np.concatenate(both[0].tokens)
    model = tba.load_model(config, torch.float32, CPU)
    logits = model(torch.from_numpy(prompt).long()[None]).logits[0, -1].double() / 0.7
    probability = logits.softmax(-1).detach().numpy()
    order = np.argsort(-probability)
    nucleus = order[: 1 + np.searchsorted(probability[order].cumsum(), top_p)]
    inside = np.isin(np.arange(len(probability)), nucleus)
    probability = np.where(inside, probability, 0) / probability[inside].sum()
    expected = 4000 * probability
    counts = np.bincount(tokens, minlength=len(expected))
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 0.5)).sum()
    freedom = likely.sum()
    assert freedom > 20 and statistic < freedom + 4 * np.sqrt(2 * freedom) + 8
    assert not counts[~inside].any()


def queues(searcher, start):
    return tba.Link(searcher, start, None, None, None, None)


def test_every_searcher_and_every_start_has_a_seed_of_its_own():
    places = [(seed, i, start) for seed in range(3) for i in range(8) for start in range(8)]
    seeds = {queues(i, start).seed(tba.Config(seed=seed)) for seed, i, start in places}
    assert len(seeds) == len(places) and all(0 <= seed < 2**32 for seed in seeds)
    assert queues(1, 2).seed(tba.Config(seed=3)) == queues(1, 2).seed(tba.Config(seed=3))


@pytest.mark.vllm
def test_vllm_searchers_begin_with_different_responses(engine_of):
    """Those of one Searcher's first start can be had again; another's, or a restart's, differ."""

    def first_responses(searcher, start):
        seed = queues(searcher, start).seed(tba.Config())
        engine, _, problem = engine_of("vllm", "tiny", seed=seed)
        responses = sampled(engine, problem, 0)
        close(engine)
        return responses

    first = first_responses(0, 0)
    assert first == first_responses(0, 0)
    assert first != first_responses(1, 0) and first != first_responses(0, 1)


# ------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoint_names_are_those_of_the_saved_file(architecture, model_of, tmp_path):
    from safetensors import safe_open

    folder = model_of(architecture)
    model = tba.transformers.AutoModelForCausalLM.from_pretrained(folder)
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


@pytest.fixture
def config(gsm8k, tmp_path):
    """Its --transfer_timeout is long enough for whatever works on a busy machine."""
    before = set(threading.enumerate())
    yield tba.parse(arguments(gsm8k, tmp_path, transfer_timeout=30, dtype="float32"))
    for thread in set(threading.enumerate()) - before:  # one that is stuck in Gloo when the
        thread.join(40)  # interpreter ends would abort it


def impatient(config):
    return dataclasses.replace(config, transfer_timeout=3)


@contextlib.contextmanager
def fails_within(seconds):
    """What is done here ends with TransferError, within that time and a little."""
    start = time.monotonic()
    with pytest.raises(tba.TransferError) as caught:
        yield caught
    assert time.monotonic() - start < seconds + 20


def works(sender, receiver):
    """Whether a weight group transfers."""
    sent, received = torch.arange(6.0), torch.zeros(6)
    works = sender.broadcast([sent])
    receiver.wait(receiver.broadcast([received]))
    sender.wait(works)
    return torch.equal(sent, received)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    limit=st.integers(4, 120),
)
def test_buckets_are_whole_tensors_in_order(sizes, limit):
    shapes = {f"w{i}": torch.Size([size]) for i, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "BUCKET_BYTES", limit)
        buckets = tba.plan_buckets(shapes, itemsize=4)
        flat = tba.FlatWeights(shapes, torch.float32, CPU)
    assert [name for bucket in buckets for name in bucket] == list(shapes)
    for bucket in buckets:
        size = 4 * sum(shape.numel() for shape in bucket.values())
        assert size <= limit or len(bucket) == 1
    for one, other in itertools.pairwise(buckets):  # none could have held the next tensor too
        size = 4 * sum(shape.numel() for shape in one.values())
        assert size + 4 * next(iter(other.values())).numel() > limit
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    flat.copy_from(state.items())
    assert torch.equal(torch.cat(flat.buckets), torch.cat(list(state.values())))
    assert all(torch.equal(flat.views[name], tensor) for name, tensor in state.items())


def test_process_groups_that_begin_at_once_do_not_crash():
    """Without TORCH_FR_BUFFER_SIZE=0 this ends with SIGSEGV in one of about six runs."""
    program = """
import threading, tba
dist = tba.dist
store, tensor = dist.HashStore(), tba.torch.zeros(1)
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
def begin(thread):
    for i in range(300):
        place = dist.PrefixStore(f"{thread}-{i}", store), 0, 1, options
        dist.ProcessGroupGloo(*place).broadcast(tensor, 0).wait()
threads = [threading.Thread(target=begin, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_never_comes(rank, config):
    """The other member's wait ends; a group of another name forms in the same store after it."""
    shared = {}
    with fails_within(3):
        weight_group(impatient(config), shared, rank).form()
    assert works(*both_ends(config, shared, "weights-2"))


def test_a_member_that_comes_and_then_does_nothing(config):
    """Formation proves the connections by a first broadcast, in which this one takes no part.

    Weights that are not sent after it end the wait in the same way, and so does giving up.
    """
    shared, silent = {}, []

    def come():
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = tba.ManagerStore(shared, "weights-1", 30)
        silent.append(dist.ProcessGroupGloo(store, 0, 2, options))

    thread = threading.Thread(target=come)
    thread.start()
    with fails_within(3):
        weight_group(impatient(config), shared, 1).form()
    thread.join(30)
    assert silent  # it had connected

    sender, receiver = both_ends(config, shared, "weights-2")
    receiver.config = dataclasses.replace(config, transfer_timeout=0.5)
    with fails_within(0.5):
        receiver.wait(receiver.broadcast([torch.zeros(3)]))
    receiver.config = dataclasses.replace(config, transfer_timeout=30)
    with fails_within(0.3):
        works_under_way = receiver.broadcast([torch.zeros(3)])
        threading.Timer(0.3, receiver.abort).start()
        receiver.wait(works_under_way)
    start = time.monotonic()
    sender.abort()  # does not wait for what is stuck
    assert time.monotonic() - start < 20
    assert works(*both_ends(config, shared, "weights-3"))


class BrokenBroadcast:
    """A group whose broadcasts fail as NCCL's do, when they begin or when they are waited for."""

    def __init__(self, group, when):
        self.group, self.when = group, when

    def fail(self):
        raise dist.DistBackendError("NCCL error: remote process exited\nsecond line")

    def broadcast(self, tensor, root):
        if self.when == "begun":
            self.fail()
        self.work = self.group.broadcast(tensor, root)
        return self

    def abort(self):
        self.group.abort()

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        self.fail()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["waited for", "begun"])
def test_a_broken_backend_is_a_lost_transfer_on_both_sides(when, rank, config):
    ends = both_ends(config, {})
    if when == "waited for":
        ends[1 - rank].broadcast([torch.zeros(3)])
    ends[rank].group = BrokenBroadcast(ends[rank].group, when)
    try:
        with fails_within(4) as caught:
            ends[rank].wait(ends[rank].broadcast([torch.zeros(3)]))
        assert str(caught.value) == "NCCL error: remote process exited"
    finally:
        for group in ends:
            group.abort()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_budget_for_prompt_and_response_together(engine, engine_of):
    flags = {"max_total_tokens": 14, "max_response_tokens": 9, "temperature": 2.0}
    with pytest.raises(ValueError, match=r"--max_total_tokens 14: .* set at least"):
        engine_of(engine, **flags)  # the data have longer prompts
    built, config, problem = engine_of(engine, **flags | {"max_total_tokens": 60})
    config.max_total_tokens = 14
    prompts = [problem.prompts[0][:length] for length in (2, 5, 9, 13)]
    requests = [tba.Request(i, prompt, 6, seed=i) for i, prompt in enumerate(prompts)]
    done = run(built, requests)
    for i, limit in enumerate((9, 9, 5, 1)):
        for tokens, logprobs, ended in zip(
            done[i].tokens, done[i].logprobs, done[i].ended, strict=True
        ):
            assert len(tokens) == len(logprobs) <= limit
            assert ended == (tokens[-1] in problem.end_tokens)
            assert ended or len(tokens) == limit
    assert any(len(tokens) == 9 for tokens in done[0].tokens)
