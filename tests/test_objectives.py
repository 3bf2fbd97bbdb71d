"""The loss and its gradient against brute force; what a step of the Learner does."""

import collections
import dataclasses
import itertools
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gradients import OTHERS, budgets, gradients
from gradients import gradient_of as gradient_by
from harness import config_and_task, learner_of, plain_logprobs, plugin_of_docs, random_groups
from hypothesis import given
from hypothesis import strategies as st

import tba

DEVICE = tba.local_device()


def average(values):
    values = list(values)
    return sum(values) / len(values)


# -------------------------------------------------------------------------------------- objectives


def random_batch(B, K, seed, off_policy, far=1.0):
    torch.manual_seed(seed)
    lengths = torch.randint(1, 6, (B, K))
    logprobs = -torch.rand(int(lengths.sum()), dtype=torch.float64)
    behaviour = logprobs + off_policy * torch.randn_like(logprobs)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    ref_logprobs = logprobs.detach() + far * torch.randn_like(logprobs)
    return tba.Batch(
        logprobs=logprobs.requires_grad_(),
        behaviour=behaviour,
        ref_logprobs=ref_logprobs,
        tokens=torch.zeros(len(logprobs), dtype=torch.int64),
        lengths=lengths,
        ended=torch.ones(B, K, dtype=torch.bool),
        rewards=draw(B, K),
        versions=torch.zeros(B, K, dtype=torch.int64),
        prompt_ids=2 + torch.randperm(B),
        step=0,
        parameters={"log_z": draw(B + 3).requires_grad_()},
    )


def gradient_of(objective, batch, config):
    (gradient,) = torch.autograd.grad(objective(batch, config).loss, batch.logprobs)
    return gradient


def test_sums_over_responses_are_float64_sums_rounded_once():
    """However long a response is."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[1, 20_000, 3], [512, 2, 9_000]])
    values = -20 * torch.rand(int(lengths.sum()), generator=generator)
    batch = dataclasses.replace(random_batch(2, 3, 0, 0.0), lengths=lengths, logprobs=values)
    sums = batch.sum_tokens(values)
    parts = values.double().split(lengths.flatten().tolist())
    expected = torch.stack([part.sum() for part in parts]).float().view(2, 3)
    assert sums.dtype == torch.float32 and torch.equal(sums, expected)


def responses_of(batch):
    """Each response's own tensors, prompt by prompt: (log pi, log pi_b, log pi_ref, reward)."""
    lengths = batch.lengths.flatten().tolist()
    parts = [x.split(lengths) for x in (batch.logprobs, batch.behaviour, batch.ref_logprobs)]
    flat = list(zip(*parts, batch.rewards.flatten().tolist(), strict=True))
    K = batch.rewards.shape[1]
    return [flat[i : i + K] for i in range(0, len(flat), K)]


def advantages_of(group, divide):
    """Rewards minus their mean, divided by their standard deviation or not."""
    mean = average(r for *_, r in group)
    std = math.sqrt(sum((r - mean) ** 2 for *_, r in group) / (len(group) - 1)) + 1e-4
    return [(r - mean) / (std if divide else 1) for *_, r in group]


def gain(log_ratio, advantage, config):
    """The gain of one ratio; PPO's has no gradient where it has gone further than it should."""
    ratio, c, most = log_ratio.exp(), config.clip_range, config.ratio_cap
    low, high = (1 - c, 1 + (config.clip_high or c)) if config.ratio == "clip" else (1 / most, most)
    above, below = bool(ratio > high), bool(ratio < low)
    if config.ratio == "clip":
        limited = above if advantage > 0 else below and advantage < 0
        result = advantage * (torch.tensor(high if above else low) if limited else ratio)
    elif config.ratio == "mask":
        limited = above or below
        result = 0.0 if limited else ratio.item() * advantage * log_ratio
    else:
        limited = above
        result = min(ratio.item(), most) * advantage * log_ratio
    config.notes["clip_fraction"].append(limited)
    return result


def tb_by_hand(group, config, log_z, learned=False):
    """Equation by equation, one response at a time."""
    gaps = [p.sum() - (f.sum() + r / config.beta) / config.tau for p, _, f, r in group]
    log_z = log_z if learned else average(-gap.item() for gap in gaps)
    config.notes["log_z"].append(float(log_z))
    return average((log_z + gap) ** 2 for gap in gaps)


def rloo_by_hand(group, config, log_z, of_response=lambda p, b, a, config: a * p.sum()):
    total = [r - config.beta * float((b - f).sum()) for _, b, f, r in group]
    baseline = [(sum(total) - t) / (len(group) - 1) for t in total]
    return -average(
        of_response(p, b, t - other, config)
        for (p, b, *_), t, other in zip(group, total, baseline, strict=True)
    )


def proximal_by_hand(group, config, log_z):
    surrogate = lambda p, b, a, config: gain((p - b).sum(), a, config)
    return rloo_by_hand(group, config, log_z, surrogate)


def grpo_by_hand(group, config, log_z, divide=True):
    loss = 0.0
    for (p, b, f, _), advantage in zip(group, advantages_of(group, divide), strict=True):
        tokens = 0.0
        for x, y, z in zip(p, b, f, strict=True):
            kl = (z - x).exp() - (z - x) - 1
            tokens = tokens + gain(x - y, advantage, config) - config.kl_coefficient * kl
        loss = loss - tokens / (len(p) if divide else config.max_response_tokens)
    return loss / len(group)


