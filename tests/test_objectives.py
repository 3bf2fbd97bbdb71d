"""The loss and its gradient against brute force, REINFORCE, and an enumerable world."""

import collections
import itertools
import math
import sys

import accelerate
import numpy as np
import pytest
import torch
from gradients import OTHERS, budgets, gradients
from harness import ROOT, config_and_task, learner_of, random_groups
from hypothesis import given, settings
from hypothesis import strategies as st

import tba

sys.path.append(str(ROOT / "bench"))

import objectives

DEVICE = tba.local_device()


def brute_force(logprobs, ref_logprobs, rewards, beta, tau):
    """Equation by equation, one number at a time, in float64."""
    B, K = rewards.shape
    total, log_zs = 0.0, []
    for i in range(B):
        d = [logprobs[i, j] - (ref_logprobs[i, j] + rewards[i, j] / beta) / tau for j in range(K)]
        log_z = -sum(x.item() for x in d) / K
        log_zs.append(log_z)
        total = total + sum((log_z + x) ** 2 for x in d)
    return total / (B * K), log_zs


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.integers(0, 10**6),
    st.floats(0.01, 2),
    st.floats(0.5, 2),
)
def test_loss_and_gradient_equal_brute_force(B, K, seed, beta, tau):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(B, K, generator=generator, dtype=torch.float64)
    logprobs, ref_logprobs, rewards = draw().requires_grad_(), draw(), draw()
    loss, log_z = tba.trajectory_balance_loss(logprobs, ref_logprobs, rewards, beta, tau)
    expected, expected_log_z = brute_force(logprobs, ref_logprobs, rewards, beta, tau)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(log_z, torch.tensor(expected_log_z, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, expected_gradient)


def test_on_policy_gradient_is_reinforce_with_a_mean_baseline():
    """d loss = -2/beta E[(R - mean R) d log pi], with R = r - beta (log pi - log pi_ref)."""
    torch.manual_seed(0)
    B, K, beta = 3, 8, 0.3
    logits = torch.randn(B, 5, dtype=torch.float64, requires_grad=True)
    samples = torch.distributions.Categorical(logits=logits).sample((K,)).T  # (B, K)
    logprobs = logits.log_softmax(-1).gather(1, samples)
    ref_logprobs = torch.randn(B, 5, dtype=torch.float64).log_softmax(-1).gather(1, samples)
    rewards = torch.randn(B, K, dtype=torch.float64)
    loss, _ = tba.trajectory_balance_loss(logprobs, ref_logprobs, rewards, beta)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)

    total = (rewards - beta * (logprobs - ref_logprobs)).detach()
    advantage = total - total.mean(1, keepdim=True)
    (reinforce,) = torch.autograd.grad((advantage * logprobs).mean(), logits)
    torch.testing.assert_close(gradient, -2 / beta * reinforce)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_minimiser_is_the_tempered_posterior(tau):
    """On all sequences of 3 tokens of 4: off-policy TB finds (pi_ref exp(r / beta))^(1/tau) / Z."""
    torch.manual_seed(1)
    beta = 0.5
    world = list(itertools.product(range(4), repeat=3))
    ref = torch.randn(len(world), dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([float(w[0] == w[2]) + 0.3 * w[1] for w in world], dtype=torch.float64)
    logits = torch.zeros(len(world), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=400, line_search_fn="strong_wolfe")
    groups = torch.stack(
        [torch.randperm(len(world))[:16] for _ in range(40)]
    )  # uniform, off-policy

    def closure():
        optimizer.zero_grad()
        logprobs = logits.log_softmax(0)[groups]
        loss, _ = tba.trajectory_balance_loss(logprobs, ref[groups], rewards[groups], beta, tau)
        loss.backward()
        return loss

    optimizer.step(closure)
    target = ((ref + rewards / beta) / tau).log_softmax(0)
    torch.testing.assert_close(logits.detach().log_softmax(0), target, atol=1e-4, rtol=0)
    final, log_z = tba.trajectory_balance_loss(
        logits.log_softmax(0)[groups], ref[groups], rewards[groups], beta, tau
    )
    assert final < 1e-8
    expected_log_z = ((ref + rewards / beta) / tau).logsumexp(0)
    torch.testing.assert_close(log_z, expected_log_z.expand(40), atol=1e-3, rtol=0)


def random_batch(B, K, seed, off_policy, far=1.0):
    torch.manual_seed(seed)
    lengths = torch.randint(1, 6, (B, K))
    logprobs = -torch.rand(int(lengths.sum()), dtype=torch.float64)
    behaviour = logprobs + off_policy * torch.randn_like(logprobs)
    draw = lambda: torch.randn(B, K, dtype=torch.float64)
    ref_logprobs = logprobs.detach() + far * torch.randn_like(logprobs)
    log_z = torch.randn(B, dtype=torch.float64).requires_grad_()
    return tba.Batch(
        logprobs=logprobs.requires_grad_(),
        behaviour=behaviour,
        ref_logprobs=ref_logprobs,
        tokens=torch.zeros(len(logprobs), dtype=torch.int64),
        lengths=lengths,
        ended=torch.ones(B, K, dtype=torch.bool),
        rewards=draw(),
        versions=torch.zeros(B, K, dtype=torch.int64),
        prompt_ids=torch.arange(B),
        step=0,
        parameters={"log_z": log_z},
    )


def gradient_of(objective, batch, config):
    (gradient,) = torch.autograd.grad(objective(batch, config).loss, batch.logprobs)
    return gradient


def test_tba_prime_is_tb_in_advantage_form():
    """Off-policy too: no importance ratio appears."""
    for tau, off_policy in ((1.0, 0.0), (1.7, 2.0)):
        batch, config = random_batch(3, 5, 0, off_policy), tba.settings(beta=0.4, tau=tau)
        scale = config.beta * tau / (2 * batch.lengths.double().mean())
        expected = gradient_of(tba.tb, batch, config) * scale
        torch.testing.assert_close(gradient_of(tba.tba_prime, batch, config), expected)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "hellinger"])
