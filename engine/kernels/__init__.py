"""CPU kernels in C, and the door to them."""
