"""Made-up worlds: what tests put in the place of models, devices, daemons and other servers.

- `daemon_parts`: the daemon as its API sees it, and other parts of it
- `router_world`: a router over fake workers, with a clock; random walks
- `fake_workers`: workers that compute nothing and keep tokens for KV
- `tiers`, `tiered_world`: tiers below the pools, on disks that do what a test says
- `worker_loop`: a worker's loop over a real channel, stepped by hand
- `computing_world`: a router over real workers' loops in one process
- `accelerator`, `accelerated_worker`, `accelerated`: a GPU, a worker on it, a machine of them
- `simulated_worker`: the worker of the sweep, on virtual time
- `fake_daemon`: HTTP on a Unix socket that answers what a test puts into it
- `fake_openai`: a server that the load generator measures
- `scripted_model`: a model that says what a script has, for clients' own programs
- `hub_server`: a hub of models
- `dynamo_cluster`: a cluster of NVIDIA Dynamo
"""
