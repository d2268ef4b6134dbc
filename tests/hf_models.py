# SPDX-License-Identifier: BSD-3-Clause
"""Tiny Hugging Face models, one for each thing that attention is asked for, and their batches."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 60
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    **TOKENS,
}


def _gpt2(**changes):
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    settings = sizes | dropout | TOKENS | {"initializer_range": 0.2} | changes
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(**settings)


def _bert(**changes):
    sizes = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", *TOKENS)}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = sizes | dropout | {"pad_token_id": 0} | changes
    return transformers.BertForMaskedLM, transformers.BertConfig(**settings)


def _llama(**changes):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER | changes)


def _mistral(**changes):
    settings = DECODER | {"sliding_window": 5} | changes
    return transformers.MistralForCausalLM, transformers.MistralConfig(**settings)


def _gpt_oss(**changes):
    """Sinks, and a window in every other layer."""
    settings = DECODER | {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 16}
    settings |= {"sliding_window": 5, "max_position_embeddings": 128} | changes
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**settings)


def _gemma2(**changes):
    """A softcap, a window in every other layer, a scale of its own."""
    settings = DECODER | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
    settings |= {"attn_logit_softcapping": 4.0} | changes
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**settings)


def _gemma(**changes):
    """head_dim 256."""
    settings = DECODER | {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.GemmaForCausalLM, transformers.GemmaConfig(**settings | changes)


MODELS = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama-gqa": _llama,
    "mistral-window": _mistral,
    "gpt_oss-sinks": _gpt_oss,
    "gemma2-softcap": _gemma2,
    "gemma-d256": _gemma,
}
CAUSAL = [name for name in MODELS if name != "bert"]
# Model, padding, cache.
GENERATIONS = [(model, "none", "static") for model in CAUSAL]
GENERATIONS += [(model, "left", "dynamic") for model in CAUSAL]
GENERATIONS += [("gpt2", "left", "static"), ("mistral-window", "left", "static")]
# transformers lets these use SDPA; the others' yardstick is eager attention.
SDPA = ["gpt2", "bert", "llama-gqa", "mistral-window", "gemma-d256"]


def build(name, implementation, dtype=torch.float32, device="cpu", **changes):
    """The model `name`, always with the same weights."""
    torch.manual_seed(0)
    kind, config = MODELS[name](**changes)
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.float32)
    return model.to(device=device, dtype=dtype)


def batch(kind, device="cpu"):
    """Tokens (3, 17), or (1, 17) when packed, and the arguments that say which are real."""
    tokens = torch.randint(1, VOCABULARY, (1 if kind == "packed" else 3, 17), device=device)
    if kind == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(11)])
        return tokens, {"position_ids": positions.to(device)[None], "use_cache": False}
    mask = torch.ones(3, 17, dtype=torch.int64, device=device)
    if kind == "right":
        mask[0, 12:], mask[2, 3:] = 0, 0
    elif kind == "left":
        mask[0, :5], mask[2, :14] = 0, 0
    return tokens, {} if kind == "none" else {"attention_mask": mask}


def logits_and_gradients(model, tokens, arguments):
    """Logits where a token is real, and the gradients of a loss over them, all in fp64."""
    real = arguments.get("attention_mask", torch.ones_like(tokens)).bool()
    logits = model(tokens, **arguments).logits[real]
    torch.nn.functional.cross_entropy(logits.float(), tokens[real]).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().double(), grads


def check_exact(model, kind, implementation, dtype=torch.float32):
    """Where a token is real the logits are eager's, and so are all gradients of a loss over real
    tokens, to the rounding of fp32."""
    tokens, arguments = batch(kind)
    expected, found = (
        logits_and_gradients(build(model, way, dtype), tokens, arguments)
        for way in ("eager", implementation)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=2e-5)
    scale = max(grad.abs().max() for grad in expected[1].values())
    for key, grad in expected[1].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-3, atol=1e-5 * scale, msg=key)


def check_bf16(model, kind, implementation, device):
    """In bf16 the errors of logits and gradients against fp32 eager are within twice those of SDPA,
    or of eager attention where transformers has no SDPA."""
    tokens, arguments = batch(kind, device)
    yardstick = "sdpa" if model in SDPA else "eager"
    exact = logits_and_gradients(build(model, "eager", device=device), tokens, arguments)
    known, found = (
        _distance(
            logits_and_gradients(build(model, way, torch.bfloat16, device), tokens, arguments),
            exact,
        )
        for way in (yardstick, implementation)
    )
    assert found[0] <= 2 * known[0] and found[1] <= 2 * known[1], (found, known)


def _distance(found, exact):
    """Error of the logits, and the largest error of a gradient against the largest gradient."""
    scale = max(grad.norm() for grad in exact[1].values())
    worst = max((found[1][key] - grad).norm() for key, grad in exact[1].items())
    return (found[0] - exact[0]).norm() / exact[0].norm(), worst / scale


def generate(model, tokens, arguments, cache):
    """Eight more tokens, greedily, through a "dynamic" or "static" cache."""
    return model.eval().generate(
        tokens,
        attention_mask=arguments.get("attention_mask", torch.ones_like(tokens)),
        max_new_tokens=8,
        do_sample=False,
        cache_implementation="static" if cache == "static" else None,
        disable_compile=True,
    )


def check_continuous_batching(net, model, graphs=False, asynchronous=False):
    """Requests of several lengths through one paged cache give the tokens of each alone."""
    prompts = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in (5, 17, 1)]
    settings = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = transformers.ContinuousBatchingConfig(
        num_blocks=16,
        max_batch_tokens=64,
        use_cuda_graph=graphs,
        use_async_batching=asynchronous,
    )
    results = net.generate_batch(
        inputs=prompts,
        generation_config=settings,
        continuous_batching_config=pages,
        warmup=graphs,
    )
    made = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
    alone = build(model, "eager", torch.float32, net.device).eval()
    for prompt in prompts:
        given = torch.tensor([prompt], device=net.device)
        mask = torch.ones_like(given)
        tokens = alone.generate(given, attention_mask=mask, max_new_tokens=6, do_sample=False)
        assert made[tuple(prompt)] == tokens[0, len(prompt) :].tolist()
