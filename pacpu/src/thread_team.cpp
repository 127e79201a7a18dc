#include "thread_team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace pacpu {
namespace {

struct Job {
    void (*function)(void*, int);
    void* context;
    int num_parts;
    std::atomic<int> next_part{0};
    int helpers = 0;  // guarded by the pool's mutex
    std::condition_variable idle{};

    void work() {
        for (int part; (part = next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts;) function(context, part);
    }
    bool wants_help() const { return next_part.load(std::memory_order_relaxed) < num_parts && helpers < num_parts - 1; }
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
            std::lock_guard lock(mutex_);
            grow(job.num_parts - 1);
            jobs_.push_back(&job);
        }
        if (job.num_parts == 2) {
            wake_.notify_one();
        } else {
            wake_.notify_all();
        }
        job.work();
        std::unique_lock lock(mutex_);
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        job.idle.wait(lock, [&] { return job.helpers == 0; });
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

    void help() {
        std::unique_lock lock(mutex_);
        for (;;) {
            auto job = std::find_if(jobs_.begin(), jobs_.end(), [](Job* job) { return job->wants_help(); });
            if (job == jobs_.end()) {
                wake_.wait(lock);
                continue;
            }
            Job& mine = **job;
            ++mine.helpers;
            lock.unlock();
            mine.work();
            lock.lock();
            if (--mine.helpers == 0) mine.idle.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Job*> jobs_;
    int num_helpers_ = 0;
};

// Never destroyed: helpers may still wait on it while the process exits. A forked child has none of its parent's
// threads, so it starts a new pool.
Pool* pool = nullptr;

}  // namespace

void run_parts(int num_parts, void (*function)(void*, int), void* context) {
    if (num_parts <= 1) {
        if (num_parts == 1) function(context, 0);
        return;
    }
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    });
    Job job{function, context, num_parts};
    pool->run(job);
}

}  // namespace pacpu
