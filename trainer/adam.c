/* Adam on spans of memory.

   Note: the same bits everywhere. A span may be cut into pieces, pages and threads anywhere, and any processor may
   run any piece, so an element's result must not depend on where in a vector, or in which one, it was computed.
   Therefore every operation is one of IEEE 754's correctly rounded ones (+, -, *, /, sqrt and conversions), in one
   fixed order, and no multiply and add are fused (-ffp-contract=off): a loop's vector body, its scalar tail and the
   copies for other instruction sets agree to the last bit.

   Note: tiles. Half-precision gradients are widened into a tile on the stack and half-precision parameters are
   narrowed from the masters just written; both stay in the first-level cache, so memory sees each array once, and
   one float32 loop serves all pairs of dtypes.

   Note: bfloat16 by hand. With AVX2, AdamW on bfloat16 parameters and gradients is written in intrinsics: the three
   loops of a tile become one that keeps an element in registers and spreads its prefetches and streaming stores
   evenly, with the same operations in the same order. GCC spills half of that loop when it is given in C. For float32
   alone, which has no tiles to save, the same was no faster. The ends of a span go through tiles here too. */

#include "adam.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TILE 256
#define LINE (64 / sizeof(uint16_t)) /* half-precision elements in a cache line */
#define STREAM_FROM (1 << 16)
#define INLINE static inline __attribute__((always_inline))

struct update {
  void *parameter;
  const void *gradient;
  float *master, *exp_avg, *exp_avg_sq;
  size_t count;
  int parameter_dtype, gradient_dtype, exact;
  float gradient_factor, l2, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size;
};

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE float widen_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

/* Round to nearest even. A NaN is given its own pattern: the rounding could carry its mantissa into an infinity. */
INLINE uint16_t narrow_bfloat16(float value) {
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Exponent re-biased by integer addition; a subnormal is normalised by an exact float32 subtraction. Branch-free,
   so that compilers vectorise it without F16C. */
INLINE float widen_float16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = (uint32_t)(half & 0x7fffu) << 13;
  uint32_t normal = magnitude + (112u << 23);
  uint32_t special = magnitude + (224u << 23);
  uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  uint32_t result = magnitude >= (31u << 23) ? special : normal;
  return float_of((magnitude < (1u << 23) ? subnormal : result) | sign);
}

/* Round to nearest even, subnormals included: adding 0.5 puts a subnormal's last bit at the float32's last bit. */
INLINE uint16_t narrow_float16(float value) {
  uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t result = magnitude >= (143u << 23) ? special : normal;
  return (uint16_t)((magnitude < (113u << 23) ? subnormal : result) | sign);
}

/* Gradients as float32, multiplied by the factor. A product of half-precision numbers is rounded to their dtype, as
   it would be had the gradient been scaled in place; unless it is to be exact. */
INLINE void load_gradients(float *restrict tile, const struct update *u, size_t first, size_t n) {
  const float factor = u->gradient_factor;
  const uint16_t *halves = (const uint16_t *)u->gradient + first;
  if (u->gradient_dtype == ADAM_FLOAT32) {
    const float *gradient = (const float *)u->gradient + first;
    for (size_t i = 0; i < n; i++) tile[i] = gradient[i] * factor;
  } else if (u->gradient_dtype == ADAM_BFLOAT16) {
    if (factor == 1.0f || u->exact)
      for (size_t i = 0; i < n; i++) tile[i] = widen_bfloat16(halves[i]) * factor;
    else
      for (size_t i = 0; i < n; i++) tile[i] = widen_bfloat16(narrow_bfloat16(widen_bfloat16(halves[i]) * factor));
  } else {
    if (factor == 1.0f || u->exact)
      for (size_t i = 0; i < n; i++) tile[i] = widen_float16(halves[i]) * factor;
    else
      for (size_t i = 0; i < n; i++) tile[i] = widen_float16(narrow_float16(widen_float16(halves[i]) * factor));
  }
}

/* Parameters from their masters. Those of a long span won't be in a cache when they are next read, so they go past
   it: an ordinary store would first read the line it is about to overwrite. */
INLINE void store_parameters(const struct update *u, size_t first, size_t n) {
  uint16_t narrow[TILE] __attribute__((aligned(64)));
  const float *restrict master = u->master + first;
  uint16_t *parameter = (uint16_t *)u->parameter + first;
  size_t streamed = 0;
  if (u->parameter_dtype == ADAM_BFLOAT16)
    for (size_t i = 0; i < n; i++) narrow[i] = narrow_bfloat16(master[i]);
  else
    for (size_t i = 0; i < n; i++) narrow[i] = narrow_float16(master[i]);
#if defined(__x86_64__)
  if (u->count >= STREAM_FROM && (uintptr_t)parameter % 16 == 0)
    for (; streamed + 8 <= n; streamed += 8)
      _mm_stream_si128((__m128i *)(parameter + streamed), *(const __m128i *)(narrow + streamed));
#endif
  memcpy(parameter + streamed, narrow + streamed, (n - streamed) * sizeof *parameter);
}

