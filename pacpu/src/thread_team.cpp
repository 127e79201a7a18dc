#include "thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace pacpu {
namespace {

using Clock = std::chrono::steady_clock;

// How long a helper looks for the next call before it sleeps. Waking it takes some 50 us, and the calls of an iteration
// follow each other sooner than that.
constexpr auto awake_time = std::chrono::microseconds(100);

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits for what another thread does within a few us, unless that thread has lost its core.
class Backoff {
public:
    void wait() {
        if (++rounds_ < 2000) return pause_briefly();
        if (rounds_ < 2200) {
            sched_yield();
            return;
        }
        const timespec time{0, 50'000};
        nanosleep(&time, nullptr);
    }

private:
    int rounds_ = 0;
};

// Held for some ns only. A mutex would put the loser to sleep.
class SpinLock {
public:
    void lock() {
        for (Backoff backoff; is_locked_.exchange(true, std::memory_order_acquire);) backoff.wait();
    }
    void unlock() { is_locked_.store(false, std::memory_order_release); }

private:
    std::atomic<bool> is_locked_{false};
};

struct Phase {
    std::atomic<int> next_part{0}, num_done{0};
};

struct Job {
    void (*function)(void*, int, int);
    void* context;
    int num_phases;
    const int* num_parts;
    int max_helpers;
    int num_joined = 0;                // guarded by the pool's lock
    std::atomic<int> num_helpers{0};  // those at work
    Phase phases[max_phases]{};
    std::atomic<bool> has_failed{false};
    std::exception_ptr failure{};  // of the part that failed first

    void run(int phase, int part) {
        if (has_failed.load(std::memory_order_relaxed)) return;
        try {
            function(context, phase, part);
        } catch (...) {
            if (!has_failed.exchange(true)) failure = std::current_exception();
        }
    }

    void work() {
        for (int i = 0; i < num_phases; ++i) {
            Phase& phase = phases[i];
            int done = 0;
            for (int part; (part = phase.next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts[i]; ++done)
                run(i, part);
            if (done) phase.num_done.fetch_add(done, std::memory_order_release);
            for (Backoff backoff; phase.num_done.load(std::memory_order_acquire) < num_parts[i];) backoff.wait();
        }
    }
};

int usable_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return std::max(1u, std::thread::hardware_concurrency());
}

class Pool {
public:
    void run(Job& job) {
        {
            std::lock_guard lock(jobs_lock_);
            grow(job.max_helpers);
            jobs_.push_back(&job);
        }
        num_calls_.fetch_add(1);
        if (num_asleep_.load() > 0) wake(job.max_helpers);
        job.work();
        {
            std::lock_guard lock(jobs_lock_);
            jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        }
        for (Backoff backoff; job.num_helpers.load(std::memory_order_acquire) > 0;) backoff.wait();
        if (job.failure) std::rethrow_exception(job.failure);
    }

private:
    // Helpers beyond the CPUs we may use would only take turns; a refused thread is no error, only less help.
    void grow(int wanted) {
        if (num_helpers_ >= wanted) return;
        for (wanted = std::min(wanted, usable_cpus() - 1); num_helpers_ < wanted; ++num_helpers_) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return;
            }
        }
    }

    void wake(int wanted) {
        std::lock_guard lock(sleep_);
        if (wanted == 1)
            woken_.notify_one();
        else
            woken_.notify_all();
    }

    void help() {
        auto sleep_at = Clock::now() + awake_time;
        for (;;) {
            // Before the look at the jobs: a call that comes after the look differs from this number.
            const unsigned seen = num_calls_.load();
            if (Job* job = join()) {
                job->work();
                job->num_helpers.fetch_sub(1, std::memory_order_release);  // the last touch: the job may be gone
                sleep_at = Clock::now() + awake_time;
                continue;
            }
            while (num_calls_.load(std::memory_order_relaxed) == seen) {
                for (int i = 0; i < 32; ++i) pause_briefly();
                if (Clock::now() < sleep_at) continue;
                std::unique_lock lock(sleep_);
                num_asleep_.fetch_add(1);  // before the caller's number is read again: one of the two sees the other
                woken_.wait(lock, [&] { return num_calls_.load() != seen; });
                num_asleep_.fetch_sub(1);
            }
        }
    }

    Job* join() {
        std::lock_guard lock(jobs_lock_);
        for (Job* job : jobs_) {
            const Phase& last = job->phases[job->num_phases - 1];
            if (job->num_joined == job->max_helpers ||
                last.next_part.load(std::memory_order_relaxed) >= job->num_parts[job->num_phases - 1])
                continue;
            ++job->num_joined;
            job->num_helpers.fetch_add(1, std::memory_order_relaxed);
            return job;
        }
        return nullptr;
    }

    SpinLock jobs_lock_;
    std::vector<Job*> jobs_;
    int num_helpers_ = 0;
    std::atomic<unsigned> num_calls_{0};
    std::mutex sleep_;
    std::condition_variable woken_;
    std::atomic<int> num_asleep_{0};
};

// Never destroyed: helpers may still wait on it while the process exits. A forked child has none of its parent's
// threads, so it starts a new pool.
Pool* pool = nullptr;

}  // namespace

void run_phases(int num_phases, const int* num_parts, int num_threads, void (*function)(void*, int, int), void* context) {
    if (num_threads <= 1 || (num_phases == 1 && num_parts[0] <= 1)) {
        for (int phase = 0; phase < num_phases; ++phase)
            for (int part = 0; part < num_parts[phase]; ++part) function(context, phase, part);
        return;
    }
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    });
    Job job{function, context, num_phases, num_parts, num_threads - 1};
    pool->run(job);
}

}  // namespace pacpu
