/* Acting by a small network: layers, and a draw among choices or around a mean, in one call.

   Rows are taken eight at a time and turned, so that what happens to all eight is one operation on
   `Lanes`; compilers make of that what the processor has. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

enum { WIDTH = 8, TOGETHER = 4 };
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef npy_int32 Whole __attribute__((vector_size(4 * WIDTH)));

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_THIS_PROCESSOR __attribute__((target_clones("arch=haswell", "default")))
#else
#define FOR_THIS_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *weight, *bias;
    npy_intp in, out;
} Layer;

typedef struct {
    const Layer *layers;
    npy_intp num_layers;
    int is_tanh;
    const float *obs, *noise, *deviations;
    void *actions;
    const float *low, *high;
    float *fitted; /* the actions within these bounds, if there are any */
    npy_intp num_rows;
} Task;

/* (e^2x - 1) / (e^2x + 1), to a unit in the seventh digit of 1. */
INLINE void
bend_by_tanh(Lanes *value)
{
    Lanes x = *value;
    const Lanes zero = {0};
    const Lanes high = zero + 9.0f, low = zero - 9.0f; /* beyond, it is 1 in these digits */
    Whole is_high = x > high, is_low = x < low;
    x = (Lanes)(((Whole)x & ~is_high) | ((Whole)high & is_high));
    x = (Lanes)(((Whole)x & ~is_low) | ((Whole)low & is_low));
    Lanes power = x * 2.8853900817779268f; /* 2 / ln 2 */
    const float to_whole = 12582912.0f;    /* adding it leaves no room for a fraction */
    Lanes nearest = (power + to_whole) - to_whole;
    Lanes rest = (power - nearest) * 0.6931471805599453f;
    Lanes grown = 1.0f / 720 + zero;
    grown = grown * rest + 1.0f / 120;
    grown = grown * rest + 1.0f / 24;
    grown = grown * rest + 1.0f / 6;
    grown = grown * rest + 0.5f;
    grown = grown * rest + 1.0f;
    grown = grown * rest + 1.0f;
    Whole exponent = __builtin_convertvector(nearest, Whole);
    grown = grown * (Lanes)((exponent + 127) << 23);
    Lanes bent = (grown - 1.0f) / (grown + 1.0f);
    Whole is_nan = *value != *value;
    *value = (Lanes)(((Whole)bent & ~is_nan) | ((Whole)*value & is_nan));
}

INLINE void
bend_by_relu(Lanes *value)
{
    const Lanes zero = {0};
    Whole is_below = *value < zero;
    *value = (Lanes)((Whole)*value & ~is_below);
}

INLINE void
through(const Layer *layer, const Lanes *taken_in, Lanes *given)
{
    npy_intp in = layer->in, out = layer->out, o = 0;
    for (; o + TOGETHER <= out; o += TOGETHER) {
        const float *w = layer->weight + o * in;
        Lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (npy_intp i = 0; i < in; i++) {
            Lanes x = taken_in[i];
            a += x * w[i];
            b += x * w[i + in];
            c += x * w[i + 2 * in];
            d += x * w[i + 3 * in];
        }
        given[o] = a + layer->bias[o];
        given[o + 1] = b + layer->bias[o + 1];
        given[o + 2] = c + layer->bias[o + 2];
        given[o + 3] = d + layer->bias[o + 3];
    }
    for (; o < out; o++) {
        Lanes sum = {0};
        for (npy_intp i = 0; i < in; i++) {
            sum += taken_in[i] * layer->weight[o * in + i];
        }
        given[o] = sum + layer->bias[o];
    }
}

INLINE void
fit(const Task *task, const float *action, float *fitted, npy_intp size)
{
    for (npy_intp o = 0; o < size; o++) {
        float risen = action[o] < task->low[o] ? task->low[o] : action[o];
        fitted[o] = risen > task->high[o] ? task->high[o] : risen;
    }
}

