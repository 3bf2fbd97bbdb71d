"""Objectives that TB is compared with, as a plug-in for any run.

    python tba.py --plugin bench/objectives.py --objective dr_grpo ...
    python tba.py --plugin bench/objectives.py --objective dr_grpo --ratio truncate ...
    python tba.py --plugin bench/objectives.py --objective ftb --divergence forward_kl ...
    python tba.py --plugin bench/objectives.py --objective flowrl --flow_beta 15 --ratio_cap 10 ...

docs/hacking.md has their formulas in one notation, how they relate to TB, and when to use which
--ratio. pi_b is the behaviour policy, which sampled a response; a_j is r_j minus the group's mean.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

import tba


@dataclass
class ObjectiveFlags:
    """The settings of objectives in bench/objectives.py."""

    ratio: Literal["clip", "truncate", "mask"] = tba.flag(
        "clip", "grpo, dr_grpo, proximal_rloo: how ratios to the behaviour policy are limited."
    )
    clip_high: float = tba.flag(0.0, "Upper range of --ratio clip; 0: that of --clip_range.")
    ratio_cap: float = tba.flag(
        3.0, "Maximum ratio [C] of --ratio truncate and mask, cispo and flowrl.", 1
    )
    kl_coefficient: float = tba.flag(0.0, "grpo, dr_grpo: weight of a KL term.")
    divergence: Literal["reverse_kl", "forward_kl", "hellinger"] = tba.flag(
        "reverse_kl", "ftb: divergence."
    )
    behaviour_beta: float = tba.flag(
        0.1, "oapl, dro: KL coefficient to the behaviour policy.", tba.ABOVE_0
    )
    flow_beta: float = tba.flag(15.0, "flowrl: weight of the standardized reward.", tba.ABOVE_0)


def centred(rewards: Tensor) -> Tensor:
    """Rewards (B, K) minus their group's mean."""
    return rewards - rewards.mean(1, keepdim=True)


def standardized(rewards: Tensor) -> Tensor:
    """Centred rewards (B, K) divided by their group's standard deviation; 0 if all are equal."""
    return centred(rewards) / (rewards.std(1, keepdim=True) + 1e-4)


# ------------------------------------------------------------------- policy gradients, with ratios


def rloo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740).

    loss = - mean A_j log pi_theta(y_j), A being `tba.leave_one_out`; without off-policy correction.
    """
    advantage = tba.leave_one_out(batch, config)  # (B, K)
    return tba.Loss(-(advantage * batch.sum_tokens(batch.logprobs)).mean())


def proximal_rloo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """tba.py's proximal RLOO (the paper's equation 6), with --ratio for ratios of responses."""
    log_ratio = batch.sum_tokens(batch.logprobs - batch.behaviour)  # (B, K)
    surrogate, limited = limited_surrogate(log_ratio, tba.leave_one_out(batch, config), config)
    return tba.Loss(-surrogate.mean(), {"clip_fraction": limited.float().mean()})


def grpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300, equation 3).

    A_j = a_j / std r; a response's loss is the mean over its tokens.

    Example: rewards [[1, 0]] have the standard deviation 0.71 and give A = [[0.71, -0.71]].
    """
    return token_ratio_loss(batch, config, standardized(batch.rewards), 1 / batch.lengths)


