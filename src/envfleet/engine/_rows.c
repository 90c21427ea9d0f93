/* What every step does to every row and every worker, without the interpreter.

   Each function does the common case itself and leaves everything else to Python: what is unusual
   is decided there alone. plain_rows.py has the same functions in Python, for places without a
   compiler, except lock_step, which a fleet can do without. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int
is_array(PyArrayObject *array, int type, int ndim, npy_intp least)
{
    if (PyArray_TYPE(array) == type && PyArray_NDIM(array) == ndim && PyArray_ISCARRAY(array) &&
        PyArray_DIM(array, ndim - 1) >= least) {
        return 1;
    }
    PyErr_SetString(PyExc_TypeError, "an array has not the type, shape or order it must have");
    return 0;
}

/* ---- a worker: step environments ---------------------------------------------------------- */

static int
is_false(PyObject *flag)
{
    return flag == Py_False || flag == PyArrayScalar_False;
}

static int
have_equal_shapes(PyArrayObject *a, PyArrayObject *b)
{
    int ndim = PyArray_NDIM(a);
    return ndim == PyArray_NDIM(b) &&
           PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(b), ndim);
}

/* Write an observation into its row if it is an array that fits as it is; 0 if it is not. */
static int
put_obs(PyObject *obs, PyObject *row)
{
    if (!PyArray_CheckExact(obs) || !PyArray_CheckExact(row)) {
        return 0;
    }
    PyArrayObject *from = (PyArrayObject *)obs, *to = (PyArrayObject *)row;
    if (PyArray_TYPE(from) != PyArray_TYPE(to) || !PyArray_ISCARRAY_RO(from) ||
        !PyArray_ISCARRAY(to) || !have_equal_shapes(from, to) ||
        PyArray_NBYTES(from) != PyArray_NBYTES(to)) {
        return 0;
    }
    memcpy(PyArray_DATA(to), PyArray_DATA(from), (size_t)PyArray_NBYTES(to));
    return 1;
}

static int
is_empty(PyObject *info)
{
    return PyDict_CheckExact(info) && PyDict_GET_SIZE(info) == 0;
}

/* Put away what a step returned, if nothing about it is special; 0 leaves everything as it was. */
static int
put_step(PyObject *result, PyObject *row_of_obs, double *reward)
{
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5) {
        return 0;
    }
    PyObject *given = PyTuple_GET_ITEM(result, 1);
    if (!PyFloat_Check(given) || !is_false(PyTuple_GET_ITEM(result, 2)) ||
        !is_false(PyTuple_GET_ITEM(result, 3)) || !is_empty(PyTuple_GET_ITEM(result, 4)) ||
        !put_obs(PyTuple_GET_ITEM(result, 0), row_of_obs)) {
        return 0;
    }
    *reward = PyFloat_AS_DOUBLE(given);
    return 1;
}

/* The same for a reset. */
static int
put_reset(PyObject *result, PyObject *row_of_obs)
{
    return PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 2 &&
           is_empty(PyTuple_GET_ITEM(result, 1)) &&
           put_obs(PyTuple_GET_ITEM(result, 0), row_of_obs);
}

static PyObject *
raised(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
        Py_DECREF(traceback);
    }
    Py_DECREF(type);
    return value;
#endif
}

enum { RUNNING, ENDED }; /* host.py's states; all others are Python's */

/* What plain_rows.py calls a desk and a line; everything in them is borrowed. */
typedef struct {
    PyObject *states, *has_info, *ready, *invalid;
    PyArrayObject *starts, *post, *rewards;
    PyObject *take, *take_reset, *unusual, *fail; /* these are given with each call */
} Desk;

typedef struct {
    PyObject *row, *stepping, *step, *resetting, *reset, *obs;
    PyArrayObject *start;
} Line;

