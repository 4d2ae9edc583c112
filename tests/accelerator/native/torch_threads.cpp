// Which host thread the running thread is.
//
// Most are Python's, and each is a host thread of its own. A backward computes on threads of autograd, one for each device,
// while its caller is blocked in it, and autograd's own queues and events order the two. So such a thread works for the
// caller: it shares its knowledge. Torch says who that is, because it takes the caller's "debug info" along to the threads
// that work for it. Other threads that Python did not start (gloo's) launch nothing.
#include <c10/util/ThreadLocalDebugInfo.h>

#include "torch_device.h"

namespace sim_torch {
namespace {

const auto kHost = c10::DebugInfoKind::TEST_INFO;

struct HostInfo final : c10::DebugInfoBase {
  explicit HostInfo(int host) : host(host) {}
  int host;
};

struct Own {  // this thread's own host thread, if it has one
  int host = -1;
  ~Own() {
    if (host >= 0) sim::end_host(host);
  }
};

thread_local Own own;
thread_local int worked_for = -1;

int be_host(const std::string& name, bool is_start_known) {
  own.host = sim::new_host(name, is_start_known);
  c10::ThreadLocalDebugInfo::_push(kHost, std::make_shared<HostInfo>(own.host));
  return own.host;
}

}  // namespace

int enter_host() {
  if (auto* info = static_cast<HostInfo*>(c10::ThreadLocalDebugInfo::get(kHost))) return worked_for = info->host;
  // Autograd has put the caller's info away when it orders the streams at the end of a backward.
  if (own.host < 0 && worked_for >= 0) return worked_for;
  return own.host < 0 ? be_host("(not Python's)", false) : own.host;
}

}  // namespace sim_torch

int sim::this_host() { return sim_torch::enter_host(); }

// What host_threads.py calls.
extern "C" {
void* sim_make_handover() { return new sim::Handover; }
void sim_delete_handover(void* handover) { delete static_cast<sim::Handover*>(handover); }
void sim_publish_to(void* handover) { sim::publish_to(*static_cast<sim::Handover*>(handover)); }
void sim_learn_from(void* handover) { sim::learn_from(*static_cast<sim::Handover*>(handover)); }
void sim_begin_thread(const char* name) { sim_torch::be_host(name, true); }
}