/* The operations and their order are those of torch.optim.adam._single_tensor_adam. */
INLINE void step_tile(float *restrict parameter, float *restrict exp_avg, float *restrict exp_avg_sq,
                      const float *restrict gradient, size_t n, const struct update *u, const int with_l2) {
  const float l2 = u->l2, decay = u->decay, beta2 = u->beta2, one_minus_beta2 = u->one_minus_beta2;
  const float bias_correction2_sqrt = u->bias_correction2_sqrt, eps = u->eps, negative_step = -u->step_size;
  /* torch.lerp goes from the nearer end: avg + w (g - avg) below one half, g - (1 - w)(g - avg) from there on. */
  const int from_average = u->one_minus_beta1 < 0.5f;
  const float weight = from_average ? u->one_minus_beta1 : -(1.0f - u->one_minus_beta1);
  for (size_t i = 0; i < n; i++) {
    float p = parameter[i] * decay;
    float g = with_l2 ? gradient[i] + l2 * parameter[i] : gradient[i];
    float m = exp_avg[i];
    m = (from_average ? m : g) + weight * (g - m);
    float v = exp_avg_sq[i] * beta2 + (one_minus_beta2 * g) * g;
    float denominator = sqrtf(v) / bias_correction2_sqrt + eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    parameter[i] = p + (negative_step * m) / denominator;
  }
}

INLINE void step_span(const struct update *u) {
  float tile[TILE] __attribute__((aligned(64)));
  const int direct = u->gradient_dtype == ADAM_FLOAT32 && u->gradient_factor == 1.0f;
  /* The first tile is cut so that the others begin on a cache line of the parameter. */
  size_t n = TILE - ((uintptr_t)u->parameter / sizeof(uint16_t)) % LINE;
  for (size_t first = 0; first < u->count; first += n, n = TILE) {
    if (n > u->count - first) n = u->count - first;
    const float *gradient = (const float *)u->gradient + first;
    if (!direct) {
      load_gradients(tile, u, first, n);
      gradient = tile;
    }
    if (u->l2 != 0.0f)
      step_tile(u->master + first, u->exp_avg + first, u->exp_avg_sq + first, gradient, n, u, 1);
    else
      step_tile(u->master + first, u->exp_avg + first, u->exp_avg_sq + first, gradient, n, u, 0);
    if (u->parameter_dtype != ADAM_FLOAT32) store_parameters(u, first, n);
  }
#if defined(__x86_64__)
  _mm_sfence(); /* streamed parameters are seen before the caller is told that they are written */
#endif
}

__attribute__((noinline)) static void step_baseline(const struct update *u) { step_span(u); }

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AHEAD 256 /* elements: the processor's own prefetching comes late for so many streams */

