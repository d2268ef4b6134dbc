# SPDX-License-Identifier: BSD-3-Clause
"""The planner seen from Python: tables of problem -> plan, reasons, explain(), check()."""

import pytest
import torch

import flash_attn
from flash_attn import _host as host

AVX2, AVX512, AVX512_BF16 = 1, 2, 4


def plan(**problem):
    return host.plan(
        {"threads": 2, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 4, "heads_k": 4} | problem
    )


@pytest.mark.parametrize(
    "isa,dtype,kernel",
    [
        (0, "float32", "cpu_scalar_forward_f32"),
        (AVX2, "float32", "cpu_avx2_forward_f32"),
        (AVX2 | AVX512, "float32", "cpu_avx512_forward_f32"),
        (AVX2 | AVX512, "bfloat16", "cpu_avx512_forward_bf16"),
        (AVX2 | AVX512 | AVX512_BF16, "bfloat16", "cpu_avx512bf16_forward_bf16"),
        (AVX2 | AVX512 | AVX512_BF16, "float64", "cpu_avx512_forward_f64"),
    ],
)
def test_plan_takes_the_newest_instruction_set(isa, dtype, kernel):
    if kernel not in [row["name"] for row in host.rows()]:
        pytest.skip("built for another processor family")
    made = plan(isa=isa, dtype=dtype, head_dim=64)
    assert made["kernel"] == kernel and made["backend"] == "cpu"


