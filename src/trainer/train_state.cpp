#include "trainer/train_state.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <unistd.h>

#include <charconv>
#include <cmath>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "headrace/error.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStateFormat = "headrace-train-state";
constexpr int kStateVersion = 1;
// What is saved of the optimizer, per parameter, under these prefixes: torch.optim.AdamW's names for the two moments, and with
// master weights the int16 remainders (kernels/adamw.h) that complete the checkpoint's bfloat16 weights.
std::vector<std::pair<std::string, at::Tensor>> optimizer_buffers(const AdamW& optimizer) {
  std::vector<std::pair<std::string, at::Tensor>> buffers = {{"exp_avg.", optimizer.first_moments()},
                                                             {"exp_avg_sq.", optimizer.second_moments()}};
  if (optimizer.master_remainders().defined()) buffers.emplace_back("master_remainder.", optimizer.master_remainders());
  return buffers;
}

Json to_json(const RunIdentity& identity) {
  return {{"data_digest", identity.data_digest},
          {"seed", identity.seed},
          {"sequence_length", identity.sequence_length},
          {"global_batch_size", identity.global_batch_size},
          {"packing", identity.packing},
          {"shuffle", identity.shuffle}};
}

Json to_json(const TrainPosition& position) {
  Json json = {{"step", position.step},
               {"epoch", position.epoch},
               {"step_in_epoch", position.step_in_epoch},
               {"tokens_seen", position.tokens_seen},
               {"trained_tokens_seen", position.trained_tokens_seen},
               {"best_step", position.best_step}};
  json["best_val_loss"] = std::isfinite(position.best_val_loss) ? Json(position.best_val_loss) : Json(nullptr);
  return json;
}

TrainPosition position_from(const Json& json) {
  TrainPosition position;
  position.step = json.at("step");
  position.epoch = json.at("epoch");
  position.step_in_epoch = json.at("step_in_epoch");
  position.tokens_seen = json.at("tokens_seen");
  position.trained_tokens_seen = json.at("trained_tokens_seen");
  position.best_step = json.at("best_step");
  if (!json.at("best_val_loss").is_null()) position.best_val_loss = json.at("best_val_loss");
  return position;
}

TensorToWrite tensor_to_write(const std::string& name, const at::Tensor& tensor) {
  return {name, safetensors_dtype(tensor.scalar_type()), tensor.sizes().vec(), [tensor](const auto& sink) {
            const at::Tensor host = tensor.cpu().contiguous();
            sink({static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()});
          }};
}

void write_train_state(const fs::path& folder, const LoadedModel& model, const AdamW& optimizer, const TrainPosition& position,
                       const RunIdentity& identity) {
  create_folder(folder);
  std::vector<TensorToWrite> tensors;
  const Parameters& parameters = model.decoder.parameters();
  for (const ParameterInfo& info : parameters.layout().entries()) {
    for (const auto& [prefix, buffer] : optimizer_buffers(optimizer)) {
      tensors.push_back(tensor_to_write(prefix + info.name, parameters.view(buffer, info.name)));
    }
  }
  write_safetensors(folder / "optimizer.safetensors", std::move(tensors));
  const Json state = {{"format", kStateFormat},
                      {"version", kStateVersion},
                      {"optimizer_steps", optimizer.steps_done()},
                      {"position", to_json(position)},
                      {"identity", to_json(identity)}};
  write_file_atomically(folder / "state.json", to_python_json(state));
}

// Points `link` at `target` (a name in the same folder); a reader sees the old or the new one, never none.
void replace_link(const fs::path& link, const std::string& target) {
  const fs::path temporary = link.parent_path() / fmt::format(".{}.tmp-{}", link.filename().string(), ::getpid());
  fs::remove(temporary);
  fs::create_symlink(target, temporary);
  fs::rename(temporary, link);
}

std::string checkpoint_name(int64_t step) { return fmt::format("checkpoint-{}", step); }

// The step of a folder named checkpoint-<step>, or -1.
int64_t step_of(const fs::path& folder) {
  const std::string name = folder.filename().string(), prefix = "checkpoint-";
  int64_t step = -1;
  if (!name.starts_with(prefix)) return -1;
  const char *begin = name.data() + prefix.size(), *end = name.data() + name.size();
  const auto parsed = std::from_chars(begin, end, step);
  return parsed.ec == std::errc() && parsed.ptr == end ? step : -1;
}

