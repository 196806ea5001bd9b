#include "base/names.h"

#include <gtest/gtest.h>

namespace headrace {

TEST(Names, NearestWithinHalfTheLength) {
  const std::vector<std::string> known = {"learning_rate", "max_steps", "seed"};
  EXPECT_EQ(nearest_name("learning_rat", known), "learning_rate");
  EXPECT_EQ(nearest_name("sed", known), "seed");
  EXPECT_EQ(nearest_name("zzzzzzzzzzzz", known), "");
}

}  // namespace headrace
