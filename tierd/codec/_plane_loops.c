/* The inner loops of the codecs `planes` and `delta`: split elements into planes, pack pairs of codes, join planes
 * again, and find and add the differences of elements.
 *
 * Invariant: every size is checked against the buffers before a byte is touched, and the results are the bytes that
 * NumPy's code in byte_planes.py makes. The loops are plain C, written so that a compiler vectorises them; AVX2 or NEON
 * is chosen when the module is loaded. Without either, `vectorised` is false and nothing here is used, because scalar
 * code is slower than NumPy. The interpreter's lock is released while a block is worked on.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define VECTORISED __attribute__((target("avx2")))
#define CAN_VECTORISE __builtin_cpu_supports("avx2")
#elif defined(__aarch64__)
#define VECTORISED
#define CAN_VECTORISE 1
#else
#define VECTORISED
#define CAN_VECTORISE 0
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian"
#endif

static inline uint16_t load16(const uint8_t *at) { uint16_t word; memcpy(&word, at, 2); return word; }
static inline void store16(uint8_t *at, uint16_t word) { memcpy(at, &word, 2); }

#define BLOCK 64 /* elements that are worked on at a time where a loop needs memory of its own */

/* -- splitting -- */

#define SPLIT(NAME, WIDTH)                                                                                             \
    VECTORISED static void NAME(const uint8_t *restrict in, size_t count, int folded, uint8_t *restrict low,           \
                                uint8_t *restrict high) {                                                              \
        if (folded)                                                                                                    \
            for (size_t i = 0; i < count; i++) {                                                                       \
                uint16_t word = load16(in + WIDTH * i + WIDTH - 2);                                                    \
                word = (uint16_t)(word << 1 | word >> 15);                                                             \
                low[i] = (uint8_t)word;                                                                                \
                high[i] = (uint8_t)(word >> 8);                                                                        \
            }                                                                                                          \
        else                                                                                                           \
            for (size_t i = 0; i < count; i++) {                                                                       \
                uint16_t word = load16(in + WIDTH * i + WIDTH - 2);                                                    \
                low[i] = (uint8_t)word;                                                                                \
                high[i] = (uint8_t)(word >> 8);                                                                        \
            }                                                                                                          \
    }
SPLIT(split2, 2)
SPLIT(split4, 4)
SPLIT(split8, 8)

#define TAKE(NAME, WIDTH)                                                                                              \
    VECTORISED static void NAME(const uint8_t *restrict in, size_t count, size_t index, uint8_t *restrict out) {       \
        for (size_t i = 0; i < count; i++)                                                                             \
            store16(out + 2 * i, load16(in + WIDTH * i + 2 * index));                                                  \
    }
TAKE(take4, 4)
TAKE(take8, 8)

/* -- pairs -- */

/* Returns a word whose byte i is 0x80 if byte i of `codes` is 15, which is no code, and else 0. */
static inline uint64_t escapes_in(const uint8_t *codes) {
    const uint64_t low = 0x7F7F7F7F7F7F7F7F;
    uint64_t word;
    memcpy(&word, codes, 8);
    word ^= 0x0F0F0F0F0F0F0F0F;
    return ~(((word & low) + low) | word | low);
}

/* Packs the codes of `size` bytes two a byte, and copies the bytes that have no code to `escapes`, until there are
 * `most`. Returns their number, or more than `most`. */
VECTORISED static size_t pack_pairs(const uint8_t *restrict plane, size_t size, uint8_t base, uint8_t *restrict halves,
                                    uint8_t *restrict escapes, size_t most) {
    size_t used = 0, at = 0;
    for (; at + BLOCK <= size; at += BLOCK) {
        uint8_t codes[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            uint8_t code = (uint8_t)(plane[at + i] - base);
            codes[i] = code > 15 ? 15 : code;
        }
        for (int i = 0; i < BLOCK / 2; i++) {
            uint16_t pair = load16(codes + 2 * i);
            halves[at / 2 + i] = (uint8_t)(pair | pair >> 4);
        }
        for (int i = 0; i < BLOCK; i += 8)
            for (uint64_t found = escapes_in(codes + i); found; found &= found - 1) {
                if (used == most)
                    return most + 1;
                escapes[used++] = plane[at + i + __builtin_ctzll(found) / 8];
            }
    }
    for (; at < size; at++) {
        uint8_t code = (uint8_t)(plane[at] - base);
        if (code > 14) {
            if (used == most)
                return most + 1;
            escapes[used++] = plane[at];
            code = 15;
        }
        halves[at / 2] = at % 2 ? (uint8_t)(halves[at / 2] | code << 4) : code;
    }
    return used;
}