static int
read_desk(PyObject *tuple, Desk *desk)
{
    if (!PyArg_ParseTuple(tuple, "O!O!O!O!O!O!O!", &PyByteArray_Type, &desk->states,
                          &PyByteArray_Type, &desk->has_info, &PyByteArray_Type, &desk->ready,
                          &PyArray_Type, &desk->starts, &PyArray_Type, &desk->post, &PyArray_Type,
                          &desk->rewards, &PyList_Type, &desk->invalid)) {
        return -1;
    }
    Py_ssize_t rows = PyByteArray_GET_SIZE(desk->states);
    if (!is_array(desk->post, NPY_UINT64, 1, 2) || !is_array(desk->rewards, NPY_DOUBLE, 1, rows) ||
        !is_array(desk->starts, NPY_UINT8, 2, 0)) {
        return -1;
    }
    if (PyByteArray_GET_SIZE(desk->has_info) != rows || PyByteArray_GET_SIZE(desk->ready) != rows ||
        PyArray_DIM(desk->starts, 0) != rows) {
        PyErr_SetString(PyExc_ValueError, "everything by row must have an item for each row");
        return -1;
    }
    return 0;
}

static int
read_line(PyObject *tuple, const Desk *desk, Line *line, Py_ssize_t *row)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 7) {
        PyErr_SetString(PyExc_TypeError, "a line is a tuple of seven");
        return -1;
    }
    line->row = PyTuple_GET_ITEM(tuple, 0);
    line->stepping = PyTuple_GET_ITEM(tuple, 1);
    line->step = PyTuple_GET_ITEM(tuple, 2);
    line->resetting = PyTuple_GET_ITEM(tuple, 3);
    line->reset = PyTuple_GET_ITEM(tuple, 4);
    line->obs = PyTuple_GET_ITEM(tuple, 5);
    line->start = (PyArrayObject *)PyTuple_GET_ITEM(tuple, 6);
    *row = PyLong_AsSsize_t(line->row);
    if (*row == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (*row < 0 || *row >= PyByteArray_GET_SIZE(desk->states)) {
        PyErr_SetString(PyExc_IndexError, "there is no such row");
        return -1;
    }
    if (!PyArray_Check((PyObject *)line->start)) {
        PyErr_SetString(PyExc_TypeError, "the last of a line is an array");
        return -1;
    }
    return is_array(line->start, NPY_UINT8, 1, PyArray_DIM(desk->starts, 1)) ? 0 : -1;
}

static int
say_place(const Desk *desk, PyObject *word)
{
    unsigned long long place = PyLong_AsUnsignedLongLong(word);
    if (place == (unsigned long long)-1 && PyErr_Occurred()) {
        return -1;
    }
    ((volatile npy_uint64 *)PyArray_DATA(desk->post))[1] = place;
    return 0;
}

