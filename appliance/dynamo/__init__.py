"""Make an appliance a worker of NVIDIA Dynamo, in a process beside the daemon."""
