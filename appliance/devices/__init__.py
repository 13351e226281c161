"""Read the machine's devices: RAPL for CPU packages, NVML for GPUs."""
