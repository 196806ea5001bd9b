// safetensors: every kind of lying header is refused with the file and the tensor named; what is written reads back; a failed
// write leaves nothing. The comparison with Hugging Face's own reader and writer is in test_safetensors.py.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>

#include "base/file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/temporary_folder.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// A file of the given header text and number of data bytes; `claimed` overrides the header length.
std::string file_of(const std::string& header, std::size_t data_bytes, std::optional<uint64_t> claimed = {}) {
  const uint64_t length = claimed.value_or(header.size());
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
  return file + header + std::string(data_bytes, 'x');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), "dir/a.safetensors");
}

struct Lie {
  const char* name;
  std::string file;
  std::vector<std::string> words;  // that the message must have
};

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

std::vector<Lie> lies() {
  const std::string good = entry("good", "U8", "[4]", "[0,4]");
  return {
      {"Empty", "", {"0 bytes"}},
      {"SevenBytes", std::string(7, '\0'), {"7 bytes"}},
      {"HeaderTooLong", file_of("{}", 0, 100'000'001), {"100000001"}},
      {"HeaderLongerThanFile", file_of("{}", 3, 6), {"claims 6", "has only 5"}},
      {"LengthOverflow", file_of("{}", 3, ~0ULL), {"claims"}},
      {"ZeroLength", file_of("", 4), {"not valid JSON"}},
      {"NotJson", file_of("{\"a\":", 4), {"not valid JSON"}},
      {"NotAnObject", file_of("[]", 0), {"an array", "JSON object"}},
      {"TrailingText", file_of("{}x", 0), {"not valid JSON"}},
      {"NotUtf8", file_of("{\"\xff\":1}", 0), {"not valid JSON"}},
      {"EntryNotObject", file_of("{\"w\":3}", 0), {"entry of w", "object"}},
      {"EntryNull", file_of("{\"w\":null}", 0), {"entry of w"}},
      {"DuplicateName", file_of("{" + good + "," + good + "}", 4), {"good", "twice"}},
      {"DuplicateField",
       file_of(R"({"w":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}})", 4),
       {"tensor w", "dtype", "twice"}},
      {"MissingDtype", file_of(R"({"w":{"shape":[4],"data_offsets":[0,4]}})", 4), {"tensor w", "lacks \"dtype\""}},
      {"MissingShape", file_of(R"({"w":{"dtype":"U8","data_offsets":[0,4]}})", 4), {"tensor w", "lacks \"shape\""}},
      {"MissingOffsets", file_of(R"({"w":{"dtype":"U8","shape":[4]}})", 4), {"tensor w", "lacks \"data_offsets\""}},
      {"OneOffset", file_of("{" + entry("w", "U8", "[4]", "[4]") + "}", 4), {"tensor w", "1 data_offsets"}},
      {"ThreeOffsets", file_of("{" + entry("w", "U8", "[4]", "[0,4,4]") + "}", 4), {"tensor w", "3 data_offsets"}},
      {"UnknownDtype", file_of("{" + entry("w", "F7", "[4]", "[0,4]") + "}", 4), {"tensor w", "F7"}},
      {"DtypeNumber", file_of(R"({"w":{"dtype":8,"shape":[4],"data_offsets":[0,4]}})", 4), {"tensor w", "dtype"}},
      {"NegativeShape", file_of("{" + entry("w", "U8", "[-4]", "[0,4]") + "}", 4), {"tensor w", "-4", "shape"}},
      {"NegativeOffset", file_of("{" + entry("w", "U8", "[4]", "[-4,0]") + "}", 4), {"tensor w", "-4", "data_offsets"}},
      {"FloatShape", file_of("{" + entry("w", "U8", "[4.0]", "[0,4]") + "}", 4), {"tensor w", "4.0", "shape"}},
      {"NestedShape", file_of("{" + entry("w", "U8", "[[4]]", "[0,4]") + "}", 4), {"tensor w", "shape"}},
      {"ShapeString", file_of("{" + entry("w", "U8", "\"4\"", "[0,4]") + "}", 4), {"tensor w", "shape"}},
      {"HugeDimension",
       file_of("{" + entry("w", "U8", "[18446744073709551615]", "[0,4]") + "}", 4),
       {"tensor w", "18446744073709551615"}},
      {"ShapeOverflow",
       file_of("{" + entry("w", "U8", "[4294967296,4294967296]", "[0,0]") + "}", 0),
       {"tensor w", "overflows"}},
      {"OverflowBeforeZero",
       file_of("{" + entry("w", "U8", "[4294967296,4294967296,0]", "[0,0]") + "}", 0),
       {"tensor w", "overflows"}},
      {"BitsOverflow", file_of("{" + entry("w", "F64", "[4611686018427387904]", "[0,0]") + "}", 0), {"tensor w", "overflows"}},
      {"EndNotShape", file_of("{" + entry("w", "F32", "[2]", "[0,4]") + "}", 4), {"tensor w", "needs 8", "span 4"}},
      {"HalfByte", file_of("{" + entry("w", "F4", "[3]", "[0,2]") + "}", 2), {"tensor w", "whole bytes"}},
      {"EndBeforeBegin", file_of("{" + entry("w", "U8", "[4]", "[4,0]") + "}", 4), {"tensor w", "ends before"}},
      {"HoleAtStart", file_of("{" + entry("w", "U8", "[4]", "[2,6]") + "}", 6), {"tensor w", "bytes 0 to 2"}},
      {"Hole", file_of("{" + good + "," + entry("w", "U8", "[4]", "[5,9]") + "}", 9), {"tensor w", "bytes 4 to 5"}},
      {"Overlap", file_of("{" + good + "," + entry("w", "U8", "[4]", "[3,7]") + "}", 7), {"tensor w", "inside"}},
      {"SameBytesTwice", file_of("{" + good + "," + entry("w", "U8", "[4]", "[0,4]") + "}", 4), {"tensor w", "inside"}},
      {"TrailingBytes", file_of("{" + good + "}", 5), {"good", "1 bytes follow"}},
      {"OnlyData", file_of("{}", 5), {"5 bytes follow"}},
      {"TruncatedData", file_of("{" + good + "}", 3), {"tensor good", "holds only 3", "unfinished download"}},
      {"MetadataNumber", file_of(R"({"__metadata__":{"format":1}})", 0), {"__metadata__", "format"}},
      {"MetadataNested", file_of(R"({"__metadata__":{"format":{}}})", 0), {"__metadata__", "format"}},
      {"MetadataTwice", file_of(R"({"__metadata__":{"format":"pt","format":"tf"}})", 0), {"format", "twice"}},
      {"DeepNesting", file_of("{\"w\":{\"extra\":" + std::string(100000, '['), 0), {"tensor w", "nested"}},
  };
}

