"""Find models by name on the hub and in its cache; estimate their memory."""
