"""The console: sees protocol messages and the client, nothing else."""
