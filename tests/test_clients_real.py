# SPDX-License-Identifier: BSD-3-Clause
"""Other software itself, as it comes, on top of this package. What is not installed is skipped, and
said so; its import lines and calls are tested without it in test_clients.py."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch

from flash_attn import flash_attn_func


def client(name):
    return pytest.importorskip(
        name, reason=f"{name} is not installed: the client itself NOT tested"
    )


def test_diffusers_dispatch():
    """diffusers finds us, and its backends "flash" and "flash_varlen" are ours: against its native
    one, with gradients."""
    client("diffusers")
    from diffusers.models import attention_dispatch

    assert attention_dispatch._CAN_USE_FLASH_ATTN
    assert attention_dispatch.flash_attn_func is flash_attn_func
    q, k, v = (torch.randn(2, 9, 4, 16, requires_grad=True) for _ in "qkv")
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False
    for backend, given in (("flash", None), ("flash_varlen", mask)):
        results = [
            attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=given, backend=way)
            for way in (backend, "native")
        ]
        torch.testing.assert_close(*results)
        dout = torch.randn_like(results[0])
        grads = [torch.autograd.grad(out, (q, k, v), dout) for out in results]
        for found, want in zip(*grads, strict=True):
            torch.testing.assert_close(found, want)


def test_diffusers_context_parallel_operators():
    """The pair of functions that its ring and Ulysses attention differentiate through."""
    client("diffusers")
    from diffusers.models import attention_dispatch as dispatch

    class Saved:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    q, k, v = (torch.randn(2, 9, 4, 16, requires_grad=True) for _ in "qkv")
    saved = Saved()
    out, lse = dispatch._flash_attention_forward_op(saved, q, k, v, return_lse=True)
    expected, expected_lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse.permute(0, 2, 1))
    dout = torch.randn_like(out)
    found = dispatch._flash_attention_backward_op(saved, dout)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(one, other)


def ring_rank(rank, world, rendezvous):
    """One of two processes: its half of the rows, by ring attention, against all of them here."""
    sys.modules["ring_flash_attn.adapters"] = mock.MagicMock()  # they are for transformers 4
    from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    torch.manual_seed(0)
    whole = [torch.randn(1, 16, 4, 16).bfloat16().requires_grad_() for _ in "qkv"]
    dout = torch.randn(1, 16, 4, 16).bfloat16()

    def straight(x):
        return x.chunk(world, 1)[rank]

    def zigzag(x):
        pieces = x.chunk(2 * world, 1)
        return torch.cat([pieces[rank], pieces[-1 - rank]], 1)

    for ring, part, causal in (
        (ring_flash_attn_func, straight, False),
        (ring_flash_attn_func, straight, True),
        (zigzag_ring_flash_attn_func, zigzag, True),
    ):
        own = [part(x).detach().clone().requires_grad_() for x in whole]
        out, *_ = ring(*own, dropout_p=0, causal=causal, return_attn_probs=True)
        expected = flash_attn_func(*whole, causal=causal)
        torch.testing.assert_close(out, part(expected), rtol=2e-2, atol=2e-2)
        grads = torch.autograd.grad(out, own, part(dout))
        for found, want in zip(grads, torch.autograd.grad(expected, whole, dout), strict=True):
            torch.testing.assert_close(found, part(want), rtol=3e-2, atol=3e-2)
    torch.distributed.destroy_process_group()


def test_ring_flash_attention(tmp_path):
    """ring-flash-attn with two processes on a CPU, forward and backward."""
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("ring_flash_attn is not installed: itself NOT tested")
    torch.multiprocessing.spawn(ring_rank, (2, str(tmp_path / "meet")), 2)


@pytest.mark.parametrize("way", ["registered", "flash_attention_2"])
def test_peft_lora(way):
    """LoRA on a model with our attention: the adapters' gradients are eager's."""
    client("transformers")
    peft = client("peft")
    from hf_fa2 import flash_attention_2
    from hf_models import batch, build

    from flash_attn.integrations.transformers import register

    tokens, arguments = batch("right")
    labels = tokens.masked_fill(arguments["attention_mask"] == 0, -100)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def gradients(implementation):
        net = build("llama-gqa", implementation)
        torch.manual_seed(1)
        net = peft.get_peft_model(net, settings)
        net(input_ids=tokens, labels=labels, **arguments).loss.backward()
        return {key: p.grad for key, p in net.named_parameters() if p.requires_grad}

    expected = gradients("eager")
    with flash_attention_2() as name:
        found = gradients(register() if way == "registered" else name)
    assert expected and all(grad.abs().sum() > 0 for grad in expected.values())
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-3, atol=1e-5, msg=key)


def test_trl_padding_free(tmp_path):
    """TRL's SFT trainer, padding-free: only for implementations that it knows by name, and its
    loss is that of padded rows under eager attention."""
    client("trl")
    client("datasets")
    import datasets
    import trl
    from hf_fa2 import flash_attention_2
    from hf_models import build

    rows = [{"input_ids": torch.randint(1, 60, (n,)).tolist()} for n in (5, 12, 1, 9)]
    with flash_attention_2() as name:
        losses = []
        for implementation, packed in (("eager", False), (name, True)):
            settings = trl.SFTConfig(
                output_dir=str(tmp_path),
                padding_free=packed,
                per_device_train_batch_size=4,
                max_steps=2,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                bf16=False,
                max_length=None,
                gradient_checkpointing=False,
                save_strategy="no",
                seed=3,
            )
            trainer = trl.SFTTrainer(
                model=build("llama-gqa", implementation),
                args=settings,
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tokenizer(),
            )
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=0)


# Whether the CPU's fused operator serves it: not a learned bias, whose gradient it does not have.
TIMM = {
    "vit_tiny_patch16_224": True,
    "eva02_tiny_patch14_224": True,
    "beit_base_patch16_224": False,
}


@pytest.mark.parametrize("model", TIMM)
def test_timm_vision_transformers(model, device):
    """timm's models, unmodified, reach us through scaled_dot_product_attention: logits and the
    gradients of every parameter are those of torch's math backend."""
    timm = client("timm")
    from torch.nn import attention

    from flash_attn.integrations import torch_sdpa

    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no registry")
    net = timm.create_model(model, img_size=56, num_classes=5, depth=2).to(device)
    images = torch.randn(2, 3, 56, 56, device=device)

    def run():
        logits = net(images)
        return logits, *torch.autograd.grad(logits.square().sum(), list(net.parameters()))

    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        expected = run()
    forward = torch_sdpa._Call.forward
    with mock.patch.object(torch_sdpa._Call, "forward", autospec=True, side_effect=forward) as ours:
        attention.activate_flash_attention_impl("flash_attn")
        try:
            found = run()
        finally:
            attention.restore_flash_attention_impl()
    assert ours.call_count == (2 if TIMM[model] or device == "cuda" else 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


def tokenizer():
    """One that knows nothing but its padding."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(60)}
    model = tokenizers.models.WordLevel(words, unk_token="w1")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="w0", eos_token="w2"
    )
