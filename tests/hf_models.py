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
    settings = DECODER | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
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
