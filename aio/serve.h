/* The inside of a queue, shared by its face (queue.c) and its thread (serve.c).
 *
 * Note: who touches what. The thread holds the lock except while it is in a system call or asleep.
 * Requests, the batch and the lanes' inner state belong to the thread; other threads only append to a
 * lane and take records from the pool, under the lock. `landed` is stored last, so whoever sees it
 * under the lock (queue_wait) sees the outcome too.
 */
#ifndef TIERMEM_AIO_SERVE_H
#define TIERMEM_AIO_SERVE_H

#include "queue.h"

#include <pthread.h>
#include <sys/types.h>

#define RECORDS_A_SLAB 64

typedef struct request {
    struct iocb iocb; /* first: an iocb's address is its request's */
    transfer *transfer;
    int flying;
    struct request *next;
} request;

typedef struct slab {
    struct slab *next;
    transfer records[RECORDS_A_SLAB];
} slab;

typedef struct lane {
    transfer *head;
    transfer *tail;
    unsigned num_open; /* requests made and not finished */
    uint64_t moved;
} lane;

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_cond_t landing;
    pthread_t thread;
    pid_t owner;
    int stopping;
    int stopped;
    int broken; /* errno: completions can no longer be had */

    io_context_t context;
    submit_call submit;
    getevents_call getevents;

    unsigned depth;
    uint64_t request;
    lane lanes[2]; /* reads, writes */
    request *requests;
    request *spare;
    struct iocb **batch; /* made and not sent */
    unsigned num_batch;
    unsigned num_flying;
    unsigned num_refused; /* in a row */
    struct io_event *events;

    slab *slabs;
    transfer *unused;
};

/* The thread: serves the queue until it is stopping and empty. `argument` is the queue. */
void *queue_serve(void *argument);

#endif
