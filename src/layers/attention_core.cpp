#include "layers/attention_core.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>

#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace headrace {
namespace {

enum class Path { cpu_flash, cuda_flash, cuda_cudnn, reference };

int64_t num_documents(const TokenBatch& batch) { return static_cast<int64_t>(batch.document_bounds.size()) - 1; }

bool equally_long(const TokenBatch& batch) {
  return batch.max_document_length * num_documents(batch) == batch.document_bounds.back();
}

Path path_of(const at::Tensor& q, const TokenBatch& batch, const AttentionCoreConfig& config) {
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  const int64_t head_dim = q.size(-1);
  if (q.is_cuda()) {
    if (!half || head_dim > 256) return Path::reference;
    // A window as long as the documents hides nothing.
    const bool windowed = config.sliding_window > 0 && config.sliding_window < batch.max_document_length;
    if (windowed || config.deterministic || head_dim > 128 || head_dim % 8 != 0) return Path::cuda_flash;
    return equally_long(batch) ? Path::cuda_cudnn : Path::cuda_flash;
  }
  return half || q.scalar_type() == at::kFloat || q.scalar_type() == at::kDouble ? Path::cpu_flash : Path::reference;
}

// [length, heads, d] of one document as [1, num_heads, length, d], key/value heads repeated for their query heads.
at::Tensor heads_first(const at::Tensor& x, const TokenBatch& batch, int64_t document, int64_t num_heads) {
  const int64_t begin = batch.document_bounds[document];
  const at::Tensor rows = x.narrow(0, begin, batch.document_bounds[document + 1] - begin).transpose(0, 1);
  const int64_t repeat = num_heads / x.size(1);
  return (repeat == 1 ? rows : rows.repeat_interleave(repeat, 0)).unsqueeze(0);
}

// Puts [1, num_heads, length, d] into the rows of one document of `target` [num_tokens, heads, d]; heads that were repeated are
// summed.
void put_rows(const at::Tensor& target, const TokenBatch& batch, int64_t document, const at::Tensor& x) {
  const int64_t begin = batch.document_bounds[document];
  at::Tensor rows = x.squeeze(0);
  if (rows.size(0) != target.size(1)) {
    rows = rows.reshape({target.size(1), rows.size(0) / target.size(1), rows.size(1), rows.size(2)}).sum(1);
  }
  target.narrow(0, begin, rows.size(1)).copy_(rows.transpose(0, 1));
}

// true = may not look: later keys, and keys further back than the window.
at::Tensor hidden_keys(int64_t length, const AttentionCoreConfig& config, const at::Device& device) {
  const at::Tensor position = at::arange(length, at::TensorOptions().dtype(at::kLong).device(device));
  const at::Tensor distance = position.unsqueeze(1) - position.unsqueeze(0);  // query - key
  at::Tensor hidden = distance.lt(0);
  if (config.sliding_window > 0) hidden = hidden.logical_or(distance.ge(config.sliding_window));
  return hidden;
}

// Additive mask for a window that really hides something; undefined when causal alone says it all.
std::optional<at::Tensor> window_mask(int64_t length, const AttentionCoreConfig& config, const at::Tensor& like) {
  if (config.sliding_window == 0 || length <= config.sliding_window) return std::nullopt;
  return at::zeros({length, length}, like.options())
      .masked_fill_(hidden_keys(length, config, like.device()), -std::numeric_limits<double>::infinity());
}

std::optional<int64_t> window_left(const AttentionCoreConfig& config) {
  return config.sliding_window > 0 ? std::optional<int64_t>(config.sliding_window - 1) : std::nullopt;
}
std::optional<int64_t> window_right(const AttentionCoreConfig& config) {
  return config.sliding_window > 0 ? std::optional<int64_t>(0) : std::nullopt;
}

AttentionCoreSaved cpu_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const TokenBatch& batch,
                               const AttentionCoreConfig& config) {
  AttentionCoreSaved saved;
  saved.out = at::empty_like(q, q.options(), at::MemoryFormat::Contiguous);
  for (int64_t d = 0; d < num_documents(batch); ++d) {
    const at::Tensor query = heads_first(q, batch, d, q.size(1));
    const auto mask = window_mask(query.size(2), config, q);
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(query, heads_first(k, batch, d, q.size(1)),
                                                                      heads_first(v, batch, d, q.size(1)), 0.0,
                                                                      /*is_causal=*/!mask.has_value(), mask, config.scale);
    put_rows(saved.out, batch, d, out);
    saved.log_sum_exp.push_back(lse);
  }
  return saved;
}

