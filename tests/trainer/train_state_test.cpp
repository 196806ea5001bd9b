// Train state: a saved and restored run is the same to the bit; links, limits and what is picked up for resuming.
#include "trainer/train_state.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint/temporary_folder.h"
#include "models/tiny_models.h"
#include "trainer/train_step.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;
using namespace testing_models;

const RunIdentity kIdentity = {"digest", 42, 64, 8, true, true};

class TrainState : public testing::TestWithParam<at::ScalarType> {
 protected:
  TrainState()
      : out_(temporary_.path() / "out"),
        model_([this] {
          write_model(temporary_.path() / "model", tiny_config("qwen3_moe", true), GetParam());
          return load_model(temporary_.path() / "model", {}, at::kCPU);
        }()),
        optimizer_(make_optimizer(model_.decoder, {}, 7)) {
    optimizer_.first_moments().uniform_(-1, 1);
    optimizer_.second_moments().uniform_(0, 1);
    optimizer_.set_steps_done(5);
  }

  fs::path save(int64_t step, int64_t best_step = -1, int64_t limit = 0) {
    TrainPosition position;
    position.step = step;
    position.epoch = 1;
    position.step_in_epoch = 2;
    position.tokens_seen = 1000000000000;
    position.trained_tokens_seen = 77;
    position.best_step = best_step;
    if (best_step >= 0) position.best_val_loss = 1.0 / 3.0;
    return save_training_checkpoint(out_, model_, optimizer_, position, kIdentity, limit);
  }

  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(out_)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  TemporaryFolder temporary_;
  fs::path out_;
  LoadedModel model_;
  AdamW optimizer_;
};

TEST_P(TrainState, RestoresEveryBit) {
  const fs::path folder = save(5, 5);
  const LoadedModel again = load_model(folder, {}, at::kCPU);
  EXPECT_TRUE(at::equal(again.decoder.parameters().flat(), model_.decoder.parameters().flat()));
  AdamW restored = make_optimizer(again.decoder, {}, 7);
  const TrainPosition position = restore_train_state(folder, again.decoder, restored, kIdentity);
  for (const ParameterInfo& info : again.decoder.parameters().layout().entries()) {
    const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
      return at::equal(again.decoder.parameters().view(a, info.name), again.decoder.parameters().view(b, info.name));
    };
    EXPECT_TRUE(same(restored.first_moments(), optimizer_.first_moments())) << info.name;
    EXPECT_TRUE(same(restored.second_moments(), optimizer_.second_moments())) << info.name;
  }
  EXPECT_EQ(restored.steps_done(), 5);
  EXPECT_EQ(position.step, 5);
  EXPECT_EQ(position.epoch, 1);
  EXPECT_EQ(position.step_in_epoch, 2);
  EXPECT_EQ(position.tokens_seen, 1000000000000);
  EXPECT_EQ(position.trained_tokens_seen, 77);
  EXPECT_EQ(position.best_step, 5);
  EXPECT_EQ(position.best_val_loss, 1.0 / 3.0);
}

TEST_P(TrainState, MasterWeightsComeBackOrAreRefused) {
  OptimizerSection settings;
  settings.master_weights = true;
  optimizer_ = make_optimizer(model_.decoder, settings, 7);
  const bool bfloat16 = GetParam() == at::kBFloat16;  // float32 weights are their own masters
  ASSERT_EQ(optimizer_.master_remainders().defined(), bfloat16);
  if (bfloat16) optimizer_.master_remainders().random_(-32768, 32767);
  const fs::path folder = save(1);
  AdamW restored = make_optimizer(model_.decoder, settings, 7), without = make_optimizer(model_.decoder, {}, 7);
  restore_train_state(folder, model_.decoder, restored, kIdentity);
  if (!bfloat16) {
    EXPECT_EQ(refusal([&] { restore_train_state(folder, model_.decoder, without, kIdentity); }), "");
    return;
  }
  for (const ParameterInfo& info : model_.decoder.parameters().layout().entries()) {
    EXPECT_TRUE(at::equal(model_.decoder.parameters().view(restored.master_remainders(), info.name),
                          model_.decoder.parameters().view(optimizer_.master_remainders(), info.name)));
  }
  EXPECT_NE(refusal([&] {
              restore_train_state(folder, model_.decoder, without, kIdentity);
            }).find("with master weights, but this run is without them. Set optimizer.master_weights to true"),
            std::string::npos);
  optimizer_ = make_optimizer(model_.decoder, {}, 7);
  const fs::path folder_without = save(2);
  EXPECT_NE(refusal([&] {
              restore_train_state(folder_without, model_.decoder, restored, kIdentity);
            }).find("without master weights, but this run is with them. Set optimizer.master_weights to false"),
            std::string::npos);
}

