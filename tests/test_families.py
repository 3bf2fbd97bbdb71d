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
from safetensors import safe_open
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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


def plain_varlen(q, k, v, q_starts, k_starts, *longest, scale, window_size, enable_gqa):
    """What `varlen_attn` computes, one sequence at a time: the last query sees the last key."""
    assert window_size == (-1, 0) and enable_gqa
    assert longest == (int(k_starts.diff().max()),) * 2 and int(q_starts.diff().max()) <= longest[0]
    parts = []
    for i, j, a, b in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False):
        visible = torch.ones(j - i, b - a, dtype=torch.bool).tril(int((b - a) - (j - i)))
        heads = (x.transpose(0, 1)[None] for x in (q[i:j], k[a:b], v[a:b]))
        options = {"attn_mask": visible.to(q.device), "scale": scale, "enable_gqa": True}
        parts.append(scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("seed", range(3))
def test_gathered_attention_is_that_of_the_dense_mask(family, seed, tmp_path, monkeypatch):
    """Values and gradients; rows of one response, prompts of one token, padding, IDLE."""
    monkeypatch.setattr(tba, "varlen_attn", plain_varlen)
    families.make(family, tmp_path / "model")
    config, device = tba.settings(dtype="float32"), torch.device("cpu")
    has_experts = "mixtral" in family or "moe" in family  # whose products lack float64
    dtype, error = (torch.float32, 1e-3) if has_experts else (torch.float64, 1e-6)
    model = tba.load_model(config, str(tmp_path / "model"), dtype, device)
    policy = tba.TokenLogProbs(model, 0.7)
    rng = np.random.default_rng(seed)
    random = lambda most: rng.integers(3, 60, rng.integers(1, most)).astype(np.int32)
    groups = [(random(9), [random(7) for _ in range(n)]) for n in (1, 2, 4, 3)]
    groups[1] = (groups[1][0][:1], groups[1][1])
    rows = [row for unit in tba.plan_rows(groups, 24, 1000) for row in unit] + [tba.IDLE]
    results = []
    for gathers in (False, True):
        values = policy(**tba.pack(rows, device, gathers))[:, 0]
        model.zero_grad()
        (values * torch.linspace(-1, 2, len(values))).sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append((values.detach(), torch.cat(gradients)))
    assert policy.gathers and sum(len(row.responses) > 1 for row in rows) > 1
    for dense, gathered in zip(*results, strict=True):
        torch.testing.assert_close(gathered, dense, rtol=error, atol=error)


@pytest.mark.parametrize("broken", ["raises", "wrong", "cuts the mask"])
def test_the_dense_mask_stays_where_gathering_does_not_work(
    broken, gsm8k, tmp_path, monkeypatch, capsys
):
    learner = learner_of(gsm8k, tmp_path)
    policy = learner.policy

    def kernel(*args, **options):
        if broken == "raises":
            raise RuntimeError("no kernel")
        return plain_varlen(*args, **options).roll(1, 0)

    monkeypatch.setattr(tba, "varlen_attn", kernel)
    if broken == "cuts the mask":
        pack = tba.pack
        monkeypatch.setattr(tba, "varlen_attn", plain_varlen)
        copies = lambda inputs: {name: tensor[:] for name, tensor in inputs.items()}
        cut = lambda *args: pack(*args) | {"inputs": copies(pack(*args)["inputs"])}
        monkeypatch.setattr(tba, "pack", cut)
    assert not policy.gathers
    assert "attention uses a dense mask" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["bert", "bart", "llama4_text", "phi3+longrope"])
def test_models_that_cannot_work_are_refused_in_one_line(family, tmp_path):
    """Also sequences past the original context of LongRoPE, whose rows depend on each other."""
    families.make(family, tmp_path / "model")
    flag = "--max_response_tokens" if "longrope" in family else "--model"
    with pytest.raises(tba.InputError, match=rf"^{flag} [^\n]*$"):
        families.compare(tmp_path / "model")


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_weights_are_renamed_a_layer_at_a_time(family, tmp_path):
    """As those of the file, although experts are split: not all of them are copied at once."""
    families.make(family, tmp_path / "model")
    config, device = tba.settings(dtype="float32"), torch.device("cpu")
    model = tba.load_model(config, str(tmp_path / "model"), torch.float32, device)
    names = []
    for name, tensor in tba.named_as_saved(model, tba.checkpoint_state(model)):
        names.append(name)
        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert torch.equal(tensor, file.get_tensor(name)), name
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert sorted(names) == sorted(file.keys())


