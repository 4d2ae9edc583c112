// The order of what the simulated machine does: actors, clocks, events, and the verdicts.
#include <chrono>
#include <stdexcept>

#include "machine_state.h"

namespace sim {

uint64_t tick_of(const Clock& clock, int actor) { return actor < static_cast<int>(clock.size()) ? clock[actor] : 0; }

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (tick_of(clock, i) < other[i]) return false;
  return true;
}

void report_race(const std::string& what, bool can_throw) {
  auto& s = m();
  s.races.push_back(what);
  if (s.raise && can_throw) {
    auto text = s.races.back();
    s.races.pop_back();
    throw std::runtime_error(text);
  }
}

// What the host may do with the pages of a pinned block now.
void protect_pinned(Block* block) {
  auto& s = m();
  std::vector<int> allowed(block->size / s.page, PROT_READ | PROT_WRITE);
  bool shut = false;
  for (auto& access : block->log)
    if (tick_of(s.clocks[0], access.actor) < access.at) {
      for (size_t page = access.lo / s.page; page * s.page < access.hi; ++page) allowed[page] &= access.write ? PROT_NONE : PROT_READ;
      shut = true;
    }
  for (size_t begin = 0, end; (shut || block->shut) && begin < allowed.size(); begin = end) {
    for (end = begin; end < allowed.size() && allowed[end] == allowed[begin]; ++end) {}
    mprotect(block->user + begin * s.page, (end - begin) * s.page, allowed[begin]);
  }
  block->shut = shut;
  if (shut) s.shut.insert(block);
  else {
    block->log.clear();
    s.shut.erase(block);
  }
}

namespace {

void check_use(int actor, const std::string& op, const Use& use) {
  auto& s = m();
  auto& clock = s.clocks[actor];
  auto& log = use.block->log;
  for (auto& old : log) {
    if (old.actor == actor || !(old.write || use.write) || old.hi <= use.lo || use.hi <= old.lo) continue;
    if (tick_of(clock, old.actor) < old.at) {
      auto text = "race: " + op + (use.write ? " writes" : " reads") + " on " + s.names[actor] + " what " + old.op +
          (old.write ? " writes" : " reads") + " on " + s.names[old.actor] + ", and nothing orders the two";
      old.at = 0;
      report_race(text, true);
    }
  }
}

void log_use(int actor, const std::string& op, const Use& use) {
  auto& log = use.block->log;
  auto& clock = m().clocks[actor];
  log.erase(std::remove_if(log.begin(), log.end(), [&](Access& old) {
    bool inside = use.lo <= old.lo && old.hi <= use.hi;
    return inside && (use.write ? tick_of(clock, old.actor) >= old.at : old.actor == actor && !old.write);
  }), log.end());
  log.push_back({use.lo, use.hi, actor, clock[actor], use.write, op});
  if (use.block->arena == m().count) protect_pinned(use.block);
}

// Before any wait: afterwards nobody knows which copy the host has not waited for.
void note_faults() {
  auto& s = m();
  void* touched[16];
  int n = take_faults(touched, 16);
  for (int i = 0; i < n; ++i) {
    int arena = arena_of(touched[i]);
    Block* block = find_block(touched[i]);
    if (arena < s.count)
      report_race("the host touched memory of device " + std::to_string(arena), false);
    else {
      std::string op = "a copy";
      if (block && !block->log.empty()) op = block->log.back().op + " on " + s.names[block->log.back().actor];
      report_race("race: the host touched pinned memory before it waited for " + op, false);
    }
  }
}

// After the host has learned that some work is done.
void open_pinned() {
  auto shut = m().shut;
  for (Block* block : shut) protect_pinned(block);
}

}  // namespace

void raise_at_once(bool on) { m().raise = on; }
void forbid_syncs(bool on) { m().no_syncs = on; }

