"""Objectives that TB was compared with (docs/results.md), as a plug-in for any run.

    python tba.py --plugin bench/objectives.py --objective dr_grpo ...
    python tba.py --plugin bench/objectives.py --objective dr_grpo --ratio truncate ...
    python tba.py --plugin bench/objectives.py --objective ftb --divergence forward_kl ...
    python tba.py --plugin bench/objectives.py --objective oapl --behaviour_beta 0.1 ...

docs/hacking.md says which --ratio to use when.
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
    ratio_cap: float = tba.flag(3.0, "Maximum ratio [C] of --ratio truncate and mask.", 1)
    kl_coefficient: float = tba.flag(0.0, "grpo, dr_grpo: weight of a KL term.")
    divergence: Literal["reverse_kl", "forward_kl", "hellinger"] = tba.flag(
        "reverse_kl", "ftb: divergence."
    )
    behaviour_beta: float = tba.flag(0.1, "oapl: KL coefficient to the behaviour policy.", 1e-9)


def grpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300, equation 3).

    A_j = (r_j - mean r) / std r; a response's loss is the mean over its tokens.

    Example: rewards [[1, 0]] have the standard deviation 0.71 and give A = [[0.71, -0.71]].
    """
    centred = batch.rewards - batch.rewards.mean(1, keepdim=True)
    advantage = centred / (batch.rewards.std(1, keepdim=True) + 1e-4)  # 0 if all are equal
    return token_ratio_loss(batch, config, advantage, 1 / batch.lengths.view_as(advantage))


def dr_grpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783): no division by std or by length.

    A_j = r_j - mean r; a response's loss is the sum over its tokens / --max_response_tokens.
    """
    advantage = batch.rewards - batch.rewards.mean(1, keepdim=True)
    return token_ratio_loss(batch, config, advantage, 1 / config.max_response_tokens)


def token_ratio_loss(
    batch: tba.Batch, config: tba.Config, advantage: Tensor, weight: Any
) -> tba.Loss:
    """The surrogate of --ratio per token, minus --kl_coefficient times the KL to the reference.

    `advantage` (B, K) and `weight` (B, K), or a number, apply to each token of a response.
    """
    log_ratio = batch.logprobs - batch.behaviour  # (N,)
    token_advantage = advantage.flatten()[batch.response_index()]  # (N,)
    surrogate, limited = limited_surrogate(log_ratio, token_advantage, config)
    if config.kl_coefficient:
        difference = batch.ref_logprobs - batch.logprobs
        kl = difference.exp() - difference - 1  # an estimator that is never negative
        surrogate = surrogate - config.kl_coefficient * kl  # (N,)
    loss = -(batch.sums(surrogate) * weight).mean()
    return tba.Loss(loss, {"clip_fraction": limited.float().mean()})


ppo_surrogate = tba.ppo_surrogate


def limited_surrogate(log_ratio: Tensor, advantage: Tensor, config: tba.Config) -> tuple:
    """The gain of tokens or responses, and a mask of where --ratio limits rho = pi_theta / pi_b.

    clip is PPO's, unbounded for A < 0. Otherwise the gradient is w A grad log pi, w being constant.
    truncate: w = min(rho, C), as in CISPO (MiniMax-M1, arXiv 2506.13585, equation 4) and truncated
    importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl).
    mask: w = rho, or 0 outside [1/C, C], as in IcePop (Ring-1T, arXiv 2510.18855) and masked
    importance sampling (Liu et al. 2025, "When Speed Kills Stability").

    Example: rho = [4, 2, 0.1] and C = 3 give w = [3, 2, 0.1] or [0, 2, 0].
    """
    if config.ratio == "clip":
        return ppo_surrogate(log_ratio, advantage, config)
    ratio = log_ratio.detach().exp()
    limited = ratio > config.ratio_cap
    weight = ratio.clamp(max=config.ratio_cap)
    if config.ratio == "mask":
        limited |= ratio < 1 / config.ratio_cap
        weight = ratio.masked_fill(limited, 0)
    return weight * advantage * log_ratio, limited


tba.ppo_surrogate = limited_surrogate  # for proximal_rloo: ratios of whole responses


def online_dpo(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): best against worst of K responses.

    loss = - mean log sigmoid(beta (d_best - d_worst)), d = log pi_theta(y) - log pi_ref(y); a
    prompt whose rewards are all equal contributes 0.

    Example: d = 0 gives log 2, whose derivatives by d_best and d_worst are -beta/2 and beta/2.
    """
    d = batch.sums(batch.logprobs - batch.ref_logprobs)  # (B, K)
    best = batch.rewards.argmax(1, keepdim=True)
    worst = batch.rewards.argmin(1, keepdim=True)
    margin = config.beta * (d.gather(1, best) - d.gather(1, worst))[:, 0]  # (B,)
    differ = batch.rewards.amax(1) > batch.rewards.amin(1)
    loss = -(functional.logsigmoid(margin) * differ).mean()
    return tba.Loss(loss, {"preferred": (margin > 0).float().mean()})


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
    target = (batch.sums(batch.ref_logprobs) + batch.rewards / config.beta) / config.tau
    gap = target - batch.sums(batch.logprobs)  # (B, K)
    c = 1 if config.divergence == "forward_kl" else 2  # hellinger
    log_z = c * ((gap.detach() / c).logsumexp(1) - math.log(gap.shape[1]))
    D = log_z[:, None] - gap
    return tba.Loss(2 * c * (D + c * (-D / c).exp() - c).mean(), {"log_z": log_z.mean()})


def oapl(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """OAPL (Ritter et al. 2026, arXiv 2602.19362): KL to the behaviour policy pi_b.

    loss = mean (beta_2 (log pi - log pi_b) - (r - V^))^2, with V^ = beta log mean exp(r / beta)
    over the K responses and beta_2 = --behaviour_beta. There is no reference.

    Example: log pi = log pi_b, rewards [[1, 0]] and a large beta give V^ = 0.5 and the loss 0.25.
    """
    log_ratio = batch.sums(batch.logprobs - batch.behaviour)  # (B, K)
    log_sum = (batch.rewards / config.beta).logsumexp(1)
    value = config.beta * (log_sum - math.log(log_ratio.shape[1]))  # V^, (B,)
    advantage = batch.rewards - value[:, None]
    return tba.Loss((config.behaviour_beta * log_ratio - advantage).square().mean())


tba.FLAGS.append(ObjectiveFlags)
for objective in (grpo, dr_grpo, online_dpo, ftb, oapl):
    tba.OBJECTIVES[objective.__name__] = objective
