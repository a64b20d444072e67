// What the machine can do at most: multiply-adds, and bytes from and to memory. The arrays are
// larger than the caches; each function is one timed call.

#include <omp.h>
#include <stddef.h>
#ifdef __AVX512F__
#include <immintrin.h>
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

typedef float vec __attribute__((vector_size(WIDTH)));
#define LANES ((size_t)(WIDTH / sizeof(float)))
#define STEP (8 * LANES)       // floats of one turn of a loop
#define AHEAD (64 * 1024 / 4)  // floats that a software prefetch runs ahead

#define EACH8(body) \
  for (int j = 0; j < 8; j++) body

static volatile float sink;

static void prefetch8(const float *p) {
  for (size_t i = 0; i < STEP; i += 16) __builtin_prefetch(p + AHEAD + i, 0, 2);
}

static float total(const vec *a) {
  float s = 0;
  EACH8(for (size_t i = 0; i < LANES; i++) s += a[j][i];)
  return s;
}

// Twelve independent chains, enough to hide the latency of a multiply-add: 12 * LANES of them a
// turn and thread. Returns those of one turn.
int limit_multiply_add(long turns, int threads) {
#pragma omp parallel num_threads(threads)
  {
    vec x = (vec){} + 0.999f, y = (vec){} + 0.001f, a[12];
    for (int j = 0; j < 12; j++) a[j] = x + (float)j;
    for (long i = 0; i < turns; i++)
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) a[j] = a[j] * x + y;
    sink = total(a) + total(a + 4);
  }
  return (int)(12 * LANES * threads);
}

#define SHARED_OUT(from, to)                        \
  const size_t part = n / STEP / threads * STEP;    \
  const size_t from = part * omp_get_thread_num(), to = from + part

// n floats are a multiple of STEP * threads.
void limit_read(const float *p, size_t n, int ahead, int threads) {
#pragma omp parallel num_threads(threads)
  {
    SHARED_OUT(from, to);
    vec a[8] = {};
    if (ahead)
      for (size_t i = from; i < to; i += STEP) {
        prefetch8(p + i);
        EACH8(a[j] += *(const vec *)(p + i + j * LANES);)
      }
    else
      for (size_t i = from; i < to; i += STEP) EACH8(a[j] += *(const vec *)(p + i + j * LANES);)
    sink = total(a);
  }
}

void limit_update(float *p, size_t n, int ahead, int threads) {
#pragma omp parallel num_threads(threads)
  {
    SHARED_OUT(from, to);
    if (ahead)
      for (size_t i = from; i < to; i += STEP) {
        prefetch8(p + i);
        EACH8(*(vec *)(p + i + j * LANES) *= 0.999f;)
      }
    else
      for (size_t i = from; i < to; i += STEP) EACH8(*(vec *)(p + i + j * LANES) *= 0.999f;)
  }
}

// streaming: stores that do not read the line first, where the CPU has them.
void limit_copy(float *to_, const float *from_, size_t n, int streaming, int threads) {
#pragma omp parallel num_threads(threads)
  {
    SHARED_OUT(from, to);
#ifdef __AVX512F__
    if (streaming) {
      for (size_t i = from; i < to; i += STEP)
        EACH8(_mm512_stream_ps(to_ + i + j * LANES, _mm512_load_ps(from_ + i + j * LANES));)
      _mm_sfence();
    } else
#endif
      for (size_t i = from; i < to; i += STEP)
        EACH8(*(vec *)(to_ + i + j * LANES) = *(const vec *)(from_ + i + j * LANES);)
  }
}