class LyingHeader : public testing::TestWithParam<Lie> {};

TEST_P(LyingHeader, IsRefusedNamingFileAndTensor) {
  try {
    parse(GetParam().file);
    FAIL() << "accepted";
  } catch (const UserError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("dir/a.safetensors"), std::string::npos) << message;
    for (const std::string& word : GetParam().words)
      EXPECT_NE(message.find(word), std::string::npos) << message << "\nlacks: " << word;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, LyingHeader, testing::ValuesIn(lies()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SafetensorsHeader, AcceptsWhatTheReferenceAccepts) {
  // Any order of entries and fields, any header length, unknown fields, empty tensors, scalars, packed types, a null
  // __metadata__.
  const auto header =
      parse(file_of("{\"__metadata__\":null," + entry("b", "U8", "[3]", "[4,7]") + "," +
                        R"("a":{"data_offsets":[0,4],"extra":{"x":[1,{"y":null}],"z":"s"},"shape":[],"dtype":"F32"},)" +
                        entry("empty", "F32", "[0,7]", "[4,4]") + "," + entry("packed", "F4", "[2,3]", "[7,10]") + "}   ",
                    10));
  ASSERT_EQ(header.tensors.size(), 4U);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_TRUE(header.tensors[0].shape.empty());
  EXPECT_EQ(header.tensors[1].name, "empty");
  EXPECT_EQ(header.tensors[2].name, "b");
  EXPECT_EQ(header.tensors[3].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(parse(file_of("{}", 0)).tensors.empty());
}

TensorToWrite tensor_of(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, std::string bytes) {
  return {name, dtype, std::move(shape), [bytes = std::move(bytes)](const auto& sink) {
            const auto all = std::as_bytes(std::span(bytes));
            sink(all.first(all.size() / 2));
            sink(all.subspan(all.size() / 2));
          }};
}

TEST(SafetensorsWriter, SortsPadsAndReadsBack) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "x.safetensors";
  write_safetensors(path, {tensor_of("layers.2", "BF16", {2}, "bbcc"), tensor_of("layers.10", "BF16", {1, 1}, "aa"),
                           tensor_of("z", "F32", {}, "ffff"), tensor_of("e", "F32", {0}, "")});
  const std::string text = read_file(path);
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"e":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
      R"("z":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"layers.10":{"dtype":"BF16","shape":[1,1],"data_offsets":[4,6]},)"
      R"("layers.2":{"dtype":"BF16","shape":[2],"data_offsets":[6,10]}})";
  EXPECT_EQ(text.substr(8, header.size()), header);
  EXPECT_EQ((text.size() - 10) % 8, 0U);
  EXPECT_EQ(text.substr(text.size() - 10), "ffffaabbcc");

  const SafetensorsFile file(path);
  EXPECT_EQ(file.header().metadata.at("format"), "pt");
  ASSERT_NE(file.find("layers.2"), nullptr);
  EXPECT_EQ(file.find("nothing"), nullptr);
  const auto bytes = file.bytes(*file.find("layers.2"));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "bbcc");
}