/* Unpacks `size` bytes, those without a code from `escapes`. Returns whether exactly `number` of them were needed. */
VECTORISED static int unpack_pairs(const uint8_t *restrict halves, size_t size, uint8_t base,
                                   const uint8_t *restrict escapes, size_t number, uint8_t *restrict plane) {
    size_t used = 0, at = 0;
    for (; at + BLOCK <= size; at += BLOCK) {
        uint8_t codes[BLOCK];
        for (int i = 0; i < BLOCK / 2; i++) {
            uint16_t pair = halves[at / 2 + i];
            store16(codes + 2 * i, (uint16_t)((pair | pair << 4) & 0x0F0F));
        }
        for (int i = 0; i < BLOCK; i++)
            plane[at + i] = (uint8_t)(codes[i] + base);
        for (int i = 0; i < BLOCK; i += 8)
            for (uint64_t found = escapes_in(codes + i); found; found &= found - 1) {
                if (used == number)
                    return 0;
                plane[at + i + __builtin_ctzll(found) / 8] = escapes[used++];
            }
    }
    for (; at < size; at++) {
        uint8_t code = at % 2 ? halves[at / 2] >> 4 : halves[at / 2] & 15;
        if (code < 15)
            plane[at] = (uint8_t)(code + base);
        else if (used < number)
            plane[at] = escapes[used++];
        else
            return 0;
    }
    return used == number;
}

/* -- joining -- */

static inline uint16_t top_word(uint8_t low, uint8_t high, int folded) {
    uint16_t word = (uint16_t)(low | high << 8);
    return folded ? (uint16_t)(word >> 1 | word << 15) : word;
}

#define JOIN_LOOP(WIDTH, FOLDED, BELOW)                                                                                \
    for (size_t i = 0; i < count; i++) {                                                                               \
        BELOW;                                                                                                         \
        store16(out + WIDTH * i + WIDTH - 2, top_word(low[i], high[i], FOLDED));                                       \
    }

VECTORISED static void join2(uint8_t *restrict out, size_t count, const uint8_t *restrict low,
                             const uint8_t *restrict high, int folded) {
    if (folded)
        JOIN_LOOP(2, 1, )
    else
        JOIN_LOOP(2, 0, )
}

VECTORISED static void join4(uint8_t *restrict out, size_t count, const uint8_t *restrict below,
                             const uint8_t *restrict low, const uint8_t *restrict high, int folded) {
    if (folded)
        for (size_t i = 0; i < count; i++) {
            uint32_t element = (uint32_t)load16(below + 2 * i) | (uint32_t)top_word(low[i], high[i], 1) << 16;
            memcpy(out + 4 * i, &element, 4);
        }
    else
        for (size_t i = 0; i < count; i++) {
            uint32_t element = (uint32_t)load16(below + 2 * i) | (uint32_t)top_word(low[i], high[i], 0) << 16;
            memcpy(out + 4 * i, &element, 4);
        }
}

VECTORISED static void join8(uint8_t *restrict out, size_t count, const uint8_t *const below[3],
                             const uint8_t *restrict low, const uint8_t *restrict high, int folded) {
    JOIN_LOOP(8, folded, {
        store16(out + 8 * i, load16(below[0] + 2 * i));
        store16(out + 8 * i + 2, load16(below[1] + 2 * i));
        store16(out + 8 * i + 4, load16(below[2] + 2 * i));
    })
}

/* -- Python -- */

enum { WIDEST = 8, MOST_BUFFERS = 6 };

typedef struct {
    Py_buffer views[MOST_BUFFERS];
    int count;
} Buffers;

static void release(Buffers *buffers) {
    while (buffers->count)
        PyBuffer_Release(&buffers->views[--buffers->count]);
}

