/* One Adam or AdamW step over a span of elements. See adam.c for what it promises about bits. */
#ifndef TIERMEM_ADAM_H
#define TIERMEM_ADAM_H

#include <stddef.h>
#include <stdint.h>

enum { ADAM_FLOAT32 = 0, ADAM_BFLOAT16 = 1, ADAM_FLOAT16 = 2 };

/* Beside a gradient's dtype: its product with the factor isn't rounded to that. */
enum { ADAM_EXACT = 8 };

/* Instruction sets, each with its own copy of the same loops. */
enum { ADAM_BASELINE = 0, ADAM_AVX2 = 1, ADAM_AVX512 = 2 };

/* The highest of the instruction sets above that this processor runs (and the operating system saves). */
int adam_best_level(void);

/* How the calling thread treats denormals and rounds: pass it to adam_update, so that a span's pieces agree
   whichever thread computes them. */
uint64_t adam_float_mode(void);

/* Update `count` elements. `parameter` has dtype `parameter_dtype`; `master`, `exp_avg` and `exp_avg_sq` are
   float32; `master` is 0 when the parameter is float32 and so its own master. Addresses are those of the first
   element, aligned to the element; the spans don't overlap. `gradient_factor` multiplies each gradient before
   all else; that of half-precision ones is rounded to their dtype, unless ADAM_EXACT is in it. Scalars are doubles, rounded to float32 here, as torch does with Python numbers. */
void adam_update(int level, uint64_t float_mode, uintptr_t parameter, int parameter_dtype, uintptr_t gradient,
                 int gradient_dtype, uintptr_t master, uintptr_t exp_avg, uintptr_t exp_avg_sq, size_t count,
                 double gradient_factor, double l2, double decay, double one_minus_beta1, double beta2,
                 double one_minus_beta2, double bias_correction2_sqrt, double eps, double step_size);

#endif