def test_plan_environment_caps_the_instruction_set(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_CPU_ISA", "scalar")
    made = plan(head_dim=64)
    assert made["kernel"] == "cpu_scalar_forward_f32"
    assert any("FLASH_ATTN_CPU_ISA" in reason for reason in made["reasons"])


def test_plan_says_why_not():
    """One reason a row that is not taken, by name."""
    made = plan(dtype="bfloat16", head_dim=64)
    rows = [row["name"] for row in host.rows() if row["pass"] == "forward"]
    assert len(made["reasons"]) == len(rows) - 1
    assert all(reason.split(":")[0] in rows for reason in made["reasons"])


# What a block may ask for on each architecture, in KiB.
SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def gpu(arch, **problem):
    shared = SHARED_MEMORY[arch] << 10
    return plan(device="cuda", arch=arch, sm_count=132, smem_per_block=shared, **problem)


def cuda_rows(name):
    return [row for row in host.rows() if row["arch"] > 0 and row["pass"] == name]


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_plan_of_a_gpu_that_is_not_here(arch, dtype, name):
    """Every size that any GPU has a kernel for has one on each GPU, with and without features."""
    rows = [row for row in cuda_rows(name) if row["dtype"] == dtype]
    if not rows:
        made = gpu(arch, dtype=dtype, head_dim=64, **{"pass": name})
        assert made["kernel"] is None and "no kernel fits" in made["text"]
        pytest.skip(f"this build has no CUDA {name} kernels for {dtype}")
    largest = max(row["head_dim"] for row in rows)
    for head_dim in (1, 64, 65, 96, 128, 160, 192, 256, 320, 512):
        for feature in ({}, {"softcap": 2.0}, {"softmax_scale": -1.0}):
            made = gpu(arch, dtype=dtype, head_dim=head_dim, **{"pass": name}, **feature)
            if arch == 75 and dtype != "float16":  # its tensor cores have no bf16
                assert made["kernel"] is None
                assert any("compute capability 8.0" in text for text in made["reasons"])
            elif head_dim > largest:
                assert made["kernel"] is None
                assert any(f"head_dim up to {largest}, got" in text for text in made["reasons"])
            else:
                row = next(row for row in rows if row["name"] == made["kernel"])
                assert row["arch"] <= arch and row["smem_bytes"] <= SHARED_MEMORY[arch] << 10
                assert row["head_dim"] >= head_dim and row["head_dim_v"] >= head_dim
                assert not feature or row["score"] == "general"


def test_plan_of_a_gpu_takes_its_largest_kernel():
    """More shared memory is used where a GPU has it; old code is passed over."""
    if not cuda_rows("forward"):
        pytest.skip("this build has no CUDA attention kernels")
    sizes = {}
    for arch in (80, 86, 90):
        made = gpu(arch, dtype="bfloat16", head_dim=256)
        sizes[arch] = next(r["smem_bytes"] for r in host.rows() if r["name"] == made["kernel"])
    assert sizes[86] <= sizes[80] <= sizes[90]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plan_of_hopper(dtype):
    """Hopper's own kernels where they can, and why not elsewhere."""
    if not cuda_rows("forward"):
        pytest.skip("this build has no CUDA attention kernels")
    sizes = {"dtype": dtype, "head_dim": 128, "seqlen_q": 512, "seqlen_k": 512}
    for feature in ({}, {"softcap": 2.0}, {"dropout": True}, {"alibi": True}, {"sinks": True}):
        assert gpu(90, **sizes, **feature)["backend"] == "sm90"
    assert gpu(90, **sizes, block_q=128, block_k=128)["backend"] == "sm90"
    assert gpu(90, **sizes, heads_q=8, heads_k=2)["backend"] == "sm90"
    # 192 rows where there is no mask block of 128, and neither few rows nor few keys.
    assert gpu(90, **sizes | {"seqlen_k": 1024})["block_m"] == 192
    for other in ({"block_q": 128, "block_k": 128}, {"seqlen_q": 128, "seqlen_k": 1024}, {}):
        assert gpu(90, **(sizes | other))["kernel"].endswith("_d128_blocks")
    few = sizes | {"window_right": 0, "seqlen_q": 256, "seqlen_k": 256}  # 128 keys a row
    assert gpu(90, **few)["backend"] == "sm80"
    assert any("so few keys" in text for text in gpu(90, **few)["reasons"])
    assert gpu(90, **few, any_speed=True)["backend"] == "sm90"
    assert gpu(90, **few | {"seqlen_q": 1024, "seqlen_k": 1024})["backend"] == "sm90"
    assert gpu(90, **sizes | {"head_dim": 64, "seqlen_k": 200})["backend"] == "sm80"
    assert gpu(90, **sizes | {"head_dim": 64})["block_m"] == 192
    for head_dim in (64, 128):
        causal = {"head_dim": head_dim, "seqlen_q": 1024, "seqlen_k": 1024, "window_right": 0}
        assert gpu(90, **sizes | causal)["kernel"].endswith(f"_d{head_dim}_windows")
        long = causal | {"seqlen_q": 4096, "seqlen_k": 4096}
        for left, name in ((-1, ""), (500, "_windows"), (3000, "")):
            made = gpu(90, **sizes | long | {"window_left": left})
            assert made["kernel"].endswith(f"_d{head_dim}{name}")
    for dims, tile in (((192, 128), 192), ((96, 128), 128), ((128, 64), 128), ((192, 192), 256)):
        dims = dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
        made = gpu(90, **sizes | dims | {"seqlen_k": 1024})
        assert made["kernel"].endswith(f"_d{tile}") and made["backend"] == "sm90"
    decode = sizes | {"seqlen_q": 1, "seqlen_k": 4096, "heads_q": 32, "heads_k": 8}
    for fast in (
        {"page_size": 16},
        {"block_q": 96, "block_k": 96},
        decode,
        few | {"page_size": 16},
    ):
        assert gpu(90, **(sizes | fast))["backend"] == "sm90"
    assert gpu(90, **sizes, bias=True)["kernel"].endswith("_d128_general")
    dropout = sizes | {"head_dim": 64, "seqlen_k": 1024, "dropout": True}
    assert gpu(90, **dropout)["kernel"].endswith("_d64_dropout")
    odd = sizes | {"bias": True, "bias_boxes": False}
    assert gpu(90, **odd)["backend"] == "sm80"
    assert any("a bias of this kind" in text for text in gpu(90, **odd)["reasons"])
    assert gpu(90, **odd, any_speed=True)["backend"] == "sm90"
    for other in ({"boxes": False},):
        made = gpu(90, **(sizes | other))
        assert made["backend"] == "sm80"
        assert any("sm90" in text and "16 bytes" in text for text in made["reasons"])
    many = decode | {"batch": 32, "heads_q": 8}
    for slow in ({"block_q": 64, "block_k": 64}, {"page_size": 2}, {"seqlen_k": 0}, many):
        made = gpu(90, **(sizes | slow))
        assert made["backend"] == "sm80"
        assert any("sm90" in text and "slower" in text for text in made["reasons"])
        assert gpu(90, **(sizes | slow), any_speed=True)["backend"] == "sm90"
    for arch in (80, 89, 100, 120):
        assert gpu(arch, **sizes)["backend"] == "sm80"


def test_plan_of_a_gpu_splits_and_packs():
    if not cuda_rows("forward"):
        pytest.skip("this build has no CUDA attention kernels")
    sizes = {"dtype": "bfloat16", "head_dim": 128, "heads_q": 32, "heads_k": 4}
    decode = gpu(90, **sizes, seqlen_q=1, seqlen_k=32768)
    assert decode["group"] == 8 and 16 < decode["num_splits"] <= 128
    assert decode["blocks"] == 4 * decode["num_splits"] and decode["workspace_bytes"] > 0
    train = gpu(90, **sizes, batch=4, seqlen_q=4096, seqlen_k=4096)
    assert train["group"] == 1 and train["num_splits"] == 1 and train["workspace_bytes"] == 0
    masked = gpu(90, **sizes, seqlen_q=1, seqlen_k=32768, block_q=128, block_k=128)
    assert masked["group"] == 1


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_plan_of_a_family_that_cannot(family):
    made = plan(backend=family, head_dim=64)
    assert made["kernel"] is None
    assert any(family in reason for reason in made["reasons"])


@pytest.mark.parametrize("block", [1, 7, 16, 48, 64, 100, 128, 256])
def test_plan_tiles_divide_the_blocks(block):
    for name in ("forward", "backward"):
        made = plan(**{"pass": name}, head_dim=64, block_q=block, block_k=block)
        assert block % made["block_m"] == 0 and block % made["block_n"] == 0


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_plan_scratch_is_linear_in_the_length(name):
    sizes = [
        plan(**{"pass": name}, seqlen_q=n, seqlen_k=n, head_dim=64, threads=8)["workspace_bytes"]
        for n in (1 << 14, 1 << 17, 1 << 20)
    ]
    assert sizes[2] <= 65 * sizes[0] + (1 << 20)


def test_plan_uses_all_threads_for_one_long_sequence():
    made = plan(
        batch=1, heads_q=1, heads_k=1, seqlen_q=8192, seqlen_k=8192, threads=16, head_dim=64
    )
    assert made["workers"] == 16
    decode = plan(
        batch=1, heads_q=8, heads_k=1, seqlen_q=1, seqlen_k=65536, threads=16, head_dim=64
    )
    assert decode["num_splits"] > 1 and decode["workers"] > 1
    tiny = plan(batch=1, heads_q=1, heads_k=1, seqlen_q=1, seqlen_k=8, threads=16, head_dim=64)
    assert tiny["workers"] == 1 and tiny["num_splits"] == 1


def test_plan_refuses_nonsense():
    for wrong in ({"nonsense": 1}, {"dtype": "int8"}, {"pass": "sideways"}, {"device": "tpu"}):
        with pytest.raises(ValueError, match="flash_attn"):
            host.plan(wrong)
    with pytest.raises(ValueError, match="multiple"):
        plan(heads_q=5, heads_k=2)


def test_explain_text(device):
    q = torch.randn(1, 9, 2, 16, device=device)
    explained = flash_attn.explain(q, q, q, causal=True, softcap=2.0)
    text = str(explained)
    assert explained.backend in ("cpu", "sm80", "sm90")
    assert set(explained.plans) == {"forward", "backward"}
    for word in ("forward: ", "backward: ", "tiles of", "not taken: "):
        assert word in text


def test_explain_reference_and_missing():
    q = torch.randn(1, 9, 2, 16)
    reference = flash_attn.explain(q, q, q, backend="reference")
    assert reference.backend == "reference" and "quadratic" in str(reference)
    missing = flash_attn.explain(q, q, q, backend="sm90")
    assert missing.backend is None and "no kernel fits" in str(missing)


def test_explain_of_meta_tensors():
    q = torch.empty(1, 9, 2, 8, device="meta")
    assert "meta tensors hold no values" in str(flash_attn.explain(q, q, q, causal=True))


def test_explain_runs_nothing_and_raises_as_the_call_does():
    q = torch.empty(1, 1 << 20, 64, 128, device="meta")
    with pytest.raises(ValueError, match="num_heads"):
        flash_attn.explain(q, q[:, :, :3], q[:, :, :3])
    big = torch.empty(128).expand(1, 1 << 22, 64, 128)
    assert flash_attn.explain(big, big, big).backend == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_check_prints_both_errors(dtype, device):
    q, k, v = (torch.randn(1, 20, 2, 16, device=device).to(dtype) for _ in range(3))
    bias = torch.randn(2, 20, 20, device=device).to(dtype)
    found = flash_attn.check(q, k, v, causal=True, attn_bias=bias, dropout_p=0.2)
    names = [row[0] for row in found.rows]
    assert found.ok, str(found)
    assert names[:2] == ["out", "lse"] and len(names) == 6
    assert all(name in str(found) for name in names)
