"""Gradients of every objective, by micro-batches of every kind.

As a plug-in, writes those of each step's groups into the run's folder as gradients.pt: name of an
objective -> a list of vectors and metrics that should all be equal.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import objectives  # noqa: F401 - registers grpo, online_dpo, ...

import tba


def one_log_z(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """One log Z^ for all prompts: what one prompt learns depends on the others."""
    target = batch.sum_tokens(batch.ref_logprobs) + batch.rewards / config.beta
    gap = batch.sum_tokens(batch.logprobs) - target
    return tba.Loss((gap - gap.mean()).square().mean())


def coupled_by_spread(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """TB with a weight that all log-probabilities of the batch enter, if only by a little."""
    spread = batch.sum_tokens(batch.logprobs - batch.ref_logprobs).std()
    return tba.Loss(tba.tb_learned_z(batch, config).loss * (1 + 0.01 * spread))


def undefined_at_zero(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """Couples groups, and its derivatives are NaN while some log-probabilities are 0."""
    scale = batch.logprobs.sqrt() if (batch.logprobs == 0).any() else batch.logprobs
    return tba.Loss((scale * batch.per_token(batch.rewards)).sum())


def careless(batch: tba.Batch, config: tba.Config) -> tba.Loss:
    """TB with a penalty on lengths, which changes whatever it gets; and a metric that is a number.

    No other call of the step sees what it changes, nor any metric.
    """
    batch.rewards -= 0.05 * batch.lengths
    result = tba.tb(batch, config)
    batch.logprobs = batch.behaviour.zero_()
    batch.lengths.numpy(force=True)[:] = 1
    batch.parameters["log_z"] = None
    return tba.Loss(result.loss, {"two": 2})


OTHERS = {f.__name__: f for f in (one_log_z, coupled_by_spread, undefined_at_zero, careless)}


def gradient_of(
    learner: tba.Learner, groups: list, objective: str, budget: int, packs: bool
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient by all weights and by every log Z, as one vector; the metrics."""
    now = tba.at_step(learner.config, 0)
    now.objective = objective
    now.tokens_per_microbatch = budget
    learner.policy.row_tokens = learner.policy.ROW_TOKENS if packs else 0
    learner.optimizer.zero_grad()
    learner.coupled = False
    learner.sampling_sums.clear()
    metrics = learner.gradient(groups, now, 0)
    own = [tba.gather_full(weights.grad).flatten() for weights in learner.model.parameters()]
    return torch.cat([*own, learner.parameters["log_z"].grad]), metrics


def budgets(learner: tba.Learner, groups: list, packs: bool) -> tuple[int, int, int]:
    """Tokens per micro-batch: for all groups, for each group, for less than a response."""
    row_tokens = learner.policy.ROW_TOKENS if packs else 0
    prompts = learner.task.train_prompts
    sequences = [(prompts[group[0].prompt_id], [t.tokens for t in group]) for group in groups]
    units = tba.plan_rows(sequences, row_tokens, 10**6)
    return 10**6, max(map(tba.padded_tokens, units)), 5


def gradients(
    learner: tba.Learner, groups: list, objective: str, packing: Sequence[bool] = (True, False)
) -> list[tuple[torch.Tensor, dict[str, float]]]:
    """The same gradient and metrics, computed in several ways."""
    return [
        gradient_of(learner, groups, objective, budget, packs)
        for packs in packing
        for budget in budgets(learner, groups, packs)
    ]


step_once = tba.Learner.step


def step(learner: tba.Learner, groups: list, *args: object) -> dict[str, float]:
    """Write the gradients before a step."""
    names = ("tb_learned_z", "online_dpo", "tba_prime", "one_log_z")
    found = {name: gradients(learner, groups, name, [True]) for name in names}
    if learner.ranks.rank == 0:
        torch.save(found, Path(learner.config.output_dir) / "gradients.pt")
    return step_once(learner, groups, *args)


if __name__ != "gradients":  # as a plug-in
    tba.OBJECTIVES |= OTHERS
    tba.Learner.step = step
