// Gated DeltaNet in C, OpenMP and AVX-512: what a good engineer would write for one machine, and
// the yardstick of `gdn-graph bench`. Head dims are 128 x 128.
//
//   c_rec         token by token; a 128 x 32 tile of the state stays in the L1 cache for a window
//   c_rec_paced   the same, with the prefetch of the next head spread over the passes
//   c_blk         four tokens as one block: one pass, a triangular solve, one rank-4 update
//   c_fold        records of decay, key and delta factor folded into states
//   c_fold_paced  the same with the number of records known to the compiler, and whole rows
//
// Layouts: q, k [B, T, nk, 128]; v, out [B, T, nv, 128]; decay, beta [B, T, nv]; pool
// [slots, nv, 128, 128], key rows first; slot [B]. Value head h reads key head h / (nv / nk).
//
// Built with -ffp-contract=off: a product that feeds a sum is fused only where it says so.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#define D 128     // key and value head dim
#define TILE 32   // value columns of a tile: 128 rows of 32 floats are 16 KB
#define BLOCK 4   // tokens of a block
#define LINE 16   // floats of a cache line

#define INLINE static inline __attribute__((always_inline))

typedef __m512 vec;

INLINE vec splat(float x) { return _mm512_set1_ps(x); }
INLINE vec load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec add(vec x, vec y) { return _mm512_add_ps(x, y); }
INLINE vec mul(vec x, vec y) { return _mm512_mul_ps(x, y); }
INLINE vec fma_(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }
INLINE void prefetch(const float *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

INLINE float dot(const float *a, const float *b) {
  vec s = mul(load(a), load(b));
  for (int i = LINE; i < D; i += LINE) s = fma_(load(a + i), load(b + i), s);
  return _mm512_reduce_add_ps(s);
}

// beta * (v - decay * kv)
INLINE vec delta(float beta, float decay, vec kv, const float *v) {
  return mul(splat(beta), _mm512_fnmadd_ps(splat(decay), kv, load(v)));
}

INLINE void normalise(const float *x, float *to, float scale) {
  vec s = splat(scale / sqrtf(dot(x, x) + 1e-6f));
  for (int i = 0; i < D; i += LINE) store(to + i, mul(s, load(x + i)));
}

// One head over T >= 2 tokens. The readout of token t shares a pass with the kv of token t + 1.
// q and k are normalised, [T, 128]. `next` is the state that comes after this one, or null: its
// lines are asked for in the first pass over a tile or, paced, two lines per two rows in the two
// passes after it.
INLINE void head_window(int T, const float *q, const float *k, const float *v, size_t v_stride,
                        const float *decay, const float *beta, size_t gate_stride, float *S,
                        float *out, size_t out_stride, const float *next, const int paced) {
  float tile[D * TILE] __attribute__((aligned(64)));
  for (int c = 0; c < D; c += TILE) {
    vec a0 = _mm512_setzero_ps(), a1 = a0, b0 = a0, b1 = a0;
    for (int r = 0; r < D; r += 2) {
      const float *p = S + (size_t)r * D + c;
      vec x0 = load(p), x1 = load(p + 16), y0 = load(p + D), y1 = load(p + D + 16);
      vec k0 = splat(k[r]), k1 = splat(k[r + 1]);
      a0 = fma_(x0, k0, a0), a1 = fma_(x1, k0, a1);
      b0 = fma_(y0, k1, b0), b1 = fma_(y1, k1, b1);
      float *to = tile + r * TILE;
      if (paced || T > 1) {
        _mm512_store_ps(to, x0), _mm512_store_ps(to + 16, x1);
        _mm512_store_ps(to + TILE, y0), _mm512_store_ps(to + TILE + 16, y1);
      }
      if (!paced && next) {
        const float *n = next + (size_t)r * D + c;
        prefetch(n), prefetch(n + 16), prefetch(n + D), prefetch(n + D + 16);
      }
    }
    a0 = add(a0, b0), a1 = add(a1, b1);
    for (int t = 0; t < T; t++) {
      vec d = splat(decay[t * gate_stride]);
      vec e0 = delta(beta[t * gate_stride], decay[t * gate_stride], a0, v + t * v_stride + c);
      vec e1 = delta(beta[t * gate_stride], decay[t * gate_stride], a1, v + t * v_stride + c + 16);
      const float *kt = k + t * D, *qt = q + t * D, *k_next = k + (t + 1) * D;
      const float *ahead = 0;
      if (paced && next && t < 2) ahead = next + (size_t)(c / TILE * 2 + t) * D * LINE;
      vec o0 = _mm512_setzero_ps(), o1 = o0, p0 = o0, p1 = o0;
      if (t + 1 < T) {
        a0 = a1 = b0 = b1 = _mm512_setzero_ps();
        for (int r = 0; r < D; r += 2) {
          float *p = tile + r * TILE;
          if (paced && ahead) prefetch(ahead + r * LINE), prefetch(ahead + (r + 1) * LINE);
          vec k0 = splat(kt[r]), k1 = splat(kt[r + 1]), q0 = splat(qt[r]), q1 = splat(qt[r + 1]);
          vec n0 = splat(k_next[r]), n1 = splat(k_next[r + 1]);
          vec x0 = fma_(k0, e0, mul(d, _mm512_load_ps(p)));
          vec x1 = fma_(k0, e1, mul(d, _mm512_load_ps(p + 16)));
          vec y0 = fma_(k1, e0, mul(d, _mm512_load_ps(p + TILE)));
          vec y1 = fma_(k1, e1, mul(d, _mm512_load_ps(p + TILE + 16)));
          _mm512_store_ps(p, x0), _mm512_store_ps(p + 16, x1);
          _mm512_store_ps(p + TILE, y0), _mm512_store_ps(p + TILE + 16, y1);
          o0 = fma_(x0, q0, o0), o1 = fma_(x1, q0, o1);
          p0 = fma_(y0, q1, p0), p1 = fma_(y1, q1, p1);
          a0 = fma_(x0, n0, a0), a1 = fma_(x1, n0, a1);
          b0 = fma_(y0, n1, b0), b1 = fma_(y1, n1, b1);
        }
        a0 = add(a0, b0), a1 = add(a1, b1);
      } else {  // the last token goes straight back to the state
        for (int r = 0; r < D; r += 2) {
          const float *p = tile + r * TILE;
          float *to = S + (size_t)r * D + c;
          if (paced && ahead) prefetch(ahead + r * LINE), prefetch(ahead + (r + 1) * LINE);
          vec k0 = splat(kt[r]), k1 = splat(kt[r + 1]), q0 = splat(qt[r]), q1 = splat(qt[r + 1]);
          vec x0 = fma_(k0, e0, mul(d, _mm512_load_ps(p)));
          vec x1 = fma_(k0, e1, mul(d, _mm512_load_ps(p + 16)));
          vec y0 = fma_(k1, e0, mul(d, _mm512_load_ps(p + TILE)));
          vec y1 = fma_(k1, e1, mul(d, _mm512_load_ps(p + TILE + 16)));
          store(to, x0), store(to + 16, x1), store(to + D, y0), store(to + D + 16, y1);
          o0 = fma_(x0, q0, o0), o1 = fma_(x1, q0, o1);
          p0 = fma_(y0, q1, p0), p1 = fma_(y1, q1, p1);
        }
      }
      store(out + t * out_stride + c, add(o0, p0));
      store(out + t * out_stride + c + 16, add(o1, p1));
    }
  }
}

#define WINDOW_PARAMETERS                                                                         \
  int T, const float *q, const float *k, const float *v, size_t v_stride, const float *decay,     \
      const float *beta, size_t gate_stride, float *S, float *out, size_t out_stride,             \
      const float *next
#define WINDOW_ARGUMENTS \
  T, q, k, v, v_stride, decay, beta, gate_stride, S, out, out_stride, next

// The yardstick, as figures have been given in it since before this file: it tests T > 1 and `next`
// in every row of its first pass, which costs a fifteenth. The paced form does without.
static __attribute__((noinline, optimize("no-unswitch-loops"))) void head_window_plain(
    WINDOW_PARAMETERS) {
  head_window(WINDOW_ARGUMENTS, 0);
}

static __attribute__((noinline)) void head_window_paced(WINDOW_PARAMETERS) {
  head_window(WINDOW_ARGUMENTS, 1);
}

// One head, one token, over whole rows in memory order: kv, then update and readout. Paced, the
// prefetch of the next head is half in each pass.
INLINE void head_token(const float *q, const float *k, const float *v, float decay, float beta,
                       float *S, float *out, const float *next, const int paced) {
  vec e[8], o[8], d = splat(decay);
  for (int i = 0; i < 8; i++) e[i] = o[i] = _mm512_setzero_ps();
  for (int r = 0; r < D; r++) {
    const float *p = S + (size_t)r * D;
    vec k0 = splat(k[r]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      e[i] = fma_(load(p + 16 * i), k0, e[i]);
      if (!paced && next) prefetch(next + (size_t)r * D + 16 * i);
      if (paced && next && i < 4) prefetch(next + (size_t)r * (D / 2) + 16 * i);
    }
  }
  for (int i = 0; i < 8; i++) e[i] = delta(beta, decay, e[i], v + 16 * i);
  for (int r = 0; r < D; r++) {
    float *p = S + (size_t)r * D;
    vec k0 = splat(k[r]), q0 = splat(q[r]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      vec x = fma_(k0, e[i], mul(d, load(p + 16 * i)));
      store(p + 16 * i, x);
      o[i] = fma_(x, q0, o[i]);
      if (paced && next && i < 4) prefetch(next + D * D / 2 + (size_t)r * (D / 2) + 16 * i);
    }
  }
  for (int i = 0; i < 8; i++) store(out + 16 * i, o[i]);
}

// The same without a write: out = decay * S^T q + (k . q) * delta, in one read pass.
INLINE void head_token_verify(const float *q, const float *k, const float *v, float decay,
                              float beta, const float *S, float *out, float *factors,
                              const float *next) {
  vec a[8], o[8], d = splat(decay);
  for (int i = 0; i < 8; i++) a[i] = o[i] = _mm512_setzero_ps();
  for (int r = 0; r < D; r++) {
    const float *p = S + (size_t)r * D;
    vec k0 = splat(k[r]), q0 = splat(q[r]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      vec x = load(p + 16 * i);
      a[i] = fma_(x, k0, a[i]);
      o[i] = fma_(x, q0, o[i]);
      if (next) prefetch(next + (size_t)r * D + 16 * i);
    }
  }
  vec kq = splat(dot(k, q));
  for (int i = 0; i < 8; i++) {
    vec e = delta(beta, decay, a[i], v + 16 * i);
    store(out + 16 * i, fma_(kq, e, mul(d, o[i])));
    store(factors + 16 * i, e);
  }
}

// One head over a block of n <= 4 tokens. With g[t] the product of the decays up to token t,
//   kv[t] = g[t] S^T k[t] + sum over s < t of (k[t] . k[s]) g[t] / g[s] delta[s]
// and out[t] likewise with q[t] and s <= t. commit: replace the state, else emit the deltas.
INLINE void head_block(int n, const float *q, const float *k, const float *v, size_t v_stride,
                       const float *decay, const float *beta, size_t gate_stride, float *S,
                       float *out, size_t out_stride, const int commit,
                       float *factors, const float *next) {
  float g[BLOCK], product = 1;
  for (int t = 0; t < n; t++) g[t] = product *= decay[t * gate_stride];
  float kk[BLOCK][BLOCK], qk[BLOCK][BLOCK], ratio[BLOCK][BLOCK];
  for (int t = 0; t < n; t++)
    for (int s = 0; s <= t; s++) {
      float x = 1;
      for (int u = s + 1; u <= t; u++) x *= decay[u * gate_stride];
      ratio[t][s] = x;
      kk[t][s] = dot(k + t * D, k + s * D) * x;
      qk[t][s] = dot(q + t * D, k + s * D) * x;
    }
  float rows[D][2 * BLOCK] __attribute__((aligned(64)));  // k0..k3, q0..q3 of each key row
  for (int t = 0; t < BLOCK; t++)
    for (int r = 0; r < D; r++) {
      rows[r][t] = t < n ? k[t * D + r] : 0;
      rows[r][BLOCK + t] = t < n ? q[t * D + r] : 0;
    }
  for (int c = 0; c < D; c += TILE) {
    vec A[BLOCK][2], Q[BLOCK][2];  // S^T k and S^T q
    for (int t = 0; t < BLOCK; t++)
      for (int i = 0; i < 2; i++) A[t][i] = Q[t][i] = _mm512_setzero_ps();
    if (n > 2) {
      for (int r = 0; r < D; r++) {
        const float *p = S + (size_t)r * D + c;
        vec x0 = load(p), x1 = load(p + 16);
        if (next) {
          prefetch(next + (size_t)r * D + c);
          prefetch(next + (size_t)r * D + c + 16);
        }
#pragma GCC unroll 4
        for (int t = 0; t < BLOCK; t++) {
          vec kx = splat(rows[r][t]), qx = splat(rows[r][BLOCK + t]);
          A[t][0] = fma_(x0, kx, A[t][0]), A[t][1] = fma_(x1, kx, A[t][1]);
          Q[t][0] = fma_(x0, qx, Q[t][0]), Q[t][1] = fma_(x1, qx, Q[t][1]);
        }
      }
    } else {  // two rows at a time, so that there are enough sums to hide the latency of one
      vec C[2][2], R[2][2];
      for (int t = 0; t < 2; t++)
        for (int i = 0; i < 2; i++) C[t][i] = R[t][i] = _mm512_setzero_ps();
      for (int r = 0; r < D; r += 2) {
        const float *p = S + (size_t)r * D + c;
        vec x0 = load(p), x1 = load(p + 16), y0 = load(p + D), y1 = load(p + D + 16);
        if (next) {
          const float *ahead = next + (size_t)r * D + c;
          prefetch(ahead), prefetch(ahead + 16), prefetch(ahead + D), prefetch(ahead + D + 16);
        }
#pragma GCC unroll 2
        for (int t = 0; t < 2; t++)
          if (t < n) {
            vec kx = splat(rows[r][t]), qx = splat(rows[r][BLOCK + t]);
            vec ky = splat(rows[r + 1][t]), qy = splat(rows[r + 1][BLOCK + t]);
            A[t][0] = fma_(x0, kx, A[t][0]), A[t][1] = fma_(x1, kx, A[t][1]);
            Q[t][0] = fma_(x0, qx, Q[t][0]), Q[t][1] = fma_(x1, qx, Q[t][1]);
            C[t][0] = fma_(y0, ky, C[t][0]), C[t][1] = fma_(y1, ky, C[t][1]);
            R[t][0] = fma_(y0, qy, R[t][0]), R[t][1] = fma_(y1, qy, R[t][1]);
          }
      }
      for (int t = 0; t < n; t++)
        for (int i = 0; i < 2; i++) {
          A[t][i] = add(A[t][i], C[t][i]);
          Q[t][i] = add(Q[t][i], R[t][i]);
        }
    }
    vec E[BLOCK][2];
    for (int t = 0; t < n; t++)
      for (int i = 0; i < 2; i++) {
        vec kv = mul(splat(g[t]), A[t][i]), o = mul(splat(g[t]), Q[t][i]);
        for (int s = 0; s < t; s++) {
          kv = fma_(splat(kk[t][s]), E[s][i], kv);
          o = fma_(splat(qk[t][s]), E[s][i], o);
        }
        vec vt = load(v + t * v_stride + c + 16 * i);
        E[t][i] = mul(splat(beta[t * gate_stride]), _mm512_sub_ps(vt, kv));
        store(out + t * out_stride + c + 16 * i, fma_(splat(qk[t][t]), E[t][i], o));
        if (!commit) store(factors + t * out_stride + c + 16 * i, E[t][i]);
      }
    if (!commit) continue;
    vec d = splat(g[n - 1]);
    for (int t = 0; t < n; t++)
      for (int i = 0; i < 2; i++) E[t][i] = mul(splat(ratio[n - 1][t]), E[t][i]);
    for (int r = 0; r < D; r++) {
      float *p = S + (size_t)r * D + c;
      vec x0 = mul(d, load(p)), x1 = mul(d, load(p + 16));
      if (n == BLOCK) {
#pragma GCC unroll 4
        for (int t = 0; t < BLOCK; t++) {
          vec kx = splat(rows[r][t]);
          x0 = fma_(kx, E[t][0], x0), x1 = fma_(kx, E[t][1], x1);
        }
      } else {
        for (int t = 0; t < n; t++) {
          vec kx = splat(rows[r][t]);
          x0 = fma_(kx, E[t][0], x0), x1 = fma_(kx, E[t][1], x1);
        }
      }
      store(p, x0), store(p + 16, x1);
    }
  }
}

typedef struct {
  int B, T, nk, nv;
  const float *q, *k, *v, *decay, *beta;
  float *pool;
  const int32_t *slot;
  float *out, *factors;
} Batch;

enum { WINDOW, PACED_WINDOW, BLOCKS, VERIFY_BLOCKS };

// The value heads of one key head of one row. `normed` holds its queries and keys, [2, T, 128].
INLINE void key_head(const int how, Batch a, int w, float *normed) {
  const int T = a.T, nk = a.nk, nv = a.nv, group = nv / nk, b = w / nk, kh = w % nk;
  float *q = normed, *k = normed + (size_t)T * D;
  for (int t = 0; t < T; t++) {
    const size_t from = ((b * (size_t)T + t) * nk + kh) * D;
    normalise(a.q + from, q + (size_t)t * D, 1.0f / sqrtf(D));
    normalise(a.k + from, k + (size_t)t * D, 1.0f);
  }
  for (int j = 0; j < group; j++) {
    const int h = kh * group + j, row = (w + 1) / nk, first = (w + 1) % nk * group;
    float *S = a.pool + ((size_t)a.slot[b] * nv + h) * D * D;
    const float *next = 0;
    if (j + 1 < group)
      next = S + D * D;
    else if (w + 1 < a.B * nk)
      next = a.pool + ((size_t)a.slot[row] * nv + first) * D * D;
    const size_t gate = (size_t)b * T * nv + h, stride = (size_t)nv * D;
    const float *v = a.v + gate * D, *decay = a.decay + gate, *beta = a.beta + gate;
    float *out = a.out + gate * D, *factors = a.factors + gate * D;
    if (T == 1 && how == VERIFY_BLOCKS)
      head_token_verify(q, k, v, *decay, *beta, S, out, factors, next);
    else if (T == 1)
      head_token(q, k, v, *decay, *beta, S, out, next, how == PACED_WINDOW);
    else if (how == WINDOW)
      head_window_plain(T, q, k, v, stride, decay, beta, nv, S, out, stride, next);
    else if (how == PACED_WINDOW)
      head_window_paced(T, q, k, v, stride, decay, beta, nv, S, out, stride, next);
    else
      for (int t = 0; t < T; t += BLOCK) {
        const int n = T - t < BLOCK ? T - t : BLOCK;
        const size_t g = (size_t)t * nv, x = g * D;
        head_block(n, q + (size_t)t * D, k + (size_t)t * D, v + x, stride, decay + g, beta + g, nv,
                   S, out + x, stride, how == BLOCKS, factors + x, t + BLOCK >= T ? next : 0);
      }
  }
}

// All rows: their key heads are split over the threads. A macro, so that `how` is a constant inside
// the parallel region, which the compiler makes a function of its own.
#define RUN(how)                                                        \
  _Pragma("omp parallel num_threads(threads)") {                        \
    float *normed = aligned_alloc(64, (size_t)(2 * a.T + 2) * D * 4);   \
    _Pragma("omp for schedule(static)") for (int w = 0; w < a.B * a.nk; w++) \
        key_head(how, a, w, normed);                                    \
    free(normed);                                                       \
  }

void c_rec(const Batch *batch, int threads) {
  const Batch a = *batch;
  RUN(WINDOW)
}

void c_rec_paced(const Batch *batch, int threads) {
  const Batch a = *batch;
  RUN(PACED_WINDOW)
}

void c_blk(const Batch *batch, int threads) {
  const Batch a = *batch;
  RUN(BLOCKS)
}

// Leaves the states and emits the delta factors, like out, for a later fold.
void c_verify(const Batch *batch, int threads) {
  const Batch a = *batch;
  RUN(VERIFY_BLOCKS)
}

// One head's fold of J records over columns of `width` floats: S = fma(k, factor, S * decay).
INLINE void fold_head(const int J, const int width, const float k[D][8], const float *decay,
                      const float *factors, size_t factor_stride, float *S, const float *next) {
  for (int c = 0; c < D; c += width) {
    vec F[8][8], d[8];
    for (int j = 0; j < J; j++) {
      d[j] = splat(decay[j]);
      for (int i = 0; i < width / 16; i++) F[j][i] = load(factors + j * factor_stride + c + 16 * i);
    }
    for (int r = 0; r < D; r++) {
      float *p = S + (size_t)r * D + c;
#pragma GCC unroll 8
      for (int i = 0; i < width / 16; i++) {
        vec x = load(p + 16 * i);
        prefetch(next + (size_t)r * D + c + 16 * i);
#pragma GCC unroll 8
        for (int j = 0; j < J; j++) x = fma_(splat(k[r][j]), F[j][i], mul(x, d[j]));
        store(p + 16 * i, x);
      }
    }
  }
}

// The fold of any number of records, which are read again for every row of the state.
INLINE void fold_head_any(int J, const float k[D][8], const float *decay, const float *factors,
                          size_t factor_stride, float *S) {
  for (int c = 0; c < D; c += 64)
    for (int r = 0; r < D; r++) {
      float *p = S + (size_t)r * D + c;
      for (int i = 0; i < 4; i++) {
        vec x = load(p + 16 * i);
        for (int j = 0; j < J; j++) {
          vec factor = load(factors + j * factor_stride + c + 16 * i);
          x = fma_(splat(k[r][j]), factor, mul(x, splat(decay[j])));
        }
        store(p + 16 * i, x);
      }
    }
}

// J <= 8 records, J = 4 in its best form: k [B, J, nk, 128], factors [B, J, nv, 128], decay
// [B, J, nv].
INLINE void fold(const int paced, int B, int J, int nk, int nv, const float *k,
                 const float *factors, const float *decay, float *pool, const int32_t *slot,
                 int threads) {
  const int group = nv / nk;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int w = 0; w < B * nv; w++) {
    const int b = w / nv, h = w % nv, last = w + 1 == B * nv;
    float *S = pool + ((size_t)slot[b] * nv + h) * D * D;
    const float *next = last ? S : pool + ((size_t)slot[(w + 1) / nv] * nv + (w + 1) % nv) * D * D;
    float key[D][8], d[8];
    for (int j = 0; j < J; j++) {
      d[j] = decay[((size_t)b * J + j) * nv + h];
      const float *from = k + (((size_t)b * J + j) * nk + h / group) * D;
      for (int r = 0; r < D; r++) key[r][j] = from[r];
    }
    const float *f = factors + ((size_t)b * J * nv + h) * D;
    const size_t stride = (size_t)nv * D;
    if (J == 4)
      fold_head(4, 64, key, d, f, stride, S, next);
    else if (paced && J == 1)
      fold_head(1, 128, key, d, f, stride, S, next);
    else if (paced && J == 2)
      fold_head(2, 128, key, d, f, stride, S, next);
    else if (paced && J == 3)
      fold_head(3, 64, key, d, f, stride, S, next);
    else
      fold_head_any(J, key, d, f, stride, S);
  }
}

void c_fold(int B, int J, int nk, int nv, const float *k, const float *factors, const float *decay,
            float *pool, const int32_t *slot, int threads) {
  fold(0, B, J, nk, nv, k, factors, decay, pool, slot, threads);
}

void c_fold_paced(int B, int J, int nk, int nv, const float *k, const float *factors,
                  const float *decay, float *pool, const int32_t *slot, int threads) {
  fold(1, B, J, nk, nv, k, factors, decay, pool, slot, threads);
}
