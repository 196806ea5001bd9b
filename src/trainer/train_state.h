// Train state: what resuming needs beside the weights: optimizer states and the position in data and schedule.
// Flow: train -> [save_training_checkpoint] -> output_dir/checkpoint-<step>/{HF files, train_state/} -> [restore_train_state]
// -> train.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>

#include "models/load_model.h"
#include "optim/adamw.h"

namespace headrace {

/// Where a run stands after `step` optimizer steps.
struct TrainPosition {
  int64_t step = 0;
  int64_t epoch = 0, step_in_epoch = 0;  // of the next batch
  int64_t tokens_seen = 0, trained_tokens_seen = 0;
  double best_val_loss = std::numeric_limits<double>::infinity();
  int64_t best_step = -1;  // step of the best validation so far that has a checkpoint
};

/// What must be the same for a resumed run to continue the old one.
struct RunIdentity {
  std::string data_digest;
  uint64_t seed = 0;
  int64_t sequence_length = 0, global_batch_size = 0;
  bool packing = true, shuffle = true;
};

/// Writes output_dir/checkpoint-<step> under a temporary name, flushed, renamed last; then moves the link `latest` (and `best`
/// when this step is position.best_step); then deletes the oldest checkpoints beyond `save_total_limit` (0: none), never the
/// best or this one. Returns the folder. Throws UserError when the disk is full; nothing half-written is left.
std::filesystem::path save_training_checkpoint(const std::filesystem::path& output_dir, const LoadedModel& model,
                                               const AdamW& optimizer, const TrainPosition& position,
                                               const RunIdentity& identity, int64_t save_total_limit);

/// Fills the optimizer's states and returns the position. Throws UserError: no train_state, other parameters, or another data
/// set, seed, sequence length or batch size than the run that wrote it (naming both values).
TrainPosition restore_train_state(const std::filesystem::path& checkpoint, const Decoder& decoder, AdamW& optimizer,
                                  const RunIdentity& identity);

/// The folder to resume from: `restore_from` itself, or for "auto" the target of output_dir/latest, else the highest complete
/// checkpoint-<step>; nullopt when restore_from is empty or auto finds none. Throws UserError when a named folder is not there.
std::optional<std::filesystem::path> find_resume_checkpoint(const std::string& restore_from,
                                                            const std::filesystem::path& output_dir);

}  // namespace headrace
