// What most families share: the base decoder's config keys and tensor names (the decoder of Llama).
#pragma once

#include "checkpoint/weight_map.h"
#include "config/model_config.h"
#include "models/decoder_spec.h"

namespace headrace {

/// Defaults of a family's transformers class, where they differ from the shared ones.
struct FamilyDefaults {
  int64_t vocab_size = 32000, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32, num_attention_heads = 32;
  int64_t num_key_value_heads = 0;  // 0: as num_attention_heads
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6, rope_theta = 10000.0;
};

/// Everything but biases, q/k norm, windows and the kind of feed-forward, which the family sets on the result. Each layer gets
/// the dense MLP of intermediate_size. Throws UserError: hidden_act other than silu, attention_dropout > 0, head counts that do
/// not divide, a quantised checkpoint.
DecoderSpec base_spec(const ModelConfig& config, const FamilyDefaults& defaults);

/// Qwen3's window, dense and MoE: 0 (none) unless use_sliding_window; then sliding_window, 4096 when the key is absent, none
/// when it is null. Which layers have it is the family's rule.
int64_t qwen3_sliding_window(const ModelConfig& config);

/// Names that are equal on the hub and in memory (all but the experts).
WeightMap base_weight_map(const DecoderSpec& spec);

/// How a family names its experts on the hub.
struct ExpertNames {
  const char* router;            // "model.layers.{}.mlp.gate.weight"
  const char *gate, *up, *down;  // "model.layers.{}.mlp.experts.{}.gate_proj.weight", with layer and expert
};

/// Adds the sparse layers' tensors: per-expert hub tensors to the stacked parameters, and the in-memory form.
void add_expert_pieces(WeightMap& map, const DecoderSpec& spec, const ExpertNames& names);

}  // namespace headrace
