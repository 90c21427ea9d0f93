/* What every step does to every row and every worker, without the interpreter.

   Each function does the common case by itself and leaves every other case to Python.
   rows_python.py has the same functions in Python, for machines without a compiler, and says what
   they do; only keep_pcg64 is missing there. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <numpy/random/bitgen.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define LOW_HALF (NPY_BYTE_ORDER == NPY_BIG_ENDIAN ? 4 : 0) /* of a word of 64 bits */

static int
is_array(PyArrayObject *array, int type, int ndim, npy_intp least)
{
    if (PyArray_TYPE(array) == type && PyArray_NDIM(array) == ndim && PyArray_ISCARRAY(array) &&
        PyArray_DIM(array, ndim - 1) >= least) {
        return 1;
    }
    PyErr_SetString(PyExc_TypeError, "an array has the wrong type, shape or order");
    return 0;
}

/* ---- a worker: step environments ---------------------------------------------------------- */

/* 0 for False, 1 for True, -1 for any other object. */
static int
as_flag(PyObject *flag)
{
    int is_true = flag == Py_True || flag == PyArrayScalar_True;
    return is_true || flag == Py_False || flag == PyArrayScalar_False ? is_true : -1;
}

static int
have_equal_shapes(PyArrayObject *a, PyArrayObject *b)
{
    int ndim = PyArray_NDIM(a);
    return ndim == PyArray_NDIM(b) &&
           PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(b), ndim);
}

/* Whether records have the same fields. The last pair is remembered: the comparison of their
   types takes longer than to copy a record. */