def dpo_by_hand(group, config, log_z):
    rewards = [r for *_, r in group]
    (best, _, of_best, _), (worst, _, of_worst, _) = (
        group[rewards.index(f(rewards))] for f in (max, min)
    )
    margin = config.beta * ((best - of_best).sum() - (worst - of_worst).sum())
    config.notes["preferred"].append(bool(margin > 0))
    return (1 + (-margin).exp()).log() * (max(rewards) > min(rewards))


def oapl_by_hand(group, config, log_z):
    value = config.beta * math.log(average(math.exp(r / config.beta) for *_, r in group))
    c = config.behaviour_beta
    return average((c * (p - b).sum() - (r - value)) ** 2 for p, b, _, r in group)


def kimi_by_hand(group, config, log_z):
    gaps = [(p - f).sum() for p, _, f, _ in group]
    config.notes["mean_log_ratio"] += [gap.item() for gap in gaps]
    pairs = zip(advantages_of(group, False), gaps, strict=True)
    return average((a / config.beta - gap) ** 2 for a, gap in pairs)


def flowrl_by_hand(group, config, log_z):
    config.notes["log_z"].append(log_z.item())
    squares = []
    for (p, b, f, _), advantage in zip(group, advantages_of(group, True), strict=True):
        ratio = math.exp((p - b).sum().item())
        config.notes["clip_fraction"].append(ratio > config.ratio_cap)
        gap = log_z + (p - f).mean() - config.flow_beta * advantage
        squares.append(min(ratio, config.ratio_cap) * gap**2)
    return average(squares)


def ftb_by_hand(group, config, log_z):
    """Losses l(D) with l(0) = l'(0) = 0 and l''(0) = 2; log Z^ is where the slopes cancel."""
    gaps = [(f.sum() + r / config.beta) / config.tau - p.sum() for p, _, f, r in group]
    fixed = [gap.item() for gap in gaps]
    if config.divergence == "forward_kl":
        log_z = math.log(average(math.exp(gap) for gap in fixed))
        loss_of = lambda D: 2 * (D + (-D).exp() - 1)
    else:  # hellinger
        log_z = 2 * math.log(average(math.exp(gap / 2) for gap in fixed))
        loss_of = lambda D: 4 * (D + 2 * (-D / 2).exp() - 2)
    config.notes["log_z"].append(log_z)
    return average(loss_of(log_z - gap) for gap in gaps)


def of_tokens(groups, advantages, loss_of_token):
    """The mean over all tokens of a loss of (log pi, log pi_b, A)."""
    return average(
        loss_of_token(x, y, advantage)
        for group in groups
        for (p, b, *_), advantage in zip(group, advantages(group), strict=True)
        for x, y in zip(p, b, strict=True)
    )


def truncated_by_hand(groups, config, advantages, cap):
    def loss_of_token(x, y, advantage):
        ratio = math.exp(x.item() - y.item())
        config.notes["clip_fraction"].append(ratio > cap)
        return -min(ratio, cap) * advantage * x

    return of_tokens(groups, advantages, loss_of_token)


def cispo_by_hand(groups, config):
    return truncated_by_hand(groups, config, partial(advantages_of, divide=True), config.ratio_cap)


def dro_by_hand(groups, config):
    def loss_of_token(x, y, advantage):
        penalty = config.behaviour_beta / 2 * (x - y) ** 2
        config.notes["penalty"].append(penalty.item())
        return penalty - advantage * x

    return of_tokens(groups, partial(advantages_of, divide=False), loss_of_token)


def advantages_of_tba_prime(group, config):
    kl = [(config.tau * p.sum() - f.sum()).item() for p, _, f, _ in group]
    total = [r - config.beta * x for (*_, r), x in zip(group, kl, strict=True)]
    return [t - average(total) for t in total]


def tba_prime_by_hand(groups, config):
    advantages = partial(advantages_of_tba_prime, config=config)
    return of_tokens(groups, advantages, lambda x, y, advantage: -advantage * x)


def tba_truncated_by_hand(groups, config):
    return truncated_by_hand(groups, config, partial(advantages_of_tba_prime, config=config), 2)


def tb_whitened_by_hand(groups, config):
    centred = [advantages_of(group, False) for group in groups]
    spread = np.std(centred) * math.sqrt(20 / 19)
    config.notes["reward_spread"].append(spread)
    whitened = [
        [(*others, c / (spread + 1e-4)) for (*others, _), c in zip(group, own, strict=True)]
        for group, own in zip(groups, centred, strict=True)
    ]
    return average(tb_by_hand(group, config, None) for group in whitened)


# name -> the loss of one prompt's responses, and of all groups
OF_GROUP = {
    "tb": tb_by_hand, "ftb": ftb_by_hand, "rloo": rloo_by_hand, "flowrl": flowrl_by_hand,
    "proximal_rloo": proximal_by_hand, "grpo": grpo_by_hand, "online_dpo": dpo_by_hand,
    "dr_grpo": partial(grpo_by_hand, divide=False), "oapl": oapl_by_hand, "kimi": kimi_by_hand,
    "tb_learned_z": partial(tb_by_hand, learned=True),
}  # fmt: skip
OF_BATCH = {
    "cispo": cispo_by_hand, "dro": dro_by_hand, "tba_prime": tba_prime_by_hand,
    "tba_truncated": tba_truncated_by_hand, "tb_whitened": tb_whitened_by_hand,
}  # fmt: skip
WITH_RATIOS = ("proximal_rloo", "grpo", "dr_grpo")
RATIOS = [(name, ratio) for name in WITH_RATIOS for ratio in ("truncate", "mask")]
CASES = [*((name, "clip") for name in (*OF_GROUP, *OF_BATCH)), *RATIOS, ("ftb", "mask")]