AttentionCoreGrads cpu_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionCoreSaved& saved, const TokenBatch& batch, const AttentionCoreConfig& config) {
  const auto contiguous = at::MemoryFormat::Contiguous;
  AttentionCoreGrads grads{at::empty_like(q, q.options(), contiguous), at::empty_like(k, k.options(), contiguous),
                           at::empty_like(v, v.options(), contiguous)};
  const int64_t heads = q.size(1);
  for (int64_t d = 0; d < num_documents(batch); ++d) {
    const at::Tensor query = heads_first(q, batch, d, heads);
    const auto mask = window_mask(query.size(2), config, q);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads_first(dout, batch, d, heads), query, heads_first(k, batch, d, heads), heads_first(v, batch, d, heads),
        heads_first(saved.out, batch, d, heads), saved.log_sum_exp[d], 0.0, /*is_causal=*/!mask.has_value(), mask,
        config.scale);
    put_rows(grads.dq, batch, d, dq);
    put_rows(grads.dk, batch, d, dk);
    put_rows(grads.dv, batch, d, dv);
  }
  return grads;
}

AttentionCoreSaved flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const TokenBatch& batch,
                                 const AttentionCoreConfig& config) {
  const int64_t longest = batch.max_document_length;
  auto [out, lse, rng_state, unused, debug] =
      at::_flash_attention_forward(q, k, v, batch.cu_seqlens, batch.cu_seqlens, longest, longest, 0.0, /*is_causal=*/true,
                                   /*return_debug_mask=*/false, config.scale, window_left(config), window_right(config));
  return {out, {lse}, rng_state, unused};
}

// FA2's backward asks libtorch's context whether it must repeat; nobody else shall.
class DeterministicBackward {
 public:
  explicit DeterministicBackward(bool on) : on_(on), before_(at::globalContext().deterministicAlgorithms()) {
    if (!on_) return;
    fill_before_ = at::globalContext().deterministicFillUninitializedMemory();
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  ~DeterministicBackward() {
    if (!on_) return;
    at::globalContext().setDeterministicAlgorithms(before_, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(fill_before_);
  }
  DeterministicBackward(const DeterministicBackward&) = delete;
  DeterministicBackward& operator=(const DeterministicBackward&) = delete;

 private:
  bool on_, before_, fill_before_ = true;
};

AttentionCoreGrads flash_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCoreSaved& saved, const TokenBatch& batch, const AttentionCoreConfig& config) {
  const int64_t longest = batch.max_document_length;
  const DeterministicBackward guard(config.deterministic);
  auto [dq, dk, dv] = at::_flash_attention_backward(
      dout, q, k, v, saved.out, saved.log_sum_exp[0], batch.cu_seqlens, batch.cu_seqlens, longest, longest, 0.0,
      /*is_causal=*/true, saved.rng_state, saved.unused, config.scale, window_left(config), window_right(config));
  return {dq, dk, dv};
}

// [num_tokens, heads, d] of equally long documents as [documents, heads, length, d]; a view.
at::Tensor dense(const at::Tensor& x, const TokenBatch& batch) {
  return x.view({num_documents(batch), batch.max_document_length, x.size(1), x.size(2)}).transpose(1, 2);
}
at::Tensor packed(const at::Tensor& x) { return x.transpose(1, 2).reshape({x.size(0) * x.size(2), x.size(1), x.size(3)}); }

AttentionCoreSaved cudnn_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const TokenBatch& batch,
                                 const AttentionCoreConfig& config) {
  const auto result = at::_scaled_dot_product_cudnn_attention(dense(q, batch), dense(k, batch), dense(v, batch), std::nullopt,
                                                              /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true,
                                                              /*return_debug_mask=*/false, config.scale);
  return {packed(std::get<0>(result)), {std::get<1>(result)}, std::get<6>(result), std::get<7>(result)};
}