/* Returns the memory of `object`, which has at least `size` bytes; NULL with an error set otherwise. */
static uint8_t *memory_of(Buffers *buffers, PyObject *object, int flags, Py_ssize_t size) {
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return NULL;
    buffers->count++;
    if (view->len < size) {
        PyErr_Format(PyExc_ValueError, "a buffer has %zd bytes, and %zd are needed", view->len, size);
        return NULL;
    }
    return view->buf;
}

static int is_width(int width) {
    if (width == 2 || width == 4 || width == WIDEST)
        return 1;
    PyErr_Format(PyExc_ValueError, "elements of %d bytes", width);
    return 0;
}

static PyObject *end(Buffers *buffers, int ok) {
    release(buffers);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(split_top_doc, "split_top(elements, width, folded, low, high)\n\n"
                            "Write the low and the high bytes of the elements' top words.");
static PyObject *split_top(PyObject *module, PyObject *args) {
    PyObject *elements, *lows, *highs;
    int width, folded;
    uint8_t *in, *low, *high;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OipOO", &elements, &width, &folded, &lows, &highs) || !is_width(width))
        return NULL;
    if (!(in = memory_of(&buffers, elements, PyBUF_SIMPLE, 0)))
        return end(&buffers, 0);
    Py_ssize_t count = buffers.views[0].len / width;
    if (!(low = memory_of(&buffers, lows, PyBUF_WRITABLE, count)) ||
        !(high = memory_of(&buffers, highs, PyBUF_WRITABLE, count)))
        return end(&buffers, 0);
    Py_BEGIN_ALLOW_THREADS
    (width == 2 ? split2 : width == 4 ? split4 : split8)(in, (size_t)count, folded, low, high);
    Py_END_ALLOW_THREADS
    return end(&buffers, 1);
}

PyDoc_STRVAR(take_words_doc, "take_words(elements, width, index, out)\n\n"
                             "Write the words with this index, 0 for the lowest, of elements of 4 or 8 bytes.");
static PyObject *take_words(PyObject *module, PyObject *args) {
    PyObject *elements, *words;
    int width, index;
    uint8_t *in, *out;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OiiO", &elements, &width, &index, &words) || !is_width(width))
        return NULL;
    if (width == 2 || index < 0 || index >= width / 2) {
        PyErr_Format(PyExc_ValueError, "word %d of elements of %d bytes", index, width);
        return NULL;
    }
    if (!(in = memory_of(&buffers, elements, PyBUF_SIMPLE, 0)))
        return end(&buffers, 0);
    Py_ssize_t count = buffers.views[0].len / width;
    if (!(out = memory_of(&buffers, words, PyBUF_WRITABLE, 2 * count)))
        return end(&buffers, 0);
    Py_BEGIN_ALLOW_THREADS
    (width == 4 ? take4 : take8)(in, (size_t)count, (size_t)index, out);
    Py_END_ALLOW_THREADS
    return end(&buffers, 1);
}

PyDoc_STRVAR(pack_pairs_doc,
             "pack_pairs(plane, base, halves, escapes)\n\n"
             "Write two codes a byte, and the bytes without a code. Returns the number of the latter; -1 if `escapes` has no\n"
             "room for them.");
static PyObject *pack_pairs_of(PyObject *module, PyObject *args) {
    PyObject *planes, *packed, *others;
    unsigned char base;
    uint8_t *plane, *halves, *escapes;
    size_t number;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "ObOO", &planes, &base, &packed, &others))
        return NULL;
    if (!(plane = memory_of(&buffers, planes, PyBUF_SIMPLE, 0)))
        return end(&buffers, 0);
    Py_ssize_t size = buffers.views[0].len;
    if (!(halves = memory_of(&buffers, packed, PyBUF_WRITABLE, size / 2 + size % 2)) ||
        !(escapes = memory_of(&buffers, others, PyBUF_WRITABLE, 0)))
        return end(&buffers, 0);
    size_t most = (size_t)buffers.views[2].len;
    Py_BEGIN_ALLOW_THREADS
    number = pack_pairs(plane, (size_t)size, base, halves, escapes, most);
    Py_END_ALLOW_THREADS
    release(&buffers);
    return PyLong_FromSsize_t(number > most ? -1 : (Py_ssize_t)number);
}

