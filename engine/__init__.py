"""The machine: tokens, blocks, devices. Knows no HTTP, SQL, TOML or terminal."""
