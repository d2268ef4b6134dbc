# SPDX-License-Identifier: BSD-3-Clause
"""BlockMask's constructors against the same rules written out element by element, over lengths that
are no multiple of the block, both ways unequal, and down to 0."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import flash_attn
from flash_attn import BlockMask

LENGTHS = [(128, 128), (150, 200), (200, 150), (1, 70), (70, 1), (129, 64), (0, 40), (40, 0)]
SIZES = [64, 128, (32, 16), (16, 48), (7, 5), 1]


def indices(seqlen_q, seqlen_k, device="cpu"):
    """i, j, and the position p of i among the keys."""
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    return i, j, i + seqlen_k - seqlen_q


def units(p, j, size):
    unit = size if isinstance(size, int) else max(size)
    return torch.div(p, unit, rounding_mode="floor"), j // unit


def window(p, j, left, right):
    seen = torch.ones_like(p * j, dtype=torch.bool)
    if left >= 0:
        seen &= j >= p - left
    return seen & (j <= p + right) if right >= 0 else seen


def butterfly(u, c, stride=None, first=0):
    powers = [0] + [1 << bit for bit in range(20) if stride is None or 1 << bit <= stride]
    seen = sum((u ^ c) == power for power in powers).bool() & (u >= 0)
    return seen | (u < first) | (c < first)


def is_global(x, positions):
    return sum((x == place) for place in positions).bool()


# Name: (constructor of (seqlen_q, seqlen_k), rule of (p, j, u, c)).
PATTERNS = {
    "window": (
        lambda q, k, **more: BlockMask.sliding_window(q, k, (40, 9), **more),
        lambda p, j, u, c: window(p, j, 40, 9),
    ),
    "window-unlimited": (
        lambda q, k, **more: BlockMask.sliding_window(q, k, (-1, 3), **more),
        lambda p, j, u, c: window(p, j, -1, 3),
    ),
    "window-int-causal": (
        lambda q, k, **more: BlockMask.sliding_window(q, k, 33, causal=True, **more),
        lambda p, j, u, c: window(p, j, 33, 0),
    ),
    "window-none": (
        lambda q, k, **more: BlockMask.sliding_window(q, k, (-1, -1), **more),
        lambda p, j, u, c: window(p, j, -1, -1),
    ),
    "sink": (
        lambda q, k, **more: BlockMask.sink_window(q, k, 5, 20, **more),
        lambda p, j, u, c: (window(p, j, 20, 0) | (j < 5)) & (j <= p),
    ),
    "global": (
        lambda q, k, **more: BlockMask.window_global(q, k, 10, 4, **more),
        lambda p, j, u, c: window(p, j, 10, 10) | (j < 4) | ((p >= 0) & (p < 4)),
    ),
    "global-list-causal": (
        lambda q, k, **more: BlockMask.window_global(
            q, k, (12, -1), [0] if k else [], causal=True, **more
        ),
        lambda p, j, u, c: (window(p, j, 12, -1) | (j == 0) | (p == 0)) & (j <= p),
    ),
    "prefix": (
        lambda q, k, **more: BlockMask.prefix_lm(q, k, 37, **more),
        lambda p, j, u, c: (j <= p) | (j < 37),
    ),
    "strided": (
        lambda q, k, **more: BlockMask.strided(q, k, 3, **more),
        lambda p, j, u, c: (((u - c).abs() < 3) | ((u - c) % 3 == 0)) & (j <= p),
    ),
    "strided-both-ways": (
        lambda q, k, **more: BlockMask.strided(q, k, 2, causal=False, **more),
        lambda p, j, u, c: ((u - c).abs() < 2) | ((u - c) % 2 == 0),
    ),
    "fixed": (
        lambda q, k, **more: BlockMask.fixed(q, k, 3, **more),
        lambda p, j, u, c: (
            ((torch.div(u, 3, rounding_mode="floor") == c // 3) | (c % 3 == 2)) & (j <= p)
        ),
    ),
    "fixed-two": (
        lambda q, k, **more: BlockMask.fixed(q, k, 4, 2, causal=False, **more),
        lambda p, j, u, c: (torch.div(u, 4, rounding_mode="floor") == c // 4) | (c % 4 >= 2),
    ),
    "dilated": (
        lambda q, k, **more: BlockMask.dilated(q, k, 2, 2, **more),
        lambda p, j, u, c: ((u - c).abs() <= 4) & ((u - c) % 2 == 0),
    ),
    "butterfly": (
        lambda q, k, **more: BlockMask.butterfly(q, k, **more),
        lambda p, j, u, c: butterfly(u, c),
    ),
    "butterfly-causal": (
        lambda q, k, **more: BlockMask.butterfly(q, k, 2, 1, causal=True, **more),
        lambda p, j, u, c: butterfly(u, c, 2, 1) & (j <= p),
    ),
    "predicate": (
        lambda q, k, **more: BlockMask.from_predicate(
            lambda b, h, i, j: (i * 7 + j * 3) % 5 < 2, None, None, q, k, **more
        ),
        lambda p, j, u, c: ((p - j.shape[1] + p.shape[0]) * 7 + j * 3) % 5 < 2,
    ),
}


def check_mask(mask, expected):
    """Elements, lists and densities of a mask against (batch, heads, seqlen_q, seqlen_k) bool."""
    density, mask = mask.element_density, mask.to("cpu")
    assert torch.equal(mask.to_elements(), expected.expand(*mask.shape[:2], -1, -1))
    size_q, size_k = mask.block_size
    batch, heads, rows, columns = mask.shape
    blocks = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
    cut = 0
    for row in range(rows):
        for column in range(columns):
            piece = expected[
                ..., row * size_q : (row + 1) * size_q, column * size_k : (column + 1) * size_k
            ].flatten(2)
            blocks[:, :, row, column] = piece.any(2)
            cut += int((piece.any(2) & ~piece.all(2)).expand(batch, heads).sum())
    assert torch.equal(mask.to_dense(), blocks)
    for counts, listed, tiles, seen in (
        (mask.counts, mask.indices, mask.bits_index, blocks),
        (mask.counts_t, mask.indices_t, mask.bits_index_t, blocks.transpose(2, 3)),
    ):
        assert counts.dtype == listed.dtype == torch.int32
        assert torch.equal(counts, seen.sum(3, dtype=torch.int32))
        assert listed.shape[3] == (int(counts.max()) if counts.numel() else 0)
        for place in (counts > 0).nonzero().tolist():
            b, h, line = place
            found = listed[b, h, line]
            count = int(counts[b, h, line])
            assert found[:count].tolist() == seen[b, h, line].nonzero().flatten().tolist()
            assert (found[count:] == -1).all()
        assert (tiles is None) == (cut == 0)
        if cut:
            assert tiles.shape == listed.shape and int((tiles >= 0).sum()) == cut
    if cut:
        assert mask.bits.shape[1:] == (size_q, -(-size_k // 32))
        assert len(torch.unique(mask.bits, dim=0)) == len(mask.bits)
    if expected.numel():
        assert abs(mask.density - blocks.double().mean()) < 1e-9
        assert abs(density - expected.double().mean()) < 1e-9


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patterns(name, size, device):
    make, rule = PATTERNS[name]
    for seqlen_q, seqlen_k in LENGTHS if size != 1 else [(20, 33), (33, 20)]:
        i, j, p = indices(seqlen_q, seqlen_k)
        mask = make(seqlen_q, seqlen_k, block_size=size, device=device)
        assert mask.seqlens == (seqlen_q, seqlen_k) and mask.device.type == device
        check_mask(mask, rule(p, j, *units(p, j, size))[None, None])


def test_patterns_prefix_of_each_batch_entry():
    i, j, p = indices(100, 130)
    for prefix in ([0, 64, 500], torch.tensor([0, 64, 500])):
        mask = BlockMask.prefix_lm(100, 130, prefix, block_size=32)
        rows = torch.tensor([0, 64, 500])[:, None, None, None]
        check_mask(mask, (j <= p) | (j < rows))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[50, 0, 64, 1, 37], [200], [1] * 9, []])
def test_patterns_documents(lengths, causal, device):
    ids = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)]).long()
    i, j, _ = indices(len(ids), len(ids))
    expected = (ids[:, None] == ids[None, :]) & ((j <= i) if causal else True)
    for size in (64, (32, 16), (7, 5)):
        more = {"causal": causal, "block_size": size}
        check_mask(BlockMask.documents(lengths, **more, device=device), expected[None, None])
        check_mask(BlockMask.documents(ids=ids.to(device), **more), expected[None, None])


def test_patterns_documents_ids_in_any_order():
    """Ids of each batch entry, mixed up, some of them padding."""
    ids = torch.randint(-1, 3, (3, 130)).sort(1).values
    ids[2] = torch.randint(-2, 4, (130,))
    expected = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    for size in (64, 16):
        check_mask(BlockMask.documents(ids=ids, block_size=size), expected[:, None])


def test_patterns_topk(device):
    scores = torch.randn(2, 3, 4, 5)
    scores[0, 0, 1] = 0.0  # equal scores: the earlier blocks
    scores[0, 1, 2, :4] = float("-inf")
    scores[1, 0, 0, 2] = float("nan")
    mask = BlockMask.topk(scores.to(device), 2, 120, 150, block_size=(32, 30)).to("cpu")
    ranked = scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    expected = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist():
        row = ranked[tuple(place)].tolist()
        best = sorted(range(5), key=lambda column: -row[column])[:2]
        for column in best:
            expected[(*place, column)] = row[column] > float("-inf")
    assert torch.equal(mask.to_dense(), expected) and mask.bits is None
    assert mask.to_dense()[0, 0, 1].tolist() == [True, True, False, False, False]


def test_patterns_topk_causal():
    """Candidates reach the diagonal, and the diagonal cuts what is chosen."""
    scores = torch.randn(1, 2, 5, 7)
    mask = BlockMask.topk(scores, 3, 150, 220, causal=True, block_size=32)
    i, j, p = indices(150, 220)
    for head in range(2):
        for row in range(5):
            last = (min(row * 32 + 31, 149) + 70) // 32  # the last block with something to see
            best = scores[0, head, row, : last + 1].topk(3).indices
            chosen = torch.zeros(7, dtype=torch.bool).index_fill(0, best, True)
            expected = chosen[j // 32] & (j <= p)
            rows = slice(row * 32, row * 32 + 32)
            assert torch.equal(mask.to_elements()[0, head, rows], expected[rows])


def test_patterns_predicate_by_batch_and_head(device):
    elements = torch.rand(2, 3, 100, 90, device=device) < 0.5
    elements[:, :, :64, :32] = True
    elements[1, :, 64:, 32:] = False
    for size in (64, (32, 48), 128):
        mask = BlockMask.from_predicate(
            lambda b, h, q, k: elements[b, h, q, k], 2, 3, 100, 90, size, device
        )
        check_mask(mask, elements.cpu())
    one = BlockMask.from_predicate(lambda b, h, q, k: (h > 0) & (q >= k), None, 2, 40, 40, 16)
    assert one.shape == (1, 2, 3, 3) and not one.to_dense()[0, 0].any()


def test_patterns_predicate_in_large_blocks():
    """A block of more elements than are looked at together is taken line by line."""
    i, j, _ = indices(1500, 1400)
    mask = BlockMask.from_predicate(
        lambda b, h, q, k: (q * 31 + k * 17) % 13 < 5, None, None, 1500, 1400, (1024, 2048)
    )
    check_mask(mask, ((i * 31 + j * 17) % 13 < 5)[None, None])


def test_patterns_share_equal_tiles():
    """Blocks that a pattern cuts alike have one bit tile: the diagonal's has one for all."""
    mask = BlockMask.sliding_window(1024, 1024, (-1, 0), block_size=64)
    assert mask.bits.shape == (1, 64, 2) and int((mask.bits_index >= 0).sum()) == 16
    assert BlockMask.documents([64] * 16, block_size=64).bits is None