/* Let Python take what an environment returned (NULL: what it raised); -1 if that raises too. */
static int
leave_to_python(const Desk *desk, PyObject *row, PyObject *take, PyObject *result, const char *doing)
{
    PyObject *done = NULL;
    if (result != NULL) {
        done = PyObject_CallFunctionObjArgs(take, row, result, NULL);
        Py_DECREF(result);
    }
    if (done == NULL) {
        PyObject *exc = raised();
        done = PyObject_CallFunction(desk->fail, "OsO", row, doing, exc);
        Py_DECREF(exc);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int
step_running(const Desk *desk, const Line *line, Py_ssize_t row, PyObject *action)
{
    if (say_place(desk, line->stepping) < 0) {
        return -1;
    }
    PyObject *result = PyObject_CallOneArg(line->step, action);
    double *reward = (double *)PyArray_DATA(desk->rewards) + row;
    if (result != NULL && !PyByteArray_AS_STRING(desk->has_info)[row] &&
        put_step(result, line->obs, reward)) {
        Py_DECREF(result);
        return 0;
    }
    return leave_to_python(desk, line->row, desk->take, result, "step");
}

static int
reset_ended(const Desk *desk, const Line *line, Py_ssize_t row)
{
    npy_intp size = PyArray_DIM(desk->starts, 1);
    if (say_place(desk, line->resetting) < 0 || PyList_Append(desk->invalid, line->row) < 0) {
        return -1;
    }
    PyByteArray_AS_STRING(desk->ready)[row] = 0;
    ((double *)PyArray_DATA(desk->rewards))[row] = 0.0;
    memcpy(PyArray_DATA(line->start), PyArray_BYTES(desk->starts) + row * size, (size_t)size);
    PyObject *result = PyObject_CallNoArgs(line->reset);
    if (result != NULL && !PyByteArray_AS_STRING(desk->has_info)[row] &&
        put_reset(result, line->obs)) {
        Py_DECREF(result);
        PyByteArray_AS_STRING(desk->states)[row] = RUNNING;
        return 0;
    }
    return leave_to_python(desk, line->row, desk->take_reset, result, "reset");
}

static int
step_row(const Desk *desk, PyObject *tuple, PyObject *action)
{
    Line line;
    Py_ssize_t row;
    if (read_line(tuple, desk, &line, &row) < 0) {
        return -1;
    }
    char state = PyByteArray_AS_STRING(desk->states)[row];
    if (state == RUNNING) {
        return step_running(desk, &line, row, action);
    }
    if (state == ENDED && PyByteArray_AS_STRING(desk->ready)[row]) {
        return reset_ended(desk, &line, row);
    }
    if (say_place(desk, line.stepping) < 0) {
        return -1;
    }
    PyObject *done = PyObject_CallOneArg(desk->unusual, line.row);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
step_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *lines, *actions;
    Desk desk;
    if (!PyArg_ParseTuple(args, "O!O!O!OOOO", &PyTuple_Type, &tuple, &PyList_Type, &lines,
                          &PyList_Type, &actions, &desk.take, &desk.take_reset, &desk.unusual,
                          &desk.fail) ||
        read_desk(tuple, &desk) < 0) {
        return NULL;
    }
    if (PyList_GET_SIZE(actions) != PyList_GET_SIZE(lines)) {
        return PyErr_Format(PyExc_ValueError, "%zd actions for %zd rows",
                            PyList_GET_SIZE(actions), PyList_GET_SIZE(lines));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lines) && i < PyList_GET_SIZE(actions); i++) {
        /* held on to: what Python does in a row may change the lists */
        PyObject *line = Py_NewRef(PyList_GET_ITEM(lines, i));
        PyObject *action = Py_NewRef(PyList_GET_ITEM(actions, i));
        int status = step_row(&desk, line, action);
        Py_DECREF(action);
        Py_DECREF(line);
        if (status < 0 || PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* ---- the parent: results out of shared memory --------------------------------------------- */

static PyArrayObject *
copied(PyArrayObject *column, npy_intp first, npy_intp count)
{
    npy_intp dims[NPY_MAXDIMS];
    int ndim = PyArray_NDIM(column);
    memcpy(dims, PyArray_DIMS(column), sizeof(npy_intp) * (size_t)ndim);
    dims[0] = count;
    PyArray_Descr *descr = PyArray_DESCR(column);
    Py_INCREF(descr);
    PyObject *copy = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, dims, NULL, NULL, 0, NULL);
    if (copy != NULL) {
        npy_intp row = PyArray_STRIDE(column, 0);
        memcpy(PyArray_DATA((PyArrayObject *)copy), PyArray_BYTES(column) + first * row,
               (size_t)(count * row));
    }
    return (PyArrayObject *)copy;
}

static PyObject *
copy_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *rewards, *flags;
    PyObject *obs;
    Py_ssize_t first, end;
    if (!PyArg_ParseTuple(args, "OO!O!nn", &obs, &PyArray_Type, &rewards, &PyArray_Type, &flags,
                          &first, &end)) {
        return NULL;
    }
    if (!is_array(rewards, NPY_DOUBLE, 1, 0) || !is_array(flags, NPY_BOOL, 2, 0)) {
        return NULL;
    }
    npy_intp count = end - first, slots = PyArray_DIM(rewards, 0);
    if (PyArray_DIM(flags, 0) != 3 || PyArray_DIM(flags, 1) != slots ||
        (obs != Py_None && (!PyArray_CheckExact(obs) || PyArray_NDIM((PyArrayObject *)obs) < 1 ||
                            PyArray_DIM((PyArrayObject *)obs, 0) != slots ||
                            !PyArray_ISCARRAY((PyArrayObject *)obs)))) {
        PyErr_SetString(PyExc_TypeError, "all arrays must have a row for each slot, in order");
        return NULL;
    }
    if (first < 0 || count < 0 || end > slots) {
        return PyErr_Format(PyExc_IndexError, "rows %zd:%zd are not within 0:%zd", first, end,
                            (Py_ssize_t)slots);
    }
    npy_intp dims[1] = {count};
    PyObject *terminated = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *truncated = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *valid = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *earned = (PyObject *)copied(rewards, first, count);
    PyObject *seen = obs == Py_None ? Py_NewRef(obs)
                                    : (PyObject *)copied((PyArrayObject *)obs, first, count);
    if (terminated == NULL || truncated == NULL || valid == NULL || earned == NULL ||
        seen == NULL) {
        Py_XDECREF(terminated);
        Py_XDECREF(truncated);
        Py_XDECREF(valid);
        Py_XDECREF(earned);
        Py_XDECREF(seen);
        return NULL;
    }
    const npy_bool *ends = (npy_bool *)PyArray_DATA(flags) + first;
    const npy_bool *cuts = ends + slots, *invalid = cuts + slots;
    npy_bool *is_valid = PyArray_DATA((PyArrayObject *)valid), special = 0;
    memcpy(PyArray_DATA((PyArrayObject *)terminated), ends, (size_t)count);
    memcpy(PyArray_DATA((PyArrayObject *)truncated), cuts, (size_t)count);
    for (npy_intp i = 0; i < count; i++) {
        is_valid[i] = !invalid[i];
        special |= ends[i] | cuts[i] | invalid[i];
    }
    return Py_BuildValue("(NNNNNO)", seen, earned, terminated, truncated, valid,
                         special ? Py_True : Py_False);
}

static PyObject *
note_ends(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *terminated, *truncated, *valid, *ended, *starts;
    Py_ssize_t first;
    long long now;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!nL", &PyArray_Type, &terminated, &PyArray_Type,
                          &truncated, &PyArray_Type, &valid, &PyArray_Type, &ended, &PyArray_Type,
                          &starts, &first, &now)) {
        return NULL;
    }
    if (!is_array(terminated, NPY_BOOL, 1, 0) || !is_array(ended, NPY_BOOL, 1, 0)) {
        return NULL;
    }
    npy_intp count = PyArray_DIM(terminated, 0), slots = PyArray_DIM(ended, 0);
    if (!is_array(truncated, NPY_BOOL, 1, count) || !is_array(valid, NPY_BOOL, 1, count) ||
        !is_array(starts, NPY_INT64, 1, slots)) {
        return NULL;
    }
    if (first < 0 || first + count > slots) {
        return PyErr_Format(PyExc_IndexError, "rows %zd:%zd are not within 0:%zd", first,
                            (Py_ssize_t)(first + count), (Py_ssize_t)slots);
    }
    const npy_bool *ends = PyArray_DATA(terminated), *cuts = PyArray_DATA(truncated);
    const npy_bool *is_valid = PyArray_DATA(valid);
    npy_bool *has_ended = PyArray_DATA(ended);
    npy_int64 *start = PyArray_DATA(starts);
    for (npy_intp i = 0; i < count; i++) {
        has_ended[first + i] = ends[i] | cuts[i];
        if (!is_valid[i] && !has_ended[first + i]) {
            start[first + i] = now;
        }
    }
    return PyBool_FromLong(memchr(has_ended, 1, (size_t)slots) != NULL);
}

