"""Keep KV blocks below the pools, in DRAM and on an SSD, across restarts."""