def test_patterns_memory_is_that_of_the_blocks():
    """Long sequences: a bounded number of elements at a time, and lists as long as the blocks."""
    largest = 0

    def rule(b, h, q, k):
        nonlocal largest
        seen = (q >= k) & (q - k < 700)
        largest = max(largest, seen.numel())
        return seen

    one = BlockMask.from_predicate(rule, None, None, 4096, 4096, 512)
    assert largest <= 1 << 20 and len(one.bits) == 3
    mask = BlockMask.sliding_window(1 << 17, 1 << 17, (511, 0))
    assert mask.shape == (1, 1, 1024, 1024) and len(mask.bits) == 2
    assert int(mask.counts.sum()) == 5 * 1024 - (4 + 3 + 2 + 1)
    assert mask.indices.shape == mask.indices_t.shape == (1, 1, 1024, 5)


def test_patterns_cost():
    """The butterfly has log2(n) + 1 blocks a row, as its paper says."""
    mask = BlockMask.butterfly(64 * 32, 64 * 32, block_size=64)
    assert (mask.counts == 6).all() and (mask.counts_t == 6).all()


# ---- FlexAttention


def flex_masks():
    ids = torch.tensor([0] * 50 + [1] * 80 + [2] * 70)
    offsets = torch.tensor([10, 90])
    return {
        "causal": (lambda b, h, q, k: q >= k, None, None, 200, 200, 128),
        "window": (lambda b, h, q, k: (q - k).abs() <= 70, 1, 1, 200, 150, 64),
        "document": (lambda b, h, q, k: ids[q] == ids[k], None, None, 200, 200, 32),
        "batch": (lambda b, h, q, k: k < offsets[b] + q, 2, None, 130, 200, 64),
        "head": (lambda b, h, q, k: (q - k) % (h + 2) == 0, None, 4, 100, 100, 32),
        "both": (lambda b, h, q, k: (q + k + b + h) % 3 != 0, 2, 4, 64, 64, (32, 16)),
        "nothing": (lambda b, h, q, k: (q < 40) & (k > 60), None, None, 100, 130, 32),
        "all": (lambda b, h, q, k: q >= 0, None, None, 100, 130, 64),
    }