def gradient_of(learner, groups):
    learner.backward(groups, tba.at_step(learner.config, 0), 0)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.requires_grad])


def test_gradient_checkpointing_changes_no_gradient_of_a_model_with_dropout(gsm8k, tmp_path):
    families.make("opt", tmp_path / "model")
    gradients = []
    for flag in (False, True):
        flags = {"model": tmp_path / "model", "gradient_checkpointing": flag}
        learner = learner_of(gsm8k, tmp_path / "run", **flags)
        gradients.append(gradient_of(learner, random_groups(learner.task, 2, 3)))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


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
            results.append((np.concatenate(logprobs), gradient_of(learner, groups)))
        (fused_logprobs, fused_gradient), (logprobs, gradient) = results[-2:]
        np.testing.assert_allclose(fused_logprobs, logprobs, atol=1e-3)
        difference = (fused_gradient - gradient).norm() / gradient.norm()
        assert 0 < difference < 0.01
    torch.testing.assert_close(results[0][1], results[2][1])


def test_a_fused_norm_whose_weight_fsdp_gathers_in_bfloat16_is_closer_than_the_plain_one():
    """FSDP has no autocast, and the stream is bfloat16; blocks' bfloat16 results stay plain."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64).bfloat16()
    norm.weight.data.normal_(1, 0.2)
    x = torch.randn(500, 64).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6)
    fused = tba.fused_norm(norm, None, x)
    assert fused.dtype == torch.bfloat16
    assert (fused - exact).norm() < 0.9 * (norm(x) - exact).norm()
    assert tba.fused_norm(LlamaRMSNorm(64), lambda x: "plain", x) == "plain"


def test_a_response_ends_where_generation_config_json_says(gsm8k, tmp_path):
    """Its stop tokens and the model's EOS end responses; saved models keep it, and dropout."""
    given = tmp_path / "given"
    shutil.copytree(gsm8k / "model", given)
    path = given / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.5}))
    path = given / "generation_config.json"
    settings = json.loads(path.read_text())
    eos = settings["eos_token_id"]
    stops = [5, 6, 7]
    more = {"eos_token_id": stops, "top_k": 7, "suppress_tokens": [8]}
    path.write_text(json.dumps(settings | more))
    config, task = config_and_task(gsm8k, tmp_path / "run", model=given, engine="transformers")
    assert tba.end_tokens(*tba.check_model("model", config)) == sorted({eos, *stops})
    engine = tba.TransformersEngine(config, 0, "model", 200)
    with torch.no_grad():  # any token may come next
        engine.model.get_output_embeddings().weight.zero_()
    engine.submit(tba.Request(0, task.train_prompts[0], 64, max_tokens=100, temperature=1.0))
    (completion,) = engine.step()
    uniform = -np.log(engine.model.config.vocab_size)  # what the file says of sampling is ignored
    np.testing.assert_allclose(np.concatenate(completion.logprobs), uniform, rtol=1e-5)
    rows = [*zip(completion.tokens, completion.ended, strict=True)]
    last = {int(tokens[-1]) for tokens, ended in rows if ended}
    assert last & set(stops) and last <= {eos, *stops}
    assert not np.isin(np.concatenate([tokens[:-1] for tokens, _ in rows]), stops).any()
    policy = tba.load_policy(config, config.model, tba.Ranks())
    first, second = (tba.token_logprobs(policy, tba.probes(task), config) for _ in range(2))
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(second))
    saved = tmp_path / "saved"
    saved.mkdir()
    tba.save_model(policy.model, tba.checkpoint_state(policy.model), task, saved)
    assert json.loads((saved / "config.json").read_text())["attention_dropout"] == 0.5
    kept = json.loads((saved / "generation_config.json").read_text())
    assert kept["eos_token_id"] == stops and kept["top_k"] == 7
