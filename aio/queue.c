/* The queue's thread: fill the batch, send it, reap what landed; see queue.h.
 *
 * Note: who touches what. The thread holds the lock except while it is in a system call or asleep.
 * Requests, the batch and the lanes' inner state belong to the thread; other threads only append to a
 * lane and take records from the pool, under the lock. `landed` is stored last, so whoever sees it
 * under the lock (queue_wait) sees the outcome too.
 *
 * Note: no wake-up while requests are in flight. A transfer that is submitted while the thread waits in
 * io_getevents starts at the next completion. One is certain to come, and within a request's time; an
 * eventfd would cost two more system calls for every completion to save that.
 */
#define _GNU_SOURCE
#include "queue.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RECORDS_A_SLAB 64
/* Refusals in a row, a millisecond apart with nothing in flight, before a request is given up. */
#define PATIENCE 1000

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

static void pause_briefly(void)
{
    struct timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, NULL);
}

static void land(queue *q, transfer *t)
{
    __atomic_store_n(&t->landed, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&q->landing);
}

static void pop(lane *l)
{
    l->head = l->head->next;
    if (!l->head)
        l->tail = NULL;
}

/* A request ended with `result`: bytes, or -errno. */
static void finish(queue *q, request *r, long result)
{
    transfer *t = r->transfer;
    lane *l = &q->lanes[t->writing];
    uint64_t asked = r->iocb.u.c.nbytes;

    if (result > 0) {
        t->moved += (uint64_t)result;
        l->moved += (uint64_t)result;
    }
    if (result != (long)asked && !t->error) {
        if (result > 0 && result < (long)asked && (uint64_t)result % t->grain == 0) {
            /* Short in the middle of a file is lawful: ask for the rest. At its end 0 comes next. */
            r->iocb.u.c.buf = (char *)r->iocb.u.c.buf + result;
            r->iocb.u.c.nbytes -= (unsigned long)result;
            r->iocb.u.c.offset += result;
            q->batch[q->num_batch++] = &r->iocb;
            return;
        }
        t->error = result < 0 ? (int)-result : EIO;
        t->ended = result >= 0;
        t->at = (uint64_t)r->iocb.u.c.offset;
        t->asked = asked;
        t->came = result > 0 ? (uint64_t)result : 0;
    }
    if (t->error && t->issued < t->nbytes) {
        /* Only the head of a lane is issued in part, so this is the head: the rest is not begun. */
        t->issued = t->nbytes;
        pop(l);
    }
    r->next = q->spare;
    q->spare = r;
    l->num_open--;
    t->num_open--;
    if (t->num_open == 0 && t->issued == t->nbytes)
        land(q, t);
}

/* The lane to serve next: of two with work, the one with fewer requests open. */
static lane *choose(queue *q)
{
    lane *reads = &q->lanes[0], *writes = &q->lanes[1];

    if (!reads->head)
        return writes->head ? writes : NULL;
    if (!writes->head)
        return reads;
    return reads->num_open <= writes->num_open ? reads : writes;
}

/* Makes requests of waiting transfers as far as the depth allows. */
static void fill(queue *q)
{
    lane *l;

    while (q->spare && (l = choose(q)) != NULL) {
        request *r = q->spare;
        transfer *t = l->head;
        uint64_t length = t->nbytes - t->issued;

        if (length > q->request)
            length = q->request;
        q->spare = r->next;
        r->transfer = t;
        (t->writing ? io_prep_pwrite : io_prep_pread)(&r->iocb, t->fd, t->address + t->issued, length,
                                                      (long long)(t->offset + t->issued));
        q->batch[q->num_batch++] = &r->iocb;
        t->issued += length;
        t->num_open++;
        l->num_open++;
        if (t->issued == t->nbytes)
            pop(l);
    }
}

/* Takes the first `count` requests out of the batch. */
static void shift(queue *q, unsigned count)
{
    q->num_batch -= count;
    memmove(q->batch, q->batch + count, q->num_batch * sizeof *q->batch);
}

