#include "base/json.h"

#include <gtest/gtest.h>

#include "headrace/error.h"

namespace headrace {

TEST(Json, WritesAsPythonDoes) {
  const Json value =
      parse_json(R"({"b": 1e-06, "a": [1, 2.0, null], "c": {}, "d": 1000000.0, "e": "é", "f": 1e16, "g": 0.02})", "test");
  EXPECT_EQ(to_python_json(value, /*sort_keys=*/true),
            "{\n  \"a\": [\n    1,\n    2.0,\n    null\n  ],\n  \"b\": 1e-06,\n  \"c\": {},\n  \"d\": 1000000.0,\n"
            "  \"e\": \"\\u00e9\",\n  \"f\": 1e+16,\n  \"g\": 0.02\n}\n");
}

TEST(Json, DuplicateKeyIsRefused) {
  EXPECT_THROW(parse_json(R"({"a": 1, "a": 2})", "test"), UserError);
  EXPECT_NO_THROW(parse_json(R"({"a": {"a": 1}, "b": {"a": 2}})", "test"));
}

TEST(Json, BrokenTextNamesItsOrigin) {
  try {
    parse_json("{", "somewhere/config.json");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("somewhere/config.json"), std::string::npos);
  }
}

}  // namespace headrace
