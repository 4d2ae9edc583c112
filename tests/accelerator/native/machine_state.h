// What memory.cpp and order.cpp share.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "machine.h"

namespace sim {

struct Arena {  // the memory of one device, or all pinned memory
  char *user = nullptr, *work = nullptr;
  size_t size = 0, limit = 0;
  std::map<char*, size_t> holes;
  std::map<std::pair<int, size_t>, std::vector<Block*>> cache;  // free blocks by (owner, size)
  std::map<int, std::vector<Block*>> unchecked;                 // freed since the owner's last allocation
  std::map<char*, Block*> live;
  Stats stats;
};

struct Machine {
  std::recursive_mutex mutex;
  std::vector<Arena> arenas;
  std::vector<Clock> clocks{Clock(1, 0)};
  std::vector<std::string> names{"the host"};
  std::map<std::pair<int, int64_t>, int> actors;
  int64_t next_stream = 1;
  std::set<Block*> shut;
  std::vector<std::string> races;
  std::map<std::string, int64_t> syncs;
  bool raise = true, no_syncs = false;
  int count;
  size_t page = 4096;
  Machine();
};

Machine& m();
using Lock = std::lock_guard<std::recursive_mutex>;

uint64_t tick_of(const Clock&, int actor);
void join(Clock& into, const Clock& other);
bool covers(const Clock&, const Clock& other);
void report_race(const std::string& what, bool can_throw);
void protect_pinned(Block*);
int take_faults(void* at[], int most);
}  // namespace sim
