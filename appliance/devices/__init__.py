"""What the machine's devices report of themselves: RAPL for CPU packages, NVML for GPUs."""
