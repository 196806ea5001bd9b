// Walk order, sharding rule and the choice of carried files. Whole folders against transformers: test_sharding.py.
#include "checkpoint/weight_shards.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/carried_files.h"

namespace headrace {
namespace {

TEST(NaturalOrder, NumbersBeforeTextAndByValue) {
  // sorted(names, key=transformers.core_model_loading.dot_natural_key)
  const std::vector<std::string> wanted = {"2",
                                           "02.a",
                                           "10",
                                           "10.a",
                                           "",
                                           "a",
                                           "a.1",
                                           "a.02.x",
                                           "a.10",
                                           "a.b",
                                           "a1",
                                           "a2.z",
                                           "a10",
                                           "a10.b",
                                           "lm_head.weight",
                                           "model.layers.2.w",
                                           "model.layers.10.w",
                                           "model.layers.10.w1",
                                           "model.layers.10.w2",
                                           "model.layers.10.w11",
                                           "model.norm"};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_FALSE(natural_less(wanted[i], wanted[i])) << wanted[i];
    for (std::size_t j = i + 1; j < wanted.size(); ++j) {
      EXPECT_TRUE(natural_less(wanted[i], wanted[j])) << wanted[i] << " | " << wanted[j];
      EXPECT_FALSE(natural_less(wanted[j], wanted[i])) << wanted[j] << " | " << wanted[i];
    }
  }
}

using Shards = std::vector<std::size_t>;

TEST(AssignShards, FollowsTheReference) {
  EXPECT_EQ(assign_shards({6, 6, 2, 6, 2, 2}, 10), (Shards{0, 1, 1, 2, 2, 2}));  // the example of huggingface_hub
  EXPECT_EQ(assign_shards({3, 3, 3}, 9), (Shards{0, 0, 0}));                     // exactly full
  EXPECT_EQ(assign_shards({3, 3, 4}, 9), (Shards{0, 0, 1}));
  EXPECT_EQ(assign_shards({2, 20, 3, 20, 9}, 10), (Shards{2, 0, 2, 1, 3}));  // large ones at once, the open file stays open
  EXPECT_EQ(assign_shards({20}, 10), (Shards{0}));
  EXPECT_EQ(assign_shards({0, 10, 0}, 10), (Shards{0, 0, 0}));
}

TEST(CarriedFiles, TextsAndTokenizersButNoWeights) {
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
        "generation_config.json", "chat_template.jinja", "chat_template.json", "modeling_x.py", "LICENSE", "LICENSE.txt",
        "README.md", "NOTICE", "qwen.tiktoken", "added_tokens.json", "USE_POLICY.md", "tekken.json", "tokenizer.model.v3"}) {
    EXPECT_TRUE(is_carried(name)) << name;
  }
  for (const char* name : {"config.json",
                           "model.safetensors",
                           "model-00001-of-00002.safetensors",
                           "model.safetensors.index.json",
                           "pytorch_model.bin",
                           "pytorch_model.bin.index.json",
                           "x.pt",
                           "x.pth",
                           "x.gguf",
                           "optimizer.json",
                           "optimizer.pt",
                           "scheduler.pt",
                           "rng_state_0.pth",
                           "trainer_state.json",
                           "training_args.bin",
                           ".gitattributes",
                           ".hidden.json",
                           "adapter_config.json",
                           "image.png",
                           "consolidated.00.pth",
                           ""}) {
    EXPECT_FALSE(is_carried(name)) << name;
  }
}

}  // namespace
}  // namespace headrace
