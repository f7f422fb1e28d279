// A stand-in for NCCL on machines without a GPU: the functions of nccl.h that are used here, for memory of the host.
//
// Ranks are threads or processes. They meet in a file of shared memory that the unique id names, and pass their numbers
// through it piece by piece. Sums are taken in the order of the ranks; those of bf16 are taken in f32 and rounded once.
// As with NCCL's communicators that do not block, operations run on a thread of the communicator:
// ncclCommGetAsyncError says ncclInProgress until they have ended. A rank that calls another operation than the others,
// with another size, type or root, gets ncclInvalidUsage; a call before the last one has ended gets ncclInvalidArgument.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <new>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

enum Result { SUCCESS = 0, SYSTEM = 2, INTERNAL = 3, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum Type { I64 = 4, F16 = 6, F32 = 7, F64 = 8, BF16 = 9 };
enum Kind : uint32_t { REDUCE = 1, BROADCAST, ALL_GATHER };

constexpr int MAX_RANKS = 64;
constexpr size_t PIECE = 1 << 14;

struct Description {
  uint32_t kind, type, root, place;
  uint64_t count;
};

struct Slot {
  std::atomic<uint32_t> joined;
  // How often this rank has come to a barrier.
  std::atomic<uint64_t> barriers;
  Description description;
  alignas(16) unsigned char bytes[PIECE];
};

struct Shared {
  std::atomic<uint32_t> joined;
  // A rank has given up or failed: all others fail.
  std::atomic<uint32_t> broken;
  Slot slots[MAX_RANKS];
};

struct Operation {
  Description description;
  const unsigned char* send;
  unsigned char* receive;
};

struct Communicator {
  Shared* shared = nullptr;
  int rank = 0, size = 0;
  std::string path;
  std::atomic<int> state{SUCCESS};
  std::atomic<bool> aborted{false};
  std::thread worker;
  std::mutex lock;
  std::string message;
  // Groups that were started.
  int groups = 0;

