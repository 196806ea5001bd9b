// DecoderSpec: what a decoder is made of, as data. A family turns config.json into one; decoder.cpp runs it.
// Flow: config.json -> ModelConfig -> family -> [DecoderSpec] -> Decoder.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "config/rope_parameters.h"
#include "layers/attention.h"
#include "layers/moe.h"

namespace headrace {

struct MlpConfig {
  int64_t hidden_size = 0, intermediate_size = 0;
  bool bias = false;
};

struct LayerSpec {
  AttentionConfig attention;
  std::variant<MlpConfig, MoeConfig> feed_forward;
  bool is_moe() const { return std::holds_alternative<MoeConfig>(feed_forward); }
  const MlpConfig& mlp() const { return std::get<MlpConfig>(feed_forward); }
  const MoeConfig& moe() const { return std::get<MoeConfig>(feed_forward); }
};

struct DecoderSpec {
  std::string model_type;
  int64_t vocab_size = 0, hidden_size = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  int64_t padding_idx = -1;  // row of the embedding without look-up gradient; -1: none
  RopeParameters rope;
  bool output_router_logits = false;  // add the load-balancing loss
  double router_aux_loss_coef = 0.0;
  double initializer_range = 0.02;
  std::vector<LayerSpec> layers;

  int64_t head_dim() const { return layers.at(0).attention.head_dim; }
  /// Experts of the sparse layers; 0 when there is none.
  int64_t num_experts() const;
};

}  // namespace headrace
