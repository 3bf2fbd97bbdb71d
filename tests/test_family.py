"""What docs/hacking.md says of the objectives' fixed points and relations, in float64."""

import dataclasses
import itertools
import math

import pytest
import torch
from harness import plugin_of_docs
from test_objectives import gradient_of, random_batch

import tba

BETA, CAP = 0.3, 2.0
FLAGS = {"behaviour_beta": BETA, "flow_beta": 1.5, "ratio_cap": CAP, "max_response_tokens": 1}
# six responses: their rewards, and how often each is among the 24 that pi_b sampled
REWARDS = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.3], dtype=torch.float64)
COUNTS = torch.tensor([2, 6, 4, 1, 8, 3])
LENGTHS = torch.tensor([3, 9, 5, 3, 9, 5])
REFERENCE = torch.tensor([0.5, -0.7, 0.1, 1.2, 0.3, -0.4], dtype=torch.float64).log_softmax(0)
OPTIMUM = (REFERENCE + REWARDS / BETA).log_softmax(0)


def config_of(**flags):
    return tba.at_step(tba.settings(**{"beta": BETA, **FLAGS, **flags}), 0)


@pytest.fixture(scope="module")
def objectives():
    """All objectives by name, with tb_weighted, which is a plug-in of docs/hacking.md."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "OBJECTIVES", tba.OBJECTIVES.copy())
        exec(plugin_of_docs("--objective tb_weighted"), {})
        return tba.OBJECTIVES


def group_of(policy, sampled, behaviour, log_z=0.0, lengths=None, reference=REFERENCE):
    """A Batch of groups (B, K) of indices of responses, from log-probabilities (6,) of each.

    A response of `lengths` tokens has the same log-probability for each. Where a group holds every
    response as often as pi_b samples it, a mean over the group is the expectation under pi_b.
    """
    lengths = (torch.ones(6, dtype=torch.int64) if lengths is None else lengths)[sampled]
    tokens = lambda table: torch.repeat_interleave(
        (table[sampled] / lengths).flatten(), lengths.flatten()
    )
    batch = random_batch(*sampled.shape, seed=0, off_policy=0.0)
    log_z = torch.full((len(sampled),), float(log_z), dtype=torch.float64, requires_grad=True)
    return dataclasses.replace(
        batch,
        logprobs=tokens(policy),
        behaviour=tokens(behaviour),
        ref_logprobs=tokens(reference),
        lengths=lengths,
        rewards=REWARDS[sampled],
        parameters={"log_z": log_z},
    )


def data_of(counts):
    """A group that is exactly pi_b: (indices (1, K), log pi_b (6,))."""
    return torch.repeat_interleave(counts)[None], (counts.double() / counts.sum()).log()


def loss_and_gradient(objective, policy, *data, config=None, **more):
    """The loss, and the norm of its gradient by the logits of `policy` and by log Z."""
    logits = policy.detach().clone().requires_grad_()
    batch = group_of(logits.log_softmax(0), *data, **more)
    loss = objective(batch, config or config_of()).loss
    gradients = torch.autograd.grad(
        loss, [logits, batch.parameters["log_z"]], materialize_grads=True
    )
    return loss.item(), torch.cat(gradients).norm().item()


def minimiser(objective, *data):
    """The policy of least loss on fixed data."""
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=2000, tolerance_grad=1e-13, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = objective(group_of(logits.log_softmax(0), *data), config_of()).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits.detach().log_softmax(0)


# ------------------------------------------------------------------------------------ fixed points


@pytest.mark.parametrize("sampled", [[[0, 1, 3]], [[5, 4, 4, 2]], None])
@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("tb", ""), ("tb_learned_z", ""), ("tb_weighted", ""), ("ftb", "forward_kl"),
        ("ftb", "hellinger"),
    ],
)  # fmt: skip
def test_tb_and_its_variants_are_minimal_at_the_optimum_on_any_data(
    objectives, name, divergence, sampled
):
    """Every response's residual is 0, also in groups of three that no policy would sample."""
    data, behaviour = data_of(COUNTS)
    data = data if sampled is None else torch.tensor(sampled)
    config = config_of(divergence=divergence or "reverse_kl")
    log_z = (REFERENCE + REWARDS / BETA).logsumexp(0)
    at = lambda policy: loss_and_gradient(
        objectives[name], policy, data, behaviour, config=config, log_z=log_z
    )
    loss, gradient = at(OPTIMUM)
    assert loss < 1e-20 and gradient < 1e-10
    assert at(REFERENCE)[0] > 0.1


def test_tba_prime_has_tbs_fixed_point(objectives):
    """Its loss has another value, its gradient TB's direction."""
    data = data_of(COUNTS)
    assert loss_and_gradient(objectives["tba_prime"], OPTIMUM, *data)[1] < 1e-10
    assert loss_and_gradient(objectives["tba_prime"], REFERENCE, *data)[1] > 1e-3