def test_ftb_has_its_divergences_gradient_and_minimum(divergence):
    """On-policy: each outcome of a uniform policy once; off-policy: any others."""
    n = 7
    torch.manual_seed(0)
    ref, rewards = torch.randn(1, n, dtype=torch.float64), torch.randn(1, n, dtype=torch.float64)
    target = (ref + rewards / 0.4).log_softmax(1)
    config = tba.settings(beta=0.4, tau=1.0, divergence=divergence)

    def loss_of(logits, outcomes):
        logprobs = logits.log_softmax(0)[outcomes]
        batch = random_batch(1, len(outcomes), 0, 0.0)
        batch.logprobs, batch.ref_logprobs = logprobs, ref[0, outcomes]
        batch.lengths, batch.rewards = torch.ones_like(outcomes)[None], rewards[:, outcomes]
        return objectives.ftb(batch, config).loss, tba.tb(batch, config).loss

    logits = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    loss, of_tb = loss_of(logits, torch.arange(n))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    logprobs = logits.log_softmax(0)
    expected = {
        "reverse_kl": 2 * (logprobs.exp() * (logprobs - target)).sum(),
        "forward_kl": 2 * (target.exp() * (target - logprobs)).sum(),
        "hellinger": -8 * ((target + logprobs) / 2).exp().sum().log(),  # the same direction
    }[divergence]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    if divergence == "reverse_kl":
        assert loss.item() == of_tb.item()
    outcomes = torch.tensor([0, 1, 1, 4])
    assert loss_of(logits, outcomes)[0] > 1e-3
    at_minimum = (target[0] + 0.3 * torch.eye(n)[6]).requires_grad_()
    loss, _ = loss_of(at_minimum, outcomes)  # it differs from the target elsewhere alone
    assert loss.item() < 1e-12
    assert torch.autograd.grad(loss, at_minimum)[0].abs().max() < 1e-9


def responses_of(batch):
    """Each response's own tensors, prompt by prompt: (log pi, log pi_b, log pi_ref, reward)."""
    parts = [x.split(batch.lengths.flatten().tolist()) for x in (batch.logprobs, batch.behaviour)]
    parts.append(batch.ref_logprobs.split(batch.lengths.flatten().tolist()))
    flat = list(zip(*parts, batch.rewards.flatten().tolist(), strict=True))
    K = batch.rewards.shape[1]
    return [flat[i : i + K] for i in range(0, len(flat), K)]


def gain(log_ratio, advantage, config):
    """The gain of one ratio; PPO's has no gradient where it has gone further than it should."""
    ratio, c, most = log_ratio.exp(), config.clip_range, config.ratio_cap
    high = 1 + (config.clip_high or c)
    if config.ratio == "truncate":
        return min(ratio.item(), most) * advantage * log_ratio
    if config.ratio == "mask":
        return (ratio.item() if 1 / most <= ratio <= most else 0.0) * advantage * log_ratio
    if advantage >= 0:
        return advantage * (ratio if ratio < high else torch.tensor(high))
    return advantage * (ratio if ratio > 1 - c else torch.tensor(1 - c))


def rloo_by_hand(group, config):
    total = [r - config.beta * float((b - f).sum()) for _, b, f, r in group]
    K = len(group)
    return [t - (sum(total) - t) / (K - 1) for t in total]


def grpo_by_hand(group, config, divide):
    rewards = [r for *_, r in group]
    mean, loss = sum(rewards) / len(rewards), 0.0
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    for p, b, f, r in group:
        advantage = (r - mean) / (std + 1e-4) if divide else r - mean
        tokens = 0.0
        for t in range(len(p)):
            x = f[t] - p[t]
            kl = x.exp() - x - 1
            tokens = tokens + gain(p[t] - b[t], advantage, config) - config.kl_coefficient * kl
        loss = loss - tokens / (len(p) if divide else config.max_response_tokens)
    return loss / len(group)


def dpo_by_hand(group, config):
    rewards = [r for *_, r in group]
    if max(rewards) == min(rewards):
        return 0.0 * group[0][0].sum()
    (best, _, of_best, _), (worst, _, of_worst, _) = (
        group[rewards.index(f(rewards))] for f in (max, min)
    )
    margin = config.beta * ((best - of_best).sum() - (worst - of_worst).sum())
    return (1 + (-margin).exp()).log()


def oapl_by_hand(group, config):
    rewards = [r for *_, r in group]
    value = config.beta * math.log(sum(math.exp(r / config.beta) for r in rewards) / len(group))
    squares = [(config.behaviour_beta * (p - b).sum() - (r - value)) ** 2 for p, b, _, r in group]
    return sum(squares) / len(group)


def kimi_by_hand(group, config):
    rewards = [r for *_, r in group]
    mean = sum(rewards) / len(group)
    squares = [((r - mean) / config.beta - (p - f).sum()) ** 2 for p, _, f, r in group]
    return sum(squares) / len(group)


def flowrl_by_hand(group, config, log_z):
    rewards = [r for *_, r in group]
    mean, loss = sum(rewards) / len(group), 0.0
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(group) - 1)) + 1e-4
    for p, b, f, r in group:
        weight = min(math.exp((p - b).sum().item()), config.ratio_cap)
        per_token = (p - f).mean()
        loss = loss + weight * (log_z + per_token - config.flow_beta * (r - mean) / std) ** 2
    return loss / len(group)


def token_mean_by_hand(groups, config, divide, loss_of_token):
    """The mean over all tokens of a loss of (log pi, log pi_b, A)."""
    total, N = 0.0, 0
    for group in groups:
        rewards = [r for *_, r in group]
        mean = sum(rewards) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(group) - 1)) + 1e-4
        for p, b, _, r in group:
            advantage = (r - mean) / std if divide else r - mean
            for x, y in zip(p, b, strict=True):
                total, N = total + loss_of_token(x, y, advantage), N + 1
    return total / N


