// The order of what the simulated machine does: streams, events, and the verdicts.
#include <chrono>
#include <stdexcept>

#include "machine_state.h"

namespace sim {

uint64_t tick_of(const Clock& clock, int actor) { return actor < static_cast<int>(clock.size()) ? clock[actor] : 0; }

// By pointers, because this is compiled without optimisation and runs at each launch.
void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  auto* to = into.data();
  auto* from = other.data();
  for (size_t i = 0, count = other.size(); i < count; ++i)
    if (to[i] < from[i]) to[i] = from[i];
}

bool covers(const Clock& clock, const Clock& other) {
  auto *ours = clock.data(), *theirs = other.data();
  size_t both = std::min(clock.size(), other.size()), count = other.size();
  for (size_t i = 0; i < both; ++i)
    if (ours[i] < theirs[i]) return false;
  for (size_t i = both; i < count; ++i)
    if (theirs[i]) return false;
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

// What the host may do with the pages of a pinned block now. They are open as soon as any host thread has waited, because
// threads share them. So the touch of a thread that has not waited is found only where another one has not either, or where
// the thread says what it touches (`use_on_host`), or launches an op that uses it.
void protect_pinned(Block* block) {
  auto& s = m();
  std::vector<int> allowed(block->size / s.page, PROT_READ | PROT_WRITE);
  bool shut = false;
  for (auto& access : block->log)
    if (tick_of(s.all.done, access.actor) < access.at) {
      for (size_t page = access.lo / s.page; page * s.page < access.hi; ++page) allowed[page] &= access.write ? PROT_NONE : PROT_READ;
      shut = true;
    }
  for (size_t begin = 0, end; (shut || block->shut) && begin < allowed.size(); begin = end) {
    for (end = begin; end < allowed.size() && allowed[end] == allowed[begin]; ++end) {}
    mprotect(block->user + begin * s.page, (end - begin) * s.page, allowed[begin]);
  }
  block->shut = shut;
  if (shut) s.shut.insert(block);
  else s.shut.erase(block);
}

namespace {

std::string place_of(int actor, bool with_host) {
  auto& s = m();
  auto [stream, host] = s.actors[actor];
  if (stream < 0) return "in thread " + s.hosts[host].name;
  return "on " + s.streams[stream].name + (with_host ? ", launched by thread " + s.hosts[host].name : "");
}

// `clock`: of what comes before the use.
void check_use(int actor, const Clock& clock, const std::string& op, const Use& use, bool can_throw = true) {
  auto& s = m();
  for (auto& old : use.block->log) {
    if (old.actor == actor || !(old.write || use.write) || old.hi <= use.lo || use.hi <= old.lo) continue;
    if (tick_of(clock, old.actor) < old.at) {
      bool by_threads = s.actors[actor].host != s.actors[old.actor].host;
      auto text = "race: " + op + (use.write ? " writes " : " reads ") + place_of(actor, by_threads) + " what " + old.op +
          (old.write ? " writes " : " reads ") + place_of(old.actor, by_threads) + ", and nothing orders the two";
      old.at = 0;
      report_race(text, can_throw);
    }
  }
}

void log_use(int actor, const Clock& clock, const std::string& op, const Use& use) {
  auto& log = use.block->log;
  log.erase(std::remove_if(log.begin(), log.end(), [&](Access& old) {
    bool inside = use.lo <= old.lo && old.hi <= use.hi;
    return inside && (use.write || !old.write) && tick_of(clock, old.actor) >= old.at;
  }), log.end());
  log.push_back({use.lo, use.hi, actor, tick_of(clock, actor), use.write, op});
  if (use.block->arena == m().count) protect_pinned(use.block);
}

void set_tick(Clock& clock, int actor, uint64_t tick) {
  if (static_cast<int>(clock.size()) <= actor) clock.resize(actor + 1, 0);
  clock[actor] = tick;
}

// The next tick of this host thread on the stream. Returns its actor.
int advance_stream(int stream) {
  auto& s = m();
  int actor = actor_of(stream, this_host());
  auto tick = tick_of(s.all.before_next(stream), actor) + 1;
  for (auto* knows : known_here_and_to_all()) {
    join(knows->before_next(stream), knows->done);
    set_tick(knows->before_next(stream), actor, tick);
  }
  return actor;
}

// The next tick of this host thread itself. Returns its actor.
int advance_host() {
  int actor = actor_of(-1, this_host());
  auto tick = tick_of(m().all.done, actor) + 1;
  for (auto* knows : known_here_and_to_all()) set_tick(knows->done, actor, tick);
  return actor;
}

// One that is recorded after it was looked at counts as done, so threads that record and look must be ordered, too.
void look_at_event(Event& event) {
  auto& s = m();
  int actor = advance_host();
  set_tick(event.waits, actor, tick_of(s.all.done, actor));
  auto tick = tick_of(event.at, event.actor);
  if (!event.recorded || tick_of(known_here().before_next(event.stream), event.actor) >= tick) return;
  report_race("race: thread " + s.hosts[s.actors[actor].host].name + " waits for an event that thread " +
              s.hosts[s.actors[event.actor].host].name + " records, and nothing orders the two", true);
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
      if (block && !block->log.empty()) op = block->log.back().op + " " + place_of(block->log.back().actor, false);
      report_race("race: the host touched pinned memory before it waited for " + op, false);
    }
  }
}

