/* A ring buffer of pointers; see deque.h.
 *
 * The capacity doubles when full and halves when less than a quarter is used, so that a deque that grew once does not
 * keep the memory, and one that swings around a size does not move its elements each time. */
#include "python/deque.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/require.h"

/* A deque holds the events of one module, one or two as a rule: never shrunk below this. */
#define SMALLEST 4

static size_t
slot(const mp_deque *deque, size_t index)
{
    return (deque->head + index) & (deque->size - 1);
}

/* Moves the elements into an array of `size` slots.  0, or -1 with the deque unchanged. */
static int
resize(mp_deque *deque, size_t size)
{
    if (size > SIZE_MAX / sizeof(void *)) {
        return -1;
    }
    void **items = malloc(size * sizeof(void *));
    if (items == NULL) {
        return -1;
    }
    if (deque->length > 0) {
        size_t first = deque->size - deque->head; /* elements before the ring wraps */
        if (first > deque->length) {
            first = deque->length;
        }
        memcpy(items, deque->items + deque->head, first * sizeof(void *));
        memcpy(items + first, deque->items, (deque->length - first) * sizeof(void *));
    }
    free(deque->items);
    deque->items = items;
    deque->size = size;
    deque->head = 0;
    return 0;
}

static int
make_room(mp_deque *deque)
{
    if (deque->length < deque->size) {
        return 0;
    }
    return resize(deque, deque->size == 0 ? SMALLEST : deque->size * 2);
}

static void
give_back_room(mp_deque *deque)
{
    if (deque->size > SMALLEST && deque->length < deque->size / 4) {
        (void)resize(deque, deque->size / 2); /* without memory the old array simply stays */
    }
}

void
mp_deque_init(mp_deque *deque)
{
    *deque = (mp_deque){0};
}

void
mp_deque_fini(mp_deque *deque)
{
    void **items = deque->items;
    *deque = (mp_deque){0};
    free(items);
}

int
mp_deque_push(mp_deque *deque, void *item)
{
    if (make_room(deque) < 0) {
        return -1;
    }
    deque->items[slot(deque, deque->length)] = item;
    deque->length++;
    mp_deque_check(deque);
    return 0;
}

int
mp_deque_push_left(mp_deque *deque, void *item)
{
    if (make_room(deque) < 0) {
        return -1;
    }
    deque->head = slot(deque, deque->size - 1);
    deque->items[deque->head] = item;
    deque->length++;
    mp_deque_check(deque);
    return 0;
}

void *
mp_deque_pop(mp_deque *deque)
{
    if (deque->length == 0) {
        return NULL;
    }
    void *item = deque->items[slot(deque, deque->length - 1)];
    deque->length--;
    give_back_room(deque);
    mp_deque_check(deque);
    return item;
}

void *
mp_deque_pop_left(mp_deque *deque)
{
    if (deque->length == 0) {
        return NULL;
    }
    void *item = deque->items[deque->head];
    deque->head = slot(deque, 1);
    deque->length--;
    give_back_room(deque);
    mp_deque_check(deque);
    return item;
}

void *
mp_deque_at(const mp_deque *deque, size_t index)
{
    return deque->items[slot(deque, index)];
}

#ifndef NDEBUG

/* Looks at the ends only: it runs after every operation, and those must stay of constant cost in debug builds too. */
void
mp_deque_check(const mp_deque *deque)
{
    MP_REQUIRE((deque->items == NULL) == (deque->size == 0));
    MP_REQUIRE((deque->size & (deque->size - 1)) == 0);
    MP_REQUIRE(deque->length <= deque->size);
    MP_REQUIRE(deque->size == 0 ? deque->head == 0 : deque->head < deque->size);
    if (deque->length > 0) {
        MP_REQUIRE(deque->items[deque->head] != NULL);
        MP_REQUIRE(deque->items[slot(deque, deque->length - 1)] != NULL);
    }
}

#else

void
mp_deque_check(const mp_deque *deque)
{
    (void)deque;
}

#endif
