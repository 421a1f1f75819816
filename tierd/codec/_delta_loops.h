/* The inner loops of the codec `delta`: find the elements that differ, and add differences to elements.
 *
 * _plane_loops.c includes this file after its functions for buffers, and has the invariant. An element has 1, 2, 4 or 8
 * bytes. A gap is the number of equal elements before one that differs; LONGEST stands for so many equal elements alone.
 */
enum { LONGEST = 255, BIAS = 128 };

static inline uint64_t load(const uint8_t *at, int width) {
    uint64_t element = 0;
    memcpy(&element, at, (size_t)width);
    return element;
}

/* Returns a word with a bit for each of the `BLOCK` elements, 1 if they differ. */
#define UNEQUAL(NAME, TYPE)                                                                                            \
    VECTORISED static inline uint64_t NAME(const uint8_t *new, const uint8_t *old) {                                   \
        TYPE unequal[BLOCK];                                                                                           \
        uint8_t differs[BLOCK];                                                                                        \
        uint64_t bits = 0;                                                                                             \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            TYPE ours, theirs;                                                                                         \
            memcpy(&ours, new + i * (int)sizeof ours, sizeof ours);                                                    \
            memcpy(&theirs, old + i * (int)sizeof theirs, sizeof theirs);                                              \
            unequal[i] = ours != theirs;                                                                               \
        }                                                                                                              \
        for (int i = 0; i < BLOCK; i++)                                                                                \
            differs[i] = (uint8_t)unequal[i];                                                                          \
        for (int i = 0; i < BLOCK; i += 8)                                                                             \
            bits |= load(differs + i, 8) * 0x0102040810204080 >> 56 << i;                                              \
        return bits;                                                                                                   \
    }
UNEQUAL(unequal1, uint8_t)
UNEQUAL(unequal2, uint16_t)
UNEQUAL(unequal4, uint32_t)
UNEQUAL(unequal8, uint64_t)

