"""One Adam or AdamW step over a span of raw memory, on the CPU.

The :class:`Kernel` neither knows tensors nor owns memory: it is given addresses, and promises that the bits
it writes depend only on the numbers it reads, not on how a span was cut, how many threads shared it or which
instruction set they ran on. Each array is read once and written once; the GIL is free meanwhile.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import torch
from tiermem.trainer._adam import lib

__all__ = ["BEST_LEVEL", "Hyper", "Kernel"]

_EXACT = 8  # ADAM_EXACT
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# A thread takes this many elements at a time. Half a millisecond of work: long beside the microseconds it
# takes to hand a piece out, short enough that a thread which lost its core doesn't keep the others waiting.
_PIECE = 1 << 20

# Spans up to this many elements (about 100 microseconds) are done by the caller alone: waking another thread
# would take as long as it saves.
_INLINE = 1 << 17

BEST_LEVEL: int = lib.adam_best_level()
"""The widest instruction set of this processor: 0 the architecture's baseline, 1 AVX2, 2 AVX-512."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """What one parameter group asks of an update.

    ``decoupled`` shrinks the parameter by ``lr * weight_decay`` beside the update (AdamW: Loshchilov &
    Hutter, "Decoupled Weight Decay Regularization", ICLR 2019); otherwise ``weight_decay * parameter`` is
    added to the gradient (Adam with L2). ``maximize`` ascends the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class Kernel:
    """Adam's update (Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015) and its threads.

    ``num_threads`` counts the calling thread too, and is ``torch.get_num_threads()`` unless given. ``level``
    caps the instruction set (see :data:`BEST_LEVEL`); the bits are the same on all. Several threads may call
    :meth:`update` at once on spans that don't overlap. :meth:`close` (or leaving the ``with`` block) ends the
    threads; an update after that raises RuntimeError.
    """

    def __init__(self, num_threads: int | None = None, *, level: int = BEST_LEVEL) -> None:
        if num_threads is None:
            num_threads = torch.get_num_threads()
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if not 0 <= level <= BEST_LEVEL:
            raise ValueError(f"level must be from 0 to {BEST_LEVEL} on this processor, got {level}")
        self.num_threads = num_threads
        self.level = level
        self._pool = ThreadPoolExecutor(max(num_threads - 1, 1), thread_name_prefix="tiermem-adam")
        self._closed = False

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for updates under way and end the threads. A second call does nothing."""
        self._closed = True
        self._pool.shutdown()

    def update(
        self,
        *,
        parameter: int,
        parameter_dtype: torch.dtype,
        gradient: int,
        gradient_dtype: torch.dtype,
        master: int,
        exp_avg: int,
        exp_avg_sq: int,
        count: int,
        hyper: Hyper,
        step: int,
        grad_scale: float = 1.0,
        exact: bool = False,
    ) -> None:
        """Update ``count`` elements in place, and return when all are written.

        ``parameter``, ``gradient``, ``master``, ``exp_avg`` and ``exp_avg_sq`` are the addresses in bytes of
        each span's first element, aligned to the element; the spans must stay valid until the return, and
        none may overlap another. Parameter and gradient are float32, bfloat16 or float16, in any pairing;
        master and both moments are float32. A float32 parameter is its own master, and ``master`` is then 0.
        Otherwise the update is made on the master, and the parameter becomes the master rounded to nearest
        even.

        ``step`` counts this update, from 1. ``grad_scale`` multiplies the gradient first, and the product is
        rounded to the gradient's dtype, as ``grad.mul_(grad_scale)`` would; with ``exact`` it stays float32.

        Raises ValueError for another dtype, a master that doesn't go with the parameter's dtype, a negative
        count or a step below 1.
        """
        parameter_kind = _KINDS.get(parameter_dtype)
        gradient_kind = _KINDS.get(gradient_dtype)
        if parameter_kind is None or gradient_kind is None:
            raise ValueError(
                f"parameter and gradient must be float32, bfloat16 or float16, got {parameter_dtype} and "
                f"{gradient_dtype}"
            )
        if count < 0 or step < 1:
            raise ValueError(f"count must be at least 0 and step at least 1, got {count} and {step}")
        if self._closed:
            raise RuntimeError("update() on a closed Kernel")
        if count == 0:
            return  # an empty tensor has no address
        if (master == 0) != (parameter_kind == 0):
            raise ValueError(
                f"a {parameter_dtype} parameter with master={master:#x}: float32 goes without, others with"
            )

        decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
        scalars = (
            -grad_scale if hyper.maximize else grad_scale,
            0.0 if hyper.decoupled else hyper.weight_decay,
            decay,
            1 - hyper.beta1,
            hyper.beta2,
            1 - hyper.beta2,
            (1 - hyper.beta2**step) ** 0.5,
            hyper.eps,
            hyper.lr / (1 - hyper.beta1**step),
        )
        mode = lib.adam_float_mode()
        parameter_size, gradient_size = parameter_dtype.itemsize, gradient_dtype.itemsize

        def piece(first: int, length: int) -> None:
            lib.adam_update(
                self.level,
                mode,
                parameter + first * parameter_size,
                parameter_kind,
                gradient + first * gradient_size,
                gradient_kind | (_EXACT if exact else 0),
                master + first * 4,
                exp_avg + first * 4,
                exp_avg_sq + first * 4,
                length,
                *scalars,
            )

        if self.num_threads == 1 or count <= _INLINE:
            piece(0, count)
            return

        # Pieces are taken one by one by whoever is free, and popleft is atomic: none is done twice.
        length = min(_PIECE, -(-count // self.num_threads))
        firsts = deque(range(0, count, length))

        def work() -> None:
            while True:
                try:
                    first = firsts.popleft()
                except IndexError:
                    return
                piece(first, min(length, count - first))

        futures = [self._pool.submit(work) for _ in range(min(self.num_threads, len(firsts)) - 1)]
        try:
            work()
        finally:
            wait(futures)  # the spans are the caller's again only when nobody works on them
        for future in futures:
            future.result()