static int
are_alike(PyArray_Descr *a, PyArray_Descr *b)
{
    static PyArray_Descr *last_a = NULL, *last_b = NULL;
    if (a == b || (a == last_a && b == last_b)) {
        return 1;
    }
    if (!PyArray_EquivTypes(a, b)) {
        return 0;
    }
    Py_INCREF(a);
    Py_INCREF(b);
    Py_XSETREF(last_a, a);
    Py_XSETREF(last_b, b);
    return 1;
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
        (PyArray_TYPE(to) == NPY_VOID && !are_alike(PyArray_DESCR(from), PyArray_DESCR(to))) ||
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

/* The bytes of a number by its code in a struct's format; 0 of a code that is not a number's. */
static size_t
nbytes_of(char code)
{
    switch (code) {
    case 'd': case 'q': case 'Q': return 8;
    case 'f': case 'i': case 'I': return 4;
    case 'h': case 'H': case 'e': return 2;
    case 'b': case 'B': case '?': return 1;
    default: return 0;
    }
}

/* Write a number as its code says; 0 if it is none, or none that fits. */
static int
put_number(PyObject *value, char code, char *target)
{
    if (code == 'd' && PyFloat_Check(value)) { /* numpy's too */
        double number = PyFloat_AS_DOUBLE(value);
        memcpy(target, &number, sizeof number);
        return 1;
    }
    if (code == 'f' && PyArray_IsScalar(value, Float)) {
        npy_float number = PyArrayScalar_VAL(value, Float);
        memcpy(target, &number, sizeof number);
        return 1;
    }
    if (code == '?' && PyBool_Check(value)) {
        *target = value == Py_True;
        return 1;
    }
    if (code == 'q' && PyLong_CheckExact(value)) {
        int is_beyond;
        npy_int64 number = PyLong_AsLongLongAndOverflow(value, &is_beyond);
        memcpy(target, &number, sizeof number);
        return !is_beyond;
    }
    if (!PyArray_IsScalar(value, Number) && !PyArray_IsScalar(value, Bool)) {
        return 0;
    }
    PyArray_Descr *type = PyArray_DescrFromScalar(value);
    int fits = type != NULL && (size_t)PyDataType_ELSIZE(type) == nbytes_of(code);
    Py_XDECREF(type);
    if (fits) {
        PyArray_ScalarAsCtype(value, target);
    }
    return fits;
}

/* Write an info into its cell if it has these keys and types, all of them numbers; 0 if not. */
static int
put_numbers(PyObject *info, PyObject *keys, PyObject *types, PyObject *codes, char *cell,
            size_t size)
{
    if (!PyDict_CheckExact(info) || PyDict_GET_SIZE(info) != PyTuple_GET_SIZE(keys)) {
        return 0;
    }
    Py_ssize_t at = 0, count = 0;
    size_t used = 0;
    PyObject *key, *value;
    while (PyDict_Next(info, &at, &key, &value)) {
        char code = PyBytes_AS_STRING(codes)[count];
        size_t more = nbytes_of(code);
        if (key != PyTuple_GET_ITEM(keys, count) ||
            (PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(types, count) || more == 0 ||
            used + more > size || !put_number(value, code, cell + used)) {
            return 0;
        }
        used += more;
        count++;
    }
    return 1;
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

enum { RUNNING, ENDED };                   /* SlotState in host.py; the others are left to Python */
enum { NEXT_STEP, SAME_STEP, DISABLED };  /* Autoreset in rows_python.py */

/* A place for one info of each row: its bytes, and the number of its schema. */
typedef struct {
    PyArrayObject *cells, *schemas;
} InfoCells;

/* HostState and EnvRow of rows_python.py; all references are borrowed. */
typedef struct {
    int autoreset;
    PyObject *states, *has_info, *ready, *has_plan, *invalid, *ends, *form;
    PyArrayObject *starts, *status, *rewards;
    InfoCells infos, final_infos;
    PyObject *take, *take_reset, *unusual, *fail, *keep_start; /* given with each call */
} HostState;

typedef struct {
    PyObject *row, *stepping, *resetting, *env, *obs, *final_obs;
    PyArrayObject *start;
} EnvRow;

static int
are_info_cells(const InfoCells *infos, Py_ssize_t rows)
{
    return is_array(infos->cells, NPY_UINT8, 2, 0) && is_array(infos->schemas, NPY_UINT16, 1, rows);
}

static int
read_host_state(PyObject *tuple, HostState *host)
{
    if (!PyArg_ParseTuple(tuple, "iO!O!O!O!O!O!O!O!O!O!O!O!O!O!", &host->autoreset, &PyByteArray_Type,
                          &host->states, &PyByteArray_Type, &host->has_info, &PyByteArray_Type,
                          &host->ready, &PyByteArray_Type, &host->has_plan, &PyArray_Type,
                          &host->starts, &PyArray_Type, &host->status, &PyArray_Type,
                          &host->rewards, &PyList_Type, &host->invalid, &PyList_Type, &host->ends,
                          &PyList_Type, &host->form, &PyArray_Type, &host->infos.cells,
                          &PyArray_Type, &host->infos.schemas, &PyArray_Type,
                          &host->final_infos.cells, &PyArray_Type, &host->final_infos.schemas)) {
        return -1;
    }
    Py_ssize_t rows = PyByteArray_GET_SIZE(host->states);
    if (!is_array(host->status, NPY_UINT64, 1, 2) || !is_array(host->rewards, NPY_DOUBLE, 1, rows) ||
        !is_array(host->starts, NPY_UINT8, 2, 0) || !are_info_cells(&host->infos, rows) ||
        !are_info_cells(&host->final_infos, rows)) {
        return -1;
    }
    if (PyByteArray_GET_SIZE(host->has_info) != rows || PyByteArray_GET_SIZE(host->ready) != rows ||
        PyByteArray_GET_SIZE(host->has_plan) != rows || PyArray_DIM(host->starts, 0) != rows ||
        PyArray_DIM(host->infos.cells, 0) != rows ||
        PyArray_DIM(host->final_infos.cells, 0) != rows) {
        PyErr_SetString(PyExc_ValueError, "everything by row must have an item for each row");
        return -1;
    }
    return 0;
}

static int
read_env_row(PyObject *tuple, const HostState *host, EnvRow *env_row, Py_ssize_t *row)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 7) {
        PyErr_SetString(PyExc_TypeError, "an env_row is a tuple of seven");
        return -1;
    }
    env_row->row = PyTuple_GET_ITEM(tuple, 0);
    env_row->stepping = PyTuple_GET_ITEM(tuple, 1);
    env_row->resetting = PyTuple_GET_ITEM(tuple, 2);
    env_row->env = PyTuple_GET_ITEM(tuple, 3);
    env_row->obs = PyTuple_GET_ITEM(tuple, 4);
    env_row->final_obs = PyTuple_GET_ITEM(tuple, 5);
    env_row->start = (PyArrayObject *)PyTuple_GET_ITEM(tuple, 6);
    *row = PyLong_AsSsize_t(env_row->row);
    if (*row == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (*row < 0 || *row >= PyByteArray_GET_SIZE(host->states)) {
        PyErr_SetString(PyExc_IndexError, "there is no such row");
        return -1;
    }
    if (!PyArray_Check((PyObject *)env_row->start)) {
        PyErr_SetString(PyExc_TypeError, "the last of an env_row is an array");
        return -1;
    }
    return is_array(env_row->start, NPY_UINT8, 1, PyArray_DIM(host->starts, 1)) ? 0 : -1;
}

static int
write_status(const HostState *host, PyObject *word)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(word);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) {
        return -1;
    }
    ((volatile npy_uint64 *)PyArray_DATA(host->status))[1] = number;
    return 0;
}

