// What memory.cpp, hosts.cpp and order.cpp share.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <array>
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

struct Host {
  std::string name;
  bool is_start_known;
  std::shared_ptr<Knowledge> knows;  // shared with handovers, and copied before it changes
};

struct Stream {
  int device;
  std::string name;
};

struct Actor {
  int stream, host;  // stream -1: the host thread itself
};

struct Machine {
  std::recursive_mutex mutex;
  std::vector<Arena> arenas;
  std::vector<Host> hosts;
  std::vector<Stream> streams;
  std::map<std::pair<int, int64_t>, int> stream_ids;
  std::vector<Actor> actors;
  std::map<std::pair<int, int>, int> actor_ids;
  Knowledge all;  // of all host threads together: what has happened, whoever knows it
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
void join(Knowledge& into, const Knowledge& other);
bool covers(const Knowledge&, const Knowledge& other);
int actor_of(int stream, int host);
Knowledge& known_here();  // by this host thread, to be changed
std::array<Knowledge*, 2> known_here_and_to_all();
void report_race(const std::string& what, bool can_throw);
void protect_pinned(Block*);
int take_faults(void* at[], int most);
}  // namespace sim