static PyObject *
common_number(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *numbers;
    Py_ssize_t first, end;
    if (!PyArg_ParseTuple(args, "O!nn", &PyArray_Type, &numbers, &first, &end)) {
        return NULL;
    }
    if (!is_array(numbers, NPY_UINT16, 1, end)) {
        return NULL;
    }
    if (first < 0 || first >= end) {
        PyErr_SetString(PyExc_IndexError, "there must be at least one row");
        return NULL;
    }
    const npy_uint16 *number = PyArray_DATA(numbers);
    for (npy_intp i = first + 1; i < end; i++) {
        if (number[i] != number[first]) {
            Py_RETURN_NONE;
        }
    }
    return PyLong_FromLong(number[first]);
}

/* ---- the parent: one step of all workers ---------------------------------------------------- */

enum { HAS_REPLY = 2 }; /* as in worker.py */

typedef struct {
    volatile npy_uint64 *entry; /* request, operation, flags */
    volatile npy_uint64 *hint;
    npy_uint64 posted;
    int commands, done;
    int is_done;
} Port;

static int
read_port(PyObject *tuple, Port *port)
{
    PyArrayObject *ring, *words;
    unsigned long long posted;
    if (!PyArg_ParseTuple(tuple, "O!O!iiK", &PyArray_Type, &ring, &PyArray_Type, &words,
                          &port->commands, &port->done, &posted)) {
        return -1;
    }
    if (!is_array(ring, NPY_UINT64, 1, 3) || !is_array(words, NPY_UINT64, 1, 1)) {
        return -1;
    }
    npy_uint64 size = (npy_uint64)PyArray_DIM(ring, 0) / 3;
    port->entry = (npy_uint64 *)PyArray_DATA(ring) + posted % size * 3;
    port->hint = PyArray_DATA(words);
    port->posted = posted;
    port->is_done = 0;
    return 0;
}

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int
take_bell(Port *port)
{
    npy_uint64 count;
    port->is_done |= read(port->done, &count, sizeof count) == (ssize_t)sizeof count;
    return port->is_done;
}

