// upcycle: a dense checkpoint becomes a Mixture-of-Experts one, file to file. Every expert starts as a bit-for-bit copy of the
// layer's MLP; routing weights sum to 1, so the new model computes what the dense one did until training moves the experts
// apart. Flow: `headrace upcycle` -> [upcycle] -> a folder that `headrace finetune` and transformers load. Source: sparse
// upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055).
#pragma once

#include <cstdint>
#include <filesystem>

namespace headrace {

struct UpcycleSettings {
  int64_t num_experts = 8;
  int64_t top_k = 2;
  uint64_t seed = 0;
  /// Standard deviation of the random router weights. 0.02 is the initializer_range that transformers gives routers: with
  /// normed inputs of hidden_size 4096 the logits have a deviation of 1.3, enough that tokens spread over the experts at once
  /// (equal experts get different gradients only through different tokens) and no expert is starved.
  double router_std = 0.02;
  uint64_t max_shard_size = 50'000'000'000;  // bytes, as in SaveRequest
};

/// llama and mistral become mixtral, qwen3 becomes qwen3_moe. Tensors keep their dtype; the router gets the dtype of the
/// model's MLP. The router's values depend on seed, layer and place only and are the same on every machine. config.json is
/// rewritten for the new class, with every value written out whose class default differs; tokenizer and other files are carried
/// along. `out` must not exist; it appears complete or not at all. Throws UserError: another family (a MoE too), num_experts <
/// 2, top_k not in [1, num_experts], a router_std that is not positive and finite, a missing or misshapen tensor, a quantised
/// model, a feature that the MoE class lacks (biases for mixtral, an activation other than silu, windows on some layers only).
void upcycle(const std::filesystem::path& dense, const std::filesystem::path& out, const UpcycleSettings& settings);

}  // namespace headrace
