"""Families of language models: their log-probabilities are their own logits', or they are refused.

Logits that are more than the head's product, responses that see each other in a packed row by
something other than attention, what PyTorch's attention lacks; and a check on a run's own data.
"""

import queue
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from conftest import arguments, run_tba, trainer_of
from harness import read_lines
from test_cli import expect_error, main
from transformers import AutoTokenizer

import tba

CPU = torch.device("cpu")


def loaded(family: str, folder: Path) -> torch.nn.Module:
    families.save_tiny(family, folder)
    return tba.load_model(tba.Config(model=str(folder)), torch.float32, CPU).train()


def drawn_groups() -> tba.PromptGroups:
    """Prompts with several responses of unequal lengths."""
    rng = np.random.default_rng(1)
    draw = lambda n: rng.integers(2, families.V, n).astype(np.int32)
    lengths = {9: (4, 12, 1, 6), 1: (7, 2), 14: (3, 5, 15)}
    return [(draw(P), [draw(T) for T in Ts]) for P, Ts in lengths.items()]


IN_PARTS = ("Qwen2 MoE", "Qwen3 MoE", "Mixtral", "Qwen3-Next")  # experts
TAKEN = [name for kind, names in families.KINDS.items() if kind != "refused" for name in names]


@pytest.mark.parametrize(
    "family",
    [name for kind, names in families.KINDS.items() if kind != "refused" for name in names],
)
def test_what_is_synced_is_the_models_own_memory_or_the_family_is_refused(family, tmp_path):
    """A change by the optimizer is seen under the checkpoint's names: nothing there is a copy."""
    model = loaded(family, tmp_path)
    if family in IN_PARTS:
        with pytest.raises(tba.InputError, match="cannot be synced yet"):
            tba.checkpoint_state(model)
        return
    state = tba.checkpoint_state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    changed = sum(tensor.numel() for tensor in state.values() if bool((tensor == 0.25).all()))
    assert changed == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "kind"), [(name, kind) for kind, names in families.KINDS.items() for name in names]
)
def test_log_probabilities_are_the_models_own_logits(family, kind, tmp_path, monkeypatch):
    """Each alone, with the eager attention: PyTorch's leaves some families' soft caps out."""
    assert families.decision(family, tmp_path) == kind
    if kind == "refused":
        return
    model, groups = loaded(family, tmp_path), drawn_groups()
    config = tba.Config(dtype="float32", tokens_per_microbatch=60, logprob_tolerance=1e-3)
    policy = tba.TokenLogProbs(model, 0.7, tba.can_pack(model, families.problem_of(), config))
    monkeypatch.setattr(tba.TokenLogProbs, "CHUNK", 5)
    modules = list(model.modules())
    scored = tba.token_logprobs(policy, groups, config)
    parts = [p for _, parts in tba.logprobs_by_microbatch(policy, groups, config) for p in parts]
    torch.cat(parts).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))  # as it was

    model.zero_grad()
    model.set_attn_implementation("eager")
    pairs = [(prompt, response) for prompt, responses in groups for response in responses]
    for (prompt, response), logprobs in zip(pairs, scored, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
        expected.square().sum().backward()
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-4 * largest, rtol=1e-3)


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "Granite", "Gemma 2", "LFM2", "Falcon-H1"])
def test_decisions_in_bfloat16_are_those_in_float32(family, tmp_path):
    decisions = [families.decision(family, tmp_path / d, d) for d in ("float32", "bfloat16")]
    assert decisions[0] == decisions[1]


def test_soft_caps_and_scales_are_applied_to_exact_logits_in_bfloat16(tmp_path):
    """Not to rounded ones: of 29 in bfloat16 the next is 29.125."""
    model = loaded("Gemma 2", tmp_path).bfloat16()
    head = model.get_output_embeddings().weight
    hidden = torch.randn(50, 32).bfloat16()
    product = hidden.double() @ head.double().t()
    scale = 60 / float(product.detach().abs().max())
    hidden = (hidden * scale).bfloat16()
    exact = 30 * torch.tanh(hidden.double() @ head.double().t() / 30)
    assert exact.abs().max() > 25
    output = model.base_model(torch.arange(2, 12)[None], use_cache=False)
    logits = tba.logits_of(model, output, hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-3, rtol=1e-4)