AVX2 INLINE __m256 widen_avx2(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* narrow_bfloat16 of eight, each in the lower half of its 32 bits. */
AVX2 INLINE __m256i narrow_avx2(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}

/* load_gradients and step_tile of eight elements; gives their masters, narrowed as above. */
AVX2 INLINE __m256i step_eight(const struct update *u, size_t first, const int scaled) {
  __m256 g = widen_avx2(_mm_loadu_si128((const __m128i *)((const uint16_t *)u->gradient + first)));
  if (scaled)
    g = _mm256_castsi256_ps(_mm256_slli_epi32(narrow_avx2(g * _mm256_set1_ps(u->gradient_factor)), 16));
  const __m256 p = _mm256_loadu_ps(u->master + first) * _mm256_set1_ps(u->decay);
  __m256 m = _mm256_loadu_ps(u->exp_avg + first), v = _mm256_loadu_ps(u->exp_avg_sq + first);
  m = m + _mm256_set1_ps(u->one_minus_beta1) * (g - m);
  v = v * _mm256_set1_ps(u->beta2) + (_mm256_set1_ps(u->one_minus_beta2) * g) * g;
  const __m256 root = _mm256_sqrt_ps(v) / _mm256_set1_ps(u->bias_correction2_sqrt);
  const __m256 master = p + (_mm256_set1_ps(-u->step_size) * m) / (root + _mm256_set1_ps(u->eps));
  _mm256_storeu_ps(u->exp_avg + first, m);
  _mm256_storeu_ps(u->exp_avg_sq + first, v);
  _mm256_storeu_ps(u->master + first, master);
  return narrow_avx2(master);
}

/* The count is a multiple of LINE and the parameters begin on 32 bytes. */
AVX2 INLINE void step_lines(const struct update *span, const int streams, const int scaled) {
  const struct update u = *span; /* a copy that no store can alias: its scalars stay in registers */
  for (size_t first = 0; first < u.count; first += LINE) {
    for (size_t ahead = first + AHEAD; ahead < first + AHEAD + LINE; ahead += LINE / 2) {
      __builtin_prefetch(u.master + ahead);
      __builtin_prefetch(u.exp_avg + ahead);
      __builtin_prefetch(u.exp_avg_sq + ahead);
    }
    __builtin_prefetch((const uint16_t *)u.gradient + first + AHEAD);
#pragma GCC unroll 2
    for (size_t i = first; i < first + LINE; i += 16) {
      const __m256i packed = _mm256_packus_epi32(step_eight(&u, i, scaled), step_eight(&u, i + 8, scaled));
      const __m256i halves = _mm256_permute4x64_epi64(packed, 0xd8); /* packing interleaves the 128-bit lanes */
      __m256i *parameter = (__m256i *)((uint16_t *)u.parameter + i);
      if (streams)
        _mm256_stream_si256(parameter, halves);
      else
        _mm256_store_si256(parameter, halves);
    }
  }
}

/* `count` elements of a span in half precision, from `first` on. */
INLINE struct update part_of(const struct update *u, size_t first, size_t count) {
  struct update part = *u;
  part.parameter = (uint16_t *)u->parameter + first;
  part.gradient = (const uint16_t *)u->gradient + first;
  part.master += first;
  part.exp_avg += first;
  part.exp_avg_sq += first;
  part.count = count;
  return part;
}

AVX2 __attribute__((noinline)) static void tiles_avx2(const struct update *u) { step_span(u); }

AVX2 static void step_avx2(const struct update *u) {
  if (u->parameter_dtype != ADAM_BFLOAT16 || u->gradient_dtype != ADAM_BFLOAT16 || u->l2 != 0.0f ||
      u->one_minus_beta1 >= 0.5f || u->exact) {
    tiles_avx2(u);
    return;
  }
  size_t head = -(uintptr_t)u->parameter % 32 / sizeof(uint16_t);
  if (head > u->count) head = u->count;
  const size_t body = (u->count - head) / LINE * LINE;
  const struct update before = part_of(u, 0, head), lines = part_of(u, head, body),
                      after = part_of(u, head + body, u->count - head - body);
  const int streams = u->count >= STREAM_FROM;
  tiles_avx2(&before);
  if (u->gradient_factor == 1.0f)
    step_lines(&lines, streams, 0);
  else
    step_lines(&lines, streams, 1);
  tiles_avx2(&after); /* ends with a fence, also for what was streamed here */
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) static void step_avx512(const struct update *u) { step_span(u); }

int adam_best_level(void) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return ADAM_AVX512;
  return __builtin_cpu_supports("avx2") ? ADAM_AVX2 : ADAM_BASELINE;
}

uint64_t adam_float_mode(void) { return _mm_getcsr() & ~(uint64_t)_MM_EXCEPT_MASK; }
static void set_float_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }

#else
static void step_avx2(const struct update *u) { step_span(u); }
static void step_avx512(const struct update *u) { step_span(u); }
int adam_best_level(void) { return ADAM_BASELINE; }

#if defined(__aarch64__)
uint64_t adam_float_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
uint64_t adam_float_mode(void) { return 0; }
static void set_float_mode(uint64_t mode) { (void)mode; }
#endif
#endif

void adam_update(int level, uint64_t float_mode, uintptr_t parameter, int parameter_dtype, uintptr_t gradient,
                 int gradient_dtype, uintptr_t master, uintptr_t exp_avg, uintptr_t exp_avg_sq, size_t count,
                 double gradient_factor, double l2, double decay, double one_minus_beta1, double beta2,
                 double one_minus_beta2, double bias_correction2_sqrt, double eps, double step_size) {
  const struct update u = {
      .parameter = (void *)parameter,
      .gradient = (const void *)gradient,
      .master = (float *)(parameter_dtype == ADAM_FLOAT32 ? parameter : master),
      .exp_avg = (float *)exp_avg,
      .exp_avg_sq = (float *)exp_avg_sq,
      .count = count,
      .parameter_dtype = parameter_dtype,
      .gradient_dtype = gradient_dtype & ~ADAM_EXACT,
      .gradient_factor = (float)gradient_factor,
      .exact = (gradient_dtype & ADAM_EXACT) != 0,
      .l2 = (float)l2,
      .decay = (float)decay,
      .one_minus_beta1 = (float)one_minus_beta1,
      .beta2 = (float)beta2,
      .one_minus_beta2 = (float)one_minus_beta2,
      .bias_correction2_sqrt = (float)bias_correction2_sqrt,
      .eps = (float)eps,
      .step_size = (float)step_size,
  };
  const uint64_t own_mode = adam_float_mode();
  set_float_mode(float_mode);
  if (level == ADAM_AVX512)
    step_avx512(&u);
  else if (level == ADAM_AVX2)
    step_avx2(&u);
  else
    step_baseline(&u);
  set_float_mode(own_mode);
}