PyDoc_STRVAR(unpack_pairs_doc, "unpack_pairs(halves, base, escapes, plane)\n\n"
                               "Fill `plane`. Returns whether exactly `escapes` were needed.");
static PyObject *unpack_pairs_of(PyObject *module, PyObject *args) {
    PyObject *packed, *others, *planes;
    unsigned char base;
    uint8_t *halves, *escapes, *plane;
    int fits;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "ObOO", &packed, &base, &others, &planes))
        return NULL;
    if (!(plane = memory_of(&buffers, planes, PyBUF_WRITABLE, 0)))
        return end(&buffers, 0);
    Py_ssize_t size = buffers.views[0].len;
    if (!(halves = memory_of(&buffers, packed, PyBUF_SIMPLE, size / 2 + size % 2)) ||
        !(escapes = memory_of(&buffers, others, PyBUF_SIMPLE, 0)))
        return end(&buffers, 0);
    size_t number = (size_t)buffers.views[2].len;
    Py_BEGIN_ALLOW_THREADS
    fits = unpack_pairs(halves, (size_t)size, base, escapes, number, plane);
    Py_END_ALLOW_THREADS
    release(&buffers);
    return PyBool_FromLong(fits);
}

PyDoc_STRVAR(join_doc, "join(elements, width, folded, low, high, *below)\n\n"
                       "Fill elements from the planes of their top words, and from the words below, lowest first.");
static PyObject *join(PyObject *module, PyObject *args) {
    PyObject *elements, *lows, *highs, *belows[WIDEST / 2 - 1] = {NULL};
    int width, folded;
    uint8_t *out, *low, *high;
    const uint8_t *below[WIDEST / 2 - 1];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OipOO|OOO", &elements, &width, &folded, &lows, &highs, &belows[0], &belows[1],
                          &belows[2]) ||
        !is_width(width))
        return NULL;
    if (PyTuple_Size(args) != 5 + width / 2 - 1) {
        PyErr_Format(PyExc_ValueError, "elements of %d bytes have %d words below", width, width / 2 - 1);
        return NULL;
    }
    if (!(out = memory_of(&buffers, elements, PyBUF_WRITABLE, 0)))
        return end(&buffers, 0);
    Py_ssize_t count = buffers.views[0].len / width;
    if (!(low = memory_of(&buffers, lows, PyBUF_SIMPLE, count)) || !(high = memory_of(&buffers, highs, PyBUF_SIMPLE, count)))
        return end(&buffers, 0);
    for (int i = 0; i < width / 2 - 1; i++)
        if (!(below[i] = memory_of(&buffers, belows[i], PyBUF_SIMPLE, 2 * count)))
            return end(&buffers, 0);
    Py_BEGIN_ALLOW_THREADS
    if (width == 2)
        join2(out, (size_t)count, low, high, folded);
    else if (width == 4)
        join4(out, (size_t)count, below[0], low, high, folded);
    else
        join8(out, (size_t)count, below, low, high, folded);
    Py_END_ALLOW_THREADS
    return end(&buffers, 1);
}

#include "_delta_loops.h"

static PyMethodDef methods[] = {
    {"split_top", split_top, METH_VARARGS, split_top_doc},
    {"take_words", take_words, METH_VARARGS, take_words_doc},
    {"pack_pairs", pack_pairs_of, METH_VARARGS, pack_pairs_doc},
    {"unpack_pairs", unpack_pairs_of, METH_VARARGS, unpack_pairs_doc},
    {"find_changes", find_changes, METH_VARARGS, find_changes_doc},
    {"add_changes", add_changes, METH_VARARGS, add_changes_doc},
    {"join", join, METH_VARARGS, join_doc},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    return PyModule_AddObjectRef(module, "vectorised", CAN_VECTORISE ? Py_True : Py_False);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_plane_loops",
    .m_doc = "The inner loops of the codec `planes`; `vectorised` says whether they are to be used.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__plane_loops(void) { return PyModuleDef_Init(&definition); }
