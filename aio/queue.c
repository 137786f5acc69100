/* The queue's face: opening, submitting, waiting, stopping. Its thread is in serve.c. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Starts the thread with every signal blocked, so that signals reach the threads that expect them. */
static int start(queue *q)
{
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&q->thread, NULL, queue_serve, q);
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
