#include "base/file.h"

#include <gtest/gtest.h>

#include "headrace/error.h"

namespace headrace {

TEST(File, AtomicWriteReplacesAndLeavesNothingElse) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "headrace_file_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  write_file_atomically(folder / "a.txt", "first");
  write_file_atomically(folder / "a.txt", "second");
  EXPECT_EQ(read_file(folder / "a.txt"), "second");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  EXPECT_THROW(write_file_atomically(folder / "missing" / "a.txt", "x"), UserError);
}

TEST(File, Sha256OfKnownTexts) {
  const auto path = std::filesystem::path(testing::TempDir()) / "headrace_sha";
  const auto digest = [&](const std::string& text) {
    write_file_atomically(path, text);
    return sha256_of_file(path);
  };
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

}  // namespace headrace