  int fail(int result, const std::string& why) {
    std::lock_guard<std::mutex> guard(lock);
    message = why;
    shared->broken.store(1);
    return result;
  }
};

size_t width(uint32_t type) {
  switch (type) {
    case I64: case F64: return 8;
    case F32: return 4;
    case F16: case BF16: return 2;
    default: return 0;
  }
}

template <class Done> bool wait(Communicator& c, Done done) {
  for (int tries = 0; !done(); tries++) {
    if (c.aborted.load() || c.shared->broken.load()) return false;
    if (tries < 200) sched_yield(); else usleep(50);
  }
  return true;
}

bool barrier(Communicator& c) {
  uint64_t own = c.shared->slots[c.rank].barriers.fetch_add(1) + 1;
  return wait(c, [&] {
    for (int rank = 0; rank < c.size; rank++)
      if (c.shared->slots[rank].barriers.load() < own) return false;
    return true;
  });
}

float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T> void sum(Communicator& c, size_t count, unsigned char* to) {
  std::vector<T> total(count), term(count);
  for (int rank = 0; rank < c.size; rank++) {
    memcpy(term.data(), c.shared->slots[rank].bytes, count * sizeof(T));
    for (size_t i = 0; i < count; i++) total[i] = rank == 0 ? term[i] : (T)(total[i] + term[i]);
  }
  memcpy(to, total.data(), count * sizeof(T));
}

void sum_bf16(Communicator& c, size_t count, unsigned char* to) {
  std::vector<float> total(count);
  std::vector<uint16_t> bits(count);
  for (int rank = 0; rank < c.size; rank++) {
    memcpy(bits.data(), c.shared->slots[rank].bytes, count * 2);
    for (size_t i = 0; i < count; i++) total[i] = rank == 0 ? from_bf16(bits[i]) : total[i] + from_bf16(bits[i]);
  }
  for (size_t i = 0; i < count; i++) bits[i] = to_bf16(total[i]);
  memcpy(to, bits.data(), count * 2);
}

int add_up(Communicator& c, uint32_t type, size_t count, unsigned char* to) {
  switch (type) {
    case I64: sum<int64_t>(c, count, to); return SUCCESS;
    case F32: sum<float>(c, count, to); return SUCCESS;
    case F64: sum<double>(c, count, to); return SUCCESS;
    case BF16: sum_bf16(c, count, to); return SUCCESS;
    default: return c.fail(ARGUMENT, "no sums of this type");
  }
}

int run(Communicator& c, const Operation& operation) {
  const Description& own = operation.description;
  const size_t size = width(own.type);
  if (!size) return c.fail(ARGUMENT, "an unknown data type");
  Slot& slot = c.shared->slots[c.rank];
  slot.description = own;
  if (!barrier(c)) return REMOTE;
  for (int rank = 0; rank < c.size; rank++) {
    const Description& other = c.shared->slots[rank].description;
    if (memcmp(&other, &own, sizeof own) != 0) {
      char why[200];
      snprintf(why, sizeof why, "rank %d starts operation %u of type %u, root %u, %llu numbers, and rank %d %u, %u, %u, %llu",
               c.rank, own.kind, own.type, own.root, (unsigned long long)own.count, rank, other.kind, other.type,
               other.root, (unsigned long long)other.count);
      return c.fail(USAGE, why);
    }
  }
  // Numbers that each rank puts in at once.
  const size_t piece = PIECE / size;
  for (size_t at = 0; at < own.count; at += piece) {
    const size_t count = own.count - at < piece ? own.count - at : piece;
    if (own.kind != BROADCAST || (int)own.root == c.rank) memcpy(slot.bytes, operation.send + at * size, count * size);
    if (!barrier(c)) return REMOTE;
    unsigned char* to = operation.receive + at * size;
    int result = SUCCESS;
    switch (own.kind) {
      case REDUCE: if ((int)own.root == c.rank) result = add_up(c, own.type, count, to); break;
      case BROADCAST: memcpy(to, c.shared->slots[own.root].bytes, count * size); break;
      case ALL_GATHER:
        for (int rank = 0; rank < c.size; rank++)
          memcpy(operation.receive + (rank * own.count + at) * size, c.shared->slots[rank].bytes, count * size);
        break;
    }
    if (result != SUCCESS) return result;
    if (!barrier(c)) return REMOTE;
  }
  return SUCCESS;
}

// What a test asked for: a rank's group of this number fails.
struct Fault {
  int rank, group, kind;
};
std::mutex faults_lock;
std::vector<Fault> faults;

int fault_of(const Communicator& c) {
  std::lock_guard<std::mutex> guard(faults_lock);
  for (const Fault& fault : faults)
    if (fault.rank == c.rank && fault.group == c.groups) return fault.kind;
  return 0;
}

thread_local int depth = 0;
thread_local Communicator* grouped = nullptr;
thread_local std::vector<Operation> waiting;
thread_local std::string told;

int launch(Communicator* c, std::vector<Operation> operations) {
  if (c->state.load() != SUCCESS) return ARGUMENT;
  if (c->worker.joinable()) c->worker.join();
  c->groups++;
  const int fault = fault_of(*c);
  if (fault == 1) return c->fail(SYSTEM, "a fault that the test asked for");
  c->state.store(IN_PROGRESS);
  c->worker = std::thread([c, fault, operations = std::move(operations)] {
    int result = SUCCESS;
    if (fault == 2) result = c->fail(INTERNAL, "a fault that the test asked for");
    // A device that does not respond.
    if (fault == 3) wait(*c, [] { return false; });
    for (const Operation& operation : operations) {
      if (result != SUCCESS) break;
      result = run(*c, operation);
    }
    c->state.store(result);
  });
  return IN_PROGRESS;
}

int add(Communicator* c, Operation operation) {
  if (!c || operation.description.root >= (uint32_t)c->size) return ARGUMENT;
  if (grouped && grouped != c) return USAGE;
  grouped = c;
  waiting.push_back(operation);
  if (depth) return SUCCESS;
  grouped = nullptr;
  return launch(c, std::move(waiting));
}

Operation operation(Kind kind, const void* send, void* receive, size_t count, int type, int root) {
  Description description{kind, (uint32_t)type, (uint32_t)root, (uint32_t)waiting.size(), count};
  return {description, (const unsigned char*)send, (unsigned char*)receive};
}

}  // namespace