FOR_THIS_PROCESSOR static void
carry_out(const Task *task, Lanes *here, Lanes *there)
{
    npy_intp width = task->layers[0].in, size = task->layers[task->num_layers - 1].out;
    for (npy_intp first = 0; first < task->num_rows; first += WIDTH) {
        npy_intp count = task->num_rows - first < WIDTH ? task->num_rows - first : WIDTH;
        for (npy_intp i = 0; i < width; i++) {
            Lanes turned = {0};
            for (npy_intp row = 0; row < count; row++) {
                turned[row] = task->obs[(first + row) * width + i];
            }
            here[i] = turned;
        }
        for (npy_intp l = 0; l < task->num_layers; l++) {
            const Layer *layer = &task->layers[l];
            through(layer, here, there);
            if (l + 1 < task->num_layers) {
                for (npy_intp o = 0; o < layer->out; o++) {
                    task->is_tanh ? bend_by_tanh(&there[o]) : bend_by_relu(&there[o]);
                }
            }
            Lanes *other = here;
            here = there;
            there = other;
        }
        for (npy_intp row = 0; row < count; row++) {
            const float *noise = task->noise + (first + row) * size;
            if (task->deviations != NULL) {
                float *action = (float *)task->actions + (first + row) * size;
                for (npy_intp o = 0; o < size; o++) {
                    action[o] = here[o][row] + task->deviations[o] * noise[o];
                }
                if (task->fitted != NULL) {
                    fit(task, action, task->fitted + (first + row) * size, size);
                }
                continue;
            }
            npy_intp best = 0;
            for (npy_intp o = 1; o < size; o++) {
                if (here[o][row] + noise[o] > here[best][row] + noise[best]) {
                    best = o;
                }
            }
            ((npy_int64 *)task->actions)[first + row] = best;
        }
    }
}

static int
is_plain(PyArrayObject *array, int type, int ndim)
{
    if (PyArray_TYPE(array) == type && PyArray_NDIM(array) == ndim && PyArray_ISCARRAY_RO(array)) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "an array is of the wrong kind");
    return 0;
}

/* Weights and biases in turn; every layer takes what the one before gives. */
static int
read_layers(PyObject *given, Layer *layers, npy_intp width)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given) / 2; i++) {
        PyObject *pair[] = {PyTuple_GET_ITEM(given, 2 * i), PyTuple_GET_ITEM(given, 2 * i + 1)};
        if (!PyArray_Check(pair[0]) || !PyArray_Check(pair[1])) {
            PyErr_SetString(PyExc_TypeError, "weights and biases are arrays");
            return -1;
        }
        PyArrayObject *weight = (PyArrayObject *)pair[0], *bias = (PyArrayObject *)pair[1];
        if (!is_plain(weight, NPY_FLOAT32, 2) || !is_plain(bias, NPY_FLOAT32, 1)) {
            return -1;
        }
        layers[i] = (Layer){PyArray_DATA(weight), PyArray_DATA(bias), PyArray_DIM(weight, 1),
                            PyArray_DIM(weight, 0)};
        if (layers[i].in != width || PyArray_DIM(bias, 0) != layers[i].out) {
            PyErr_SetString(PyExc_ValueError, "the layers do not fit each other");
            return -1;
        }
        width = layers[i].out;
    }
    return 0;
}

static int
fits(PyArrayObject *noise, PyObject *deviations, PyArrayObject *actions, npy_intp rows,
     npy_intp size)
{
    int is_choice = deviations == Py_None;
    if (!is_plain(noise, NPY_FLOAT32, 2) ||
        !is_plain(actions, is_choice ? NPY_INT64 : NPY_FLOAT32, is_choice ? 1 : 2)) {
        return 0;
    }
    int is_right = PyArray_DIM(noise, 0) == rows && PyArray_DIM(noise, 1) == size && size > 0 &&
                   PyArray_DIM(actions, 0) == rows && PyArray_ISWRITEABLE(actions);
    if (!is_choice) {
        if (!PyArray_Check(deviations) ||
            !is_plain((PyArrayObject *)deviations, NPY_FLOAT32, 1)) {
            PyErr_SetString(PyExc_ValueError, "deviations are an array, or None for choices");
            return 0;
        }
        is_right = is_right && PyArray_DIM(actions, 1) == size &&
                   PyArray_DIM((PyArrayObject *)deviations, 0) == size;
    }
    if (!is_right) {
        PyErr_SetString(PyExc_ValueError, "observations, noise and actions do not fit each other");
    }
    return is_right;
}