/* Let Python store what an environment returned (NULL: it raised); -1 if that raises, too. */
static int
leave_to_python(const HostState *host, PyObject *row, PyObject *take, PyObject *result, const char *doing)
{
    PyObject *done = NULL;
    if (result != NULL) {
        done = PyObject_CallFunctionObjArgs(take, row, result, NULL);
        Py_DECREF(result);
    }
    if (done == NULL) {
        PyObject *exc = raised();
        done = PyObject_CallFunction(host->fail, "OsO", row, doing, exc);
        Py_DECREF(exc);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *step_name, *reset_name; /* made with the module */

/* Write an info if it is empty or like the last one that was all numbers; 0 leaves it to Python. */
static int
write_info(const HostState *host, const InfoCells *infos, Py_ssize_t row, PyObject *info)
{
    npy_uint16 *schema = (npy_uint16 *)PyArray_DATA(infos->schemas) + row;
    if (is_empty(info)) {
        *schema = 0;
        return 1;
    }
    PyObject *form = PyList_GET_SIZE(host->form) == 1 ? PyList_GET_ITEM(host->form, 0) : Py_None;
    if (!PyTuple_CheckExact(form) || PyTuple_GET_SIZE(form) != 4) {
        return 0;
    }
    PyObject *keys = PyTuple_GET_ITEM(form, 0), *types = PyTuple_GET_ITEM(form, 1);
    PyObject *codes = PyTuple_GET_ITEM(form, 2);
    long number = PyLong_AsLong(PyTuple_GET_ITEM(form, 3));
    npy_intp size = PyArray_DIM(infos->cells, 1);
    char *cell = PyArray_BYTES(infos->cells) + row * size;
    if (!PyTuple_CheckExact(keys) || !PyTuple_CheckExact(types) || !PyBytes_CheckExact(codes) ||
        number < 1 || PyTuple_GET_SIZE(types) != PyTuple_GET_SIZE(keys) ||
        PyBytes_GET_SIZE(codes) != PyTuple_GET_SIZE(keys) ||
        !put_numbers(info, keys, types, codes, cell, (size_t)size)) {
        PyErr_Clear(); /* from a value that is not a number */
        return 0;
    }
    *schema = (npy_uint16)number;
    return 1;
}

/* Replace the info of a row; 0 leaves it to Python. */
static int
put_info(const HostState *host, Py_ssize_t row, PyObject *info)
{
    char *has_info = PyByteArray_AS_STRING(host->has_info) + row;
    if (is_empty(info) && !*has_info) {
        return 1;
    }
    if (!write_info(host, &host->infos, row, info)) {
        return 0;
    }
    *has_info = !is_empty(info);
    return 1;
}

/* Store what a reset returned, or let Python do it; takes `result`. */
static int
take_reset(const HostState *host, const EnvRow *env_row, Py_ssize_t row, PyObject *result)
{
    if (result != NULL && PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 2 &&
        put_info(host, row, PyTuple_GET_ITEM(result, 1)) &&
        put_obs(PyTuple_GET_ITEM(result, 0), env_row->obs)) {
        Py_DECREF(result);
        PyByteArray_AS_STRING(host->states)[row] = RUNNING;
        return 0;
    }
    return leave_to_python(host, env_row->row, host->take_reset, result, "reset");
}

/* same_step: keep the generator's state and reset an environment whose episode has just ended. */
static int
reset_at_once(const HostState *host, const EnvRow *env_row, Py_ssize_t row)
{
    if (write_status(host, env_row->resetting) < 0) {
        return -1;
    }
    PyObject *kept = PyObject_CallOneArg(host->keep_start, env_row->row), *result = NULL;
    if (kept != NULL) {
        Py_DECREF(kept);
        result = PyObject_CallMethodNoArgs(env_row->env, reset_name);
    }
    return take_reset(host, env_row, row, result);
}

/* Store what a step returned: 1 if it is stored, 0 if all of it is left to Python, -1 on an error.
   With same_step an environment whose episode has ended is reset, too. */
static int
put_step(const HostState *host, const EnvRow *env_row, Py_ssize_t row, PyObject *result)
{
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5) {
        return 0;
    }
    PyObject *obs = PyTuple_GET_ITEM(result, 0), *reward = PyTuple_GET_ITEM(result, 1);
    PyObject *info = PyTuple_GET_ITEM(result, 4);
    int is_terminated = as_flag(PyTuple_GET_ITEM(result, 2));
    int is_truncated = as_flag(PyTuple_GET_ITEM(result, 3));
    int is_end = is_terminated > 0 || is_truncated > 0;
    int is_final = is_end && host->autoreset == SAME_STEP;
    if (!PyFloat_Check(reward) || is_terminated < 0 || is_truncated < 0) {
        return 0;
    }
    if (is_final ? PyByteArray_AS_STRING(host->has_plan)[row] ||
                       !write_info(host, &host->final_infos, row, info) ||
                       !put_obs(obs, env_row->final_obs)
                 : !put_info(host, row, info)) {
        return 0;
    }
    if (!put_obs(obs, env_row->obs)) { /* also of an end: if its reset fails, this is the last */
        return 0;
    }
    ((double *)PyArray_DATA(host->rewards))[row] = PyFloat_AS_DOUBLE(reward);
    if (is_end) {
        PyObject *end = PyTuple_Pack(3, env_row->row, is_terminated ? Py_True : Py_False,
                                     is_truncated ? Py_True : Py_False);
        if (end == NULL || PyList_Append(host->ends, end) < 0) {
            Py_XDECREF(end);
            return -1;
        }
        Py_DECREF(end);
        if (host->autoreset == NEXT_STEP) {
            PyByteArray_AS_STRING(host->states)[row] = ENDED;
        }
    }
    return is_final && reset_at_once(host, env_row, row) < 0 ? -1 : 1;
}

static int
step_running(const HostState *host, const EnvRow *env_row, Py_ssize_t row, PyObject *action)
{
    if (write_status(host, env_row->stepping) < 0) {
        return -1;
    }
    /* looked up each time: an environment may give itself another `step` */
    PyObject *result = PyObject_CallMethodOneArg(env_row->env, step_name, action);
    int is_put = result == NULL ? 0 : put_step(host, env_row, row, result);
    if (is_put) {
        Py_DECREF(result);
        return is_put < 0 ? -1 : 0;
    }
    return leave_to_python(host, env_row->row, host->take, result, "step");
}

static int
reset_ended(const HostState *host, const EnvRow *env_row, Py_ssize_t row)
{
    npy_intp size = PyArray_DIM(host->starts, 1);
    if (write_status(host, env_row->resetting) < 0 || PyList_Append(host->invalid, env_row->row) < 0) {
        return -1;
    }
    PyByteArray_AS_STRING(host->ready)[row] = 0;
    ((double *)PyArray_DATA(host->rewards))[row] = 0.0;
    memcpy(PyArray_DATA(env_row->start), PyArray_BYTES(host->starts) + row * size, (size_t)size);
    return take_reset(host, env_row, row, PyObject_CallMethodNoArgs(env_row->env, reset_name));
}

static int
step_row(const HostState *host, PyObject *tuple, PyObject *action)
{
    EnvRow env_row;
    Py_ssize_t row;
    if (read_env_row(tuple, host, &env_row, &row) < 0) {
        return -1;
    }
    char state = PyByteArray_AS_STRING(host->states)[row];
    if (state == RUNNING) {
        return step_running(host, &env_row, row, action);
    }
    if (state == ENDED && PyByteArray_AS_STRING(host->ready)[row]) {
        return reset_ended(host, &env_row, row);
    }
    if (write_status(host, env_row.stepping) < 0) {
        return -1;
    }
    PyObject *done = PyObject_CallOneArg(host->unusual, env_row.row);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
step_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *lines, *actions;
    HostState host;
    if (!PyArg_ParseTuple(args, "O!O!O!OOOOO", &PyTuple_Type, &tuple, &PyList_Type, &lines,
                          &PyList_Type, &actions, &host.take, &host.take_reset, &host.unusual,
                          &host.fail, &host.keep_start) ||
        read_host_state(tuple, &host) < 0) {
        return NULL;
    }
    if (PyList_GET_SIZE(actions) != PyList_GET_SIZE(lines)) {
        return PyErr_Format(PyExc_ValueError, "%zd actions for %zd rows",
                            PyList_GET_SIZE(actions), PyList_GET_SIZE(lines));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lines) && i < PyList_GET_SIZE(actions); i++) {
        /* own references: an environment may change the lists */
        PyObject *env_row = Py_NewRef(PyList_GET_ITEM(lines, i));
        PyObject *action = Py_NewRef(PyList_GET_ITEM(actions, i));
        int status = step_row(&host, env_row, action);
        Py_DECREF(action);
        Py_DECREF(env_row);
        if (status < 0 || PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* A PCG64 in memory where compilers have 128-bit integers; rng.py checks that this is right. */
typedef struct {
    struct {
        unsigned char state[16], increment[16];
    } *numbers;
    int has_uint32;
    npy_uint32 uinteger;
} Pcg64;

enum { STATE = 2, START_BYTES = 48 }; /* as in rng.py */

static PyObject *
keep_pcg64(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    PyArrayObject *cell;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyArray_Type, &cell) ||
        !is_array(cell, NPY_UINT8, 1, START_BYTES)) {
        return NULL;
    }
    bitgen_t *bits = PyCapsule_GetPointer(capsule, "BitGenerator");
    if (bits == NULL) {
        return NULL;
    }
    const Pcg64 *from = bits->state;
    npy_uint32 has_uint32 = (npy_uint32)from->has_uint32;
    char *to = PyArray_DATA(cell);
    memset(to, 0, 8);
    to[0] = STATE;
    memcpy(to + 8, from->numbers->state, 16);
    memcpy(to + 24, from->numbers->increment, 16);
    memcpy(to + 40, &has_uint32, 4);
    memcpy(to + 44, &from->uinteger, 4);
    Py_RETURN_NONE;
}

/* ---- the parent: results out of shared memory, actions into it ---------------------------- */

/* Of a contiguous array; the stride of a dimension of one may be anything. */
static npy_intp
row_nbytes(PyArrayObject *array)
{
    npy_intp count = PyArray_DIM(array, 0);
    return count ? PyArray_NBYTES(array) / count : 0;
}

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
        npy_intp row = row_nbytes(column);
        memcpy(PyArray_DATA((PyArrayObject *)copy), PyArray_BYTES(column) + first * row,
               (size_t)(count * row));
    }
    return (PyArrayObject *)copy;
}

