"""What tba.py does with transformers' families of causal models: a table, one line each.

For each family (all of them, or those named), in a process of its own, a tiny random model is
made, and what tba.py computes is compared with the plain model's forward pass, one sequence at a
time, in float32:

* logprobs: log-probabilities of responses, as the Trainer and the Searchers compute them,
* gradient: that of their sum, relative to each tensor's largest value,
* generation: log-probabilities that the engine reports for its samples,
* transfer: the engine's log-probabilities after it has received other weights, with more tokens
  after the response (a model that is not causal differs, and the run ends at its first sync),
* saved: logits of the model that `save_model` writes.

    python bench/families.py [--engine vllm] [FAMILY ...]

It needs no network and no GPU; all families take some ten minutes on one core.
"""

import argparse
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch
import transformers
from common import ROOT  # beside this file; it finds tba.py
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import tba

FILES = ROOT / "tests" / "models" / "gsm8k"  # tokenizer and prompts
TOLERANCE = dict.fromkeys(("logprobs", "generation", "transfer", "saved"), 2e-3)
TOLERANCE["gradient"] = 2e-2
LIMIT = 120  # seconds a family
RESPONSES = 32  # --max_response_tokens
WINDOW = 512  # of attention; longer than all sequences, unless a variant says otherwise

# value -> fields of configurations that get it
SIZES = {
    128: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim "
    "attention_hidden_size lru_width",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers "
    "num_decoder_layers num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts "
    "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
    "encoder_attention_heads n_routed_experts num_local_experts moe_num_experts index_n_heads "
    "swa_num_attention_heads linear_num_value_heads linear_num_heads",
    8: "qk_rope_head_dim linear_key_head_dim linear_head_dim mamba_d_state state_size "
    "ssm_state_size time_step_rank mamba_dt_rank rotary_dim",
    16: "kv_lora_rank linear_value_head_dim mamba_chunk_size chunk_size",
    # vLLM's attention on a CPU has no smaller heads
    32: "head_dim kv_channels v_head_dim dim_head swa_head_dim attention_head_size "
    "qk_nope_head_dim index_head_dim",
    24: "q_lora_rank",
    64: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    96: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff "
    "d_inner feed_forward_size dense_intermediate_size intermediate_size_mlp",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group "
    "first_k_dense_replace num_dense_layers",
    512: "max_position_embeddings n_positions n_ctx max_seq_len index_topk "
    "original_max_position_embeddings",
    WINDOW: "sliding_window window_size attention_window_size attention_chunk_size",
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1}
MLA = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention
# what else a family needs to be small and to use all that it has; NAME+TEXT is a variant of NAME
OWN = {
    **dict.fromkeys("axk1 axk2 deepseek_v32 glm_moe_dsa minicpm3 youtu".split(), MLA),
    **dict.fromkeys("exaone4 gemma3_text gpt_oss olmo3".split(), SLIDING),
    **dict.fromkeys(
        "minimax olmo_hybrid qwen3_5_text qwen3_5_moe_text qwen3_next".split(), LINEAR
    ),
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **SLIDING},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, **MLA},
    "deepseek_v3": {"n_group": 2, **MLA},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, **SLIDING},
    "falcon+alibi": {"alibi": True},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "key_multiplier": 0.7},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, **SLIDING},
    "gemma3_text+narrow": {"sliding_window": 40, **SLIDING},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"], **MLA},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.25},
    "granitemoehybrid": {"logits_scaling": 4.0, **MAMBA, **LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"mlp_layer_types": ["dense", "sparse"], **MLA, **LINEAR},
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION),
    "llama+tied": {"tie_word_embeddings": True},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1},
    "longcat_flash": {"num_hidden_layers": 4, **MLA},
    "ministral": {"head_dim": 32, **SLIDING},
    "mistral+narrow": {"sliding_window": 40},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
        "use_mamba_kernels": False,
    },
    "opt": {"dropout": 0.1},
    "phi3+longrope": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
        },
    },
}  # fmt: skip


def tiny_config(name: str, vocabulary: int, end: int) -> transformers.PreTrainedConfig:
    """A family's configuration with small sizes; `end` is its EOS token."""
    kind = transformers.CONFIG_MAPPING[name.partition("+")[0]]
    given = {field: size for size, fields in SIZES.items() for field in fields.split()}
    defaults = vars(kind())
    values = {
        field: size
        for field, size in given.items()
        if isinstance(defaults.get(field), int | float) and not isinstance(defaults[field], bool)
    }
    values |= {"vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end}
    return kind(**values | {"pad_token_id": end} | OWN.get(name, {}))


def make(name: str, folder: Path) -> None:
    """Write a tiny model of a family, with a tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FILES / "model")
    torch.manual_seed(0)
    config = tiny_config(name, len(tokenizer), tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def perturb(model: torch.nn.Module) -> None:
    """Move the parameters far from initialization, so that differences show."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)


def plain_logprobs(
    model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray
) -> torch.Tensor:
    """Log-probabilities (T,) of a response at temperature 0.7, with more tokens after it."""
    tail = prompt[::-1]
    ids = torch.from_numpy(np.concatenate([prompt, response, tail])).long()[None]
    logits = model(ids, use_cache=False).logits[0].float() / 0.7
    start = len(prompt) - 1
    logprobs = logits[start : start + len(response)].log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(response).long()[:, None])[:, 0]