def cispo_by_hand(groups, config, log_z):
    capped = lambda x, y: min(math.exp(x.item() - y.item()), config.ratio_cap)
    return token_mean_by_hand(groups, config, True, lambda x, y, a: -capped(x, y) * a * x)


def dro_by_hand(groups, config, log_z):
    c = config.behaviour_beta / 2
    return token_mean_by_hand(groups, config, False, lambda x, y, a: c * (x - y) ** 2 - a * x)


# name -> the loss of one prompt's responses
BY_HAND = {
    "rloo": lambda g, c: sum(
        -a * p.sum() for a, (p, *_) in zip(rloo_by_hand(g, c), g, strict=True)
    ) / len(g),
    "proximal_rloo": lambda g, c: sum(
        -gain((p - b).sum(), a, c)
        for a, (p, b, *_) in zip(rloo_by_hand(g, c), g, strict=True)
    ) / len(g),
    "grpo": lambda g, c: grpo_by_hand(g, c, divide=True),
    "dr_grpo": lambda g, c: grpo_by_hand(g, c, divide=False),
    "online_dpo": dpo_by_hand,
    "oapl": oapl_by_hand,
    "kimi": kimi_by_hand,
}  # fmt: skip
# name -> the loss of all groups, with a log Z for each
OF_BATCH = {
    name: lambda groups, config, log_z, of_group=of_group: sum(
        of_group(group, config) for group in groups
    ) / len(groups)
    for name, of_group in BY_HAND.items()
} | {
    "cispo": cispo_by_hand,
    "dro": dro_by_hand,
    "flowrl": lambda groups, config, log_z: sum(
        flowrl_by_hand(group, config, z) for group, z in zip(groups, log_z, strict=True)
    ) / len(groups),
}  # fmt: skip
WITH_RATIOS = ("proximal_rloo", "grpo", "dr_grpo")


RATIOS = [(name, ratio) for name in WITH_RATIOS for ratio in ("truncate", "mask")]


@pytest.mark.parametrize(("name", "ratio"), [*((name, "clip") for name in OF_BATCH), *RATIOS])
@pytest.mark.parametrize("off_policy", [0.0, 0.3, 2.0])
def test_other_objectives_equal_their_papers_written_out(name, ratio, off_policy):
    """One response, one token at a time, in float64: the loss and its gradients."""
    batch = random_batch(4, 5, 3, off_policy, far=0.5)
    batch.rewards[1] = 0.25  # all equal: nothing to learn, but for the KL
    batch.rewards[2] = batch.rewards[2].round()
    flags = {"ratio": ratio, "ratio_cap": 1.5, "kl_coefficient": 0.1, "max_response_tokens": 7}
    flags |= {"clip_high": 0.28 if name == "grpo" else 0}
    config = tba.at_step(tba.settings(beta="0.3", **flags), 0)
    result = tba.OBJECTIVES[name](batch, config)
    learned = [batch.logprobs, batch.parameters["log_z"]]
    expected = OF_BATCH[name](responses_of(batch), config, learned[1])
    torch.testing.assert_close(result.loss, expected)
    gradients = torch.autograd.grad(result.loss, learned, materialize_grads=True)
    wanted = torch.autograd.grad(expected, learned, materialize_grads=True)
    torch.testing.assert_close(gradients, wanted)
    assert gradients[0].abs().sum() > 0 and gradients[1].any() == (name == "flowrl")
    if name in WITH_RATIOS:
        fraction = float(result.metrics["clip_fraction"])
        assert (fraction == 0) == (off_policy == 0) and fraction < 1


