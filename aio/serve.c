/* The queue's thread: fill the batch, send it, reap what landed.
 *
 * Note: no wake-up while requests are in flight. A transfer that is submitted while the thread waits in
 * io_getevents starts at the next completion. One is certain to come, and within a request's time; an
 * eventfd would cost two more system calls for every completion to save that.
 */
#include "serve.h"

#include <errno.h>
#include <string.h>
#include <time.h>

/* Refusals in a row, a millisecond apart with nothing in flight, before a request is given up. */
#define PATIENCE 1000

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

void *queue_serve(void *argument)
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