@pytest.fixture
def documented(monkeypatch):
    """Registers objectives of docs/hacking.md."""
    monkeypatch.setattr(tba, "OBJECTIVES", tba.OBJECTIVES.copy())
    for name in ("tb_weighted", "tba_truncated", "tb_whitened"):
        exec(plugin_of_docs(f"--objective {name}"), {})


@pytest.mark.parametrize(("name", "ratio"), CASES)
@pytest.mark.parametrize("off_policy", [0.0, 0.3, 2.0])
def test_objectives_equal_their_papers_written_out(name, ratio, off_policy, documented):
    """One response, one token at a time, in float64: the loss, its gradients and metrics."""
    batch = random_batch(4, 5, 3, off_policy, far=0.5)
    batch.rewards[1] = 0.25  # all equal: nothing to learn, but for the KL
    batch.rewards[2] = batch.rewards[2].round()
    flags = {"ratio": ratio, "ratio_cap": 1.5, "kl_coefficient": 0.1, "max_response_tokens": 7}
    flags |= {"clip_high": 0.28 if name == "grpo" else 0, "tau": 1.3}
    flags |= {"divergence": "hellinger" if ratio == "mask" else "forward_kl"}
    config = tba.at_step(tba.settings(beta="0.3", **flags), 0)
    config.notes = collections.defaultdict(list)  # the numbers whose means are metrics
    result = tba.OBJECTIVES[name](batch, config)
    learned = [batch.logprobs, batch.parameters["log_z"]]
    groups = responses_of(batch)
    if name in OF_BATCH:
        expected = OF_BATCH[name](groups, config)
    else:
        log_zs = [learned[1][i] for i in batch.prompt_ids]
        pairs = zip(groups, log_zs, strict=True)
        expected = average(OF_GROUP[name](group, config, log_z) for group, log_z in pairs)
    torch.testing.assert_close(result.loss, expected)
    found = {metric: float(value) for metric, value in result.metrics.items()}
    assert found == pytest.approx({metric: average(x) for metric, x in config.notes.items()})
    gradients = torch.autograd.grad(result.loss, learned, materialize_grads=True)
    wanted = torch.autograd.grad(expected, learned, materialize_grads=True)
    torch.testing.assert_close(gradients, wanted)
    assert gradients[0].abs().sum() > 0
    assert gradients[1].any() == (name in ("flowrl", "tb_learned_z"))
    if (name, ratio) == ("proximal_rloo", "clip"):  # tba.py's own, without the plug-in
        own = tba.proximal_rloo(batch, config)
        assert own.loss == result.loss and float(own.metrics["clip_fraction"]) < 1
        assert own.metrics == result.metrics


@pytest.mark.parametrize(("name", "ratio"), RATIOS)
def test_far_ratios_give_bounded_gradients(name, ratio):
    """Whatever the sign of the advantage, even where rho is infinite."""
    batch = random_batch(2, 4, 0, off_policy=0.0)
    batch.rewards = torch.tensor([[1.0, 1, 0, 0]] * 2, dtype=torch.float64)
    settings = partial(tba.settings, beta=1e-9, max_response_tokens=1)
    on_policy = gradient_of(tba.OBJECTIVES[name], batch, settings())
    batch.behaviour = batch.logprobs.detach() - 800.0
    bounded = gradient_of(tba.OBJECTIVES[name], batch, settings(ratio=ratio, ratio_cap=2.5))
    expected = on_policy * (2.5 if ratio == "truncate" else 0.0)
    torch.testing.assert_close(bounded, expected, rtol=1e-5, atol=0)
    assert gradient_of(tba.OBJECTIVES[name], batch, settings()).isfinite().all()


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_tb_and_its_variants_are_minimal_at_the_optimum_on_any_data(tau, documented):
    """Every response's residual is 0, also in groups that no policy would sample."""
    draw = partial(torch.randn, 6, dtype=torch.float64)  # of six responses of one token each
    torch.manual_seed(0)
    reference, behaviour, rewards = draw().log_softmax(0), draw().log_softmax(0), draw()
    target = (reference + rewards / 0.3) / tau
    names = ("tb", "tb_learned_z", "tb_weighted", "tba_prime", "tba_truncated", "ftb")
    cases = [(name, "reverse_kl") for name in names]
    cases += [("ftb", name) for name in ("forward_kl", "hellinger")]
    for (name, divergence), sampled in itertools.product(
        cases, ([0, 1, 3], [5, 4, 4, 2], [*range(6)] * 2)
    ):
        config = tba.at_step(tba.settings(beta=0.3, divergence=divergence, tau=tau), 0)
        norms = []
        for logits in (target, reference):
            logits = logits.clone().requires_grad_()
            log_z = target.logsumexp(0)[None].requires_grad_()
            batch = dataclasses.replace(
                random_batch(1, len(sampled), seed=0, off_policy=0.0),
                logprobs=logits.log_softmax(0)[sampled],
                behaviour=behaviour[sampled],
                ref_logprobs=reference[sampled],
                lengths=torch.ones(1, len(sampled), dtype=torch.int64),
                rewards=rewards[sampled][None],
                prompt_ids=torch.tensor([0]),
                parameters={"log_z": log_z},
            )
            loss = tba.OBJECTIVES[name](batch, config).loss
            gradients = torch.autograd.grad(loss, [logits, log_z], materialize_grads=True)
            norms.append(torch.cat(gradients).norm().item())
        assert norms[0] < 1e-10 and norms[1] > 1e-3, name


