"""The adapter that makes an appliance a worker of NVIDIA Dynamo: a process beside the daemon."""
