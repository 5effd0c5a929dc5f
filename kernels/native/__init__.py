"""Native CPU kernels: C++ sources under `src`, compiled at first use by `build`, called through ctypes by `library`."""
