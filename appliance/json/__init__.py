"""Read clients' JSON against declared types, and write it in safe lines."""