@pytest.mark.parametrize(("name", "ratio"), RATIOS)
def test_far_ratios_give_bounded_gradients(name, ratio):
    """Whatever the sign of the advantage; PPO's are 0 for A > 0 and unbounded for A < 0."""
    batch = random_batch(2, 4, 0, off_policy=0.0)
    batch.rewards = torch.tensor([[1.0, 1, 0, 0]] * 2, dtype=torch.float64)
    good = batch.per_token(batch.rewards > 0)
    flags = {"beta": 1e-9, "max_response_tokens": 1}
    plain = tba.settings(**flags)
    on_policy = gradient_of(tba.OBJECTIVES[name], batch, plain)
    assert (on_policy[good] < 0).all() and (on_policy[~good] > 0).all()
    nats = batch.per_token(15 / batch.lengths)  # of a token; 15 of each response
    batch.behaviour = batch.logprobs.detach() - nats
    unbounded = gradient_of(tba.OBJECTIVES[name], batch, plain)
    assert not unbounded[good].any() and (unbounded[~good] > 10 * on_policy[~good]).all()
    weight = 2.5 if ratio == "truncate" else 0.0
    config = tba.settings(ratio=ratio, ratio_cap=2.5, **flags)
    bounded = gradient_of(tba.OBJECTIVES[name], batch, config)
    torch.testing.assert_close(bounded, weight * on_policy)
    batch.behaviour = batch.logprobs.detach() - 800.0  # rho is infinite
    bounded = gradient_of(tba.OBJECTIVES[name], batch, config)
    torch.testing.assert_close(bounded, weight * on_policy, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "ratio", "kl_coefficient"),
    [
        ("grpo", "clip", 0.0),
        ("grpo", "clip", 0.04),
        ("dr_grpo", "clip", 0.0),
        ("dr_grpo", "clip", 0.04),
        ("dr_grpo", "truncate", 0.0),
        ("dr_grpo", "truncate", 0.04),
        ("cispo", "truncate", 0.0),
    ],
)
def test_grpo_dr_grpo_and_cispo_equal_trls_own_loss(name, ratio, kl_coefficient):
    """Its formulas, given the same log-probabilities; nothing of its trainer's loop.

    Truncated ratios are those of its CISPO; the loss of dr_grpo is another, its gradient the same.
    """
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
    B, K, longest = 3, 5, 10
    batch = random_batch(B, K, 7, off_policy=0.3)
    flags = {"kl_coefficient": kl_coefficient, "ratio": ratio, "ratio_cap": 1.1}
    config = tba.at_step(tba.settings(beta="1", max_response_tokens=longest, **flags), 0)
    loss = tba.OBJECTIVES[name](batch, config).loss
    gradient = gradient_of(tba.OBJECTIVES[name], batch, config)

    def padded(tokens):  # (N,) -> (B*K, longest)
        parts = torch.split(tokens, batch.lengths.flatten().tolist())
        return torch.stack([torch.nn.functional.pad(p, (0, longest - len(p))) for p in parts])

    logprobs = batch.logprobs.detach().requires_grad_()
    trainer = object.__new__(trl.GRPOTrainer)  # without a model: it is given what one makes
    trainer.args = trl.GRPOConfig(output_dir="unused", use_bias_correction_kl=False, bf16=False)
    trainer.accelerator = accelerate.Accelerator(cpu=True)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        padded(logprobs), torch.zeros(B * K, longest), None,
    )  # fmt: skip
    vars(trainer).update(
        model=torch.nn.Linear(1, 1), loss_type=name if ratio == "clip" else "cispo",
        beta=kl_coefficient, epsilon_low=config.clip_range,
        epsilon_high=config.clip_range if ratio == "clip" else config.ratio_cap,
        max_completion_length=longest, importance_sampling_level="token",
        off_policy_mask_threshold=None, top_entropy_quantile=1.0, aux_loss_enabled=False,
        use_vllm=False, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1, _metrics=collections.defaultdict(
            lambda: collections.defaultdict(list)
        ),
    )  # fmt: skip
    rewards = batch.rewards
    advantages = rewards - rewards.mean(1, keepdim=True)
    if name != "dr_grpo":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    ids = torch.zeros(B * K, longest, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": padded(torch.ones_like(batch.behaviour)),
        "advantages": advantages.flatten(), "old_per_token_logps": padded(batch.behaviour),
        "ref_per_token_logps": padded(batch.ref_logprobs),
        "num_items_in_batch": torch.tensor(
            len(batch.logprobs) if name == "cispo" else B * K * longest
        ),
    }  # fmt: skip
    expected = trainer._compute_loss(trainer.model, inputs)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    if ratio == "clip" or name == "cispo":
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, expected_gradient)


def test_on_policy_tb_is_rloo_and_off_policy_it_is_not():
    """On the policy's own samples VarGrad-TB's gradient is 2 (K - 1) / (K beta) times RLOO's: both
    are REINFORCE with the mean as baseline and the KL in the reward. With data of another policy TB
    has the KL of the policy as it is now, RLOO that of the one which sampled.
    """
    config = tba.at_step(tba.settings(beta="0.4"), 0)
    K = 5
    for off_policy in (0.0, 0.5):
        batch = random_batch(3, K, 0, off_policy)
        of_tb = gradient_of(tba.tb, batch, config)
        of_rloo = gradient_of(objectives.rloo, batch, config) * 2 * (K - 1) / (K * 0.4)
        if off_policy:
            assert (of_tb - of_rloo).abs().max() > 0.1 * of_tb.abs().max()
        else:
            torch.testing.assert_close(of_tb, of_rloo)


def test_a_learned_log_z_replaces_the_estimate():
    """Equation 3, summed response by response; at the estimate's value it is the loss of `tb`."""
    batch, config = random_batch(3, 4, 5, off_policy=1.0), tba.settings(beta=0.4, tau=1.3)
    policy = batch.logprobs.split(batch.lengths.flatten().tolist())
    reference = batch.ref_logprobs.split(batch.lengths.flatten().tolist())
    expected = 0.0
    for i in range(12):
        target = (reference[i].sum() + batch.rewards.flatten()[i] / 0.4) / 1.3
        expected += (batch.parameters["log_z"][i // 4] + policy[i].sum() - target) ** 2 / 12
    result = tba.tb_learned_z(batch, config)
    torch.testing.assert_close(result.loss, expected)
    assert not result.metrics["log_z"].requires_grad
    log_z = batch.parameters["log_z"]
    gradient = torch.autograd.grad(result.loss, [batch.logprobs, log_z], retain_graph=True)
    for actual, of_sum in zip(
        gradient, torch.autograd.grad(expected, [batch.logprobs, log_z]), strict=True
    ):
        torch.testing.assert_close(actual, of_sum)
    estimated = tba.tb(batch, config)
    sums = batch.sum_tokens(batch.logprobs), batch.sum_tokens(batch.ref_logprobs)
    _, log_z = tba.trajectory_balance_loss(*sums, batch.rewards, 0.4, 1.3)
    batch.parameters["log_z"] = log_z
    torch.testing.assert_close(tba.tb_learned_z(batch, config).loss, estimated.loss)


def test_metrics_of_every_objective():
    lengths = torch.tensor([[1, 2, 1, 1], [1, 1, 1, 1]])
    behaviour = torch.zeros(9)
    logprobs = torch.tensor([0, math.log(3), -math.log(3), 0, 0, 0, 0, 0, math.log(3)])
    rewards = torch.tensor([[1.0, 1, 1, 1], [0, 1, 0, 0]])
    batch = tba.Batch(
        logprobs, behaviour, behaviour,
        tokens=torch.zeros(9, dtype=torch.int64), lengths=lengths,
        ended=torch.ones(2, 4, dtype=torch.bool), rewards=rewards,
        versions=torch.zeros(2, 4, dtype=torch.int64), prompt_ids=torch.arange(2), step=0,
        parameters={},
    )  # fmt: skip
    metrics = tba.batch_metrics(batch, tba.settings(beta=0.5, tau=1.0))
    assert metrics["log_z"] == pytest.approx((2 + 0.5) / 2 - batch.logprobs.sum() / 8)
    assert metrics["equal_rewards"] == 0.5
    # weights 1, 1, 1, 1 (3 and 1/3 are of one response) and 1, 1, 1, 3
    assert metrics["effective_sample_size"] == pytest.approx((1 + 36 / 48) / 2)
    assert metrics["ratio_max"] == pytest.approx(3)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 9)), max_size=5), st.floats(0.01, 9))
