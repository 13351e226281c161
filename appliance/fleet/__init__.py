"""Workers: where each is put, started, watched over and replaced."""
