// Shared by the block tests: random tensors, relative error, and gradients of a plain reference by autograd.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/autograd.h>

#include <vector>

#include "headrace/token_batch.h"

namespace headrace::testing {

inline at::Tensor random(at::IntArrayRef shape, uint64_t seed, double scale = 1.0) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::kFloat) * scale;
}

/// ||a - b|| / ||b||; the absolute norm when b is zero. NaN and a wrong shape never pass.
inline double relative_error(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (b.numel() == 0) return 0.0;
  const double difference = (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
  const double norm = b.to(at::kDouble).norm().item<double>();
  const double error = norm > 0 ? difference / norm : difference;
  return error == error ? error : std::numeric_limits<double>::infinity();
}

/// A leaf that autograd follows.
inline at::Tensor leaf(const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); }

/// Gradients of sum(y * dy) by each input.
inline std::vector<at::Tensor> reference_gradients(const at::Tensor& y, const at::Tensor& dy,
                                                   const std::vector<at::Tensor>& inputs) {
  auto grads = torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::zeros_like(inputs[i]);
  }
  return grads;
}

/// A batch of documents of the given lengths, without ids.
inline TokenBatch documents(const std::vector<int64_t>& lengths) {
  TokenBatch batch;
  batch.document_bounds = {0};
  std::vector<at::Tensor> positions = {at::empty({0}, at::kLong)};
  for (const int64_t length : lengths) {
    batch.document_bounds.push_back(batch.document_bounds.back() + length);
    batch.max_document_length = std::max(batch.max_document_length, length);
    positions.push_back(at::arange(length, at::kLong));
  }
  batch.position_ids = at::cat(positions);
  batch.cu_seqlens = at::tensor(batch.document_bounds, at::kLong).to(at::kInt);
  return batch;
}

constexpr double kTolerance = 1e-5;  // float32, sums of a few hundred terms

}  // namespace headrace::testing