def test_schedules_are_linear_between_points_and_constant_after(points, first):
    points = [(0, first), *sorted(points, key=lambda point: point[0])]
    text = ",".join(f"{value!r}@{step}" for step, value in points)
    assert [point[:2] for point in tba.schedule_points(text)] == points
    jumps = {step for step, _ in points if [s for s, _ in points].count(step) > 1}
    for step in range(points[-1][0] + 3):
        if step in jumps:  # the later of the two values counts from here on
            assert tba.schedule_value(text, step) == [v for s, v in points if s == step][-1]
        else:
            steps, values = zip(*points, strict=True)
            expected = np.interp(step, steps, values)
            after_jump = [s for s in jumps if s < step]
            if not after_jump or jumps.isdisjoint(s for s in steps if s > max(after_jump)):
                last = [i for i, s in enumerate(steps) if s <= step][-1]
                expected = np.interp(step, steps[last:], values[last:])
            assert tba.schedule_value(text, step) == pytest.approx(expected)
    assert tba.schedule_value(0.5, 99) == 0.5
    half_cosine = [tba.schedule_value("2@0,2@4,1~end", step, end=10) for step in (4, 7, 9, 10)]
    np.testing.assert_allclose(half_cosine, [2, 1.5, 1.5 - 3**0.5 / 4, 1])
    ends_before = tba.settings(learning_rate="0@0,1@50,0@end", steps=10)
    assert tba.at_step(ends_before, 5).learning_rate == 0.1


# ------------------------------------------------------------- log-probabilities and micro-batches


