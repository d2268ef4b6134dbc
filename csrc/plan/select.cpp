// SPDX-License-Identifier: BSD-3-Clause
#include "plan/select.h"

#include <cstring>

namespace flash_attn {

namespace {

// The first thing that keeps a row from a problem; kNone: it fits.
enum class Misfit : uint8_t {
  kNone,
  kDevice,
  kFamily,
  kDType,
  kArch,
  kArchEnd,
  kIsa,
  kHeadDim,
  kHeadDimV,
  kScore,
  kLayout,
  kSlower,
  kSmem
};

// Plain kernels scale after the row's maximum is taken, which turns its order round below 0; and in
// fp32, where a scale next to 0 is 0 and the weight of a hidden key exp(0 * -inf).
bool needs_general(const AttnParams& p) {
  return p.softcap != 0.0 || p.bias.ptr != nullptr || p.alibi.slopes != nullptr ||
         p.dropout.philox != nullptr || !(p.softmax_scale > 1e-30);
}

int smem_needed(const KernelRow& row) {
  return max_of(row.smem_bytes, row.smem_room);
}

Misfit misfit(const KernelRow& row,
              const AttnParams& p,
              const DeviceInfo& device,
              const char* family) {
  if ((row.arch == 0) != (device.arch == 0)) return Misfit::kDevice;
  if (family != nullptr && *family != 0 && std::strcmp(family, row.family) != 0) {
    return Misfit::kFamily;
  }
  if (row.dtype != p.dtype) return Misfit::kDType;
  if (row.arch > device.arch) return Misfit::kArch;
  if (row.arch_end != 0 && device.arch >= row.arch_end) return Misfit::kArchEnd;
  if ((row.isa & ~device.isa) != 0) return Misfit::kIsa;
  if (row.head_dim != 0 && p.head_dim > row.head_dim) return Misfit::kHeadDim;
  if (row.head_dim_v != 0 && p.head_dim_v > row.head_dim_v) return Misfit::kHeadDimV;
  if (row.score == Score::kPlain && needs_general(p)) return Misfit::kScore;
  if (row.takes != nullptr && !row.takes(p)) return Misfit::kLayout;
  const bool open = (family == nullptr || *family == 0) && !device.any_speed;
  if (open && row.pays != nullptr && !row.pays(p)) return Misfit::kSlower;
  if (row.arch != 0 && smem_needed(row) > device.smem_per_block) return Misfit::kSmem;
  return Misfit::kNone;
}

template <class Body>
void for_each_row(const KernelTable& table, Pass pass, const Body& body) {
  for (size_t l = 0; l < table.size; ++l) {
    const KernelList& list = *table.lists[l];
    for (size_t r = 0; r < list.size; ++r) {
      if (list.rows[r].pass == pass && !body(list.rows[r])) return;
    }
  }
}

std::string isa_text(uint32_t isa) {
  struct Name {
    uint32_t bit;
    const char* text;
  };
  const Name names[] = {{kIsaAvx2, "AVX2"},
                        {kIsaAvx512, "AVX-512"},
                        {kIsaAvx512Bf16, "AVX-512 BF16"},
                        {kIsaNeon, "NEON"}};
  std::string text;
  for (const Name& name : names) {
    if ((isa & name.bit) != 0) text += (text.empty() ? "" : ", ") + std::string(name.text);
  }
  return text.empty() ? "no vector instructions" : text;
}

std::string capability(int arch) {
  return std::to_string(arch / 10) + "." + std::to_string(arch % 10);
}

std::string misfit_text(const KernelRow& row,
                        Misfit why,
                        const AttnParams& p,
                        const DeviceInfo& device,
                        const char* family) {
  const auto at_most = [](const char* name, int limit, int got) {
    return std::string("takes ") + name + " up to " + std::to_string(limit) + ", got " +
           std::to_string(got);
  };
  switch (why) {
    case Misfit::kNone: return "fits, but a row before it does too";
    case Misfit::kDevice:
      return row.arch == 0 ? "runs on the CPU, the tensors are on a GPU"
                           : "runs on a GPU, the tensors are on the CPU";
    case Misfit::kFamily:
      return std::string("belongs to backend ") + row.family + ", asked for was " + family;
    case Misfit::kDType:
      return std::string("takes ") + dtype_name(row.dtype) + ", got " + dtype_name(p.dtype);
    case Misfit::kArch:
      return "needs compute capability " + capability(row.arch) +
             ", this GPU, or the code that this build has for it, has " + capability(device.arch);
    case Misfit::kArchEnd:
      return "runs below compute capability " + capability(row.arch_end) + ", this GPU has " +
             capability(device.arch);
    case Misfit::kIsa:
      return "needs " + isa_text(row.isa) + ", this CPU has " + isa_text(device.isa) +
             " (as far as FLASH_ATTN_CPU_ISA allows)";
    case Misfit::kHeadDim: return at_most("head_dim", row.head_dim, p.head_dim);
    case Misfit::kHeadDimV: return at_most("head_dim_v", row.head_dim_v, p.head_dim_v);
    case Misfit::kScore:
      return "has no softcap, bias, ALiBi or dropout, and takes positive scales only";
    case Misfit::kLayout: return std::string("wants ") + row.wants;
    case Misfit::kSlower:
      return std::string(
                 "is slower than another for so few keys or queries, or such small blocks or "
                 "pages") +
             (p.bias.ptr != nullptr ? ", or a bias of this kind" : "");
    case Misfit::kSmem:
      return "needs " + std::to_string(smem_needed(row)) +
             " bytes of shared memory a block, this GPU gives " +
             std::to_string(device.smem_per_block);
  }
  return "";
}

}  // namespace

const KernelRow* select_row(const AttnParams& params,
                            Pass pass,
                            const DeviceInfo& device,
                            const KernelTable& table,
                            const char* family) {
  const KernelRow* found = nullptr;
  for_each_row(table, pass, [&](const KernelRow& row) {
    if (misfit(row, params, device, family) == Misfit::kNone) found = &row;
    return found == nullptr;
  });
  return found;
}

std::vector<std::string> row_reasons(const AttnParams& params,
                                     Pass pass,
                                     const DeviceInfo& device,
                                     const KernelTable& table,
                                     const char* family) {
  const KernelRow* chosen = select_row(params, pass, device, table, family);
  std::vector<std::string> reasons;
  bool any = false;
  for_each_row(table, pass, [&](const KernelRow& row) {
    any = true;
    if (&row == chosen) return true;
    const Misfit why = misfit(row, params, device, family);
    reasons.push_back(std::string(row.name) + ": " + misfit_text(row, why, params, device, family));
    return true;
  });
  if (!any) reasons.push_back(std::string("no ") + pass_name(pass) + " kernel is built");
  return reasons;
}

std::vector<std::string> nearest_reasons(const AttnParams& params,
                                         Pass pass,
                                         const DeviceInfo& device,
                                         const KernelTable& table,
                                         const char* family) {
  Misfit nearest = Misfit::kNone;
  for_each_row(table, pass, [&](const KernelRow& row) {
    nearest = max_of(nearest, misfit(row, params, device, family));
    return true;
  });
  struct Reason {
    const char* name;
    std::string text;
    int others;
  };
  std::vector<Reason> found;
  for_each_row(table, pass, [&](const KernelRow& row) {
    const Misfit why = misfit(row, params, device, family);
    if (why != nearest || why == Misfit::kNone) return true;
    const std::string text = misfit_text(row, why, params, device, family);
    for (Reason& reason : found) {
      if (reason.text == text) return ++reason.others, true;
    }
    found.push_back({row.name, text, 0});
    return true;
  });
  std::vector<std::string> reasons;
  for (const Reason& reason : found) {
    const std::string others =
        reason.others > 0 ? " (and " + std::to_string(reason.others) + " more)" : "";
    reasons.push_back(reason.name + others + " " + reason.text);
  }
  if (reasons.empty()) reasons.push_back(std::string("no ") + pass_name(pass) + " kernel is built");
  return reasons;
}

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kBackward: return "backward";
    case Pass::kDelta: return "delta";
  }
  return "";
}

const char* dtype_name(DType type) {
  switch (type) {
    case DType::kF64: return "float64";
    case DType::kF32: return "float32";
    case DType::kF16: return "float16";
    case DType::kBF16: return "bfloat16";
  }
  return "";
}

}  // namespace flash_attn