/* Ends the first request of the batch, which was not sent. */
static void refuse(queue *q, int error)
{
    request *r = (request *)q->batch[0];

    shift(q, 1);
    finish(q, r, -(long)error);
}

/* Sends the batch, or as much of it as the kernel takes now. */
static void send_batch(queue *q)
{
    while (q->num_batch) {
        int count;

        if (q->broken) {
            refuse(q, q->broken);
            continue;
        }
        pthread_mutex_unlock(&q->lock);
        count = q->submit(q->context, q->num_batch, q->batch);
        pthread_mutex_lock(&q->lock);
        if (count > 0) {
            for (int i = 0; i < count; i++)
                ((request *)q->batch[i])->flying = 1;
            q->num_flying += (unsigned)count;
            q->num_refused = 0;
            shift(q, (unsigned)count);
        } else if (count == -EAGAIN || count == 0) {
            /* Short of resources: completions free some. With none to come, try again a little later. */
            if (q->num_flying)
                return;
            if (++q->num_refused > PATIENCE) {
                refuse(q, EAGAIN);
                continue;
            }
            pthread_mutex_unlock(&q->lock);
            pause_briefly();
            pthread_mutex_lock(&q->lock);
        } else if (count != -EINTR) {
            refuse(q, -count); /* the error is that of the first request: EBADF, EINVAL, EFAULT */
        }
    }
}

/* io_getevents failed for good. io_destroy returns when the kernel no longer touches memory: only then
 * may transfers end. */
static void give_up(queue *q, int error)
{
    q->broken = error;
    pthread_mutex_unlock(&q->lock);
    io_destroy(q->context);
    pthread_mutex_lock(&q->lock);
    for (unsigned i = 0; i < q->depth; i++) {
        if (q->requests[i].flying) {
            q->requests[i].flying = 0;
            finish(q, &q->requests[i], -(long)error);
        }
    }
    q->num_flying = 0;
}

/* Waits for at least one completion and takes all there are. */
static void reap(queue *q)
{
    int count;

    pthread_mutex_unlock(&q->lock);
    do
        count = q->getevents(q->context, 1, q->depth, q->events, NULL);
    while (count == -EINTR);
    pthread_mutex_lock(&q->lock);
    if (count < 0)
        give_up(q, -count);
    for (int i = 0; i < count; i++) {
        request *r = (request *)q->events[i].obj;

        r->flying = 0;
        q->num_flying--;
        finish(q, r, (long)q->events[i].res);
    }
}

static void *serve(void *argument)
{
    queue *q = argument;

    pthread_mutex_lock(&q->lock);
    for (;;) {
        fill(q);
        if (q->num_batch)
            send_batch(q);
        if (q->num_flying)
            reap(q);
        else if (!q->num_batch && !choose(q)) {
            if (q->stopping)
                break;
            pthread_cond_wait(&q->work, &q->lock);
        }
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* Starts the thread with every signal blocked, so that signals reach the threads that expect them. */
static int start(queue *q)
{
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&q->thread, NULL, serve, q);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_setname_np(q->thread, "tiermem-aio");
    return error;
}

static void release(queue *q)
{
    while (q->slabs) {
        slab *s = q->slabs;
        q->slabs = s->next;
        free(s);
    }
    pthread_cond_destroy(&q->landing);
    pthread_cond_destroy(&q->work);
    pthread_mutex_destroy(&q->lock);
    free(q->events);
    free(q->batch);
    free(q->requests);
    free(q);
}

queue *queue_open(unsigned depth, uint64_t size)
{
    queue *q = calloc(1, sizeof *q);
    pthread_condattr_t attributes;
    int error;

    if (!q)
        return NULL;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->work, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&q->landing, &attributes);
    pthread_condattr_destroy(&attributes);
    q->owner = getpid();
    q->depth = depth;
    q->request = size;
    q->submit = io_submit;
    q->getevents = io_getevents;
    q->requests = calloc(depth, sizeof *q->requests);
    q->batch = calloc(depth, sizeof *q->batch);
    q->events = calloc(depth, sizeof *q->events);
    if (!q->requests || !q->batch || !q->events) {
        error = ENOMEM;
    } else {
        for (unsigned i = 0; i < depth; i++) {
            q->requests[i].next = q->spare;
            q->spare = &q->requests[i];
        }
        error = -io_setup((int)depth, &q->context);
        if (!error) {
            error = start(q);
            if (error)
                io_destroy(q->context);
        }
    }
    if (error) {
        release(q);
        errno = error;
        return NULL;
    }
    return q;
}