def plain_logprobs(model, prompt, response, temperature):
    """Log-probabilities (T,) and entropies (T,) of a response, by the full softmax alone."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long().to(model.device)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0], entropies


@pytest.mark.parametrize("budget", [100_000, 1])
@pytest.mark.parametrize("variant", ["plain", "recomputed"])
def test_gradient_and_metrics_equal_brute_force(gsm8k, tmp_path, budget, variant):
    """Beside full logits, no padding, one sequence at a time, in float64."""
    recomputed = variant == "recomputed"
    temperature = 0.7 if recomputed else 1.0
    learner = learner_of(
        gsm8k, tmp_path, tokens_per_microbatch=budget, temperature=temperature, beta=0.5,
        gradient_checkpointing=recomputed, reference_temperature=1.2 if recomputed else 1,
    )  # fmt: skip
    learner.policy.CHUNK = 37
    groups = random_groups(learner.task, 3, 6)
    measured = learner.backward(groups, tba.at_step(learner.config, 0), 5)

    exact = tba.load_model(learner.config, learner.config.model, torch.float64, DEVICE)
    logprobs, ref_logprobs, rewards, entropy = [], [], [], 0.0
    for t in (t for group in groups for t in group):
        prompt = learner.task.train_prompts[t.prompt_id]
        values, entropies = plain_logprobs(exact, prompt, t.tokens, temperature)
        logprobs.append(values.sum())
        entropy += float(entropies.sum().detach())
        ref_logprobs.append(float(t.ref_logprobs.sum()) / (1.2 if recomputed else 1))
        rewards.append(t.reward)
    tensor = lambda x: torch.tensor(x, dtype=torch.float64, device=DEVICE).view(3, 6)
    expected, log_zs = brute_force(
        torch.stack(logprobs).view(3, 6), tensor(ref_logprobs), tensor(rewards), 0.5, 1.0
    )
    expected.backward()
    tokens = sum(len(t.tokens) for group in groups for t in group)
    assert measured["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert measured["log_z"].item() == pytest.approx(np.mean(log_zs), rel=1e-4)
    assert measured["entropy"].item() == pytest.approx(entropy / tokens, rel=1e-4)
    named = dict(exact.named_parameters())
    for name, parameter in learner.model.named_parameters():
        scale = named[name].grad.abs().max()
        torch.testing.assert_close(
            parameter.grad.double(), named[name].grad, atol=1e-4 * scale, rtol=1e-3
        )


@pytest.fixture(scope="module")
def near_policy(gsm8k, tmp_path_factory):
    """A Learner, groups from near its policy, and their Batch by full logits in float64.

    Rewards have ties. The Batch is one graph from the float64 model's weights, which come last.
    """
    folder = tmp_path_factory.mktemp("near_policy")
    flags = {"beta": 0.5, "kl_coefficient": 0.1, "reference_temperature": 1.2}
    learner = learner_of(gsm8k, folder, **flags)
    learner.policy.CHUNK = 37
    model = tba.load_model(learner.config, learner.config.model, torch.float64, DEVICE)
    groups = random_groups(learner.task, 3, 6)
    flat = [t for group in groups for t in group]
    exact = [
        plain_logprobs(model, learner.task.train_prompts[t.prompt_id], t.tokens, 1)[0] for t in flat
    ]
    torch.manual_seed(0)
    for t, own in zip(flat, exact, strict=True):
        t.logprobs = (own.detach() + 0.1 * torch.randn_like(own)).float().cpu().numpy()
    joined = lambda arrays: torch.from_numpy(np.concatenate(arrays)).double().to(DEVICE)
    ids = torch.tensor([group[0].prompt_id for group in groups])
    own = learner.parameters["log_z"]
    own.data = torch.randn(len(own), generator=torch.manual_seed(1)).to(DEVICE)
    log_z = own.detach().double().requires_grad_()
    batch = tba.Batch(
        logprobs=torch.cat(exact),
        behaviour=joined([t.logprobs for t in flat]),
        ref_logprobs=joined([t.ref_logprobs for t in flat]) / 1.2,
        tokens=joined([t.tokens for t in flat]).long(),
        lengths=torch.tensor([len(t.tokens) for t in flat], device=DEVICE).view(3, 6),
        ended=torch.tensor([t.ended for t in flat], device=DEVICE).view(3, 6),
        rewards=joined([[t.reward] for t in flat]).view(3, 6),
        versions=torch.tensor([t.version for t in flat], device=DEVICE).view(3, 6),
        prompt_ids=ids.to(DEVICE),
        step=0,
        parameters={"log_z": log_z},
    )
    return learner, groups, batch, [*model.parameters(), log_z]


@pytest.mark.parametrize("name", [*tba.OBJECTIVES, *OTHERS])
def test_a_gradient_does_not_depend_on_micro_batches(near_policy, monkeypatch, name):
    """Packed or not, by all groups, by each group, by less than a response: it is the exact one.

    Also if the loss is a mean over tokens, depends on the order within a group, or couples groups.
    """
    for other, objective in OTHERS.items():
        monkeypatch.setitem(tba.OBJECTIVES, other, objective)
    learner, groups, batch, parameters = near_policy
    loss = tba.OBJECTIVES[name](batch, tba.at_step(learner.config, 0)).loss
    exact = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    exact = torch.cat([gradient.flatten() for gradient in exact])
    assert exact.norm() > 0.01
    for gradient in gradients(learner, groups, name):
        assert (gradient - exact).norm() < 1e-4 * exact.norm()


def test_an_entropy_is_finite_where_a_logit_is_not():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [1.0, 1.0, 1.0]])
    chosen, entropy, _ = tba.likelihood(logits.log_softmax(-1), torch.tensor([0, 2])).unbind(1)
    assert chosen.tolist() == pytest.approx([-math.log(2), -math.log(3)])
    assert entropy.tolist() == pytest.approx([math.log(2), math.log(3)])


@pytest.mark.parametrize("name", ["online_dpo", "one_log_z"])
def test_a_second_forward_pass_is_made_only_where_it_is_needed(near_policy, monkeypatch, name):
    """It is found out, in the first step, whether an objective couples groups."""
    monkeypatch.setitem(tba.OBJECTIVES, "one_log_z", OTHERS["one_log_z"])
    learner, groups, _, _ = near_policy
    now = tba.at_step(learner.config, 0)
    now.objective = name
    learner.policy.row_tokens = learner.policy.ROW_TOKENS
    passes = []
    hook = learner.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    tokens = budgets(learner, groups, packs=True)
    needed = {"online_dpo": [False, False, True], "one_log_z": [False, True, True]}[name]
    learner.coupled = False
    for now.tokens_per_microbatch, second in zip(tokens, needed, strict=True):
        learner.gradient(groups, now, 0)
        passes.clear()
        learner.gradient(groups, now, 0)
        assert passes.count(False) == (passes.count(True) if second else 0)
    assert learner.coupled == (name == "one_log_z")
    hook.remove()


def coupled_by_spread(batch, config):
    """TB with a weight that all log-probabilities of the batch enter, if only by a little."""
    result = tba.tb(batch, config)
    spread = batch.sum_tokens(batch.logprobs - batch.ref_logprobs).std()
    return tba.Loss(result.loss * (1 + 0.01 * spread))


def undefined_at_zero(batch, config):
    """Couples groups, and its derivatives are NaN while some log-probabilities are 0."""
    scale = batch.logprobs.sqrt() if (batch.logprobs == 0).any() else batch.logprobs
    return tba.Loss((scale * batch.per_token(batch.rewards)).sum())


@pytest.mark.parametrize("objective", [coupled_by_spread, undefined_at_zero])
def test_a_gradient_that_would_be_slightly_wrong_is_computed_again(
    near_policy, monkeypatch, objective
):
    monkeypatch.setitem(tba.OBJECTIVES, "mine", objective)
    learner, groups, batch, parameters = near_policy
    loss = objective(batch, tba.at_step(learner.config, 0)).loss
    exact = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    exact = torch.cat([gradient.flatten() for gradient in exact])
    for gradient in gradients(learner, groups, "mine"):
        assert (gradient - exact).norm() < 1e-4 * exact.norm()


def test_what_an_objective_learns_gets_the_gradient_of_the_whole_batch_once(
    gsm8k, tmp_path, monkeypatch
):
    """Also if it couples groups; its rate follows the policy's, which may have a schedule."""

    def objective(batch, config):
        slope, offset = batch.parameters["mine"]
        gap = batch.sum_tokens(batch.logprobs) - slope * batch.rewards - offset
        return tba.Loss((gap - gap.mean()).square().mean() + (slope - 2).square() + offset.exp())

    monkeypatch.setitem(tba.OBJECTIVES, "mine", objective)
    monkeypatch.setitem(tba.PARAMETERS, "mine", (2, 0.5))
    found = []
    for budget in (100_000, 500, 5):
        learner = learner_of(
            gsm8k, tmp_path / str(budget), tokens_per_microbatch=budget, objective="mine",
            learning_rate="0.002@0,0.001@1",
        )  # fmt: skip
        groups = random_groups(learner.task, 3, 6)
        now = tba.at_step(learner.config, 1)
        learner.gradient(groups, now, 1)
        found.append(learner.parameters["mine"].grad.clone())
        learner.optimizer.zero_grad()
        learner.step(groups, now, 1)
        # AdamW's first step is the rate, half of its peak
        moved = learner.parameters["mine"].detach().abs().cpu()
        torch.testing.assert_close(moved, torch.full((2,), 0.25), rtol=1e-3, atol=0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-4)


