/* Tests of deque.c against a plain array, at every size around growing and shrinking.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *     tests/unit/c/test_deque.c csrc/python/deque.c -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -o test_deque
 */
#include <stdlib.h>

#include "check.h"
#include "python/deque.h"
#include "malloc_fault.h"

enum { MOST = 4096 };

/* The same contents as the deque has, in the middle of an array that is never full. */
static void *model[2 * MOST];
static size_t model_begin, model_end;

static void
start(mp_deque *deque)
{
    mp_deque_init(deque);
    model_begin = model_end = MOST;
}

static void
check_same(const mp_deque *deque)
{
    mp_deque_check(deque);
    CHECK_EQ(deque->length, model_end - model_begin);
    for (size_t i = 0; i < deque->length; i++) {
        CHECK_EQ(mp_deque_at(deque, i), model[model_begin + i]);
    }
}

static void
step(mp_deque *deque, unsigned operation, void *item)
{
    switch (operation) {
    case 0:
        CHECK_EQ(mp_deque_push(deque, item), 0);
        model[model_end++] = item;
        break;
    case 1:
        CHECK_EQ(mp_deque_push_left(deque, item), 0);
        model[--model_begin] = item;
        break;
    case 2:
        CHECK_EQ(mp_deque_pop(deque), model_begin == model_end ? NULL : model[--model_end]);
        break;
    default:
        CHECK_EQ(mp_deque_pop_left(deque), model_begin == model_end ? NULL : model[model_begin++]);
        break;
    }
}

static void *
item(uintptr_t value)
{
    return (void *)value;
}

static void
test_empty(void)
{
    mp_deque deque;
    start(&deque);
    CHECK(mp_deque_pop(&deque) == NULL);
    CHECK(mp_deque_pop_left(&deque) == NULL);
    CHECK(deque.items == NULL); /* nothing is allocated before the first push */
    mp_deque_fini(&deque);
    mp_deque_fini(&deque);
    mp_deque_check(&deque);
}

/* Filled and emptied by each pair of ends, from every rotation of the ring. */
static void
test_every_rotation(void)
{
    for (unsigned rotation = 0; rotation < 20; rotation++) {
        for (unsigned ends = 0; ends < 4; ends++) {
            mp_deque deque;
            start(&deque);
            for (unsigned i = 0; i < rotation; i++) {
                step(&deque, 0, item(1));
                step(&deque, 3, NULL);
            }
            for (uintptr_t i = 1; i <= 70; i++) {
                step(&deque, ends & 1, item(i));
                check_same(&deque);
            }
            while (deque.length > 0) {
                step(&deque, 2 + (ends >> 1), NULL);
                check_same(&deque);
            }
            mp_deque_fini(&deque);
        }
    }
}

static void
test_random_walk(void)
{
    mp_deque deque;
    unsigned state = 7;
    start(&deque);
    for (uintptr_t i = 1; i < 40000; i++) {
        state = state * 1664525 + 1013904223;
        unsigned growing = i / 1500 % 2; /* phases of growing and of shrinking */
        unsigned push = (state >> 20) % 8 < (growing ? 6u : 2u);
        step(&deque, (push ? 0u : 2u) + (state >> 28) % 2, item(i));
        if (i % 97 == 0) {
            check_same(&deque);
        }
        if (model_begin < 8 || model_end > 2 * MOST - 8) { /* move the model back to the middle */
            size_t length = model_end - model_begin;
            memmove(&model[MOST - length / 2], &model[model_begin], length * sizeof(model[0]));
            model_begin = MOST - length / 2;
            model_end = model_begin + length;
        }
    }
    check_same(&deque);
    mp_deque_fini(&deque);
}

static void
test_size_follows_length(void)
{
    mp_deque deque;
    start(&deque);
    for (uintptr_t i = 1; i <= 1024; i++) {
        step(&deque, 0, item(i));
        CHECK(deque.size < 2 * deque.length || deque.size == 4);
    }
    CHECK_EQ(deque.size, 1024);
    while (deque.length > 0) {
        step(&deque, 3, NULL);
        CHECK(deque.length >= deque.size / 4 || deque.size == 4);
    }
    CHECK_EQ(deque.size, 4);
    mp_deque_fini(&deque);
}

static void
test_memory_out(void)
{
    mp_deque deque;
    start(&deque);
    malloc_fails_at(1);
    CHECK_EQ(mp_deque_push(&deque, item(1)), -1);
    check_same(&deque);
    for (uintptr_t i = 1; i <= 8; i++) {
        step(&deque, i & 1, item(i));
    }
    malloc_fails_at(1);
    CHECK_EQ(mp_deque_push(&deque, item(9)), -1);
    check_same(&deque);
    malloc_fails_at(1);
    CHECK_EQ(mp_deque_push_left(&deque, item(9)), -1);
    check_same(&deque);
    while (deque.length > 0) { /* cannot shrink: keeps the array, loses nothing */
        malloc_fails_at(1);
        step(&deque, 2, NULL);
        malloc_fails_at(0);
        check_same(&deque);
        CHECK_EQ(deque.size, 8);
    }
    mp_deque_fini(&deque);
}

int
main(void)
{
    test_empty();
    test_every_rotation();
    test_random_walk();
    test_size_follows_length();
    test_memory_out();
    return check_status();
}