/* One row of an array, in memory of its own; a scalar, if rows have no dimensions. */
static PyObject *
copied_row(PyArrayObject *column, npy_intp row)
{
    PyArray_Descr *descr = PyArray_DESCR(column);
    Py_INCREF(descr);
    PyObject *copy = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(column) - 1,
                                          PyArray_DIMS(column) + 1, NULL, NULL, 0, NULL);
    if (copy != NULL) {
        npy_intp size = row_nbytes(column);
        memcpy(PyArray_DATA((PyArrayObject *)copy), PyArray_BYTES(column) + row * size,
               (size_t)size);
    }
    return PyArray_Return((PyArrayObject *)copy);
}

/* Which rows are ends, at which positions, and copies of their rows of `finals`. */
static PyObject *
ended_rows(PyArrayObject *finals, const npy_bool *ends, const npy_bool *cuts, npy_intp first,
           npy_intp count)
{
    npy_intp dims[1] = {count};
    PyObject *ended = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *lasts = PyArray_ZEROS(1, dims, NPY_OBJECT, 0), *positions = PyList_New(0);
    if (ended == NULL || positions == NULL || lasts == NULL) {
        goto failed;
    }
    npy_bool *is_end = PyArray_DATA((PyArrayObject *)ended);
    PyObject **last = PyArray_DATA((PyArrayObject *)lasts);
    for (npy_intp i = 0; i < count; i++) {
        is_end[i] = ends[i] | cuts[i];
        if (!is_end[i]) {
            Py_XSETREF(last[i], Py_NewRef(Py_None));
            continue;
        }
        PyObject *position = PyLong_FromSsize_t(i), *row = copied_row(finals, first + i);
        int is_kept = position != NULL && row != NULL && PyList_Append(positions, position) == 0;
        Py_XDECREF(position);
        Py_XSETREF(last[i], row);
        if (!is_kept) {
            goto failed;
        }
    }
    return Py_BuildValue("(NNN)", ended, positions, lasts);
failed:
    Py_XDECREF(ended);
    Py_XDECREF(positions);
    Py_XDECREF(lasts);
    return NULL;
}