TEST_P(TrainState, NoValidationYetIsRestoredAsInfinity) {
  const fs::path folder = save(1);
  EXPECT_EQ(restore_train_state(folder, model_.decoder, optimizer_, kIdentity).best_val_loss,
            std::numeric_limits<double>::infinity());
}

TEST_P(TrainState, AnotherRunIsRefusedNamingBothValues) {
  const fs::path folder = save(1);
  const auto message = [&](const RunIdentity& identity) {
    return refusal([&] { restore_train_state(folder, model_.decoder, optimizer_, identity); });
  };
  RunIdentity identity = kIdentity;
  identity.seed = 43;
  identity.data_digest = "other";
  EXPECT_NE(message(identity).find("seed 42, but this run has 43"), std::string::npos)
      << message(identity);  // before the digest
  identity.seed = 42;
  EXPECT_NE(message(identity).find("data_digest"), std::string::npos);
  EXPECT_EQ(message(kIdentity), "");
  EXPECT_NE(refusal([&] {
              restore_train_state(temporary_.path() / "model", model_.decoder, optimizer_, kIdentity);
            }).find("train_state"),
            std::string::npos);
}

TEST_P(TrainState, OtherParametersAreRefused) {
  const fs::path folder = save(1);
  Json config = tiny_config("qwen3_moe", true);
  config["num_hidden_layers"] = 3;
  write_model(temporary_.path() / "larger", config, GetParam());
  const LoadedModel larger = load_model(temporary_.path() / "larger", {}, at::kCPU);
  AdamW optimizer = make_optimizer(larger.decoder, {}, 7);
  const std::string message = refusal([&] { restore_train_state(folder, larger.decoder, optimizer, kIdentity); });
  EXPECT_NE(message.find("exp_avg.model.layers.2."), std::string::npos) << message;
}

TEST_P(TrainState, LimitKeepsTheBestAndTheNewest) {
  save(1, 1, 2);
  save(2, 1, 2);
  save(3, 1, 2);
  EXPECT_EQ(entries(), (std::vector<std::string>{"best", "checkpoint-1", "checkpoint-3", "latest"}));
  EXPECT_EQ(fs::read_symlink(out_ / "latest"), "checkpoint-3");
  EXPECT_EQ(fs::read_symlink(out_ / "best"), "checkpoint-1");
  save(4, 4, 1);
  EXPECT_EQ(entries(), (std::vector<std::string>{"best", "checkpoint-4", "latest"}));
  EXPECT_EQ(fs::read_symlink(out_ / "best"), "checkpoint-4");
}

TEST_P(TrainState, SavingAStepAgainReplacesIt) {
  const fs::path folder = save(2);
  write_text(folder / "stale", "x");
  save(2);
  EXPECT_FALSE(fs::exists(folder / "stale"));
  EXPECT_EQ(entries(), (std::vector<std::string>{"checkpoint-2", "latest"}));
}

TEST_P(TrainState, UnfinishedFoldersAreNeverPickedUp) {
  EXPECT_FALSE(find_resume_checkpoint("auto", out_).has_value());
  EXPECT_FALSE(find_resume_checkpoint("", out_).has_value());
  save(9);
  save(10);
  for (const char* name : {".checkpoint-11.partial", ".checkpoint-12.removed", "checkpoint-13x", "checkpoint-"})
    fs::create_directory(out_ / name);
  write_text(out_ / "checkpoint-99", "a file");
  EXPECT_EQ(*find_resume_checkpoint("auto", out_), fs::canonical(out_ / "checkpoint-10"));
  fs::remove(out_ / "latest");
  EXPECT_EQ(*find_resume_checkpoint("auto", out_), fs::canonical(out_ / "checkpoint-10"));  // by number, not by name
  fs::create_symlink("checkpoint-77", out_ / "latest");                                     // its target is gone
  EXPECT_EQ(*find_resume_checkpoint("auto", out_), fs::canonical(out_ / "checkpoint-10"));
  EXPECT_NE(refusal([&] { find_resume_checkpoint((out_ / "checkpoint-8").string(), out_); }).find("checkpoint-8"),
            std::string::npos);
}

TEST_P(TrainState, FolderThatCannotBeMadeIsTheUsersFault) {
  write_text(temporary_.path() / "out", "a file in its place");
  EXPECT_NE(refusal([&] { save(1); }).find("cannot create the folder"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, TrainState, testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace headrace
