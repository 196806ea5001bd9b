// StopSignal: SIGTERM and SIGUSR1 only set a flag; the training loop looks at it between steps, saves and ends.
#pragma once

namespace headrace {

/// Installs the handlers for its lifetime and restores the old ones. At most one may exist.
class StopSignal {
 public:
  StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  ~StopSignal();
  /// The number of the signal that came, or 0.
  int received() const;
};

}  // namespace headrace
