/* A ring of pointers with the ends that collections.deque offers.  No Python, no lock: callers hold one.
 * Elements are opaque and never dereferenced; who owns them is the caller's business. */
#ifndef DDP_MP_DEQUE_H
#define DDP_MP_DEQUE_H

#include <stddef.h>

typedef struct mp_deque {
    void **items;  /* owned; NULL until the first push */
    size_t size;   /* capacity, a power of two or 0 */
    size_t head;   /* index of the leftmost element */
    size_t length;
} mp_deque;

void mp_deque_init(mp_deque *deque);
/* Empties the struct before it frees the memory.  The caller drops the elements first. */
void mp_deque_fini(mp_deque *deque);
/* 0, or -1 when memory is out (the deque is unchanged). */
int mp_deque_push(mp_deque *deque, void *item);      /* append */
int mp_deque_push_left(mp_deque *deque, void *item); /* appendleft */
/* The element, or NULL when empty (NULL is never an element). */
void *mp_deque_pop(mp_deque *deque);
void *mp_deque_pop_left(mp_deque *deque);
/* Borrowed element `index` from the left; index < length. */
void *mp_deque_at(const mp_deque *deque, size_t index);
void mp_deque_check(const mp_deque *deque);

#endif