def test_break_even_of_a_model_that_cannot_pack_gives_each_response_a_row(tmp_path):
    policy = tba.TokenLogProbs(loaded("Llama", tmp_path), 1.0, packs=False)
    groups = drawn_groups()
    _, plan = tba.plan_rows(groups, tba.break_even_length(policy), 1000)
    assert all(len(row) == 1 for unit in plan for row in unit)
    policy.packs = True
    _, plan = tba.plan_rows(groups, tba.break_even_length(policy), 1000)
    assert any(len(row) > 1 for unit in plan for row in unit)


def test_an_engines_probes_are_scored_without_the_trainers_code(tmp_path, monkeypatch):
    """Or the two would agree on what is wrong, and logprob_gap would tell nothing."""
    families.save_tiny("Granite", tmp_path)
    config, problem = tba.Config(model=str(tmp_path), dtype="float32"), families.problem_of()
    engine = tba.TransformersEngine(config, problem, CPU)
    monkeypatch.setattr(tba.TokenLogProbs, "forward", None)
    monkeypatch.setattr(tba, "logits_of", None)
    for probe, scored in zip(
        problem.probes(), engine.prompt_logprobs(problem.probes()), strict=True
    ):
        ids = torch.from_numpy(probe).long()
        expected = engine.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        np.testing.assert_allclose(scored, expected[:, 0].detach().numpy(), atol=1e-5)


# ------------------------------------------------------------------- the check on a run's own data


@pytest.fixture
def searcher_of(gsm8k, tmp_path):
    """Function: flags -> a Searcher in this process."""

    def build(**flags):
        config = tba.parse(arguments(gsm8k, tmp_path / "run", **flags))
        tba.resolve(config)
        queues = tba.Link(0, 0, *(queue.Queue() for _ in range(3)), {})
        return tba.Searcher(config, tba.load_problem(config), queues, 0, 0)

    return build


def generated(searcher, version, number=0, **request):
    """A completed request, counted to a version of the weights."""
    searcher.requests[number] = number, version
    prompt = searcher.problem.prompts[number]
    searcher.engine.submit(tba.Request(number, prompt, 8, seed=number, **request))
    return searcher.engine.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_references_weights_generated_must_score_the_same(dtype, searcher_of):
    searcher = searcher_of(dtype=dtype, min_response_tokens=3, logprob_tolerance=0)
    searcher.version = 0
    for number in range(4):
        (group,) = searcher.score_groups(generated(searcher, 0, number))
        differences = [t.logprobs - t.ref_logprobs for t in group.trajectories]
        assert len(np.concatenate(differences)) > 30
    with torch.no_grad():
        for parameter in searcher.reference.model.parameters():
            parameter.mul_(1.0 + 0.3 * torch.randn_like(parameter))
    done = generated(searcher, 0)
    with pytest.raises(tba.WrongLogProbs, match=r"--model .* other log-probabilities than the ref"):
        searcher.score_groups(done)
    # where they need not agree nothing is said: other temperatures, nuclei, and later weights
    for other in ({"temperature": 1.3}, {"top_p": 0.9}):
        searcher.score_groups(generated(searcher, 0, **other))
    searcher.version = 1
    searcher.score_groups(generated(searcher, 1))
    searcher.score_groups(generated(searcher, 0))  # begun before, ended with other weights
    searcher.reference_version = 1
    done = generated(searcher, 1)
    with pytest.raises(tba.WrongLogProbs, match=r"\(step 1\)"):  # a reference that was reset
        searcher.score_groups(done)


def test_an_eos_that_was_ruled_out_or_added_is_not_compared(searcher_of):
    """A model that would end at once, kept from it: what it then says is not the whole policy's."""
    searcher = searcher_of(min_response_tokens=6, max_response_tokens=12)
    (end,) = searcher.problem.end_tokens
    searcher.version = 0
    models = searcher.engine.model, searcher.reference.model
    for model in models:
        head = model.get_output_embeddings()
        bias = torch.zeros(head.weight.shape[0])
        bias[end] = 1.0
        head.bias = torch.nn.Parameter(bias)
    searcher.problem.task.closes_responses = True
    (done,) = generated(searcher, 0)
    assert not done.ended.all() and min(map(len, done.tokens)) > 6
    (group,) = searcher.score_groups([done])
    whole = [np.abs(t.logprobs - t.ref_logprobs).max() for t in group.trajectories]
    assert max(whole) > 1e-2  # were all of it compared, it would end the run


# ----------------------------------------------------------------------- judges, and whole runs