def gap(found: list, expected: list) -> float:
    """The largest difference between arrays (T,)."""
    pairs = zip(found, expected, strict=True)
    return float(max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs))


def compare(folder: Path, engine: str = "transformers") -> tuple[bool, dict[str, float]]:
    """Whether responses share rows, and the gaps listed above. Raises InputError if refused."""
    config = tba.settings(
        task="gsm8k", model=str(folder), dataset=str(FILES / "data"), dtype="float32", lora_rank=0,
        engine=engine, temperature=0.7, max_response_tokens=RESPONSES,
    )  # fmt: skip
    task = tba.load_task(config)
    rng = np.random.default_rng(0)
    vocabulary = len(task.tokenizer)
    draw = lambda n: rng.integers(4, vocabulary, n).astype(np.int32)
    shapes = ((5, (7, 15, 3)), (30, (32, 9)))
    groups = [(draw(P), [draw(T) for T in lengths]) for P, lengths in shapes]
    pairs = [(prompt, response) for prompt, responses in groups for response in responses]
    # the family's own implementation, where SDPA ignores a soft cap
    model_config = AutoConfig.from_pretrained(folder)
    capped = getattr(model_config, "attn_logit_softcapping", None)
    load = lambda path: AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if capped else None
    ).eval()
    plain = load(folder)
    truth = [plain_logprobs(plain, prompt, response) for prompt, response in pairs]
    sum(map(torch.sum, truth)).backward()
    gaps = {}
    served = tba.ENGINES[engine](config, 0, "model", 60 + RESPONSES)  # first, as in a Searcher
    policy = tba.load_policy(config, config.model, tba.Ranks(), 0, task.packs)
    gaps["logprobs"] = gap(tba.token_logprobs(policy, groups, config), [t.detach() for t in truth])
    units = tba.plan_rows(groups, policy.row_tokens, config.tokens_per_microbatch)
    for _, values in tba.run_microbatches(policy, units, config):
        values[:, 0].sum().backward()
    gaps["gradient"] = 0.0
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, parameter in policy.model.named_parameters():
        if name in expected:
            own = 0 if parameter.grad is None else parameter.grad
            scale = float(expected[name].abs().max()) + 1e-4 * largest
            difference = float((own - expected[name]).abs().max()) / scale
            gaps["gradient"] = max(gaps["gradient"], difference)
    for i, (prompt, responses) in enumerate(groups):
        options = {"max_tokens": RESPONSES - i, "temperature": 0.7, "seed": i}
        served.submit(tba.Request(i, prompt, len(responses), **options))
    found, own = [], []
    with torch.no_grad():
        while served.unfinished:
            for done in served.step():
                found += done.logprobs
                own += [plain_logprobs(plain, done.request.prompt, y) for y in done.tokens]
        gaps["generation"] = gap(found, own)
        perturb(policy.model)
        weights = tba.checkpoint_state(policy.model)
        named = weights.items()
        if engine != "transformers":  # others use checkpoint names
            named = tba.named_as_saved(policy.model, weights)
        served.load_weights(named, 1)
        found = served.prompt_logprobs([np.concatenate([p, y, p]) for p, y in pairs])
        found = [row[len(p) - 1 :][: len(y)] for row, (p, y) in zip(found, pairs, strict=True)]
        gaps["transfer"] = gap(found, tba.token_logprobs(policy, groups, config, temperature=1.0))
        with tempfile.TemporaryDirectory() as saved:
            tba.save_model(policy.model, weights, task, Path(saved))
            ids = torch.from_numpy(draw(30)).long()[None]
            gaps["saved"] = float((load(saved)(ids).logits - policy.model(ids).logits).abs().max())
    return task.packs, gaps


def report(name: str, engine: str) -> str:
    """A family's line of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        try:
            make(name, folder)
            plain = AutoModelForCausalLM.from_pretrained(folder)
            plain(torch.arange(4, 40)[None], use_cache=False)
        except Exception as error:
            return f"not made: {tba.first_line(error)[:100]}"
        try:
            packs, gaps = compare(folder, engine=engine)
        except tba.InputError as error:
            return f"refused: {str(error).replace(str(folder), 'MODEL')}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return f"RAISES {type(error).__name__}: {tba.first_line(error)[:100]} ({where})"
    wrong = [check for check, value in gaps.items() if not value < TOLERANCE[check]]
    values = "  ".join(f"{check} {value:.0e}" for check, value in gaps.items())
    verdict = f"WRONG {', '.join(wrong)}" if wrong else "right"
    if gaps["transfer"] > TOLERANCE["transfer"]:  # it compares what the check at a sync does
        verdict = "stopped at the first sync"
    return f"{verdict}, {'packed' if packs else 'one response per row'}: {values}"


def main() -> None:
    """Print the table; each family has a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", help="default: all")
    parser.add_argument("--engine", choices=tba.ENGINES, default="transformers")
    args = parser.parse_args()
    names = args.family or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN})
    torch.set_num_threads(1)
    for name in names:
        sys.stdout.flush()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                print(f"{name:24} ended with status {status}", flush=True)
            continue
        signal.alarm(LIMIT)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        print(f"{name:24} {report(name, args.engine)}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
