"""Makes the packages of a version, of a tree that is fit for it."""
