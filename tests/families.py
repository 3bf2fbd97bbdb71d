"""Tiny random models of many families of language models, for tests/test_families.py.

python tests/families.py        # a table: how each family's log-probabilities are computed
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tba

V = 97  # tokens
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 2}
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**WIDTH, "num_key_value_heads": 2, "intermediate_size": 48}
GROUPED = {**LLAMA, "num_key_value_heads": 1}
HEADS = {**GROUPED, "head_dim": 16}
WINDOW = {"sliding_window": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 24}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FALCON_H1 = {**LLAMA, **MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}
GRANITE_4 = {
    **LLAMA, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
    "num_experts_per_tok": 2, "shared_intermediate_size": 24, "logits_scaling": 4.0,
}  # fmt: skip
GPT_NEO = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 2, "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}

# family: its configuration, and settings of a tiny model
PACKED = {  # responses share rows; logits are the head's product
    "Llama": ("LlamaConfig", LLAMA),
    "Llama 3": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", GROUPED),
    "Qwen2 with a window": ("Qwen2Config", {**GROUPED, **WINDOW, "use_sliding_window": True}),
    "Qwen3": ("Qwen3Config", HEADS),
    "Qwen2 MoE": ("Qwen2MoeConfig", {**LLAMA, **EXPERTS, **SHARED}),
    "Qwen3 MoE": ("Qwen3MoeConfig", {**HEADS, **EXPERTS}),
    "Mistral": ("MistralConfig", {**GROUPED, **WINDOW}),
    "Mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "Gemma": ("GemmaConfig", HEADS),
    "Gemma 3": ("Gemma3TextConfig", {**HEADS, **WINDOW}),
    "Phi": ("PhiConfig", LLAMA),
    "Phi-3": ("Phi3Config", LLAMA),
    "OLMo 2": ("Olmo2Config", LLAMA),
    "OLMo 3": ("Olmo3Config", {**LLAMA, **WINDOW}),
    "GPT-2": ("GPT2Config", OLD),
    "GPT-BigCode": ("GPTBigCodeConfig", OLD),
    "GPT-NeoX": ("GPTNeoXConfig", LLAMA),
    "Falcon": ("FalconConfig", {**WIDTH, "alibi": False}),
    "OPT": ("OPTConfig", {**WIDTH, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "StableLM": ("StableLmConfig", GROUPED),
    "StarCoder2": ("Starcoder2Config", GROUPED),
    "SmolLM3": ("SmolLM3Config", GROUPED),
    "GLM-4": ("Glm4Config", HEADS),
}
PACKED_OWN = {  # responses share rows; the model scales its logits
    "Granite": ("GraniteConfig", {**LLAMA, "logits_scaling": 8.0}),
    "Cohere": ("CohereConfig", {**LLAMA, "logit_scale": 0.25}),
    "Cohere 2": ("Cohere2Config", {**GROUPED, **WINDOW}),
}
ALONE = {  # each response has its own row: eager attention, ALiBi, convolutions, states
    "GPT-Neo": ("GPTNeoConfig", GPT_NEO),
    "GPT-J": ("GPTJConfig", {**OLD, "rotary_dim": 8}),
    "Bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "MPT": ("MptConfig", {"d_model": 32, "n_heads": 2, "n_layers": 2}),
    "Falcon with ALiBi": ("FalconConfig", {**WIDTH, "alibi": True}),
    "gpt-oss": ("GptOssConfig", {**HEADS, "num_local_experts": 4}),
    "LFM2": ("Lfm2Config", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "Qwen3-Next": ("Qwen3NextConfig", {**HEADS, **EXPERTS, **SHARED, **DELTA}),
    "Qwen3.5": ("Qwen3_5TextConfig", {**HEADS, **DELTA}),
    "Mamba": ("MambaConfig", STATES),
    "Mamba 2": (
        "Mamba2Config",
        {**STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    ),
}
ALONE_OWN = {  # both
    "Gemma 2": ("Gemma2Config", {**HEADS, **WINDOW}),
    "Falcon-H1": ("FalconH1Config", FALCON_H1),
    "Granite 4 hybrid": ("GraniteMoeHybridConfig", GRANITE_4),
}
REFUSED = {"BERT": ("BertConfig", LLAMA)}  # it sees the tokens that it is to predict
KINDS = {
    "packed rows": PACKED,
    "packed rows, the model's own logits": PACKED_OWN,
    "rows of one response": ALONE,
    "rows of one response, the model's own logits": ALONE_OWN,
    "refused": REFUSED,
}
FAMILIES = {name: family for kind in KINDS.values() for name, family in kind.items()}


def save_tiny(family: str, folder: Path, vocabulary: int = V, end: int = 1) -> None:
    """A random model of a family, far from uniform, so that differences show."""
    kind, settings = FAMILIES[family]
    ends = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    config = getattr(transformers, kind)(vocab_size=vocabulary, **settings, **ends)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
        model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(folder)


def problem_of(vocabulary: int = V) -> tba.Problem:
    """Prompts of random tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, vocabulary, 30).astype(np.int32) for _ in range(4)]
    return tba.Problem(None, None, prompts, prompts, [1], (2, 32, vocabulary), 0, 0)


def decision(family: str, folder: Path, dtype: str = "float32") -> str:
    """How tba.py computes the log-probabilities of a family: a key of KINDS."""
    save_tiny(family, folder)
    config = tba.Config(model=str(folder), dtype=dtype, logprob_tolerance=1e-3)
    config.logprob_tolerance = 1e-3 if dtype == "float32" else 0.5
    model = tba.load_model(config, config.torch_dtype, torch.device("cpu")).eval()
    try:
        packs = tba.can_pack(model, problem_of(), config)
    except tba.InputError:
        return "refused"
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        head = model.get_output_embeddings()
        product = head(hidden.to(head.weight.dtype)).float()
        own = not torch.equal(model(ids, use_cache=False).logits.float(), product)
    return ("packed rows" if packs else "rows of one response") + (
        ", the model's own logits" if own else ""
    )


if __name__ == "__main__":
    tba.quiet_libraries()
    print("| family | log-probabilities |\n|---|---|")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {family} | {decision(family, Path(folder))} |", flush=True)
