"""What is compiled ahead of the kernels, a room's kernels a module: names, compute capabilities, and the sources with
their constants, made by the functions that launch them."""