/* Writes the gaps and the differences, as long as there is room for them. Returns whether there was. */
#define FIND(NAME, WIDTH, UNEQUAL)                                                                                     \
    VECTORISED static int NAME(const uint8_t *restrict new, const uint8_t *restrict old, size_t count,                 \
                               uint8_t *restrict gaps, size_t *gap_count, uint8_t *restrict values, size_t *changed) { \
        size_t after = 0, used_gaps = 0, used = 0; /* `after` is behind the last element that differs */               \
        for (size_t block = 0; block < count; block += BLOCK) {                                                        \
            uint64_t bits = 0;                                                                                         \
            if (block + BLOCK <= count)                                                                                \
                bits = UNEQUAL(new + WIDTH * block, old + WIDTH * block);                                              \
            else                                                                                                       \
                for (size_t i = block; i < count; i++)                                                                 \
                    bits |= (uint64_t)(memcmp(new + WIDTH * i, old + WIDTH * i, WIDTH) != 0) << (i - block);           \
            for (; bits; bits &= bits - 1) {                                                                           \
                size_t i = block + (size_t)__builtin_ctzll(bits), gap = i - after;                                     \
                if (used == *changed || gap / LONGEST >= *gap_count - used_gaps)                                       \
                    return 0;                                                                                          \
                for (; gap >= LONGEST; gap -= LONGEST)                                                                 \
                    gaps[used_gaps++] = LONGEST;                                                                       \
                gaps[used_gaps++] = (uint8_t)gap;                                                                      \
                uint64_t difference = load(new + WIDTH * i, WIDTH) - load(old + WIDTH * i, WIDTH) + BIAS;              \
                difference = __builtin_bswap64(difference) >> (64 - 8 * WIDTH);                                        \
                memcpy(values + WIDTH * used++, &difference, WIDTH);                                                   \
                after = i + 1;                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        *gap_count = used_gaps;                                                                                        \
        *changed = used;                                                                                               \
        return 1;                                                                                                      \
    }
FIND(find1, 1, unequal1)
FIND(find2, 2, unequal2)
FIND(find4, 4, unequal4)
FIND(find8, 8, unequal8)

/* Adds a difference to each element that the gaps name. Returns whether they name exactly `changed` of the elements. */
#define ADD(NAME, WIDTH)                                                                                               \
    static int NAME(uint8_t *restrict out, size_t count, const uint8_t *restrict gaps, size_t gap_count,               \
                    const uint8_t *restrict values, size_t changed) {                                                  \
        size_t i = 0, used = 0;                                                                                        \
        for (size_t gap = 0; gap < gap_count; gap++) {                                                                 \
            i += gaps[gap];                                                                                            \
            if (gaps[gap] == LONGEST)                                                                                  \
                continue;                                                                                              \
            if (i >= count || used == changed)                                                                         \
                return 0;                                                                                              \
            uint64_t difference = __builtin_bswap64(load(values + WIDTH * used, WIDTH)) >> (64 - 8 * WIDTH);           \
            difference += load(out + WIDTH * i, WIDTH) - BIAS;                                                         \
            memcpy(out + WIDTH * i++, &difference, WIDTH);                                                             \
            used++;                                                                                                    \
        }                                                                                                              \
        return used == changed && (!gap_count || gaps[gap_count - 1] != LONGEST);                                      \
    }
ADD(add1, 1)
ADD(add2, 2)
ADD(add4, 4)
ADD(add8, 8)

PyDoc_STRVAR(find_changes_doc,
             "find_changes(new, old, width, gaps, values)\n\n"
             "Write gaps and differences. Returns how many of both; None if there is no room for them.");
static PyObject *find_changes(PyObject *module, PyObject *args) {
    PyObject *news, *olds, *gaps, *values;
    int width, fits;
    uint8_t *new, *old, *gap, *value;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOiOO", &news, &olds, &width, &gaps, &values) || (width != 1 && !is_width(width)))
        return NULL;
    if (!(new = memory_of(&buffers, news, PyBUF_SIMPLE, 0)) ||
        !(old = memory_of(&buffers, olds, PyBUF_SIMPLE, buffers.views[0].len)) ||
        !(gap = memory_of(&buffers, gaps, PyBUF_WRITABLE, 0)) ||
        !(value = memory_of(&buffers, values, PyBUF_WRITABLE, 0)))
        return end(&buffers, 0);
    size_t count = (size_t)(buffers.views[0].len / width), gap_count = (size_t)buffers.views[2].len;
    size_t changed = (size_t)(buffers.views[3].len / width);
    Py_BEGIN_ALLOW_THREADS
    fits = (width == 1   ? find1
            : width == 2 ? find2
            : width == 4 ? find4
                         : find8)(new, old, count, gap, &gap_count, value, &changed);
    Py_END_ALLOW_THREADS
    if (!fits)
        return end(&buffers, 1);
    release(&buffers);
    return Py_BuildValue("nn", (Py_ssize_t)gap_count, (Py_ssize_t)changed);
}

PyDoc_STRVAR(add_changes_doc, "add_changes(elements, width, gaps, values)\n\n"
                              "Add differences to elements. Returns whether the gaps name exactly as many elements.");
static PyObject *add_changes(PyObject *module, PyObject *args) {
    PyObject *elements, *gaps, *values;
    int width, fits;
    uint8_t *out, *gap, *value;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OiOO", &elements, &width, &gaps, &values) || (width != 1 && !is_width(width)))
        return NULL;
    if (!(out = memory_of(&buffers, elements, PyBUF_WRITABLE, 0)) ||
        !(gap = memory_of(&buffers, gaps, PyBUF_SIMPLE, 0)) || !(value = memory_of(&buffers, values, PyBUF_SIMPLE, 0)))
        return end(&buffers, 0);
    size_t count = (size_t)(buffers.views[0].len / width), gap_count = (size_t)buffers.views[1].len;
    size_t changed = (size_t)(buffers.views[2].len / width);
    Py_BEGIN_ALLOW_THREADS
    fits = (width == 1 ? add1 : width == 2 ? add2 : width == 4 ? add4 : add8)(out, count, gap, gap_count, value, changed);
    Py_END_ALLOW_THREADS
    release(&buffers);
    return PyBool_FromLong(fits);
}