@pytest.mark.parametrize("off_policy", [0.0, 2.0])
def test_metrics_of_every_objective(off_policy):
    batch = random_batch(4, 5, 0, off_policy)
    batch.rewards[1] = 0.25
    config = tba.settings(beta=0.5, tau=1.3)
    config.notes = collections.defaultdict(list)
    sizes, stds = [], []
    for group in responses_of(batch):
        tb_by_hand(group, config, None)
        weights = [math.exp((p - b).sum()) for p, b, *_ in group]
        sizes.append(sum(weights) ** 2 / (5 * sum(w**2 for w in weights)))
        stds.append(np.std([r for *_, r in group], ddof=1))
    found = {name: x.item() for name, x in tba.batch_metrics(batch, config).items()}
    assert found == pytest.approx({
        "log_z": average(config.notes["log_z"]),
        "reward_std": average(stds),
        "equal_rewards": 1 / 4,
        "effective_sample_size": average(sizes),
        "ratio_max": (batch.logprobs - batch.behaviour).exp().max().item(),
    })  # fmt: skip


# --------------------------------------------------------------------------------------- schedules

POINTS = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0.01, 9), st.sampled_from("@~")), max_size=4
)
SCHEDULED = [
    f.name for kind in tba.FLAGS for f in dataclasses.fields(kind) if f.metadata["scheduled"]
]


def value_of(points, step):
    """A schedule's value, from the last point up to the step and the first after it."""
    *_, (start, before, _) = (point for point in points if point[0] <= step)
    end, after, curve = next((p for p in points if p[0] > step), (math.inf, before, "@"))
    part = (step - start) / (end - start)
    part = part if curve == "@" else (1 - math.cos(math.pi * part)) / 2
    return before + part * (after - before)


@given(st.floats(0.01, 9), POINTS, st.none() | st.sampled_from("@~"), st.integers(0, 3))
def test_settings_of_a_step_have_every_schedules_value(first, points, last, more):
    """Curves between points, the later value at a jump, constant after; `end` is --steps."""
    points = [(0, first, "@"), *sorted(points, key=lambda point: point[0])]
    text = ",".join(f"{value!r}{curve}{step}" for step, value, curve in points)
    assert tba.schedule_points(text) == points
    steps = points[-1][0] + more + 1
    if last:
        text += f",0.5{last}end"
        points.append((steps, 0.5, last))
    config = tba.settings(**dict.fromkeys(SCHEDULED, text), steps=steps)
    for step in range(steps + 2):
        now = tba.at_step(config, step)
        expected = pytest.approx(value_of(points, step), abs=1e-12)
        assert {getattr(now, name) for name in SCHEDULED} == {now.beta} and now.beta == expected
        assert now.steps == steps and now.temperature == config.temperature
    assert {getattr(config, name) for name in SCHEDULED} == {text}


def test_a_schedule_may_end_before_its_points_and_starts_at_0_and_rises():
    assert tba.schedule_value(0.5, 99) == 0.5
    cut = tba.settings(learning_rate="0@0,1@50,0@end", steps=10)
    assert tba.at_step(cut, 5).learning_rate == 0.1
    bad = "x 1@5 1@end,2@0 1@0,2@9,3@4 1@0,2@9,3@4,4@10 1@0,2@end,3@4 1@0.5 1@0@2"
    for text in ("", *bad.split()):
        with pytest.raises(ValueError):
            tba.schedule_points(text)


# ------------------------------------------------------------- log-probabilities and micro-batches


@pytest.fixture(scope="module")
def near_policy(gsm8k, tmp_path_factory):
    """A Learner, groups from near its policy, their Batch and mean entropy by full logits.

    Rewards have ties. The Batch is one float64 graph from a float64 model's weights, which come
    last.
    """
    folder = tmp_path_factory.mktemp("near_policy")
    flags = {"beta": 0.5, "kl_coefficient": 0.1, "reference_temperature": 1.2, "temperature": 0.7}
    learner = learner_of(gsm8k, folder, **flags)
    learner.policy.CHUNK = 37
    model = tba.load_model(learner.config, learner.config.model, torch.float64, DEVICE)
    groups = random_groups(learner.task, 3, 4)
    flat = [t for group in groups for t in group]
    prompts = learner.task.train_prompts
    exact = [plain_logprobs(model, prompts[t.prompt_id], t.tokens, 0.7) for t in flat]
    torch.manual_seed(0)
    for t, (own, _) in zip(flat, exact, strict=True):
        t.logprobs = (own.detach() + 0.1 * torch.randn_like(own)).float().cpu().numpy()
    learned = learner.parameters["log_z"]
    learned.data = torch.randn(len(learned), generator=torch.manual_seed(1)).to(DEVICE)
    log_z = learned.detach().double().requires_grad_()
    batch = learner.make_batch(groups, tba.at_step(learner.config, 0), 0)
    batch = dataclasses.replace(
        batch,
        logprobs=torch.cat([own for own, _ in exact]),
        behaviour=batch.behaviour.double(),
        ref_logprobs=batch.ref_logprobs.double(),
        rewards=batch.rewards.double(),
        parameters={"log_z": log_z},
    )
    entropy = torch.cat([entropies for _, entropies in exact]).mean().item()
    return learner, groups, batch, entropy, [*model.parameters(), log_z]