std::vector<int64_t> saved_steps(const fs::path& output_dir) {
  std::vector<int64_t> steps;
  if (!fs::is_directory(output_dir)) return steps;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    if (entry.is_directory() && !entry.is_symlink() && step_of(entry.path()) >= 0) steps.push_back(step_of(entry.path()));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

// A folder that is being removed no longer has a checkpoint's name, so that a kill half-way leaves nothing that looks whole.
void remove_checkpoint(const fs::path& folder) {
  if (!fs::exists(folder)) return;
  const fs::path removed = folder.parent_path() / fmt::format(".{}.removed", folder.filename().string());
  fs::remove_all(removed);
  fs::rename(folder, removed);
  fs::remove_all(removed);
}

void delete_old_checkpoints(const fs::path& output_dir, const TrainPosition& position, int64_t save_total_limit) {
  if (save_total_limit <= 0) return;
  const std::vector<int64_t> steps = saved_steps(output_dir);
  auto excess = static_cast<int64_t>(steps.size()) - save_total_limit;
  for (const int64_t step : steps) {
    if (excess <= 0) return;
    if (step == position.best_step || step == position.step) continue;
    remove_checkpoint(output_dir / checkpoint_name(step));
    --excess;
  }
}

void require_same(const Json& saved, const RunIdentity& identity, const fs::path& checkpoint) {
  const Json current = to_json(identity);
  const auto require_same_value = [&](const std::string& key) {
    require(saved.at(key) == current.at(key),
            "{} was written with {} {}, but this run has {}, so it cannot continue it. Use the old setting, or start anew with "
            "another "
            "output_dir and model.pretrained_model_name_or_path: {}.",
            checkpoint.string(), key, saved.at(key).dump(), current.at(key).dump(), checkpoint.string());
  };
  // The digest last: settings that change the prepared data are named by themselves.
  for (const auto& item : current.items()) {
    if (item.key() != "data_digest") require_same_value(item.key());
  }
  require_same_value("data_digest");
}

}  // namespace

fs::path save_training_checkpoint(const fs::path& output_dir, const LoadedModel& model, const AdamW& optimizer,
                                  const TrainPosition& position, const RunIdentity& identity, int64_t save_total_limit) {
  const std::string name = checkpoint_name(position.step);
  const fs::path target = output_dir / name, temporary = output_dir / fmt::format(".{}.partial", name);
  try {
    create_folder(output_dir);
    fs::remove_all(temporary);
    save_checkpoint(save_request(model, temporary));
    write_train_state(temporary / "train_state", model, optimizer, position, identity);
    sync_to_disk(temporary / "train_state");
    sync_to_disk(temporary);
    remove_checkpoint(target);  // a resumed run may pass the same step again
    fs::rename(temporary, target);
    sync_to_disk(output_dir);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  replace_link(output_dir / "latest", name);
  if (position.best_step == position.step) replace_link(output_dir / "best", name);
  delete_old_checkpoints(output_dir, position, save_total_limit);
  return target;
}

namespace {

TrainPosition restore_from_state(const Json& state, const fs::path& checkpoint, const Decoder& decoder, AdamW& optimizer,
                                 const RunIdentity& identity) {
  const fs::path folder = checkpoint / "train_state";
  require(state.value("format", "") == kStateFormat && state.value("version", 0) == kStateVersion,
          "{}: format {} version {} is not the {} version {} that this program reads", (folder / "state.json").string(),
          state.value("format", "?"), state.value("version", 0), kStateFormat, kStateVersion);
  require_same(state.at("identity"), identity, checkpoint);

  const SafetensorsFile file(folder / "optimizer.safetensors");
  const Parameters& parameters = decoder.parameters();
  const bool has_masters = file.find("master_remainder." + parameters.layout().entries().front().name) != nullptr;
  require(has_masters == optimizer.master_remainders().defined(),
          "{} was written {} master weights, but this run is {} them. Set optimizer.master_weights to {}.", checkpoint.string(),
          has_masters ? "with" : "without", has_masters ? "without" : "with", has_masters);
  for (const auto& [prefix, buffer] : optimizer_buffers(optimizer)) {
    for (const ParameterInfo& info : parameters.layout().entries()) {
      const TensorInfo* found = file.find(prefix + info.name);
      require(found != nullptr && found->shape == info.shape && found->dtype == safetensors_dtype(buffer.scalar_type()),
              "{}: {}{} is missing or has another shape or dtype than the model's parameter", file.path().string(), prefix,
              info.name);
      void* bytes = const_cast<std::byte*>(file.bytes(*found).data());
      parameters.view(buffer, info.name).copy_(at::from_blob(bytes, info.shape, buffer.scalar_type()));
    }
  }
  optimizer.set_steps_done(state.at("optimizer_steps"));
  return position_from(state.at("position"));
}

}  // namespace

TrainPosition restore_train_state(const fs::path& checkpoint, const Decoder& decoder, AdamW& optimizer,
                                  const RunIdentity& identity) {
  const fs::path file = checkpoint / "train_state" / "state.json";
  require(fs::is_regular_file(file),
          "{} has no train_state, so a run cannot be resumed from it. To start a new run from its weights, give it as "
          "model.pretrained_model_name_or_path.",
          checkpoint.string());
  const Json state = read_json_file(file);
  try {
    return restore_from_state(state, checkpoint, decoder, optimizer, identity);
  } catch (const Json::exception& error) {
    fail("{} is not what this program wrote: {}. Resume from another checkpoint.", file.string(), error.what());
  }
}

std::optional<fs::path> find_resume_checkpoint(const std::string& restore_from, const fs::path& output_dir) {
  if (restore_from.empty()) return std::nullopt;
  if (restore_from != "auto") {
    require(fs::is_directory(restore_from), "checkpoint.restore_from is {}, but there is no such folder", restore_from);
    return fs::canonical(restore_from);
  }
  if (fs::is_directory(output_dir / "latest")) return fs::canonical(output_dir / "latest");
  const std::vector<int64_t> steps = saved_steps(output_dir);
  return steps.empty() ? std::nullopt : std::optional(fs::canonical(output_dir / checkpoint_name(steps.back())));
}

}  // namespace headrace
