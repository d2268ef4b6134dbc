// SPDX-License-Identifier: BSD-3-Clause
// The one table of compiled kernels. Rows live in the library that holds the kernels; the planner
// walks them from the newest architecture to the oldest and takes the first that fits
// (plan/select.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/params.h"
#include "plan/device.h"

namespace flash_attn {

struct Plan;

enum class Pass : uint8_t { kForward, kBackward, kDelta };
enum class Score : uint8_t { kPlain, kGeneral };  // kGeneral: softcap, bias, ALiBi, dropout as well

// Runs body(worker) for worker in [0, workers), side by side where it can. `body` must not throw.
using ParallelFor = void (*)(int workers, void (*body)(int worker, void* context), void* context);

using CpuLaunch = void (*)(const AttnParams&, const Plan&, void* workspace, ParallelFor);
// Returns a cudaError_t as int; `stream` is a cudaStream_t.
using CudaLaunch = int (*)(const AttnParams&, const Plan&, void* workspace, void* stream);

struct KernelRow {
  const char* name;    // family, pass and dtype: "cpu_avx512_forward_f32"
  const char* family;  // what `backend=` names: "cpu", "sm80", "sm90"
  Pass pass;
  int arch;      // lowest compute capability * 10 it runs on; 0 is the CPU
  uint32_t isa;  // CPU features it needs
  DType dtype;
  int head_dim, head_dim_v;  // largest it takes; 0 is any
  Score score;
  int block_m, block_n;  // queries and keys of a tile
  int64_t (*worker_bytes)(const AttnParams&,
                          int block_m,
                          int block_n);  // CPU scratch of one worker
  // CPU scratch of all together; on a GPU the whole workspace. Null: none.
  int64_t (*shared_bytes)(const AttnParams&, int block_m, int num_splits);
  CpuLaunch cpu;
  CudaLaunch cuda;
  int arch_end = 0;    // first compute capability * 10 it no longer runs on; 0 is no end
  int smem_bytes = 0;  // shared memory of a block; CUDA only
  // Shared memory without which another row is faster: blocks of this one would not fit side by
  // side.
  int smem_room = 0;
  // Whether the problem and its tensors are as the kernel wants them; null: it takes any. `wants`
  // says what that is.
  bool (*takes)(const AttnParams&) = nullptr;
  const char* wants = nullptr;
  // Whether it is the fastest for a problem that it takes; asked where the family is left open.
  // Null: always.
  bool (*pays)(const AttnParams&) = nullptr;
};

struct KernelList {
  const KernelRow* rows;
  size_t size;
};

// What a library's module hands out as the capsule "flash_attn.kernel_rows".
struct KernelTable {
  const KernelList* const* lists;
  size_t size;
  uint32_t (*cpu_isa)() = nullptr;  // what this machine runs (bits of Isa); null in GPU libraries
  // Compute capability * 10 for which the code that the current CUDA device takes was compiled (a
  // newer GPU translates older PTX); 0 when the library holds none for it. Null in the CPU's.
  int (*cuda_code)() = nullptr;
};
extern const KernelTable kCpuTable;   // csrc/cpu/rows.cpp, in _C_cpu
extern const KernelTable kCudaTable;  // csrc/cuda/inst/rows.cpp, in _C_cuda

constexpr const char* kKernelTableCapsule = "flash_attn.kernel_rows";

}  // namespace flash_attn