def test_a_step_is_skipped_if_only_what_an_objective_learns_has_no_finite_gradient(
    gsm8k, tmp_path, monkeypatch
):
    def objective(batch, config):  # a root has no derivative at 0
        return tba.Loss(tba.tb(batch, config).loss + batch.parameters["mine"].sum().sqrt())

    monkeypatch.setitem(tba.OBJECTIVES, "mine", objective)
    monkeypatch.setitem(tba.PARAMETERS, "mine", (2, 0.5))
    learner = learner_of(gsm8k, tmp_path, objective="mine")
    groups = random_groups(learner.task, 2, 3)
    metrics = learner.step(groups, tba.at_step(learner.config, 0), 0)
    assert math.isfinite(metrics["loss"] + metrics["grad_norm"]) and learner.skipped == 1
    assert not learner.parameters["mine"].any()


def test_a_batch_from_which_nothing_is_learned_needs_no_second_pass(gsm8k, tmp_path):
    """All its derivatives are 0, and exactly known."""
    learner = learner_of(gsm8k, tmp_path, objective="rloo", beta=1e-30)
    groups = random_groups(learner.task, 3, 6)
    for t in (t for group in groups for t in group):
        t.reward, t.ref_logprobs = 1.0, t.logprobs
    metrics = learner.gradient(groups, tba.at_step(learner.config, 0), 0)
    assert metrics["grad_norm"] == 0 and not learner.coupled


def test_weight_decay_leaves_norms_and_biases_alone(gsm8k, model_of, tmp_path):
    learner = learner_of(gsm8k, tmp_path, model=model_of("gpt_neox"), weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    groups = random_groups(learner.task, 1, 2)
    for t in groups[0]:
        t.ref_logprobs = np.zeros_like(t.ref_logprobs)
    now = tba.at_step(learner.config, 0)
    learner.backward(groups, now, 0)
    for parameter in learner.model.parameters():
        parameter.grad.zero_()
    learner.optimizer.param_groups[0]["lr"] = learner.optimizer.param_groups[1]["lr"] = 0.5
    learner.optimizer.step()
    for name, p in learner.model.named_parameters():
        decayed = 0.95 if p.ndim > 1 else 1.0
        torch.testing.assert_close(p.detach(), decayed * before[name], msg=name)


def test_metrics_are_of_the_whole_batch_whatever_the_micro_batches(gsm8k, tmp_path, monkeypatch):
    """Also a metric that is no mean: the largest staleness times the number of prompts."""

    def objective(batch, config):
        """TBA' with a metric that only the whole batch gives."""
        result = tba.tba_prime(batch, config)
        oldest = (batch.step - batch.versions).max()
        result.metrics["oldest_times_prompts"] = oldest * len(batch.rewards)
        return result

    monkeypatch.setitem(tba.OBJECTIVES, "mine", objective)
    metrics = []
    for i, budget in enumerate((100_000, 500, 130)):
        flags = {"tokens_per_microbatch": budget, "objective": "mine", "beta": 0.5}
        learner = learner_of(gsm8k, tmp_path / str(i), **flags)
        groups = random_groups(learner.task, 3, 6)
        groups[1][2].version = 2
        for t in (t for group in groups for t in group):
            t.last_version = 7  # staleness is that of the weights at submission
        metrics.append(learner.gradient(groups, tba.at_step(learner.config, 0), 9))
    assert metrics[0]["oldest_times_prompts"] == 27
    for others in metrics[1:]:
        assert metrics[0] == pytest.approx(others, rel=1e-4)


def test_a_step_is_taken_unless_it_is_not_finite_and_other_prompts_keep_their_log_z(
    gsm8k, tmp_path
):
    flags = {"objective": "tb_learned_z", "max_grad_norm": 1, "adam_beta2": 0.9}
    learner = learner_of(gsm8k, tmp_path, **flags)
    now = tba.at_step(learner.config, 0)
    groups = random_groups(learner.task, 3, 6)
    ids = [group[0].prompt_id for group in groups]
    log_z = learner.parameters["log_z"]
    learner.backward(groups, now, 0)
    gradient = log_z.grad.clone()
    learner.optimizer.zero_grad()
    metrics = learner.step(groups, now, 0)
    # AdamW's mean of gradients is a tenth of the clipped one, whose norm was above 1
    means = [learner.optimizer.state[p]["exp_avg"] for p in learner.model.parameters()]
    clipped = torch.cat([10 * mean.flatten() for mean in means]).norm().item()
    assert metrics["grad_norm"] > 2 and clipped == pytest.approx(1, rel=1e-3)
    own = learner.optimizer.state[log_z]  # what else is learned is not clipped with the policy
    torch.testing.assert_close(own["exp_avg"], 0.1 * gradient)
    torch.testing.assert_close(own["exp_avg_sq"], 0.1 * gradient**2)
    after_first = log_z.detach().clone()
    assert (after_first[ids] != 0).all() and (after_first != 0).sum() == 3
    others = random_groups(learner.task, 3, 6, first_prompt=60)
    learner.step(others, now, 1)
    assert torch.equal(log_z[ids], after_first[ids])  # momentum does not move them
    weights = [p.detach().clone() for p in learner.model.parameters()]
    groups[0][0].reward = math.nan
    learner.step(groups, now, 2)
    assert learner.skipped == 1
    for old, new in zip(weights, learner.model.parameters(), strict=True):
        assert torch.equal(old, new)


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
    bias = None if head.bias is None else head.bias.double()
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double(), bias)
    rounded = logits.bfloat16().double()
    targets = ids[0, 1:, None]
    exact = logits.log_softmax(-1).gather(1, targets)[:, 0]
    assert (rounded.log_softmax(-1).gather(1, targets)[:, 0] - exact).abs().max() > 0.05
    prompt = task.train_prompts[0]
    groups = [(prompt[:1], [prompt[1:24]])]
    (scored,) = tba.token_logprobs(tba.TokenLogProbs(model, 1.0), groups, config)
    np.testing.assert_allclose(scored, exact.detach().cpu().numpy(), atol=2e-3, rtol=0)