def test_oapl_is_minimal_at_a_tilt_of_the_behaviour_policy(objectives):
    """With both betas equal, and V^ the mean over pi_b; on a small group V^ is another."""
    data, behaviour = data_of(COUNTS)
    tilt = (behaviour + REWARDS / BETA).log_softmax(0)
    loss, gradient = loss_and_gradient(objectives["oapl"], tilt, data, behaviour)
    assert loss < 1e-20 and gradient < 1e-10
    assert loss_and_gradient(objectives["oapl"], OPTIMUM, data, behaviour)[1] > 0.01
    assert loss_and_gradient(objectives["oapl"], tilt, data[:, ::5], behaviour)[1] > 0.01


@pytest.mark.parametrize(("name", "anchored_on"), [("kimi", "reference"), ("dro", "behaviour")])
def test_kimis_and_dros_fixed_points_depend_on_the_data(objectives, name, anchored_on):
    """log(pi / anchor) + c pi / pi_b = A / beta, with one c for all responses.

    For dro this is of responses of one token.
    """
    found = []
    for counts in (COUNTS, COUNTS.flip(0)):
        data, behaviour = data_of(counts)
        policy = minimiser(objectives[name], data, behaviour)
        anchor = REFERENCE if anchored_on == "reference" else behaviour
        advantage = REWARDS - (behaviour.exp() * REWARDS).sum()
        c = (advantage / BETA - (policy - anchor)) * (behaviour - policy).exp()
        torch.testing.assert_close(c, c.mean().expand(6), rtol=0, atol=1e-5)
        assert c.mean() > 0.1
        found.append(policy.exp())
    assert (found[0] - found[1]).abs().max() > 0.02
    assert (found[0] - OPTIMUM.exp()).abs().max() > 0.02


def test_flowrl_rewards_length_where_its_reward_is_above_log_z(objectives):
    """pi_ref exp(|y| (b A - log Z)): the reward counts once for each token."""
    data, behaviour = data_of(COUNTS)
    rewards = REWARDS[data]
    scaled = 1.5 * (REWARDS - rewards.mean()) / (rewards.std() + 1e-4)
    low, high = torch.tensor(-20.0).double(), torch.tensor(20.0).double()
    for _ in range(200):  # log Z, at which the probabilities sum to 1
        log_z = (low + high) / 2
        policy = REFERENCE + LENGTHS * (scaled - log_z)
        low, high = (log_z, high) if policy.logsumexp(0) > 0 else (low, log_z)
    more = {"log_z": log_z, "lengths": LENGTHS}
    loss, gradient = loss_and_gradient(objectives["flowrl"], policy, data, behaviour, **more)
    assert loss < 1e-15 and gradient < 1e-6
    assert loss_and_gradient(objectives["flowrl"], OPTIMUM, data, behaviour, **more)[0] > 0.1
    odds = (policy - REFERENCE)[:3]  # equally good responses of 3, 9 and 5 tokens
    torch.testing.assert_close(odds / odds[0], LENGTHS[:3] / 3.0, check_dtype=False)


@pytest.mark.parametrize("name", ["tb", "rloo", "kimi"])
@pytest.mark.parametrize("K", [2, 3])
def test_on_policy_kimi_has_a_larger_kl_coefficient_and_tb_does_not(objectives, name, K):
    """All groups of K that a policy can sample, each as often as it does: the expected gradient."""
    counts = torch.tensor([1, 1, 2, 1, 2, 1])
    behaviour = (counts.double() / counts.sum()).log()
    sampled = torch.tensor(list(itertools.product(torch.repeat_interleave(counts), repeat=K)))
    for factor in (1, K / (K - 1)):
        # the reference under which this policy is the optimum at beta times `factor`
        reference = (behaviour - REWARDS / (BETA * factor)).log_softmax(0)
        _, gradient = loss_and_gradient(
            objectives[name], behaviour, sampled, behaviour, reference=reference
        )
        is_fixed = (factor == 1) == (name != "kimi")
        assert (gradient < 1e-12) == is_fixed and (gradient > 1e-3) != is_fixed


def test_the_kl_term_of_grpo_has_another_fixed_point(objectives):
    """On-policy, responses of one token, no division by std: kappa pi_ref / (lambda - r)."""
    data, behaviour = data_of(COUNTS)
    kappa = 2.0
    mean = (behaviour.exp() * REWARDS).sum()
    # the reference under which this policy is the fixed point
    reference = behaviour + ((kappa + mean - REWARDS) / kappa).log()
    assert reference.logsumexp(0).abs() < 1e-12
    config = config_of(kl_coefficient=kappa)
    at = lambda reference: loss_and_gradient(
        objectives["dr_grpo"], behaviour, data, behaviour, config=config, reference=reference
    )
    assert at(reference)[1] < 1e-12
    assert at((behaviour - REWARDS / kappa).log_softmax(0))[1] > 1e-3