@pytest.mark.parametrize("name", flex_masks())
def test_flex_masks(name):
    """The same elements and blocks, the same result as FlexAttention's own."""
    rule, batch, heads, seqlen_q, seqlen_k, size = flex_masks()[name]
    theirs = flex.create_block_mask(rule, batch, heads, seqlen_q, seqlen_k, "cpu", size)
    mask = BlockMask.from_flex_attention(theirs)
    elements = flex.create_mask(rule, batch or 1, heads or 1, seqlen_q, seqlen_k, "cpu")
    check_mask(mask, elements)
    q = torch.randn(2, seqlen_q, 4, 16)
    k, v = (torch.randn(2, seqlen_k, 4, 16) for _ in "kv")
    found = flash_attn.flash_attn_blocksparse_func(q, k, v, mask)
    with_heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flex.flex_attention(*with_heads_first, block_mask=theirs).transpose(1, 2)
    torch.testing.assert_close(found, expected)


def test_flex_masks_full_blocks_are_not_looked_at():
    """What a mask lists as full is full, whatever its function says there."""
    counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
    blocks = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 1]]], dtype=torch.int32)
    theirs = flex.BlockMask.from_kv_blocks(
        counts, blocks, full, blocks.flip(3), 16, lambda b, h, q, k: (q + k) % 2 == 0
    )
    elements = BlockMask.from_flex_attention(theirs).to_elements()[0, 0]
    i, j, _ = indices(32, 32)
    assert elements[:16, :16].all() and not elements[16:, :16].any() and elements[16:, 16:].all()
    assert torch.equal(elements[:16, 16:], ((i + j) % 2 == 0)[:16, 16:])


