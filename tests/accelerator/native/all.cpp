// One translation unit: PyTorch's headers, which take nearly all of the time, are compiled once.
#include "memory.cpp"
#include "order.cpp"
#include "torch_autocast.cpp"
#include "torch_hooks.cpp"
#include "torch_library.cpp"
#include "torch_memory.cpp"
#include "torch_ops.cpp"
#include "torch_streams.cpp"
