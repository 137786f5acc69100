"""The recipe of ``tiermem.trainer._adam``, the C extension under :mod:`tiermem.trainer.kernel`.

One binary serves every processor of an architecture: the code picks its instruction set when it runs, so
nothing here may depend on the machine that builds (no ``-march=native``).
"""

import platform

from cffi import FFI

FLAGS = [
    "-O3",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # the bits must not depend on where the compiler would fuse: see trainer/adam.c
]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")

ffibuilder = FFI()
ffibuilder.cdef(
    """
    int adam_best_level(void);
    uint64_t adam_float_mode(void);
    void adam_update(int level, uint64_t float_mode, uintptr_t parameter, int parameter_dtype,
                     uintptr_t gradient, int gradient_dtype, uintptr_t master, uintptr_t exp_avg,
                     uintptr_t exp_avg_sq, size_t count, double gradient_factor, double l2, double decay,
                     double one_minus_beta1, double beta2, double one_minus_beta2,
                     double bias_correction2_sqrt, double eps, double step_size);
    """
)
ffibuilder.set_source(
    "tiermem.trainer._adam",
    '#include "adam.h"',
    sources=["trainer/adam.c"],
    include_dirs=["trainer"],
    depends=["trainer/adam.h"],
    extra_compile_args=FLAGS,
    libraries=["m"],
)
