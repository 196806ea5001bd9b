#include "layers/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero_static.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "layers/linear.h"

namespace headrace {
namespace {

constexpr int64_t kNotTrained = -100;

// One chunk's float32 logits and what follows from them.
struct Chunk {
  at::Tensor h, targets, logits, log_sum_exp;
};

Chunk make_chunk(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets, const at::Tensor& positions) {
  Chunk chunk;
  chunk.h = h.index_select(0, positions);
  chunk.targets = targets.index_select(0, positions).unsqueeze(1);
  chunk.logits = linear_forward(chunk.h, weight, {}).to(at::kFloat);
  chunk.log_sum_exp = at::logsumexp(chunk.logits, {1}, /*keepdim=*/true);
  return chunk;
}

template <typename Body>
LinearCrossEntropy over_chunks(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets, int64_t num_trained,
                               const LinearCrossEntropySettings& settings, const Body& body) {
  LinearCrossEntropy result;
  result.loss_sum = at::zeros({}, h.options().dtype(at::kFloat));
  if (num_trained == 0) return result;
  const at::Tensor trained = at::nonzero_static(targets.ne(kNotTrained), num_trained).squeeze(1);
  for (int64_t begin = 0; begin < num_trained; begin += settings.chunk_size) {
    const at::Tensor positions = trained.narrow(0, begin, std::min(settings.chunk_size, num_trained - begin));
    const Chunk chunk = make_chunk(h, weight, targets, positions);
    result.loss_sum.add_((chunk.log_sum_exp - chunk.logits.gather(1, chunk.targets)).sum());
    body(chunk, positions);
  }
  return result;
}

}  // namespace

LinearCrossEntropy linear_cross_entropy_forward(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets,
                                                int64_t num_trained, const LinearCrossEntropySettings& settings) {
  return over_chunks(h, weight, targets, num_trained, settings, [](const Chunk&, const at::Tensor&) {});
}

LinearCrossEntropy linear_cross_entropy_forward_backward(const at::Tensor& h, const at::Tensor& weight,
                                                         const at::Tensor& targets, int64_t num_trained, double grad_scale,
                                                         const at::Tensor& weight_grad,
                                                         const LinearCrossEntropySettings& settings) {
  at::Tensor dh = at::zeros_like(h);
  LinearCrossEntropy result =
      over_chunks(h, weight, targets, num_trained, settings, [&](const Chunk& chunk, const at::Tensor& positions) {
        at::Tensor grad = chunk.logits;  // overwritten: softmax - onehot
        grad.sub_(chunk.log_sum_exp).exp_();
        const at::Tensor at_target = grad.gather(1, chunk.targets).sub_(1.0);
        grad.scatter_(1, chunk.targets, at_target).mul_(grad_scale);
        const at::Tensor dlogits = grad.to(h.scalar_type());
        dh.index_copy_(0, positions, linear_backward(dlogits, chunk.h, weight, weight_grad, {}));
      });
  result.dh = std::move(dh);
  return result;
}

}  // namespace headrace