def test_plan_microbatches_covers_all_within_budget():
    rng = np.random.default_rng(0)
    prompt = np.zeros(3, np.int32)
    for _ in range(50):
        lengths = rng.integers(1, 100, int(rng.integers(6, 60)))
        rows = [tba.Row(prompt, [np.zeros(n, np.int32)], [i]) for i, n in enumerate(lengths)]
        units = []
        while rows:
            units.append([rows.pop() for _ in range(min(len(rows), int(rng.integers(1, 6))))])
        budget, ranks = int(rng.integers(1, 800)), int(rng.integers(1, 4))
        plans = tba.plan_microbatches(units, budget, ranks)
        assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1
        planned = [row for plan in plans for rows in plan for row in rows if row is not tba.IDLE]
        indices = [i for row in planned for i in row.indices]
        assert sorted(indices) == list(range(len(lengths)))
        shares = []
        alone = [[row.indices for row in unit] for unit in (*units, [tba.IDLE])]
        for plan in plans:
            for rows in plan:
                within = tba.padded_tokens(rows) <= budget
                assert within or [row.indices for row in rows] in alone
            shares.append(sum(row.length for rows in plan for row in rows if row is not tba.IDLE))
        assert max(shares) - min(shares) <= max(map(tba.padded_tokens, units)) + 5 * 103


def test_plan_rows_covers_all_evenly_within_budget():
    rng = np.random.default_rng(0)
    tokens = lambda most: rng.integers(0, 9, int(rng.integers(1, most))).astype(np.int32)
    for _ in range(50):
        groups = [(tokens(60), [tokens(40) for _ in range(rng.integers(1, 30))]) for _ in range(4)]
        row_tokens, budget = int(rng.integers(0, 300)), int(rng.integers(30, 300))
        plan = tba.plan_rows(groups, row_tokens, budget)
        all_tokens = np.concatenate([response for _, own in groups for response in own])
        found = [i for unit in plan for row in unit for index in row.indices for i in index]
        assert sorted(found) == list(range(len(all_tokens)))
        for (prompt, own), unit in zip(groups, plan, strict=True):
            longest = max(map(len, own))
            for row in unit:
                most = min(budget, max(row_tokens, 4 * len(prompt))) if row_tokens else 0
                assert row.prompt is prompt
                assert row.length <= max(most, len(prompt) + 1) + longest
                assert row.length <= max(budget, len(prompt) + longest)
                assert row_tokens or len(row.indices) == 1
                for index, response in zip(row.indices, row.responses, strict=True):
                    assert np.array_equal(all_tokens[index], response)
            lengths = [row.length for row in unit]
            assert max(lengths) - min(lengths) <= longest
    example = (np.zeros(3, np.int32), [np.zeros(n, np.int32) for n in (5, 3, 4, 2)])
    (unit,) = tba.plan_rows([example], 11, 100)
    assert [[index[0] for index in row.indices] for row in unit] == [[0, 12], [8, 5]]
    assert len(tba.plan_rows([example], 0, 100)[0]) == 4


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "qwen2"])
@pytest.mark.parametrize("rows", [[[0, 1, 2], [3], [5, 4]], [[0], [3], [4]]])
def test_packed_rows_equal_the_full_softmax(gsm8k, model_of, tmp_path, name, rows):
    """Rows of several responses and of one, padded, and what `token_logprobs` makes of them."""
    config, _ = config_and_task(gsm8k, tmp_path, model=model_of(name))
    model = tba.load_model(config, config.model, torch.float32, DEVICE)
    policy = tba.TokenLogProbs(model, 0.7)
    policy.CHUNK = 5
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, 300, n).astype(np.int32)
    groups = [
        (draw(p), [draw(n) for n in ns]) for p, ns in ((9, (4, 12, 1)), (1, (7,)), (20, (3, 5)))
    ]
    pairs = [(prompt, response) for prompt, responses in groups for response in responses]
    packed = [tba.Row(pairs[row[0]][0], [pairs[i][1] for i in row], []) for row in rows]
    logprobs, entropies, _ = policy(**tba.pack(packed, DEVICE)).unbind(1)
    assert logprobs.requires_grad
    weights = list(policy.parameters())
    for gradient in torch.autograd.grad(entropies.sum(), weights, retain_graph=True):
        assert not gradient.any()
    plain = [plain_logprobs(model, prompt, response, 0.7) for prompt, response in pairs]
    order = [i for row in rows for i in row]
    expected = torch.cat([plain[i][0] for i in order])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    entropy = torch.cat([plain[i][1] for i in order])
    torch.testing.assert_close(entropies, entropy, atol=1e-4, rtol=1e-4)
    expected = torch.cat([values for values, _ in plain])
    for budget in (20, 45, 1000):
        config.tokens_per_microbatch = budget
        for row_tokens in (0, 30, 1000):
            policy.row_tokens = row_tokens
            scored = np.concatenate(tba.token_logprobs(policy, groups, config))
            np.testing.assert_allclose(scored, expected.detach().cpu(), atol=1e-4, rtol=1e-4)


def test_an_idle_rank_has_gradients_of_zero(gsm8k, tmp_path):
    """FSDP's collective operations need every parameter's gradient on every rank."""
    learner = learner_of(gsm8k, tmp_path)
    logprobs, entropies, _ = learner.policy(**tba.pack([tba.IDLE], DEVICE)).unbind(1)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    for parameter in learner.model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()
