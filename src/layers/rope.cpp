#include "layers/rope.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>

namespace headrace {
namespace {

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = cos.size(-1);
  const at::Tensor first = x.narrow(-1, 0, half);
  const at::Tensor second = x.narrow(-1, half, half);
  std::vector<at::Tensor> parts = {first * cos - second * sin, second * cos + first * sin};
  if (x.size(-1) > 2 * half) parts.push_back(x.narrow(-1, 2 * half, x.size(-1) - 2 * half));
  return at::cat(parts, -1);
}

}  // namespace

RopeTables rope_tables(const RopeFrequencies& frequencies, const at::Tensor& position_ids, at::ScalarType dtype) {
  const auto count = static_cast<int64_t>(frequencies.inverse_frequencies.size());
  at::Tensor inverse = at::from_blob(const_cast<float*>(frequencies.inverse_frequencies.data()), {count}, at::kFloat).clone();
  // Pinned, so that the host need not wait for the copy.
  if (position_ids.is_cuda()) inverse = inverse.pin_memory().to(position_ids.device(), /*non_blocking=*/true);
  const at::Tensor angles = position_ids.to(at::kFloat).unsqueeze(1) * inverse;
  const auto table = [&](const at::Tensor& t) { return (t * frequencies.attention_factor).to(dtype).unsqueeze(1); };
  return {table(angles.cos()), table(angles.sin())};
}

at::Tensor rope_forward(const at::Tensor& x, const RopeTables& tables) { return rotate(x, tables.cos, tables.sin); }

at::Tensor rope_backward(const at::Tensor& dy, const RopeTables& tables) { return rotate(dy, tables.cos, -tables.sin); }

}  // namespace headrace
