// What serves each kind of call, and what was counted.
//
// Read by any thread, with the GIL or without: the entries are guarded by a shared mutex, which is
// never held while Python is called, memory allocated or a kernel launched. Written with the GIL.

#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.h"

namespace tuner {

// Refusals kept; more start over, so that a server of ever new shapes stays small. Of plans Python
// keeps as few.
constexpr size_t kMaxRefusals = 4096;
// Kinds of reasons: each is a sentence of the runtime's.
constexpr size_t kMaxReasons = 256;

using Launch = int (*)(void* const*, int64_t const*, double const*, void*, void*);

// A number that grows with the call's `length`.
struct Line {
  int64_t base, slope;
  int64_t at(int64_t length) const { return base + slope * length; }
};

struct Step {
  Launch launch;
  std::vector<std::pair<int, Line>> tensors;  // which address, offset in bytes
  std::vector<Line> integers;
  std::vector<double> scalars;
  int64_t workspace_at;
};

// Where a plan's configuration comes from (tuner/runtime/call/dispatch.py).
enum Source : int { kExact, kPortfolio, kSources };

struct Plan {
  std::vector<int64_t> sizes, strides;
  int64_t workspace_bytes;
  int source;
  std::vector<Step> steps;
};

// A plan, or the reason of a refusal, for lengths from `first` to the one that it is stored under.
struct Entry {
  int64_t first;
  std::shared_ptr<Plan const> plan;  // null: refused
  size_t reason;                     // position in Table::refused
  double until;                      // of a refusal
};

struct Found {
  std::shared_ptr<Plan const> plan;
  bool is_refused = false;  // and counted
};

// A refusal that a thread has met: while the table's version is the same it needs no lock.
struct Met {
  long long version = 0;  // no table's
  int64_t first, last;
  size_t reason;
  double until;
  Kind kind;
};

constexpr size_t kMet = 8;
inline thread_local std::array<Met, kMet> met;  // by hash

inline double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

class Table {
 public:
  std::atomic<double> plans_until{0}, refusals_until{0};  // calls are answered up to this time
  std::array<std::atomic<long long>, kSources> hits{};  // calls by source
  std::array<std::atomic<long long>, kMaxReasons> refused{};  // calls by reason

  // Both empty: Python decides.
  Found find(Call const& call) {
    double const time = now();
    if (time >= refusals_until.load(std::memory_order_relaxed)) return {};
    Met& known_here = met[Hash()(call.kind) % kMet];
    if (known_here.version == version_.load(std::memory_order_acquire) &&
        known_here.first <= call.length && call.length <= known_here.last &&
        time < known_here.until && known_here.kind == call.kind) {
      refused[known_here.reason].fetch_add(1, std::memory_order_relaxed);
      return {nullptr, true};
    }
    std::shared_lock lock(mutex_);
    auto const known = entries_.find(call.kind);
    if (known == entries_.end()) return {};
    auto const entry = known->second.lower_bound(call.length);
    if (entry == known->second.end() || entry->second.first > call.length) return {};
    Entry const& found = entry->second;
    if (found.plan) {
      if (time >= plans_until.load(std::memory_order_relaxed)) return {};
      return {found.plan, false};
    }
    if (time >= found.until) return {};
    known_here = {version_, found.first, entry->first, found.reason, found.until, call.kind};
    refused[found.reason].fetch_add(1, std::memory_order_relaxed);
    return {nullptr, true};
  }

  void count_hit(Plan const& plan) {
    hits[plan.source].fetch_add(1, std::memory_order_relaxed);
  }

  // For lengths from entry.first to last; what is known of others stays. False where the table was
  // cleared since `generation` (negative: whenever).
  bool put(Kind const& kind, int64_t last, Entry entry, long long generation) {
    std::unique_lock lock(mutex_);
    if (generation >= 0 && generation != generation_) return false;
    ++version_;
    if (!entry.plan && ++refusals_ > kMaxRefusals) drop_refusals();
    auto& ranges = entries_[kind];
    auto at = ranges.lower_bound(entry.first);
    while (at != ranges.end() && at->second.first <= last) {
      Entry const before = at->second;
      if (before.first < entry.first) ranges.emplace(entry.first - 1, before);
      if (at->first > last) {
        at->second.first = last + 1;
        break;
      }
      at = ranges.erase(at);
    }
    ranges.insert_or_assign(last, std::move(entry));
    return true;
  }

  void clear() {
    std::unique_lock lock(mutex_);
    entries_.clear();
    refusals_ = 0;
    ++generation_;
    ++version_;
  }

  // How often it was cleared.
  long long generation() {
    std::shared_lock lock(mutex_);
    return generation_;
  }

  // A child has the table as it was, and none of the threads that may have held its mutex.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child() { new (&mutex_) std::shared_mutex; }

 private:
  void drop_refusals() {
    for (auto known = entries_.begin(); known != entries_.end();) {
      std::erase_if(known->second, [](auto const& range) { return !range.second.plan; });
      known = known->second.empty() ? entries_.erase(known) : std::next(known);
    }
    refusals_ = 1;  // the one that is put
  }

  std::unordered_map<Kind, std::map<int64_t, Entry>, Hash> entries_;  // by kind, by last length
  size_t refusals_ = 0;  // put since the last were dropped
  long long generation_ = 0;
  std::atomic<long long> version_{1};  // changes with the entries
  std::shared_mutex mutex_;
};

inline Table& table() {
  static Table& made = *new Table;  // outlives threads that call at the process's end
  return made;
}

inline void watch_forks() {
  static int const is_watched = pthread_atfork([] { table().before_fork(); },
                                               [] { table().after_fork_in_parent(); },
                                               [] { table().after_fork_in_child(); });
  (void)is_watched;
}

}  // namespace tuner
