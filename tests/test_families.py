"""Families of models: log-probabilities are the model's own, or the run's one check shows it.

Generation, which runs a prompt once for all of its responses, reports the model's own too.
"""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from harness import problem_of

import tba

VOCABULARY = 97
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**WIDTH, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS = {**LLAMA, "num_key_value_heads": 1, "head_dim": 16}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 2}

# responses share rows
PACKED = {
    "Llama": {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3": HEADS,
    "GPT2": OLD,
    "GPTNeoX": LLAMA,
    "Mistral": {**HEADS, "sliding_window": 64},
    "Granite": {**LLAMA, "logits_scaling": 8.0},
    "Cohere": {**LLAMA, "logit_scale": 0.25},
}
# --pack False: eager attention with a soft cap, convolutions, states
ALONE = {
    "Gemma2": {**HEADS, "sliding_window": 64},
    "Lfm2": {**HEADS, "layer_types": ["conv", "full_attention"]},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.parametrize("family", [*PACKED, *ALONE])
def test_probes_are_exact_or_the_check_shows_that_they_are_not(family, tmp_path):
    settings = (PACKED | ALONE)[family]
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    kind = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    model_config = kind(vocab_size=VOCABULARY, **settings, **ends)
    model = transformers.AutoModelForCausalLM.from_config(model_config)
    with torch.no_grad():  # far from uniform, so that differences show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, 30).astype(np.int32) for _ in range(4)]
    problem = tba.Problem(None, None, prompts, prompts)
    config = tba.settings(model=str(tmp_path), dtype="float32")
    cpu = torch.device("cpu")
    with mock.patch.object(tba, "end_tokens", lambda *_: [1]):
        engine = tba.TransformersEngine(config, 0, "model", 400)
    engine.load_weights(tba.checkpoint_state(model).items())
    policy = tba.TokenLogProbs(tba.load_model(config, config.model, torch.float32, cpu), 1.0)

    def whole(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        (scored,) = engine.prompt_logprobs([np.concatenate([prompt, response])])
        return scored[len(prompt) - 1 :]

    def gap() -> float:
        gaps = []
        for prompt, responses in problem.probes():
            scored = tba.token_logprobs(policy, [(prompt, responses)], config)
            for response, own in zip(responses, scored, strict=True):
                gaps.append(np.abs(own - whole(prompt, response)))
        return np.concatenate(gaps).max()

    policy.row_tokens = 0
    assert gap() < 1e-3
    policy.row_tokens = policy.ROW_TOKENS
    if family in PACKED:
        assert gap() < 1e-3
    elif family == "Mamba":  # it takes no such mask: --pack False
        with pytest.raises(RuntimeError):
            gap()
    else:
        assert gap() > 1e-2  # many times what is allowed: the run ends, and names --pack False

    config.pack = family in PACKED
    for i, n in enumerate((3, 1, 2)):  # prompts of different lengths; one has a single token
        engine.submit(tba.Request(i, prompts[i][: 1 + 9 * i], n, max_tokens=12, temperature=1.0))
    for completion in engine.step():
        for tokens, logprobs in zip(completion.tokens, completion.logprobs, strict=True):
            assert np.abs(logprobs - whole(completion.request.prompt, tokens)).max() < 1e-3
    engine.submit(tba.Request(3, prompts[3][:1], 2, max_tokens=12, temperature=1.0))
    assert len(engine.step()[0].tokens) == 2


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_model_whose_checkpoint_has_other_tensors_is_refused(family):
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **HEADS)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="splits or merges"):
        tba.checkpoint_state(model)


def test_a_saved_model_keeps_its_dropout_and_its_generation_settings(gsm8k, tmp_path):
    """Both are set aside for training and sampling."""
    given = tmp_path / "given"
    shutil.copytree(gsm8k / "model", given)
    kept = {"config.json": {"attention_dropout": 0.1}, "generation_config.json": {"top_k": 7}}
    for name, values in kept.items():
        read = json.loads((given / name).read_text())
        (given / name).write_text(json.dumps(read | values))
    config, problem = problem_of(gsm8k, tmp_path / "run", model=given)
    model = tba.load_policy(config, config.model, tba.Ranks()).model
    dropouts = [m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")]
    assert dropouts and not any(dropouts)
    saved = tmp_path / "saved"
    saved.mkdir()
    tba.save_model(model, tba.checkpoint_state(model), problem, saved)
    for name, values in kept.items():
        assert json.loads((saved / name).read_text()).items() >= values.items()
