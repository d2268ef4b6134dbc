# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn.nn.MultiheadAttention beside torch.nn.MultiheadAttention with the same parameters."""

import copy

import problem
import pytest
import torch
from torch import nn

from flash_attn.nn import MultiheadAttention

HEADS, EMBED = 4, 32


def pair(device, dtype=torch.float32, **options):
    """torch's module, its biases not zero, and ours from its state."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options, device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    ours = MultiheadAttention(EMBED, HEADS, **options, device=device, dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(module, inputs, need_weights=False, **call):
    """Output, weights, and the gradients of inputs, float masks and parameters."""
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs}
    masks = {
        name: x.detach().clone().requires_grad_()
        for name, x in call.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    named = [leaves[id(x)] for x in inputs]
    out, weights = module(*named, need_weights=need_weights, **(call | masks))
    wanted = [*leaves.values(), *masks.values(), *module.parameters()]
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return out, weights, torch.autograd.grad((out * weight.view(out.shape)).sum(), wanted)


def compare(found, expected, rtol=1e-4, atol=1e-5):
    tolerance = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    for a, b in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def inputs(kind, batch_first, device, kdim=EMBED, vdim=EMBED, dtype=torch.float32):
    """query, key, value of 3 sequences, 6 queries and 9 keys; kind "self" has 6 of both."""

    def tensor(length, width):
        shape = (3, length, width) if batch_first else (length, 3, width)
        return torch.randn(shape, device=device, dtype=dtype)

    query = tensor(6, EMBED)
    if kind == "self":
        return query, query, query
    key = tensor(9, kdim)
    return query, key, key if kind == "shared" else tensor(9, vdim)


def masks(kind, rows, columns, device):
    """Keyword arguments that hide no row whole."""
    padding = torch.zeros(3, columns, dtype=torch.bool, device=device)
    padding[1, columns - 2 :] = padding[2, 4:] = True
    hidden = torch.rand(rows, columns, device=device) < 0.4
    hidden[:, 0] = False
    heads = torch.rand(3 * HEADS, rows, columns, device=device) < 0.4
    heads[..., :2] = False
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding-float": {"key_padding_mask": torch.randn(3, columns, device=device)},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(rows, columns, device=device)},
        "heads": {"attn_mask": heads},
        "heads-float": {"attn_mask": torch.randn(3 * HEADS, rows, columns, device=device)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both-float": {
            "attn_mask": torch.randn(3 * HEADS, rows, columns, device=device),
            "key_padding_mask": torch.randn(3, columns, device=device),
        },
    }[kind]


MASKS = ("none", "padding", "padding-float", "bool", "float", "heads", "heads-float", "both")
MASKS += ("both-float",)
OPTIONS = {
    "plain": ("self", {}),
    "batch-first": ("self", {"batch_first": True}),
    "cross": ("cross", {}),
    "shared": ("shared", {"batch_first": True, "bias": False}),
    "kdim-vdim": ("cross", {"kdim": 20, "vdim": 12}),
    "bias-kv": ("self", {"add_bias_kv": True}),
    "zero": ("cross", {"add_zero_attn": True, "batch_first": True}),
    "everything": ("cross", {"add_bias_kv": True, "add_zero_attn": True, "kdim": 20}),
}


# Every mask with the two that differ most, every option with the two richest masks.
CASES = [(option, mask) for option in ("batch-first", "everything") for mask in MASKS]
CASES += [(option, mask) for option in OPTIONS for mask in ("both", "both-float")]


@pytest.mark.parametrize(("option", "mask"), sorted(set(CASES)))
def test_multihead(option, mask, device):
    """Outputs, and the gradients of inputs, masks and parameters."""
    kind, options = OPTIONS[option]
    theirs, ours = pair(device, **options)
    given = inputs(
        kind,
        options.get("batch_first", False),
        device,
        options.get("kdim", EMBED),
        options.get("vdim", EMBED),
    )
    call = masks(mask, 6, 6 if kind == "self" else 9, device)
    compare(run(ours, given, **call), run(theirs, given, **call))


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "heads-float"])
def test_multihead_unbatched(mask, device):
    theirs, ours = pair(device)
    given = [x[:, 0] for x in inputs("cross", False, device)]
    call = masks(mask, 6, 9, device)
    cut = {"key_padding_mask": slice(1, 2), "attn_mask": slice(0, HEADS)}
    call = {
        name: x if x.dim() == 2 and name == "attn_mask" else x[cut[name]]
        for name, x in call.items()
    }
    if mask == "padding":
        call["key_padding_mask"] = call["key_padding_mask"][0]
    compare(run(ours, given, **call), run(theirs, given, **call))


@pytest.mark.parametrize("average", [True, False])
def test_multihead_weights(average, device):
    """need_weights=True, the default, is torch's own: the same numbers."""
    theirs, ours = pair(device)
    given = inputs("cross", False, device)
    call = {"average_attn_weights": average, **masks("both", 6, 9, device)}
    found, expected = (run(module, given, need_weights=True, **call) for module in (ours, theirs))
    compare(found, expected, rtol=0, atol=0)
    assert torch.equal(found[1], expected[1])
    out, weights = ours(*given)
    assert weights.shape == (3, 6, 9)
    torch.testing.assert_close(ours(*given, need_weights=False)[0], out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("padding", [False, True])
def test_multihead_causal(extra, padding, device):
    """The hint with its mask, and without; padding beside it."""
    theirs, ours = pair(device, **extra)
    given = inputs("self", False, device)
    mask = nn.Transformer.generate_square_subsequent_mask(6, device=device).isinf()
    call = masks("padding", 6, 6, device) if padding else {}
    expected = theirs(*given, attn_mask=mask, need_weights=False, **call)[0]
    found = ours(*given, attn_mask=mask, is_causal=True, need_weights=False, **call)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if not extra:
        found = ours(*given, is_causal=True, need_weights=False, **call)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_multihead_dtypes(dtype, device):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("fp64 is for the CPU")
    theirs, ours = pair(device, dtype)
    given = inputs("cross", False, device, dtype=dtype)
    call = {"attn_mask": torch.randn(6, 9, device=device, dtype=dtype)}
    found = run(ours, given, **call)
    # torch's error is that of either of its ways.
    references = [run(theirs, given, need_weights=way, **call) for way in (False, True)]
    wide = [x.double() for x in given]
    exact = run(theirs.double(), wide, attn_mask=call["attn_mask"].double())
    names = ["out", "dq", "dk", "dv", "dmask", *(name for name, _ in theirs.named_parameters())]
    tensors = [(x[0], *x[2]) for x in (found, exact, *references)]
    problem.compare(
        {
            name: [(a, b, [problem.worst(x, b)[0] for x in others])]
            for name, a, b, *others in zip(names, *tensors, strict=True)
        }
    )


def test_multihead_mixed_masks(device):
    """A boolean mask beside a float one of any precision, and fp32 beside bf16 inputs."""
    _, ours = pair(device)
    given = inputs("cross", False, device)
    padding = masks("padding", 6, 9, device)["key_padding_mask"]
    added = torch.zeros(3, 9, device=device).masked_fill(padding, float("-inf"))
    scores = torch.randn(6, 9, device=device)
    found = ours(*given, padding, False, scores.double())[0]
    torch.testing.assert_close(found, ours(*given, added, False, scores)[0])
    with torch.autocast(device, torch.bfloat16):
        cast = ours(*given, padding, False, scores)[0]
    torch.testing.assert_close(cast.float(), found, rtol=0.1, atol=0.1)


def test_multihead_hidden_rows(device):
    """Where nothing is visible the output is the projection of 0, and no gradient is NaN."""
    _, ours = pair(device)
    given = inputs("self", False, device)
    padding = torch.zeros(3, 6, dtype=torch.bool, device=device)
    padding[1] = True
    out, _, grads = run(ours, given, key_padding_mask=padding)
    torch.testing.assert_close(out[:, 1], ours.out_proj.bias.expand(6, -1))
    assert all(grad.isfinite().all() for grad in grads)


def test_multihead_dropout(device):
    """In training only; the mean over many draws is the undropped output."""
    _, ours = pair(device, dropout=0.5)
    given = inputs("self", False, device)
    assert not torch.equal(ours(*given, need_weights=False)[0], ours(*given, need_weights=False)[0])
    mean = torch.stack([ours(*given, need_weights=False)[0] for _ in range(100)]).mean(0)
    ours.eval()
    torch.testing.assert_close(mean, ours(*given, need_weights=False)[0], rtol=0.5, atol=0.7)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("cross", [False, True])
def test_multihead_nested(layout, cross, device):
    """Each sequence as if alone, forward and backward."""
    theirs, ours = pair(device, batch_first=True)
    pieces = [torch.randn(n, EMBED, device=device, requires_grad=True) for n in (4, 1, 7)]
    others = [torch.randn(n, EMBED, device=device, requires_grad=True) for n in (2, 5, 3)]
    query = torch.nested.as_nested_tensor(pieces, layout=layout)
    key = torch.nested.as_nested_tensor(others, layout=layout) if cross else query
    out, weights = ours(query, key, key, need_weights=False)
    assert weights is None and out.is_nested and out.layout is layout
    expected = [
        theirs(x, y, y, need_weights=False)[0]
        for x, y in zip(pieces, others if cross else pieces, strict=True)
    ]
    for a, b in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    leaves = [*pieces, *(others if cross else []), *ours.parameters()]
    found = torch.autograd.grad(sum(x.square().sum() for x in out.unbind()), leaves)
    leaves = [*pieces, *(others if cross else []), *theirs.parameters()]
    grads = torch.autograd.grad(sum(x.square().sum() for x in expected), leaves)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


WRONG = {
    "rank": (lambda m, x: m(x[0], x, x, need_weights=False), ValueError, "3-D"),
    "padding": (
        lambda m, x: m(x, x, x, torch.ones(3, 4, dtype=torch.bool), False),
        ValueError,
        "key_padding_mask must have shape",
    ),
    "padding-unbatched": (
        lambda m, x: m(*[x[:, 0]] * 3, torch.ones(4, dtype=torch.bool), False),
        ValueError,
        r"key_padding_mask must have shape \(6,\), got \(4,\)",
    ),
    "mask": (
        lambda m, x: m(x, x, x, None, False, torch.ones(6, 5, dtype=torch.bool)),
        ValueError,
        "attn_mask must have shape",
    ),
    "kind": (
        lambda m, x: m(x, x, x, None, False, torch.ones(6, 6, dtype=torch.int32)),
        TypeError,
        "bool or floating-point",
    ),
    "causal": (
        lambda m, x: m(x, x[:5], x[:5], need_weights=False, is_causal=True),
        ValueError,
        "is_causal needs an attn_mask",
    ),
    "nested": (
        lambda m, x: m(*[torch.nested.as_nested_tensor(list(x))] * 3, need_weights=False),
        ValueError,
        "batch_first=True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_multihead_errors(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call(MultiheadAttention(EMBED, HEADS), torch.zeros(6, 3, EMBED))


def swap(module):
    """Puts ours in the place of each attention, parameters and all."""
    for name, child in module.named_children():
        if type(child) is nn.MultiheadAttention:
            ours = MultiheadAttention(
                child.embed_dim, child.num_heads, child.dropout, batch_first=child.batch_first
            )
            ours.load_state_dict(child.state_dict())
            setattr(module, name, ours.to(next(child.parameters()).device))
        else:
            swap(child)
    return module


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder(training, batch_first, device):
    """A stack of TransformerEncoderLayer with padding and a causal mask, training and evaluation
    (where torch makes nested tensors of padded batches)."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 48, 0.0, batch_first=batch_first)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).to(device)
    ours = swap(copy.deepcopy(theirs))
    theirs.train(training), ours.train(training)
    x = inputs("self", batch_first, device)[0]
    padding = masks("padding", 6, 6, device)["key_padding_mask"]
    causal = nn.Transformer.generate_square_subsequent_mask(6, device=device)
    for call in ({"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}):
        with torch.set_grad_enabled(training):
            found, expected = ours(x, **call), theirs(x, **call)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if training:
            expected = torch.autograd.grad(expected.square().sum(), theirs.parameters())
            found = torch.autograd.grad(found.square().sum(), ours.parameters())
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_transformer_whole(device):
    """nn.Transformer, encoder and decoder, and its copies by pickle."""
    theirs = nn.Transformer(EMBED, HEADS, 1, 1, 48, 0.0, batch_first=True).to(device)
    ours = swap(copy.deepcopy(theirs))
    source, target = inputs("shared", True, device)[:2]
    mask = nn.Transformer.generate_square_subsequent_mask(9, device=device)
    call = {"tgt_mask": mask, "tgt_is_causal": True}
    expected = theirs(source, target, **call)
    torch.testing.assert_close(ours(source, target, **call), expected, rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(ours)
    assert torch.equal(again(source, target, **call), ours(source, target, **call))


def test_multihead_compile_and_export(device):
    """A whole encoder in one graph, and exported."""
    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 48, 0.0, batch_first=True)
    net = swap(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).to(device)
    x = torch.randn(3, 6, EMBED, device=device)
    padding = masks("padding", 6, 6, device)["key_padding_mask"]
    expected = net(x, src_key_padding_mask=padding)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found = compiled(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    program = torch.export.export(net, (x,), {"src_key_padding_mask": padding})
    calls = [node for node in program.graph.nodes if "flash_attn" in str(node.target)]
    assert len(calls) == 1
    torch.testing.assert_close(program.module()(x, src_key_padding_mask=padding), expected)


def test_multihead_nested_lengths_must_agree():
    module = MultiheadAttention(8, 2, batch_first=True)

    def nested(*lengths):
        return torch.nested.nested_tensor([torch.randn(n, 8) for n in lengths])

    with pytest.raises(ValueError, match="nested key and value must have the same lengths"):
        module(nested(1, 1), nested(2, 6), nested(3, 5), need_weights=False)
    with pytest.raises(ValueError, match="is_causal needs seqlen_q = seqlen_k"):
        keys = nested(2, 6)
        module(nested(1, 6), keys, keys, need_weights=False, is_causal=True)
