// Shared by the GPU tests: a fixture that skips without a GPU, conversions, and the comparison that every kernel must pass.
// bfloat16 operands are rounded once on the CPU and used by all sides, so an error is that of the GPU's arithmetic alone.
#pragma once

#include <ATen/Context.h>

#include <cstdlib>
#include <random>

#include "tests/layers/gradients.h"

namespace headrace::testing {

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

inline at::Tensor on_gpu(const at::Tensor& x) { return x.to(at::kCUDA); }
inline at::Tensor rounded(const at::Tensor& x) { return x.to(at::kBFloat16); }
inline at::Tensor wide(const at::Tensor& x) { return x.to(at::kFloat); }

/// Every element NaN, so that one that a kernel does not write shows.
inline at::Tensor poisoned_like(const at::Tensor& x) { return at::full_like(x, std::numeric_limits<double>::quiet_NaN()); }

inline TokenBatch on_gpu(TokenBatch batch) {
  for (at::Tensor* tensor : {&batch.input_ids, &batch.targets, &batch.position_ids, &batch.cu_seqlens}) {
    if (tensor->defined()) *tensor = tensor->to(at::kCUDA);
  }
  return batch;
}

constexpr double kBfloat16Tolerance = 1e-2;

/// `ours` in bfloat16 on the GPU, `plain` the same by ATen in bfloat16 on the CPU, `exact` in float32, whose error beside
/// theirs is nothing. The kernel may be at most half as bad again as plain bfloat16.
inline void expect_as_good_as_plain(const at::Tensor& ours, const at::Tensor& plain, const at::Tensor& exact,
                                    const std::string& what) {
  const double error = relative_error(ours.cpu(), exact), plain_error = relative_error(plain, exact);
  EXPECT_LT(error, kBfloat16Tolerance) << what;
  EXPECT_LE(error, 1.5 * plain_error + 1e-6) << what;
}

/// Runs each test on new random numbers and with all new device memory full of NaN. HEADRACE_TEST_SEED=n repeats a run.
class GpuKernels : public Gpu {
 protected:
  GpuKernels() {
    const char* wanted = std::getenv("HEADRACE_TEST_SEED");
    first_seed_ = seed_ = wanted != nullptr ? std::stoull(wanted) : std::random_device()();
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
  }
  ~GpuKernels() override {
    at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/true);
    if (HasFailure())
      std::fprintf(stderr, "repeat with HEADRACE_TEST_SEED=%llu\n", static_cast<unsigned long long>(first_seed_));
  }

  at::Tensor normal(at::IntArrayRef shape, double scale = 1.0) { return random(shape, ++seed_, scale); }
  at::Tensor normal_bf16(at::IntArrayRef shape, double scale = 1.0) { return rounded(normal(shape, scale)); }
  at::Tensor whole_numbers(int64_t below, at::IntArrayRef shape) {
    return at::randint(below, shape, at::detail::createCPUGenerator(++seed_), at::kLong);
  }
  /// top_k different experts of each token, the lower ones more often than the higher; the last one never.
  at::Tensor choices(int64_t tokens, int64_t num_experts, int64_t top_k) {
    const at::Tensor scores = normal({tokens, num_experts}) - at::arange(num_experts, at::kFloat) * (4.0 / num_experts);
    return std::get<1>(scores.narrow(1, 0, std::max(top_k, num_experts - 1)).topk(top_k, 1)).contiguous();
  }

 private:
  uint64_t first_seed_ = 0, seed_ = 0;
};

}  // namespace headrace::testing
