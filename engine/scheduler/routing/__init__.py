"""Choose the workers of each sequence, and track links, copies and lent cores between them."""
