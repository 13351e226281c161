"""Ask the operating system for threads, children and files of our own."""
