// Host threads: what each knows, and how it passes that on.
#include "machine_state.h"

namespace sim {

void join(Knowledge& into, const Knowledge& other) {
  join(into.done, other.done);
  for (size_t i = 0; i < other.streams.size(); ++i) join(into.before_next(i), other.streams[i]);
}

bool covers(const Knowledge& one, const Knowledge& other) {
  if (&one == &other) return true;
  if (!covers(one.done, other.done)) return false;
  static const Clock nothing;
  for (size_t i = 0; i < other.streams.size(); ++i)
    if (!covers(i < one.streams.size() ? one.streams[i] : nothing, other.streams[i])) return false;
  return true;
}

namespace {

// Makes `to` know what `from` knows. Threads that know the same share one copy of it, so that a lock that is taken again and
// again costs next to nothing.
void pass_on(const std::shared_ptr<Knowledge>& from, std::shared_ptr<Knowledge>& to) {
  if (!from || from == to || (to && covers(*to, *from))) return;
  if (!to || covers(*from, *to)) {
    to = from;
    return;
  }
  to = std::make_shared<Knowledge>(*to);
  join(*to, *from);
}

}  // namespace

Clock& Knowledge::before_next(int stream) {
  if (static_cast<int>(streams.size()) <= stream) streams.resize(stream + 1);
  return streams[stream];
}

int new_host(const std::string& name, bool is_start_known) {
  auto& s = m();
  Lock lock(s.mutex);
  s.hosts.push_back({name, is_start_known, nullptr});
  return static_cast<int>(s.hosts.size()) - 1;
}

void end_host(int host) {
  Lock lock(m().mutex);
  m().hosts[host].knows.reset();
}

Knowledge& known_here() {
  auto& host = m().hosts[this_host()];
  // Who has not seen a thread's start does not know what came before it: all that has happened.
  if (!host.is_start_known) host.knows = std::make_shared<Knowledge>(m().all);
  else if (!host.knows) host.knows = std::make_shared<Knowledge>();
  else if (host.knows.use_count() > 1) host.knows = std::make_shared<Knowledge>(*host.knows);
  host.is_start_known = true;
  return *host.knows;
}

std::array<Knowledge*, 2> known_here_and_to_all() { return {&known_here(), &m().all}; }

void publish_to(Handover& handover) {
  int host = this_host();
  Lock lock(m().mutex);
  pass_on(m().hosts[host].knows, handover.knows);
}

void learn_from(const Handover& handover) {
  int host = this_host();
  Lock lock(m().mutex);
  pass_on(handover.knows, m().hosts[host].knows);
}

}  // namespace sim
