"""What this machine does: facts that were measured once, kept, and refined while idle."""
