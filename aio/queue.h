/* An asynchronous I/O queue over libaio, served by a thread of its own.
 *
 * A transfer of any size is split into requests of at most `request` bytes; at most `depth` requests
 * are in flight. Transfers of one direction start in the order submitted; reads and writes share the
 * depth evenly while both have work. Every function may be called from any thread.
 */
#ifndef TIERMEM_AIO_QUEUE_H
#define TIERMEM_AIO_QUEUE_H

#include <libaio.h>
#include <stdint.h>

typedef struct queue queue;

typedef struct transfer {
    /* Read by the caller. The others are settled once `landed` is 1 and queue_wait has said so. */
    int landed;
    int error;      /* 0, or the errno of the first request that failed */
    int ended;      /* that request came short, and its rest could not be had */
    uint64_t moved; /* bytes that came, all requests together */
    uint64_t at;    /* the failing request: its file offset, the bytes it asked, the bytes that came */
    uint64_t asked;
    uint64_t came;

    /* The queue's own. */
    int writing;
    int fd;
    uint64_t offset;
    char *address;
    uint64_t nbytes;
    uint64_t grain;  /* what offset and length must be multiples of */
    uint64_t issued; /* bytes for which requests were made */
    unsigned num_open;
    struct transfer *next;
} transfer;

/* The two system calls, replaceable so that tests can make them fail. Both return a count or -errno. */
typedef int (*submit_call)(io_context_t context, long count, struct iocb **requests);
typedef int (*getevents_call)(io_context_t context, long least, long most, struct io_event *events,
                              struct timespec *timeout);

/* NULL with errno set where the kernel refuses (EAGAIN: aio-max-nr is used up; ENOSYS, EPERM). */
queue *queue_open(unsigned depth, uint64_t request);

/* NULL with errno set: ESHUTDOWN after queue_stop, ENOMEM. */
transfer *queue_submit(queue *q, int writing, int fd, uint64_t offset, uint64_t address, uint64_t nbytes,
                       uint64_t grain);

/* 1 once the transfer has landed, 0 when `milliseconds` passed first. */
int queue_wait(queue *q, transfer *t, int milliseconds);

/* Gives a landed transfer's record back. */
void queue_forget(queue *q, transfer *t);

/* Bytes that came so far, of landed and unlanded transfers. */
uint64_t queue_moved(queue *q, int writing);

/* For tests, before the first transfer. */
void queue_replace_calls(queue *q, submit_call submit, getevents_call getevents);

/* Lets everything in flight land, ends the thread, frees the kernel's context. Records stay readable. */
void queue_stop(queue *q);

/* Stops, then frees. In a forked child it does nothing: the thread is not there. */
void queue_free(queue *q);

#endif
