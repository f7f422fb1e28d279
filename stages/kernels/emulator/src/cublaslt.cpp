// A stand-in for cuBLASLt on machines without a GPU: the functions of cublasLt.h that are used here, for memory of the host.
//
// It refuses attributes of a wrong size, layouts that do not fit each other, a product that is not the one for which its algorithm
// was chosen, and addresses less aligned than was said then. A product is a sum in 64 bits that is rounded once to f32, and
// once more for a result in bf16, of factors that are rounded to TF32 where that is asked for.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

enum Status { SUCCESS = 0, ALLOCATION = 3, INVALID = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14 };

constexpr size_t WORKSPACE = 512;

std::atomic<int64_t> alive{0};
thread_local uint64_t products = 0, choices = 0, aligned = 256;
thread_local int fault = 0, fault_status = 0;

struct Descriptor {
  int compute, scale, transposed[2] = {0, 0};
  uint32_t epilogue = 1;
  const float* bias = nullptr;
};

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t count = 1;
  int64_t step = 0;
};

struct Preference {
  size_t workspace = 0;
  uint32_t aligned[4] = {256, 256, 256, 256};
};

struct Chosen {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

template <class T> int make(T** to, const T& value) {
  *to = new T(value);
  alive++;
  return SUCCESS;
}

template <class T> int destroy(T* value) {
  delete value;
  alive--;
  return SUCCESS;
}

template <class T> int store(T* to, const void* from, size_t size) {
  if (size != sizeof(T)) return INVALID;
  memcpy(to, from, size);
  return SUCCESS;
}

// To the nearest number of 10 bits of a fraction, of two the even one.
float rounded_to_tf32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  memcpy(&value, &bits, 4);
  return value;
}

// The same of 7 bits, as the upper half of its bits. What is not a number stays so.
uint16_t rounded_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float at(const void* matrix, int type, int64_t place, bool tf32) {
  if (type == F32) return tf32 ? rounded_to_tf32(((const float*)matrix)[place]) : ((const float*)matrix)[place];
  uint32_t wide = (uint32_t)((const uint16_t*)matrix)[place] << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

bool fits(const Layout& l) { return l.rows && l.columns && l.leading >= (int64_t)l.rows && l.count > 0; }

// What an address is a multiple of, at most 16.
uint64_t alignment(const void* address) {
  uint64_t multiple = 16;
  while ((uintptr_t)address % multiple) multiple /= 2;
  return multiple;
}

// The inner length, or 0 where the parts of a product do not fit each other.
uint64_t inner(const Descriptor& d, const Layout& a, const Layout& b, const Layout& c) {
  if (!fits(a) || !fits(b) || !fits(c) || a.count != c.count || b.count != c.count || a.type != b.type) return 0;
  uint64_t rows = d.transposed[0] ? a.columns : a.rows, k = d.transposed[0] ? a.rows : a.columns;
  uint64_t columns = d.transposed[1] ? b.rows : b.columns, other = d.transposed[1] ? b.columns : b.rows;
  return rows == c.rows && columns == c.columns && k == other ? k : 0;
}

// Of all that an algorithm is chosen by.
uint64_t hash_of(const Descriptor& d, const Layout& a, const Layout& b, const Layout& c) {
  uint64_t hash = d.compute + 100 * d.epilogue + 1000 * d.transposed[0] + 2000 * d.transposed[1];
  for (const Layout* l : {&a, &b, &c})
    for (uint64_t value : {(uint64_t)l->type, l->rows, l->columns, (uint64_t)l->leading, (uint64_t)l->count, (uint64_t)l->step})
      hash = (hash ^ hash >> 29 ^ value) * 0x9e3779b97f4a7c15u;
  return hash;
}

}  // namespace

extern "C" {

int cublasLtCreate(int** to) {
  *to = new int(24);
  return SUCCESS;
}

int cublasLtMatmulDescCreate(Descriptor** to, int compute, int scale) {
  Descriptor made;
  made.compute = compute;
  made.scale = scale;
  return make(to, made);
}

int cublasLtMatmulDescSetAttribute(Descriptor* d, int attribute, const void* from, size_t size) {
  if (attribute == 3 || attribute == 4) return store(&d->transposed[attribute - 3], from, size);
  if (attribute == 7) return store(&d->epilogue, from, size);
  return attribute == 8 ? store(&d->bias, from, size) : INVALID;
}

int cublasLtMatmulDescDestroy(Descriptor* d) { return destroy(d); }

int cublasLtMatrixLayoutCreate(Layout** to, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return make(to, Layout{type, rows, columns, leading});
}

int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* from, size_t size) {
  if (attribute == 5) return store(&layout->count, from, size);
  return attribute == 6 ? store(&layout->step, from, size) : INVALID;
}

int cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }

int cublasLtMatmulPreferenceCreate(Preference** to) { return make(to, Preference()); }

int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* from, size_t size) {
  if (attribute == 1) return store(&preference->workspace, from, size);
  return attribute >= 5 && attribute <= 8 ? store(&preference->aligned[attribute - 5], from, size) : INVALID;
}

int cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

int cublasLtMatmulAlgoGetHeuristic(const int* handle, const Descriptor* d, const Layout* a, const Layout* b, const Layout* c,
                                   const Layout* result, const Preference* preference, int asked, Chosen* to, int* found) {
  choices++;
  *found = 0;
  if (fault == 1) return fault_status;
  if (*handle != 24 || asked < 1 || c != result || !inner(*d, *a, *b, *c)) return INVALID;
  bool factors = a->type == F32 || a->type == BF16, tf32 = d->compute == 77;
  // A result in bf16 is one of factors in bf16, without a bias.
  bool result_is_known = c->type == F32 || (c->type == BF16 && a->type == BF16 && d->epilogue == 1);
  if (!factors || !result_is_known || d->scale != F32) return NOT_SUPPORTED;
  if ((d->compute != 68 && !tf32) || (tf32 && a->type != F32)) return NOT_SUPPORTED;
  // Of epilogues none, and a bias whose place is known.
  if ((d->epilogue != 1 && d->epilogue != 4) || (d->epilogue == 4 && !d->bias)) return NOT_SUPPORTED;
  if (preference->workspace < WORKSPACE) return NOT_SUPPORTED;
  memset(to, 0, sizeof *to);
  to->algorithm[0] = hash_of(*d, *a, *b, *c);
  for (int i = 0; i < 4; i++) {
    uint32_t aligned = preference->aligned[i];
    if (!aligned || aligned & (aligned - 1) || aligned > 256) return INVALID;
    to->algorithm[1 + i] = aligned;
  }
  // The bias is taken to be aligned as it is now.
  to->algorithm[5] = d->epilogue == 4 ? alignment(d->bias) : 1;
  to->workspace = WORKSPACE;
  *found = 1;
  return SUCCESS;
}

int cublasLtMatmul(const int* handle, const Descriptor* d, const float* alpha, const void* a, const Layout* of_a, const void* b,
                   const Layout* of_b, const float* beta, const void* c, const Layout* of_c, void* to, const Layout* of_result,
                   const uint64_t* algorithm, unsigned char* workspace, size_t size, void*) {
  if (fault == 2) return fault_status;
  uint64_t k = inner(*d, *of_a, *of_b, *of_c);
  if (*handle != 24 || !k || of_c != of_result || c != to || !algorithm) return INVALID;
  if (algorithm[0] != hash_of(*d, *of_a, *of_b, *of_c) || size < WORKSPACE) return INVALID;
  const void* addresses[4] = {a, b, c, to};
  for (int i = 0; i < 4; i++)
    if ((uintptr_t)addresses[i] % algorithm[1 + i]) return INVALID;
  if (d->epilogue == 4 && (!d->bias || (uintptr_t)d->bias % algorithm[5])) return INVALID;
  if ((uintptr_t)workspace % 16) return INVALID;
  memset(workspace, 0xff, WORKSPACE);
  if (of_a->type != F32)
    for (uint64_t bytes : {(uint64_t)a, (uint64_t)b, 2ul * of_a->leading, 2ul * of_b->leading, 2ul * of_a->step, 2ul * of_b->step})
      while (bytes % aligned) aligned /= 2;
  for (int64_t matrix = 0; matrix < of_c->count; matrix++)
    for (uint64_t column = 0; column < of_c->columns; column++)
      for (uint64_t row = 0; row < of_c->rows; row++) {
        double sum = 0;
        for (uint64_t i = 0; i < k; i++) {
          uint64_t in_a = d->transposed[0] ? i + row * of_a->leading : row + i * of_a->leading;
          uint64_t in_b = d->transposed[1] ? column + i * of_b->leading : i + column * of_b->leading;
          bool tf32 = d->compute == 77;
          sum += (double)at(a, of_a->type, matrix * of_a->step + in_a, tf32) * at(b, of_b->type, matrix * of_b->step + in_b, tf32);
        }
        int64_t place = matrix * of_c->step + row + column * of_c->leading;
        sum *= *alpha;
        if (*beta != 0) sum += (double)*beta * at(to, of_c->type, place, false);
        if (d->epilogue == 4) sum += d->bias[row];
        if (of_c->type == F32)
          ((float*)to)[place] = (float)sum;
        else
          ((uint16_t*)to)[place] = rounded_to_bf16((float)sum);
      }
  products++;
  return SUCCESS;
}

const char* cublasLtGetStatusName(int status) {
  return status == ALLOCATION ? "CUBLAS_STATUS_ALLOC_FAILED" : status == INVALID ? "CUBLAS_STATUS_INVALID_VALUE" : "a status";
}

// As `Counted` in cublaslt.rs has it.
uint64_t standInCount(int what) {
  return what == 0 ? products : what == 1 ? choices : what == 2 ? (uint64_t)alive.load() : aligned;
}

void standInFail(int what, int status) {
  fault = what;
  fault_status = status;
}

}  // extern "C"
