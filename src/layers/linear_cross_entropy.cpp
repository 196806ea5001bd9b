#include "layers/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/nonzero_static.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "kernels/cross_entropy_cuda.h"
#include "kernels/cuda_launch.h"
#include "layers/linear.h"

namespace headrace {
namespace {

constexpr int64_t kNotTrained = -100;

// Loss of one chunk, float32 [rows], and with `with_gradient` the gradient of its logits in the model's dtype, else undefined.
struct ChunkLoss {
  at::Tensor loss, dlogits;
};

// logits [rows, vocab_size] are used up.
ChunkLoss cross_entropy(at::Tensor logits, const at::Tensor& targets, bool with_gradient, double grad_scale) {
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(logits)) {
    at::Tensor loss = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
    cross_entropy_cuda(logits.data_ptr(), targets.const_data_ptr<int64_t>(), logits.size(0), logits.size(1),
                       static_cast<float>(grad_scale), with_gradient, loss.data_ptr<float>(), current_stream(logits));
    return {std::move(loss), std::move(logits)};
  }
#endif
  const at::ScalarType dtype = logits.scalar_type();
  const at::Tensor ids = targets.unsqueeze(1);
  logits = logits.to(at::kFloat);
  const at::Tensor log_sum_exp = at::logsumexp(logits, {1}, /*keepdim=*/true);
  ChunkLoss result{(log_sum_exp - logits.gather(1, ids)).squeeze(1), {}};
  if (with_gradient) {
    logits.sub_(log_sum_exp).exp_();  // softmax, then minus one at the target
    logits.scatter_(1, ids, logits.gather(1, ids).sub_(1.0)).mul_(grad_scale);
    result.dlogits = logits.to(dtype);
  }
  return result;
}

// Calls body(rows of h, gradient of their logits, their positions) for each chunk of trained positions.
template <typename Body>
LinearCrossEntropy over_chunks(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets, int64_t num_trained,
                               bool with_gradient, double grad_scale, const LinearCrossEntropySettings& settings,
                               const Body& body) {
  LinearCrossEntropy result;
  result.loss_sum = at::zeros({}, h.options().dtype(at::kFloat));
  if (num_trained == 0) return result;
  const at::Tensor trained = at::nonzero_static(targets.ne(kNotTrained), num_trained).squeeze(1);
  const int64_t chunk_size = settings.chunk_size > 0 ? settings.chunk_size : h.element_size() == 2 ? 4096 : 2048;
  for (int64_t begin = 0; begin < num_trained; begin += chunk_size) {
    const at::Tensor positions = trained.narrow(0, begin, std::min(chunk_size, num_trained - begin));
    const at::Tensor rows = h.index_select(0, positions);
    const ChunkLoss chunk =
        cross_entropy(linear_forward(rows, weight, {}), targets.index_select(0, positions), with_gradient, grad_scale);
    result.loss_sum.add_(chunk.loss.sum());
    body(rows, chunk.dlogits, positions);
  }
  return result;
}

}  // namespace

LinearCrossEntropy linear_cross_entropy_forward(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets,
                                                int64_t num_trained, const LinearCrossEntropySettings& settings) {
  return over_chunks(h, weight, targets, num_trained, /*with_gradient=*/false, 0.0, settings,
                     [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {});
}

LinearCrossEntropy linear_cross_entropy_forward_backward(const at::Tensor& h, const at::Tensor& weight,
                                                         const at::Tensor& targets, int64_t num_trained, double grad_scale,
                                                         const at::Tensor& weight_grad, bool overwrite,
                                                         const LinearCrossEntropySettings& settings) {
  at::Tensor dh = at::zeros_like(h);
  if (overwrite && num_trained == 0 && weight_grad.defined()) weight_grad.zero_();
  LinearCrossEntropy result =
      over_chunks(h, weight, targets, num_trained, /*with_gradient=*/true, grad_scale, settings,
                  [&](const at::Tensor& rows, const at::Tensor& dlogits, const at::Tensor& positions) {
                    const bool store = std::exchange(overwrite, false);  // the first chunk alone
                    dh.index_copy_(0, positions, linear_backward(dlogits, rows, weight, weight_grad, {}, store));
                  });
  result.dh = std::move(dh);
  return result;
}

}  // namespace headrace