def test_a_batch_has_what_its_trajectories_have(near_policy):
    """In their order, by their own names, divided by --reference_temperature."""
    learner, *_ = near_policy
    groups = random_groups(learner.task, 3, 5)
    rng = np.random.default_rng(1)
    flat = [t for group in groups for t in group]
    for t in flat:
        t.logprobs = rng.normal(size=len(t.tokens)).astype(np.float32)
        t.ended, t.reward = bool(rng.integers(2)), float(rng.normal())
        t.version, t.last_version, t.reference_version = rng.integers(100, size=3).tolist()
    batch = learner.make_batch(groups, tba.at_step(learner.config, 7), 123)
    joined = lambda name: np.concatenate([getattr(t, name) for t in flat])
    table = lambda value: [[value(t) for t in group] for group in groups]
    expected = {
        "logprobs": 0 * joined("logprobs"),
        "behaviour": joined("logprobs"),
        "ref_logprobs": joined("ref_logprobs") / np.float32(1.2),
        "tokens": joined("tokens").astype(np.int64),
        "lengths": np.array(table(lambda t: len(t.tokens))),
        "ended": np.array(table(lambda t: t.ended)),
        "rewards": np.float32(table(lambda t: t.reward)),
        "versions": np.array(table(lambda t: t.version)),
        "prompt_ids": np.array([group[0].prompt_id for group in groups]),
    }
    for name, value in expected.items():
        found = getattr(batch, name).detach().cpu().numpy()
        assert found.dtype == value.dtype and np.array_equal(found, value), name
    assert batch.step == 123 and batch.parameters is learner.parameters
    assert batch.logprobs.requires_grad and not batch.behaviour.requires_grad


def careful(batch, config):
    """What `careless` means."""
    rewards = batch.rewards - 0.05 * batch.lengths
    return tba.Loss(tba.tb(dataclasses.replace(batch, rewards=rewards), config).loss, {"two": 2})


@pytest.mark.parametrize("name", [*tba.OBJECTIVES, *OTHERS])
def test_a_gradient_does_not_depend_on_micro_batches(near_policy, monkeypatch, name):
    """Packed or not, by all groups, by each group, by less than a response: it is the exact one,
    and so are the metrics. Also if the loss is a mean over tokens, or couples groups, if only a
    little, or if the objective changes its batch. What an objective learns gets the gradient of the
    whole batch once.
    """
    monkeypatch.setattr(tba, "OBJECTIVES", tba.OBJECTIVES | OTHERS)
    learner, groups, batch, entropy, parameters = near_policy
    now = tba.at_step(learner.config, 0)
    result = {"careless": careful}.get(name, tba.OBJECTIVES[name])(batch, now)
    exact = torch.autograd.grad(result.loss, parameters, retain_graph=True, materialize_grads=True)
    exact = torch.cat([gradient.flatten() for gradient in exact])
    assert exact.norm() > 0.01
    expected = {"loss": result.loss, "entropy": entropy, **tba.batch_metrics(batch, now)}
    expected = {key: float(x) for key, x in (expected | result.metrics).items()}
    for gradient, metrics in gradients(learner, groups, name):
        assert (gradient - exact).norm() < 1e-4 * exact.norm()
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, 1e-3, 1e-3)
        assert len(learner.sampling_sums) == 1  # also if the gradient was computed twice


@pytest.mark.parametrize("name", ["online_dpo", "one_log_z"])
def test_a_second_forward_pass_is_made_only_where_it_is_needed(near_policy, monkeypatch, name):
    """It is found out, in the first step, whether an objective couples groups; a batch from which
    nothing is learned does not look as if.
    """
    monkeypatch.setitem(tba.OBJECTIVES, "one_log_z", OTHERS["one_log_z"])
    learner, groups, *_ = near_policy
    passes = []
    hook = learner.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    needed = {"online_dpo": [False, False, True], "one_log_z": [False, True, True]}[name]
    for budget, second in zip(budgets(learner, groups, packs=True), needed, strict=True):
        learner.sampling_sums.clear()
        gradient_by(learner, groups, name, budget, packs=True)
        assert len(learner.sampling_sums) == 1  # a step that is computed again counts once
        passes.clear()
        now = tba.at_step(learner.config, 0)
        now.objective, now.tokens_per_microbatch = name, budget
        learner.gradient(groups, now, 0)
        assert passes.count(False) == (passes.count(True) if second else 0)
    hook.remove()
    learner.coupled, now.objective, now.beta = False, "rloo", 1e-30
    nothing = random_groups(learner.task, 3, 6)  # all derivatives are 0, and exactly known
    for t in (t for group in nothing for t in group):
        t.reward, t.ref_logprobs = 1.0, t.logprobs * np.float32(1.2)
    learner.optimizer.zero_grad()
    assert learner.gradient(nothing, now, 0)["grad_norm"] == 0 and not learner.coupled
    learner.optimizer.zero_grad()