int actor_of(int device, int64_t stream) {
  auto& s = m();
  Lock lock(s.mutex);
  auto [at, fresh] = s.actors.try_emplace({device, stream}, static_cast<int>(s.clocks.size()));
  if (fresh) {
    s.clocks.emplace_back(s.clocks.size() + 1, 0);
    s.names.push_back((stream ? "stream " + std::to_string(stream) : std::string("the default stream")) + " of device " +
                      std::to_string(device));
  }
  return at->second;
}

int64_t new_stream(int device) {
  auto& s = m();
  Lock lock(s.mutex);
  int64_t id = s.next_stream++;
  actor_of(device, id);
  return id;
}

void raise_found() {
  auto& s = m();
  note_faults();
  if (s.raise && !s.races.empty()) {
    std::string all;
    for (auto& each : s.races) all += (all.empty() ? "" : "\n") + each;
    s.races.clear();
    throw std::runtime_error(all);
  }
}

void launch_op(int actor, const std::string& op, const std::vector<Use>& uses) {
  auto& s = m();
  Lock lock(s.mutex);
  raise_found();
  auto& clock = s.clocks[actor];
  join(clock, s.clocks[0]);
  if (static_cast<int>(clock.size()) <= actor) clock.resize(actor + 1, 0);
  clock[actor]++;
  for (auto& use : uses) check_use(actor, op, use);
  for (auto& use : uses) log_use(actor, op, use);
}

void log_further_use(int actor, const std::string& op, const Use& use) {
  Lock lock(m().mutex);
  log_use(actor, op, use);
}

void record_event(Event& event, int actor, bool timed) {
  auto& s = m();
  Lock lock(s.mutex);
  auto& clock = s.clocks[actor];
  join(clock, s.clocks[0]);
  if (static_cast<int>(clock.size()) <= actor) clock.resize(actor + 1, 0);
  clock[actor]++;  // no other event has this tick
  event.at = clock;
  event.actor = actor;
  event.recorded = true;
  event.timed = timed;
  event.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_for_event(int actor, const Event& event) {
  auto& s = m();
  Lock lock(s.mutex);
  if (event.recorded) join(s.clocks[actor], event.at);
}

void wait_for_stream(int actor, int for_actor) {
  auto& s = m();
  Lock lock(s.mutex);
  join(s.clocks[actor], s.clocks[for_actor]);
}

bool query_event(const Event& event) {
  auto& s = m();
  Lock lock(s.mutex);
  if (!event.recorded) return true;
  join(s.clocks[0], event.at);  // who is told that it is done may rely on it
  open_pinned();
  return true;
}

void host_waits(const Clock& clock, const std::string& why) {
  auto& s = m();
  Lock lock(s.mutex);
  s.syncs[why]++;
  if (s.no_syncs) throw std::runtime_error("the host waits for the device: " + why);
  note_faults();
  join(s.clocks[0], clock);
  open_pinned();
  raise_found();
}

void host_waits_actor(int actor, const std::string& why) {
  Lock lock(m().mutex);
  host_waits(Clock(m().clocks[actor]), why);
}

void host_waits_device(int device, const std::string& why) {
  auto& s = m();
  Lock lock(s.mutex);
  Clock all;
  for (auto& [key, actor] : s.actors)
    if (key.first == device) join(all, s.clocks[actor]);
  host_waits(all, why);
}

bool query_stream(int actor) {
  auto& s = m();
  Lock lock(s.mutex);
  join(s.clocks[0], s.clocks[actor]);
  open_pinned();
  return true;
}

std::vector<std::string> take_races() {
  auto& s = m();
  Lock lock(s.mutex);
  bool raise = s.raise;
  s.raise = false;
  raise_found();
  s.raise = raise;
  return std::exchange(s.races, {});
}

std::map<std::string, int64_t> take_syncs() {
  Lock lock(m().mutex);
  return std::exchange(m().syncs, {});
}

bool could_overlap(const Event& one, const Event& other) {
  Lock lock(m().mutex);
  auto is_before = [](const Event& first, const Event& second) {
    return tick_of(second.at, first.actor) >= tick_of(first.at, first.actor);
  };
  return !is_before(one, other) && !is_before(other, one);
}

}  // namespace sim
