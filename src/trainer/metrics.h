// Metrics: one JSON line per logged step in training.jsonl and per validation in validation.jsonl.
// Flow: train -> [metrics] -> output_dir/*.jsonl -> plots and TensorBoard (python/headrace). Field names as NeMo AutoModel's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace headrace {

struct TrainingRecord {
  int64_t step = 0;      // updates done, from 1
  double epoch = 0;      // passes over the data done
  double loss = 0;       // mean over the trained tokens of the step, without aux_loss
  double grad_norm = 0;  // before clipping, over all ranks
  double lr = 0;
  double tokens_per_s = 0;  // of all ranks
  double mem_gib = 0;       // highest use of device memory on this rank
  int64_t num_tokens = 0;   // of the step, on all ranks
  int64_t num_trained_tokens = 0;
  std::optional<double> aux_loss;  // only where the load-balancing loss is on
  std::string time;                // utc_time_text()
};

struct ValidationRecord {
  int64_t step = 0;
  double epoch = 0;
  double val_loss = 0;
  int64_t num_trained_tokens = 0;
};

/// One line without the line end: keys in the order of the struct; a number that is not finite is null, as JSON has no such
/// number.
std::string to_json_line(const TrainingRecord& record);
std::string to_json_line(const ValidationRecord& record);

/// "2026-01-31T12:00:00Z"
std::string utc_time_text(int64_t seconds_since_1970);

/// Owns one JSONL file. Used by rank 0 only.
class MetricsFile {
 public:
  /// A new run (no restored_step) begins an empty file. A resumed run keeps the lines up to the restored step byte for byte and
  /// cuts later ones away, as well as a last line that a crash left unfinished, so that the file becomes that of an unbroken
  /// run. Throws UserError when the file cannot be read or written, and when a line other than the last is no record.
  MetricsFile(std::filesystem::path path, std::optional<int64_t> restored_step);

  /// Appends one line and hands it to the system. Throws UserError when the disk is full.
  void write(const TrainingRecord& record) { write_line(to_json_line(record)); }
  void write(const ValidationRecord& record) { write_line(to_json_line(record)); }

 private:
  void write_line(const std::string& line);
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace headrace
