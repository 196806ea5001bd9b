// Files: whole reads, read-only maps, and writes that are there completely or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace headrace {

/// The whole file as text. Throws UserError when it is missing or unreadable.
std::string read_file(const std::filesystem::path& path);

/// Writes `text` under a temporary name beside `path`, flushes it to disk (fsync) and renames it over `path`.
/// Throws UserError (disk full, no permission) and leaves no temporary file behind.
void write_file_atomically(const std::filesystem::path& path, const std::string& text);

/// Makes the folder and those above it unless they are there. Throws UserError naming what is in the way.
void create_folder(const std::filesystem::path& path);

/// Flushes a file or folder to disk. Throws UserError.
void sync_to_disk(const std::filesystem::path& path);

/// Lowercase hexadecimal SHA-256 of a file's bytes.
std::string sha256_of_file(const std::filesystem::path& path);

/// A read-only memory map of a whole file; movable, not copyable. The pages are read on first touch, so a caller that looks at
/// some byte ranges only pays for those.
class MappedFile {
 public:
  /// Throws UserError when the file is missing, unreadable or not a regular file. An empty file gives an empty span.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace headrace
