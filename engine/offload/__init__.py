"""KV beyond the pools: blocks kept on an SSD, across restarts."""