@pytest.mark.parametrize("loss", [3.0, torch.tensor(3.0)])
def test_a_loss_without_gradient_moves_nothing(near_policy, monkeypatch, loss):
    """As when all groups of a batch are masked."""
    learner, groups, *_ = near_policy
    monkeypatch.setitem(tba.OBJECTIVES, "masked", lambda batch, config: tba.Loss(loss))
    for budget in budgets(learner, groups, packs=True):
        gradient, metrics = gradient_by(learner, groups, "masked", budget, packs=True)
        assert not gradient.any() and metrics["loss"] == 3 and metrics["grad_norm"] == 0


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)])
def test_a_metric_is_one_number(near_policy, monkeypatch, shape):
    learner, groups, *_ = near_policy
    own = lambda batch, config: tba.Loss(tba.tb(batch, config).loss, {"own": torch.ones(shape)})
    monkeypatch.setitem(tba.OBJECTIVES, "own", own)
    now = tba.at_step(learner.config, 0)
    now.objective = "own"
    if shape == (1,):
        assert learner.backward(groups, now, 0)["own"].shape == ()
    else:
        with pytest.raises(ValueError, match="own must be one number"):
            learner.backward(groups, now, 0)
    learner.optimizer.zero_grad()


def test_a_group_has_one_prompt(near_policy):
    learner, groups, *_ = near_policy
    mixed = [groups[0][:1] + groups[1][1:], *groups[1:]]
    with pytest.raises(ValueError, match="several prompts"):
        learner.make_batch(mixed, learner.config, 0)


OF_A_STEP = (
    "loss entropy grad_norm beta lr forward_backward_seconds optimizer_seconds sampler_gap "
    "sampler_z derivative_error parameters_grad_norm".split()
)


@pytest.mark.parametrize("name", OF_A_STEP)
def test_an_objectives_metric_cannot_take_the_name_of_the_runs(near_policy, monkeypatch, name):
    """`StepLog` refuses the others: test_folder.py. It may replace those of `batch_metrics`."""
    learner, groups, *_ = near_policy
    one = torch.tensor(1.0)
    own = lambda batch, config: tba.Loss(tba.tb(batch, config).loss, {name: one, "log_z": one})
    monkeypatch.setitem(tba.OBJECTIVES, "own", own)
    now = tba.at_step(learner.config, 0)
    now.objective, now.learning_rate = "own", 0.0
    with pytest.raises(ValueError, match=f"choose others: {name}$"):
        learner.step(groups, now, 0)
    learner.optimizer.zero_grad()


# ---------------------------------------------------------------------------------- optimizer steps


def rootless(batch, config):
    """TB, and a learned number whose gradient is not finite: a root has no derivative at 0."""
    return tba.Loss(tba.tb(batch, config).loss + batch.parameters["log_z"].sum().sqrt())


def test_a_step_whose_loss_or_gradient_is_not_finite_leaves_no_trace(gsm8k, tmp_path, monkeypatch):
    monkeypatch.setitem(tba.OBJECTIVES, "rootless", rootless)
    learner = learner_of(gsm8k, tmp_path, objective="tb_learned_z")
    before = {name: p.detach().clone() for name, p in learner.trained.items()}
    good, bad = (random_groups(learner.task, 2, 3, longest=12) for _ in range(2))
    bad[0][0].reward = math.nan
    now = tba.at_step(learner.config, 0)
    learner.step(bad, now, 0)
    assert learner.skipped == 1
    now.objective = "rootless"
    metrics = learner.step(good, now, 1)
    assert math.isfinite(metrics["loss"] + metrics["grad_norm"]) and learner.skipped == 2
    for name, p in learner.trained.items():
        assert torch.equal(p, before[name]) and p.grad is None and not learner.optimizer.state[p]
    now.objective = "tb_learned_z"
    assert math.isfinite(learner.step(good, now, 2)["loss"]) and learner.skipped == 0


def test_a_step_clips_the_policys_gradient_and_moves_only_its_prompts_log_z(gsm8k, tmp_path):
    flags = {"objective": "tb_learned_z", "max_grad_norm": 1, "adam_beta2": 0.9}
    learner = learner_of(gsm8k, tmp_path, learning_rate="0@0,0.002@4", **flags)
    step, rate = 3, 0.0015
    now = tba.at_step(learner.config, step)
    groups = random_groups(learner.task, 3, 6)
    ids = [group[0].prompt_id for group in groups]
    log_z, weights = learner.parameters["log_z"], [*learner.model.parameters()]
    before = torch.cat([p.detach().flatten() for p in weights])
    learner.backward(groups, now, step)
    gradient = log_z.grad.clone()
    learner.optimizer.zero_grad()
    metrics = learner.step(groups, now, step)
    # AdamW's mean of gradients is a tenth of the clipped one, whose norm was above 1
    means = [learner.optimizer.state[p]["exp_avg"] for p in weights]
    clipped = torch.cat([10 * mean.flatten() for mean in means]).norm().item()
    assert metrics["grad_norm"] > 2 and clipped == pytest.approx(1, rel=1e-3)
    own = learner.optimizer.state[log_z]  # what else is learned is not clipped with the policy
    torch.testing.assert_close(own["exp_avg"], 0.1 * gradient)
    torch.testing.assert_close(own["exp_avg_sq"], 0.1 * gradient**2)
    # AdamW's first step is the rate, and that of log Z a share of its peak of 0.1
    moved = torch.cat([p.detach().flatten() for p in weights]) - before
    assert moved.abs().max().item() == pytest.approx(rate, rel=1e-2) and metrics["lr"] == rate
    after_first = log_z.detach().clone()
    expected = torch.full((3,), 0.1 * rate / 0.002)
    torch.testing.assert_close(after_first[ids].abs().cpu(), expected, rtol=1e-3, atol=0)
    assert (after_first != 0).sum() == 3
    others = random_groups(learner.task, 3, 6, first_prompt=60)
    learner.step(others, now, step + 1)
    assert torch.equal(log_z[ids], after_first[ids])  # momentum does not move them


