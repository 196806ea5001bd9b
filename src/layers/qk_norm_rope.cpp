#include "layers/qk_norm_rope.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda_launch.h"
#include "kernels/qk_norm_rope_cuda.h"
#include "layers/norm.h"

namespace headrace {
namespace {

// Views of the three parts.
Heads split_heads(const at::Tensor& qkv, const AttentionConfig& config) {
  const int64_t nq = config.num_heads, nkv = config.num_key_value_heads;
  const at::Tensor heads = qkv.view({qkv.size(0), nq + 2 * nkv, config.head_dim});
  return {heads.narrow(1, 0, nq), heads.narrow(1, nq, nkv), heads.narrow(1, nq + nkv, nkv)};
}

at::Tensor position_heads(const at::Tensor& raw, const at::Tensor& weight, const AttentionConfig& config,
                          const RopeTables& rope) {
  return rope_forward(config.qk_norm ? rms_norm_forward(raw, weight, config.rms_norm_eps).y : raw, rope);
}

at::Tensor position_heads_backward(const at::Tensor& grad, const at::Tensor& raw, const at::Tensor& weight,
                                   const at::Tensor& weight_grad, const AttentionConfig& config, const RopeTables& rope) {
  const at::Tensor unrotated = rope_backward(grad, rope);
  if (!config.qk_norm) return unrotated;
  const NormSaved saved = rms_norm_forward(raw, weight, config.rms_norm_eps).saved;
  return rms_norm_backward(unrotated, raw, weight, saved, weight_grad);
}

[[maybe_unused]] bool takes_kernel(const at::Tensor& qkv, const AttentionConfig& config, const RopeTables& rope) {
  const int64_t d = config.head_dim;
  return fits_bf16_kernels(qkv) && (d == 64 || d == 128 || d == 256) && rope.cos.size(-1) * 2 == d && rope.cos.is_contiguous();
}

#ifdef HEADRACE_HAS_CUDA
QkShape qk_shape(const at::Tensor& qkv, const AttentionConfig& config) {
  return {qkv.size(0), static_cast<int>(config.num_heads), static_cast<int>(config.num_key_value_heads),
          static_cast<int>(config.head_dim), static_cast<float>(config.rms_norm_eps)};
}
const void* weight_or_null(bool present, const at::Tensor& weight) { return present ? weight.const_data_ptr() : nullptr; }
#endif

}  // namespace

Heads qk_norm_rope_forward(const at::Tensor& qkv, const AttentionConfig& config, const AttentionTensors& weights,
                           const RopeTables& rope) {
  const Heads raw = split_heads(qkv, config);
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(qkv, config, rope)) {
    Heads heads{at::empty(raw.q.sizes(), qkv.options()), at::empty(raw.k.sizes(), qkv.options()), raw.v};
    qk_norm_rope_cuda(qk_shape(qkv, config), qkv.const_data_ptr(), weight_or_null(config.qk_norm, weights.q_norm),
                      weight_or_null(config.qk_norm, weights.k_norm), rope.cos.const_data_ptr(), rope.sin.const_data_ptr(),
                      heads.q.data_ptr(), heads.k.data_ptr(), current_stream(qkv));
    return heads;
  }
#endif
  return {position_heads(raw.q, weights.q_norm, config, rope), position_heads(raw.k, weights.k_norm, config, rope), raw.v};
}

at::Tensor qk_norm_rope_backward(const Heads& dheads, const at::Tensor& qkv, const AttentionConfig& config,
                                 const AttentionTensors& weights, const AttentionTensors& grads, const RopeTables& rope) {
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(qkv, config, rope)) {
    const QkShape shape = qk_shape(qkv, config);
    const at::Tensor dq = dheads.q.contiguous(), dk = dheads.k.contiguous(), dv = dheads.v.contiguous();
    at::Tensor dqkv = at::empty_like(qkv), partial;
    if (config.qk_norm)
      partial = at::empty({qk_norm_rope_partials(shape), 2, config.head_dim}, qkv.options().dtype(at::kFloat));
    qk_norm_rope_backward_cuda(shape, dq.const_data_ptr(), dk.const_data_ptr(), dv.const_data_ptr(), qkv.const_data_ptr(),
                               weight_or_null(config.qk_norm, weights.q_norm), weight_or_null(config.qk_norm, weights.k_norm),
                               rope.cos.const_data_ptr(), rope.sin.const_data_ptr(), dqkv.data_ptr(),
                               config.qk_norm ? partial.data_ptr<float>() : nullptr, current_stream(qkv));
    if (config.qk_norm) {
      const at::Tensor sums = partial.sum(0);
      if (grads.q_norm.defined()) grads.q_norm.add_(sums[0]);
      if (grads.k_norm.defined()) grads.k_norm.add_(sums[1]);
    }
    return dqkv;
  }
#endif
  const Heads raw = split_heads(qkv, config);
  const at::Tensor dq = position_heads_backward(dheads.q, raw.q, weights.q_norm, grads.q_norm, config, rope);
  const at::Tensor dk = position_heads_backward(dheads.k, raw.k, weights.k_norm, grads.k_norm, config, rope);
  return at::cat({dq, dk, dheads.v}, 1).view({qkv.size(0), config.qkv_size()});
}

}  // namespace headrace