# ---- errors, printing

V, T = ValueError, TypeError
INTS = torch.tensor
WRONG = [
    (V, "seqlen_q must be >= 0", lambda m: m.sliding_window(-1, 4, 2)),
    (T, "seqlen_k must be an int", lambda m: m.sliding_window(4, 4.0, 2)),
    (V, "at most 2", lambda m: m.sliding_window(4, 2**31, 2)),
    (T, "window must be", lambda m: m.sliding_window(4, 4, (1, 2, 3))),
    (T, "window must be an int", lambda m: m.sliding_window(4, 4, (1, None))),
    (V, "window must be >= -1", lambda m: m.sliding_window(4, 4, (-2, 0))),
    (T, "causal must be a bool", lambda m: m.sliding_window(4, 4, 1, causal=1)),
    (V, "block_size", lambda m: m.sliding_window(4, 4, 1, block_size=0)),
    (V, "sinks must be >= 0", lambda m: m.sink_window(4, 4, -1, 2)),
    (V, "window must be >= 0", lambda m: m.sink_window(4, 4, 1, -1)),
    (V, "global_positions must lie in 0 to 3", lambda m: m.window_global(4, 4, 1, [4])),
    (T, "global_positions must be", lambda m: m.window_global(4, 4, 1, 0.5)),
    (T, "prefix must be an int", lambda m: m.prefix_lm(4, 4, [1, 2.0])),
    (T, "prefix must be an int32", lambda m: m.prefix_lm(4, 4, torch.ones(2))),
    (V, "prefix must have one dim", lambda m: m.prefix_lm(4, 4, INTS([[1]]))),
    (V, "one of lengths and ids, got none", lambda m: m.documents()),
    (V, "one of lengths and ids, got both", lambda m: m.documents([4], ids=INTS([0]))),
    (V, "ids must have shape", lambda m: m.documents(ids=INTS(1))),
    (T, "ids must be", lambda m: m.documents(ids=torch.ones(4))),
    (V, "lengths must be >= 0", lambda m: m.documents([3, -1])),
    (V, "stride must be >= 1", lambda m: m.strided(4, 4, 0)),
    (V, "summary must lie in 0 to stride", lambda m: m.fixed(4, 4, 2, 3)),
    (V, "dilation must be >= 1", lambda m: m.dilated(4, 4, 1, 0)),
    (V, "power of two", lambda m: m.butterfly(4, 4, 6)),
    (V, "global_units must be >= 0", lambda m: m.butterfly(4, 4, None, -1)),
    (T, "scores must be a floating", lambda m: m.topk(INTS([[1]]), 1, 4, 4)),
    (
        V,
        "scores must have 2 rows and 1 col",
        lambda m: m.topk(torch.ones(1, 1), 1, 8, 4, block_size=4),
    ),
    (V, "k must be >= 0", lambda m: m.topk(torch.ones(1, 1), -1, 4, 4)),
    (T, "predicate must be a function", lambda m: m.from_predicate(1, None, None, 4, 4)),
    (
        T,
        "predicate must return a bool",
        lambda m: m.from_predicate(lambda b, h, q, k: q, 1, 1, 4, 4),
    ),
    (
        T,
        "predicate must return a bool",
        lambda m: m.from_predicate(lambda b, h, q, k: True, 1, 1, 4, 4),
    ),
    (
        V,
        "predicate must return a shape",
        lambda m: m.from_predicate(lambda b, h, q, k: torch.ones(3, dtype=torch.bool), 1, 1, 4, 4),
    ),
    (V, "batch must be >= 0", lambda m: m.from_predicate(lambda b, h, q, k: q > k, -1, 1, 4, 4)),
    (T, "block_mask must be a torch.nn", lambda m: m.from_flex_attention(torch.ones(2))),
]


@pytest.mark.parametrize("error,text,call", WRONG, ids=[text for _, text, _ in WRONG])
def test_patterns_errors(error, text, call):
    with pytest.raises(error) as caught:
        call(BlockMask)
    assert type(caught.value) is error
    assert str(caught.value).startswith("flash_attn: ") and text in str(caught.value)


def test_patterns_print():
    mask = BlockMask.sliding_window(256, 320, (70, 0), block_size=64)
    picture = str(mask).splitlines()
    assert picture[0] == repr(mask) and "seqlens=(256, 320)" in picture[0]
    assert picture[1:] == ["++...", "+++..", ".+++.", "..+++"]
    big = str(BlockMask.butterfly(64 * 500, 64 * 500, block_size=64)).splitlines()
    assert len(big) <= 30 and all(len(line) <= 100 for line in big[1:])
    several = str(BlockMask.from_dense(torch.ones(2, 3, 4, 5, dtype=torch.bool), 8))
    assert "head 0 of 2 x 3" in several and several.endswith("#####")
    assert str(BlockMask.sliding_window(0, 4, 1)).startswith("BlockMask(")
    assert str(mask.to("cpu")) == str(mask)