/* Whether an object is an array of bytes in order that has a row for each slot. */
static int
has_rows(PyObject *object, npy_intp slots)
{
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_CheckExact(object) && PyArray_NDIM(array) >= 1 &&
           PyArray_DIM(array, 0) == slots && PyArray_ISCARRAY(array) &&
           !PyDataType_REFCHK(PyArray_DESCR(array));
}

static PyObject *
copy_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *rewards, *flags;
    PyObject *obs, *finals;
    Py_ssize_t first, end;
    if (!PyArg_ParseTuple(args, "OOO!O!nn", &obs, &finals, &PyArray_Type, &rewards, &PyArray_Type,
                          &flags, &first, &end)) {
        return NULL;
    }
    if (!is_array(rewards, NPY_DOUBLE, 1, 0) || !is_array(flags, NPY_BOOL, 2, 0)) {
        return NULL;
    }
    npy_intp count = end - first, slots = PyArray_DIM(rewards, 0);
    if (PyArray_DIM(flags, 0) != 3 || PyArray_DIM(flags, 1) != slots ||
        (obs != Py_None && !has_rows(obs, slots)) ||
        (finals != Py_None && !has_rows(finals, slots))) {
        PyErr_SetString(PyExc_TypeError, "all arrays must have a row for each slot, in order");
        return NULL;
    }
    if (first < 0 || count < 0 || end > slots) {
        return PyErr_Format(PyExc_IndexError, "rows %zd:%zd are not within 0:%zd", first, end,
                            (Py_ssize_t)slots);
    }
    npy_intp dims[1] = {count};
    PyObject *ended = NULL;
    PyObject *terminated = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *truncated = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *valid = PyArray_SimpleNew(1, dims, NPY_BOOL);
    PyObject *earned = (PyObject *)copied(rewards, first, count);
    PyObject *seen = obs == Py_None ? Py_NewRef(obs)
                                    : (PyObject *)copied((PyArrayObject *)obs, first, count);
    if (terminated == NULL || truncated == NULL || valid == NULL || earned == NULL ||
        seen == NULL) {
        goto failed;
    }
    const npy_bool *ends = (npy_bool *)PyArray_DATA(flags) + first;
    const npy_bool *cuts = ends + slots, *invalid = cuts + slots;
    npy_bool *is_valid = PyArray_DATA((PyArrayObject *)valid), is_any_end = 0, special = 0;
    memcpy(PyArray_DATA((PyArrayObject *)terminated), ends, (size_t)count);
    memcpy(PyArray_DATA((PyArrayObject *)truncated), cuts, (size_t)count);
    for (npy_intp i = 0; i < count; i++) {
        is_valid[i] = !invalid[i];
        is_any_end |= ends[i] | cuts[i];
        special |= invalid[i];
    }
    ended = is_any_end && finals != Py_None
                ? ended_rows((PyArrayObject *)finals, ends, cuts, first, count)
                : Py_NewRef(Py_None);
    if (ended == NULL) {
        goto failed;
    }
    return Py_BuildValue("(NNNNNON)", seen, earned, terminated, truncated, valid,
                         special | is_any_end ? Py_True : Py_False, ended);
failed:
    Py_XDECREF(terminated);
    Py_XDECREF(truncated);
    Py_XDECREF(valid);
    Py_XDECREF(earned);
    Py_XDECREF(seen);
    return NULL;
}

