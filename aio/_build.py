"""The build of tiermem.aio._queue, the libaio queue as a cffi extension.

Paths are relative to the project root, where setup.py runs.
"""

from cffi import FFI

ffibuilder = FFI()

ffibuilder.cdef(
    """
    typedef struct queue queue;
    typedef struct {
        int landed;
        int error;
        int ended;
        uint64_t moved;
        uint64_t at;
        uint64_t asked;
        uint64_t came;
        ...;
    } transfer;

    typedef ... *io_context_t;
    struct iocb { short aio_lio_opcode; ...; };
    struct timespec;
    struct io_event { unsigned long res; ...; };
    typedef int (*submit_call)(io_context_t, long, struct iocb **);
    typedef int (*getevents_call)(io_context_t, long, long, struct io_event *, struct timespec *);
    int io_submit(io_context_t, long, struct iocb **);
    int io_getevents(io_context_t, long, long, struct io_event *, struct timespec *);

    queue *queue_open(unsigned depth, uint64_t request);
    transfer *queue_submit(queue *, int writing, int fd, uint64_t offset, uint64_t address, uint64_t nbytes,
                           uint64_t grain);
    int queue_wait(queue *, transfer *, int milliseconds);
    void queue_forget(queue *, transfer *);
    uint64_t queue_moved(queue *, int writing);
    void queue_replace_calls(queue *, submit_call, getevents_call);
    void queue_stop(queue *);
    void queue_free(queue *);
    """
)

ffibuilder.set_source(
    "tiermem.aio._queue",
    '#include "queue.h"',
    sources=["aio/queue.c", "aio/serve.c"],
    depends=["aio/queue.h", "aio/serve.h"],
    include_dirs=["aio"],
    libraries=["aio"],
    extra_compile_args=["-O2", "-Wall"],
)