std::size_t files_in(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
}

TEST(SafetensorsWriter, WrongCallsLeaveNothing) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "x.safetensors";
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "U8", {3}, "aa")}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "U8", {1}, "aa")}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "U8", {2}, "aa"), tensor_of("a", "I8", {2}, "aa")}),
               std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "Q8", {2}, "aa")}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "U8", {-2}, "aa")}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("a", "F4", {3}, "aa")}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(path, {tensor_of("\xff", "U8", {2}, "aa")}), std::invalid_argument);
  EXPECT_EQ(files_in(folder.path()), 0U);
}

// A limit on file size stands in for a full disk: write() fails half-way through the data.
TEST(SafetensorsWriter, FullDiskIsAUserErrorAndKeepsTheOldFile) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "x.safetensors";
  write_safetensors(path, {tensor_of("old", "U8", {2}, "ab")});
  const std::string before = read_file(path);

  rlimit saved{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = saved;
  small.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    write_safetensors(path, {tensor_of("new", "U8", {100000}, std::string(100000, 'n'))});
  } catch (const UserError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &saved);
  std::signal(SIGXFSZ, handler);

  EXPECT_NE(message.find("x.safetensors"), std::string::npos) << message;
  EXPECT_NE(message.find("free some space"), std::string::npos) << message;
  EXPECT_EQ(files_in(folder.path()), 1U);
  EXPECT_EQ(read_file(path), before);
}

TEST(SafetensorsWriter, MissingFolderIsAUserError) {
  EXPECT_THROW(write_safetensors("/nonexistent-folder/x.safetensors", {}), UserError);
}

TEST(SafetensorsFile, ErrorNamesThePath) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "cut.safetensors";
  write_text(path, "abc");
  try {
    const SafetensorsFile file(path);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos);
  }
}

}  // namespace
}  // namespace headrace