/* From [item, row] to [row, item]; the columns are read side by side, a few at a time. */
#define TURN(type)                                                                              \
    for (npy_intp c = 0; c < width; c += 4) {                                                   \
        npy_intp some = width - c < 4 ? width - c : 4;                                          \
        const type *from = (const type *)source + c * rows;                                     \
        type *to = (type *)target + c;                                                          \
        if (some == 4) {                                                                        \
            for (npy_intp r = 0; r < rows; r++, to += width) {                                  \
                to[0] = from[r];                                                                \
                to[1] = from[r + rows];                                                         \
                to[2] = from[r + 2 * rows];                                                     \
                to[3] = from[r + 3 * rows];                                                     \
            }                                                                                   \
            continue;                                                                           \
        }                                                                                       \
        for (npy_intp r = 0; r < rows; r++, to += width) {                                      \
            for (npy_intp i = 0; i < some; i++) {                                               \
                to[i] = from[r + i * rows];                                                     \
            }                                                                                   \
        }                                                                                       \
    }

static void
turn(const char *source, char *target, npy_intp rows, npy_intp width, npy_intp itemsize)
{
    if (itemsize == 4) {
        TURN(npy_uint32)
    }
    else {
        TURN(npy_uint64)
    }
}

/* Whether it lies column by column, in items that can be turned. */
static int
is_turned(PyArrayObject *batch)
{
    npy_intp itemsize = PyArray_ITEMSIZE(batch);
    return PyArray_NDIM(batch) == 2 && PyArray_IS_F_CONTIGUOUS(batch) &&
           PyArray_ISALIGNED(batch) && (itemsize == 4 || itemsize == 8);
}

static PyObject *
put_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *column, *batch;
    PyObject *values;
    Py_ssize_t first, end;
    if (!PyArg_ParseTuple(args, "O!nnO", &PyArray_Type, &column, &first, &end, &values)) {
        return NULL;
    }
    if (!PyArray_ISCARRAY(column) || PyArray_NDIM(column) < 1 ||
        PyDataType_REFCHK(PyArray_DESCR(column))) {
        PyErr_SetString(PyExc_TypeError, "a column must be writable, contiguous and of bytes");
        return NULL;
    }
    npy_intp count = end - first;
    if (first < 0 || count < 0 || end > PyArray_DIM(column, 0)) {
        return PyErr_Format(PyExc_IndexError, "rows %zd:%zd are not within 0:%zd", first, end,
                            (Py_ssize_t)PyArray_DIM(column, 0));
    }
    batch = (PyArrayObject *)values;
    int ndim = PyArray_NDIM(column);
    if (!PyArray_CheckExact(values) || PyArray_NDIM(batch) != ndim ||
        PyArray_DIM(batch, 0) != count || !(PyArray_ISCARRAY_RO(batch) || is_turned(batch)) ||
        !PyArray_CompareLists(PyArray_DIMS(batch) + 1, PyArray_DIMS(column) + 1, ndim - 1) ||
        !PyArray_EquivTypes(PyArray_DESCR(batch), PyArray_DESCR(column))) {
        Py_RETURN_FALSE;
    }
    char *target = PyArray_BYTES(column) + first * row_nbytes(column);
    if (PyArray_ISCARRAY_RO(batch)) {
        memcpy(target, PyArray_DATA(batch), (size_t)PyArray_NBYTES(batch));
    }
    else {
        turn(PyArray_DATA(batch), target, count, PyArray_DIM(batch, 1), PyArray_ITEMSIZE(batch));
    }
    Py_RETURN_TRUE;
}

