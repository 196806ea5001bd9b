#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "headrace/error.h"

namespace headrace {
namespace {

// Owns one file descriptor.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, mode_t mode = 0)
      : value_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    require(value_ >= 0, "cannot open {}: {}", path.string(), std::strerror(errno));
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { ::close(value_); }
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

void create_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  require(!error && std::filesystem::is_directory(path, error), "cannot create the folder {}: {}", path.string(),
          error ? error.message() : "a file is in its place");
}

void sync_to_disk(const std::filesystem::path& path) {
  const Descriptor descriptor(path, O_RDONLY);
  require(::fsync(descriptor.get()) == 0, "cannot flush {} to disk: {}", path.string(), std::strerror(errno));
}

void write_file_atomically(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::path temporary = path;
  temporary += fmt::format(".tmp-{}", ::getpid());
  try {
    {
      const Descriptor descriptor(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
      std::size_t done = 0;
      while (done < text.size()) {
        const ssize_t written = ::write(descriptor.get(), text.data() + done, text.size() - done);
        if (written < 0 && errno == EINTR) continue;
        require(written >= 0, "cannot write {}: {}", temporary.string(), std::strerror(errno));
        done += static_cast<std::size_t>(written);
      }
      require(::fsync(descriptor.get()) == 0, "cannot flush {} to disk: {}", temporary.string(), std::strerror(errno));
    }
    require(::rename(temporary.c_str(), path.c_str()) == 0, "cannot rename {} to {}: {}", temporary.string(), path.string(),
            std::strerror(errno));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const Descriptor descriptor(path, O_RDONLY);
  struct stat status {};
  require(::fstat(descriptor.get(), &status) == 0, "cannot read {}: {}", path.string(), std::strerror(errno));
  require(S_ISREG(status.st_mode), "{} is not a regular file", path.string());
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  require(address != MAP_FAILED, "cannot map {}: {}", path.string(), std::strerror(errno));
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace headrace