@given(
    st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(0, 99),
    st.sampled_from(["0.002@0,0.001@9", "0@0,0.002@9", "0.002"]),
)
def test_each_entry_of_a_parameter_has_adams_steps_of_its_own(visits, seed, schedule):
    """As if it had an optimizer to itself, which takes a step whenever it has a gradient. Its rate
    follows the policy's, whether that falls or rises.
    """
    torch.manual_seed(seed)
    config = tba.settings(learning_rate=schedule)
    optimizer = torch.optim.AdamW([nn_zeros(1)], betas=(0.9, 0.99))
    learner = SimpleNamespace(config=config, optimizer=optimizer)
    log_z = nn_zeros(4)
    entries = [nn_zeros(1) for _ in range(4)]
    alone = [torch.optim.Adam([entry], betas=(0.9, 0.99)) for entry in entries]
    for step, visited in enumerate(visits):
        rate = tba.schedule_value(config.learning_rate, step)
        log_z.grad = torch.zeros(4)
        for i in visited:
            log_z.grad[i] = entries[i].grad = torch.randn(1)
            alone[i].param_groups[0]["lr"] = 0.1 * rate / 0.002
            alone[i].step()
        tba.Learner.update_parameter(learner, "log_z", log_z, rate)
        torch.testing.assert_close(
            log_z.detach(), torch.cat(entries).detach(), atol=1e-6, rtol=1e-4
        )


def nn_zeros(size):
    return torch.nn.Parameter(torch.zeros(size))


def test_weight_decay_leaves_norms_biases_and_log_z_alone(gsm8k, model_of, tmp_path):
    learner = learner_of(gsm8k, tmp_path, model=model_of("gpt_neox"), weight_decay=0.1)
    learner.parameters["log_z"].data.fill_(1)
    before = {name: p.detach().clone() for name, p in learner.trained.items()}
    for parameter in learner.trained.values():
        parameter.grad = torch.zeros_like(parameter)
    for param_group in learner.optimizer.param_groups:
        param_group["lr"] = 0.5
    learner.optimizer.step()
    for name, p in learner.trained.items():
        decayed = 0.95 if p.ndim > 1 else 1.0
        torch.testing.assert_close(p.detach(), decayed * before[name], msg=name)