static PyObject *
note_ends(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *flags, *ended, *starts;
    Py_ssize_t first, end;
    long long now;
    int is_same_step;
    if (!PyArg_ParseTuple(args, "O!O!O!nnLp", &PyArray_Type, &flags, &PyArray_Type, &ended,
                          &PyArray_Type, &starts, &first, &end, &now, &is_same_step) ||
        !is_array(flags, NPY_BOOL, 2, 0) || !is_array(ended, NPY_BOOL, 1, 0)) {
        return NULL;
    }
    npy_intp slots = PyArray_DIM(ended, 0);
    if (PyArray_DIM(flags, 0) != 3 || PyArray_DIM(flags, 1) != slots ||
        !is_array(starts, NPY_INT64, 1, slots)) {
        PyErr_SetString(PyExc_TypeError, "all arrays must have an item for each slot");
        return NULL;
    }
    if (first < 0 || end < first || end > slots) {
        return PyErr_Format(PyExc_IndexError, "rows %zd:%zd are not within 0:%zd", first, end,
                            (Py_ssize_t)slots);
    }
    npy_bool *ends = PyArray_DATA(flags), *cuts = ends + slots, *invalid = cuts + slots;
    npy_bool *has_ended = PyArray_DATA(ended);
    npy_int64 *start = PyArray_DATA(starts);
    for (npy_intp i = first; i < end; i++) {
        has_ended[i] = ends[i] | cuts[i];
        if (is_same_step ? has_ended[i] : invalid[i] && !has_ended[i]) {
            start[i] = now;
        }
        if (is_same_step) {
            ends[i] = cuts[i] = 0;
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

/* ---- the parent: plain steps of whole workers ------------------------------------------------ */

enum { HAS_REPLY = 2 }; /* as in rows_python.py */
enum { NOTHING, POSTED, DONE, DONE_WITH_REPLY }; /* the states in rows_python.py */

/* WorkerPort of rows_python.py; all references are borrowed. */
typedef struct {
    volatile npy_uint64 *ring; /* entries of request, operation, flags */
    npy_uint64 size;
    volatile npy_uint64 *hint;
    npy_uint64 *posted, *rung, *taken;
    int commands, done;
    Py_ssize_t num_slots;
    char *state;
} Port;

static int
read_port(PyObject *ports, PyObject *states, Py_ssize_t worker, Port *port)
{
    PyArrayObject *ring, *words, *counts;
    if (worker < 0 || worker >= PyList_GET_SIZE(ports)) {
        PyErr_SetString(PyExc_IndexError, "there is no such worker");
        return -1;
    }
    PyObject *tuple = PyList_GET_ITEM(ports, worker);
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a port is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "O!O!O!iin", &PyArray_Type, &ring,
                          &PyArray_Type, &words, &PyArray_Type, &counts, &port->commands,
                          &port->done, &port->num_slots) ||
        !is_array(ring, NPY_UINT64, 1, 3) || !is_array(words, NPY_UINT64, 1, 1) ||
        !is_array(counts, NPY_UINT64, 1, 3)) {
        return -1;
    }
    port->ring = PyArray_DATA(ring);
    port->size = (npy_uint64)PyArray_DIM(ring, 0) / 3;
    port->hint = PyArray_DATA(words);
    port->posted = PyArray_DATA(counts);
    port->rung = port->posted + 1;
    port->taken = port->posted + 2;
    port->state = PyByteArray_AS_STRING(states) + worker;
    return 0;
}

static int
read_ports(PyObject *all, PyObject *states, PyObject *workers, Port *ports)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(workers); i++) {
        Py_ssize_t worker = PyLong_AsSsize_t(PyTuple_GET_ITEM(workers, i));
        if ((worker == -1 && PyErr_Occurred()) || read_port(all, states, worker, &ports[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
are_as_many(PyObject *ports, PyObject *states)
{
    if (PyByteArray_GET_SIZE(states) == PyList_GET_SIZE(ports)) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "there must be one state for each port");
    return 0;
}

/* Ring a worker's bell for commands: a descriptor, or the count on which it sleeps. */
static void
ring(Port *port)
{
#ifdef SYS_futex
    if (port->commands < 0) {
        syscall(SYS_futex, (char *)port->hint + LOW_HALF, FUTEX_WAKE, 1, NULL, NULL, 0);
        return;
    }
#endif
    npy_uint64 once = 1;
    ssize_t written = write(port->commands, &once, sizeof once);
    (void)written; /* this counter is never full, and the wait hears of a worker's end */
}

static PyObject *
post_steps(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *ports, *states, *workers;
    unsigned long long request, operation, flags;
    if (!PyArg_ParseTuple(args, "O!O!O!KKK", &PyList_Type, &ports, &PyByteArray_Type, &states,
                          &PyTuple_Type, &workers, &request, &operation, &flags) ||
        !are_as_many(ports, states)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(workers);
    Port *chosen = PyMem_Malloc(sizeof(Port) * (size_t)(count + 1));
    if (chosen == NULL) {
        return PyErr_NoMemory();
    }
    if (read_ports(ports, states, workers, chosen) < 0) {
        PyMem_Free(chosen);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (*chosen[i].state != NOTHING || *chosen[i].posted != *chosen[i].taken) {
            PyMem_Free(chosen);
            return PyErr_Format(PyExc_ValueError, "worker %R has something else to do",
                                PyTuple_GET_ITEM(workers, i));
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Port *port = &chosen[i];
        volatile npy_uint64 *entry = port->ring + *port->posted % port->size * 3;
        entry[0] = request;
        entry[1] = operation;
        entry[2] = flags;
        *port->posted += 1;
        __atomic_store_n(port->hint, *port->posted, __ATOMIC_RELEASE); /* after its entry */
        *port->state = POSTED;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        ring(&chosen[i]);
    }
    PyMem_Free(chosen);
    Py_RETURN_NONE;
}

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void
take_bell(Port *port)
{
    npy_uint64 count;
    if (read(port->done, &count, sizeof count) == (ssize_t)sizeof count) {
        npy_uint64 flags = port->ring[*port->rung % port->size * 3 + 2];
        *port->rung += count;
        *port->state = flags & HAS_REPLY ? DONE_WITH_REPLY : DONE;
    }
}

/* Wait for enough; 1 if it is there, 0 if there is other news or no time left, -1 for a signal. */
static int
wait_for(Port *ports, struct pollfd *watched, Py_ssize_t count, Py_ssize_t wanted, int urgent,
         double spin_until_s, double give_up_s)
{
    for (;;) {
        Py_ssize_t done = 0, coming = 0, last = -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (*ports[i].state == POSTED) {
                take_bell(&ports[i]);
            }
            if (*ports[i].state == DONE_WITH_REPLY) {
                return 0;
            }
            if (*ports[i].state == DONE) {
                done += ports[i].num_slots;
            }
            else if (*ports[i].state == POSTED) {
                coming += ports[i].num_slots;
                last = i;
            }
        }
        if (last < 0) {
            return 1;
        }
        if (done >= wanted) {
            /* the workers that are done must not hide one that has ended */
            struct pollfd end = {urgent, POLLIN, 0};
            return poll(&end, 1, 0) == 0;
        }
        double now_s = seconds_now(), left_s = give_up_s - now_s;
        if (left_s <= 0) {
            return 0;
        }
        if (now_s < spin_until_s) {
            continue;
        }
        /* if all are needed, sleep until the last is done instead of being woken by each */
        int needs_all = done + coming - ports[last].num_slots < wanted;
        nfds_t size = 0;
        watched[size++] = (struct pollfd){urgent, POLLIN, 0};
        for (Py_ssize_t i = needs_all ? last : 0; i < count; i++) {
            if (*ports[i].state == POSTED) {
                watched[size++] = (struct pollfd){ports[i].done, POLLIN, 0};
            }
        }
        int found = poll(watched, size, (int)(left_s * 1e3) + 1);
        if (found < 0 && errno == EINTR) {
            return -1;
        }
        if (found < 0 || watched[0].revents) {
            return 0;
        }
    }
}

/* The numbers of the workers that are done, which have nothing under way then. */
static PyObject *
collected(Port *ports, PyObject *workers)
{
    Py_ssize_t size = 0, count = PyTuple_GET_SIZE(workers);
    for (Py_ssize_t i = 0; i < count; i++) {
        size += *ports[i].state == DONE;
    }
    PyObject *found = PyTuple_New(size);
    for (Py_ssize_t i = 0, at = 0; found != NULL && i < count; i++) {
        if (*ports[i].state == DONE) {
            PyTuple_SET_ITEM(found, at++, Py_NewRef(PyTuple_GET_ITEM(workers, i)));
        }
    }
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        if (*ports[i].state == DONE) {
            *ports[i].taken += 1;
            *ports[i].state = NOTHING;
        }
    }
    return found;
}

static PyObject *
collect_steps(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *all, *states, *workers, *found = NULL;
    Py_ssize_t wanted;
    int urgent, status = 0;
    double limit_s, spin_s;
    if (!PyArg_ParseTuple(args, "O!O!O!nidd", &PyList_Type, &all, &PyByteArray_Type, &states,
                          &PyTuple_Type, &workers, &wanted, &urgent, &limit_s, &spin_s) ||
        !are_as_many(all, states)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(workers);
    Port *ports = PyMem_Malloc(sizeof(Port) * (size_t)(count + 1));
    struct pollfd *watched = PyMem_Malloc(sizeof(struct pollfd) * (size_t)(count + 1));
    if (ports == NULL || watched == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    if (read_ports(all, states, workers, ports) < 0) {
        goto end;
    }
    double now_s = seconds_now(), give_up_s = now_s + limit_s, spin_until_s = now_s + spin_s;
    do {
        Py_BEGIN_ALLOW_THREADS
        status = wait_for(ports, watched, count, wanted, urgent, spin_until_s, give_up_s);
        Py_END_ALLOW_THREADS
    } while (status < 0 && PyErr_CheckSignals() == 0);
    if (status > 0) {
        found = collected(ports, workers);
    }
    else if (status == 0) {
        found = Py_NewRef(Py_None);
    } /* else NULL: a signal handler raised */
end:
    PyMem_Free(ports);
    PyMem_Free(watched);
    return found;
}

/* Sleep until the first of a worker's words is not what it was; what it is then. */
static PyObject *
wait_for_count(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *words;
    unsigned long long before;
    if (!PyArg_ParseTuple(args, "O!K", &PyArray_Type, &words, &before) ||
        !is_array(words, NPY_UINT64, 1, 1)) {
        return NULL;
    }
    npy_uint64 *word = PyArray_DATA(words), now;
    while ((now = __atomic_load_n(word, __ATOMIC_ACQUIRE)) == before) {
#ifdef SYS_futex
        Py_BEGIN_ALLOW_THREADS
        syscall(SYS_futex, (char *)word + LOW_HALF, FUTEX_WAIT, (npy_uint32)before, NULL, NULL, 0);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
#else
        PyErr_SetString(PyExc_NotImplementedError, "there are no futexes here");
        return NULL;
#endif
    }
    return PyLong_FromUnsignedLongLong(now);
}

static PyMethodDef methods[] = {
    {"step_rows", step_rows, METH_VARARGS, NULL},
    {"keep_pcg64", keep_pcg64, METH_VARARGS, NULL},
    {"copy_rows", copy_rows, METH_VARARGS, NULL},
    {"put_rows", put_rows, METH_VARARGS, NULL},
    {"note_ends", note_ends, METH_VARARGS, NULL},
    {"common_number", common_number, METH_VARARGS, NULL},
    {"post_steps", post_steps, METH_VARARGS, NULL},
    {"collect_steps", collect_steps, METH_VARARGS, NULL},
    {"wait_for_count", wait_for_count, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit__rows(void)
{
    import_array();
    step_name = PyUnicode_InternFromString("step");
    reset_name = PyUnicode_InternFromString("reset");
    if (step_name == NULL || reset_name == NULL) {
        return NULL;
    }
    return PyModule_Create(&module);
}