def model_with_tokenizer(family: str, gsm8k: Path, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(gsm8k / "model")
    families.save_tiny(family, folder, len(tokenizer), tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["Granite", "Gemma 2"])
def test_a_guard_models_logits_are_its_own_too(family, gsm8k, tmp_path):
    model = model_with_tokenizer(family, gsm8k, tmp_path)
    config = tba.parse(arguments(gsm8k, tmp_path / "run", toxicity_model=model, dtype="float32"))
    guard = tba.TextModel("next", "toxicity_model", config, CPU)
    texts = ["Ann has four apples.", "Ben"]
    plain = tba.load_model(tba.Config(model=str(model)), torch.float32, CPU)
    for text, logits in zip(texts, guard(texts), strict=True):
        ids = guard.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        torch.testing.assert_close(logits, plain(ids).logits[0, -1], atol=1e-4, rtol=1e-4)


SMALL = {"max_response_tokens": 16, "eval_samples": 4, "eval_every": 0, "save_every": 0}


@pytest.mark.slow
def test_a_run_with_a_family_that_cannot_pack_starts_at_a_kl_of_zero_and_learns(gsm8k, tmp_path):
    out = tmp_path / "run"
    model = model_with_tokenizer("LFM2", gsm8k, tmp_path / "model")
    flags = {"model": model, "steps": 4, "learning_rate": 1e-2, "sync_every": 1, **SMALL}
    _, err = run_tba([*arguments(gsm8k, out, **flags), "--synchronous"])
    assert f"warning: --model {model}: responses of a lfm2 model cannot share a row" in err
    metrics = read_lines(out / "metrics.jsonl")
    assert abs(metrics[0]["kl"]) < 1e-3 < 0.1 < abs(metrics[-1]["kl"])
    assert max(m["logprob_gap"] for m in metrics) < 1e-3


@pytest.mark.slow
def test_a_run_whose_engine_and_reference_disagree_ends_before_its_data_count(gsm8k, tmp_path):
    """The check at the start is left out here, so that responses of LFM2 do mix in a row."""
    (tmp_path / "unchecked.py").write_text("import tba\ntba.can_pack = lambda *_: True\n")
    out, model = tmp_path / "run", model_with_tokenizer("LFM2", gsm8k, tmp_path / "model")
    flags = {"model": model, "task_file": tmp_path / "unchecked.py", **SMALL}
    _, err = run_tba(arguments(gsm8k, out, **flags), code=1)
    (line,) = [line for line in err.splitlines() if line.startswith("tba.py: error: ")]
    assert f"--model {model}: the transformers engine generated responses" in line
    assert "(step 0)" in line and "--logprob_tolerance" in line and "Traceback" not in err
    assert "transfer" not in line and not (out / "metrics.jsonl").exists()
    saved = torch.load(out / "checkpoint-0" / "trainer.pt", weights_only=True)
    assert len(saved["buffer"]["trajectories"]["reward"]) == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_right_is_refused_in_one_line(gsm8k, tmp_path):
    out, model = tmp_path / "run", model_with_tokenizer("BERT", gsm8k, tmp_path / "model")
    _, err = run_tba(arguments(gsm8k, out, model=model, **SMALL), code=2)
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith(f"tba.py: error: --model {model}: of a bert model the log-prob")
    assert "Traceback" not in err and not list(out.glob("checkpoint-*"))


# ------------------------------------------------------------------------------------- adapters


def test_adapters_of_a_family_that_peft_does_not_know(gsm8k, tmp_path, capsys):
    out, model = tmp_path / "run", model_with_tokenizer("LFM2", gsm8k, tmp_path / "model")
    args = arguments(gsm8k, out, model=model, lora_rank=4)
    capsys.readouterr()  # of saving the model
    expect_error(args, "--lora_rank 4: peft has no target modules for lfm2 models", capsys, out)
    expect_error(args, "--lora_targets to some of in_proj,", capsys, out)
    for wrong in ("q_proj,qproj", "lm_head", "q_proj,"):
        named = [*args, "--lora_targets", wrong]
        expect_error(named, f"--lora_targets {wrong}: ", capsys, out)
    expect_error(
        [*arguments(gsm8k, out), "--lora_targets", "q_proj"],
        "--lora_targets q_proj: needs --lora_rank",
        capsys,
        out,
    )
    named = [*args, "--lora_targets", "q_proj,out_proj"]
    assert main([*named, "--dry_run"], capsys)[0] == 0
    flags = {"model": model, "lora_rank": 4, "lora_targets": "q_proj,out_proj"}
    trainer = trainer_of(gsm8k, out, **flags)
    trained = {
        n.split(".lora_")[0] for n, p in trainer.learner.model.named_parameters() if p.requires_grad
    }
    assert {name.rsplit(".", 1)[1] for name in trained} == {"q_proj", "out_proj"}