AttentionCoreGrads cudnn_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCoreSaved& saved, const TokenBatch& batch, const AttentionCoreConfig& config) {
  const int64_t length = batch.max_document_length;
  const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      dense(dout, batch), dense(q, batch), dense(k, batch), dense(v, batch), dense(saved.out, batch), saved.log_sum_exp[0],
      saved.rng_state, saved.unused, /*attn_bias=*/{}, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, length, length, 0.0,
      /*is_causal=*/true, config.scale);
  return {packed(dq), packed(dk), packed(dv)};
}

at::Tensor reference_probabilities(const at::Tensor& query, const at::Tensor& key, const AttentionCoreConfig& config) {
  const at::Tensor scores = at::matmul(query, key.transpose(-1, -2)).mul_(config.scale);
  return scores.masked_fill_(hidden_keys(query.size(2), config, query.device()), -std::numeric_limits<double>::infinity())
      .softmax(-1);
}

}  // namespace

AttentionCoreSaved attention_core_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                          const TokenBatch& batch, const AttentionCoreConfig& config) {
  if (q.size(0) == 0) return {at::empty_like(q), {}, {}, {}};
  switch (path_of(q, batch, config)) {
    case Path::cpu_flash: return cpu_forward(q, k, v, batch, config);
    case Path::cuda_flash: return flash_forward(q, k, v, batch, config);
    case Path::cuda_cudnn: return cudnn_forward(q, k, v, batch, config);
    default: return attention_core_reference_forward(q, k, v, batch, config);
  }
}

AttentionCoreGrads attention_core_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionCoreSaved& saved, const TokenBatch& batch,
                                           const AttentionCoreConfig& config) {
  if (q.size(0) == 0) return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  switch (path_of(q, batch, config)) {
    case Path::cpu_flash: return cpu_backward(dout, q, k, v, saved, batch, config);
    case Path::cuda_flash: return flash_backward(dout, q, k, v, saved, batch, config);
    case Path::cuda_cudnn: return cudnn_backward(dout, q, k, v, saved, batch, config);
    default: return attention_core_reference_backward(dout, q, k, v, batch, config);
  }
}

AttentionCoreSaved attention_core_reference_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const TokenBatch& batch, const AttentionCoreConfig& config) {
  AttentionCoreSaved saved;
  saved.out = at::empty_like(q, q.options(), at::MemoryFormat::Contiguous);
  const int64_t heads = q.size(1);
  for (int64_t d = 0; d < num_documents(batch); ++d) {
    const at::Tensor p = reference_probabilities(heads_first(q, batch, d, heads), heads_first(k, batch, d, heads), config);
    put_rows(saved.out, batch, d, at::matmul(p, heads_first(v, batch, d, heads)));
  }
  return saved;
}

AttentionCoreGrads attention_core_reference_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v, const TokenBatch& batch,
                                                     const AttentionCoreConfig& config) {
  const auto contiguous = at::MemoryFormat::Contiguous;
  AttentionCoreGrads grads{at::empty_like(q, q.options(), contiguous), at::empty_like(k, k.options(), contiguous),
                           at::empty_like(v, v.options(), contiguous)};
  const int64_t heads = q.size(1);
  for (int64_t d = 0; d < num_documents(batch); ++d) {
    const at::Tensor query = heads_first(q, batch, d, heads), key = heads_first(k, batch, d, heads);
    const at::Tensor grad = heads_first(dout, batch, d, heads);
    const at::Tensor p = reference_probabilities(query, key, config);
    const at::Tensor dp = at::matmul(grad, heads_first(v, batch, d, heads).transpose(-1, -2));
    const at::Tensor ds = p * (dp - (dp * p).sum(-1, /*keepdim=*/true)) * config.scale;
    put_rows(grads.dq, batch, d, at::matmul(ds, key));
    put_rows(grads.dk, batch, d, at::matmul(ds.transpose(-1, -2), query));
    put_rows(grads.dv, batch, d, at::matmul(p.transpose(-1, -2), grad));
  }
  return grads;
}

}  // namespace headrace