@pytest.mark.parametrize("name", ["llama", "phi"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_logits_of_a_bfloat16_policy_are_in_float32(gsm8k, model_of, tmp_path, name, weights):
    """Weights in bfloat16, as a Searcher's, or autocast over float32, as the Trainer's: with logits
    of 85, which bfloat16 would round by up to 0.25.
    """
    config, task = config_and_task(gsm8k, tmp_path, model=model_of(name), dtype="bfloat16")
    model = tba.load_model(config, config.model, weights, DEVICE)
    ids = torch.from_numpy(task.train_prompts[0][:24]).long()[None].to(DEVICE)
    head = model.get_output_embeddings()
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        scale = 85 / model(ids).logits.abs().max()
        for parameter in head.parameters():
            parameter.mul_(scale)
        hidden = model.base_model(ids).last_hidden_state[0, :-1]
        sampled = model(ids).logits[0, :-1]  # as in the transformers engine
    bias = None if head.bias is None else head.bias.double()
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double(), bias)
    torch.testing.assert_close(sampled.double(), logits, rtol=1e-5, atol=1e-4)
    rounded = logits.bfloat16().double()
    targets = ids[0, 1:, None]
    exact = logits.log_softmax(-1).gather(1, targets)[:, 0]
    assert (rounded.log_softmax(-1).gather(1, targets)[:, 0] - exact).abs().max() > 0.05
    groups = [(task.train_prompts[0][:1], [task.train_prompts[0][1:24]])]
    (scored,) = tba.token_logprobs(tba.TokenLogProbs(model, 1.0), groups, config)
    np.testing.assert_allclose(scored, exact.detach().cpu().numpy(), atol=2e-3, rtol=0)


def rows_of(lengths):
    """A row of a prompt of one token and one response for each length, with their tokens' ids."""
    ends = np.cumsum(lengths)
    ids = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return [tba.Row(np.zeros(1, np.int32), [own.astype(np.int32)], [own]) for own in ids]


def test_plan_microbatches_covers_all_within_budget():
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows = rows_of(rng.integers(1, 100, int(rng.integers(6, 60))))
        units = []
        while rows:
            units.append([rows.pop() for _ in range(min(len(rows), int(rng.integers(1, 6))))])
        unit_of = {id(row): unit for unit in units for row in unit}
        # often exactly what some units need
        budget = int(rng.choice([rng.integers(1, 800), tba.padded_tokens(units[0] + units[-1])]))
        plans = tba.plan_microbatches(units, budget, int(rng.integers(1, 4)))
        assert len({len(plan) for plan in plans}) == 1
        busy = [[rows for rows in plan if rows != [tba.IDLE]] for plan in plans]
        planned = [id(row) for plan in busy for rows in plan for row in rows]
        assert sorted(planned) == sorted(unit_of)
        for plan in busy:
            for rows in plan:  # whole units, within budget if there is more than one
                own = {id(unit_of[id(row)]): unit_of[id(row)] for row in rows}
                assert sum(map(len, own.values())) == len(rows)
                assert len(own) == 1 or tba.padded_tokens(rows) <= budget
            for rows, following in itertools.pairwise(plan):  # shorter ones first, and full
                units_of = [unit_of[id(part[0])] for part in (rows, following)]
                longest = [max(row.length for row in unit) for unit in units_of]
                assert longest == sorted(longest)
                assert tba.padded_tokens(rows + units_of[1]) > budget
        shares = [sum(row.length for rows in plan for row in rows) for plan in plans]
        assert max(shares) - min(shares) <= max(map(tba.padded_tokens, units)) + 5 * 100


def test_plan_rows_covers_all_evenly_within_budget():
    """In as few rows as the room in each allows."""
    rng = np.random.default_rng(0)
    tokens = lambda most: rng.integers(0, 9, int(rng.integers(1, most))).astype(np.int32)
    for _ in range(100):
        groups = [(tokens(60), [tokens(40) for _ in range(rng.integers(1, 30))]) for _ in range(4)]
        row_tokens, budget = int(rng.integers(0, 3)) * 100, int(rng.integers(30, 300))
        plan = tba.plan_rows(groups, row_tokens, budget)
        all_tokens = np.concatenate([response for _, own in groups for response in own])
        found = [i for unit in plan for row in unit for index in row.indices for i in index]
        assert sorted(found) == list(range(len(all_tokens)))
        for (prompt, own), unit in zip(groups, plan, strict=True):
            longest = max(map(len, own))
            for row in unit:
                assert row.prompt is prompt
                assert row.length <= max(budget, len(prompt) + longest)
                assert row_tokens or len(row.indices) == 1
                for index, response in zip(row.indices, row.responses, strict=True):
                    assert np.array_equal(all_tokens[index], response)
            lengths = [row.length for row in unit]
            assert max(lengths) - min(lengths) <= longest
    for prompt, responses, row_tokens, budget, expected in (
        (3, (5, 3, 4, 2), 11, 100, [[2, 5], [3, 4]]),
        (3, (5, 3, 4, 2), 11, 10, [[2, 5], [3, 4]]),  # exactly the budget
        (3, (5, 3, 4, 2), 0, 100, [[5], [4], [3], [2]]),
        (9, [3] * 9, 10, 100, [[3] * 9]),  # 4 x 9 tokens, beside a long prompt
    ):
        group = np.zeros(prompt), [*map(np.zeros, responses)]
        (unit,) = tba.plan_rows([group], row_tokens, budget)
        assert [sorted(map(len, row.responses)) for row in unit] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths", [[10, 5000], [10] * 4, [10] * 700 + [4000] * 3, [*range(1, 400, 3)]]
)
def test_all_ranks_make_the_same_number_of_forward_passes(lengths, dtype):
    """Or FSDP would wait for ever. Together they compute all tokens, a micro-batch in one pass.

    A single rank makes up to three, of which the shorter rows are first, unless it recomputes.
    """
    lengths = np.random.default_rng(0).permutation(lengths)
    rows, n = rows_of(lengths), 1 + (len(lengths) > 100)
    units = [rows[i : i + n] for i in range(0, len(rows), n)]
    passes = []  # the shape, temperature, and whether in bfloat16

    def policy(inputs, positions, targets, temperature):
        """Each response token as its log-probability."""
        autocast = torch.is_autocast_enabled(DEVICE.type)
        passes.append((inputs["input_ids"].shape, temperature, autocast))
        return targets[:, None].float().expand(-1, 3)

    policy.model = SimpleNamespace(device=DEVICE)
    for size, recomputes, budget in itertools.product((1, 2, 3), (False, True), (300, 16384)):
        flags = {"gradient_checkpointing": recomputes, "tokens_per_microbatch": budget}
        config = tba.settings(dtype=dtype, **flags)
        counts, computed = [], []
        for rank in range(size):
            policy.ranks = tba.Ranks(rank, size)
            counts.append([])
            for index, values in tba.run_microbatches(policy, units, config, 1.3):
                assert torch.equal(index.float(), values[:, 0])
                computed += index.tolist()
                counts[-1].append(len(passes))
                widths = [width for (_, width), *_ in passes if width > 1]
                most = 1 if size > 1 or recomputes else 3
                assert widths == sorted(widths) and len(passes) <= most
                assert {p[1:] for p in passes} == {(1.3, dtype == "bfloat16" and size == 1)}
                passes.clear()
        assert all(count == counts[0] for count in counts)
        assert sorted(computed) == list(range(sum(lengths)))
        if size == 1 and budget == 300:  # small micro-batches are not cut
            assert set(counts[0]) <= {1, 2}
