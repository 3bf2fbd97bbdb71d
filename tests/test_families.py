"""Families of models: what is computed is the plain model's, whether responses share rows or not.

bench/families.py compares all families; here is one of each kind.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import config_and_task, learner_of, random_groups

import tba

sys.path.append(str(Path(tba.__file__).parent / "bench"))

import families

PACKED = {
    "llama": "Llama",
    "mixtral": "its checkpoint has a tensor per expert",
    "opt": "its head calls the body's decoder",
    "phi": "its head has a bias",
    "phimoe": "in training mode, its router is random",
    "qwen3_moe": "as Mixtral, with another router",
}
NOT_PACKED = {
    "falcon+alibi": "positions that are not position ids",
    "gemma2": "a soft cap of attention scores, which SDPA lacks",
    "gpt_oss": "eager attention",
    "mistral+narrow": "an attention window that is shorter than the sequences",
    "qwen3_next": "linear attention",
}


@pytest.mark.parametrize("family", [*PACKED, *NOT_PACKED])
def test_what_is_computed_is_the_plain_models(family, tmp_path):
    """Log-probabilities, gradients, generation, weights that are sent, weights that are saved."""
    families.make(family, tmp_path / "model")
    packs, gaps = families.compare(tmp_path / "model")
    assert packs == (family in PACKED)
    for check, value in gaps.items():
        assert value < families.TOLERANCE[check], check


@pytest.mark.parametrize("family", ["bert", "bart", "llama4_text", "phi3+longrope"])
def test_models_that_cannot_work_are_refused_in_one_line(family, tmp_path):
    """Also sequences past the original context of LongRoPE, whose rows depend on each other."""
    families.make(family, tmp_path / "model")
    flag = "--max_response_tokens" if "longrope" in family else "--model"
    with pytest.raises(tba.InputError, match=rf"^{flag} [^\n]*$"):
        families.compare(tmp_path / "model")


def test_gradient_checkpointing_changes_no_gradient_of_a_model_with_dropout(gsm8k, tmp_path):
    families.make("opt", tmp_path / "model")
    gradients = []
    for flag in (False, True):
        learner = learner_of(
            gsm8k, tmp_path / "run", model=tmp_path / "model", gradient_checkpointing=flag
        )
        now = tba.at_step(learner.config, 0)
        learner.backward(random_groups(learner.task, 2, 3), now, 0)
        gradients.append({name: p.grad for name, p in learner.model.named_parameters()})
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-3)


def test_fused_norms_change_gradients_by_bfloat16_rounding_alone(gsm8k, tmp_path, monkeypatch):
    """Log-probabilities are equal; so are gradients with recomputation, and with adapters."""
    fuse_norms = tba.fuse_norms
    results = []
    for flags in ({}, {"gradient_checkpointing": True}, {"lora_rank": 4}):
        for fused in (True, False):
            monkeypatch.setattr(tba, "fuse_norms", fuse_norms if fused else lambda layers: None)
            learner = learner_of(gsm8k, tmp_path / "run", dtype="bfloat16", **flags)
            groups = random_groups(learner.task, 2, 3)
            prompts = learner.task.train_prompts
            pairs = [(prompts[g[0].prompt_id], [t.tokens for t in g]) for g in groups]
            with torch.no_grad():
                logprobs = tba.token_logprobs(learner.policy, pairs, learner.config)
            learner.backward(groups, tba.at_step(learner.config, 0), 0)
            gradients = [p.grad.flatten() for p in learner.model.parameters() if p.requires_grad]
            results.append((np.concatenate(logprobs), torch.cat(gradients)))
        (fused_logprobs, fused_gradient), (logprobs, gradient) = results[-2:]
        np.testing.assert_allclose(fused_logprobs, logprobs, atol=1e-3)
        difference = (fused_gradient - gradient).norm() / gradient.norm()
        assert 0 < difference < 0.01
    torch.testing.assert_close(results[0][1], results[2][1])


@pytest.mark.parametrize(("family", "count"), [("llama", 4), ("qwen3", 4), ("gemma2", 0)])
def test_norms_of_decoder_layers_are_fused_if_they_are_plain(family, count, gsm8k, tmp_path):
    """Not Gemma's, whose weights are 1 + weight, those of heads, or the one before the logits."""
    families.make(family, tmp_path / "model")
    model = learner_of(gsm8k, tmp_path / "run", model=tmp_path / "model").model
    fused = [name for name, module in model.named_modules() if "forward" in vars(module)]
    fused.remove("lm_head")
    assert len(fused) == count
    assert all(name.endswith("layernorm") for name in fused)


def test_a_response_ends_where_generation_config_json_says(gsm8k, tmp_path):
    """Its stop tokens and the model's EOS end responses; saved models keep the file."""
    given = tmp_path / "given"
    shutil.copytree(gsm8k / "model", given)
    path = given / "generation_config.json"
    settings = json.loads(path.read_text())
    eos = settings["eos_token_id"]
    stops = [5, 6, 7]
    path.write_text(json.dumps(settings | {"eos_token_id": stops, "top_k": 7}))
    config, task = config_and_task(gsm8k, tmp_path / "run", model=given, engine="transformers")
    assert tba.end_tokens(*tba.check_model("model", config)) == sorted({eos, *stops})
    engine = tba.TransformersEngine(config, 0, "model", 200)
    with torch.no_grad():  # any token may come next
        engine.model.get_output_embeddings().weight.zero_()
    engine.submit(tba.Request(0, task.train_prompts[0], 64, max_tokens=100, temperature=1.0))
    (completion,) = engine.step()
    last = {
        int(tokens[-1])
        for tokens, ended in zip(completion.tokens, completion.ended, strict=True)
        if ended
    }
    assert last & set(stops) and last <= {eos, *stops}
    assert not np.isin(np.concatenate([tokens[:-1] for tokens in completion.tokens]), stops).any()
    model = tba.load_policy(config, config.model, tba.Ranks()).model
    saved = tmp_path / "saved"
    saved.mkdir()
    tba.save_model(model, tba.checkpoint_state(model), task, saved)
    kept = json.loads((saved / "generation_config.json").read_text())
    assert kept["eos_token_id"] == stops and kept["top_k"] == 7


def test_dropout_is_off_and_saved_models_keep_it(gsm8k, tmp_path):
    given = tmp_path / "given"
    shutil.copytree(gsm8k / "model", given)
    settings = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
    config, task = config_and_task(gsm8k, tmp_path / "run", model=given)
    policy = tba.load_policy(config, config.model, tba.Ranks())
    first, second = (tba.token_logprobs(policy, tba.probes(task), config) for _ in range(2))
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(second))
    saved = tmp_path / "saved"
    saved.mkdir()
    tba.save_model(policy.model, tba.checkpoint_state(policy.model), task, saved)
    assert json.loads((saved / "config.json").read_text())["attention_dropout"] == 0.5