/* Low, high and where the actions within go; None where there are no bounds. */
static int
read_bounds(PyObject *bounds, PyArrayObject *actions, Task *task)
{
    PyArrayObject *low, *high, *fitted;
    if (bounds == Py_None) {
        return 0;
    }
    if (task->deviations == NULL || !PyTuple_Check(bounds)) {
        PyErr_SetString(PyExc_ValueError, "bounds are a tuple, and only for numbers");
        return -1;
    }
    if (!PyArg_ParseTuple(bounds, "O!O!O!", &PyArray_Type, &low, &PyArray_Type, &high,
                          &PyArray_Type, &fitted) ||
        !is_plain(low, NPY_FLOAT32, 1) || !is_plain(high, NPY_FLOAT32, 1) ||
        !is_plain(fitted, NPY_FLOAT32, 2)) {
        return -1;
    }
    npy_intp size = PyArray_DIM(actions, 1);
    if (PyArray_DIM(low, 0) != size || PyArray_DIM(high, 0) != size ||
        PyArray_DIM(fitted, 0) != PyArray_DIM(actions, 0) || PyArray_DIM(fitted, 1) != size ||
        !PyArray_ISWRITEABLE(fitted)) {
        PyErr_SetString(PyExc_ValueError, "the bounds do not fit the actions");
        return -1;
    }
    task->low = PyArray_DATA(low);
    task->high = PyArray_DATA(high);
    task->fitted = PyArray_DATA(fitted);
    return 0;
}

static PyObject *
act(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *obs, *noise, *actions;
    PyObject *given, *deviations, *bounds;
    int is_tanh;
    if (!PyArg_ParseTuple(args, "O!pO!O!OO!O", &PyTuple_Type, &given, &is_tanh, &PyArray_Type,
                          &obs, &PyArray_Type, &noise, &deviations, &PyArray_Type, &actions,
                          &bounds) ||
        !is_plain(obs, NPY_FLOAT32, 2)) {
        return NULL;
    }
    npy_intp num_layers = PyTuple_GET_SIZE(given) / 2, widest = PyArray_DIM(obs, 1);
    if (num_layers == 0 || PyTuple_GET_SIZE(given) % 2) {
        PyErr_SetString(PyExc_ValueError, "layers are weights and biases in turn, at least one");
        return NULL;
    }
    Layer *layers = PyMem_Malloc(sizeof(Layer) * (size_t)num_layers);
    void *memory = NULL;
    PyObject *result = NULL;
    if (layers == NULL) {
        return PyErr_NoMemory();
    }
    if (read_layers(given, layers, widest) < 0 ||
        !fits(noise, deviations, actions, PyArray_DIM(obs, 0), layers[num_layers - 1].out)) {
        goto done;
    }
    for (npy_intp i = 0; i < num_layers; i++) {
        widest = layers[i].out > widest ? layers[i].out : widest;
    }
    memory = PyMem_Malloc(sizeof(Lanes) * (size_t)(2 * widest + 1));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Lanes *aligned = (Lanes *)(((npy_uintp)memory + sizeof(Lanes) - 1) & ~(sizeof(Lanes) - 1));
    Task task = {
        .layers = layers,
        .num_layers = num_layers,
        .is_tanh = is_tanh,
        .obs = PyArray_DATA(obs),
        .noise = PyArray_DATA(noise),
        .deviations = deviations == Py_None ? NULL : PyArray_DATA((PyArrayObject *)deviations),
        .actions = PyArray_DATA(actions),
        .num_rows = PyArray_DIM(obs, 0),
    };
    if (read_bounds(bounds, actions, &task) < 0) {
        goto done;
    }
    carry_out(&task, aligned, aligned + widest);
    result = Py_NewRef(Py_None);
done:
    PyMem_Free(memory);
    PyMem_Free(layers);
    return result;
}

static PyMethodDef methods[] = {
    {"act", act, METH_VARARGS, "Actions for rows of observations."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_act", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit__act(void)
{
    import_array();
    return PyModule_Create(&module);
}
