"""Two objectives of 2026 that were compared with TB (docs/results.md), as a plug-in for any run.

python tba.py --plugin bench/objectives.py --objective ftb --divergence forward_kl ...
python tba.py --plugin bench/objectives.py --objective oapl --behaviour_beta 0.1 ...
"""

import math
from dataclasses import dataclass
from typing import Literal

import tba


@dataclass
class ObjectiveFlags:
    """The settings of ftb and oapl."""

    divergence: Literal["reverse_kl", "forward_kl", "hellinger"] = tba.flag(
        "reverse_kl", "ftb: divergence."
    )
    behaviour_beta: float = tba.flag(0.1, "oapl: KL coefficient to the behaviour policy.", 1e-9)


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
tba.OBJECTIVES |= {"ftb": ftb, "oapl": oapl}
tba.SEPARABLE |= {ftb, oapl}
