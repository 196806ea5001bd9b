#include "trainer/metrics.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/file.h"
#include "base/json.h"
#include "headrace/error.h"

namespace headrace {
namespace {

std::filesystem::path fresh_file(const std::string& name) {
  const auto path = std::filesystem::path(testing::TempDir()) / ("headrace_" + name + ".jsonl");
  std::filesystem::remove(path);
  return path;
}

TrainingRecord record_of(int64_t step) {
  TrainingRecord record{
      step, 0.1 * static_cast<double>(step), 1.0 / static_cast<double>(step), 0.5, 1e-5, 1234.5, 3.25, 4096, 1000, std::nullopt,
      "t"};
  if (step % 2 == 0) record.aux_loss = 0.01;
  return record;
}

}  // namespace

TEST(Metrics, LinesByHand) {
  TrainingRecord record{4, 0.125, 1.5, 0.75, 1e-5, 1234.5, 3.25, 4096, 1000, std::nullopt, utc_time_text(1769860800)};
  EXPECT_EQ(
      to_json_line(record),
      R"({"step":4,"epoch":0.125,"loss":1.5,"grad_norm":0.75,"lr":1e-05,"tokens_per_s":1234.5,"mem_gib":3.25,"num_tokens":4096,)"
      R"("num_trained_tokens":1000,"time":"2026-01-31T12:00:00Z"})");
  record.aux_loss = 0.25;
  record.loss = std::numeric_limits<double>::quiet_NaN();
  const Json json = parse_json(to_json_line(record), "line");
  EXPECT_TRUE(json.at("loss").is_null());
  EXPECT_EQ(json.at("aux_loss"), 0.25);
  EXPECT_EQ(to_json_line(ValidationRecord{8, 0.5, 2.25, 77}),
            R"({"step":8,"epoch":0.5,"val_loss":2.25,"num_trained_tokens":77})");
}

TEST(Metrics, LinesAreThereAtOnce) {
  const auto path = fresh_file("at_once");
  MetricsFile file(path, std::nullopt);
  EXPECT_EQ(read_file(path), "");
  file.write(record_of(1));
  EXPECT_EQ(read_file(path), to_json_line(record_of(1)) + "\n");
  file.write(ValidationRecord{1, 0.5, 2.0, 3});
  EXPECT_EQ(read_file(path), to_json_line(record_of(1)) + "\n" + to_json_line(ValidationRecord{1, 0.5, 2.0, 3}) + "\n");
}

// For every checkpoint step and every place at which a crash may cut the file, the resumed file equals the unbroken one.
TEST(Metrics, ResumedFileEqualsTheUnbrokenRuns) {
  const auto path = fresh_file("resumed");
  const auto write_steps = [&](int64_t from, int64_t to, std::optional<int64_t> restored) {
    MetricsFile file(path, restored);
    for (int64_t step = from; step <= to; ++step) file.write(record_of(step));
  };
  write_steps(1, 6, std::nullopt);
  const std::string unbroken = read_file(path);
  for (int64_t restored = 0; restored <= 4; ++restored) {
    std::size_t end_of_restored = 0;  // what a crash may not have cut: the lines up to the checkpoint
    for (int64_t line = 0; line < restored; ++line) end_of_restored = unbroken.find('\n', end_of_restored) + 1;
    if (restored > 0) --end_of_restored;  // the line end itself may be missing
    for (std::size_t length = end_of_restored; length <= unbroken.size(); length += 61) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << unbroken.substr(0, length);
      write_steps(restored + 1, 6, restored);
      ASSERT_EQ(read_file(path), unbroken) << "restored " << restored << " after " << length << " bytes";
    }
  }
}

TEST(Metrics, ANewRunBeginsAnEmptyFile) {
  const auto path = fresh_file("new_run");
  write_file_atomically(path, "old\n");
  MetricsFile(path, std::nullopt).write(record_of(1));
  EXPECT_EQ(read_file(path), to_json_line(record_of(1)) + "\n");
}

TEST(Metrics, Refusals) {
  const auto path = fresh_file("refusals");
  write_file_atomically(path, "no record\n" + to_json_line(record_of(1)) + "\n");
  EXPECT_THROW(MetricsFile(path, 1), UserError);
  EXPECT_EQ(read_file(path), "no record\n" + to_json_line(record_of(1)) + "\n");  // left as it was
  EXPECT_THROW(MetricsFile(path / "below" / "a.jsonl", std::nullopt), UserError);
  MetricsFile(fresh_file("missing"), 3).write(record_of(4));
}

}  // namespace headrace