/* Wait until all are done; 1 if they are, 0 if there is other news or no time left, -1 for a signal. */
static int
wait_for_all(Port *ports, Py_ssize_t count, int urgent, double give_up_s)
{
    for (Py_ssize_t i = count - 1; i >= 0;) {
        if (take_bell(&ports[i])) {
            i--; /* the others were most likely done before the last one */
            continue;
        }
        double left_s = give_up_s - seconds_now();
        if (left_s <= 0) {
            return 0;
        }
        struct pollfd watched[2] = {{ports[i].done, POLLIN, 0}, {urgent, POLLIN, 0}};
        int found = poll(watched, 2, (int)(left_s * 1e3) + 1);
        if (found < 0 && errno == EINTR) {
            return -1;
        }
        if (found < 0 || watched[1].revents) {
            return 0;
        }
    }
    return 1;
}

static void
ring(Port *ports, Py_ssize_t count, npy_uint64 request, npy_uint64 operation)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        ports[i].entry[0] = request;
        ports[i].entry[1] = operation;
        ports[i].entry[2] = 0;
        *ports[i].hint = ports[i].posted + 1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        npy_uint64 one = 1;
        ssize_t written = write(ports[i].commands, &one, sizeof one);
        (void)written; /* this counter is never full, and the wait hears of a worker's end */
    }
}

static PyObject *
lock_step(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuples, *news;
    unsigned long long request, operation;
    int urgent, status;
    double limit_s;
    if (!PyArg_ParseTuple(args, "O!O!KKid", &PyList_Type, &tuples, &PyByteArray_Type, &news,
                          &request, &operation, &urgent, &limit_s)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(tuples);
    if (PyByteArray_GET_SIZE(news) != count) {
        PyErr_SetString(PyExc_ValueError, "news must have a byte for each worker");
        return NULL;
    }
    Port *ports = PyMem_Malloc(sizeof(Port) * (size_t)count);
    if (ports == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_port(PyList_GET_ITEM(tuples, i), &ports[i]) < 0) {
            PyMem_Free(ports);
            return NULL;
        }
    }
    double give_up_s = seconds_now() + limit_s;
    ring(ports, count, request, operation);
    do {
        Py_BEGIN_ALLOW_THREADS
        status = wait_for_all(ports, count, urgent, give_up_s);
        Py_END_ALLOW_THREADS
    } while (status < 0 && PyErr_CheckSignals() == 0);
    for (Py_ssize_t i = 0; i < count; i++) {
        int has_reply = (ports[i].entry[2] & HAS_REPLY) != 0;
        PyByteArray_AS_STRING(news)[i] = (char)(ports[i].is_done ? 1 + has_reply : 0);
    }
    PyMem_Free(ports);
    if (status < 0) {
        return NULL; /* what a signal's handler raised */
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"step_rows", step_rows, METH_VARARGS, NULL},
    {"copy_rows", copy_rows, METH_VARARGS, NULL},
    {"note_ends", note_ends, METH_VARARGS, NULL},
    {"common_number", common_number, METH_VARARGS, NULL},
    {"lock_step", lock_step, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit__rows(void)
{
    import_array();
    return PyModule_Create(&module);
}
