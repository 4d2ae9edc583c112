// The simulated machine: devices with memory, streams and events. It knows nothing of PyTorch.
//
// Every op runs at once, on the CPU, when it is launched. Whether it *may* run then is judged by vector clocks: the actors
// are the streams and the host. A launch joins the host's clock into its stream's and ticks that; an event keeps a copy of
// its stream's clock, and who waits for it joins that copy. Each block of memory remembers who used which of its bytes at
// which tick. Two uses of the same bytes, one of them a write, whose clocks do not order them, are a race. So the verdict
// does not depend on timing: a missing wait is found by every run.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // ticks by actor; actor 0 is the host

struct Access {
  size_t lo, hi;  // bytes of the block
  int actor;
  uint64_t at;  // the actor's tick
  bool write;
  std::string op;
};

struct Block {
  int arena;               // the device's index, or the number of devices for pinned host memory
  char* user;              // where programs see it: device memory is not accessible there
  size_t size, asked;
  int owner;               // the actor on whose stream it was allocated
  std::set<int> recorded;  // the actors of record_stream
  Clock pending;           // of the moment when the recorded streams are through with it
  std::vector<Access> log;
  bool shut = false;       // pinned memory that the host may not touch now
};

struct Use {  // of some bytes of a block, by an op
  Block* block;
  size_t lo, hi;
  bool write;
};

struct Event {
  Clock at;
  int actor = 0;
  double ms = 0;
  bool recorded = false, timed = false;
};

struct Stats {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, allocations = 0;
};

// Memory (memory.cpp)
int devices();
int pinned_arena();
Block* allocate_block(int arena, int actor, size_t bytes);  // nullptr: out of memory
void release_block(Block*);
void empty_cache(int arena);
Block* find_block(const void* user);
int arena_of(const void* user);         // -1: neither device nor pinned memory
char* work_address(const void* user);   // the simulator's own view of the same memory
void record_stream(Block*, int actor);
Stats& stats(int arena);
size_t capacity(int arena);
void limit_memory(int arena, size_t bytes);

// Order (order.cpp)
int actor_of(int device, int64_t stream);
int64_t new_stream(int device);
void launch_op(int actor, const std::string& op, const std::vector<Use>&);       // throws at a race
void log_further_use(int actor, const std::string& op, const Use&);  // by the op launched last
void record_event(Event&, int actor, bool timed);
void wait_for_event(int actor, const Event&);
void wait_for_stream(int actor, int for_actor);
bool query_event(const Event&);
bool query_stream(int actor);
bool could_overlap(const Event&, const Event&);  // neither is ordered before the other
void host_waits(const Clock&, const std::string& why);
void host_waits_actor(int actor, const std::string& why);
void host_waits_device(int device, const std::string& why);

// Verdicts (order.cpp)
std::vector<std::string> take_races();
std::map<std::string, int64_t> take_syncs();  // how often the host has waited, by cause
void raise_at_once(bool);
void forbid_syncs(bool);
void raise_found();  // throws what was found where nothing could be thrown
}  // namespace sim