def dr_grpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783): no division by std or by length.

    A_j = a_j; a response's loss is the sum over its tokens / --max_response_tokens.
    """
    return token_ratio_loss(batch, config, centred(batch.rewards), 1 / config.max_response_tokens)


def token_ratio_loss(
    batch: tba.Batch, config: tba.Config, advantage: Tensor, weight: Any
) -> tba.Loss:
    """The surrogate of --ratio per token, minus --kl_coefficient times the KL to the reference.

    `advantage` (B, K) and `weight` (B, K), or a number, apply to each token of a response.
    """
    log_ratio = batch.logprobs - batch.behaviour  # (N,)
    surrogate, limited = limited_surrogate(log_ratio, batch.per_token(advantage), config)
    if config.kl_coefficient:
        difference = batch.ref_logprobs - batch.logprobs
        kl = difference.exp() - difference - 1  # k3, an estimator that is never negative
        surrogate = surrogate - config.kl_coefficient * kl  # (N,)
    loss = -(batch.sum_tokens(surrogate) * weight).mean()
    return tba.Loss(loss, {"clip_fraction": limited.float().mean()})


def limited_surrogate(log_ratio: Tensor, advantage: Tensor, config: tba.Config) -> tuple:
    """The gain of tokens or responses, and a mask of where --ratio limits rho = pi_theta / pi_b.

    clip is PPO's, unbounded for A < 0; --clip_high makes its upper range another than its lower one
    (DAPO's clip-higher, arXiv 2503.14476). Otherwise the gradient is w A grad log pi, w constant.
    truncate: w = min(rho, C), as in truncated importance sampling (Yao et al. 2025,
    fengyao.notion.site/off-policy-rl); `cispo` has these weights with a mean over all tokens.
    mask: w = rho, or 0 outside [1/C, C], as in IcePop (Ring-1T, arXiv 2510.18855) and masked
    importance sampling (Liu et al. 2025, "When Speed Kills Stability").

    Example: rho = [4, 2, 0.1] and C = 3 give w = [3, 2, 0.1] or [0, 2, 0].
    """
    if config.ratio == "clip":
        high = config.clip_high or config.clip_range
        return tba.ppo_surrogate(log_ratio, advantage, config.clip_range, high)
    ratio = log_ratio.detach().exp()
    limited = ratio > config.ratio_cap
    weight = ratio.clamp(max=config.ratio_cap)
    if config.ratio == "mask":
        limited |= ratio < 1 / config.ratio_cap
        weight = ratio.masked_fill(limited, 0)
    return weight * advantage * log_ratio, limited


def cispo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): no token is dropped.

    loss = - mean over the batch's tokens of w A_j log pi_theta, with w = min(pi_theta / pi_b, C) of
    the token and A_j as in `grpo`, both constant. As in their experiments, w has no lower bound.
    Read in implementations that cite the equations, not in the paper.

    Example: one response of 3 tokens and one of 1 have weights 3/4 and 1/4; in `grpo`, 1/2 each.
    """
    ratio = (batch.logprobs.detach() - batch.behaviour).exp()  # (N,)
    weight = ratio.clamp(max=config.ratio_cap)
    advantage = batch.per_token(standardized(batch.rewards))  # (N,)
    loss = -(weight * advantage * batch.logprobs).mean()
    return tba.Loss(loss, {"clip_fraction": (ratio > config.ratio_cap).float().mean()})


# ------------------------------------------------------------------------------------- regressions


def dro(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """`dro` of verl and Tinker: a policy gradient and a penalty on each token's squared log-ratio.

    loss = - mean over the batch's tokens of a_j log pi_theta - beta_2 / 2 u^2, where u is the
    token's log pi_theta - log pi_b, and beta_2 = --behaviour_beta. Read in Tinker's documentation
    (where it is a sum, and the advantage is the user's). It cites Richemond et al. 2024 (arXiv
    2405.19107), whose own loss is per response and has a learned value.

    Example: rewards all equal and every token a nat away from pi_b give the loss beta_2 / 2.
    """
    log_ratio = batch.logprobs - batch.behaviour  # (N,)
    gain = batch.per_token(centred(batch.rewards)) * batch.logprobs
    penalty = config.behaviour_beta / 2 * log_ratio.square()
    return tba.Loss(-(gain - penalty).mean(), {"penalty": penalty.mean()})


def kimi(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Kimi k1.5's regression (arXiv 2501.12599, section 2.3.2): TB without the mean log-ratio.

    loss = mean (d_j - a_j / beta)^2, d_j = log pi_theta - log pi_ref of the response; in TB, d_j
    minus its mean stands for d_j (the paper, section 3.3). Theirs is beta^2 times this, and its
    reference is the policy at the start of an iteration: add --reset_reference_every. Read in notes
    on the report, not in the report.

    Example: d = [[1, 1]] and equal rewards give the loss 1, in TB 0.
    """
    d = batch.sum_tokens(batch.logprobs - batch.ref_logprobs)  # (B, K)
    residual = d - centred(batch.rewards) / config.beta
    return tba.Loss(residual.square().mean(), {"mean_log_ratio": d.mean()})


def flowrl(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """FlowRL (Zhu et al. 2025, arXiv 2509.15207): TB per token, weighted, with a learned log Z.

    loss = mean w_j (log Z(x) + d_j / |y_j| - b A_j)^2, with d_j as in `kimi`, A_j as in `grpo`, b =
    --flow_beta and w_j = min(pi_theta(y_j) / pi_b(y_j), C), constant. Their C is 10, and their log
    Z a network of the prompt; here it is a parameter per training prompt, that of `tb_learned_z`.
    Read in the verl recipe, which has several forms of w and clips log pi_theta; not in the paper.

    Example: d = 0, log Z = 0 and A = [[0.71, -0.71]] give w = 1 and (0.71 b)^2 = 113.
    """
    d = batch.sum_tokens(batch.logprobs - batch.ref_logprobs)  # (B, K)
    log_z = batch.parameters["log_z"][batch.prompt_ids, None]  # (B, 1)
    residual = log_z + d / batch.lengths - config.flow_beta * standardized(batch.rewards)
    ratio = batch.sum_tokens(batch.logprobs.detach() - batch.behaviour).exp()
    weight = ratio.clamp(max=config.ratio_cap)
    metrics = {"log_z": log_z.mean(), "clip_fraction": (ratio > config.ratio_cap).float().mean()}
    return tba.Loss((weight * residual.square()).mean(), metrics)


def oapl(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """OAPL (Ritter et al. 2026, arXiv 2602.19362): KL to the behaviour policy pi_b.

    loss = mean (beta_2 (log pi - log pi_b) - (r - V^))^2, with V^ = beta log mean exp(r / beta)
    over the K responses and beta_2 = --behaviour_beta. There is no reference. Of the paper, only
    the abstract was read.

    Example: log pi = log pi_b, rewards [[1, 0]] and a large beta give V^ = 0.5 and the loss 0.25.
    """
    log_ratio = batch.sum_tokens(batch.logprobs - batch.behaviour)  # (B, K)
    log_sum = (batch.rewards / config.beta).logsumexp(1)
    value = config.beta * (log_sum - math.log(log_ratio.shape[1]))  # V^, (B,)
    advantage = batch.rewards - value[:, None]
    return tba.Loss((config.behaviour_beta * log_ratio - advantage).square().mean())


def ftb(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """f-Trajectory Balance (Fawkes and Hartford 2026, arXiv 2605.15417): other divergences.

    TB's D^2, D = log pi - log pi*, is one of a family of losses l(D). On-policy, each has the
    gradient direction of its --divergence; off-policy, all have the same minimum. l(D) is scaled to
    D^2 for small D; log Z^ is where l'(D) sums to 0 over the K responses. reverse_kl is `tb`.

    Example: log pi = log pi_ref, rewards [[1, 0]], beta 0.5 and forward_kl give log Z^ = log
    mean([e^2, 1]) = 1.43 and D = [-0.57, 1.43].
    """
    if config.divergence == "reverse_kl":
        return tba.tb(batch, config)
    target = (batch.sum_tokens(batch.ref_logprobs) + batch.rewards / config.beta) / config.tau
    gap = target - batch.sum_tokens(batch.logprobs)  # (B, K)
    c = 1 if config.divergence == "forward_kl" else 2  # hellinger
    log_z = c * ((gap.detach() / c).logsumexp(1) - math.log(gap.shape[1]))
    D = log_z[:, None] - gap
    return tba.Loss(2 * c * (D + c * (-D / c).exp() - c).mean(), {"log_z": log_z.mean()})


# ------------------------------------------------------------------------------------- preferences


def online_dpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): best against worst of K responses.

    loss = - mean log sigmoid(beta (d_best - d_worst)), d = log pi_theta(y) - log pi_ref(y); a
    prompt whose rewards are all equal contributes 0.

    Example: d = 0 gives log 2, whose derivatives by d_best and d_worst are -beta/2 and beta/2.
    """
    d = batch.sum_tokens(batch.logprobs - batch.ref_logprobs)  # (B, K)
    best = batch.rewards.argmax(1, keepdim=True)
    worst = batch.rewards.argmin(1, keepdim=True)
    margin = config.beta * (d.gather(1, best) - d.gather(1, worst))[:, 0]  # (B,)
    differ = batch.rewards.amax(1) > batch.rewards.amin(1)
    loss = -(functional.logsigmoid(margin) * differ).mean()
    return tba.Loss(loss, {"preferred": (margin > 0).float().mean()})


tba.FLAGS.append(ObjectiveFlags)
for objective in (
    rloo, proximal_rloo, grpo, dr_grpo, cispo, dro, kimi, flowrl, oapl, ftb, online_dpo,
):  # fmt: skip
    tba.OBJECTIVES[objective.__name__] = objective