/* A record from the pool, which grows by a slab when it is used up. */
static transfer *take_record(queue *q)
{
    transfer *t;

    if (!q->unused) {
        slab *s = calloc(1, sizeof *s);
        if (!s)
            return NULL;
        s->next = q->slabs;
        q->slabs = s;
        for (int i = 0; i < RECORDS_A_SLAB; i++) {
            s->records[i].next = q->unused;
            q->unused = &s->records[i];
        }
    }
    t = q->unused;
    q->unused = t->next;
    memset(t, 0, sizeof *t);
    return t;
}

transfer *queue_submit(queue *q, int writing, int fd, uint64_t offset, uint64_t address, uint64_t nbytes,
                       uint64_t grain)
{
    transfer *t = NULL;
    lane *l = &q->lanes[writing];
    int error = 0;

    pthread_mutex_lock(&q->lock);
    if (q->stopping)
        error = ESHUTDOWN;
    else if (!(t = take_record(q)))
        error = ENOMEM;
    else {
        t->writing = writing;
        t->fd = fd;
        t->offset = offset;
        t->address = (char *)(uintptr_t)address;
        t->nbytes = nbytes;
        t->grain = grain;
        if (l->tail)
            l->tail->next = t;
        else
            l->head = t;
        l->tail = t;
        pthread_cond_signal(&q->work);
    }
    pthread_mutex_unlock(&q->lock);
    errno = error;
    return t;
}

int queue_wait(queue *q, transfer *t, int milliseconds)
{
    struct timespec until;
    int landed;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += (milliseconds % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&q->lock);
    while (!t->landed && pthread_cond_timedwait(&q->landing, &q->lock, &until) != ETIMEDOUT)
        ;
    landed = t->landed;
    pthread_mutex_unlock(&q->lock);
    return landed;
}

void queue_forget(queue *q, transfer *t)
{
    pthread_mutex_lock(&q->lock);
    t->next = q->unused;
    q->unused = t;
    pthread_mutex_unlock(&q->lock);
}

uint64_t queue_moved(queue *q, int writing)
{
    uint64_t moved;

    pthread_mutex_lock(&q->lock);
    moved = q->lanes[writing].moved;
    pthread_mutex_unlock(&q->lock);
    return moved;
}

void queue_replace_calls(queue *q, submit_call submit, getevents_call getevents)
{
    pthread_mutex_lock(&q->lock);
    q->submit = submit;
    q->getevents = getevents;
    pthread_mutex_unlock(&q->lock);
}

void queue_stop(queue *q)
{
    int first;

    pthread_mutex_lock(&q->lock);
    first = !q->stopping;
    q->stopping = 1;
    pthread_cond_signal(&q->work);
    while (!first && !q->stopped)
        pthread_cond_wait(&q->landing, &q->lock);
    pthread_mutex_unlock(&q->lock);
    if (!first)
        return;
    pthread_join(q->thread, NULL);
    if (!q->broken)
        io_destroy(q->context);
    pthread_mutex_lock(&q->lock);
    q->stopped = 1;
    pthread_cond_broadcast(&q->landing);
    pthread_mutex_unlock(&q->lock);
}

void queue_free(queue *q)
{
    if (getpid() != q->owner)
        return;
    queue_stop(q);
    release(q);
}
