"""Load the compiled CPU kernels, and describe the GPU's attention backends and kernel costs."""
