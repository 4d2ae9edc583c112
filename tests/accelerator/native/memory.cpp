// The simulated machine's memory: arenas that are mapped twice, the caching allocator, and touches by the host.
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <bit>

#include "machine_state.h"

namespace sim {
namespace {

constexpr int kFaults = 64;
std::atomic<int> faults{0};
void* fault_at[kFaults];
struct sigaction before;
Machine* machine = nullptr;

size_t read_number(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

// The host has touched memory that is closed to it. The handler notes that and opens the block, so that the program goes
// on and the next launch, or the test's end, tells what it was. A signal handler can do no more.
void on_fault(int sig, siginfo_t* info, void* context) {
  char* at = static_cast<char*>(info->si_addr);
  for (auto& arena : machine->arenas) {
    if (at < arena.user || at >= arena.user + arena.size) continue;
    int i = faults++;
    if (i < kFaults) fault_at[i] = at;
    char *lo = reinterpret_cast<char*>(reinterpret_cast<size_t>(at) & ~(machine->page - 1)), *hi = lo + machine->page;
    if (machine->mutex.try_lock()) {
      auto next = arena.live.upper_bound(at);
      if (next != arena.live.begin()) {
        Block* block = std::prev(next)->second;
        if (at < block->user + block->size) hi = std::max(hi, block->user + block->size);
      }
      machine->mutex.unlock();
    }
    mprotect(lo, hi - lo, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(SIGSEGV, &before, nullptr);  // not ours: the instruction faults again
}

// The same memory twice: as programs see it, and as the simulator does.
void map_twice(Arena& arena, bool device) {
  int file = memfd_create("sim", MFD_CLOEXEC), fixed = arena.user ? MAP_FIXED : 0;
  if (file < 0 || ftruncate(file, arena.size)) abort();
  arena.work = static_cast<char*>(mmap(arena.work, arena.size, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, file, 0));
  arena.user = static_cast<char*>(
      mmap(arena.user, arena.size, device ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_SHARED | fixed, file, 0));
  close(file);
}

void remap_in_child() {  // after fork: memory of its own, or parent and child would write into each other's
  for (int i = 0; i <= machine->count; ++i) map_twice(machine->arenas[i], i < machine->count);
}

void put_hole(Arena& arena, char* at, size_t size) {
  auto next = arena.holes.upper_bound(at);
  if (next != arena.holes.end() && at + size == next->first) {
    size += next->second;
    next = arena.holes.erase(next);
  }
  if (next != arena.holes.begin()) {
    auto last = std::prev(next);
    if (last->first + last->second == at) {
      last->second += size;
      return;
    }
  }
  arena.holes[at] = size;
}

bool is_free_now(Block* block) {
  auto& s = m();
  if (covers(s.all.done, block->pending)) return true;
  return block->owner >= 0 && covers(s.all.before_next(block->owner), block->pending);
}

}  // namespace

Machine& m() {
  static Machine* it = machine = new Machine;  // never destroyed: tensors outlive static objects
  return *it;
}

Machine::Machine() {
  pthread_atfork(nullptr, nullptr, remap_in_child);
  count = static_cast<int>(read_number("SIM_DEVICES", 2));
  arenas.resize(count + 1);
  for (int i = 0; i <= count; ++i) {
    auto& arena = arenas[i];
    arena.size = arena.limit = read_number("SIM_MEMORY_MIB", 1024) << 20;
    map_twice(arena, i < count);
    arena.holes[arena.user] = arena.size;
  }
  struct sigaction act {};
  act.sa_sigaction = on_fault;
  act.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &act, &before);
}

int take_faults(void* at[], int most) {
  int count = std::min({faults.exchange(0), kFaults, most});
  std::copy(fault_at, fault_at + count, at);
  return count;
}

int devices() { return m().count; }
int pinned_arena() { return m().count; }
Stats& stats(int arena) { return m().arenas[arena].stats; }
size_t capacity(int arena) { return m().arenas[arena].limit; }
void limit_memory(int arena, size_t bytes) {
  auto& given = m().arenas[arena];
  given.limit = std::min(bytes, given.size);
}

Block* allocate_block(int index, int owner, size_t bytes) {
  auto& s = m();
  Lock lock(s.mutex);
  auto& arena = s.arenas[index];
  bool pinned = index == s.count;
  // Another program, or another size, could get any of the memory that this stream has given back: judge it all. What any
  // host thread has waited for counts here, because the thread that frees a tensor comes after all that have let go of it,
  // and the counts of its references, which order them, cannot be seen.
  for (Block* block : arena.unchecked[owner]) {
    for (auto& old : block->log) {
      int stream = s.actors[old.actor].stream;
      if (stream != owner && !block->recorded.count(stream) && tick_of(s.all.before_next(owner), old.actor) < old.at &&
          tick_of(s.all.done, old.actor) < old.at)
        report_race("race: memory of " + s.streams[owner].name + " was freed and may be used again while " + old.op +
              " still " + (old.write ? "writes" : "reads") + " it on " + s.streams[stream].name +
              ": record_stream is missing", false);
    }
    block->log.clear();
  }
  arena.unchecked[owner].clear();
  raise_found();
  size_t size = std::max<size_t>(512, (bytes + 511) / 512 * 512);
  if (pinned) size = std::bit_ceil(std::max(s.page, bytes));  // as torch's allocator of pinned memory rounds
  Block* block = nullptr;
  auto& list = arena.cache[{owner, size}];
  for (size_t i = list.size(); i-- > 0;)
    if (is_free_now(list[i]) && !list[i]->shut) {
      block = list[i];
      list.erase(list.begin() + i);
      break;
    }
  for (int round = 0; !block && round < 2; ++round) {
    for (auto& [at, room] : arena.holes)
      if (room >= size && arena.stats.reserved + size <= arena.limit) {
        block = new Block{index, at, size, 0, owner, {}, {}, {}};
        char* rest = at + size;
        size_t left = room - size;
        arena.holes.erase(at);
        if (left) arena.holes[rest] = left;
        arena.stats.reserved += size;
        arena.stats.reserved_peak = std::max(arena.stats.reserved_peak, arena.stats.reserved);
        break;
      }
    if (!block && !round) empty_cache(index);
  }
  if (!block) return nullptr;
  block->asked = bytes;
  block->log.clear();  // the allocator itself orders a block's uses before and after
  block->recorded.clear();
  block->pending.clear();
  arena.live[block->user] = block;
  arena.stats.allocations++;
  arena.stats.allocated += size;
  arena.stats.peak = std::max(arena.stats.peak, arena.stats.allocated);
  return block;
}

void release_block(Block* block) {
  auto& s = m();
  Lock lock(s.mutex);
  auto& arena = s.arenas[block->arena];
  for (int stream : block->recorded) join(block->pending, s.all.before_next(stream));
  arena.live.erase(block->user);
  arena.stats.allocated -= block->size;
  arena.cache[{block->owner, block->size}].push_back(block);
  if (block->arena < s.count) arena.unchecked[block->owner].push_back(block);
}

void empty_cache(int index) {
  auto& s = m();
  Lock lock(s.mutex);
  auto& arena = s.arenas[index];
  if (index < s.count) host_waits_device(index, "allocator");
  arena.unchecked.clear();
  for (auto& [key, list] : arena.cache) {
    std::vector<Block*> kept;
    for (Block* block : list) {
      if (!is_free_now(block) || block->shut) {
        kept.push_back(block);
        continue;
      }
      put_hole(arena, block->user, block->size);
      arena.stats.reserved -= block->size;
      delete block;
    }
    list = kept;
  }
}

int arena_of(const void* user) {
  auto& s = m();
  auto* at = static_cast<const char*>(user);
  for (size_t i = 0; i < s.arenas.size(); ++i)
    if (at >= s.arenas[i].user && at < s.arenas[i].user + s.arenas[i].size) return i;
  return -1;
}

char* work_address(const void* user) {
  if (!user) return nullptr;
  auto& arena = m().arenas.at(arena_of(user));
  return arena.work + (static_cast<const char*>(user) - arena.user);
}

Block* find_block(const void* user) {
  auto& s = m();
  int index = arena_of(user);
  if (index < 0) return nullptr;
  Lock lock(s.mutex);
  auto& live = s.arenas[index].live;
  auto next = live.upper_bound(static_cast<char*>(const_cast<void*>(user)));
  if (next == live.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return static_cast<const char*>(user) < block->user + block->size ? block : nullptr;
}

void record_stream(Block* block, int stream) {
  Lock lock(m().mutex);
  if (block && stream != block->owner) block->recorded.insert(stream);
}

}  // namespace sim
