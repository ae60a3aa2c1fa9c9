#include <nanobind/nanobind.h>

NB_MODULE(_cpu, module) { module.doc() = "CPU kernels of sparcel."; }
