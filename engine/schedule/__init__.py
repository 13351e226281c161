"""Which sequence runs where, and when: the router and what it decides by."""
