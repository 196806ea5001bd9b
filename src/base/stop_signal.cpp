#include "base/stop_signal.h"

#include <array>
#include <csignal>

namespace headrace {
namespace {

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t received_signal = 0;
std::array<struct sigaction, 2> previous;
constexpr std::array<int, 2> kSignals = {SIGTERM, SIGUSR1};

void on_signal(int signal) { received_signal = signal; }

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &previous[i]);
}

StopSignal::~StopSignal() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

int StopSignal::received() const { return received_signal; }

}  // namespace headrace