// After the host has learned that some work is done.
void open_pinned() {
  auto shut = m().shut;
  for (Block* block : shut) protect_pinned(block);
}

// `work`: what it waits for, of what is known.
template <typename Work>
void host_waits(const std::string& why, Work work) {
  auto& s = m();
  Lock lock(s.mutex);
  s.syncs[why]++;
  if (s.no_syncs) throw std::runtime_error("the host waits for the device: " + why);
  note_faults();
  for (auto* knows : known_here_and_to_all()) join(knows->done, work(*knows));
  open_pinned();
  raise_found();
}

}  // namespace

void raise_at_once(bool on) { m().raise = on; }
void forbid_syncs(bool on) { m().no_syncs = on; }

int actor_of(int stream, int host) {
  auto& s = m();
  auto [at, fresh] = s.actor_ids.try_emplace({stream, host}, static_cast<int>(s.actors.size()));
  if (fresh) s.actors.push_back({stream, host});
  return at->second;
}

int stream_of(int device, int64_t id) {
  auto& s = m();
  Lock lock(s.mutex);
  auto [at, fresh] = s.stream_ids.try_emplace({device, id}, static_cast<int>(s.streams.size()));
  if (fresh) {
    std::string name = id ? "stream " + std::to_string(id) : "the default stream";
    s.streams.push_back({device, name + " of device " + std::to_string(device)});
  }
  return at->second;
}

int64_t new_stream(int device) {
  auto& s = m();
  Lock lock(s.mutex);
  int64_t id = s.next_stream++;
  stream_of(device, id);
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

void launch_op(int stream, const std::string& op, const std::vector<Use>& uses) {
  Lock lock(m().mutex);
  raise_found();
  int actor = advance_stream(stream);
  auto& clock = known_here().before_next(stream);
  for (auto& use : uses) check_use(actor, clock, op, use);
  for (auto& use : uses) log_use(actor, clock, op, use);
}

void log_further_use(int stream, const std::string& op, const Use& use) {
  Lock lock(m().mutex);
  log_use(actor_of(stream, this_host()), known_here().before_next(stream), op, use);
}

void use_on_host(const void* data, size_t bytes, bool write) {
  auto& s = m();
  Lock lock(s.mutex);
  auto* block = find_block(data);
  if (!block || block->arena != s.count || !bytes) return;
  size_t lo = static_cast<const char*>(data) - block->user;
  Use use{block, lo, lo + bytes, write};
  int actor = advance_host();
  auto& clock = known_here().done;
  check_use(actor, clock, "the host", use, false);
  log_use(actor, clock, "the host", use);
}

void record_event(Event& event, int stream, bool timed) {
  auto& s = m();
  Lock lock(s.mutex);
  int actor = advance_stream(stream);  // no other event has this tick
  auto& known = known_here();
  if (!covers(known.done, event.waits))
    report_race("race: thread " + s.hosts[this_host()].name +
                " records an event that another thread waits for, and nothing orders the two", true);
  event.at = known.before_next(stream);
  event.stream = stream;
  event.actor = actor;
  event.recorded = true;
  event.timed = timed;
  event.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_for_event(int stream, Event& event) {
  Lock lock(m().mutex);
  look_at_event(event);
  if (event.recorded)
    for (auto* knows : known_here_and_to_all()) join(knows->before_next(stream), event.at);
}

void wait_for_stream(int stream, int for_stream) {
  Lock lock(m().mutex);
  for (auto* knows : known_here_and_to_all()) {
    Clock before = knows->before_next(for_stream);
    join(knows->before_next(stream), before);
  }
}

bool query_event(Event& event) {
  Lock lock(m().mutex);
  look_at_event(event);
  if (!event.recorded) return true;
  for (auto* knows : known_here_and_to_all()) join(knows->done, event.at);  // who is told that it is done may rely on it
  open_pinned();
  return true;
}

bool query_stream(int stream) {
  Lock lock(m().mutex);
  for (auto* knows : known_here_and_to_all()) join(knows->done, knows->before_next(stream));
  open_pinned();
  return true;
}

void host_waits_event(Event& event, const std::string& why) {
  Lock lock(m().mutex);
  look_at_event(event);
  host_waits(why, [&](Knowledge&) { return event.at; });
}

void host_waits_stream(int stream, const std::string& why) {
  host_waits(why, [&](Knowledge& knows) { return knows.before_next(stream); });
}

void host_waits_device(int device, const std::string& why) {
  host_waits(why, [&](Knowledge& knows) {
    Clock each;
    for (size_t i = 0; i < m().streams.size(); ++i)
      if (m().streams[i].device == device) join(each, knows.before_next(i));
    return each;
  });
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