def test_a_policy_gradient_on_fixed_data_has_no_minimum(objectives):
    """The further the other responses fall below one good one, the lower the loss, linearly."""
    data = data_of(COUNTS)
    best = torch.eye(6, dtype=torch.float64)[0]
    losses = [loss_and_gradient(objectives["rloo"], t * best, *data)[0] for t in (100, 1000)]
    assert losses[0] < -1 and losses[1] == pytest.approx(10 * losses[0])


# ---------------------------------------------------------------------------------------- gradients


def lengths_of_one(batch, length):
    """The Batch's first tokens as responses that all have the same length."""
    N = batch.rewards.numel() * length
    cut = lambda x: x[:N].detach()
    return dataclasses.replace(
        batch,
        logprobs=cut(batch.logprobs).requires_grad_(),
        behaviour=cut(batch.behaviour),
        ref_logprobs=cut(batch.ref_logprobs),
        lengths=torch.full_like(batch.lengths, length),
    )


@pytest.mark.parametrize("off_policy", [0.0, 0.5])
def test_kimi_is_tb_without_the_mean_log_ratio(objectives, off_policy):
    """The difference is 2 <mean d> grad log pi, which is 0 where the policy is the reference."""
    batch, config = random_batch(3, 5, 0, off_policy), config_of()
    difference = gradient_of(objectives["kimi"], batch, config) - gradient_of(
        objectives["tb"], batch, config
    )
    mean = batch.sum_tokens(batch.logprobs.detach() - batch.ref_logprobs).mean(1, keepdim=True)
    expected = batch.per_token((2 * mean / batch.rewards.numel()).expand_as(batch.rewards))
    torch.testing.assert_close(difference, expected)
    assert difference.abs().max() > 0.01
    batch.ref_logprobs = batch.logprobs.detach()
    torch.testing.assert_close(
        gradient_of(objectives["kimi"], batch, config), gradient_of(objectives["tb"], batch, config)
    )


def test_oapl_with_a_large_beta_is_kimi_anchored_on_the_behaviour_policy(objectives):
    batch = random_batch(3, 5, 0, off_policy=0.5)
    of_oapl = gradient_of(objectives["oapl"], batch, config_of(beta=1e7))
    batch.ref_logprobs = batch.behaviour
    of_kimi = gradient_of(objectives["kimi"], batch, config_of())
    torch.testing.assert_close(of_oapl, BETA**2 * of_kimi, rtol=1e-5, atol=1e-6)


def test_flowrl_at_one_length_is_tb_with_another_beta(objectives):
    """On-policy, where its weights are 1, with log Z at its best: beta = std r / (b |y|)."""
    batch = lengths_of_one(random_batch(1, 8, 0, off_policy=0.0), 2)
    d = batch.sum_tokens(batch.logprobs.detach() - batch.ref_logprobs)
    log_z = -(d / 2).mean(1)
    batch.parameters["log_z"] = log_z.clone().requires_grad_()
    of_flowrl = gradient_of(objectives["flowrl"], batch, config_of())
    beta = (batch.rewards.std().item() + 1e-4) / (1.5 * 2)
    of_tb = gradient_of(objectives["tb"], batch, config_of(beta=beta))
    torch.testing.assert_close(of_flowrl, of_tb / 2**2)


def test_on_policy_equivalences(objectives):
    """rloo is proximal_rloo; dro, dr_grpo and tba_prime without KL are one; ratios do nothing."""
    batch = random_batch(3, 5, 0, off_policy=0.0)
    of = lambda name, **flags: gradient_of(
        objectives[name], batch, config_of(max_response_tokens=7, **flags)
    )
    m = batch.lengths.double().mean()
    same = torch.testing.assert_close
    same(of("proximal_rloo"), of("rloo"))
    same(of("tb_weighted"), of("tb"))
    same(of("dro"), of("dr_grpo") * 7 / m)
    for name in ("grpo", "dr_grpo", "proximal_rloo"):
        for ratio in ("truncate", "mask"):
            same(of(name, ratio=ratio), of(name))
    batch.ref_logprobs = batch.logprobs.detach()
    same(of("tba_prime"), of("dro"))


@pytest.mark.parametrize("off_policy", [0.0, 1.0])
def test_truncated_grpo_has_cispos_weights_but_not_its_mean(objectives, off_policy):
    """1 / |y_j| for each response in grpo, 1 / N for each token in cispo."""
    batch = random_batch(3, 5, 0, off_policy)
    of = lambda name: gradient_of(objectives[name], batch, config_of(ratio="truncate"))
    m = batch.lengths.double().mean()
    limited = bool((batch.logprobs - batch.behaviour).max() > math.log(CAP))
    assert limited == (off_policy > 0)
    torch.testing.assert_close(of("cispo"), of("grpo") * batch.per_token(batch.lengths / m))
    assert (of("cispo") - of("grpo")).norm() > 0.1 * of("grpo").norm()
