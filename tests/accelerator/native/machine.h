// The simulated machine: devices with memory, streams and events. It knows nothing of PyTorch.
//
// Every op runs at once, on the CPU, when it is launched. Whether it *may* run then is judged by vector clocks. The actors
// are the pairs of a stream and a host thread that launches on it, because ops of one stream have an order only where their
// launches have one; and the host threads themselves. Each host thread knows, for each stream, what comes before the op that
// it launches next there, and which work has ended because it has waited for it. A launch ticks its actor; an event keeps
// a copy of what comes before it, and who waits for it joins that copy. What one thread knows, another one knows only when
// the program orders the two, by a lock or a queue (hosts.cpp). Each block of memory remembers who used which of its bytes
// at which tick. Two uses of the same bytes, one of them a write, whose clocks do not order them, are a race. So the
// verdict does not depend on timing: a missing wait is found by every run.
//
// One thing does: a lock orders two threads in the order in which they took it. Threads that share one by chance may hide a
// race between them in one run that another run finds. No run finds a race where none is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // ticks by actor

struct Knowledge {  // of a host thread
  Clock done;                  // the work that has ended
  std::vector<Clock> streams;  // by stream: what comes before an op that is launched now
  Clock& before_next(int stream);
};

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
  int owner;               // the stream on which it was allocated; -1: pinned memory has none
  std::set<int> recorded;  // the streams of record_stream
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
  Clock at, waits;  // `waits`: of the host threads that have waited for it
  int stream = 0, actor = 0;
  double ms = 0;
  bool recorded = false, timed = false;
};

struct Stats {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, allocations = 0;
};

// Memory (memory.cpp)
int devices();
int pinned_arena();
Block* allocate_block(int arena, int stream, size_t bytes);  // nullptr: out of memory
void release_block(Block*);
void empty_cache(int arena);
Block* find_block(const void* user);
int arena_of(const void* user);         // -1: neither device nor pinned memory
char* work_address(const void* user);   // the simulator's own view of the same memory
void record_stream(Block*, int stream);
Stats& stats(int arena);
size_t capacity(int arena);
void limit_memory(int arena, size_t bytes);

// Host threads (hosts.cpp)
int this_host();  // whose knowledge the running thread uses; torch_threads.cpp says it
int new_host(const std::string& name, bool is_start_known);
void end_host(int host);

struct Handover {  // what host threads leave in a lock, a queue or the like for those that come after them
  std::shared_ptr<Knowledge> knows;
};
void publish_to(Handover&);
void learn_from(const Handover&);

// Order (order.cpp)
int stream_of(int device, int64_t id);
int64_t new_stream(int device);
void launch_op(int stream, const std::string& op, const std::vector<Use>&);  // throws at a race
void log_further_use(int stream, const std::string& op, const Use&);         // by the op launched last
void use_on_host(const void* data, size_t bytes, bool write);                // of pinned memory
void record_event(Event&, int stream, bool timed);
void wait_for_event(int stream, Event&);
void wait_for_stream(int stream, int for_stream);
bool query_event(Event&);
bool query_stream(int stream);
bool could_overlap(const Event&, const Event&);  // neither is ordered before the other
void host_waits_event(Event&, const std::string& why);
void host_waits_stream(int stream, const std::string& why);
void host_waits_device(int device, const std::string& why);

// Verdicts (order.cpp)
std::vector<std::string> take_races();
std::map<std::string, int64_t> take_syncs();  // how often the host has waited, by cause
void raise_at_once(bool);
void forbid_syncs(bool);
void raise_found();  // throws what was found where nothing could be thrown
}  // namespace sim
