"""Native CPU kernels: C++ sources, compiled at first use by `build`, called through ctypes by `library`."""