extern "C" {

struct UniqueId {
  char text[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

int ncclGetVersion(int* version) {
  *version = 22800;
  return SUCCESS;
}

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<unsigned> number{0};
  memset(id, 0, sizeof *id);
  const char* folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  snprintf(id->text, sizeof id->text, "%s/flow-stand-in-nccl-%d-%u", folder, (int)getpid(), number++);
  unlink(id->text);
  int file = open(id->text, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0) return SYSTEM;
  // Zeros are the initial state of everything in it.
  int sized = ftruncate(file, sizeof(Shared));
  close(file);
  return sized == 0 ? SUCCESS : SYSTEM;
}

int ncclCommInitRankConfig(void** made, int size, UniqueId id, int rank, Config* config) {
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return ARGUMENT;
  if (!config || config->magic != 0xcafebeef || config->blocking != 0) return ARGUMENT;
  int file = open(id.text, O_RDWR);
  if (file < 0) return SYSTEM;
  void* map = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (map == MAP_FAILED) return SYSTEM;
  Communicator* c = new Communicator;
  c->shared = (Shared*)map;
  c->rank = rank;
  c->size = size;
  c->path = id.text;
  c->state.store(IN_PROGRESS);
  *made = c;
  if (c->shared->slots[rank].joined.exchange(1)) {
    c->state.store(c->fail(USAGE, "this rank has joined already"));
    return IN_PROGRESS;
  }
  if ((int)(c->shared->joined.fetch_add(1) + 1) == size) unlink(id.text);
  c->worker = std::thread([c] {
    bool all = wait(*c, [&] { return (int)c->shared->joined.load() == c->size; });
    c->state.store(all ? SUCCESS : REMOTE);
  });
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(void* communicator, int* state) {
  *state = ((Communicator*)communicator)->state.load();
  return SUCCESS;
}

int ncclCommAbort(void* communicator) {
  Communicator* c = (Communicator*)communicator;
  c->aborted.store(true);
  if (c->worker.joinable()) c->worker.join();
  unlink(c->path.c_str());
  munmap(c->shared, sizeof(Shared));
  delete c;
  return SUCCESS;
}

int ncclGroupStart() {
  depth++;
  return SUCCESS;
}

int ncclGroupEnd() {
  if (!depth) return USAGE;
  if (--depth || !grouped) return SUCCESS;
  Communicator* c = grouped;
  grouped = nullptr;
  std::vector<Operation> operations;
  operations.swap(waiting);
  return launch(c, std::move(operations));
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root, void* c, void*) {
  return op != 0 ? ARGUMENT : add((Communicator*)c, operation(REDUCE, send, receive, count, type, root));
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* c, void*) {
  return add((Communicator*)c, operation(BROADCAST, send, receive, count, type, root));
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, void* c, void*) {
  return add((Communicator*)c, operation(ALL_GATHER, send, receive, count, type, 0));
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case SUCCESS: return "no error";
    case SYSTEM: return "unhandled system error";
    case INTERNAL: return "internal error";
    case ARGUMENT: return "invalid argument";
    case USAGE: return "invalid usage";
    case REMOTE: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(void* communicator) {
  if (!communicator) return "";
  Communicator* c = (Communicator*)communicator;
  std::lock_guard<std::mutex> guard(c->lock);
  told = c->message;
  return told.c_str();
}

// For tests: the group of this number (the first is 1) of a rank fails at its start (1), later (2), or never ends (3).
// 0 forgets all faults.
void standInFault(int rank, int group, int kind) {
  std::lock_guard<std::mutex> guard(faults_lock);
  if (kind) faults.push_back({rank, group, kind}); else faults.clear();
}

}  // extern "C"
