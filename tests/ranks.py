"""Started by torchrun in test_ranks.py: a sharded policy against one that a process has whole.

`ranks.py GSM8K MODEL...`: for each model and each set of flags, rank 0 computes the same with both,
and prints the largest differences, each as a share of what it should be.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from conftest import arguments, random_groups

import tba

CASES = [
    {"objective": "tb"},
    {"objective": "tb", "tokens_per_microbatch": 60},  # two passes
    {"objective": "tba_prime", "tokens_per_microbatch": 130, "ratio_limit": 8},
    {"objective": "tb_learned_z", "gradient_checkpointing": True},
    {"objective": "tb_learned_z", "tokens_per_microbatch": 60, "max_grad_norm": 0.1},
    {"objective": "tb_learned_z", "prompts_per_step": 1},  # a rank has no prompt
    {"objective": "tb", "lora_rank": 2},
    {"objective": "tb", "dtype": "bfloat16", "master_dtype": "bfloat16"},
    {"objective": "tb", "dtype": "bfloat16"},
]


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    largest = expected.abs().max().clamp(min=1e-8)
    return float((value - expected).abs().max() / largest)


def gradients(learner: tba.Learner) -> dict[str, torch.Tensor]:
    """The whole gradients by the names of their parameters; and that of log Z."""
    found = {"log_z": learner.log_z.grad}
    for name, parameter in learner.model.named_parameters():
        if parameter.requires_grad:
            found[name] = tba.whole(parameter.grad)
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def config_of(gsm8k: Path, model: Path, flags: dict) -> tba.Config:
    flags = {
        "model": model,
        "learning_rate": 1e-3,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "prompts_per_step": 3,
    } | flags
    config = tba.parse(arguments(gsm8k, gsm8k / "run", **flags))
    tba.resolve(config)
    return config


def compare(config: tba.Config, ranks: tba.Ranks) -> dict[str, float]:
    """Differences of the gradient, of log-probabilities, and of everything after one step."""
    problem = tba.load_problem(config)
    groups = random_groups(problem, config.prompts_per_step, 6)
    now = config.at(0)
    AcceleratorState._reset_state(reset_partial_state=True)
    sharded = tba.load_learner(config, problem, ranks, {}, print)
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision differs in bfloat16
    alone = tba.load_learner(config, problem, tba.Ranks(), {}, print)
    for learner in (sharded, alone):
        learner.backward(groups, now)
        learner.clip_gradients()
    wanted = gradients(alone)
    found = gradients(sharded)
    assert wanted.keys() == found.keys()
    worst = {"gradient": max(difference(found[name], wanted[name]) for name in wanted)}
    # Adam divides a gradient by its size, and so makes a whole step of one that is 0 but for
    # rounding (GPT-2's key biases have such), unless epsilon is of the size of the others.
    epsilon = max(float(wanted[name].abs().max()) for name in wanted if name != "log_z")
    for learner in (sharded, alone):
        learner.optimizer.zero_grad()
        for parameters in learner.optimizer.param_groups:
            parameters["eps"] = epsilon
    if ranks.rank > 0:
        assert sharded.follow() == 7
        return {}

    prompts = [problem.prompts[group[0].prompt_id] for group in groups]
    sequences = [(p, [t.tokens for t in g]) for p, g in zip(prompts, groups, strict=True)]
    pairs = zip(sharded.logprobs(sequences), alone.logprobs(sequences), strict=True)
    tensors = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in pairs]
    worst["log-probabilities"] = max(difference(a, b) for a, b in tensors)
    metrics, tokens = sharded.step(groups, now)
    expected, count = alone.step(groups, now)
    assert tokens == count and metrics.keys() == expected.keys()
    worst["metrics"] = max(
        abs(metrics[name] - value) / max(1e-3, abs(value)) for name, value in expected.items()
    )
    pairs = zip(sharded.score_probes(), alone.score_probes(), strict=True)
    tensors = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in pairs]
    worst["probes after a step"] = max(difference(a, b) for a, b in tensors)

    saved = sharded.saved_weights()
    for name, tensor in alone.saved_weights().items():
        assert saved[name].dtype == tensor.dtype
        worst["weights"] = max(worst.get("weights", 0), difference(saved[name], tensor))
    names = list(alone.weights)
    sent = dict(sharded.whole_weights(names, torch.float32))
    for name, tensor in alone.whole_weights(names, torch.float32):
        worst["sent weights"] = max(worst.get("sent weights", 0), difference(sent[name], tensor))
    state = sharded.state()
    of_alone = alone.state()
    assert state["optimizer"].keys() == of_alone["optimizer"].keys()
    for i, values in of_alone["optimizer"].items():
        for name, tensor in values.items():
            assert state["optimizer"][i][name].shape == tensor.shape
            gap = difference(state["optimizer"][i][name], tensor)
            worst["optimizer"] = max(worst.get("optimizer", 0), gap)
    assert difference(state["log_z"], of_alone["log_z"]) < 1e-5
    ranks.dismiss(7)
    return worst


def main() -> None:
    tba.quiet_libraries()
    ranks = tba.Ranks.connect(timeout=60)
    gsm8k, *models = map(Path, sys.argv[1:])
    for model in models:
        for flags in CASES:
            worst = compare(config_of(gsm8k, model, flags), ranks)
            if ranks.rank == 0:
                print(json.dumps({"model": model.name, "flags": flags, "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
