#include "models/load_model.h"

#include "base/log.h"
#include "headrace/error.h"

namespace headrace {
namespace {

at::ScalarType resolve_dtype(const LoadSettings& settings, const ModelConfig& config, const CheckpointFolder& folder) {
  if (settings.torch_dtype != "auto") return scalar_type_of(settings.torch_dtype, "model.torch_dtype");
  if (const auto named = config.dtype()) return scalar_type_of(*named, config.origin());
  for (const std::string& name : folder.names()) {
    const auto type = scalar_type(folder.find(name)->info->dtype);
    if (type && at::isFloatingType(*type)) return scalar_type_of(torch_dtype_of(*type), name);
  }
  return at::kFloat;
}

// Both matrices are in the file and differ: the flag says tied, the weights say otherwise; the weights win.
bool file_unties(const CheckpointFolder& folder) {
  const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
  return folder.find(head) && folder.find(embedding) && !folder.same_bits(head, embedding);
}

}  // namespace

at::ScalarType scalar_type_of(const std::string& torch_dtype, const std::string& origin) {
  if (torch_dtype == "float32") return at::kFloat;
  if (torch_dtype == "bfloat16") return at::kBFloat16;
  fail("{}: dtype \"{}\" cannot be trained; the engine trains float32 and bfloat16. Set model.torch_dtype to one of them.",
       origin, torch_dtype);
}

std::string torch_dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    default: return c10::toString(type);
  }
}

std::vector<NamedTensor> named_parameters(const Decoder& decoder) {
  std::vector<NamedTensor> named;
  for (const ParameterInfo& info : decoder.parameters().layout().entries()) {
    named.push_back({info.name, decoder.parameters().weight(info.name)});
  }
  return named;
}

LoadedModel load_model(const std::filesystem::path& folder, const LoadSettings& settings, at::Device device) {
  ModelConfig config = ModelConfig::read(folder);
  const Family& family = find_family(config);
  const CheckpointFolder checkpoint(folder);
  DecoderSpec spec = family.spec(config);
  if (settings.output_router_logits) spec.output_router_logits = *settings.output_router_logits;
  if (settings.router_aux_loss_coef) spec.router_aux_loss_coef = *settings.router_aux_loss_coef;
  for (LayerSpec& layer : spec.layers) layer.attention.deterministic = settings.deterministic;
  if (spec.tie_word_embeddings && file_unties(checkpoint)) {
    log_warning(fmt::format("{} says tie_word_embeddings, but lm_head.weight differs from the embedding: loaded untied",
                            config.origin()));
    spec.tie_word_embeddings = false;
  }
  WeightMap map = family.weight_map(spec);
  if (spec.tie_word_embeddings) map.ignored.emplace_back("lm_head\\.weight");
  Decoder decoder(spec, resolve_dtype(settings, config, checkpoint), device);
  LoadedWeights weights = load_weights(checkpoint, map, named_parameters(decoder));
  return {folder, std::move(config), &family, std::move(decoder), std::move(weights)};
}

SaveRequest save_request(const LoadedModel& model, const std::filesystem::path& folder) {
  SaveRequest request;
  request.folder = folder;
  request.parameters = named_parameters(model.decoder);
  request.pieces = model.weights.pieces;
  request.config = model.config.for_saving(torch_dtype_of(model.decoder.dtype()));
  // A file that untied its head must not be saved as tied: transformers would then drop the head.
  if (request.config.contains("tie_word_embeddings"))
    request.config["tie_word_embeddings"] = model.decoder.spec().tie_word_embeddings;
  request.source = model.path;
  request.unknown = model.weights.unknown;
  return request;
}

}  // namespace headrace
