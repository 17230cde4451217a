"""C++ kernels behind a plain C ABI: built on first use, loaded with ctypes (which releases the GIL), replaceable by
torch operators."""
