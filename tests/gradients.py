"""Gradients of every objective, by micro-batches of every kind.

As a plug-in, writes those of each step's groups into the run's folder as gradients.pt: name of an
objective -> a list of vectors that should all be equal.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import objectives  # noqa: F401 - registers grpo, online_dpo, ...

import tba


def token_mean(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """The policy gradient with a mean over all tokens of the batch."""
    advantage = batch.rewards - batch.rewards.mean(1, keepdim=True)
    return tba.Loss(-(batch.per_token(advantage) * batch.logprobs).mean())


def ordered(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Later responses of a group count more, and the first of its best ones most."""
    logprobs = batch.sum_tokens(batch.logprobs)  # (B, K)
    best = batch.rewards.argmax(1, keepdim=True)
    weights = torch.linspace(1, 2, logprobs.shape[1]).to(logprobs)
    squares = (weights * (logprobs - batch.rewards).square()).mean()
    return tba.Loss(squares - 50 * logprobs.gather(1, best).mean())


def one_log_z(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """One log Z^ for all prompts: what one prompt learns depends on the others."""
    target = batch.sum_tokens(batch.ref_logprobs) + batch.rewards / config.beta
    gap = batch.sum_tokens(batch.logprobs) - target
    return tba.Loss((gap - gap.mean()).square().mean())


OTHERS = {"token_mean": token_mean, "ordered": ordered, "one_log_z": one_log_z}


def gradient_of(
    learner: tba.Learner, groups: list, objective: str, budget: int, packs: bool
) -> torch.Tensor:
    """The gradient by all weights and by every log Z, as one vector."""
    now = tba.at_step(learner.config, 0)
    now.objective = objective
    now.tokens_per_microbatch = budget
    learner.policy.row_tokens = learner.policy.ROW_TOKENS if packs else 0
    learner.optimizer.zero_grad()
    learner.coupled = False
    learner.gradient(groups, now, 0)
    own = [tba.gather_full(weights.grad).flatten() for weights in learner.model.parameters()]
    return torch.cat([*own, learner.parameters["log_z"].grad])


def budgets(learner: tba.Learner, groups: list, packs: bool) -> tuple[int, int, int]:
    """Tokens per micro-batch: for all groups, for each group, for less than a response."""
    row_tokens = learner.policy.ROW_TOKENS if packs else 0
    prompts = learner.task.train_prompts
    sequences = [(prompts[group[0].prompt_id], [t.tokens for t in group]) for group in groups]
    units = tba.plan_rows(sequences, row_tokens, 10**6)
    return 10**6, max(map(tba.padded_tokens, units)), 5


def gradients(
    learner: tba.Learner, groups: list, objective: str, packing: Sequence[bool] = (True, False)
) -> list[torch.Tensor]:
    """The same gradient, computed in several ways."""
    return [
        gradient_of(learner, groups, objective, budget, packs)
        for packs in packing
        for budget in budgets(learner, groups, packs)
    ]


step_once = tba.Learner.step


def step(learner: tba.Learner, groups: list, *args: object) -> dict[str, float]:
    """Write the gradients before a step."""
    names = ("tb_learned_z", "online_dpo", "token_mean", "one_log_z")
    found = {name: gradients(learner, groups, name, [True]) for name in names}
    if learner.ranks.rank == 0:
        torch.save(found, Path(learner.config.output_dir) / "gradients.pt")
    return step_once(learner, groups, *args)


if __name__ != "gradients":  # as a plug-in
    tba.OBJECTIVES |= OTHERS
    tba.Learner.step = step
